"""Does the verdict tell the truth? Plants a bottleneck, reads the verdict, follows its advice, measures the gain.

    python scripts/bench/truth.py --out scripts/bench/truth_cpu_2026-11-21.md
    python scripts/bench/truth.py --only "slow optimizer"

Each plant is a short run of a tiny pair on drawn pictures; "reached" is images/s of the run that follows the advice
over images/s of the planted one (after the first step, validation left out). Needs a machine to itself.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a script: tests._helpers draws the pictures

from kd.report.html import images_per_s  # noqa: E402
from kd.report.records import Run, read_run  # noqa: E402


def callback(name: str, **arguments: Any) -> str:
    """An item that adds one of our plants."""
    return "trainer.callbacks+=" + json.dumps(
        {"class_path": f"scripts.bench.plants.{name}", "init_args": arguments}
    )  # fmt: skip


def folder(pictures: Path, **arguments: Any) -> str:
    """An item that makes the pictures come late."""
    return "data.source=" + json.dumps(
        {"class_path": "scripts.bench.plants.SlowFolder", "init_args": {"root": str(pictures), **arguments}}
    )  # fmt: skip


def workers(run: Run) -> list[str]:
    """The item in a verdict's lever that sets the number of loader processes."""
    return re.findall(r"data\.num_workers=\d+", run.summary["verdict"]["lever"])


@dataclass
class Plant:
    """A bottleneck.

    Attributes:
        name: for people.
        bound: what the verdict must say (one of these).
        items: that plant it.
        follow: the items of a run that follows the advice, given the planted run.
        mention: a word that the verdict's sentence must hold.
    """

    name: str
    bound: tuple[str, ...]
    items: list[str]
    follow: Callable[[Run], list[str]]
    mention: str = ""


def plants(pictures: Path) -> list[Plant]:
    """All of them."""
    sleepy, disk = folder(pictures, sleep_s=0.02), folder(pictures, bytes_per_s=80_000)
    costly = folder(pictures, burn_s=0.004)
    pace = callback("Slow", part="student", seconds=0.06)  # a step that does not only compete for the cores
    two = ["config=ddp_2cpu", "data.batch_size=4"]
    return [
        Plant("sleeping transform", ("data",), [pace, sleepy], lambda run: [pace, sleepy, *workers(run)],
              "data.num_workers"),
        Plant("slow disk", ("data",), [pace, disk], lambda run: [pace, disk, *workers(run)], "data.num_workers"),
        Plant("16 workers on few cores", ("host",), [costly, "data.num_workers=16"],
              lambda run: workers(run), "16 loader processes"),
        Plant("huge teacher", ("teacher",), [callback("Slow", part="teacher", seconds=0.2)],
              lambda run: [callback("FreeTeacher")], "model.teacher.cache=on"),
        Plant("slow optimizer", ("student",), [callback("Slow", part="optimizer", seconds=0.15)],
              lambda run: [], "optimizer"),
        Plant("slow callback", ("host",), [callback("Slow", part="callback", seconds=0.15)],
              lambda run: [], "Slow.on_train_batch_start"),
        Plant("slow checkpoints", ("checkpoint",), [callback("Slow", part="checkpoint", seconds=0.1)],
              lambda run: [], "checkpoint"),
        Plant("one slow rank", ("communication",), [*two, callback("Slow", part="student", seconds=0.3, rank=1)],
              lambda run: two, "rank 1 computes"),
    ]  # fmt: skip


def train(recipe: Path, items: list[str]) -> Run:
    """One run in a process of its own, one compute thread."""
    root = Path(tempfile.mkdtemp(dir=recipe.parent))
    command = [sys.executable, "-m", "kd.cli", f"recipe={recipe}", f"runs_dir={root}", *items]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(items)}: {done.stderr[-2000:]}")
    return read_run(next(root.glob("*/000")))


def prepare(place: Path, per_class: int = 48) -> tuple[Path, Path]:
    """Pictures, and the recipe of a tiny pair whose teacher knows them."""
    from tests._helpers import draw_folder, write_recipe

    pictures = draw_folder(place / "pictures", train=per_class, val=8)
    alone = write_recipe(place / "teacher.yaml", pictures, None, model__student={
        "arch": "vit_tiny_patch16_224", "img_size": 32,
        "kwargs": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}})  # fmt: skip
    teacher = train(alone, ["trainer.max_epochs=4", "optim.lr=0.003"]).folder
    recipe = write_recipe(place / "tiny.yaml", pictures, teacher / "student.safetensors", trainer__log_every_n_steps=5)
    return pictures, recipe


def measure(plant: Plant, recipe: Path, limits: list[str]) -> dict[str, Any]:
    """One row of the table."""
    planted = train(recipe, [*plant.items, *limits])
    verdict = planted.summary["verdict"]
    after = train(recipe, [*plant.follow(planted), *limits])
    reached = (images_per_s(after) or 0) / (images_per_s(planted) or 1)
    predicted = verdict["predicted_speedup"]
    return {
        "named": verdict["bound"] in plant.bound and plant.mention in verdict["text"],
        "text": verdict["text"],
        "predicted": predicted,
        "reached": round(reached, 2),
        "error": round(predicted / reached - 1, 3) if predicted else None,
    }


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the plant of this name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    lines = ["| planted | named | the verdict | predicted | reached | error |", "|---|---|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as place:
        pictures, recipe = prepare(Path(place))
        limits = [f"trainer.max_epochs={arguments.epochs}"]
        for plant in plants(pictures):
            if arguments.only in (None, plant.name):
                row = measure(plant, recipe, limits)
                error = "" if row["error"] is None else f"{row['error']:+.0%}"
                lines.append(f"| {plant.name} | {'yes' if row['named'] else 'NO'} | {row['text']} | "
                             f"{row['predicted']} | {row['reached']} | {error} |")  # fmt: skip
                print(lines[-1], flush=True)
        healthy = train(recipe, [*limits, "data.num_workers=1"])
        alarms = [f["rule"] for f in healthy.summary["findings"]]
        lines.append(
            f"| nothing | | {healthy.summary['verdict']['text']}; rules: {', '.join(alarms) or 'none'} | | | |"
        )
        print(lines[-1])
    head = f"# Planted bottlenecks, {platform.machine()}, {os.cpu_count()} cores\n\n"
    head += f"`python scripts/bench/truth.py --epochs {arguments.epochs}`; batch 8, one compute thread.\n\n"
    if arguments.out:
        arguments.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
