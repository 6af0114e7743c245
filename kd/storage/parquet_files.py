"""Parquet files from elsewhere: what a file says of its size is checked before it is read; needs pyarrow."""

import re
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import first_line
from kd.storage.elsewhere import LARGEST_DATA, LARGEST_LIST, Json, json_of, refused_file, regular

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

MANY_CLASSES = re.compile(r"\s*[+-]?[\d_]{6,}\s*")
"""A number of classes, or the id of one, above 99,999."""
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
    allowed = max(LARGEST_LIST, UNFOLDS * file.stat().st_size)
    try:
        metadata = parquet.read_metadata(file)
        of_datasets = (metadata.metadata or {}).get(b"huggingface", b"{}")
        json_of(of_datasets, _with_few_classes)
        chunks = list(product(range(metadata.num_row_groups), range(metadata.num_columns)))
        for size_of in (_stored, _texts):
            size = sum(size_of(file, metadata, *chunk) for chunk in chunks)
            if size > allowed:
                raise ValueError(f"it unfolds to {size:,} bytes, at most {allowed:,} are read")
    except (ArrowException, OSError, ValueError) as error:
        raise refused_file(file, f"can't be read as parquet: {first_line(error)[:160]}") from error


def _with_few_classes(pairs: list[tuple[str, Any]]) -> Json:
    """An object of what ``datasets`` has noted in a file; a ValueError where a column has more than 99,999 classes."""
    for key, value in pairs:
        number = str(value if key == "num_classes" else key)
        if MANY_CLASSES.fullmatch(number):
            raise ValueError(f"classes and their ids must be <= 99999, got {number:.80}")
    return dict(pairs)


def _stored(_: Path, metadata: "FileMetaData", group: int, column: int) -> int:
    """Bytes of a column in a group of rows without what dictionaries stand for; a ValueError for texts that are stored by
    their beginnings.
    """
    chunk = metadata.row_group(group).column(column)
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        raise ValueError("its texts are DELTA_BYTE_ARRAY, which unfolds to any size")
    width = max(8, metadata.schema.column(column).length or 0)
    return max(width * _rows(metadata, group, column), chunk.total_uncompressed_size)


def _rows(metadata: "FileMetaData", group: int, column: int) -> int:
    """Values of a column in a group of rows, or its rows, whichever are more."""
    rows = metadata.row_group(group)
    return max(rows.num_rows, rows.column(column).num_values)


def _texts(file: Path, metadata: "FileMetaData", group: int, column: int) -> int:
    """Bytes that a column's texts in a group of rows take at most, where it has each text once, in a dictionary, and its
    place in each row; the dictionary is read, and one row.
    """
    from pyarrow import compute, parquet

    chunk = metadata.row_group(group).column(column)
    if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page:
        return 0
    name = chunk.path_in_schema
    content = parquet.ParquetFile(file, read_dictionary=[name], buffer_size=2**16)
    size = 0
    for batch in islice(content.iter_batches(1, [group], [name]), 1):
        array = batch.column(0)
        while not hasattr(array, "dictionary"):  # in a list, or a struct of this column alone
            array = array.values if hasattr(array, "values") else array.field(0)
        longest = compute.max(compute.binary_length(array.dictionary))
        size = (longest.as_py() or 0) * _rows(metadata, group, column)
    return size
