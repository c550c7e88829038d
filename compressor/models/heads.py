"""The heads of attention: which rows and columns of its projections belong to which of them.

A unit is a key-value head with all of the query heads that read it; in multi-head attention it is one head. The
attention's output is linear in `a`, the input of its output projection, and a has some columns for every unit. LAYOUTS
says how a family arranges its projections. It is believed only where attention without some of its units computes what
the stock module computes when those units' columns of `a` are zero. Attention that does not (where a norm runs over all
heads, say) has no units, and can only be kept or replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.modeling_compressor import KeptHeads
from compressor.models.blocks import Block, hidden_states_of, modules_of, output_rows, run_probe, with_hidden_states
from compressor.models.neurons import Matrix

TOLERANCE, TOLERANCE_IN_EPSILONS = 1e-4, 32  # of the output's size: at least, and in units of the dtype's epsilon


@dataclass(frozen=True)
class Layout:
    """How a family's attention module is built.

    `inputs` are its projections of x: one each for queries, keys and values, or one for all, either `stacked` one after
    another (all queries, all keys, all values) or `interleaved` unit by unit. `counts` are attributes that say how many
    there are of something: "units", "queries" (query heads), or "columns" of a. `per_head` are the arguments that may
    have a part for each query head, with their positions.
    """

    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    fused: Literal["no", "stacked", "interleaved"] = "no"
    counts: Mapping[str, Literal["units", "queries", "columns"]] = field(default_factory=dict)
    per_head: Mapping[str, int] = field(default_factory=dict)


LAYOUTS: dict[str, Layout] = {
    "biogpt": Layout(output="out_proj"),
    "bloom": Layout(("query_key_value",), "dense", "interleaved", {"num_heads": "queries"}, {"alibi": 2}),
    "falcon": Layout(
        ("query_key_value",),
        "dense",
        "interleaved",
        {"num_heads": "queries", "num_kv_heads": "units"},
        {"alibi": 1, "attention_mask": 2},
    ),
    "gpt2": Layout(("c_attn",), "c_proj", "stacked", {"num_heads": "queries", "split_size": "columns"}),
    "gpt_neo": Layout(output="out_proj", counts={"num_heads": "queries"}),
    "gpt_neox": Layout(("query_key_value",), "dense", "interleaved"),
    "gptj": Layout(output="out_proj", counts={"num_attention_heads": "queries"}),
    "mpt": Layout(("Wqkv",), "out_proj", "stacked", {"n_heads": "queries"}, {"position_bias": 1}),
    "opt": Layout(output="out_proj", counts={"num_heads": "queries"}),
    "persimmon": Layout(("query_key_value",), "dense", "interleaved", {"num_heads": "queries"}),
    "phi": Layout(output="dense"),
    "phi3": Layout(
        ("qkv_proj",),
        "o_proj",
        "stacked",
        {"num_key_value_heads": "units", "config.num_attention_heads": "queries"},
    ),
    "stablelm": Layout(counts={"num_heads": "queries", "num_key_value_heads": "units"}),
    "xglm": Layout(output="out_proj", counts={"num_heads": "queries", "embed_dim": "columns"}),
}
USUAL_LAYOUT = Layout()


@dataclass(frozen=True)
class Heads:
    """The units of one attention; `outer_path` is the path of its output projection."""

    module: Any
    layout: Layout
    count: int  # units
    queries: int  # query heads of a unit
    head_width: int  # of queries and keys
    columns: int  # of a, that belong to a unit
    width: int
    outer_matrix: Matrix
    outer_path: str
    residual_inside: bool

    @property
    def biased(self) -> bool:
        """Whether the output projection has a bias."""
        return self.outer_matrix.bias is not None

    @property
    def size(self) -> int:
        """The number of parameters of one unit."""
        inputs: int = sum(p.numel() for name in self.layout.inputs for p in getattr(self.module, name).parameters())
        return inputs // self.count + self.columns * self.width

    @property
    def fixed(self) -> int:
        """The number of parameters that stay as long as a unit stays, such as those of norms of queries and keys."""
        projections = {*self.layout.inputs, self.layout.output}
        others = [child for name, child in self.module.named_children() if name not in projections]
        return sum(p.numel() for child in others for p in child.parameters())

    @property
    def outer(self) -> Tensor:
        """[units · columns, width]: the rows that a unit's columns add to the output."""
        return self.outer_matrix.weight.T

    @property
    def cached_values(self) -> int:
        """Keys and values of one unit that a cache keeps for each token."""
        return self.head_width + self.columns // self.queries

    def columns_of(self, kept: Tensor) -> Tensor:
        """The columns of a that belong to these units."""
        return spread(kept, self.columns)

    def rows_of(self, name: str, kept: Tensor) -> Tensor:
        """The rows of one of the projections of x that belong to these units."""
        rows = len(Matrix(getattr(self.module, name)).weight)
        if self.layout.fused != "stacked":
            return spread(kept, rows // self.count)
        sizes = [self.queries * self.head_width, self.head_width, self.columns // self.queries]
        starts = [0, self.count * sizes[0], self.count * (sizes[0] + sizes[1])]
        return torch.cat([start + spread(kept, size) for start, size in zip(starts, sizes, strict=True)])

    def keep(self, kept: Tensor, rank: int = 0, **placement: Any) -> KeptHeads:
        """Attention with these units: projections of x as they are, a zero output projection, and zeros beside it."""
        numbers = {"units": len(kept), "queries": len(kept) * self.queries, "columns": len(kept) * self.columns}
        rows = {name: self.rows_of(name, kept) for name in self.layout.inputs}
        arguments, query_heads = dict(self.layout.per_head), self.count * self.queries
        modules = KeptHeads(
            self.module,
            self.width,
            rank,
            kept.tolist(),
            {name: len(found) for name, found in rows.items()},
            (self.layout.output, len(kept) * self.columns),
            {name: numbers[what] for name, what in self.layout.counts.items()},
            self.residual_inside,
            {"heads": query_heads, "arguments": arguments} if arguments else None,
            **placement,
        )
        with torch.no_grad():
            for name, found in rows.items():
                matrix, target = Matrix(getattr(self.module, name)), getattr(modules.attention, name)
                target.weight.copy_(matrix.weight[found.to(matrix.weight.device)])
                if matrix.bias is not None:
                    target.bias.copy_(matrix.bias[found.to(matrix.bias.device)])
        return modules


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of an attention module, what it returned, and the input of its output projection."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    a: Tensor | None


def spread(units: Tensor, size: int) -> Tensor:
    """The members of these units, each of which has `size` of them, in order."""
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()


@torch.no_grad()
def record_attention(model: Any, blocks: Sequence[Block]) -> dict[int, AttentionCall]:
    """One call of the attention of every layer, by layer, from one pass over a few tokens."""
    layout = layout_of(model)
    inner: dict[int, Tensor] = {}
    calls: dict[int, AttentionCall] = {}
    handles = []
    for block in blocks:

        def before_output(_: nn.Module, args: Any, layer: int = block.layer) -> None:
            inner[layer] = args[0].reshape(-1, args[0].shape[-1])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, layer: int = block.layer) -> None:
            own = with_hidden_states(output, hidden_states_of(output).clone())  # some layers add to them in place
            calls[layer] = AttentionCall(args, kwargs, own, inner.pop(layer, None))

        module = model.get_submodule(block.path)
        output = getattr(module, layout.output, None)
        if isinstance(output, nn.Module):
            handles.append(output.register_forward_pre_hook(before_output))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    run_probe(model, handles)
    return calls


def layout_of(model: Any) -> Layout:
    return LAYOUTS.get(model.config.get_text_config().model_type, USUAL_LAYOUT)


def find_heads(model: Any, block: Block, call: AttentionCall) -> Heads | None:
    """The units of one attention, or None where it cannot be told apart into units."""
    heads = describe_heads(model, block, call)
    try:
        believed = heads is not None and is_linear_in(heads, call, block) and computes_without_units(heads, call, block)
    except (RuntimeError, ValueError, IndexError):
        return None
    return heads if believed else None


def describe_heads(model: Any, block: Block, call: AttentionCall) -> Heads | None:
    """The units as the family's layout has them, without a check; None where the module has no such parts."""
    config, layout = model.config.get_text_config(), layout_of(model)
    (module,) = modules_of(model, block)
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in (*layout.inputs, layout.output)):
        return None
    outer = Matrix(getattr(module, layout.output))
    query_heads = config.num_attention_heads
    columns = outer.weight.shape[1]
    rows = sum(len(Matrix(getattr(module, name)).weight) for name in layout.inputs)
    if columns % query_heads or call.a is None:
        return None
    value_width = columns // query_heads
    # A config may name key-value heads in a family that has none.
    units, head_width = next(
        (
            (units, (rows - units * value_width) // (query_heads + units))
            for units in (count_units(config, query_heads), query_heads)
            if query_heads % units == 0 and (rows - units * value_width) % (query_heads + units) == 0
        ),
        (0, 0),
    )
    if not units:
        return None
    return Heads(
        module=module,
        layout=layout,
        count=units,
        queries=query_heads // units,
        head_width=head_width,
        columns=columns // units,
        width=block.width,
        outer_matrix=outer,
        outer_path=f"{block.path}.{layout.output}",
        residual_inside=block.residual_inside,
    )


def anchor_layers(model: Any) -> set[int]:
    """The layers that must keep at least one unit: caches ask them how many tokens they hold.

    They ask layer 0 for the length, and the first layer of each kind (with a sliding window or without) for the size of
    that kind's mask. A layer without units never writes to its cache and would answer 0.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return {0, *(list(kinds).index(kind) for kind in set(kinds))}


def count_units(config: Any, query_heads: int) -> int:
    """The number of key-value heads."""
    if getattr(config, "model_type", "") == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else query_heads
    named = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    return int(named or query_heads)


def is_linear_in(heads: Heads, call: AttentionCall, block: Block) -> bool:
    """Whether the module's output is its output projection of a."""
    assert call.a is not None
    y = output_rows(call.args, call.kwargs, call.output, block)
    return is_close(heads.outer_matrix.apply(call.a), y, y.dtype)


@torch.no_grad()
def computes_without_units(heads: Heads, call: AttentionCall, block: Block) -> bool:
    """Whether attention without every second unit computes what it does when those units' columns of a are zero.

    The first unit is one of those, so that every kept one has another place than before.
    """
    assert call.a is not None
    if heads.count == 1:
        return True
    kept = torch.arange(1, heads.count, 2)
    columns = heads.columns_of(kept).to(call.a.device)
    weight = heads.outer_matrix.weight
    module = heads.keep(kept, dtype=weight.dtype, device=weight.device)
    module.output_projection.weight.copy_(weight[:, columns])
    bias = heads.outer_matrix.bias
    if bias is not None:
        module.output_bias.copy_(bias)
    module.eval()
    y = output_rows(call.args, call.kwargs, module(*call.args, **call.kwargs), block)
    expected = call.a[:, columns] @ weight[:, columns].T + (0 if bias is None else bias)
    return is_close(y, expected, y.dtype)


def is_close(output: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    error = (output.double() - expected.double()).square().mean().sqrt() / scale
    return bool(error <= max(TOLERANCE, TOLERANCE_IN_EPSILONS * torch.finfo(dtype).eps))
