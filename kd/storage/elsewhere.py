"""Files from elsewhere are data: how large they may be, what they may hold, and which places their names reach.

All readers open files here: regular files alone, of a bounded size. A pipe would be waited for, a device never ends,
and a file that only claims a size takes the memory of one that has it. :mod:`kd.storage.writing` is the same for
writing, :mod:`kd.run.trust` limits the code that files name.
"""

import errno
import glob
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, TypeVar

import yaml

from kd.errors import UserError

Reader = TypeVar("Reader", bound=type[yaml.resolver.BaseResolver])
Json = dict[str, Any]
"""What an object of a JSON or YAML file holds, by name."""
LARGEST = 64 * 2**20  # bytes of a file that is read as text
LARGEST_LOG = 2**30
"""Bytes of a file that a run writes line by line: metrics, records, logs, an audit's samples."""
LARGEST_LIST = 2**30
"""Bytes of a list of pictures, or of a table of a teacher's answers."""
LARGEST_STUDENT = 16 * 2**30
"""Bytes of a student's file, or of an export."""
LARGEST_DATA = 2**50
"""Bytes of what is read in parts: an archive, a pack's shard, stored answers, a log."""
LARGEST_WEIGHTS = 128 * 2**30
"""Bytes of a teacher's weights, of its answers in one file, or of a training checkpoint."""
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
         stat.S_IFBLK: "a device", stat.S_IFLNK: "a link"}  # fmt: skip
DATE = "tag:yaml.org,2002:timestamp"
NODES = 100_000  # of YAML, each alias counted as what it stands for
TEXT_OF_A_VALUE = 50
"""Characters of a YAML value and its dotted key that count as a value more: a long one behind many aliases would be written
out for each, and a long key for each value below it."""
LARGEST_YAML = 2 * 2**20  # characters; a reader in Python takes seconds for each of these
NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9]\d*|0x[\da-fA-F]+)",
    "tag:yaml.org,2002:float": r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.inf|\.nan",
}
"""Numbers as YAML 1.2 writes them. PyYAML reads those of YAML 1.1, where 1:30 is 90, 010 is 8, 1_0 is 10 and 1e-8 a text."""
LONGEST_NUMBER = {"tag:yaml.org,2002:int": 20, "tag:yaml.org,2002:float": 100}
"""Characters of a number in YAML: the time for keys of equal hashes, which are longer whole numbers, grows with the square
of their count."""
READ_OTHERWISE = frozenset("\t!?|>\ufeff")
"""Characters that libyaml reads otherwise than PyYAML's own parser does, in some places."""
NAME = re.compile(r"(?!\.)(?!latest$)[\w.+-]{1,200}")


def with_numbers(reader: Reader) -> Reader:
    """A loader or dumper of PyYAML to which :data:`NUMBERS` are numbers; a decorator."""
    for tag, pattern in NUMBERS.items():
        reader.add_implicit_resolver(tag, re.compile(f"(?:{pattern})$"), list("-+.0123456789"))
    return reader


@with_numbers
class BoundedLoader(yaml.SafeLoader):
    """Plain values alone; aliases of aliases grow without bound as soon as anyone walks through them.

    Numbers are those of :data:`NUMBERS`, and a date is a text, as a folder may have its name.

    Args:
        stream: the whole document.
        in_c: parses with libyaml, where PyYAML has it: seven times as fast, but its errors quote nothing of the text. A text
            that holds one of :data:`READ_OTHERWISE` is parsed by PyYAML's own parser all the same.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, Any]]]] = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (*NUMBERS, DATE)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str, in_c: bool = True) -> None:
        """Begins to count the values of a text."""
        super().__init__(stream)
        self._nodes = 0
        if in_c and yaml.__with_libyaml__ and READ_OTHERWISE.isdisjoint(stream):
            parser = yaml.cyaml.CParser(stream)
            self.check_event = parser.check_event
            self.get_event = parser.get_event
            self.peek_event = parser.peek_event

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """A value of the document, counted while the text is parsed: a ComposerError above :data:`NODES`, and for a number
        that is longer than :data:`LONGEST_NUMBER`.
        """
        self._nodes += 1
        _check_count(self._nodes)
        node = super().compose_node(parent, index)
        if node is not None and len(node.value) > LONGEST_NUMBER.get(node.tag, math.inf):
            problem = f"a number of {len(node.value)} characters, at most {LONGEST_NUMBER[node.tag]} are read"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document, each alias counted as what it stands for; a ComposerError for more than :data:`NODES` values."""
        root = super().get_single_node()
        count = 0
        waiting = [] if root is None else [(root, 0)]  # with the characters of its dotted key
        while waiting:
            node, above = waiting.pop()
            inner = []
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    inner += [(key, above), (value, above + 1 + len(key.value))]
            elif isinstance(node, yaml.SequenceNode):
                inner = [(value, above) for value in node.value]
            else:
                count += (above + len(node.value)) // TEXT_OF_A_VALUE
            count += len(inner)
            _check_count(count)
            waiting += inner
        return root


def _check_count(count: int) -> None:
    """Refuses a document of more values than :data:`NODES`; a ComposerError."""
    if count > NODES:
        raise yaml.composer.ComposerError(None, None, f"it has more than {NODES} values")


def yaml_of(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """Plain values from YAML; no tag makes an object.

    >>> yaml_of("[1e-8, 010, 1:30, 2026-12-01]")
    [1e-08, '010', '1:30', '2026-12-01']

    Args:
        text: the whole document.
        loader: bounds how many values there are, each alias counted as what it stands for.

    Returns:
        Mappings, lists, texts, numbers, truth values, bytes, sets; None for an empty text.

    Raises:
        ValueError: not YAML, a tag on a value of another kind, more than :data:`LARGEST_YAML` characters, too many values
            or too long a number, or nested too deeply.
    """
    if len(text) > LARGEST_YAML:
        raise ValueError(f"it has {len(text):,} characters, at most {LARGEST_YAML:,} are read")
    try:
        try:
            return yaml.load(text, loader)
        except yaml.YAMLError:  # for an error that quotes the text
            return loader(text, in_c=False).get_single_data()
    # a number of thousands of digits is a ValueError already
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except (LookupError, AttributeError) as error:  # of ``!!bool``, ``!!int``, ``!!timestamp``
        raise ValueError("a tag is on a value of another kind") from error


def json_of(text: str | bytes | bytearray) -> Any:
    """Plain values from JSON.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


class RefusedFile(OSError, UserError):
    """A file or folder that is not opened: ``filename`` names it, ``strerror`` says why."""

    def __str__(self) -> str:
        # raised again by torch from a loader process, with the text alone
        if self.filename is None:
            return super().__str__()
        return f"{self.filename}: {self.strerror}"


def refused_file(file: str | Path, why: str) -> RefusedFile:
    """The error of a file that is not opened, ``why`` as the end of a sentence about it."""
    return RefusedFile(errno.EINVAL, why, str(file))


def kind_of(mode: int) -> str:
    """What a file of this ``st_mode`` is, in words."""
    return KINDS.get(stat.S_IFMT(mode), "a file")


def open_regular(file: str | Path, largest: int = LARGEST) -> io.BufferedReader:
    """Opens a file to read: a regular one (a link to one is followed) of at most ``largest`` bytes.

    Opening never waits, for a pipe's other end for example.

    Raises:
        RefusedFile: it is a pipe, a device, a socket, a folder, or larger; a UserError of one line.
        OSError: it does not exist, or can't be opened.
    """
    try:
        # a pipe without a writer would be waited for; a terminal must not become this process's
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket, and some devices, answer
            raise refused_file(
                file, "is a socket or a device; only a regular file is read"
            ) from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refused_file(file, f"is {kind_of(status.st_mode)}; only a regular file is read")
        if status.st_size > largest:
            raise too_large(file, status.st_size, largest)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def too_large(file: str | Path, size: int, largest: int) -> RefusedFile:
    """The error of a file of ``size`` bytes, of which at most ``largest`` are read."""
    return refused_file(file, f"has {size:,} bytes, at most {largest / 2**20:,.6g} MB are read")


def regular(file: Path, largest: int = LARGEST_WEIGHTS) -> Path:
    """The path itself, for a library that opens it by its name, once the file is checked.

    A regular one of at most ``largest`` bytes; errors as :func:`open_regular` raises them.
    """
    open_regular(file, largest).close()
    return file


def packed_record(file: Path) -> str:
    """What is wrong with a zip archive that may unpack to more than its own size: a record is compressed (torch writes none,
    but unpacks any size), or records overlap (the same bytes are read for each).

    Returns:
        The end of a sentence about the file; "" where nothing is wrong, and for what is no zip archive.

    Raises:
        OSError: it can't be opened.
        Exception: whatever ``zipfile`` raises for a damaged archive.
    """
    if not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_STORED:
                continue
            if "/code/" in record.filename:  # torch.jit compresses its programs
                return "it is a TorchScript archive"
            return f"its record {record.filename[:80]} is compressed"
        # what is before the table of records holds them all
        if sum(record.file_size for record in archive.infolist()) > archive.start_dir:
            return "its records overlap"
    return ""


def bytes_of(file: str | Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file of at most ``largest`` bytes; errors as :func:`open_regular` raises them."""
    with open_regular(file, largest) as opened:
        return opened.read()


def lines_of(file: str | Path, largest: int = LARGEST) -> IO[str]:
    """The UTF-8 lines of a regular file as they are, for :mod:`csv`; errors as :func:`open_regular` raises them.

    A byte-order mark, which spreadsheets write, is left out. The caller closes it; reading raises a ValueError for another
    encoding.
    """
    return io.TextIOWrapper(open_regular(file, largest), encoding="utf-8-sig", newline="")


def regular_files(folder: Path) -> None:
    """Checks the files of a folder for a library that opens them by itself; a name that is no folder is left to it.

    Folders in it are not searched. Errors as of :func:`regular`, of the first file that is refused.
    """
    for file in folder.glob("*"):
        if not file.is_dir():
            regular(file)


def text_of(file: str | Path, largest: int = LARGEST, errors: str = "strict") -> str:
    """The UTF-8 text of a regular file; a byte-order mark is left out, a ValueError for other encodings."""
    return bytes_of(file, largest).decode("utf-8-sig", errors)


def mapping_of(file: Path) -> Json:
    """What a JSON or YAML file maps; empty for a file that is missing, can't be read, is refused (a pipe, one too large),
    damaged, or holds something else.
    """
    try:
        read = yaml_of if file.suffix == ".yaml" else json_of
        content = read(text_of(file))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def mapping_in(tree: Mapping[str, Any], name: str) -> Json:
    """What a name maps to in values from a file; empty where that is no mapping."""
    value = tree.get(name)
    return value if isinstance(value, dict) else {}


def number_of(text: str) -> float:
    """The number of a table's field, NaN where it is empty or ``nan``; a ValueError for anything else, or infinity."""
    value = float(text.strip() or "nan")
    if math.isinf(value):
        raise ValueError(text)
    return value


def matching(pattern: str) -> list[str]:
    """Paths that a pattern names, sorted: ``*``, ``?`` and ``[]`` as of :mod:`glob`, ``**`` for any folders.

    Of links that lead to one folder the first is entered, and ``**`` enters none.
    """
    whole = Path(pattern)
    paths = [whole.anchor]
    for part in whole.parts[bool(whole.anchor) :]:
        folders = {os.path.realpath(path): path for path in reversed(paths)}
        paths = []
        for folder in sorted(folders.values()):
            if part == "**":
                paths += _folders_below(folder)
            else:
                names = glob.glob(part, root_dir=folder or None)  # noqa: PTH207 - of texts
                paths += [os.path.join(folder, name) for name in names]  # noqa: PTH118 - a Path each is slow
    return sorted(paths)


def _folders_below(folder: str) -> Iterator[str]:
    """A folder and all folders in it that are neither hidden nor links; ``""`` is the present one."""
    for place, names, _ in os.walk(folder or "."):
        names[:] = [name for name in names if not name.startswith(".")]
        yield place if folder else place[2:]


def plain_name(name: str, where: str) -> str:
    """Returns a name from elsewhere, such as that of a run's folder, once it is checked that it leads out of no folder.

    Args:
        name: from elsewhere; returned where it fits :data:`NAME`, which allows nothing that leads out of a folder.
        where: what named it, as the beginning of the message.

    Raises:
        UserError: another text; ``latest`` too, as it names no run of its own.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{where}: must be a plain name (letters, digits, . + - _), got '{name[:80]}'"
        )
    return name


def inside(folder: Path, name: str, where: str) -> Path:
    """The path ``folder/name``, which must stay inside the folder; it need not exist.

    Args:
        folder: the folder.
        name: from elsewhere.
        where: what named it, for the message.

    Raises:
        UserError: it leads out of the folder, also through links, names the folder itself, or holds a NUL.
    """
    file = folder / name
    if "\0" in name or folder.resolve() not in file.resolve().parents:
        raise UserError(f"{where}: '{name[:200]}' leads out of {folder}")
    return file
