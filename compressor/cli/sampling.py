"""The prompts of `compress sample`: from the command line, from lines on stdin, or asked for one after another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.cli.output import emit
from compressor.runtime.errors import BAD_INPUT, InputError, print_error

if TYPE_CHECKING:
    from compressor.pipelines.sample import Sampler

ASK = "prompt (an empty line ends): "


def read_prompts(given: Sequence[str], as_json: bool) -> list[str] | None:
    """The prompts that were given, or the lines of stdin; None: they are to be asked for on this terminal."""
    if given:
        prompts = list(given)
    elif sys.stdin is not None and sys.stdin.isatty():
        if as_json:
            raise InputError('--json prints one report; give a prompt, such as compress sample DIR "Once upon a time"')
        return None
    else:
        prompts = read_lines()
        if not prompts:
            raise InputError('no prompt: give one, such as compress sample DIR "Once upon a time", or lines on stdin')
    if not all(prompt.strip() for prompt in prompts):
        raise InputError("the prompt is empty; give some words to continue")
    return prompts


def read_lines() -> list[str]:
    """The lines of stdin that are not empty."""
    try:
        lines = sys.stdin.read().splitlines() if sys.stdin is not None else []
    except UnicodeDecodeError as error:
        raise InputError("the prompts on stdin are not UTF-8; convert them to UTF-8") from error
    except (OSError, ValueError):  # stdin is closed
        lines = []
    return [line for line in lines if line.strip()]


def show(sampler: Sampler, prompts: Sequence[str], as_json: bool) -> None:
    from compressor.report.sample_record import sample_lines, sample_tables

    record = sampler.run(prompts)
    emit(record, as_json, sample_lines(record), sample_tables(record))


def ask_again_and_again(sampler: Sampler) -> None:
    """Ask for prompts and show what is written after each, until an empty line or the end of the input."""
    while True:
        print(ASK, end="", file=sys.stderr, flush=True)
        prompt = sys.stdin.readline().rstrip("\n")
        if not prompt.strip():
            return
        try:
            show(sampler, [prompt], as_json=False)
        except InputError as error:  # the next prompt may be a better one
            print_error(str(error), BAD_INPUT)
