"""Tiny models whose attention is what the test says: heads that copy others, that are dead or constant, attention that
is a linear map of its own position, and a head that matters for one token in a thousand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from planted import SEQ_LEN
from torch import Tensor
from zoo import VOCAB, tiny_model

from compressor.text import Split, Text


@dataclass(frozen=True)
class UnitViews:
    """The projections of one attention, seen unit by unit: writing into these tensors writes into the model.

    A unit is a key-value head with its query heads. Biases are None where the attention has none.
    """

    queries: Tensor  # [units, rows, width]
    keys: Tensor
    values: Tensor
    query_biases: Tensor | None  # [units, rows]
    key_biases: Tensor | None
    value_biases: Tensor | None
    outputs: Tensor  # [units, columns, width]

    def copy(self, source: int, target: int) -> None:
        """Let a unit compute what another does; its output weights stay its own."""
        inputs = (self.queries, self.keys, self.values, self.query_biases, self.key_biases, self.value_biases)
        for tensor in inputs:
            if tensor is not None:
                tensor[target] = tensor[source]

    def silence(self, unit: int) -> None:
        """Let nobody listen to a unit."""
        self.outputs[unit] = 0.0

    def empty(self, unit: int) -> None:
        """Let a unit's values be its bias for every token, or nothing."""
        self.values[unit] = 0.0

    def limit_rank(self, rank: int) -> None:
        """Let the values of all units lie in so many directions of the input."""
        flat = self.values.flatten(0, 1)
        basis = torch.randn(rank, flat.shape[1], generator=torch.Generator().manual_seed(3))
        self.values.copy_((flat @ torch.linalg.pinv(basis) @ basis).unflatten(0, self.values.shape[:2]))


def unit_views(model: Any, layer: int) -> UnitViews:
    """The units of one layer's attention, in a GPT-2, a GPT-Neo or a model of Llama's type."""
    family = model.config.model_type
    if family == "gpt2":
        attention = model.transformer.h[layer].attn
        heads, width = attention.num_heads, attention.embed_dim
        weights = attention.c_attn.weight.data.view(width, 3, heads, -1).permute(1, 2, 3, 0)
        biases = attention.c_attn.bias.data.view(3, heads, -1)
        return UnitViews(*weights, *biases, attention.c_proj.weight.data.view(heads, -1, width))
    if family == "gpt_neo":
        attention, units = model.transformer.h[layer].attn.attention, model.config.num_heads
        output = attention.out_proj
    else:
        attention, units = model.model.layers[layer].self_attn, model.config.num_key_value_heads
        output = attention.o_proj
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    matrices = [part.weight.data.unflatten(0, (units, -1)) for part in parts]
    vectors = [None if part.bias is None else part.bias.data.unflatten(0, (units, -1)) for part in parts]
    return UnitViews(*matrices, *vectors, output.weight.data.T.unflatten(0, (units, -1)))


def attend_to_itself(model: Any, layer: int) -> None:
    """Let every token of a Llama with attention biases attend to its own position alone.

    All queries and keys are one vector, which is turned by its position. No other of 32 positions is as near as the own
    one, and the vector is so long that the softmax sees nothing else.
    """
    views = unit_views(model, layer)
    for weights, biases in ((views.queries, views.query_biases), (views.keys, views.key_biases)):
        assert biases is not None
        weights.zero_()
        biases.fill_(100.0)


def loud_model(family: str, **settings: Any) -> Any:
    """A tiny model whose attention adds much to the stream, and whose predictions are far from uniform."""
    model = tiny_model(family, **settings)
    for layer in range(model.config.num_hidden_layers):
        unit_views(model, layer).outputs.mul_(3.0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2.0)
    return model


@torch.no_grad()
def sampled_text(model: Any, calibration: int = 60, selection: int = 24, verification: int = 32) -> Text:
    """Windows that the model itself has written, so that whatever changes its predictions costs something."""
    sizes = [calibration, selection, verification]
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(VOCAB, (sum(sizes), 1), generator=generator)
    while windows.shape[1] < SEQ_LEN:
        chances = model(input_ids=windows, use_cache=False).logits[:, -1].softmax(-1)
        windows = torch.cat([windows, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return Text(*(Split(part, "the model's own text") for part in windows.split(sizes)))


# The model with an induction head. Token 0 begins every window, tokens 1 to 3 are triggers, the others are noise. Its
# residual stream has four slots of one number for each word: the token, its position, the token before, the answer.
WORDS, TRIGGERS = SEQ_LEN, 3
TOKEN, POSITION, BEFORE, ANSWER = (slice(start, start + WORDS) for start in range(0, 4 * WORDS, WORDS))
EVERY = 32  # one window of so many has a repetition: one token in a thousand is predicted by it
SHARPNESS = 40.0  # nats between the score of the position that a head attends to and those of others
WRONG, RIGHT, RARE = 14.0, 40.0, -4.0  # logits: of a trigger's usual successor, of an answer, of triggers themselves


@torch.no_grad()
def induction_model() -> Any:
    """A GPT-2 whose weights are written by hand: three layers of four heads with known duties.

    Layer 0: dead heads. Layer 1: heads 0 and 1 are copies, each writes half of the previous token into the stream; head
    2 is dead and head 3 constant. Layer 2: head 0 is the induction head. At a trigger it looks for the token after the
    trigger's earlier occurrence and answers that it comes again; else it looks at the first token and says nothing. The
    others are dead. Without an answer the model is sure that a certain word follows a trigger, and wrong.
    """
    sizes = {"vocab_size": WORDS, "n_embd": 4 * WORDS, "n_inner": 16, "n_positions": SEQ_LEN}
    model = tiny_model("gpt2", **sizes, tie_word_embeddings=False)
    body, words = model.transformer, torch.eye(WORDS)
    for embedding, slot in ((body.wte, TOKEN), (body.wpe, POSITION)):
        embedding.weight.zero_()
        embedding.weight[:, slot] = words
    # There are as many ones among zeros in every row of a layer's input, so its norm can give the row back unchanged.
    for norm, ones in ((body.h[0].ln_1, 2), (body.h[1].ln_1, 2), (body.h[2].ln_1, 3), (body.ln_f, 3)):
        mean = ones / (4 * WORDS)
        norm.weight.fill_((mean * (1 - mean) + norm.eps) ** 0.5)
        norm.bias.fill_(mean)
    for layer in body.h:
        layer.mlp.c_proj.weight.mul_(1e-5)
        for bias in (layer.mlp.c_proj.bias, layer.attn.c_proj.bias, layer.attn.c_attn.bias):
            bias.zero_()
    idle, previous, induction = (unit_views(model, layer) for layer in range(3))
    for views in (idle, previous, induction):
        views.outputs.zero_()
    sharp = SHARPNESS * WORDS**0.5  # scores are divided by the root of a head's width
    for views in (previous, induction):
        for tensor in (views.queries, views.keys, views.values):
            tensor[0] = 0.0
    previous.queries[0, :, POSITION] = sharp * words
    previous.keys[0, 1:, POSITION] = words[:-1]
    previous.values[0, :, TOKEN] = words
    previous.copy(0, 1)
    previous.outputs[:2, :, BEFORE] = words / 2
    previous.empty(3)
    assert previous.value_biases is not None
    previous.value_biases[3] = 1.0
    signs = torch.ones(WORDS) - 2 * (torch.arange(WORDS) % 2)
    previous.outputs[3, :, ANSWER] = words * signs / 4
    body.h[1].attn.c_proj.bias[ANSWER] = -signs / 4  # so that its constant is missed only when the bias is not moved
    triggers = words[1 : TRIGGERS + 1]
    induction.queries[0, :TRIGGERS, TOKEN] = 2 * sharp * triggers
    induction.keys[0, :TRIGGERS, BEFORE] = triggers
    induction.queries[0, TRIGGERS, POSITION] = sharp  # whatever the position
    induction.keys[0, TRIGGERS, TOKEN] = words[0]
    induction.values[0, 1:, TOKEN] = words[1:]
    induction.outputs[0, :, ANSWER] = words
    head = model.lm_head.weight
    head.zero_()
    head[0, TOKEN] = -12.0
    head[1 : TRIGGERS + 1, TOKEN] = RARE
    for trigger in range(1, TRIGGERS + 1):
        head[-trigger, trigger] = WRONG
    head[:, ANSWER] = RIGHT * words
    return model


def repetitive_text(
    calibration: int = 128, selection: int = 64, verification: int = 96, *, events: bool = True
) -> Text:
    """Noise in which a trigger and its successor come twice in one window of EVERY; without `events` they never do."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def split(count: int) -> Split:
        windows = torch.randint(TRIGGERS + 1, WORDS - TRIGGERS, (count, SEQ_LEN), generator=generator)
        windows[:, 0] = 0
        for window in windows[EVERY // 2 :: EVERY] if events else ():
            repeated = torch.tensor([draw(1, TRIGGERS + 1), draw(TRIGGERS + 1, WORDS - TRIGGERS)])
            for start in (draw(2, 12), draw(14, SEQ_LEN - 2)):
                window[start : start + 2] = repeated
        return Split(windows, "noise with repetitions")

    return Text(split(calibration), split(selection), split(verification))
