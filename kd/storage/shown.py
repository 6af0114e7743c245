"""Text from files on its way out: to terminals and to tables, through one function each."""

import csv
import unicodedata
from collections.abc import Iterable
from typing import TextIO

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "\uff1d",
    "\uff0b",
    "\uff0d",
    "\uff20",
)  # the last four are wide forms
INVISIBLE = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # controls, marks of direction, lone surrogates, separators of lines


def on_terminal(text: str) -> str:
    r"""A name or a message as any terminal takes it: what would move its cursor or turn its text is escaped.

    >>> on_terminal("cat\x1b[2J.jpg") == "cat" + chr(92) + "x1b[2J.jpg"
    True
    """
    return "".join(
        _escaped(letter) if unicodedata.category(letter) in INVISIBLE else letter for letter in text
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


class Table:
    """Writes rows of CSV in which a spreadsheet computes nothing.

    Text that begins like a formula gets an apostrophe before it (OWASP, CSV injection); numbers stay as they are.
    """

    def __init__(self, file: TextIO, end_of_line: str = "\r\n") -> None:
        self._writer = csv.writer(file, lineterminator=end_of_line)

    def add(self, row: Iterable[object]) -> None:
        """Writes one row."""
        self._writer.writerow([csv_cell(value) for value in row])


def csv_cell(value: object) -> object:
    """A cell's value; text that a spreadsheet would compute begins with an apostrophe.

    >>> csv_cell("=1+1"), csv_cell("-cat"), csv_cell(-1.5), csv_cell("cat")
    ("'=1+1", "'-cat", -1.5, 'cat')
    """
    return (
        f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA) else value
    )
