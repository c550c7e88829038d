"""The linearity of every block as a value: what was measured of it, and its exact least-squares map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from compressor.measure.regression import AffineMap
from compressor.models.blocks import Block

FIGURES = (
    "r2_lin",
    "r2_stream",
    "r2_median",
    "effective_rank",
    "condition_number",
    "input_effective_rank",
    "input_rank",
    "top_row_share",
    "top_position",
    "top_position_share",
)
ENOUGH = 0.99  # of R²_lin: the rank that reaches it is reported


@dataclass(frozen=True)
class TopRow:
    """A held-out row that carries much of its block's variance: its window, its place there, its share."""

    window: int
    position: int
    share: float


@dataclass(frozen=True)
class BlockProfile:
    """What was measured of one block, and its exact least-squares map."""

    block: Block
    r2_lin: float
    r2_lin_ci95: tuple[float, float]
    r2_stream: float
    r2_median: float
    effective_rank: float
    condition_number: float
    input_effective_rank: float  # directions that carry the input's variance
    input_rank: float  # directions in which the input varies at all
    top_row_share: float
    top_position: float  # the place in the window that carries most variance, and its share
    top_position_share: float
    top_rows: tuple[TopRow, ...]
    ladder: Tensor = field(repr=False)  # R² of the best map of rank 0, 1, …
    read: Callable[[], Mapping[str, Tensor]] = field(repr=False)  # all of it, as it is kept

    @property
    def linear(self) -> AffineMap:
        """The least-squares map: read from where it is kept, for those of all blocks may be too much for the memory."""
        kept = self.read()
        return AffineMap(kept["weight"], kept["mean_x"], kept["mean_y"])

    @property
    def enough_rank(self) -> int:
        """The smallest rank whose R² reaches 99 % of R²_lin."""
        wanted = min(ENOUGH * self.r2_lin, self.r2_lin) - 1e-9  # the full rank reaches R²_lin but for its rounding
        return int((self.ladder >= wanted).nonzero()[0])


@dataclass(frozen=True)
class Profile:
    """The linearity of every block, and what it was measured on."""

    blocks: list[BlockProfile]
    rows_fitted: int
    rows_held_out: int
    seq_len: int


def unpack_block(block: Block, kept: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor]]) -> BlockProfile:
    """What was kept of one block; `read` gives it again."""
    *figures, low, high = kept["figures"].tolist()
    return BlockProfile(
        block=block,
        r2_lin_ci95=(low, high),
        top_rows=tuple(TopRow(int(window), int(position), share) for window, position, share in kept["tops"].tolist()),
        ladder=kept["ladder"],
        read=read,
        **dict(zip(FIGURES, figures, strict=True)),
    )
