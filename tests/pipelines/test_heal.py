"""Healing through the command: the whole job, apply, plan, `compress heal`, and what cannot be asked for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, Refused
from transformers import AutoModelForCausalLM
from zoo import stored, tokens

from compressor.heal.distil import Healing
from compressor.plan import healing as plans
from compressor.plan.healing import Healer, extrapolate

SIZE = ["--objective", "size", "--generate", "0"]
HEAL = ["--heal", "20k"]


def read(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "compression.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def healed(compress: Compress, models: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress MODEL --remove 25% --heal 20k --out DIR` wrote; no test may change it."""
    out = tmp_path_factory.mktemp("healed") / "small"
    done = compress(models / "llama", *options, *SIZE, *HEAL, "--remove", "25%", "--out", out)
    assert done.code == 0, done.err
    assert "healed on " in done.out
    return out


def test_record_card_and_page_say_what_was_trained(healed: Path) -> None:
    record = read(healed)
    healing = record["healing"]
    assert (healing["asked_tokens"], healing["params"]) == (20_000, "norms")
    assert 10_000 < healing["tokens"] <= 20_000
    assert healing["text"].endswith("corpus.txt, mix")  # the guard windows of the mix are trained on too
    assert healing["looks"][0]["tokens"] == 0
    assert healing["kept"]["kl"] < healing["looks"][0]["kl"]
    assert healing["kept"] in healing["looks"]
    assert record["recipe"]["heal"] == 20_000
    assert record["compensated"] is False
    card = (healed / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert "Nothing was trained" not in card
    assert f"Healed on {healing['tokens']:,} tokens" in card
    assert "The text was corpus.txt, mix." in card
    page = (healed / "report.html").read_text(encoding="utf-8")
    assert f"Healed on {healing['tokens']:,} tokens" in page
    assert ">kept</td>" in page


def test_the_norms_in_the_checkpoint_are_the_trained_ones(healed: Path, models: Path) -> None:
    before, after = stored(models / "llama"), stored(healed)
    norms = [name for name in before if "norm" in name and name in after]
    assert any(not torch.equal(before[name], after[name]) for name in norms)
    others = [name for name in before if name in after and name not in norms and before[name].numel()]
    assert any("q_proj" in name for name in others)
    for name in others:
        if before[name].shape == after[name].shape and ".mlp." not in name:
            assert torch.equal(before[name], after[name]), name


def test_it_loads_and_passes_the_gate(healed: Path, compress: Compress) -> None:
    with torch.no_grad():
        assert AutoModelForCausalLM.from_pretrained(healed).eval()(tokens()).logits.isfinite().all()
    done = compress("check", healed, "--max-dppl", "90%", "--json")
    assert done.code == 0, done.err
    checked, recorded = json.loads(done.out), read(healed)
    assert checked["perplexity"]["compressed"] == pytest.approx(recorded["perplexity"]["compressed"], rel=1e-5)
    assert not any("not those" in warning for warning in checked["warnings"])


def test_a_checkpoint_is_healed_further(
    healed: Path, models: Path, compress: Compress, refused: Refused, tmp_path: Path
) -> None:
    done = compress("heal", healed, "--heal", "8k", "--max-dppl", "90%", "--out", tmp_path / "more")
    assert done.code == 0, done.err
    first, second = read(healed), read(tmp_path / "more")
    assert second["healing"]["asked_tokens"] == 8000
    assert second["healing"]["looks"][0]["kl"] == pytest.approx(first["healing"]["kept"]["kl"], rel=0.05)
    assert second["perplexity"]["compressed"] <= 1.002 * first["perplexity"]["compressed"]
    assert second["parameters"] == first["parameters"]
    assert second["blocks"] == first["blocks"]
    assert second["passed"] is True
    assert "say how long to heal" in refused("heal", healed, "--out", tmp_path / "none")
    assert "--out is missing" in refused("heal", healed, "--heal", "8k")
    other = refused("heal", healed, "--heal", "8k", "--source", models / "gpt2", "--out", tmp_path / "none")
    assert "was made from other weights" in other
    assert not (tmp_path / "none").exists()


def test_plan_shows_both_and_apply_heals(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    job = ["plan", models / "llama", *options, "--objective", "size", "--max-dppl", "3%"]
    done = compress(*job, *HEAL, "--out", plan)
    assert done.code == 0, done.err
    points = json.loads(plan.read_text(encoding="utf-8"))["frontier"]
    assert [point.get("heal") for point in points] == [None, 20_000]
    assert "to be healed on" in done.out
    done = compress("apply", models / "llama", points[1]["file"], "--max-dppl", "30%", "--out", tmp_path / "applied")
    assert done.code == 0, done.err
    assert read(tmp_path / "applied")["healing"]["asked_tokens"] == 20_000
    done = compress("apply", models / "llama", points[0]["file"], "--max-dppl", "30%", "--out", tmp_path / "plain")
    assert done.code == 0, done.err
    assert read(tmp_path / "plain").get("healing") is None
    assert "Nothing was trained" in (tmp_path / "plain" / "README.md").read_text(encoding="utf-8")


def test_the_whole_job_aims_past_the_budget_and_holds_it(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress(
        models / "llama", *options, *SIZE, "--heal", "20k", "--max-dppl", "3%", "--out", tmp_path / "out", "-v"
    )
    assert done.code == 0, done.err
    assert "a trial of" in done.err
    record = read(tmp_path / "out")
    assert record["perplexity"]["delta_upper"] <= record["budget"]["max_dppl"]


def test_where_healing_does_not_help_the_plan_without_it_is_written(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Healer.heal

    def spoil(self: Healer, model: Any, fits: Any, step: str = "heal") -> Healing:
        found = real(self, model, fits, step)
        for module in found.fits.values():
            for parameter in module.parameters():
                parameter.data.mul_(20)
        return found

    monkeypatch.setattr(plans.Healer, "heal", spoil)
    arguments = [models / "llama", *options, *SIZE, *HEAL, "--max-dppl", "3%", "--cache", tmp_path / "cache"]
    done = compress(*arguments, "--out", tmp_path / "out", "-v")
    assert done.code == 0, done.err
    assert "the largest plan without healing is looked for" in done.err
    record = read(tmp_path / "out")
    assert record.get("healing") is None
    assert record["parameters"]["removed"] > 0


def test_minutes_become_tokens(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    arguments = [models / "llama", *options, *SIZE, "--remove", "10%", "--heal-minutes", "0.02"]
    done = compress(*arguments, "--cache", tmp_path / "cache", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "minutes are about" in done.err
    recipe = read(tmp_path / "out")["recipe"]
    assert recipe["heal"] >= 1000
    assert "heal_minutes" not in recipe


def test_mistakes(models: Path, options: list[str], refused: Refused, tmp_path: Path) -> None:
    job = [models / "llama", *options, "--max-dppl", "3%", "--out", tmp_path / "out"]
    assert "give one of them" in refused(*job, "--heal", "2k", "--heal-minutes", "3")
    assert "--low-memory leaves them on disk" in refused(*job, "--heal", "2k", "--low-memory")
    assert "try --heal 200k" in refused(*job, "--heal", "lots")
    assert "heal_params" in refused(*job, "--heal", "2k", "--heal-params", "head").replace("-", "_")
    assert "heal_minutes" in refused(*job, "--heal-minutes", "0").replace("-", "_")
    assert not (tmp_path / "out").exists()


def test_what_is_left_shrinks_ever_more_slowly() -> None:
    assert extrapolate(0.9, 1.0) == pytest.approx(0.9)
    left = [extrapolate(0.9, times) for times in (1, 2, 4, 8)]
    gains = [before - after for before, after in pairwise(left)]
    assert all(gain > 0 for gain in gains)
    assert left[3] > 0.9**8
    assert extrapolate(1.0, 10) == 1.0
    assert extrapolate(0.0, 10) < 1e-3
