"""A tenth of the training pictures as validation, by which rates are chosen: hard links, a folder a class.

    python scripts/bench/copies.py data/imagewoof2-160 data/woof-rates

Every tenth picture of a class, by name, is in ``val``. Other copies of the dated results are as plain: smaller pictures
(fast.ai's own ``imagewoof2-160``), a tenth of the training pictures, wrong labels (the column ``noisy_labels_50`` of
fast.ai's ``noisy_imagewoof.csv``), a domain left out.
"""

import os
import sys
from pathlib import Path


def tenth(source: Path, target: Path) -> None:
    """Links the pictures of ``source/train`` into ``target/train`` and ``target/val``."""
    for folder in sorted((source / "train").iterdir()):
        for i, file in enumerate(sorted(folder.iterdir())):
            place = target / ("train" if i % 10 else "val") / folder.name / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, place)


if __name__ == "__main__":
    tenth(Path(sys.argv[1]), Path(sys.argv[2]))
