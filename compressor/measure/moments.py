"""Streaming float64 moments of the rows of one block.

A row is one token position: the block's input x there, and its output y. The sums are kept about their own mean and
merged as Chan, Golub and LeVeque do, so that a large mean costs the covariance no digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ACCUMULATION_DTYPE = torch.float64
GRAM_TILE = 144  # columns per tile: small enough to skip most of the mirrored half, large enough for a fast product


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ·rows in float64."""
    out = torch.zeros(rows.shape[1], rows.shape[1], dtype=ACCUMULATION_DTYPE, device=rows.device)
    add_gram(out, rows)
    return out


def add_gram(out: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ·rows to a matrix, computing only the upper triangle of tiles."""
    width = rows.shape[1]
    for start in range(0, width, GRAM_TILE):
        stop = min(start + GRAM_TILE, width)
        tile = rows[:, start:stop].T @ rows[:, start:]
        out[start:stop, start:] += tile
        out[stop:, start:stop] += tile[:, stop - start :].T


@dataclass
class Moments:
    """Weighted count, means and centred second moments of rows x (inputs) and y (outputs)."""

    rows: int
    weight: Tensor  # Σw, a scalar
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor  # Σ w (x−x̄)(x−x̄)ᵀ
    xy: Tensor
    yy: Tensor  # the whole matrix, or only its diagonal, which saves a quarter of the work

    @classmethod
    def zeros(cls, width_x: int, width_y: int, device: torch.device | str = "cpu", *, whole_yy: bool = True) -> Moments:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=ACCUMULATION_DTYPE, device=device)

        return cls(
            rows=0,
            weight=zeros(),
            mean_x=zeros(width_x),
            mean_y=zeros(width_y),
            xx=zeros(width_x, width_x),
            xy=zeros(width_x, width_y),
            yy=zeros(width_y, width_y) if whole_yy else zeros(width_y),
        )

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weights: Tensor | None = None, *, whole_yy: bool = True) -> Moments:
        """The moments of one batch of rows; `weights` has one non-negative value per row."""
        x, y = x.to(ACCUMULATION_DTYPE), y.to(ACCUMULATION_DTYPE)
        if weights is None:
            weight = torch.tensor(float(len(x)), dtype=ACCUMULATION_DTYPE, device=x.device)
            mean_x, mean_y = x.mean(0), y.mean(0)
            x, y = x - mean_x, y - mean_y
        else:
            weights = weights.to(ACCUMULATION_DTYPE)
            weight = weights.sum()
            mean_x, mean_y = weights @ x / weight, weights @ y / weight
            root = weights.sqrt()[:, None]
            x, y = (x - mean_x).mul_(root), (y - mean_y).mul_(root)
        yy = gram(y) if whole_yy else y.square().sum(0)
        return cls(len(x), weight, mean_x, mean_y, gram(x), x.T @ y, yy)

    @property
    def whole_yy(self) -> bool:
        return self.yy.ndim == 2

    @property
    def variances(self) -> Tensor:
        """Σ w (y−ȳ)² per output feature."""
        return self.yy.diagonal() if self.whole_yy else self.yy

    def add(self, other: Moments) -> None:
        """Merge the moments of other rows into these, in place: new matrices for every batch would fragment memory."""
        if other.rows == 0 or self.weight + other.weight == 0:
            return
        self.xx.add_(other.xx)
        self.xy.add_(other.xy)
        self.yy.add_(other.yy)
        self.move_mean(other.weight, other.mean_x, other.mean_y)
        self.rows += other.rows

    def add_neurons(self, x: Tensor, a: Tensor, y: Tensor, weights: Tensor) -> None:
        """Add a batch of rows z = [x, a] with y, where a are the activations of many neurons.

        Products with a are computed in float32 (float64 where a is) and only summed in float64: the rows are centred
        first, so that this loses no more than the activations themselves were rounded by. Products of x alone are
        float64 throughout.
        """
        a = a if a.dtype == ACCUMULATION_DTYPE else a.float()
        weights = weights.to(ACCUMULATION_DTYPE)
        weight, root, width = weights.sum(), weights.sqrt()[:, None], x.shape[1]

        def centre(rows: Tensor) -> tuple[Tensor, Tensor]:
            mean = (weights.to(rows.dtype) @ rows).to(ACCUMULATION_DTYPE) / weight
            return mean, (rows - mean.to(rows)).mul_(root.to(rows.dtype))

        mean_x, x = centre(x.to(ACCUMULATION_DTYPE))
        mean_a, a = centre(a)
        mean_y, y = centre(y.to(ACCUMULATION_DTYPE))
        add_gram(self.xx[:width, :width], x)
        add_gram(self.xx[width:, width:], a)
        across = x.to(a.dtype).T @ a
        self.xx[:width, width:] += across
        self.xx[width:, :width] += across.T
        self.xy[:width] += x.T @ y
        self.xy[width:] += a.T @ y.to(a.dtype)
        self.yy += y.square().sum(0)
        self.move_mean(weight, torch.cat([mean_x, mean_a]), mean_y)
        self.rows += len(a)

    def move_mean(self, weight: Tensor, mean_x: Tensor, mean_y: Tensor) -> None:
        """Make the sums, to which those of other rows about their own means were added, those about the common mean."""
        total = self.weight + weight
        share = weight / total
        step_x, step_y = mean_x - self.mean_x, mean_y - self.mean_y
        between = (self.weight * share).item()  # w₁·w₂ / (w₁ + w₂)
        self.xx.addr_(step_x, step_x, alpha=between)
        self.xy.addr_(step_x, step_y, alpha=between)
        if self.whole_yy:
            self.yy.addr_(step_y, step_y, alpha=between)
        else:
            self.yy.add_(step_y.square(), alpha=between)
        self.mean_x.add_(step_x * share)
        self.mean_y.add_(step_y * share)
        self.weight.copy_(total)

    def recentre(self, mean_x: Tensor, mean_y: Tensor) -> None:
        """Make these the second moments about other means, in place. The weight and the rows stay."""
        shift_x, shift_y, weight = self.mean_x - mean_x, self.mean_y - mean_y, self.weight.item()
        self.xx.addr_(shift_x, shift_x, alpha=weight)
        self.xy.addr_(shift_x, shift_y, alpha=weight)
        if self.whole_yy:
            self.yy.addr_(shift_y, shift_y, alpha=weight)
        else:
            self.yy.add_(shift_y.square(), alpha=weight)
        self.mean_x.copy_(mean_x)
        self.mean_y.copy_(mean_y)

    def drop_products(self) -> None:
        """Free the memory of the second moments of x, the largest of all; means and weight stay."""
        self.xx = self.xx.new_empty(0, 0)

    def about(self, mean_x: Tensor, mean_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(xx, xy, yy) about other means, such as those of the rows that a map was fitted on."""
        shift_x, shift_y = self.mean_x - mean_x, self.mean_y - mean_y
        return (
            self.xx + self.weight * torch.outer(shift_x, shift_x),
            self.xy + self.weight * torch.outer(shift_x, shift_y),
            self.yy + self.weight * (torch.outer(shift_y, shift_y) if self.whole_yy else shift_y.square()),
        )
