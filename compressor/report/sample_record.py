"""What `compress sample` shows: the record that `--json` prints, and two texts side by side in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from compressor.report.formats import last_part
from compressor.report.part import Count, Figure, Part
from compressor.report.record import Versioned
from compressor.runtime.errors import shorten
from compressor.runtime.figures import count

if TYPE_CHECKING:
    from rich.table import Table


class SampledPrompt(Part):
    """A prompt, and what the model wrote after it; of a compressed model, what its source wrote too.

    `first_difference` is how many tokens are the same before the two part, None where they do not; `source_next` and
    `next` are the tokens there, None where a text ends.
    """

    prompt: str
    prompt_tokens: Count
    text: str
    tokens: Count
    source_text: str | None = None
    source_tokens: Count | None = None
    first_difference: Count | None = None
    source_next: str | None = None
    next: str | None = None


class SampleRecord(Versioned):
    """Prompts that a model, or a compressed model and its source, continued."""

    directory: str
    source: str | None
    tokens: Count
    temperature: Figure
    seed: Count
    chat: bool
    samples: list[SampledPrompt]
    warnings: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class SideBySide:
    """One prompt: what each model wrote after it, and where they part."""

    prompt: str
    texts: dict[str, str]  # by the name of the model
    difference: str | None

    def fitted(self, width: int) -> Table:
        """The texts in columns, which share the width of the terminal."""
        from rich.table import Table
        from rich.text import Text

        texts = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for name in self.texts:
            texts.add_column(Text(name), overflow="fold")
        texts.add_row(*(Text(text.strip()) for text in self.texts.values()))
        whole = Table.grid()
        whole.add_row(Text(f"prompt: {shorten(self.prompt)}", style="italic"))
        whole.add_row(texts)
        if self.difference is not None:
            whole.add_row(Text(self.difference))
        return whole


def sample_tables(record: SampleRecord) -> list[SideBySide]:
    """For every prompt what each model wrote."""
    tables = []
    for sample in record.samples:
        sides, difference = {last_part(record.directory): sample.text}, None
        if sample.source_text is not None:
            names = f"source ({last_part(str(record.source))})", f"compressed ({last_part(record.directory)})"
            sides = dict(zip(names, (sample.source_text, sample.text), strict=True))
            difference = say_difference(sample)
        tables.append(SideBySide(sample.prompt, sides, difference))
    return tables


def sample_lines(record: SampleRecord) -> list[str]:
    """What is wrong with the comparison, if anything."""
    return [f"warning: {warning}" for warning in record.warnings]


def say_difference(sample: SampledPrompt) -> str:
    """Where two continuations part, and how each goes on."""
    place = sample.first_difference
    if place is None:
        return f"both write the same {count(sample.tokens, 'token')}" if sample.tokens else "both write nothing"
    where = "at the first token" if place == 0 else f"after {count(place, 'token')}"
    return f"they part {where}: the source {say_next(sample.source_next)}, the compressed {say_next(sample.next)}"


def say_next(token: str | None) -> str:
    return "ends" if token is None else f"goes on with {token!r}"
