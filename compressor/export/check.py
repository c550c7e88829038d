"""Check an export before it appears: the sample text, and a run of a GGUF file in llama.cpp."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.export import llamacpp
from compressor.models.load import quiet
from compressor.models.source import context_length
from compressor.patch.verify import first_tokens, logits_of
from compressor.report.export_record import RuntimeCheck
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

TOLERANCE = 2e-3  # for a log-probability in float32: llama.cpp adds up in another order
USUAL_LOGIT = 50.0  # larger logits have larger rounding errors, so the tolerance grows with them from here
LOWEST_COMPARED = -80.0  # llama.cpp gives minus infinity for log-probabilities far below this
SAMPLE_TOKENS = 48  # at most
GREEDY_TOKENS = 24  # of a continuation, at most
SAMPLE = (
    "The harbour was quiet that morning: 12 boats, two of them newly painted, lay at the quay, and the captain's "
    'daughter counted them aloud. "It\'s early," she said; nobody answered.\n\nLater, at 7.45, the wind came up.'
)


def sample_tokens(model: Any, tokenizer: Any) -> Tensor:
    """The sample text as tokens, or the first tokens of the vocabulary where the tokenizer makes too few of it."""
    length = min(SAMPLE_TOKENS, (context_length(model) or SAMPLE_TOKENS) // 2)
    tokens = torch.tensor([tokenizer(SAMPLE)["input_ids"][:length]])
    return tokens if tokens.shape[1] > 1 else first_tokens(model)


def check_in_llamacpp(
    model: Any, tokenizer: Any, file: Path, dtype: str, notes: list[str], progress: Progress
) -> RuntimeCheck:
    """Run the file in llama.cpp, if it is installed, and compare tokens and log-probabilities with transformers.

    Only a float32 file must agree within a tolerance; for the other types the difference is only recorded. `notes` are
    the known differences of the tokenizer.
    """
    if not llamacpp.is_installed():
        progress.say("not run in llama.cpp: pip install xllamacpp, and an export is run there before you see it")
        return RuntimeCheck(runtime=None)
    tokens = sample_tokens(model, tokenizer)
    ids = tokens[0].tolist()
    logits = logits_of(model, tokens)[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    count = min(GREEDY_TOKENS, len(ids))
    with quiet(), torch.no_grad():
        continuation = model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)[0]
    try:
        with llamacpp.Runner(file) as run:
            texts = [SAMPLE[3:], *([] if notes else [SAMPLE])]  # the first begins with a space
            same_tokens = all(
                run.tokenize(text) == tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
            )
            measured = torch.tensor(run.log_probabilities(ids), dtype=torch.float64)
            greedy = run.continue_greedily(ids, count)
    except InputError as error:
        raise InputError(f"{error}; where xllamacpp itself does not run, uninstall it: then nothing is run") from error
    compared = expected > LOWEST_COMPARED
    expected, measured = expected[compared], measured[compared]
    difference = (measured - expected).abs().max().item() if compared.any() else 0.0
    allowed = TOLERANCE * max(1.0, logits.abs().max().item() / USUAL_LOGIT)
    if not same_tokens:
        raise InputError(
            "llama.cpp reads the sample text as other tokens than transformers; nothing was kept: report it"
        )
    if dtype == "f32" and not difference <= allowed:
        raise InputError(
            f"in llama.cpp a log-probability is off by {difference:.3g}, more than {allowed:.3g}; nothing was kept: "
            "report it"
        )
    return RuntimeCheck(
        runtime=f"llama.cpp (xllamacpp {version('xllamacpp')})",
        tokens=len(ids),
        log_probability_off=difference,
        perplexity_ratio=(expected.mean() - measured.mean()).exp().item(),
        greedy_equal=sum(a == b for a, b in zip(greedy, continuation[len(ids) :].tolist(), strict=False)),
        greedy=count,
    )
