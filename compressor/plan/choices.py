"""What a plan may change: the kinds of replacement, the blocks, and the signal by which blocks are put in order."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from compressor.models.branches import BRANCHES, AttentionOf, BranchIndex, branch_of, layer_of
from compressor.plan.shapes import KINDS, Shape
from compressor.runtime.errors import InputError

if TYPE_CHECKING:
    from compressor.measure.profile import Profile

# What attention may become where no kinds are named: not heads with a map beside them, which GGUF cannot say.
ATTENTION_KINDS = tuple(kind for kind in KINDS if kind != "hybrid")
Signal = Literal["damage", "r2", "stream"]
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?:\.(ffn|attention))?", re.ASCII)


@dataclass(frozen=True)
class BlockRange:
    """The blocks that one word of an option names: one block, or all from the first to the last.

    A number alone is the FFN of that layer; `7.attention` is the attention of layer 7.
    """

    first: int
    last: int
    branch: str = "ffn"

    @classmethod
    def parse(cls, option: str, word: str) -> BlockRange:
        found = RANGE.fullmatch(word.strip())
        if not found:
            raise InputError(
                f"{option} takes numbers of blocks and ranges, got {word!r}; try {option} 0-3,7 or {option} 7.attention"
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InputError(
                f"{option} {first}-{last} is a range that ends before it begins; try {option} {last}-{first}"
            )
        return cls(first, last, found[3] or "ffn")

    def indices(self) -> set[BranchIndex]:
        layers = range(self.first, self.last + 1)
        return set(map(AttentionOf, layers)) if self.branch == "attention" else set(layers)

    def __str__(self) -> str:
        numbers = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{numbers}.attention" if self.branch == "attention" else numbers


@dataclass(frozen=True)
class Choices:
    """What a search may do. `blocks` None stands for all blocks of the `branches`."""

    kinds: Collection[str] = KINDS
    blocks: Collection[BranchIndex] | None = None
    rank_by: Signal = "damage"
    branches: Collection[str] = BRANCHES

    def allows_block(self, index: BranchIndex) -> bool:
        """Whether this block may be replaced at all."""
        return branch_of(index) in self.branches and (self.blocks is None or index in self.blocks)

    def within(self, branches: Collection[str]) -> Choices:
        """The same choices among these kinds of branches only."""
        return replace(self, branches=tuple(branch for branch in self.branches if branch in branches))

    @property
    def searched_branches(self) -> tuple[str, ...]:
        """The kinds of branches that have a block which may be replaced."""
        named = {branch_of(index) for index in self.blocks or ()}
        return tuple(b for b in BRANCHES if b in self.branches and (self.blocks is None or b in named))

    def kinds_of(self, index: BranchIndex) -> Collection[str]:
        """The kinds that a block may become."""
        return ATTENTION_KINDS if isinstance(index, AttentionOf) and self.kinds is KINDS else self.kinds

    def allows(self, index: BranchIndex, shape: Shape) -> bool:
        """Whether this block may take this shape."""
        return self.allows_block(index) and shape.kind in self.kinds_of(index)

    def keeps_neurons(self, index: BranchIndex) -> bool:
        """Whether a replacement of this block may keep some of its units."""
        return self.allows_block(index) and any(kind in self.kinds_of(index) for kind in ("pruned", "hybrid"))

    def refuse_unknown(self, blocks: int) -> None:
        """InputError when a kind is not known or the model, which has this many blocks, lacks one that is named."""
        for kind in self.kinds:
            check_kind(kind)
        for index in self.blocks or ():
            if not 0 <= layer_of(index) < blocks:
                raise InputError(f"block {index} is chosen, but the model has {list_blocks(blocks)}")
        if not self.kinds or (self.blocks is not None and not self.blocks):
            raise InputError("the choices leave nothing to replace; name a kind and a block")

    def unexplained(self, profile: Profile | None) -> dict[BranchIndex, float] | None:
        """The share of every block's output that its linear map leaves unexplained, 1 − R², by the signal that orders
        the blocks; None where predicted damage orders them."""
        if self.rank_by == "damage":
            return None
        assert profile is not None
        values = {p.block.index: p.r2_lin if self.rank_by == "r2" else p.r2_stream for p in profile.branches}
        return {index: max(1.0 - r2, 0.0) if math.isfinite(r2) else 1.0 for index, r2 in values.items()}


ANYTHING = Choices()


def check_kind(word: str) -> str:
    """A kind of replacement, or an error that lists all of them."""
    if word not in KINDS:
        raise InputError(f"--kinds {word or repr(word)} is not known; use {', '.join(KINDS)}")
    return word


def check_branch(word: str) -> str:
    """A kind of branch, or `all`, or an error that lists them."""
    if word not in (*BRANCHES, "all"):
        raise InputError(f"--branches {word or repr(word)} is not known; use {', '.join(BRANCHES)} or all")
    return word


def resolve_choices(
    blocks: int,
    *,
    kinds: Iterable[str] | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    rank_by: Signal = "damage",
    branches: Collection[str] = BRANCHES,
) -> Choices:
    """The choices for a model with this many layers, from the words of --kinds, --blocks and --skip; None: not given.

    InputError for what the model does not have, and when no block is left.
    """
    everything: frozenset[BranchIndex] = frozenset(
        index for branch in branches for index in BlockRange(0, blocks - 1, branch).indices()
    )
    chosen = everything if only is None else name_blocks("--blocks", only, blocks, branches)
    skipped = frozenset() if skip is None else name_blocks("--skip", skip, blocks, BRANCHES)
    kept = chosen - skipped
    if not kept:
        raise InputError(f"--blocks and --skip leave no block to replace; the model has {list_blocks(blocks)}")
    allowed = KINDS if kinds is None else frozenset(map(check_kind, kinds))
    return Choices(allowed, None if kept == everything else kept, rank_by, tuple(branches))


def name_blocks(option: str, words: Iterable[str], blocks: int, branches: Collection[str]) -> frozenset[BranchIndex]:
    """The blocks that the words of an option name, each of which the model must have."""
    named: set[BranchIndex] = set()
    for word in words:
        one = BlockRange.parse(option, word)
        if one.last >= blocks:
            raise InputError(f"{option} {one}: the model has {list_blocks(blocks)}")
        if one.branch not in branches:
            raise InputError(f"{option} {one} is {one.branch}, and --branches {','.join(branches)} leaves it as it is")
        named |= one.indices()
    return frozenset(named)


def list_blocks(count: int) -> str:
    return f"blocks 0 to {count - 1}" if count > 1 else "block 0 alone"
