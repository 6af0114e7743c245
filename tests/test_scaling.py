"""``scripts/bench/scaling.py`` runs; its bytes stay small. Of a picture: data/test_scaling.py."""

import pytest

from scripts.bench.scaling import OF_PICTURES, rows_of


def rows(*words: str) -> list[list[str]]:
    _, _, *lines = rows_of([*words])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_table_has_its_rows() -> None:
    names = [row[0] for row in rows("pictures", "2000", "10", "2")]
    assert names == [*OF_PICTURES, "list of files"]
    (_, _, _, kilobytes_sent), = rows("classes", "128", "1000")  # fmt: skip
    assert float(kilobytes_sent) < 1000
    (_, _, megabytes, _, _), = rows("steps", "2000")  # fmt: skip
    assert float(megabytes) < 1
    with pytest.raises(SystemExit, match="pictures: not so many numbers"):
        rows_of(["pictures", "5"])
