"""Does the verdict tell the truth? Plants a bottleneck, reads the verdict, follows its advice, measures the gain.

    python scripts/bench/truth.py --out scripts/bench/truth_cpu_2026-11-22.md
    python scripts/bench/truth.py --only "slow optimizer"
    python scripts/bench/truth.py --foreign                # the plants in a training that is not kd's: foreign.py

Each plant is a short run of a tiny pair on drawn pictures; "reached" is images/s of the run that follows the advice
over images/s of the planted one (after the first step, validation left out). Both are repeated in turn, and the median
round counts. Needs a machine to itself: rounds during which other processes took a core are left out, and a row that
has no others is marked: its figures say little.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
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

from kd.report.facts import Facts  # noqa: E402
from kd.report.limits import Limit  # noqa: E402
from kd.report.records import RunRecords, read_run  # noqa: E402
from kd.report.rules import Explained, sentence  # noqa: E402

QUIET = 0.25  # cores that other processes may use, on average


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


def workers(run: RunRecords) -> list[str]:
    """The item in a verdict's lever that sets the number of loader processes."""
    return re.findall(r"(?:data\.)?num_workers=\d+", own_limit(run).lever)


@dataclass
class Plant:
    """A bottleneck.

    Attributes:
        name: for people.
        bound: what the verdict must say (one of these).
        items: that plant it.
        follow: the items of a run that follows the advice, given the planted run.
        mention: a word that the verdict's sentence must hold.
        cores: that the run may use; default: all of the machine's.
        neighbours: processes that compute on these cores meanwhile; to follow the advice is to run without them.
    """

    name: str
    bound: tuple[str, ...]
    items: list[str]
    follow: Callable[[RunRecords], list[str]]
    mention: str = ""
    cores: int | None = None
    neighbours: int = 0

    def limit(self, run: RunRecords) -> Limit:
        """What limits the planted run first; other processes of the machine aside, unless they are the plant."""
        if not self.neighbours:
            return own_limit(run)
        return next(
            limit for limit in Explained(run).limits if limit.bound != "startup"
        )  # beside them the short run starts slowly


def plants(pictures: Path) -> list[Plant]:
    """All of them."""
    sleepy, disk = folder(pictures, sleep_s=0.02), folder(pictures, bytes_per_s=80_000)
    costly, busy = folder(pictures, burn_s=0.004), folder(pictures, burn_s=0.012)
    pace = callback(
        "Slow", part="student", seconds=0.06
    )  # a step that does not only compete for the cores
    two = ["config=ddp_2cpu", "data.batch_size=4"]
    return [
        Plant("sleeping transform", ("data",), [pace, sleepy], lambda run: [pace, sleepy, *workers(run)],
              "data.num_workers"),
        Plant("slow disk", ("data",), [pace, disk], lambda run: [pace, disk, *workers(run)], "data.num_workers"),
        Plant("16 workers on few cores", ("host", "data"), [costly, "data.num_workers=16"],
              lambda run: workers(run) or ["data.num_workers=1"],  # cheaper pictures, and no more workers than cores
              "16 loader processes"),
        Plant("2 ranks x 8 busy workers on 2 cores", ("host", "data"), [*two, busy, "data.num_workers=8"],
              lambda run: [*two, *([] if "cheaper" in own_limit(run).lever else [busy]),
                           *(workers(run) or ["data.num_workers=1"])],
              "16 loader processes", cores=2),
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
        Plant("a neighbour on the only core", ("host",), [], lambda run: [], "other processes use", 1, neighbours=1),
        Plant("neighbours beside a busy loader", ("host",), [busy, "data.num_workers=1"],
              lambda run: [busy, "data.num_workers=1"], "other processes use", 2, neighbours=2),
    ]  # fmt: skip


def foreign_plants() -> list[Plant]:
    """Those of a training that is not kd's; the items are words of ``foreign.py``."""
    pace = "slow=forward:0.06"
    sleepy, busy = "sleep_s=0.02", "burn_s=0.012"
    busier = "burn_s=0.03"  # a batch takes 240 ms of a core, a step 90
    two = ["devices=2"]
    long = "steps=120"  # more batches than 16 loader processes hold ready
    return [
        Plant("sleeping loader", ("data",), [pace, sleepy], lambda run: [pace, sleepy, *workers(run)],
              "num_workers"),
        Plant("16 workers on few cores", ("host", "data"), [busier, long, "num_workers=16"],
              lambda run: [long, *(workers(run) or ["num_workers=1"])], "16 loader processes", cores=2),
        Plant("2 ranks x 8 busy workers on 2 cores", ("host", "data"), [*two, busy, long, "num_workers=8"],
              lambda run: [*two, long, *([] if "cheaper" in own_limit(run).lever else [busy]),
                           *(workers(run) or ["num_workers=1"])],
              "16 loader processes", cores=2),
        Plant("slow optimizer", ("model",), ["slow=optimizer:0.15"], lambda run: [], "optimizer"),
        Plant("slow callback", ("host",), ["slow=callback:0.15"], lambda run: [], "Slow.on_train_batch_start"),
        Plant("slow checkpoints", ("checkpoint",), ["slow=checkpoint:0.1"], lambda run: [], "checkpoint"),
        Plant("one slow rank", ("communication",), [*two, "slow=forward:0.3:1"], lambda run: two, "rank 1 computes"),
        Plant("a neighbour on the only core", ("host",), [], lambda run: [], "other processes use", 1, neighbours=1),
    ]  # fmt: skip


def train(
    recipe: Path, items: list[str], cores: int | None = None, neighbours: int = 0
) -> RunRecords:
    """One run in a process of its own, one compute thread, on the first ``cores`` cores, beside others that compute.

    Args:
        recipe: of kd-train, or a copy of ``foreign.py``.
        items: settings, or words of ``foreign.py``.
        cores: that it may use; default: all.
        neighbours: processes that compute on them meanwhile.
    """
    root = Path(tempfile.mkdtemp(dir=recipe.parent))
    command = [sys.executable, "-m", "kd.cli", f"recipe={recipe}", f"runs_dir={root}", *items]
    if recipe.suffix == ".py":
        command = [sys.executable, str(recipe), str(root), *items]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pin = (
        []
        if cores is None
        else ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))]
    )
    beside = [
        subprocess.Popen([*pin, sys.executable, "-c", "while True: pass"])
        for _ in range(neighbours)
    ]
    try:
        done = subprocess.run(
            [*pin, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    finally:
        for process in beside:
            process.kill()
            process.wait()
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
    # a step of some 30 ms: what remains of one of 8 ms, when all else is gone, is the bookkeeping around it
    kwargs = {"patch_size": 8, "embed_dim": 192, "depth": 4, "num_heads": 3}
    recipe = write_recipe(
        place / "tiny.yaml", pictures, teacher / "student.safetensors", trainer__log_every_n_steps=5,
        model__student={"arch": "vit_tiny_patch16_224", "img_size": 32, "kwargs": kwargs},
    )  # fmt: skip
    return pictures, recipe


def own_limit(run: RunRecords) -> Limit:
    """What limits a run first, other processes of the machine left aside: they are no doing of the run's."""
    own = (limit for limit in Explained(run).limits if "other processes use" not in limit.text)
    return next(own, Limit("none", "no part of the step stands out", "", None))


@dataclass
class Round:
    """A planted run and the one that follows its advice.

    Attributes:
        limit: what the planted run is bound by.
        reached: the speed-up.
        others: cores that other processes took meanwhile.
    """

    limit: Limit
    reached: float
    others: float


def play(plant: Plant, recipe: Path, items: list[str]) -> Round:
    """One round of a plant."""
    planted = train(recipe, [*plant.items, *items], plant.cores, plant.neighbours)
    after = train(recipe, [*plant.follow(planted), *items], plant.cores)
    reached = (Facts(after).images_per_s or 0) / (Facts(planted).images_per_s or 1)
    others = (
        Facts(after).other_cores
        if plant.neighbours
        else max(Facts(r).other_cores for r in (planted, after))
    )
    return Round(plant.limit(planted), reached, others)


def quiet_ones(rounds: list[Round]) -> list[Round]:
    """Those during which no other process took a core."""
    return [r for r in rounds if r.others <= QUIET]


def prediction(rounds: list[Round]) -> tuple[float, float]:
    """Predicted and reached speed-up, medians."""
    return statistics.median(r.limit.gain or 1.0 for r in rounds), statistics.median(
        r.reached for r in rounds
    )


def row(plant: Plant, rounds: list[Round]) -> str:
    """A line of the table: the quiet rounds', or all with a mark where there are none."""
    quiet = quiet_ones(rounds)
    used = quiet or rounds
    named = sum(r.limit.bound in plant.bound and plant.mention in sentence(r.limit) for r in used)
    middle = sorted(used, key=lambda r: r.reached)[(len(used) - 1) // 2]
    predicted, reached = prediction(used)
    others = f"{statistics.median(r.others for r in used):.1f}{'' if quiet else ' (not quiet)'}"
    return (
        f"| {plant.name} | {named} of {len(used)} | {sentence(middle.limit)} | {predicted:.2f} | {reached:.2f} | "
        f"{predicted / reached - 1:+.0%} | {others} |"
    )


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="the plant of this name")
    parser.add_argument("--foreign", action="store_true", help="a training that is not kd's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    lines = [
        "| planted | named | the verdict | predicted | reached | error | cores that others took |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as place:
        if arguments.foreign:
            recipe = Path(shutil.copy(ROOT / "scripts/bench/foreign.py", place))
            items, one_worker, planted = (
                [f"epochs={arguments.epochs}"],
                "num_workers=1",
                foreign_plants(),
            )
        else:
            pictures, recipe = prepare(Path(place))
            items, one_worker = [f"trainer.max_epochs={arguments.epochs}"], "data.num_workers=1"
            planted = plants(pictures)
        errors: dict[str, float] = {}
        for plant in planted:
            if arguments.only in (None, plant.name):
                rounds = [play(plant, recipe, items) for _ in range(arguments.rounds)]
                lines.append(row(plant, rounds))
                print(lines[-1], flush=True)
                predicted, reached = prediction(quiet_ones(rounds) or rounds)
                errors[plant.name] = predicted / reached - 1
        healthy = train(recipe, [*items, one_worker])
        alarms = ", ".join(finding["rule"] for finding in healthy.summary["findings"]) or "none"
        text = f"{sentence(own_limit(healthy))}; rules: {alarms}"
        lines.append(f"| nothing | | {text} | | | | {Facts(healthy).other_cores:.1f} |")
        print(lines[-1])
    worst = max(errors, key=lambda name: abs(errors[name]), default="")
    lines.append(f"\nWorst error: {errors[worst]:+.0%} ({worst})." if worst else "")
    print(lines[-1])
    foreign = " --foreign" if arguments.foreign else ""
    head = (
        f"# Planted bottlenecks, {platform.machine()}, {os.cpu_count()} cores\n\n"
        f"`python scripts/bench/truth.py{foreign} --epochs {arguments.epochs} --rounds {arguments.rounds}`; batch 8, one "
        f"compute thread; medians of the rounds in which other processes took {QUIET} cores or less.\n\n"
    )
    if arguments.out:
        arguments.out.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
