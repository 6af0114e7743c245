"""Pictures of another kind than those with labels: PACS, one of its four domains left out.

    python scripts/bench/domain_shift.py --data PACS --backbone DINOV2.safetensors --write

``--data`` is a folder of domains (``art_painting``, ``cartoon``, ``photo``, ``sketch``), each a folder of classes. For each
domain that is left out, the teacher, DINOv2's ViT-S/14, is fine-tuned on the labels of the three others. Every second
picture of the left-out domain is shown without its label where a row says so; the other half judges all rows, after the
last epoch, and chooses nothing.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from harness import options, write
from public import STUDENT, WAYS, adamw, kd_train, link

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
UNLABELLED = "kd, with the new domain's unlabelled half"
ROWS: dict[str, list[str]] = {
    UNLABELLED: [],
    "kd, without it": [],
    "labels alone, from kd's start (AdamW, 2e-5)": [*WAYS["labels alone"], *adamw(2e-5)],
}
"""Settings by row; from kd's start 2e-5 was the best of four rates for labels alone (``public.py``)."""


def split(data: Path, left_out: str, target: Path) -> None:
    """Lays out the pictures of one round as hard links.

    ``train/CLASS``: the three other domains; ``val/CLASS``: every second picture of the left-out one, by class and name;
    ``unlabelled``: the other half, all in one folder.
    """
    if target.is_dir():
        return
    for domain in DOMAINS:
        for kind in sorted((data / domain).iterdir()):
            for number, file in enumerate(sorted(kind.iterdir())):
                place = target / "train" / kind.name
                if domain == left_out:
                    place = target / "val" / kind.name
                    if number % 2:
                        place = target / "unlabelled"
                link(file, place / f"{domain}_{kind.name}_{file.name}")


def accuracy(asked: argparse.Namespace, left_out: str, row: str) -> float:
    """Per cent of the judging half of a domain, by a student or (``row``: "teacher") the teacher; trained if need be."""
    data = asked.runs.resolve() / f"pictures_{left_out}"
    split(asked.data, left_out, data)
    teacher = asked.runs / "photos_teacher" / f"teacher_{left_out}"
    shared = [
        f"data.source.root={data}",
        f"data.img_size={asked.side}",
        f"model.student.img_size={asked.side}",
        *asked.set,
    ]
    if row == "teacher":
        folder = teacher
        settings = [
            "recipe=photos_teacher",
            f"model.student.checkpoint={asked.backbone}",
            "model.student.pretrained=false",
            f"trainer.max_epochs={asked.teacher_epochs}",
            *shared,
        ]
    else:
        folder = asked.runs / "grocery_vit" / f"row{list(ROWS).index(row)}_{left_out}"
        settings = [
            "recipe=grocery_vit",
            f"model.teacher.checkpoint={teacher / 'student'}",
            f"model.teacher.img_size={asked.side}",
            f"trainer.max_epochs={asked.epochs}",
            *ROWS[row],
            *shared,
            *asked.student_set,
        ]
        if row == UNLABELLED:
            settings.append(f"data.unlabeled={data / 'unlabelled'}")
    summary = folder / "summary.json"
    if not summary.is_file():
        kd_train(settings, asked.runs / folder.name)
    found: float = json.loads(summary.read_text())["student"]["val"]["acc1"]
    return 100 * found


def table(asked: argparse.Namespace) -> Sequence[str]:
    """The page's lines: what was done, then per cent by row and domain."""
    rows = [
        "teacher",
        *(row for row in ROWS if not asked.row or any(word in row for word in asked.row)),
    ]
    lines = [
        f"PACS; teacher: ViT-S/14 (DINOv2), {asked.teacher_epochs} epochs of the three other domains' labels; student: "
        f"{STUDENT} with its patches at {asked.side} px, {asked.epochs} epochs; seed 0. Per cent of every second picture of "
        f"the domain that was left out. Also set: {' '.join([*asked.set, *asked.student_set]) or 'nothing'}.",
        "",
        "| | " + " | ".join(asked.domains) + " | mean |",
        "|---|" + "---|" * (len(asked.domains) + 1),
    ]
    for row in rows:
        accuracies = [accuracy(asked, domain, row) for domain in asked.domains]
        cells = [f"{value:.1f}" for value in [*accuracies, statistics.mean(accuracies)]]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Trains what is not there yet and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--backbone", required=True, help="DINOv2's ViT-S/14, a file in timm's names"
    )
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--side", type=int, default=112, help="of the pictures, in pixels")
    parser.add_argument("--teacher-epochs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--row", nargs="*", default=[], help="rows with one of these words alone")
    parser.add_argument("--set", nargs="*", default=[], help="settings for teacher and students")
    parser.add_argument("--student-set", nargs="*", default=[], help="settings for the students")
    parser.add_argument("--runs", type=Path, default=Path("runs/domain_shift"))
    asked = options(parser)
    title = "Pictures of another kind: PACS, one domain left out"
    write("domain_shift", asked.hardware, asked.date, title, table(asked), asked.write)


if __name__ == "__main__":
    main()
