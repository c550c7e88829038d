"""Second moments of what every layer computes on the calibration text: what most methods are made of.

One pass, a layer at a time. With a directory, the moments of each layer are a file there, and only one layer's are in
memory; a run that was stopped goes on after the last file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import Block, find_attention
from compressor.models.heads import layout_of
from compressor.models.residual import Stream, open_stream
from peer_methods.common import BATCH, Inapplicable, Subject, ffn_linears
from peer_methods.unit_attention import UnitAttention, UnitWeights, read_units


@dataclass(frozen=True)
class Cut:
    """Where the parts of joint rows begin and end."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def of(self, name: str) -> slice:
        place = self.names.index(name)
        return slice(sum(self.sizes[:place]), sum(self.sizes[: place + 1]))


@dataclass(frozen=True)
class LayerMoments:
    """E[z zᵀ] of one layer over calibration rows.

    Of attention z is [x, 1, c, h]: its input, one, the input of its output projection, the hidden state it is added to.
    Of the FFN z is [x, 1, a]: its input, one, the activations of its neurons.
    """

    ffn: Tensor
    similarity: float  # mean cosine of the layer's input and output
    width: int
    attention: Tensor | None = None  # None where its heads cannot be told apart
    queries: Tensor | None = None  # mean squares [units, heads of a unit, size], turned by their positions
    keys: Tensor | None = None  # [units, size]

    def part(self, branch: str, first: str, second: str) -> Tensor:
        """E[first secondᵀ], where each is x, 1, a, c or h."""
        joint = self.ffn if branch == "ffn" else self.attention
        if joint is None:
            raise Inapplicable("the heads of its attention cannot be told apart")
        names = ("x", "1", "a") if branch == "ffn" else ("x", "1", "c", "h")
        rest = len(joint) - self.width - 1
        inner = (rest,) if branch == "ffn" else (rest - self.width, self.width)
        cut = Cut(names, (self.width, 1, *inner))
        return joint[cut.of(first), cut.of(second)]


@contextmanager
def inputs_of(model: Any, paths: dict[str, str], seen: dict[str, Any]) -> Iterator[None]:
    """While open, what enters these modules is put under their names: hidden states, and arguments under NAME.call."""

    def see(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            seen[name] = x.reshape(-1, x.shape[-1]).double()
            seen[f"{name}.call"] = (x, kwargs)

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(see(name), with_kwargs=True) for name, path in paths.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def paths_of(model: Any, block: Block) -> dict[str, str]:
    """The modules whose inputs are the rows of one layer's FFN: x and a."""
    return {"x": block.path, "a": ffn_linears(model, block)[1]}


@torch.no_grad()
def input_gram(model: Any, stream: Stream, path: str) -> Tensor:
    """E[z zᵀ] of what enters a module of the layer that the stream is at. Batches are multiplied in float32."""
    seen: dict[str, Any] = {}
    total, rows = torch.zeros(()), 0
    with inputs_of(model, {"z": path}, seen):
        for number, state in enumerate(stream.states):
            stream.call_layer(number, stream.position, state)
            z = seen["z"].float()
            total, rows = total + (z.T @ z).double(), rows + len(z)
    return total / rows


@torch.no_grad()
def measure_layer(model: Any, stream: Stream, block: Block, attention: Block | None, units: Any) -> LayerMoments:
    """The moments of the layer that the stream is at; the stream moves on."""
    paths = paths_of(model, block)
    if attention is not None:
        paths |= {"attention": attention.path, "c": f"{attention.path}.{layout_of(model).output}"}
    seen: dict[str, Any] = {}
    ffn, joint, similarity, rows = torch.zeros(()), torch.zeros(()), 0.0, 0
    squares = [torch.zeros(()), torch.zeros(())]
    outputs = []
    with inputs_of(model, paths, seen):
        for number, state in enumerate(stream.states):
            outputs.append(stream.call_layer(number, stream.position, state))
            one = torch.ones(len(seen["x"]), 1, dtype=torch.float64)
            z = torch.cat([seen["x"], one, seen["a"]], dim=1)
            ffn, rows = ffn + z.T @ z, rows + len(z)
            h = state.reshape(-1, state.shape[-1])
            similarity += nn.functional.cosine_similarity(h, outputs[-1].reshape(h.shape), dim=-1).sum().item()
            if units is not None:
                z = torch.cat([seen["attention"], one, seen["c"], h.double()], dim=1)
                joint = joint + z.T @ z
                x, kwargs = seen["attention.call"]
                split = units.split(x, kwargs.get("position_embeddings"))
                squares = [s + part.double().square().sum((0, 3)) for s, part in zip(squares, split, strict=True)]
    stream.states = outputs
    stream.position += 1
    moments = LayerMoments(ffn / rows, similarity / rows, block.width)
    if units is None:
        return moments
    queries, keys = (part / rows for part in squares)
    return LayerMoments(moments.ffn, moments.similarity, block.width, joint / rows, queries, keys[:, 0])


class Moments:
    """The moments of every layer, from files or from memory."""

    def __init__(self, found: list[Path | LayerMoments]) -> None:
        self.found = found

    def __getitem__(self, layer: int) -> LayerMoments:
        found = self.found[layer]
        return LayerMoments(**torch.load(found, weights_only=True)) if isinstance(found, Path) else found

    def __len__(self) -> int:
        return len(self.found)


def attention_of(subject: Subject) -> tuple[dict[int, Block], dict[int, UnitWeights]]:
    """The attention of every layer, and its units, by layer; Inapplicable where they are not those of all layers."""
    blocks = find_attention(subject.model)
    if [block.layer for block in blocks] != [block.layer for block in subject.blocks]:
        raise Inapplicable("not every layer has attention that can be replaced")
    return {block.layer: block for block in blocks}, read_units(subject.model, blocks)


@cache
def measure_moments(subject: Subject) -> Moments:
    """The moments of all layers on the calibration windows."""
    model, blocks = subject.model, subject.blocks
    try:
        attention, units = attention_of(subject)
    except Inapplicable:
        attention, units = {}, {}
    stream = open_stream(model, blocks, subject.windows, BATCH)
    found: list[Path | LayerMoments] = []
    for block in blocks:
        file = subject.directory and subject.directory / f"layer-{block.layer}.pt"
        if file and file.exists():
            found.append(file)
            continue
        stream.advance(block.layer)
        own = UnitAttention(units[block.layer]) if units else None
        layer = measure_layer(model, stream, block, attention.get(block.layer), own)
        if file is None:
            found.append(layer)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        torch.save(asdict(layer), part)
        part.replace(file)
        found.append(file)
    return Moments(found)
