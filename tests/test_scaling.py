"""``scripts/bench/scaling.py`` runs; its counts, which are no times, stay small (a picture: data/test_scaling.py)."""

import pytest

from scripts.bench.scaling import OF_PICTURES, table


def rows(*words: str) -> list[list[str]]:
    _, _, *lines = table([*words])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_table_has_its_rows() -> None:
    names = [row[0] for row in rows("pictures", "2000", "10", "2")]
    assert names == [*OF_PICTURES, "list of files"]
    (_, _, _, kilobytes_sent), = rows("classes", "128", "1000")  # fmt: skip
    assert float(kilobytes_sent) < 1000
    (_, _, megabytes, _, _), = rows("steps", "2000")  # fmt: skip
    assert float(megabytes) < 1
    (_, messages, _, _), = rows("processes", "5")  # fmt: skip
    assert messages == "3"
    with pytest.raises(SystemExit, match="pictures: not so many numbers"):
        table(["pictures", "5"])
