"""Guard windows: what replacements are fitted on beside the calibration text, so that they hold elsewhere too.

A neuron that answers to what the text happens not to have looks useless there, and goes first; text of another kind
then breaks. Half of the guard windows are of the built-in mix of prose, dialogue, code and structured text, the others
of random words of the vocabulary, which ask every neuron of the first layers for its answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def usual_words(tokenizer: Any) -> Tensor:
    """The tokens of a vocabulary that text is made of: neither added ones, nor special ones such as an end of text."""
    ids = torch.arange(tokenizer.vocab_size)
    return ids[~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, dtype=torch.long))]


def draw_words(words: Tensor, count: int, like: Tensor, seed: int) -> Tensor:
    """So many windows of random words, as long as those of a text, which begin as these do if all begin alike."""
    generator = torch.Generator().manual_seed(seed)
    drawn = words[torch.randint(len(words), (count, like.shape[1]), generator=generator)]
    first = like[:, 0]
    if bool((first == first[0]).all()):
        drawn[:, 0] = first[0]
    return drawn
