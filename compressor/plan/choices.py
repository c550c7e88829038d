"""What a plan may change: the kinds of replacement, the blocks, and the signal by which blocks are put in order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compressor.plan.shapes import KINDS, Shape
from compressor.runtime.errors import InputError

if TYPE_CHECKING:
    from compressor.measure.profile import Profile

Signal = Literal["damage", "r2", "stream"]
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class BlockRange:
    """The blocks that one word of an option names: one block, or all from the first to the last."""

    first: int
    last: int

    @classmethod
    def parse(cls, option: str, word: str) -> BlockRange:
        found = RANGE.fullmatch(word.strip())
        if not found:
            raise InputError(f"{option} takes numbers of blocks and ranges, got {word!r}; try {option} 0-3,7")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InputError(
                f"{option} {first}-{last} is a range that ends before it begins; try {option} {last}-{first}"
            )
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Choices:
    """What a search may do. `blocks` None stands for all of them."""

    kinds: Collection[str] = KINDS
    blocks: Collection[int] | None = None
    rank_by: Signal = "damage"

    def allows_block(self, index: int) -> bool:
        """Whether this block may be replaced at all."""
        return self.blocks is None or index in self.blocks

    def allows(self, index: int, shape: Shape) -> bool:
        """Whether this block may take this shape."""
        return self.allows_block(index) and shape.kind in self.kinds

    def keeps_neurons(self, index: int) -> bool:
        """Whether a replacement of this block may keep some of its neurons."""
        return self.allows_block(index) and any(kind in self.kinds for kind in ("pruned", "hybrid"))

    def refuse_unknown(self, blocks: int) -> None:
        """InputError when a kind is not known or the model, which has this many blocks, lacks one that is named."""
        for kind in self.kinds:
            check_kind(kind)
        for index in self.blocks or ():
            if not 0 <= index < blocks:
                raise InputError(f"block {index} is chosen, but the model has {list_blocks(blocks)}")
        if not self.kinds or (self.blocks is not None and not self.blocks):
            raise InputError("the choices leave nothing to replace; name a kind and a block")

    def unexplained(self, profile: Profile | None) -> dict[int, float] | None:
        """The share of every block's output that its linear map leaves unexplained, 1 − R², by the signal that orders
        the blocks; None where predicted damage orders them."""
        if self.rank_by == "damage":
            return None
        assert profile is not None
        values = {p.block.index: p.r2_lin if self.rank_by == "r2" else p.r2_stream for p in profile.blocks}
        return {index: max(1.0 - r2, 0.0) if math.isfinite(r2) else 1.0 for index, r2 in values.items()}


ANYTHING = Choices()


def check_kind(word: str) -> str:
    """A kind of replacement, or an error that lists all of them."""
    if word not in KINDS:
        raise InputError(f"--kinds {word or repr(word)} is not known; use {', '.join(KINDS)}")
    return word


def resolve_choices(
    blocks: int,
    *,
    kinds: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    rank_by: Signal = "damage",
) -> Choices:
    """The choices for a model with this many blocks, from the words of --kinds, --blocks and --skip; None: not given.

    InputError for what the model does not have, and when no block is left.
    """
    everything = frozenset(range(blocks))
    chosen = everything if only is None else name_blocks("--blocks", only, blocks)
    skipped = frozenset() if skip is None else name_blocks("--skip", skip, blocks)
    if not chosen - skipped:
        raise InputError(f"--blocks and --skip leave no block to replace; the model has {list_blocks(blocks)}")
    kept = chosen - skipped
    allowed = KINDS if kinds is None else frozenset(map(check_kind, kinds))
    return Choices(allowed, None if kept == everything else kept, rank_by)


def name_blocks(option: str, words: Iterable[str], blocks: int) -> frozenset[int]:
    """The blocks that the words of an option name, each of which the model must have."""
    named: set[int] = set()
    for word in words:
        one = BlockRange.parse(option, word)
        if one.last >= blocks:
            raise InputError(f"{option} {one}: the model has {list_blocks(blocks)}")
        named |= set(range(one.first, one.last + 1))
    return frozenset(named)


def list_blocks(count: int) -> str:
    return f"blocks 0 to {count - 1}" if count > 1 else "block 0 alone"
