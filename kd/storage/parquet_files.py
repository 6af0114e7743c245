"""Parquet files from elsewhere: what a file says of its size is checked before it is read; needs pyarrow."""

import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import first_line
from kd.storage.elsewhere import LARGEST_DATA, LARGEST_LIST, Json, refused_file, regular

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData

MANY_CLASSES = re.compile(r"\s*[+-]?[\d_]{6,}\s*")
"""A number of classes, or the id of one, above 99,999."""
UNFOLDS = 64
"""A table takes at most so many times its file's bytes, or :data:`~kd.storage.elsewhere.LARGEST_LIST`."""


def check_parquet(file: Path) -> list[bytes]:
    """Checks what a parquet file says of its size.

    Returns:
        For each column of class ids the list of classes that ``datasets`` has noted, as it stands in the file.

    Raises:
        RefusedFile: no regular file; it is damaged; its table is larger than :data:`UNFOLDS` allows; a column has more than
            99,999 classes; or texts are stored by their common beginnings, which unfold to any size.
        OSError: no such file.
    """
    from pyarrow import ArrowException, parquet

    regular(file, LARGEST_DATA)
    allowed = max(LARGEST_LIST, UNFOLDS * file.stat().st_size)
    try:
        metadata = parquet.read_metadata(file)
        of_datasets = (metadata.metadata or {}).get(b"huggingface", b"{}")
        json.loads(of_datasets, object_pairs_hook=_with_few_classes)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        # first without the dictionaries, which are read only where all else is small enough
        for size_of in (_bytes_of_value, partial(_longest_text, file)):
            size = 0
            for number, column in product(range(len(groups)), range(metadata.num_columns)):
                chunk = groups[number].column(column)
                values = max(groups[number].num_rows, chunk.num_values)
                width = size_of(chunk, number, metadata.schema.column(column).length)
                size += max(width * values, chunk.total_uncompressed_size)
            if size > allowed:
                raise ValueError(f"it unfolds to {size:,} bytes, at most {allowed:,} are read")
    except (ArrowException, OSError, ValueError, RecursionError) as error:
        raise refused_file(file, f"can't be read as parquet: {first_line(error)[:160]}") from error
    return re.findall(rb'"names": *\[.*?\]', of_datasets)


def _with_few_classes(pairs: list[tuple[str, Any]]) -> Json:
    """An object of what ``datasets`` has noted in a file; a ValueError where a column has more than 99,999 classes."""
    for key, value in pairs:
        number = str(value if key == "num_classes" else key)
        if MANY_CLASSES.fullmatch(number):
            raise ValueError(f"classes and their ids must be <= 99999, got {number:.80}")
    return dict(pairs)


def _bytes_of_value(chunk: "ColumnChunkMetaData", _: int, length: int | None) -> int:
    """Bytes that a value of a column takes, texts aside: at least 8, or the ``length`` of all its values where the column
    fixes one. A ValueError for texts that are stored by their common beginnings.
    """
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        raise ValueError("its texts are DELTA_BYTE_ARRAY, which unfolds to any size")
    return max(8, length or 0)


def _longest_text(file: Path, chunk: "ColumnChunkMetaData", group: int, _: int | None) -> int:
    """Bytes of the longest text in the dictionary of a column in one group of rows; 0 where it has no dictionary of texts.

    With a dictionary the file holds each text once, and each row its place: a long one may come any number of times. The
    dictionary is read, and one row.
    """
    from pyarrow import compute, parquet

    if chunk.physical_type != "BYTE_ARRAY" or not chunk.has_dictionary_page:
        return 0
    name = chunk.path_in_schema
    content = parquet.ParquetFile(file, read_dictionary=[name], buffer_size=2**16)
    for batch in content.iter_batches(1, [group], [name]):
        array = batch.column(0)
        while not hasattr(array, "dictionary"):  # in a list, or a struct of this column alone
            array = array.values if hasattr(array, "values") else array.field(0)
        longest = compute.max(compute.binary_length(array.dictionary))
        return longest.as_py() or 0
    return 0
