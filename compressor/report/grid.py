"""Tables on a terminal that leave out their less important columns where it is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

BETWEEN = 2  # spaces between columns


@dataclass
class Grid:
    """Rows of words under the names of their columns. Columns in `left` are words, the others numbers; those in
    `optional` are left out where they do not fit, the first of them first."""

    columns: Sequence[str]
    left: Sequence[str] = ()
    optional: Sequence[str] = ()
    title: str | None = None
    rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def add_row(self, *cells: str, style: str = "") -> None:
        assert len(cells) == len(self.columns)
        self.rows.append((cells, style))

    def width_of(self, places: Sequence[int]) -> int:
        """The characters that a line of these columns takes."""
        widths = [max(map(cell_len, (self.columns[n], *(cells[n] for cells, _ in self.rows)))) for n in places]
        return sum(widths) + BETWEEN * (len(widths) - 1)

    def places_within(self, width: int) -> list[int]:
        """The columns that are shown on so many characters, by their places."""
        shown = list(range(len(self.columns)))
        for name in self.optional:
            if self.width_of(shown) <= width:
                break
            shown.remove(self.columns.index(name))
        return shown

    def fitted(self, width: int) -> Table:
        """The table for a terminal of this width; words that still do not fit are folded."""
        shown = self.places_within(width)
        fits = self.width_of(shown) <= width
        title = self.title and Text(self.title)
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        for place in shown:
            name = self.columns[place]
            justify = "left" if name in self.left else "right"
            table.add_column(Text(name), justify=justify, no_wrap=fits, overflow="fold")  # type: ignore[arg-type]
        for cells, style in self.rows:
            table.add_row(*(Text(cells[place]) for place in shown), style=style)
        return table
