"""Guard windows: random words of the vocabulary that replacements are fitted on beside the calibration text.

A neuron that answers to words which the text happens not to have looks useless there, and goes first; text of another
kind then breaks. Random words ask every neuron for its answer, in a share of the rows that the text can spare, and need
no other text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def usual_words(tokenizer: Any) -> Tensor:
    """The tokens of a vocabulary that text is made of: neither added ones, nor special ones such as an end of text."""
    ids = torch.arange(tokenizer.vocab_size)
    return ids[~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, dtype=torch.long))]


def draw_guard(words: Tensor, windows: Tensor, share: float, seed: int) -> Tensor:
    """Windows of random words, `share` as many as the given windows, which begin as these do if all begin alike."""
    count = round(share * len(windows))
    generator = torch.Generator().manual_seed(seed)
    drawn = words[torch.randint(len(words), (count, windows.shape[1]), generator=generator)]
    first = windows[:, 0]
    if bool((first == first[0]).all()):
        drawn[:, 0] = first[0]
    return drawn
