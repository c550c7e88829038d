"""A dry run: what would be done and how long it takes, without a trace; and refusals as in a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, Refused, tree
from zoo import tiny_model

from compressor.measure.gradients import Gradients
from compressor.models.blocks import find_blocks
from compressor.models.neurons import find_neurons
from compressor.pipelines import dry_run
from compressor.pipelines.costs import STEPS, Rates, add_up, count_quantities, step_of
from compressor.pipelines.job import Job, open_job
from compressor.pipelines.recipe import resolve
from compressor.plan.estimate import GAINS, count_removed, estimate_candidates, estimate_size, unit_damages
from compressor.plan.frontier import lower_hull
from compressor.report.dry_run_record import DryRunRecord, dry_run_lines, duration
from compressor.runtime.context import RunContext

BUDGET = ["--max-dppl", "0.2%"]
PARTS = {
    *("dry_run", "source", "parameters", "blocks", "budget", "objective", "text", "tasks", "out", "processes"),
    *("seconds", "steps", "rates", "resources", "size", "sample_seconds"),
}


def state(root: Path) -> dict[str, Any]:
    """Everything below a directory with contents and times."""
    return {name: (content, (root / name).stat().st_mtime_ns) for name, content in tree(root).items()}


@pytest.fixture
def estimate(compress: Compress, models: Path, options: list[str]) -> Any:
    def run(*more: str | Path) -> dict[str, Any]:
        done = compress(models / "gpt2", *options, *BUDGET, "--dry-run", "--json", *more)
        assert done.code == 0, done.err
        record: dict[str, Any] = json.loads(done.out)
        return record

    return run


def test_nothing_is_written(estimate: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / f"{'a' * 40}.safetensors").write_bytes(b"an entry")
    before, source = state(tmp_path), state(models / "gpt2")
    estimate("--cache", "kept")
    estimate("--cache", "not/there", "--out", "out/deeper")
    estimate("--no-cache", "--low-memory")
    assert state(tmp_path) == before
    assert state(models / "gpt2") == source


def test_what_it_says(estimate: Any, models: Path, tmp_path: Path) -> None:
    record = estimate("--out", tmp_path / "out", "--cache", tmp_path / "cache")
    assert record.keys() == PARTS
    assert record["source"]["model"] == str(models / "gpt2")
    assert record["blocks"] == [{"count": 3, "width": 32, "neurons": 48, "matrices": 2, "parameters": 3152}]
    assert [step["name"] for step in record["steps"]] == [step.name for step in STEPS]
    assert 0 < record["seconds"]["least"] <= record["seconds"]["expected"] <= record["seconds"]["most"]
    assert sum(step["expected"] for step in record["steps"]) == pytest.approx(record["seconds"]["expected"])
    assert not any(step["kept"] for step in record["steps"])
    assert 0 <= record["size"]["least"] <= record["size"]["most"] <= 3 * (3152 + 4 * 32 * 33)  # FFNs and attention
    assert record["size"]["least_fraction"] == record["size"]["least"] / record["parameters"]
    assert record["resources"]["statistics"] > 3 * 8 * (80**2 + 64**2)
    assert record["resources"]["memory"] < record["resources"]["memory_available"]
    assert record["out"] == str(tmp_path / "out")
    lines = dry_run_lines(DryRunRecord.model_validate_json(json.dumps(record)))
    assert lines[0].startswith(f"would compress {models / 'gpt2'} (")
    assert "3 blocks of 2 × 32 × 48" in lines[0]
    assert lines[-1] == "nothing was written"


def test_lines_on_stdout(compress: Compress, models: Path, options: list[str]) -> None:
    done = compress(models / "gpt2", *options, *BUDGET, "--dry-run")
    assert done.code == 0, done.err
    starts = [line.partition(":")[0] for line in done.out.splitlines()[1:]]
    assert starts == ["text", "time", "memory", "disk", "size", "nothing was written"]


def test_what_was_measured_before_takes_no_time(estimate: Any, compressed: Path) -> None:
    """The shared example was made with the same options, in the cache of the session."""
    assert compressed.is_dir()
    record = estimate()
    kept = {step["name"]: step["most"] for step in record["steps"] if step["kept"]}
    assert kept == {"source": 0, "measure": 0, "gradients": 0}
    assert record["resources"]["statistics"] == 0
    other = estimate("--calib-tokens", "1536")
    assert [step["name"] for step in other["steps"] if step["kept"]] == ["source"]


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL", "TEXT"],  # no budget
        ["MODEL", "TEXT", "--max-dppl", "-1"],
        ["MODEL", "--text", "nowhere.txt", "--max-dppl", "1"],
        ["nowhere/model", "TEXT", "--max-dppl", "1"],
        ["MODEL", "TEXT", "--max-dppl", "other=1"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--seq-len", "100000"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--max-task-drop", "0.1"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--prompts", "nowhere.txt"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--cache", "../file/below"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--out", "../taken"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--out", "../taken", "--overwrite"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--out", "MODEL"],
        ["bert", "TEXT", "--max-dppl", "1"],
        ["MODEL", "TEXT", "--max-dppl", "1", "--recipe", "nowhere.yaml"],
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_it_refuses_what_a_run_refuses(
    refused: Refused, models: Path, options: list[str], tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").touch()
    known = {"MODEL": [str(models / "gpt2")], "bert": [str(models / "bert")], "TEXT": options}
    line = [word for name in words for word in known.get(name, [name])]
    out = [] if "--out" in words else ["--out", "new"]
    dry = refused(*line, "--dry-run")
    assert dry.partition(";")[0].partition("file")[0] == refused(*line, *out).partition(";")[0].partition("file")[0]


def test_the_range_holds_the_real_result_of_the_built_in_model(compress: Compress) -> None:
    """At +1.0 a real run removes 20.8 % of its parameters from the FFNs alone (docs/results.md)."""
    done = compress("demo", "--max-dppl", "1.0", "--branches", "ffn", "--dry-run", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    size, steps = record["size"], {step["name"]: step for step in record["steps"]}
    assert size["least_fraction"] < 0.208 < size["most_fraction"]
    assert size["most_fraction"] < 3 * size["least_fraction"]
    assert record["tasks"] == {"demo_last_word": 240}
    assert steps["tasks"]["least"] > steps["source"]["least"]  # two passes over 240 documents
    assert "it/s" not in done.err  # no bar of lm-eval's own


# The table of steps


def test_the_table_has_every_step_of_a_real_run(compressed: Path, profiled: Path) -> None:
    """Whoever adds a step to the job must say in the table what it costs."""
    names: set[str] = set()
    for file in (compressed / "compression.json", profiled / "profile.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        for part in (record, *record.get("profiles", [])):
            names |= part.get("timings", {}).keys()
    assert names >= {"measure", "gradients", "search", "verify", "compressed writes", "total"}
    unknown = {name for name in names - {"total", "one_forward_pass"} if step_of(name) is None}
    assert unknown == set()


def test_a_size_is_answered_with_its_cost(compress: Compress, models: Path, options: list[str]) -> None:
    def run(*asked: str) -> str:
        done = compress(models / "gpt2", *options, *asked, "--dry-run")
        assert done.code == 0, done.err
        return done.out

    small, large = (json.loads(run("--remove", size, "--json"))["size"]["dppl"] for size in ("2%", "20%"))
    assert 0 <= small[0] < small[1]
    assert large[1] > small[1]
    assert "cost: perplexity may rise by about" in run("--remove", "5%")
    assert "by at least" in run("--remove", "5%")
    assert "size: not estimated" in run(*BUDGET, "--kinds", "linear")
    assert "0.02 nats per token of KL" in run("--max-kl", "0.02")


def test_names_of_tasks_belong_to_the_step_of_tasks() -> None:
    assert step_of("source") == "source"
    assert step_of("source piqa") == step_of("block 3 back piqa") == "tasks"
    assert step_of("compressed writes") == "texts"
    assert step_of("something new") is None
    listed = [name for step in STEPS for name in step.timings]
    assert len(listed) == len(set(listed))


@pytest.fixture(scope="module")
def job(models: Path, options: list[str]) -> Job:
    words = dict(zip(options[::2], options[1::2], strict=True))
    numbers = {key[2:].replace("-", "_"): int(value) for key, value in words.items() if value.isdigit()}
    values = {"model": str(models / "gpt2"), "text": [words["--text"]], "max_dppl": ["0.2%"], **numbers}
    return open_job(resolve(None, values), RunContext())


def test_costs_follow_the_counts(job: Job) -> None:
    quantities = count_quantities(job, requested=1000, opening=2.0, stored=10**6)
    assert {work.quantity for step in STEPS for work in step.work} <= quantities.keys()
    unit = Rates(*[(1.0, 1.0)] * 5)
    nothing = Rates(*[(0.0, 0.0)] * 5, seconds=(0.0, 0.0))
    costs = {cost.name: cost for cost in add_up(quantities, unit)}
    tokens = job.text.verification.tokens
    assert (costs["source"].least, costs["source"].most) == (tokens, tokens)
    (verify,) = next(step.work for step in STEPS if step.name == "verify")
    assert (costs["verify"].least, costs["verify"].most) == (verify.least * tokens, verify.most * tokens)
    assert costs["load"].seconds == 2.0
    assert costs["probes"].most == 0
    assert all(cost.most == 0 for cost in add_up(quantities, nothing))
    two = {cost.name: cost for cost in add_up(quantities, unit, processes=2)}
    assert two["verify"].most == costs["verify"].most / 2
    assert [two[name].most for name in ("load", "tasks")] == [costs[name].most for name in ("load", "tasks")]
    slower = {cost.name: cost for cost in add_up(quantities, replace(unit, forward=(1.0, 5.0)))}
    assert slower["verify"].most == 5 * costs["verify"].most
    kept = {cost.name: cost for cost in add_up(quantities, unit, ["statistics"])}
    assert (kept["measure"].most, kept["gradients"].kept, kept["source"].kept) == (0, True, False)


@pytest.mark.parametrize(("per_token", "shape"), [(1e-6, (32, 32)), (0.1, (1, 32)), (0.2, (1, 18)), (1e9, (1, 16))])
def test_slow_models_are_sampled_on_less(job: Job, per_token: float, shape: tuple[int, int]) -> None:
    windows, parts = dry_run.choose_sample(job, per_token)
    assert windows.shape[1] == shape[1]
    assert len(windows) <= shape[0]
    assert sum(part.stop - part.start for part in parts.values()) == len(windows)


# The rough size


def rows_of(neurons: Any, tokens: int = 256) -> Gradients:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(tokens, neurons.width, generator=generator) for _ in range(2))
    return Gradients(x, neurons.outer_matrix.apply(neurons.activate(x)), g)


def test_neurons_that_do_nothing_cost_nothing() -> None:
    """Half of the neurons are silenced: they go first, whatever the others do."""
    model = tiny_model("llama")
    block = find_blocks(model)[0]
    neurons = find_neurons(model, block)
    assert neurons is not None
    half = neurons.count // 2
    with torch.no_grad():
        neurons.outer_matrix.module.weight[:, 1::2] = 0
    rows = rows_of(neurons)
    damages = unit_damages(neurons, rows, [neurons.count, half, half - 1, 0])
    assert damages[:2] == [0.0, 0.0]
    assert 0 < damages[2] < damages[3]
    # All neurons gone, their mean in the bias: what is left of the output is its error.
    y = rows.y - rows.y.mean(0)
    assert damages[3] == pytest.approx(((y * rows.g).sum(1) ** 2).mean().item() / 2, rel=1e-4)


def test_a_larger_budget_removes_more() -> None:
    model = tiny_model("gpt2")
    hulls = []
    for block in find_blocks(model):
        neurons = find_neurons(model, block)
        assert neurons is not None
        rows = rows_of(neurons)
        hulls.append(lower_hull(estimate_candidates(block, neurons, rows)))
        (alone,) = estimate_candidates(block, None, rows)  # neurons that are not known
        assert alone.saved == block.parameters - block.width
        assert alone.damage == pytest.approx(hulls[-1][-1].damage, rel=1e-4)
    whole = sum(hull[-1].damage for hull in hulls)
    counts = [count_removed(hulls, share * whole) for share in (0, 1e-3, 1e-2, 0.1, 1.001)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == sum(hull[-1].saved for hull in hulls)
    size = estimate_size(hulls, 0.01 * whole)
    assert (size.least, size.most) == tuple(count_removed(hulls, gain * 0.01 * whole) for gain in GAINS)


def test_durations_in_words() -> None:
    assert [duration(s) for s in (0.2, 61, 125, 1200, 7200)] == ["1 s", "61 s", "2.1 min", "20 min", "2.0 h"]
