"""A result as data: tables, charts and pictures, said once by whoever measures them.

The terminal (:func:`kd.report.terminal.print_parts`), the page of a run and its model card (:mod:`kd.report.templates`)
print the same parts. What a command has measured of a run's student is kept in ``RUN/tables/NAME.json``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from kd.report.metric import short
from kd.report.ratio import Number
from kd.storage.of_weights import TABLES, Say, read_tables, write_of_weights

Cell = str | int | Number
"""Text, or a number, which each printer rounds in its own way; None and "" are shown as nothing."""
JPEG = "data:image/jpeg;base64,"
"""How the address of each picture on a page begins: it is in the page itself."""


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers. One with a single column is a list of sentences."""

    title: str
    """For people; "" without one."""
    columns: Sequence[str]
    """Their names."""
    rows: Sequence[Sequence[Cell]]
    """As many cells each as there are columns."""
    note: str = ""
    """Sentences below the table: what was measured, and what speaks against it."""
    empty: str = ""
    """Text in place of no rows."""
    folded: bool = False
    """The page shows it on a click."""
    long: bool = False
    """It has long texts."""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Chart:
    """Lines over a common x, drawn by the page alone."""

    title: str
    x: Sequence[float | str]
    """Of all lines; text: names."""
    x_name: str
    """Its name and unit."""
    series: Mapping[str, Sequence[Number]]
    """A line by name; None leaves a gap."""
    note: str = ""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Picture:
    """A picture of a :class:`Gallery`."""

    image: Annotated[str, Field(pattern=f"^{JPEG}[A-Za-z0-9+/=]*$")]
    """:data:`JPEG` and its bytes."""
    name: str
    lines: Sequence[tuple[str, str]]
    """What is said of it: a name and a text each."""
    wide: bool = False


COLOUR = "#[0-9a-f]{6}"
Colour = Annotated[str, Field(pattern=f"^{COLOUR}$")]


@dataclass(frozen=True)
class Gallery:
    """Pictures for people to look at, on the page alone."""

    title: str
    items: Sequence[Picture]
    legend: Sequence[tuple[str, Colour]] = ()
    """Names with their colours."""
    note: str = ""
    kind: Literal["pictures"] = "pictures"


Part = Table | Chart | Gallery
Parts = list[Part]
"""A result."""
PARTS: TypeAdapter[Parts] = TypeAdapter(
    list[Annotated[Table | Chart | Gallery, Field(discriminator="kind")]]
)


@dataclass
class Result:
    """What a command has found: the terminal prints the tables, ``--json`` the content, a notebook shows both."""

    content: Any
    """Figures, as JSON has them."""
    parts: Sequence[Part] = ()
    """The same for people."""
    notes: list[str] = field(default_factory=list)
    """Lines below the tables."""
    files: list[Path] = field(default_factory=list)
    """Where it was written to."""
    problem: str = ""
    """Why the command has failed all the same: its status is 1."""


def sentences(title: str, lines: Sequence[str], note: str = "") -> Table:
    """A result in words, a line each."""
    return Table(title, [""], [[line] for line in lines], note)


def write_parts(run: Path, name: str, parts: Sequence[Part]) -> Path:
    """Writes a result of a run's present weights to ``tables/NAME.json`` in its folder; returns the file."""
    content = {"parts": [asdict(part) for part in parts]}
    return write_of_weights(run, f"{TABLES}/{name}.json", content)


def results_of(run: Path, say: Say) -> dict[str, Parts]:
    """The results of a run's present weights, by name.

    Args:
        run: the run's folder.
        say: is called with a sentence of each file that is left out: it is damaged, or of other weights.
    """
    results = {}
    for name, content in read_tables(run, say).items():
        try:
            results[name] = PARTS.validate_python(content.get("parts"))
        except ValidationError:
            say(f"{TABLES}/{name}.json can't be read")
    return results


def text_of_cell(cell: Cell) -> str:
    """A cell as text: numbers to four digits.

    >>> text_of_cell(0.123456), text_of_cell(None), text_of_cell("12.50")
    ('0.1235', '', '12.50')
    """
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return short(cell)
    return "" if cell is None else str(cell)


def is_text(table: Table, column: int) -> bool:
    """Whether a column holds text, which is aligned to the left: any of its cells is no number."""
    cells = [text_of_cell(row[column]) for row in table.rows]
    return not all(cell == "" or cell[0] in "+-.0123456789" for cell in cells)
