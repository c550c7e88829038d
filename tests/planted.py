"""Tiny models whose blocks are what the test says: linear, of low rank, or nonlinear with outlier rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from zoo import VOCAB, WIDTH, tiny_model

from compressor.plan.choices import Choices
from compressor.text import Split, Text

SEQ_LEN = 32
FFNS = Choices(branches=("ffn",))  # for tests of what a search does with FFNs: attention stays as it is


def random_text(calibration: int = 60, selection: int = 24, verification: int = 32, seed: int = 0) -> Text:
    generator = torch.Generator().manual_seed(seed)

    def split(count: int) -> Split:
        return Split(torch.randint(VOCAB, (count, SEQ_LEN), generator=generator), "random tokens")

    return Text(split(calibration), split(selection), split(verification))


class LinearFFN(nn.Module):
    """y = x·W + b with a W of the given rank."""

    def __init__(self, rank: int = WIDTH, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(WIDTH, rank, generator=generator) / WIDTH**0.5 for _ in range(2))
        self.weight = nn.Parameter(left @ right.T)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.padding = nn.Parameter(torch.zeros(8 * WIDTH, WIDTH))  # so that there is something to save

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.weight + self.bias


class WildFFN(nn.Module):
    """A map that no line fits; with `outliers`, the first position also sends a huge row in one direction."""

    def __init__(self, outliers: float = 0.0, seed: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(3 * torch.randn(WIDTH, WIDTH, generator=generator))
        self.padding = nn.Parameter(torch.zeros(8 * WIDTH, WIDTH))
        self.outliers = outliers

    def forward(self, hidden_states: Tensor) -> Tensor:
        wild = torch.sin(hidden_states @ self.weight)
        first = torch.relu(hidden_states[..., :1] - 4) * self.outliers
        return wild + torch.cat([first, torch.zeros_like(wild[..., 1:])], dim=-1)


class ConstantFFN(nn.Module):
    """The same output for every row, as far as its own sums round alike."""

    def __init__(self, size: float = 3.0, seed: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.inner.weight.zero_()
            for tensor in (self.inner.bias, self.outer.weight, self.outer.bias):
                tensor.copy_(size * torch.randn(tensor.shape, generator=generator))
        self.padding = nn.Parameter(torch.zeros(8 * WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.outer(self.inner(hidden_states))  # type: ignore[no-any-return]


def planted_model(*blocks: nn.Module, mark_first_position: bool = False) -> Any:
    """A tiny GPT-2 with these FFNs; the mark makes the first position's input stand out in its first feature."""
    model = tiny_model("gpt2")
    for layer, block in zip(model.transformer.h, blocks, strict=True):
        layer.mlp = block
        if mark_first_position:
            with torch.no_grad():
                layer.ln_2.weight.fill_(1.0)
                layer.ln_2.bias.zero_()
    if mark_first_position:
        with torch.no_grad():
            for quiet in (model.transformer.wpe.weight, model.transformer.wte.weight):
                quiet[:, 0] *= 0.02
            for layer in model.transformer.h:
                layer.attn.c_proj.weight[:, 0] *= 0.02
            model.transformer.wpe.weight[0, 0] = 200.0
    return model.eval()
