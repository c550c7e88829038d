"""The whole planner through the command: kept neurons, several budgets, statistics reused, the budget really spent."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress
from planted import FFNS, random_text
from torch.nn import functional
from zoo import FAMILIES, REPRESENTATIVE, logits, tiny_model, tokens

from compressor.evaluate import speed as timing
from compressor.evaluate.budget import Budget
from compressor.evaluate.perplexity import evaluate
from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model
from compressor.models.residual import measure_stream_gain, open_stream, resume
from compressor.patch.tree import patched
from compressor.plan.api import make_planner
from compressor.plan.calibration import Calibration, Point, rank_correlation
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Candidate
from compressor.plan.moments_store import open_store
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

TEXT = random_text()


def planted_gpt2() -> Any:
    """Block 1 is a rank-5 linear map and 7 live neurons; of block 0 half of the neurons are dead, a quarter doubled."""
    model = tiny_model("gpt2", activation_function="silu", n_inner=48)
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with torch.no_grad():
        mlp = model.transformer.h[1].mlp
        linear, into = random(32, 5) / 3, random(5, 32)
        mlp.c_fc.weight.zero_()
        mlp.c_fc.bias.zero_()
        mlp.c_proj.weight.zero_()
        mlp.c_fc.weight[:, :5], mlp.c_fc.weight[:, 5:10] = linear, -linear
        mlp.c_proj.weight[:5], mlp.c_proj.weight[5:10] = into, -into
        mlp.c_fc.weight[:, 10:17], mlp.c_proj.weight[10:17] = random(32, 7), 2 * random(7, 32)
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.weight.copy_(random(*mlp.c_fc.weight.shape))
        mlp.c_proj.weight.copy_(2 * random(*mlp.c_proj.weight.shape))
        mlp.c_proj.weight[:24] = 0
        mlp.c_fc.weight[:, 24:36] = mlp.c_fc.weight[:, 36:]
        mlp.c_fc.bias.zero_()
        mlp = model.transformer.h[2].mlp
        mlp.c_fc.weight.copy_(3 * random(*mlp.c_fc.weight.shape))
        mlp.c_proj.weight.copy_(3 * random(*mlp.c_proj.weight.shape))
        model.lm_head.weight.mul_(30)  # sure of what it says: a small error costs much
    return model


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_planted_is_found_and_nothing_else_is_touched(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget of next to nothing only loss-free replacements happen, and all of them."""
    if wide:
        monkeypatch.setattr("compressor.plan.candidates.WIDE_FEATURES", 0)
    model = planted_gpt2()
    before = evaluate(model, TEXT.verification.windows).perplexity
    space = prepare_search(model, TEXT, RunContext(), FFNS)
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("0.01%")}, objective="size")
    plan = planner.search()
    assert (set(plan.shapes), plan.shapes[0]) == ({0, 1}, Shape(0, 12))
    if wide:  # neurons go in one order, whatever is beside them: a loss-free form is found, if not the smallest
        assert 0 < plan.shapes[1].rank < 16
        assert plan.shapes[1].neurons < 24
    else:
        assert plan.shapes[1] == Shape(5, 7)
    found = plan.selection["text"]
    assert abs(found.delta) < 1e-4 * found.baseline
    with patched(model, planner.blocks, plan.fits):
        after = evaluate(model, TEXT.verification.windows).perplexity
    assert abs(after - before) < 1e-4 * before


def test_a_smaller_but_slower_shape_is_not_chosen_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def is_slower(_model: Any, _block: Any, replacement: Any) -> bool:
        asked.append(replacement.kind)
        return bool(replacement.kind == "hybrid")

    monkeypatch.setattr("compressor.plan.trials.is_slower", is_slower)
    model = planted_gpt2()
    space, profile = prepare_search(model, TEXT, RunContext(), FFNS), measure(model, TEXT)
    budgets = {"text": Budget.parse("0.01%")}
    plan = make_planner(space, profile, budgets, objective="speed").search()
    assert "hybrid" in asked
    assert {shape.kind for shape in plan.shapes.values()} == {"pruned"}
    asked.clear()
    assert make_planner(space, profile, budgets, objective="size").search().shapes[1].kind == "hybrid"
    assert asked == []


def test_the_clock_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on where another stopped comes to the same plan, whatever the clock says by then."""
    monkeypatch.setattr("compressor.plan.trials.is_slower", lambda *_: True)
    model, kept = planted_gpt2(), RunContext(cache=Cache(tmp_path / "cache", Progress()))
    profile, budgets = measure(model, TEXT), {"text": Budget.parse("0.01%")}
    first = make_planner(prepare_search(model, TEXT, kept, FFNS), profile, budgets).search()
    monkeypatch.setattr("compressor.plan.trials.is_slower", lambda *_: False)
    assert make_planner(prepare_search(model, TEXT, kept, FFNS), profile, budgets).search().shapes == first.shapes
    assert (
        make_planner(prepare_search(model, TEXT, RunContext(), FFNS), profile, budgets).search().shapes != first.shapes
    )


def test_slower_is_measured() -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512)
    block = find_blocks(model)[0]

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(40):
                x = functional.linear(x, torch.eye(256))
            return x

    assert timing.is_slower(model, block, Slow())  # type: ignore[arg-type]
    assert not timing.is_slower(model, block, torch.nn.Identity())  # type: ignore[arg-type]


def test_flops_count_every_matrix_once() -> None:
    model = tiny_model(
        "llama"
    )  # tied, width 32, 3 layers, 48 neurons, 2 of 4 heads for keys and values, vocabulary 300
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert timing.flops_per_token(model, 16) == 2 * (3 * (attention + 3 * 32 * 48) + 300 * 32) + 4 * 32 * 3 * 8
    untied = tiny_model("gpt_neox")
    assert timing.flops_per_token(untied, 2) == 2 * (3 * (4 * 32 * 32 + 2 * 32 * 48) + 300 * 32) + 4 * 32 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_begins_in_the_middle_ends_the_same(family: str) -> None:
    model, windows = tiny_model(family), tokens(4, 16)
    expected = evaluate(model, windows, RunContext(batch_size=2)).nats
    stream = open_stream(model, find_blocks(model), windows, 2)
    for index in (0, 1, 2):
        stream.advance(index)
        with resume(model, stream):
            torch.testing.assert_close(
                evaluate(model, windows, RunContext(batch_size=2)).nats, expected, rtol=1e-5, atol=1e-5
            )
    before = logits(model)
    assert torch.equal(logits(model), before)
    assert all("forward" not in vars(layer) for layer in stream.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_is_made_up_for_where_the_block_is_added_to_it(family: str, dtype: torch.dtype) -> None:
    """Behind a norm, fitting in order can only copy the block."""
    model = tiny_model(family, **({"residual_multiplier": 0.22} if family == "granite" else {})).to(dtype)
    blocks = find_blocks(model)
    stream = open_stream(model, blocks, TEXT.held_out[:4], 4)
    normed = family in ("gemma2", "gemma3", "gemma3-vision", "glm4", "olmo2", "opt-350m")
    for block in blocks:
        stream.advance(block.index)
        gain = measure_stream_gain(model, block, stream)
        if normed:
            assert gain is None
        else:
            assert gain == pytest.approx(0.22 if family == "granite" else 1.0, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_stream_of_the_built_in_model_is_made_up_for_in_any_precision(dtype: str) -> None:
    model, _ = load_model("demo", dtype=dtype)
    blocks = find_blocks(model)
    stream = open_stream(model, blocks, torch.arange(2 * 16).reshape(2, 16), 2)
    gains = []
    for block in blocks:
        stream.advance(block.index)
        gains.append(measure_stream_gain(model, block, stream))
    assert gains == pytest.approx([1.0] * 7, rel=1e-3)


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gain_is_found_however_loud_the_block_is(dtype: torch.dtype, size: float) -> None:
    """Against its stream the block's output may be a whisper or a shout; a scale that differs by feature is no gain."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(size)
        model.model.layers[0].mlp.down_proj.bias.mul_(size)
    model = model.to(dtype)
    blocks = find_blocks(model)
    stream = open_stream(model, blocks, TEXT.held_out[:4], 4)
    assert measure_stream_gain(model, blocks[0], stream) == pytest.approx(1.0, rel=1e-3)
    scale = torch.linspace(0.9, 1.1, 32, dtype=dtype)
    handle = model.model.layers[0].register_forward_hook(lambda _m, _a, output: output * scale)
    assert measure_stream_gain(model, blocks[0], stream) is None
    handle.remove()


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_blocks_that_cannot_compensate_are_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(family)
    for _ in range(2):  # the second time the fits come from disk
        store = open_store(
            model, TEXT, RunContext(cache=Cache(tmp_path, Progress()), progress=Progress(sys.stderr)), FFNS
        )
        fitter = Fitter(store, store.candidates())
        fitter.fit_in_order({0: Shape(0), 2: Shape(0, 20)})
        fitter.fit_in_order({0: Shape(0), 2: Shape(0, 20)})
        lines = [line for line in capsys.readouterr().err.splitlines() if "cannot make up" in line]
        assert len(lines) == (family == "gemma2"), "said once"
        assert all("blocks 0, 2 " in line for line in lines)


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_blocks_are_fitted_in_order_in_every_kind_of_family(family: str) -> None:
    model = tiny_model(family)
    statistics = open_store(model, TEXT, RunContext(), FFNS)
    fits = Fitter(statistics, statistics.candidates()).fit_in_order({0: Shape(0), 1: Shape(0, 20)})
    assert [fits[i].kind for i in fits] == ["bias", "pruned"]
    assert all(p.isfinite().all() for module in fits.values() for p in module.parameters())


def point(index: int, predicted: float, measured: float, error: float = 0.0) -> Point:
    return Point(Candidate(index, Shape(0, 4), 1, predicted), predicted, measured, error, windows=16)


def test_agreement_corrects_what_was_measured_well() -> None:
    found = Calibration([point(0, 1.0, 2.0), point(1, 2.0, 4.2), point(2, 4.0, 7.9), point(3, 1e-3, 9e-3, error=1.0)])
    factors = found.factors()
    assert factors[0] == pytest.approx(2.0, rel=0.01)
    assert factors[2] == pytest.approx(7.9 / 4, rel=0.01)
    assert factors[3] == pytest.approx(2.0, rel=0.1), "noise says nothing: its neighbours do"
    wild = Calibration([point(0, 1.0, 100.0), point(1, 1.0, 1.0), point(2, 1.0, -3.0)]).factors()
    assert wild == pytest.approx({0: 100, 1: 1, 2: 0.01}, rel=1e-3)


def test_agreement_does_not_believe_a_lucky_block() -> None:
    """Every prediction is twice too small, and the measurements scatter by their noise: no factor may follow that."""
    generator = torch.Generator().manual_seed(3)
    points = [point(k, 1.0, 2.0 + 0.6 * torch.randn((), generator=generator).item(), error=0.6) for k in range(30)]
    factors = Calibration(points).factors()
    measured = [p.measured for p in points]
    assert max(measured) / min(measured) > 2
    assert max(factors.values()) / min(factors.values()) < (max(measured) / min(measured)) ** 0.5
    assert sum(factors.values()) / 30 == pytest.approx(2.0, rel=0.15)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 2, 2, 3]) == pytest.approx(3 / 10**0.5)  # equal values share their rank
    assert math.isnan(rank_correlation([1, 2], [1, 2]))
    assert math.isnan(rank_correlation([1, 2, 3], [5, 5, 5]))


@pytest.fixture
def frontier(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*budgets: str) -> dict[str, Any]:
        command = ["plan", models / "llama", "--max-dppl", *budgets, "--confidence", "0", *options]
        done = compress(*command, "--out", tmp_path / "plan.json", "--cache", tmp_path / "cache", "--json", "-v")
        assert done.code == 0, done.err
        return {**json.loads(done.out), "err": done.err}

    return run


def test_the_frontier_of_several_budgets(
    frontier: Callable[..., dict[str, Any]], compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    report = frontier("0.02%", "0.5%", "20%")
    points = report["frontier"]
    assert [p["asked"] for p in points] == ["0.02%", "0.5%", "20%"]
    removed = [p["removed"] for p in points]
    assert removed == sorted(removed)
    assert removed[-1] > 0
    for p in points:
        if p["removed"]:
            assert p["flops_ratio"] > 1
            text = p["texts"]["text"]
            assert text["delta"] <= float(p["asked"].rstrip("%")) / 100 * text["baseline"] * 1.02
            assert Path(p["file"]).is_file()
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    again = frontier("0.02%", "1%")
    assert "profile: measured before" in again["err"]
    assert "survey: measured before" in again["err"]
    assert "gradients" not in again["err"], "no calibration pass for another budget"
    done = compress("apply", models / "llama", tmp_path / "plan-20pct.json", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["parameters"]["removed"] == removed[-1]


def test_the_table_of_the_frontier(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    command = ["plan", models / "llama", "--max-dppl", "1e-9", "20%", *options, "--out", tmp_path / "plan.json"]
    done = compress(*command)
    assert done.code == 2, "1e-9 is not one of the amounts that a flag takes several of"
    done = compress("plan", models / "llama", "--max-dppl", "0.5%", "20%", *options, "--out", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert "FLOPs per token" in done.out
    assert "plan-20pct.json" in done.out
    assert "room is left for the noise of the verification text" in done.out
    refused = compress("apply", models / "llama", tmp_path / "plan.json", "--out", tmp_path / "out")
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert "holds 2 plans" in refused.err
    assert "plan-0.5pct.json or " in refused.err
    assert "plan-20pct.json" in refused.err
    refused = compress(models / "llama", "--max-dppl", "0.5", "1", *options, "--out", tmp_path / "out")
    assert refused.code == 2
    assert "given twice" in refused.err


def test_the_record_has_speed_agreement_and_time(compressed: Path) -> None:
    record = json.loads((compressed / "compression.json").read_text())
    speed = record["speed"]
    assert speed["flops_before"] > speed["flops_after"] > 0
    for step in ("prefill", "decode"):
        low, high = speed[f"{step}_ratio_ci95"]
        assert 0 < low <= speed[f"{step}_ratio"] <= high
        assert speed[f"{step}_pairs"] >= 6
        assert min(speed[f"{step}_before"], speed[f"{step}_after"]) > 0
    assert len(record["agreement"]["blocks"]) == len(record["blocks"])
    assert record["timings"]["one_forward_pass"] > 0
    page = (compressed / "report.html").read_text()
    assert "Predicted against measured" in page
    assert "FLOPs per token" in page


def test_what_verification_leaves_over_is_spent(compressed: Path) -> None:
    """The upper end lies in the last fifth of the budget, unless nothing larger was left to try."""
    record = json.loads((compressed / "compression.json").read_text())
    used = record["perplexity"]["delta_upper"] / record["budget"]["max_dppl"]
    assert used <= 1
    branches = [*record["blocks"], *record["attention"][1:]]  # the first attention keeps a head
    everything = all(block["replacement"]["kind"] == "bias" for block in branches)
    assert used >= 0.8 or record["verification_looks"] >= 2 or everything
