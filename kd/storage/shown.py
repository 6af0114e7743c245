"""Text from files on its way out: to terminals, tables, Markdown and HTML, through one function each; without secrets."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from kd.config.trees import leaves

# a formula in a spreadsheet begins so; the last four are wide forms
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# Unicode's categories of controls, marks of direction, lone surrogates, separators of lines
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")

Tree = TypeVar("Tree")  # nested dicts and lists of plain values
HIDDEN = "..."
"""In a secret's place."""
WITH_SECRETS = {"trainer", "builder", "source"}
"""Parts of settings, below which a key of :data:`SECRET_NAME` holds one."""
SECRET_NAME = re.compile(
    r"(^|[_-])(headers?|token|password|secret|auth|authorization|(api|access|experiment)[_-]?key)$",
    re.IGNORECASE,
)
"""The end of a key whose text is a secret."""
_END = r"(?!\"[],:}])"  # of a text in JSON
_USER = re.compile(
    rf"(:/+)(?:(?:{_END}[^\s/?#:@\[])*:(?:(?:{_END}\S){{0,99}}|(?!\d*[\s/?#])(?:{_END}[^\n]){{0,99}})|(?:{_END}[^\s/?#])*)@"
)
"""What stands before an address's last ``@``: ``user:password``, or a token. Each part is of bounded length, or ends where
the next address begins, so that the time grows with the text's length alone."""
_IN_QUERY = re.compile(
    r"([?&][\w-]{0,40}(?:token|signature|secret|password|credential|api_?key)=)[^&#\s\"']+",
    re.IGNORECASE,
)
"""A secret in an address's query."""
QUOTES = ("''", "'\"'\"'")
"""How YAML and a shell write an apostrophe in a quoted text."""
_secrets: set[str] = set()


def masked(tree: Tree) -> Tree:
    """Nested settings with ``...`` in the place of secrets, which :func:`without_secrets` knows from then on.

    >>> masked({"monitor": {"webhook": "https://x.org/T0/abc", "otlp": "http://me:word@x"}})
    {'monitor': {'webhook': '...', 'otlp': 'http://...@x'}}
    """
    if isinstance(tree, dict | list):
        remember_secrets(tree)
    return _masked(tree)


def _masked(tree: Tree) -> Tree:
    """The same without the known secrets."""
    shown: object = tree
    if isinstance(tree, dict):
        shown = {name: _masked(value) for name, value in tree.items()}
    elif isinstance(tree, list):
        shown = [_masked(value) for value in tree]
    elif isinstance(tree, str):
        shown = without_secrets(tree)
    return cast(Tree, shown)


def remember_secrets(tree: Mapping[Any, Any] | list[Any]) -> None:
    """Notes the secrets in nested settings for :func:`without_secrets`."""
    for key, value in leaves(tree):
        if isinstance(value, str) and _is_secret(key) and len(value) > len(HIDDEN):
            _secrets.update({value, *(value.replace("'", quote) for quote in QUOTES)})


def _is_secret(key: str) -> bool:
    """Whether the text of a setting is a secret: whoever has a webhook's address can post to it."""
    parts = key.split(".")
    if key == "monitor.webhook":
        return True
    places = [number for number, part in enumerate(parts) if part in WITH_SECRETS]
    first = min(places, default=len(parts))
    return any(map(SECRET_NAME.search, parts[first:]))


def without_secrets(text: str) -> str:
    """A text with ``...`` in the place of passwords and tokens in addresses, and of each secret that :func:`masked` has
    met.
    """
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    if ":/" in text and "@" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", text) if "://" in text else text


def on_terminal(text: str, allowed: str = "") -> str:
    r"""A name or a message as any terminal takes it: what would move its cursor or turn its text is escaped.

    That includes ends of lines and tabs, unless they are ``allowed``: the result is one line.

    >>> on_terminal("cat\x1b[2J.jpg") == "cat" + chr(92) + "x1b[2J.jpg"
    True
    """
    if text.isprintable():
        return text
    letters = []
    for letter in text:
        if letter not in allowed and unicodedata.category(letter) in INVISIBLE:
            letter = letter.encode("unicode_escape", "surrogatepass").decode("ascii")
        letters.append(letter)
    return "".join(letters)


def in_markdown(text: str) -> str:
    r"""Text in one line of Markdown: opens no markup and no HTML, ends no cell, and makes no link of an address.

    For within a line or a cell: at a line's beginning ``-``, ``+`` or ``1.`` would still open a list.

    >>> print(in_markdown("<b>cat</b> | [x](http://y)"))
    \<b\>cat\</b\> \| \[x\](http:/\/y)
    """
    one_line = on_terminal(" ".join(text.split()))
    escaped = re.sub(r"([\\|<>*_`~\[\]#&!@])", r"\\\1", one_line)
    return escaped.replace("://", ":/\\/").replace("www.", "www\\.")


def in_html(values: object) -> str:
    r"""Plain values as JSON inside a page's script: no text in them opens markup or ends the script.

    Raises:
        ValueError: a number is NaN or infinite, which JSON lacks.

    >>> print(in_html({"name": "</script>"}))
    {"name":"\u003c/script>"}
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def csv_text(rows: Iterable[Iterable[object]], end_of_line: str = "\r\n") -> str:
    """Rows as CSV in which a spreadsheet computes nothing.

    Text that begins like a formula gets an apostrophe before it (OWASP, CSV injection); numbers stay as they are.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end_of_line)
    for row in rows:
        writer.writerow([csv_cell(value) for value in row])
    return text.getvalue()


def csv_cell(value: object) -> object:
    """A cell's value; text that a spreadsheet would compute begins with an apostrophe.

    >>> csv_cell("=1+1"), csv_cell("-cat"), csv_cell(-1.5), csv_cell("cat")
    ("'=1+1", "'-cat", -1.5, 'cat')
    """
    if isinstance(value, str) and value.lstrip(" ").startswith(FORMULA):
        return f"'{value}"
    return value
