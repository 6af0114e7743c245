"""How much augmentation a run can carry: kd-train at 1, 4, 8 and 12 times the load, views made by each engine in turn.

    python scripts/bench/load_factor.py --hardware h200 --write                                # ResNet18, 50, 152
    OMP_NUM_THREADS=1 python scripts/bench/load_factor.py --models test_efficientnet --size 128 --count 960 --batch 16 \\
        --workers 1 --write

A unit of load is a horizontal flip, a vertical flip and a rotation by up to 30 degrees of each picture
(``data.augment.repeat`` times), the same for every engine: in trial A of the whole picture before it is cut and resized
(``data.augment.before_resize``), as in the case study, in trial B of the view. The second
command is for a quiet machine without a GPU: 60 steps a row (``--count``: pictures an epoch); DALI (extra ``dali``) runs
its CPU pipeline there.
"""

import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.report.records import percentile, read_run
from kd.report.rules import FEWEST, Explained
from scripts.bench.harness import drawn, options, run_kd, spread, table, write
from tests._helpers import write_recipe


def prepare(place: Path, asked: Any, model: str, trial: str) -> Path:
    """Pictures of two classes, and a recipe without a teacher."""
    different, held_out = min(asked.count, 64), 16
    few = drawn(different + held_out, 256, 341)
    for split, count in (("train", asked.count), ("val", held_out)):
        for i in range(count):
            file = place / "pictures" / split / "ab"[i % 2] / f"{i}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(few[i % different if split == "train" else different + i])
    sizes = {
        "data__img_size": asked.size,
        "data__batch_size": asked.batch,
        "data__num_workers": asked.workers,
    }
    augment = {"hflip": 0.5, "vflip": 0.5, "rotation": 30.0, "before_resize": trial == "A"}
    return write_recipe(
        place / f"{model}.yaml", place / "pictures", None, recipe="load", **sizes, data__augment=augment,
        model__student={"arch": model}, model__task_loss_weight=1.0, trainer={"max_epochs": 1},
        monitor={"interval_s": 0.1},
    )  # fmt: skip


def train(recipe: Path, engine: str, load: int) -> Explained:
    """A run of one epoch."""
    name = f"{recipe.stem}_{engine}_{load}_{len(list(recipe.parent.glob('runs/load/*')))}"
    words = [f"recipe={recipe}", f"name={name}", f"data.engine={engine}"]
    run_kd(*words, f"data.augment.repeat={load}", capture_output=True)
    return Explained(read_run(recipe.parent / "runs" / "load" / name))


def use(runs: list[Explained], device: bool) -> str:
    """p50 and p95 of the cores that the run may use, or of the GPUs, in %."""
    facts = [one.facts for one in runs]
    cores = [sum(row) / len(row) for f in facts for row in f.core_use if row]
    values = (
        [gpu["util"] for f in facts for s in f.samples for gpu in s.get("gpu", [])]
        if device
        else cores
    )
    return f"{percentile(values, 50):.0f} / {percentile(values, 95):.0f}" if values else "none"


def own_seconds(one: Explained) -> float:
    """CPU seconds of an epoch of the run's own processes: what other jobs on the machine leave as it is."""
    used = [(s["main"] + sum(s["workers"])) / 100 for s in one.facts.samples if "main" in s]
    return statistics.mean(used) * seconds_of(one) if used else 0.0


def seconds_of(one: Explained) -> float:
    """The mean step times the steps of an epoch."""
    return one.facts.step_ms * one.facts.batches_per_epoch / 1000


def row(runs: list[Explained]) -> list[str]:
    """The cells of an engine's runs."""
    own = statistics.median(map(own_seconds, runs))
    data = statistics.median(one.facts.phases.get("data", 0.0) / one.facts.step_ms for one in runs)
    text = runs[-1].verdict["text"].partition(";")[0]
    seconds = spread(list(map(seconds_of, runs)), 2)
    return [seconds, f"{own:.2f}", use(runs, False), use(runs, True), f"{data:.0%}", text]


def main() -> None:
    """Models times loads, the engines in turn."""
    asked = options(
        __doc__,
        models=["resnet18", "resnet50", "resnet152"],
        loads=[1, 4, 8, 12],
        engines=["torch", "device", "dali"],
        size=224,
        count=4096,
        batch=64,
        workers=4,
        rounds=3,
    )
    if asked.count // asked.batch < FEWEST + 2:
        sys.exit(f"--count must give {FEWEST + 2} steps an epoch, which a verdict needs")
    rows = []
    for trial, model in product("AB", asked.models):
        with tempfile.TemporaryDirectory() as place:
            recipe = prepare(Path(place), asked, model, trial)
            for load in asked.loads:
                found: dict[str, list[Explained]] = {engine: [] for engine in asked.engines}
                for _ in range(asked.rounds):
                    for engine, runs in found.items():
                        runs.append(train(recipe, engine, load))
                for engine, runs in found.items():
                    rows.append([trial, model, load, engine, *row(runs)])
                    print(rows[-1], file=sys.stderr, flush=True)
    columns = [
        "trial",
        "model",
        "load",
        "engine",
        "seconds an epoch: median (least to most)",
        "CPU s",
    ]
    lines = [
        f"{asked.count} pictures of 341 x 256 an epoch -> {asked.size} px, batch {asked.batch}, {asked.workers} loader "
        f"process(es); {asked.rounds} run(s) of one epoch of each engine, in turn. Trial A: the load before cutting and "
        "resizing; B: after. Seconds: mean step times steps; CPU s: those of the run's own processes. Cores and GPU: p50 / "
        "p95, %. Data: its share of the step.",
        "",
        *table([*columns, "cores", "GPU", "data", "limit"], rows),
    ]
    write(asked, "load_factor", "Seconds an epoch by load of augmentation", lines)


if __name__ == "__main__":
    main()
