"""Makes the teacher that ships with a recipe: ``python scripts/ship_teacher.py RUN`` after ``kd-train recipe=NAME``.

Writes ``recipes/NAME.safetensors`` (the run's best student, rounded to float16) and, in ``recipes/NAME.sha256``, its
hash and a line on how it was made (``sha256sum -c`` reads it).
"""

import hashlib
import json
import sys
from pathlib import Path

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

RECIPES = Path(__file__).parent.parent / "recipes"


def main(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    student, best, name = (
        run / "student.safetensors",
        summary["student"]["best_val"],
        summary["recipe"],
    )
    with safe_open(student, "pt") as opened:
        metadata = opened.metadata()
    file = RECIPES / f"{name}.safetensors"
    save_file({key: value.half() for key, value in load_file(student).items()}, file, metadata)
    versions = f"kd {summary['kd_version']}, torch {torch.__version__.split('+')[0]}, timm {timm.__version__}"
    made = (
        f"# kd-train recipe={name} ({versions}, {summary['device']}, {summary['precision']}, seed {summary['seed']}), "
        f"epoch {best['epoch']} of {summary['epochs']}: val acc1 {best['acc1']:.1%}; "
        "rounded to float16 by scripts/ship_teacher.py"
    )
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_suffix(".sha256").write_text(f"{made}\n{digest}  {file.name}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
