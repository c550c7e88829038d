"""What an error at a block's output costs the model, predicted from gradients without running any replacement.

One backward pass over some held-out windows gives, for every block, rows of its input x and of the loss gradient g at
its output. A replacement that errs by e then costs about ½·E[(g·e)²] nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.blocks import Block
from compressor.evaluating import batches, logits_batch
from compressor.moments import ACCUMULATION_DTYPE
from compressor.progress import Progress
from compressor.regression import RankLadder

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
    """Predicted nats per token of the maps of rank 0, 1, … and of the full map; and the factorised estimate of it.

    `joint` looks at real pairs of gradient and error, `factorised` = ½·tr(F·E[e·eᵀ]) only at their averages. Where an
    error is far outside the quadratic regime the two disagree wildly: that is the outlier alarm.
    """

    by_rank: Tensor
    linear: float
    factorised: float


def sample_gradients(
    model: Any, blocks: list[Block], windows: Tensor, progress: Progress, tokens: int = GRADIENT_TOKENS
) -> dict[int, Gradients]:
    """Rows and gradients for every block from one backward pass over at most `tokens` tokens of the windows."""
    windows = windows[: max(1, tokens // windows.shape[1])]
    seq_len = windows.shape[1]
    size = logits_batch(model, seq_len, max(1, BACKWARD_TOKENS // seq_len))
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {block.index: [] for block in blocks}
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
            y, x = flat(output).clone(), inputs.pop(block.index)
            if block.residual_inside:
                y = y - flat(args[1] if len(args) > 1 else kwargs["residual"])

            def backward(gradient: Tensor) -> None:
                g = flat(gradient)
                found[block.index].append((x, y, g.clone()))

            output.register_hook(backward)  # type: ignore[no-untyped-call]

        handles.append(ffn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(last.register_forward_hook(after, with_kwargs=True))

    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    handles.append(model.get_input_embeddings().register_forward_hook(lambda _m, _a, out: out.requires_grad_(True)))
    parts = batches(windows, size)
    try:
        for batch in progress.track("gradients", parts, len(parts)):
            batch = batch.to(model.device)
            with torch.enable_grad():
                logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
                loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        for p in trained:
            p.requires_grad_(True)
    return {
        index: Gradients(*(torch.cat(column) for column in zip(*rows, strict=True))) for index, rows in found.items()
    }


def predict_damage(ladder: RankLadder, gradients: Gradients) -> Damage:
    """Predicted nats of every rank at once: the error's projection on g is a running sum over the ladder's columns."""
    x, y, g = (rows.to(ladder.inputs) for rows in (gradients.x, gradients.y, gradients.g))
    coordinates = (x - ladder.mean_x) @ ladder.inputs
    errors = ladder.mean_y - y + coordinates @ ladder.outputs.T
    steps = coordinates.mul_(g @ ladder.outputs)
    start = (g @ ladder.mean_y - (g * y).sum(1))[:, None]
    projected = torch.cat([start, start + steps.cumsum(1)], dim=1)  # g·e for rank 0, 1, …, full
    # The first-order term E[g·e] is left out: over a few thousand rows it is mostly noise.
    by_rank = projected.square().mean(0) / 2
    factorised = (gradients.metric.to(errors) * (errors.T @ errors)).sum().item() / len(errors) / 2
    return Damage(by_rank=by_rank.cpu(), linear=by_rank[-1].item(), factorised=factorised)


def damage_of(errors: Tensor, gradients: Gradients) -> float:
    """Predicted nats of a replacement that errs by this much on the gradients' rows."""
    return ((errors * gradients.g.to(errors)).sum(1).square().mean() / 2).item()
