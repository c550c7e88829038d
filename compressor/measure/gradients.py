"""What an error at a block's output costs the model, predicted from gradients without running any replacement.

One backward pass over some held-out windows gives, for every block, rows of its input x and of the loss gradient g at
its output. A replacement that errs by e then costs about ½·E[(g·e)²] nats per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.evaluate.perplexity import limit_batch_size
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import Profile
from compressor.measure.regression import RankLadder
from compressor.models.blocks import Block, hidden_of
from compressor.models.offload import device_of
from compressor.models.residual import Stream, TensorSpool, open_stream, resume
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress
from compressor.text import Text, batches

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


def walk_gradients(
    model: Any,
    blocks: list[Block],
    windows: Tensor,
    see: Callable[[Block, Gradients], None],
    progress: Progress,
    tokens: int = GRADIENT_TOKENS,
) -> None:
    """One backward pass over at most `tokens` tokens of the windows; `see` gets each block's rows, the last one first.

    The pass goes back layer by layer and runs each again from its stored input, so that only one layer's activations,
    and one block's rows, are alive at a time, however deep the model is.
    """
    windows = windows[: max(1, tokens // windows.shape[1])]
    size = limit_batch_size(model, windows.shape[1], max(1, BACKWARD_TOKENS // windows.shape[1]))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        with progress.bar("gradients", 2 * len(blocks)) as advance:
            stream = open_stream(model, blocks, windows, size)
            entries = []
            for _ in blocks:
                entries.append(stream.states)
                stream.step()
                advance(1)
            gradients = from_the_top(model, stream, distributed.own_share(batches(windows, size)))
            for block in reversed(blocks):
                rows, gradients = go_back(model, block, stream, entries.pop(), gradients)
                see(block, Gradients(*(torch.cat(distributed.gather([row[k] for row in rows])) for k in range(3))))
                advance(1)
    finally:
        for p in trained:
            p.requires_grad_(True)


def from_the_top(model: Any, stream: Stream, parts: list[Tensor]) -> TensorSpool:
    """The gradient of the loss at the output of the last layer, for every batch."""
    found = TensorSpool((), stream.directory)
    for batch, state in zip(parts, stream.states, strict=True):
        top = state.detach().requires_grad_()
        batch = batch.to(device_of(model))
        with torch.enable_grad(), resume(model, stream.at([top])):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            targets = batch[:, 1:].to(logits.device)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        assert top.grad is not None
        found.append(top.grad)
    return found


def go_back(
    model: Any, block: Block, stream: Stream, entries: Sequence[Tensor], gradients: TensorSpool
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], TensorSpool]:
    """The block's rows, and the gradients at the input of its layer, from those at the layer's output."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    found = TensorSpool((), stream.directory)
    layer = stream.layers[block.index]
    with watch_gradients(model, block, rows):
        for state, gradient in zip(entries, gradients, strict=True):
            entry = state.detach().requires_grad_()
            with torch.enable_grad():
                output = hidden_of(layer(entry, **stream.calls[len(entry)][block.index]))
            output.backward(gradient)  # type: ignore[no-untyped-call]
            assert entry.grad is not None
            found.append(entry.grad)
    return rows, found


@contextmanager
def watch_gradients(model: Any, block: Block, found: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    """While open, every backward pass through the block appends its rows (x, y, g) to `found`."""
    inputs: list[Tensor] = []
    ffn = model.get_submodule(block.path)
    last = model.get_submodule(block.bypass[-1]) if block.bypass else ffn

    def flat(rows: Tensor) -> Tensor:
        return rows.detach().reshape(-1, rows.shape[-1])

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(flat(args[0] if args else kwargs["hidden_states"]))

    def after(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        x, y = inputs.pop(), flat(output).clone()
        if block.residual_inside:
            y = y - flat(args[1] if len(args) > 1 else kwargs["residual"])
        output.register_hook(lambda g: found.append((x, y, flat(g).clone())))  # type: ignore[no-untyped-call]

    handles = [
        ffn.register_forward_pre_hook(before, with_kwargs=True),
        last.register_forward_hook(after, with_kwargs=True),
    ]
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


def predict(model: Any, profile: Profile, text: Text, context: RunContext) -> dict[int, Damage]:
    """The predicted damage of every block's least-squares map, from one backward pass over held-out windows."""
    profiles = {p.block.index: p for p in profile.blocks}

    def compute() -> Tensors:
        damages: dict[int, list[float]] = {}

        def see(block: Block, rows: Gradients) -> None:
            linear = profiles[block.index].linear
            errors = linear(rows.x.to(linear.weight)) - rows.y.to(linear.weight)
            damages[block.index] = [damage_of(errors, rows), factorised_of(errors, rows)]

        walk_gradients(model, [p.block for p in profile.blocks], text.held_out, see, context.progress)
        return {"damages": torch.tensor([damages[index] for index in profiles], dtype=ACCUMULATION_DTYPE)}

    more = {"seq_len": text.seq_len, "batch": context.batch_size, "gradients": GRADIENT_TOKENS}
    key = cache_key("damages", identify(model), text.calibration.sha256, **more)
    rows = context.cache.get("gradients", key, compute)["damages"].tolist()
    return {index: Damage(*row) for index, row in zip(profiles, rows, strict=True)}


def factorised_of(errors: Tensor, gradients: Gradients) -> float:
    """½·tr(F·E[e·eᵀ])."""
    return (gradients.metric.to(errors) * (errors.T @ errors)).sum().item() / len(errors) / 2


def damage_of(errors: Tensor, gradients: Gradients) -> float:
    """Predicted nats of a replacement that errs by this much on the gradients' rows."""
    return nats_of((errors * gradients.g.to(errors)).sum(1)).item()


def nats_of(projected: Tensor) -> Tensor:
    """½·E[(g·e)²] from the rows g·e. The first-order term E[g·e] is left out: over a few thousand rows it is noise."""
    return projected.square().mean(0) / 2
