"""What a search finds and what it costs: default against found, shared cache, early stopping, random search.

    OMP_NUM_THREADS=1 python scripts/bench/tune.py grocery_vit --trials 6 --fold 3 --write \\
        --set data.source.root=DIR model.teacher.checkpoint=FILE trainer.max_epochs=4 jobs=2

Each arm is a ``kd-tune`` command of its own, begun in an empty folder; the first one's winner and the default then run
again on fresh seeds. ``--fold N`` takes every Nth class of an image folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.fleet.tuning.study import Study
from scripts.bench.harness import options, write

PLAIN, CACHE, WHOLE, RANDOM = (
    "tpe, asha",
    "tpe, asha, shared cache",
    "tpe, no stopping",
    "random, no stopping",
)
SPACE = [  # nothing of the data: trials of one data setting share a cache
    "search.optim.lr=log:1e-4..1e-3",
    "search.model.distill_losses.kd.temperature=1.0..6.0",
    "search.model.task_loss_weight=0.0..0.5",
]
ARMS = {
    PLAIN: ["sampler=tpe", "pruner=asha"],
    CACHE: ["sampler=tpe", "pruner=asha", "model.teacher.cache=on"],
    WHOLE: ["sampler=tpe", "pruner=none"],
    RANDOM: ["sampler=random", "pruner=none"],
}


def tune(items: list[str]) -> tuple[float, str]:
    """Seconds and output of a ``kd-tune`` command."""
    began = time.monotonic()
    command = [sys.executable, "-m", "kd.cli", "tune", *items]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"kd-tune {' '.join(items)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - began, done.stdout


def search(name: str, items: list[str], runs: Path) -> dict[str, Any]:
    """One search: seconds, epochs, the best value, what became of its trials."""
    seconds, _ = tune([*items, f"runs_dir={runs}", f"name={name}"])
    folder = next(runs.glob(f"*/tune/{name}"))
    study = Study(folder, ["maximize"], "random", "none", 1, 0)
    trials = study.trials("complete", "pruned", "failed")
    return {
        "s": seconds,
        "epochs": sum(t.user_attrs.get("epochs") or 0 for t in trials),
        "best": max(t.value for t in study.trials("complete")),
        "ended": {state: len(study.trials(state)) for state in ("complete", "pruned", "failed")},
    }


def fold(root: Path, each: int, where: Path) -> Path:
    """Every so manyth class of an image folder, by links."""
    names = sorted(folder.name for folder in (root / "train").iterdir())[::each]
    for split in ("train", "val"):
        (where / split).mkdir(parents=True)
        for name in names:
            if (root / split / name).is_dir():
                (where / split / name).symlink_to((root / split / name).resolve())
    return where


def names(root: Path, file: Path) -> Path:
    """A file with the names of all classes, which the teacher knows."""
    file.write_text("".join(f"{folder.name}\n" for folder in sorted((root / "train").iterdir())))
    return file


def told(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the arms say, in a line each."""
    plain, cache, whole, random = (found[name] for name in (PLAIN, CACHE, WHOLE, RANDOM))
    return [
        f"- shared cache: the search takes 1 / {plain['s'] / cache['s']:.2f} of the time, best {cache['best']:.4g} for "
        f"{plain['best']:.4g}",
        f"- ASHA: {1 - plain['epochs'] / whole['epochs']:.0%} of the epochs, {1 - plain['s'] / whole['s']:.0%} of the "
        f"time saved, best {plain['best']:.4g} for {whole['best']:.4g}",
        f"- random search as the control: best {random['best']:.4g}, TPE {whole['best']:.4g}",
    ]


def main() -> None:
    """Runs every arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--confirm", type=int, default=3)
    parser.add_argument("--fold", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    with tempfile.TemporaryDirectory(prefix="kd-bench-") as made:
        os.environ["KD_CACHE"] = f"{made}/cache"  # no answers of an earlier call
        runs, given = Path(made), dict(item.split("=", 1) for item in asked.set)
        if asked.fold > 1:
            whole = Path(given["data.source.root"])
            given["data.source.root"] = str(fold(whole, asked.fold, runs / "fold"))
            given.setdefault("model.teacher.classes", str(names(whole, runs / "classes.txt")))
        items = [
            f"recipe={asked.recipe}",
            f"trials={asked.trials}",
            *SPACE,
            *(f"{k}={v}" for k, v in given.items()),
        ]
        found = {}
        for number, (arm, own) in enumerate(ARMS.items()):
            found[arm] = search(f"bench-{number}", [*items, *own], runs)
            print(json.dumps({arm: found[arm]}), flush=True)
        # the trials are there: only the winner and the default run
        confirming = [
            *items,
            *ARMS[PLAIN],
            f"confirm={asked.confirm}",
            f"runs_dir={runs}",
            "name=bench-0",
        ]
        seconds, out = tune(confirming)
    lines = [
        "| search | best | s | epochs | to the end, stopped, failed |",
        "|---|---|---|---|---|",
    ]
    for arm, row in found.items():
        ended = ", ".join(str(count) for count in row["ended"].values())
        lines.append(f"| {arm} | {row['best']:.4g} | {row['s']:.0f} | {row['epochs']} | {ended} |")
    confirmed = [
        f"- {line} ({seconds:.0f} s)" for line in out.splitlines() if "fresh seeds" in line
    ]
    lines += ["", *told(found), *confirmed]
    write("tune", asked.hardware, asked.date, f"Searching on {asked.recipe}", lines, asked.write)


if __name__ == "__main__":
    main()
