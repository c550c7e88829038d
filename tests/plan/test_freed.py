"""What a task frees of the text's budget is spent again: a real search on a tiny model and text that it wrote itself.

Only the task is planted: it loses its documents while a certain block is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import FFNS, SEQ_LEN
from torch import Tensor
from zoo import tiny_model

from compressor.evaluate.budget import Budget, Removal, parse_budgets
from compressor.evaluate.evaluator import Evaluator
from compressor.evaluate.tasks import Scores, Task
from compressor.measure.profile import measure
from compressor.models.source import identify
from compressor.patch.checkpoint import count_parameters
from compressor.plan import verify
from compressor.plan.api import make_planner
from compressor.plan.removal import SizeTarget, search_size
from compressor.plan.search import Planner
from compressor.plan.space import SearchSpace, prepare_search
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError
from compressor.text import Split, Text

CONTEXT = RunContext(confidence=0)
BUDGETS = {"text": Budget.parse("15%", confidence=0)}


class PlantedTask(Evaluator):
    """Texts are measured; every document of the task is lost while this block is replaced by anything."""

    def __init__(self, text: Text, block: int) -> None:
        body = SimpleNamespace(aggregation=lambda: {"acc": lambda values: sum(values) / len(values)})
        task = Task("task", (), "acc", ("acc",), 1, 200, "", "", body)
        super().__init__(text, None, BUDGETS, tasks=[task], limits={"task": 0.1}, context=CONTEXT)
        self.block = block

    def score_tasks(self, model: Any, step: str, identity: Any) -> dict[str, Scores]:
        return {"task": self.score_task(model, None, step, identity, range(200))}

    def score_task(self, model: Any, task: Any, step: str, identity: Any, only: Any = None) -> Scores:
        lost = str(self.block) in identity.get("replaced", {})
        return {"acc": torch.full((len(only),), 0.0 if lost else 1.0, dtype=torch.float64)}


@torch.no_grad()
def written_by(model: Any, windows: int) -> Tensor:
    """Windows of tokens that the model wrote: no other model can have a lower perplexity on many of them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (windows, 1), generator=generator)
    for _ in range(SEQ_LEN - 1):
        chances = model(tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return tokens


@pytest.fixture(scope="module")
def job() -> tuple[Any, Text, SearchSpace, Any]:
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(12)
        model.lm_head.weight.mul_(4)
    windows = written_by(model, 640)
    splits = (Split(part, "its own") for part in windows.split([256, 128, 256]))
    text = Text(*splits)
    return model, text, prepare_search(model, text, CONTEXT, FFNS), measure(model, text, CONTEXT)


def planner_of(job: tuple[Any, Text, SearchSpace, Any]) -> Planner:
    _, _, space, profile = job
    return make_planner(space, profile, BUDGETS, objective="size")


@pytest.mark.parametrize("block", [1, 2])
def test_the_freed_budget_buys_more_of_the_other_blocks(
    job: tuple[Any, Text, SearchSpace, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, *_ = job
    evaluator = PlantedTask(text, block)
    source = evaluator.measure(model, "source", identify(model))
    planner = planner_of(job)
    first = verify.search_text(planner, evaluator, source)
    assert block in first.plan.shapes

    monkeypatch.setattr(verify, "MOST_REFILLS", 0)
    walked_back = verify.search_and_verify(planner_of(job), evaluator, source)
    monkeypatch.undo()
    verified = verify.search_and_verify(planner_of(job), evaluator, source)

    assert block not in verified.plan.shapes
    assert planner.count_saved(verified.plan) > planner.count_saved(walked_back.plan)
    assert verified.looks == walked_back.looks + 1
    assert verified.task_looks == {"task": walked_back.task_looks["task"] + 1}
    shares = verify.measure_shares(evaluator, source, verified.measured)
    assert all(share.used <= 1 for share in shares)


def test_a_task_that_a_size_breaks_is_named(job: tuple[Any, Text, SearchSpace, Any]) -> None:
    model, text, _, profile = job
    budgets = parse_budgets(None, ["text"], 0.0)
    planner = make_planner(job[2], profile, budgets, objective="size")
    target = SizeTarget(Removal.parse("5%"), count_parameters(model))
    spared = (set(range(3)) - set(search_size(planner, target).shapes)).pop()
    evaluator = PlantedTask(text, spared)
    evaluator.budgets = budgets
    source = evaluator.measure(model, "source", identify(model))
    verified = verify.verify_size(planner, evaluator, source, target)
    assert (verified.looks, verified.task_looks) == (1, {"task": 1})
    evaluator.block = next(iter(verified.plan.shapes))
    with pytest.raises(BudgetError, match=r"^--remove 5% is .*: task task gave way, with a drop of \+1\.0000 "):
        verify.verify_size(planner, evaluator, source, target)
