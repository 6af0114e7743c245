"""Text by the templates of this folder: a model card, and tables in Markdown and for a notebook."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from jinja2 import Environment

from kd.report.tables import Part, Table, text_of_cell
from kd.storage.shown import in_markdown

FOLDER = Path(__file__).parent


class Raw(str):
    """Text that a template prints as it is."""


def rendered(template: str, escaped: Callable[[str], str], **values: object) -> str:
    """The text of a template, filled with values.

    Args:
        template: name of its file.
        escaped: escapes the text of each value that the template prints, so that no name opens markup, ends a cell or begins
            a line. A :class:`Raw` value is printed as it is.
        values: by their names in the template.
    """

    def printed(value: object) -> object:
        """A value as the template prints it."""
        return value if isinstance(value, Raw) else escaped(str(value))

    environment = Environment(keep_trailing_newline=True, finalize=printed)
    text = (FOLDER / template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)


def markdown(parts: Sequence[Part]) -> str:
    """Tables of a result for a model card, their names and texts escaped; charts and pictures are left out."""

    def folded(title: str) -> Raw:
        """The title of a folded table, inside HTML."""
        return Raw(escape(in_markdown(title)))

    tables = _with_rows(parts)
    text = rendered("tables.md.j2", in_markdown, tables=tables, text=text_of_cell, folded=folded)
    return text.strip()


def html(parts: Sequence[Part]) -> str:
    """Tables of a result for a notebook, their names and texts escaped; charts and pictures are left out."""
    return rendered("tables.html.j2", escape, tables=_with_rows(parts), text=text_of_cell)


def _with_rows(parts: Sequence[Part]) -> list[Table]:
    """The tables of a result that have any row."""
    return [part for part in parts if isinstance(part, Table) and part.rows]
