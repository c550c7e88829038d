"""What a profile says: the rank ladder against its definition, outlier rows by token, shapes, verdicts, tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import SEQ_LEN, LinearFFN, WildFFN, planted_model, random_text
from pydantic import BaseModel
from zoo import REPRESENTATIVE, WIDTH, tiny_model

from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.gradients import Damage
from compressor.measure.probes import sample_rows
from compressor.measure.profile import BlockProfile, measure
from compressor.measure.verdicts import judge
from compressor.models.blocks import find_blocks
from compressor.pipelines.describe_profile import (
    describe_corpora,
    describe_doubts,
    describe_shape,
    flat,
    ladder_ranks,
    name_rows,
    pearson,
)
from compressor.report.record import Record
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_step_of_the_ladder_is_the_best_map_of_its_rank(family: str) -> None:
    """Against the definition: the best rank-r approximation of the fitted outputs, on raw rows in float64."""
    model, text = tiny_model(family), random_text()
    profile = measure(model, text)
    for block, sample in sample_rows(model, find_blocks(model), text.fitting, text.held_out, batch_size=8):
        x, y, held_x, held_y = (rows.double() for rows in (sample.x, sample.y, sample.held_x, sample.held_y))
        linear = profile.blocks[block.index].linear
        fitted = (x - x.mean(0)) @ linear.weight
        directions = torch.linalg.svd(fitted, full_matrices=False).Vh
        ladder = profile.blocks[block.index].ladder
        assert len(ladder) == block.width + 1
        for rank in (0, 1, 3, 9, block.width):
            some = directions[:rank]
            predicted = y.mean(0) + (held_x - x.mean(0)) @ linear.weight @ some.T @ some
            error = (held_y - predicted).square().sum()
            expected = 1 - error / (held_y - held_y.mean(0)).square().sum()
            assert ladder[rank].item() == pytest.approx(expected.item(), abs=1e-5)
        assert ladder[-1].item() == pytest.approx(profile.blocks[block.index].r2_lin, abs=1e-9)


def test_the_rank_that_is_enough_is_the_planted_one() -> None:
    model, text = planted_model(LinearFFN(rank=5), LinearFFN(), WildFFN()), random_text()
    low, full, wild = measure(model, text).blocks
    assert 3 <= low.sufficient_rank <= 5
    assert low.ladder[5].item() == pytest.approx(1, abs=1e-6)
    assert full.sufficient_rank > 12
    assert 0 <= wild.sufficient_rank <= WIDTH
    assert low.input_rank == WIDTH - 1  # a LayerNorm's output has no variance along one direction
    assert 1 < low.input_effective_rank <= WIDTH


def test_a_profile_from_the_cache_is_the_profile(tmp_path: Path) -> None:
    model, text = tiny_model("llama"), random_text()
    cache = Cache(tmp_path, Progress())
    first, again = (measure(model, text, RunContext(cache=cache)) for _ in range(2))
    for a, b, c in zip(measure(model, text).blocks, first.blocks, again.blocks, strict=True):
        plain: dict[str, Any] = {"ladder": None, "read": None}
        assert replace(a, **plain) == replace(b, **plain) == replace(c, **plain)
        assert torch.equal(a.ladder, c.ladder)
        assert torch.equal(a.linear.weight, b.linear.weight)
        assert torch.equal(a.linear.weight, c.linear.weight)


class Words:
    """A tokenizer whose token 7 is the word `7`."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)


def test_outlier_rows_are_told_by_token_place_and_text() -> None:
    model = planted_model(WildFFN(outliers=300.0), LinearFFN(), WildFFN(), mark_first_position=True)
    text = random_text()
    outlier, _, wild = measure(model, text).blocks
    assert outlier.top_position == 0
    assert outlier.top_position_share > 0.9
    assert wild.top_position_share < 0.2
    rows = name_rows(outlier.top_rows, text, Words())
    assert {row.position for row in rows} == {0}
    assert [row.share for row in rows] == sorted((row.share for row in rows), reverse=True)
    window = text.held_out[rows[0].window].tolist()
    assert rows[0].token == f" {window[0]}"
    assert rows[0].before == ""
    assert rows[0].after == "".join(f" {token}" for token in window[1:13])


def test_ranks_of_the_ladder() -> None:
    assert ladder_ranks(1) == [0, 1]
    assert ladder_ranks(32) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert ladder_ranks(576)[-3:] == [384, 512, 576]


def test_shapes() -> None:
    shape = describe_shape([0.1, 0.9, 0.8, 0.85])
    assert shape.spread == pytest.approx(0.8)
    assert shape.largest_jump == pytest.approx(0.8)
    assert shape.largest_jump_after == 0
    assert shape.mean_jump == pytest.approx(0.95 / 3)
    assert shape.turns == 2
    assert describe_shape([0.1, 0.2, 0.3]).rank_correlation_with_depth == pytest.approx(1)
    assert describe_shape([0.1, 0.2, 0.3]).turns == 0
    assert describe_shape([0.5]).largest_jump_after is None


def test_pearson() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3, 4], [1, -1, 1, -1]) == pytest.approx(-0.4472, abs=1e-4)
    assert pearson([1, 2], [1, 2]) is None
    assert pearson([1, 1, 1], [1, 2, 3]) is None


def test_corpora_that_agree_and_corpora_that_do_not() -> None:
    model, text = tiny_model("gpt2"), random_text()
    profile = measure(model, text)
    turned = replace(
        profile,
        blocks=[replace(p, r2_lin=1 - p.r2_lin) for p in profile.blocks],
    )
    found = describe_corpora(["a", "b", "c"], [text] * 3, [profile, profile, turned])
    agreed = {(p.first, p.second): p.rank_correlation for p in found["corpus_agreement"]}
    assert agreed[("a", "b")] == pytest.approx(1)
    assert agreed[("a", "c")] == agreed[("b", "c")] == pytest.approx(-1)
    assert [len(c.blocks) for c in found["corpora"]] == [3, 3, 3]


def block_of(**figures: Any) -> BlockProfile:
    model, text = planted_model(WildFFN(), LinearFFN(), WildFFN(seed=5)), random_text()
    return replace(measure(model, text).blocks[0], **figures)


def evaluation(delta: float, low: float, high: float) -> PerplexityChange:
    return PerplexityChange(40.0, 40.0 + delta, delta, (low, high), high, (high - low) / 4, 4000, 256, "window", 16, 1)


def test_a_verdict_rests_on_what_was_measured_where_it_was() -> None:
    block, damage = block_of(r2_lin=0.8, r2_stream=0.8), Damage(linear=0.5, factorised=0.6)
    assert judge(block, damage).word == "costly"
    cheap = judge(block, damage, measured=evaluation(0.3, 0.1, 0.7))
    assert cheap.word == "safe"
    assert "40.00 → 40.30 (+0.30, 95 % interval +0.10 … +0.70)" in cheap.reason
    assert judge(block, damage, measured=evaluation(0.3, -0.5, 1.1)).word == "costly"  # the upper end counts


def test_outlier_rows_forbid_a_block_whatever_it_measured() -> None:
    block, damage = block_of(r2_lin=0.95, r2_stream=0.46), Damage(linear=0.001, factorised=0.001)
    verdict = judge(block, damage, measured=evaluation(0.01, 0.0, 0.02))
    assert verdict.word == "unsafe"
    assert "R²_lin 0.95 falls to 0.46" in verdict.reason
    assert judge(replace(block, r2_stream=0.9), Damage(linear=0.1, factorised=108.0)).word == "unsafe"


def test_a_trial_that_cost_what_was_predicted_calls_the_alarm_off() -> None:
    """Gemma-3-270M, block 9: the estimates disagree tenfold, and yet it is the cheapest block to replace."""
    block, damage = block_of(r2_lin=0.61, r2_stream=0.63), Damage(linear=0.08, factorised=1.2)
    assert judge(block, damage).word == "unsafe"
    assert judge(block, damage, measured=evaluation(2.4, 1.8, 3.1)).word == "costly"  # 0.058 nats
    assert judge(block, damage, limit=0.1, measured=evaluation(2.4, 1.8, 3.1)).word == "safe"
    assert judge(block, damage, measured=evaluation(40.0, 30.0, 50.0)).word == "unsafe"  # 0.69 nats


def test_rows_that_carry_no_fit_give_no_verdict() -> None:
    """Unless a trial shows that the block is safe, or the ridge that it rests on outlier rows."""
    few = block_of(r2_lin=-0.4, r2_stream=-0.9, r2_ridge=0.3, r2_ridge_stream=0.25, rows_fitted=100)
    assert not few.carried
    for damage in (Damage(linear=0.001, factorised=0.001), Damage(linear=0.5, factorised=0.6)):
        undecided = judge(few, damage)
        assert undecided.word is None
        assert "100 fitted rows are 3.1 per input feature" in undecided.reason
        assert f"--calib-tokens {few.tokens_needed} would do" in undecided.reason
        assert judge(few, damage, measured=evaluation(0.3, 0.1, 0.7)).word == "safe"
        assert judge(few, damage, measured=evaluation(0.3, -0.5, 1.1)).word is None
    outlier = replace(few, r2_ridge=0.9, r2_ridge_stream=0.3)
    verdict = judge(outlier, Damage(linear=0.001, factorised=0.001), measured=evaluation(0.01, 0.0, 0.02))
    assert verdict.word == "unsafe"
    assert "R²_lin of the best ridge 0.90 falls to 0.30" in verdict.reason
    enough = replace(few, r2_stream=-0.5, rows_fitted=10 * WIDTH)
    assert judge(enough, Damage(linear=0.5, factorised=0.6)).word == "costly"


@pytest.mark.parametrize(
    ("calibration", "doubts"),
    [(60, 0), (10, 2), (5, 2), (12, 1), (16, 1), (20, 0)],
)
def test_what_the_text_is_too_short_for_is_said_with_the_tokens_that_would_do(calibration: int, doubts: int) -> None:
    profile = measure(planted_model(WildFFN(), LinearFFN(), WildFFN(seed=5)), random_text(calibration))
    told = describe_doubts(profile)
    assert len(told) == doubts
    for doubt in told:
        tokens = int(doubt.split("--calib-tokens ")[1].split()[0])
        longer = measure(planted_model(WildFFN(), LinearFFN(), WildFFN(seed=5)), random_text(tokens // SEQ_LEN))
        assert doubt.split(":")[0] not in [other.split(":")[0] for other in describe_doubts(longer)]


def test_a_row_of_a_table_is_flat() -> None:
    block = {
        "index": 3,
        "r2_lin_ci95": [0.1, 0.2],
        "swap": {"delta": 1.5, "delta_ci95": [1, 2]},
        "top_rows": [{}],
        "x": 1,
    }
    assert flat(block) == {
        "r2_lin_ci95_low": 0.1,
        "r2_lin_ci95_high": 0.2,
        "swap_delta": 1.5,
        "swap_delta_ci95_low": 1,
        "swap_delta_ci95_high": 2,
        "x": 1,
    }


def unknown_fields(part: BaseModel) -> list[str]:
    """The keys of a record, at any depth, that its schema does not name."""
    found = list(part.model_extra or {})
    for _, value in part:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [name for child in children if isinstance(child, BaseModel) for name in unknown_fields(child)]
    return found


def test_what_is_written_is_what_the_schema_names(compressed: Path, profiled: Path) -> None:
    for file in (compressed / "compression.json", profiled / "profile.json"):
        record = Record.model_validate(json.loads(file.read_text(encoding="utf-8")))
        assert unknown_fields(record) == []
