"""A folder of a data set for ``datasets``: its configuration is read here first, as data.

``datasets`` parses ``README.md``, ``.huggingface.yaml`` and parquet files by itself: aliases of YAML that grow without
end, patterns that lead out of the folder, a number of classes that takes all memory, tables that unfold to any size.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from os import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING

from kd.storage.elsewhere import (
    LARGEST_DATA,
    LARGEST_LIST,
    json_of,
    open_regular,
    refused_file,
    regular,
    regular_files,
    text_of,
    yaml_of,
)

if TYPE_CHECKING:
    from pyarrow.parquet import RowGroupMetaData

CARD = "README.md"
"""Its front matter, between two lines ``---``, is YAML."""
FRONT_MATTER = re.compile(r"\s*---(?:\r\n|\r|\n)(.*?)[\r\n]---[ \t]*(?:\r|\n|$)", re.DOTALL)
"""A card's front matter as ``huggingface_hub`` finds it; without ``---`` in it every release finds the same."""
LARGEST_CLASSES = 65_536
"""Names of classes that a column may have."""
ID, LONGEST_ID = re.compile(r"\s*[+-]?[\d_]+\s*"), 20
"""The id of a class, as a key of its name, and its most characters."""
KEYS = {"config_name", "data_files", "data_dir", "default", "sep", "drop_labels", "drop_metadata"}
"""Settings of a configuration; others are arguments of readers."""
PARQUET = {".parquet", ".geoparquet", ".gpq"}
"""Endings by which ``datasets`` takes all of a data set's files for tables, wherever they are in a name."""
MAGIC = b"PAR1"
"""The end of each table."""
UNFOLDS = 64
"""A table takes at most so many times its file's bytes, or :data:`~kd.storage.elsewhere.LARGEST_LIST`."""


def check_dataset_folder(folder: Path) -> None:
    """Checks the configuration and the tables in a folder that ``datasets`` reads.

    Raises:
        RefusedFile: names the file: no regular one, a link to a folder, YAML or JSON that is too large or damaged, a path
            that leads out of the folder, a setting outside :data:`KEYS`, more classes than a setting takes, or a table
            that unfolds too far.
    """
    regular_files(folder)
    for file in (folder / CARD, folder / ".huggingface.yaml", folder / "dataset_infos.json"):
        if not file.is_file():
            continue
        text = text_of(file, errors="replace")
        try:
            content = (
                json_of(text) if file.suffix == ".json" else yaml_of(_front_matter(file, text))
            )
        except ValueError as error:
            raise refused_file(file, " ".join(str(error).split())[:200]) from error
        _check_configuration(file, content)
    files = []
    for file in folder.rglob("*"):
        if not file.is_dir():
            files.append(file)
        elif file.is_symlink():
            raise refused_file(file, "is a link to a folder; put the folder itself there")
    if any(PARQUET & {*map(str.lower, file.suffixes)} for file in files):
        for file in filter(_is_parquet, files):
            check_parquet(file)


def _is_parquet(file: Path) -> bool:
    """Whether a file is a table by its content, or its name's end."""
    if file.suffix in PARQUET:
        return True
    with open_regular(file, LARGEST_DATA) as opened:
        opened.seek(-min(len(MAGIC), opened.seek(0, SEEK_END)), SEEK_END)
        return opened.read() == MAGIC


def _front_matter(file: Path, text: str) -> str:
    """The YAML of a card, "" where it has none; of another file all of its text."""
    if file.name != CARD:
        return text
    found = FRONT_MATTER.match(text)
    content = found[1] if found else ""
    begins = text.lstrip().startswith("---") and text.count("---") > 1
    if "---" in content or (begins and not found):
        raise ValueError("its front matter must lie between two lines ---, with no --- in it")
    return content


def _check_configuration(file: Path, content: object) -> None:
    """Checks a card's ``configs`` and what a data set says of its classes; a RefusedFile of ``file``."""
    for key, value in _values(content):
        is_count = key == "num_classes" and isinstance(value, int) and value > LARGEST_CLASSES
        if is_count or (
            ID.fullmatch(key) and (len(key) > LONGEST_ID or int(key) > LARGEST_CLASSES)
        ):
            what = "num_classes" if is_count else "a class's id"
            got = value if is_count else key
            raise refused_file(file, f"{what} must be <= {LARGEST_CLASSES}, got {got!s:.80}")
    configs = content.get("configs") if isinstance(content, dict) else None
    for config in configs if isinstance(configs, list) else ():
        unknown = set(config) - KEYS if isinstance(config, dict) else {"configs"}
        if unknown:
            raise refused_file(
                file, f"configs takes {', '.join(sorted(KEYS))}, got {unknown.pop()!s:.80}"
            )
        places = {name: config.get(name) for name in ("data_files", "data_dir")}
        for key, value in _values(places):
            text = str(value)
            leads_out = text[:1] in ("/", "~") or "://" in text or ".." in Path(text).parts
            if key != "split" and leads_out:
                raise refused_file(file, f"{text:.80} leads out of the folder")


def _values(tree: object, key: str = "") -> Iterator[tuple[str, object]]:
    """All plain values of nested mappings and lists, each with its own key, or that of the list it is in."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _values(value, str(name))
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, key)
    else:
        yield key, tree


def check_parquet(file: Path) -> None:
    """Checks what a parquet file says of its size, before it is read; needs pyarrow.

    Raises:
        RefusedFile: it is damaged, or its table is larger than :data:`UNFOLDS` allows; its columns' classes are too many;
            texts of a column are stored by their common beginnings, which unfold to any size.
    """
    from pyarrow import ArrowException, parquet

    regular(file, LARGEST_DATA)
    try:
        metadata = parquet.read_metadata(file)
        told = json_of((metadata.metadata or {}).get(b"huggingface", b"{}"))
    except (ArrowException, OSError, ValueError) as error:
        raise refused_file(
            file, f"is no parquet file: {' '.join(str(error).split())[:160]}"
        ) from error
    _check_configuration(file, told)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    unfolded = sum(group.total_byte_size for group in groups)
    cells = 0
    for i in range(metadata.num_columns):
        width = max(8, metadata.schema.column(i).length or 0)
        for group in groups:
            column = group.column(i)
            cells += width * max(column.num_values, group.num_rows)
            if "DELTA_BYTE_ARRAY" in column.encodings:
                raise refused_file(
                    file, "its texts are DELTA_BYTE_ARRAY, which unfolds to any size"
                )
    allowed = max(LARGEST_LIST, UNFOLDS * file.stat().st_size)
    largest = max(unfolded, cells)
    if largest <= allowed:
        try:
            largest = sum(map(partial(_texts, file), range(len(groups)), groups))
        except ArrowException as error:
            raise refused_file(file, f"is damaged: {' '.join(str(error).split())[:160]}") from error
    if largest > allowed:
        raise refused_file(file, f"unfolds to {largest:,} bytes, at most {allowed:,} are read")


def _texts(file: Path, number: int, group: "RowGroupMetaData") -> int:
    """Bytes that texts of a group of rows take at most whose column has each text once, in a dictionary, and its place in
    each row.

    Args:
        file: the table; of each such column the dictionary is read, and one row.
        number: of the group.
        group: what the file says of it.
    """
    from pyarrow import compute, parquet

    total = 0
    for column in map(group.column, range(group.num_columns)):
        if column.physical_type != "BYTE_ARRAY" or not column.has_dictionary_page:
            continue
        name = column.path_in_schema
        content = parquet.ParquetFile(file, read_dictionary=[name], buffer_size=2**16)
        for batch in islice(content.iter_batches(1, [number], [name]), 1):
            array = batch.column(0)
            while not hasattr(array, "dictionary"):  # in a list, or a struct of this column alone
                array = array.values if hasattr(array, "values") else array.field(0)
            longest = compute.max(compute.binary_length(array.dictionary))
            total += (longest.as_py() or 0) * max(group.num_rows, column.num_values)
    return total
