"""Makes a table of pictures and labels, which ``data.source=TABLE.csv`` reads, of lists that other programs write.

    python scripts/to_list.py annotations.json train.csv      # COCO's JSON: the categories of each picture's annotations
    python scripts/to_list.py dataset.ndjson all.csv          # Ultralytics' NDJSON for classification
    python scripts/to_list.py labels.csv train.csv image_id   # columns of 0 and 1 beside that of the paths

Labels of a picture are parted by ``;``. A picture of several labels needs ``data.source.multi_label=true``. Where the list
names splits, the table has a column ``split``.
"""

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str, str]
"""A picture's path, its labels parted by ``;``, and its split ("" where the list names none)."""


def of_coco(content: dict[str, Any]) -> Iterator[Row]:
    """A row of each image; a category that several of its annotations have counts once."""
    names = {category["id"]: str(category["name"]) for category in content["categories"]}
    labels = defaultdict(set)
    for annotation in content["annotations"]:
        labels[annotation["image_id"]].add(names[annotation["category_id"]])
    for image in content["images"]:
        yield image["file_name"], ";".join(sorted(labels[image["id"]])), ""


def of_ultralytics(records: Iterator[dict[str, Any]]) -> Iterator[Row]:
    """A row of each picture after the first record, which names the classes."""
    names = next(records)["class_names"]
    for record in records:
        label = ";".join(names[str(i)] for i in record["annotations"]["classification"])
        yield record["file"], label, record.get("split", "train")


def of_flags(rows: Iterable[dict[str, str]], path: str) -> Iterator[Row]:
    """A row of each row: the names of its columns with 1 or true."""
    for row in rows:
        yes = [name for name, cell in row.items() if cell.strip() in ("1", "1.0", "true", "True")]
        labels = ";".join(name.strip() for name in yes if name not in (path, "split"))
        yield row[path], labels, row.get("split", "")


def main(given: str, out: str, path: str = "") -> None:
    """Reads the file ``given`` and writes ``out``; ``path``: of a table of 0 and 1, the column of the paths."""
    with Path(given).open(encoding="utf-8-sig", newline="") as file:
        if path:
            rows = [*of_flags(csv.DictReader(file), path)]
        elif given.endswith(".ndjson"):
            rows = [*of_ultralytics(map(json.loads, file))]
        else:
            rows = [*of_coco(json.load(file))]
    width = 2 + any(row[2] for row in rows)
    with Path(out).open("w", encoding="utf-8", newline="") as file:
        named = [("path", "label", "split"), *rows]
        csv.writer(file).writerows(row[:width] for row in named)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
