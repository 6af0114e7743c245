"""Copies of a folder of pictures, a folder a class: smaller, or hard links in another order.

python scripts/bench/copies.py shrink ARCHIVE/imagewoof2 data/imagewoof2-160   # shorter side 160, as fast.ai's own
python scripts/bench/copies.py tenth data/imagewoof2-160 data/woof-rates       # a tenth of train as val: for rates
python scripts/bench/copies.py few data/grocery data/grocery-tenth             # a tenth of train, val as it is
python scripts/bench/copies.py wrong data/imagewoof2-160 data/woof-50 noisy_imagewoof.csv 50   # wrong labels
python scripts/bench/copies.py leave-out PACS data/pacs-sketch sketch          # one domain for judging
"""

import csv
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

PARTS_OF_TENTH = 10
SIDE, QUALITY = 160, 95
"""Of the shorter side at most, in pixels; of the JPEG files."""


def link(file: Path, place: Path) -> None:
    """A hard link to a file; folders that are missing are made."""
    place.parent.mkdir(parents=True, exist_ok=True)
    os.link(file, place)


def shrink(source: Path, target: Path) -> None:
    """Copies pictures as JPEG, the shorter side of each at most :data:`SIDE` pixels."""
    files = []
    for file in sorted(source.rglob("*")):
        if file.suffix.lower() in (".jpeg", ".jpg", ".png"):
            files.append(file)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_shrink, source, target), files, chunksize=64))


def _shrink(source: Path, target: Path, file: Path) -> None:
    picture = Image.open(file).convert("RGB")
    factor = min(1.0, SIDE / min(picture.size))
    size = [max(1, round(edge * factor)) for edge in picture.size]
    place = (target / file.relative_to(source)).with_suffix(".jpg")
    place.parent.mkdir(parents=True, exist_ok=True)
    picture.resize(size, Image.Resampling.BICUBIC).save(place, quality=QUALITY)


def tenth(source: Path, target: Path) -> None:
    """Training pictures alone; every tenth of a class becomes validation."""
    for folder in sorted((source / "train").iterdir()):
        for i, file in enumerate(sorted(folder.iterdir())):
            split = "train" if i % PARTS_OF_TENTH else "val"
            link(file, target / split / folder.name / file.name)


def few(source: Path, target: Path) -> None:
    """Every tenth training picture of a class, one at least; validation as it is."""
    for split, step in (("train", PARTS_OF_TENTH), ("val", 1)):
        for folder in sorted((source / split).iterdir()):
            for file in sorted(folder.iterdir())[::step]:
                link(file, target / split / folder.name / file.name)


def wrong(source: Path, target: Path, table: str, percent: str) -> None:
    """Training pictures under the labels of fast.ai's table; says how many have another label now.

    Args:
        source: the folder; its files' endings may differ from the table's.
        target: a new folder.
        table: ``noisy_imagewoof.csv`` of fastai/imagenette.
        percent: of wrong labels: 0, 1, 5, 25 or 50, which names a column.
    """
    labels = {}
    with Path(table).open() as file:
        for row in csv.DictReader(file):
            labels[Path(row["path"]).stem] = row[f"noisy_labels_{percent}"]
    changed = 0
    for picture in sorted((source / "train").glob("*/*")):
        label = labels[picture.stem]
        changed += label != picture.parent.name
        link(picture, target / "train" / label / picture.name)
    for picture in sorted((source / "val").glob("*/*")):
        link(picture, target / "val" / picture.parent.name / picture.name)
    print(f"{changed} training pictures have a wrong label")


def leave_out(source: Path, target: Path, domain: str) -> None:
    """Pictures of a folder of domains, each a folder of classes, with one domain for judging.

    ``train/CLASS``: the other domains; ``val/CLASS``: every second picture of the one that is left out, by class and
    name; ``unlabelled``: its other half, all in one folder.
    """
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        for kind in sorted(folder.iterdir()):
            for number, file in enumerate(sorted(kind.iterdir())):
                place = target / "train" / kind.name
                if folder.name == domain:
                    place = target / "unlabelled" if number % 2 else target / "val" / kind.name
                link(file, place / f"{folder.name}_{kind.name}_{file.name}")


KINDS = {"shrink": shrink, "tenth": tenth, "few": few, "wrong": wrong, "leave-out": leave_out}


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    kind, source, target, *more = sys.argv[1:]
    KINDS[kind](Path(source), Path(target), *more)
