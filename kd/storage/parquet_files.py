"""Parquet files from elsewhere: what a file says of its size is checked before it is read; needs pyarrow."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kd.storage.elsewhere import LARGEST_DATA, LARGEST_LIST, json_of, refused_file, regular

if TYPE_CHECKING:
    from pyarrow.parquet import RowGroupMetaData

LARGEST_CLASSES = 65_536
"""Names of classes that a column may have."""
ID, LONGEST_ID = re.compile(r"\s*[+-]?[\d_]+\s*"), 20
"""The id of a class, as a key of its name, and its most characters."""
UNFOLDS = 64
"""A table takes at most so many times its file's bytes, or :data:`~kd.storage.elsewhere.LARGEST_LIST`."""


def check_parquet(file: Path) -> None:
    """Checks what a parquet file says of its size.

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
    _check_classes(file, told)
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


def _check_classes(file: Path, told: object) -> None:
    """Refuses more classes than a column may have in what ``datasets`` has noted in a file, by their number or an id."""
    for key, value in _values(told):
        is_count = key == "num_classes" and isinstance(value, int) and value > LARGEST_CLASSES
        if is_count or (
            ID.fullmatch(key) and (len(key) > LONGEST_ID or int(key) > LARGEST_CLASSES)
        ):
            what = f"num_classes must be <= {LARGEST_CLASSES}, got {value}"
            if not is_count:
                what = f"a class's id must be <= {LARGEST_CLASSES}, got {key:.80}"
            raise refused_file(file, what)


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
