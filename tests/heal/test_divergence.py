"""The loss of healing: the divergence that torch finds from whole logits, its gradient, and zero for equal models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import REPRESENTATIVE, tiny_model, tokens

from compressor.evaluate.fidelity import compare_logits
from compressor.heal import divergence
from compressor.heal.divergence import Divergence, Head, find_outputs

ROWS, WIDTH, VOCAB = 37, 8, 50


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL(teacher ‖ student) of whole logits, by autograd in float64."""
    ours, theirs = torch.log_softmax(student, 1), torch.log_softmax(teacher, 1)
    return (theirs.exp() * (theirs - ours)).sum(1).mean()


@pytest.mark.parametrize("chunk", [1, 7 * VOCAB, 10**6])
@pytest.mark.parametrize("biased", [False, True])
def test_value_and_gradient_are_those_of_whole_logits(
    chunk: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", chunk)
    weight, bias = random(VOCAB, WIDTH, seed=1), random(VOCAB, seed=2) if biased else None
    student, teacher = random(ROWS, WIDTH, seed=3).requires_grad_(), random(ROWS, WIDTH, seed=4)
    expected = reference(nn.functional.linear(student, weight, bias), nn.functional.linear(teacher, weight, bias))
    (slope,) = torch.autograd.grad(expected, student)
    ours = student.detach().float().requires_grad_()
    found = Divergence.apply(ours, teacher.float(), Head(weight.float(), None if bias is None else bias.float()))
    (3 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad, 3 * slope.float(), rtol=1e-4, atol=1e-7)


def test_rows_may_be_logits() -> None:
    student, teacher = random(ROWS, VOCAB, seed=3).requires_grad_(), random(ROWS, VOCAB, seed=4)
    (slope,) = torch.autograd.grad(reference(student, teacher), student)
    ours = student.detach().float().requires_grad_()
    Divergence.apply(ours, teacher.float(), None).backward()
    torch.testing.assert_close(ours.grad, slope.float(), rtol=1e-4, atol=1e-7)


def test_equal_rows_have_neither_divergence_nor_gradient() -> None:
    rows = random(ROWS, WIDTH, seed=3).float().requires_grad_()
    found = Divergence.apply(rows, rows.detach().clone(), Head(random(VOCAB, WIDTH, seed=1).float(), None))
    found.backward()
    assert found.item() == 0
    assert rows.grad is not None
    assert rows.grad.abs().max() == 0


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_family_is_compared_as_its_logits_are(family: str) -> None:
    teacher, student = tiny_model(family), tiny_model(family)
    with torch.no_grad():
        for layer in [m for m in student.modules() if "Norm" in type(m).__name__]:
            for parameter in layer.parameters():
                parameter.add_(0.1)
    batch = tokens(3, 12)
    ours, theirs = (compute(model, batch) for model in (student, teacher))
    found = ours[0].compare(ours[1], theirs[1], batch)
    with torch.no_grad():
        kl, _ = compare_logits(teacher(input_ids=batch).logits, student(input_ids=batch).logits)
        nats = nn.functional.cross_entropy(
            student(input_ids=batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
        )
    assert kl.max() > 1e-6
    torch.testing.assert_close(found.kl, kl.flatten(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.student_nats, nats, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def compute(model: Any, batch: Tensor) -> tuple[Any, Tensor]:
    outputs = find_outputs(model, batch, None)
    return outputs, outputs.compute(batch)
