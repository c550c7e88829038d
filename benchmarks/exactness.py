"""R²_lin from streaming moments against torch.linalg.lstsq on the raw rows in float64, every FFN and attention.

    python benchmarks/exactness.py MODEL --text FILE [--seq-len 256] [--tokens 16384]

Prints one line per block and the largest difference (goal: at most 1e-6). Directions below float32 rounding are cut in
both (a LayerNorm makes one such direction; lstsq would fit a coefficient to its rounding noise).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import compressor
from compressor.measure.regression import ROUNDING_ULPS
from compressor.models.blocks import Block, BranchIndex, Rows, backbone, capture_rows, find_branches
from compressor.text import batches

BLOCKS_AT_ONCE = 10  # raw rows of this many blocks are in memory together


def lstsq_r2(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> float:
    x, y, held_x, held_y = (rows.double() for rows in (x, y, held_x, held_y))
    rows = x - x.mean(0)
    values = torch.linalg.svdvals(rows)
    floor = ROUNDING_ULPS * torch.finfo(torch.float32).eps * values.square().mean().sqrt() / values[0]
    weight = torch.linalg.lstsq(rows, y - y.mean(0), rcond=floor.item(), driver="gelsd").solution
    error = held_y - y.mean(0) - (held_x - x.mean(0)) @ weight
    return 1 - (error.square().sum() / (held_y - held_y.mean(0)).square().sum()).item()


@torch.no_grad()
def raw_rows(model: torch.nn.Module, blocks: list[Block], windows: Tensor) -> dict[BranchIndex, tuple[Tensor, Tensor]]:
    found: dict[BranchIndex, list[tuple[Tensor, Tensor]]] = {block.index: [] for block in blocks}

    def keep(block: Block, rows: Rows) -> None:
        found[block.index].append((rows.x.clone(), rows.y.clone()))

    with capture_rows(model, blocks, keep):
        for batch in batches(windows, 8):
            backbone(model)(input_ids=batch, use_cache=False)
    return {i: (torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])) for i, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    model, tokenizer = compressor.load(args.model)
    sizes = {"calib_tokens": args.tokens, "select_tokens": args.seq_len, "verify_tokens": 2 * args.seq_len}
    text = compressor.load_text(args.text, tokenizer, seq_len=args.seq_len, **sizes)
    profiles = {p.block.index: p for p in compressor.measure(model, text).branches}
    blocks, worst = find_branches(model), 0.0
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = blocks[start : start + BLOCKS_AT_ONCE]
        fitted, held = raw_rows(model, some, text.fitting), raw_rows(model, some, text.held_out)
        for block in some:
            measured = profiles[block.index]
            expected = lstsq_r2(*fitted.pop(block.index), *held.pop(block.index))
            difference = abs(measured.r2_lin - expected)
            worst = max(worst, difference)
            condition = f"condition {measured.condition_number:.1e}"
            print(f"block {block.index}: {measured.r2_lin:.8f} lstsq {expected:.8f} {difference:.1e} {condition}")
    print(f"largest difference {worst:.1e} (goal at most 1e-6)")


if __name__ == "__main__":
    main()
