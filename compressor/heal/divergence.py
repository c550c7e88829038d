"""The loss that healing lowers: how far a student's predictions are from its teacher's, token by token.

The loss is KL(teacher ‖ student) over the whole vocabulary, at temperature 1. Most families multiply the last hidden
states by the output embeddings and do nothing else; there the logits of some rows exist at a time, and their gradient
is found with them, so that no tensor of all logits is ever made. Families that cap or scale their logits keep them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressor.evaluate.perplexity import has_plain_head
from compressor.models.blocks import backbone

CHUNK_LOGITS = 8 * 2**20  # logits of the student that exist at a time


class Distance(NamedTuple):
    """By predicted token: the divergence of the student from the teacher, and both their losses, in nats."""

    kl: Tensor
    student_nats: Tensor
    teacher_nats: Tensor


@dataclass(frozen=True)
class Head:
    """Output embeddings that are not trained, in the precision of their products."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows.to(self.weight.dtype), self.weight, self.bias).float()


@dataclass(frozen=True)
class Outputs:
    """What a model puts out for a batch: its last hidden states where its head is plain, else its logits."""

    model: Any
    head: Head | None

    def compute(self, batch: Tensor) -> Tensor:
        """Rows of all tokens but the last of each window, which predicts nothing that is known."""
        if self.head is not None:
            output = backbone(self.model)(input_ids=batch, use_cache=False).last_hidden_state
        else:
            output = self.model(input_ids=batch, use_cache=False).logits
        return output[:, :-1].flatten(0, 1)  # type: ignore[no-any-return]

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The mean divergence in nats per token, with its gradient for the student's rows."""
        return Divergence.apply(student, teacher.detach(), self.head)  # type: ignore[no-untyped-call,no-any-return]

    @torch.no_grad()
    def compare(self, student: Tensor, teacher: Tensor, batch: Tensor) -> Distance:
        """The divergence and both losses of every predicted token of a batch."""
        targets = batch[:, 1:].flatten()
        parts = []
        for rows in row_chunks(student, teacher, self.head):
            ours, theirs = (torch.log_softmax(logits_of(part[rows], self.head), 1) for part in (student, teacher))
            kl = nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(1)
            column = targets[rows, None].to(ours.device)
            parts.append(Distance(kl, -ours.gather(1, column)[:, 0], -theirs.gather(1, column)[:, 0]))
        return Distance(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def find_outputs(model: Any, windows: Tensor, precision: torch.dtype | None) -> Outputs:
    """What to compare of this model; its head is tried on a few tokens."""
    if not has_plain_head(model, windows):
        return Outputs(model, None)
    head = model.get_output_embeddings()
    weight, bias = (None if p is None else p.detach().to(precision or p.dtype) for p in (head.weight, head.bias))
    assert weight is not None
    return Outputs(model, Head(weight, bias))


def row_chunks(student: Tensor, teacher: Tensor, head: Head | None) -> list[slice]:
    """The rows, so many at a time that their logits are few."""
    step = max(1, CHUNK_LOGITS // (teacher.shape[1] if head is None else len(head.weight)))
    return [slice(start, start + step) for start in range(0, len(student), step)]


def logits_of(rows: Tensor, head: Head | None) -> Tensor:
    """Float32 logits of last hidden states; without a head the rows are logits."""
    return rows.float() if head is None else head.logits(rows)


class Divergence(torch.autograd.Function):
    """Mean KL(teacher ‖ student) of some rows. Its gradient is found on the way: for logits z it is (p_student −
    p_teacher) / rows, and for hidden states that times the output embeddings, which are not trained."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Head | None) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        gradient = torch.empty_like(student)
        for rows in row_chunks(student, teacher, head):
            ours, theirs = logits_of(student[rows], head), logits_of(teacher[rows], head)
            our_total, their_total = ours.logsumexp(1, keepdim=True), theirs.logsumexp(1, keepdim=True)
            wanted = (theirs - their_total).exp_()
            # KL = Σ p (theirs − ours) − log Σ exp theirs + log Σ exp ours
            lost = torch.linalg.vecdot(wanted, theirs.sub_(ours)) + (our_total - their_total)[:, 0]
            total += lost.double().sum().cpu()
            slope = ours.sub_(our_total).exp_().sub_(wanted).div_(len(student))
            if head is not None:
                slope = slope.to(head.weight.dtype) @ head.weight
            gradient[rows] = slope.to(gradient)
        ctx.save_for_backward(gradient)
        return (total / max(1, len(student))).float()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient), None, None
