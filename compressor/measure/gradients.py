"""Damage: what an error at a block's output costs the model, predicted from gradients without running a replacement.

One backward pass over some held-out windows gives, for every block, rows of its input x and of the loss gradient g at
its output. A replacement that errs by e then costs about ½·E[(g·e)²] nats per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.evaluate.perplexity import limit_batch_size
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import Profile
from compressor.measure.regression import RankLadder
from compressor.models.blocks import Block, find_blocks, hidden_states_of, input_rows, output_rows
from compressor.models.branches import BranchIndex
from compressor.models.offload import device_of
from compressor.models.residual import Stream, open_stream, resume
from compressor.models.source import identify
from compressor.models.spool import TensorSpool
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress
from compressor.text import Text, batches

GRADIENT_TOKENS = 4096
BACKWARD_TOKENS = 1024  # per batch: a backward pass keeps every activation


@dataclass(frozen=True)
class Gradients:
    """Rows of one block (one row per token): inputs x, outputs y, and loss gradients g at the output.

    Where they were asked for, `a` are the inputs of a module inside the block.
    """

    x: Tensor
    y: Tensor
    g: Tensor
    a: Tensor | None = None

    @property
    def metric(self) -> Tensor:
        """F = E[g·gᵀ]: how much the loss depends on each output direction."""
        g = self.g.to(ACCUMULATION_DTYPE)
        return g.T @ g / len(g)


@dataclass(frozen=True)
class Damage:
    """Predicted nats per token of replacing a block by its linear map, in two estimates, and by maps of rank 0, 1, ….

    `linear` = ½·E[(g·e)²] pairs each row's gradient with its error; `factorised` = ½·tr(F·E[e·eᵀ]) takes only the
    averages of both. Where errors are too large for a quadratic estimate, the two differ by far: a sign of outliers.
    `slopes` are the means E[g·e] by rank, which these estimates leave out.
    """

    linear: float
    factorised: float
    by_rank: Tensor | None = None
    slopes: Tensor | None = None


def visit_gradients(
    model: Any,
    blocks: list[Block],
    windows: Tensor,
    visit: Callable[[Block, Gradients], None],
    progress: Progress,
    tokens: int = GRADIENT_TOKENS,
    inner_paths: Mapping[BranchIndex, str] | None = None,
) -> None:
    """One backward pass over at most `tokens` tokens of the windows; `visit` gets the rows of each block, last first.

    `inner_paths` gives, by block, the path of a module inside it whose input rows are wanted too. The pass goes back
    layer by layer and runs each again from its stored input, so that only one layer's activations, and its blocks'
    rows, are in memory at a time.
    """
    windows = windows[: max(1, tokens // windows.shape[1])]
    size = limit_batch_size(model, windows.shape[1], max(1, BACKWARD_TOKENS // windows.shape[1]))
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        layers = find_blocks(model)
        with progress.bar("gradients", 2 * len(layers)) as advance:
            stream = open_stream(model, layers, windows, size)
            layer_inputs = []
            for _ in layers:
                layer_inputs.append(stream.states)
                stream.step()
                advance(1)
            gradients = loss_gradients(model, stream, distributed.own_share(batches(windows, size)))
            for layer in reversed(range(len(layers))):
                watches = [Watch(b, (inner_paths or {}).get(b.index)) for b in blocks if b.layer == layer]
                gradients = backpropagate_layer(model, layer, watches, stream, layer_inputs.pop(), gradients)
                for watch in reversed(watches):
                    visit(watch.block, watch.gather())
                advance(1)
    finally:
        for p in trainable:
            p.requires_grad_(True)


def loss_gradients(model: Any, stream: Stream, parts: list[Tensor]) -> TensorSpool:
    """The gradient of the loss at the output of the last layer, for every batch."""
    gradients = TensorSpool((), stream.directory)
    for batch, state in zip(parts, stream.states, strict=True):
        top = state.detach().requires_grad_()
        batch = batch.to(device_of(model))
        with torch.enable_grad(), resume(model, stream.with_states([top])):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
            targets = batch[:, 1:].to(logits.device)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        assert top.grad is not None
        gradients.append(top.grad)
    return gradients


class Watch:
    """Takes the rows of one block from backward passes through its layer."""

    def __init__(self, block: Block, inner_path: str | None) -> None:
        self.block, self.inner_path = block, inner_path
        self.inputs: list[Tensor] = []
        self.inner_inputs: list[Tensor] = []
        self.seen: list[tuple[Tensor, ...]] = []  # x, y, g and a of every batch

    def gather(self) -> Gradients:
        """The rows of all batches, of all processes."""
        columns = [distributed.gather([row[k] for row in self.seen]) for k in range(4 if self.inner_path else 3)]
        return Gradients(*(torch.cat(column) for column in columns))

    @contextmanager
    def open(self, model: Any) -> Iterator[None]:
        """While open, every backward pass through the block adds its rows."""
        block, module = self.block, model.get_submodule(self.block.path)
        last = model.get_submodule(block.bypass[-1]) if block.bypass else module

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.inputs.append(input_rows(args, kwargs, block).detach())

        def before_inner(_: nn.Module, args: Any) -> None:
            self.inner_inputs.append(args[0].detach().reshape(-1, args[0].shape[-1]))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x, y = self.inputs.pop(), output_rows(args, kwargs, output, block).detach()
            inner = self.inner_inputs.copy()
            self.inner_inputs.clear()

            def note(g: Tensor) -> None:
                self.seen.append((x, y, g.detach().reshape(y.shape).clone(), *inner))

            hidden_states_of(output).register_hook(note)  # type: ignore[no-untyped-call]

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            last.register_forward_hook(after, with_kwargs=True),
        ]
        if self.inner_path:
            handles.append(model.get_submodule(self.inner_path).register_forward_pre_hook(before_inner))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def backpropagate_layer(
    model: Any,
    layer: int,
    watches: Sequence[Watch],
    stream: Stream,
    inputs: Sequence[Tensor],
    gradients: TensorSpool,
) -> TensorSpool:
    """The gradients at a layer's input, from the inputs and the gradients at its output; the watches take the rows of
    its blocks on the way."""
    input_gradients = TensorSpool((), stream.directory)
    with ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.open(model))
        for number, (state, gradient) in enumerate(zip(inputs, gradients, strict=True)):
            entry = state.detach().requires_grad_()
            with torch.enable_grad():
                output = stream.call_layer(number, layer, entry)
            output.backward(gradient)  # type: ignore[no-untyped-call]
            assert entry.grad is not None
            input_gradients.append(entry.grad)
    return input_gradients


def predict_ladder_damage(ladder: RankLadder, gradients: Gradients) -> Damage:
    """Predicted nats of every rank at once: g·e is a running sum over the columns of the ladder."""
    x, y, g = (rows.to(ladder.inputs) for rows in (gradients.x, gradients.y, gradients.g))
    coordinates = (x - ladder.mean_x) @ ladder.inputs
    errors = ladder.mean_y - y + coordinates @ ladder.outputs.T
    rank_terms = coordinates.mul_(g @ ladder.outputs)
    start = (g @ ladder.mean_y - (g * y).sum(1))[:, None]
    projected = torch.cat([start, start + rank_terms.cumsum(1)], dim=1)  # g·e for rank 0, 1, …, full
    by_rank = quadratic_cost(projected)
    factorised = factorised_damage(errors, gradients)
    return Damage(by_rank[-1].item(), factorised, by_rank.cpu(), projected.mean(0).cpu())


def predict_damages(model: Any, profile: Profile, text: Text, context: RunContext) -> dict[BranchIndex, Damage]:
    """The predicted damage of replacing each block by its least-squares map, from one pass over held-out windows."""
    profiles = {p.block.index: p for p in profile.branches}

    def compute() -> Tensors:
        damages: dict[BranchIndex, list[float]] = {}

        def visit(block: Block, rows: Gradients) -> None:
            linear = profiles[block.index].trial_map
            errors = linear(rows.x.to(linear.weight)) - rows.y.to(linear.weight)
            damages[block.index] = [damage_from_errors(errors, rows), factorised_damage(errors, rows)]

        visit_gradients(model, [p.block for p in profile.branches], text.held_out, visit, context.progress)
        return {"damages": torch.tensor([damages[index] for index in profiles], dtype=ACCUMULATION_DTYPE)}

    more: dict[str, Any] = {"seq_len": text.seq_len, "batch": context.batch_size, "gradients": GRADIENT_TOKENS}
    if profile.attention:
        more["branches"] = [p.block.path for p in profile.branches]
    key = cache_key("damages", identify(model), text.calibration_sha256, **more)
    rows = context.cache.get("gradients", key, compute)["damages"].tolist()
    return {index: Damage(*row) for index, row in zip(profiles, rows, strict=True)}


def factorised_damage(errors: Tensor, gradients: Gradients) -> float:
    """½·tr(F·E[e·eᵀ]): the estimate that uses only the averages of gradients and errors."""
    return (gradients.metric.to(errors) * (errors.T @ errors)).sum().item() / len(errors) / 2


def damage_from_errors(errors: Tensor, gradients: Gradients) -> float:
    """Predicted nats per token of a replacement with these errors on the gradients' rows."""
    return orders_from_errors(errors, gradients)[0]


def orders_from_errors(errors: Tensor, gradients: Gradients) -> tuple[float, float]:
    """½·E[(g·e)²], the damage, and E[g·e], its slope, of a replacement with these errors on the gradients' rows."""
    projected = (errors * gradients.g.to(errors)).sum(1)
    return quadratic_cost(projected).item(), projected.mean().item()


def quadratic_cost(projected: Tensor) -> Tensor:
    """½·E[(g·e)²] from the rows g·e. The slope E[g·e] is a matter of its own: over a few thousand rows it is mostly
    noise in an FFN, and much of the truth in attention."""
    return projected.square().mean(0) / 2
