"""What an error at a block's output costs the model, predicted from gradients without running any replacement.

One backward pass over some held-out windows gives, for every block, rows of its input x and of the loss gradient g at
its output. A replacement that errs by e then costs about ½·E[(g·e)²] nats per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.blocks import Block, hidden_of
from compressor.evaluating import batches, logits_batch
from compressor.measuring import Profile
from compressor.moments import ACCUMULATION_DTYPE
from compressor.progress import Progress
from compressor.regression import RankLadder
from compressor.stream import Stream, resume
from compressor.text import Text

GRADIENT_TOKENS = 4096
BACKWARD_TOKENS = 1024  # per batch: a backward pass keeps every activation


@dataclass(frozen=True)
class Gradients:
    """Rows of one block: inputs x, outputs y, and loss gradients g at the output."""

    x: Tensor
    y: Tensor
    g: Tensor

    @property
    def metric(self) -> Tensor:
        """F = E[g·gᵀ]: how much the loss minds an error in each output direction."""
        g = self.g.to(ACCUMULATION_DTYPE)
        return g.T @ g / len(g)


@dataclass(frozen=True)
class Damage:
    """Predicted nats per token of a full linear map, the factorised estimate of it, and those of rank 0, 1, ….

    `linear` looks at real pairs of gradient and error, `factorised` = ½·tr(F·E[e·eᵀ]) only at their averages. Where an
    error is far outside the quadratic regime the two disagree wildly: that is the outlier alarm.
    """

    linear: float
    factorised: float
    by_rank: Tensor | None = None


def sample_gradients(
    model: Any, blocks: list[Block], windows: Tensor, progress: Progress, tokens: int = GRADIENT_TOKENS
) -> dict[int, Gradients]:
    """Rows and gradients for every block from one backward pass over at most `tokens` tokens of the windows.

    The pass goes back layer by layer and runs each again from its stored input, so that only one layer's activations
    are alive at a time, however deep the model is.
    """
    windows = windows[: max(1, tokens // windows.shape[1])]
    size = logits_batch(model, windows.shape[1], max(1, BACKWARD_TOKENS // windows.shape[1]))
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {block.index: [] for block in blocks}
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    parts = batches(windows, size)
    try:
        with watch_gradients(model, blocks, found):
            for batch in progress.track("gradients", parts, len(parts)):
                go_back(model, blocks, batch.to(model.device))
    finally:
        for p in trained:
            p.requires_grad_(True)
    return {
        index: Gradients(*(torch.cat(column) for column in zip(*rows, strict=True))) for index, rows in found.items()
    }


def go_back(model: Any, blocks: list[Block], batch: Tensor) -> None:
    """The loss of one batch, back through every layer in turn."""
    stream = Stream(model, blocks, batch, len(batch))
    entries = []
    for index in range(len(blocks)):
        stream.advance(index)
        entries.append(stream.states[0])
    top = entries[-1].detach().requires_grad_()
    stream.states = [top]
    with torch.enable_grad(), resume(model, stream):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = top.grad
    for index in reversed(range(len(blocks) - 1)):
        entry = entries.pop(index).detach().requires_grad_()
        with torch.enable_grad():
            output = hidden_of(stream.layers[index](entry, **stream.calls[len(batch)][index]))
        output.backward(gradient)  # type: ignore[no-untyped-call]
        gradient = entry.grad


@contextmanager
def watch_gradients(
    model: Any, blocks: list[Block], found: dict[int, list[tuple[Tensor, Tensor, Tensor]]]
) -> Iterator[None]:
    """While open, every backward pass through a block appends its rows (x, y, g) to `found`."""
    inputs: dict[int, Tensor] = {}
    handles = []

    def flat(rows: Tensor) -> Tensor:
        return rows.detach().reshape(-1, rows.shape[-1])

    for block in blocks:
        ffn = model.get_submodule(block.path)
        last = model.get_submodule(block.bypass[-1]) if block.bypass else ffn

        def before(_: nn.Module, args: Any, kwargs: Any, block: Block = block) -> None:
            inputs[block.index] = flat(args[0] if args else kwargs["hidden_states"])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Tensor, block: Block = block) -> None:
            x = inputs.pop(block.index)
            if not output.requires_grad:
                return
            y = flat(output).clone()
            if block.residual_inside:
                y = y - flat(args[1] if len(args) > 1 else kwargs["residual"])
            output.register_hook(lambda g: found[block.index].append((x, y, flat(g).clone())))  # type: ignore[no-untyped-call]

        handles.append(ffn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(last.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def predict_damage(ladder: RankLadder, gradients: Gradients) -> Damage:
    """Predicted nats of every rank at once: the error's projection on g is a running sum over the ladder's columns."""
    x, y, g = (rows.to(ladder.inputs) for rows in (gradients.x, gradients.y, gradients.g))
    coordinates = (x - ladder.mean_x) @ ladder.inputs
    errors = ladder.mean_y - y + coordinates @ ladder.outputs.T
    steps = coordinates.mul_(g @ ladder.outputs)
    start = (g @ ladder.mean_y - (g * y).sum(1))[:, None]
    projected = torch.cat([start, start + steps.cumsum(1)], dim=1)  # g·e for rank 0, 1, …, full
    by_rank = nats_of(projected)
    return Damage(by_rank[-1].item(), factorised_of(errors, gradients), by_rank.cpu())


def predict(model: Any, profile: Profile, text: Text, progress: Progress) -> dict[int, Damage]:
    """The predicted damage of every block's least-squares map, from one backward pass over held-out windows."""
    gradients = sample_gradients(model, [p.block for p in profile.blocks], text.held_out, progress)
    damages = {}
    for p in profile.blocks:
        rows = gradients.pop(p.block.index)
        errors = p.linear(rows.x.to(p.linear.weight)) - rows.y.to(p.linear.weight)
        damages[p.block.index] = Damage(damage_of(errors, rows), factorised_of(errors, rows))
    return damages


def factorised_of(errors: Tensor, gradients: Gradients) -> float:
    """½·tr(F·E[e·eᵀ])."""
    return (gradients.metric.to(errors) * (errors.T @ errors)).sum().item() / len(errors) / 2


def damage_of(errors: Tensor, gradients: Gradients) -> float:
    """Predicted nats of a replacement that errs by this much on the gradients' rows."""
    return nats_of((errors * gradients.g.to(errors)).sum(1)).item()


def nats_of(projected: Tensor) -> Tensor:
    """½·E[(g·e)²] from the rows g·e. The first-order term E[g·e] is left out: over a few thousand rows it is noise."""
    return projected.square().mean(0) / 2
