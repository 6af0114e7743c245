"""kd beside LightlyTrain without labels: one teacher, one student, the same pictures, epochs, batch and input size.

    python scripts/bench/label_free.py --data data/imagewoof2-160 --backbone DINOV2.safetensors --lightly PYTHON --write

``--data`` is a folder of classes (``train/``, ``val/``) whose names judge the features alone: k-NN (20 neighbours,
temperature .07), a ridge probe and RankMe by kd's own probe, the training pictures as the bank. ``PYTHON`` runs in an
environment that has lightly-train. LightlyTrain starts from random weights, as one of kd's rows does, or from the weights
of kd's row "inherited, untrained". Each row is a process of its own, seconds and peak memory (of its largest process)
included; finished ones are read again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import options, write

STUDENT, TEACHER, SIDE, BATCH = "vit_tiny_patch16_224", "vit_small_patch14_dinov2", 112, 64
LIGHTLY = """
import json, sys, torch, timm, lightly_train
from safetensors.torch import load_file
asked = json.loads(sys.argv[1])
teacher = timm.create_model(asked["teacher"], img_size=asked["side"], num_classes=0)
given = load_file(asked["weights"])
grid = given["pos_embed"]
if grid.shape != teacher.pos_embed.shape:
    given["pos_embed"] = timm.layers.resample_abs_pos_embed(grid, teacher.patch_embed.grid_size, num_prefix_tokens=1)
teacher.load_state_dict(given)
student = timm.create_model(asked["student"], img_size=asked["side"], num_classes=0)
optimizer = {}
normalize = {}
if asked["start"]:
    student.load_state_dict(load_file(asked["start"]))
    normalize = {"normalize": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}}  # as the start was fitted
if asked["lr"]:
    optimizer = {"optim": "adamw", "optim_args": {"lr": asked["lr"]}}
lightly_train.pretrain(
    out=asked["out"], data=asked["data"], model=student, method="distillation", epochs=asked["epochs"],
    batch_size=asked["batch"], num_workers=1, seed=asked["seed"], precision="bf16-mixed", overwrite=True,
    method_args={"teacher": teacher},
    transform_args={"image_size": (asked["side"], asked["side"]), **normalize},
    **optimizer,
)
torch.save({name: value for name, value in student.state_dict().items()}, asked["file"])
"""


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Runs a process: seconds, and GB of the largest among it and its children."""
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Trains what is not there yet and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--backbone", type=Path, required=True, help="DINOv2's ViT-S/14, a file in timm's names"
    )
    parser.add_argument("--lightly", help="a Python with lightly-train 0.18")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--row", nargs="*", default=[], help="rows with one of these words alone")
    parser.add_argument("--runs", type=Path, default=Path("runs/label_free"))
    asked = options(parser)
    asked.runs.mkdir(parents=True, exist_ok=True)
    done = asked.runs / "rows.jsonl"
    pictures = [
        "recipe=foundation_vit", f"data.source.root={asked.data / 'train'}", f"data.source.val={asked.data / 'val'}",
        f"data.probe.root={asked.data}", f"model.teachers.dino.checkpoint={asked.backbone}", f"seed={asked.seed}",
        f"data.batch_size={BATCH}", f"runs_dir={asked.runs}", "model.student.kwargs={}",  # the peer's patches
    ]  # fmt: skip
    still = [
        "optim.lr=0",
        "optim.warmup_epochs=0",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
    ]
    length = [
        f"trainer.max_epochs={asked.epochs}",
        f"optim.warmup_epochs={min(1, asked.epochs - 1)}",
    ]

    def kd(name: str, items: list[str]) -> dict[str, float]:
        folder = f"{name}-{asked.epochs}-{asked.seed}"
        seconds, peak = timed([sys.executable, "-m", "kd.cli", *pictures, *items, f"name={folder}"])
        found = json.loads((asked.runs / "foundation_vit" / folder / "summary.json").read_text())
        return {**found["student"]["val"], "seconds": seconds, "gb": peak}

    def lightly(
        pooled: list[str], start: Path | None = None, lr: float | None = None
    ) -> dict[str, float]:
        """LightlyTrain's row.

        Args:
            pooled: settings of the student that is judged.
            start: weights that it begins with; None: random ones.
            lr: of AdamW; None: its own optimizer and rate.
        """
        kind = "lightly" if start is None else f"lightly-start-{lr}"
        out = (asked.runs / f"{kind}-{asked.epochs}-{asked.seed}").resolve()
        weights, cost = out.with_suffix(".pth"), out.with_suffix(".json")
        if not cost.is_file():
            given = {
                "teacher": TEACHER, "student": STUDENT, "side": SIDE, "batch": BATCH, "epochs": asked.epochs,
                "seed": asked.seed, "weights": str(asked.backbone.resolve()), "out": str(out), "file": str(weights),
                "data": str((asked.data / "train").resolve()), "start": start and str(start.resolve()), "lr": lr,
            }  # fmt: skip
            cost.write_text(json.dumps(timed([asked.lightly, "-c", LIGHTLY, json.dumps(given)])))
        seconds, peak = json.loads(cost.read_text())
        seen = []
        if start is None:  # as it normalises
            seen = [
                "model.student.mean=[0.485,0.456,0.406]",
                "model.student.std=[0.229,0.224,0.225]",
            ]
        checkpoint = ["model.student.inherit=false", f"model.student.checkpoint={weights}"]
        judged = kd(f"judged-{kind}-{len(pooled)}", [*checkpoint, *seen, *pooled, *still])
        return {**judged, "seconds": seconds, "gb": peak}

    def from_kds_start(lr: float | None) -> dict[str, float]:
        folder = f"inherited-{asked.epochs}-{asked.seed}"
        return lightly([], asked.runs / "foundation_vit" / folder / "student.safetensors", lr)

    average = ["model.student.kwargs={global_pool: avg, fc_norm: false}"]
    rows = {
        "random weights, untrained": lambda: kd("random", ["model.student.inherit=false", *still]),
        "LightlyTrain's distillation, from scratch (class token)": lambda: lightly([]),
        "likewise (mean of the patches)": lambda: lightly(average),
        "kd, from scratch": lambda: kd(
            "scratch", ["model.student.inherit=false", "optim.lr=1e-3", *length]
        ),
        "kd, inherited, untrained": lambda: kd("inherited", still),
        "LightlyTrain's distillation, from kd's start": lambda: from_kds_start(None),
        "LightlyTrain's distillation, from kd's start (AdamW, 1e-4)": lambda: from_kds_start(1e-4),
        "kd as its recipe does it": lambda: kd("recipe", length),
    }
    known = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    found = {
        row["name"]: row
        for row in known
        if (row["epochs"], row["seed"]) == (asked.epochs, asked.seed)
    }
    for name, call in rows.items():
        chosen = not asked.row or any(part in name for part in asked.row)
        if (
            name in found
            or not chosen
            or (("Lightly" in name or "likewise" in name) and not asked.lightly)
        ):
            continue
        found[name] = {"name": name, "epochs": asked.epochs, "seed": asked.seed, **call()}
        with done.open("a") as file:
            file.write(json.dumps(found[name]) + "\n")
    teacher = json.loads(next(asked.runs.glob("foundation_vit/*/summary.json")).read_text())[
        "teacher"
    ]["val"]
    lines = [
        f"{asked.data.name}; teacher: DINOv2's ViT-S/14 ({100 * teacher['knn1']:.1f} % k-NN, "
        f"{100 * teacher['probe1']:.1f} % ridge probe); student: {STUDENT}, both at {SIDE} px; {asked.epochs} epochs, "
        f"batch {BATCH}, seed {asked.seed}, one loader process; each trainer augments in its own way.",
        "",
        "| | k-NN % | ridge probe % | RankMe | minutes | GB |",
        "|---|---|---|---|---|---|",
    ]
    for name in rows:
        if row := found.get(name):
            shown = f"{100 * row['knn1']:.1f} | {100 * row['probe1']:.1f} | {row['rankme']:.1f}"
            lines.append(f"| {name} | {shown} | {row['seconds'] / 60:.1f} | {row['gb']:.1f} |")
    write(
        "label_free",
        asked.hardware,
        asked.date,
        f"Without labels, on {asked.data.name}",
        lines,
        asked.write,
    )


if __name__ == "__main__":
    main()
