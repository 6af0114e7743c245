"""What a search finds and what it costs: default against found, shared cache, early stopping, random search.

    OMP_NUM_THREADS=1 python scripts/bench/tune.py grocery_vit --trials 12 --write \\
        --set data.source.root=DIR model.teacher.checkpoint=FILE trainer.max_epochs=4

Each arm is a ``kd-tune`` command of its own; the first one's winner and the default run again on fresh seeds.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.tuning.study import Study
from scripts.bench.harness import options, write

ARMS = {
    "tpe, asha": ["sampler=tpe", "pruner=asha"],
    "tpe, asha, shared cache": ["sampler=tpe", "pruner=asha", "model.teacher.cache=on"],
    "tpe, no stopping": ["sampler=tpe", "pruner=none"],
    "random, asha": ["sampler=random", "pruner=asha"],
    "random, no stopping": ["sampler=random", "pruner=none"],
}


def search(name: str, items: list[str], runs: Path) -> dict[str, Any]:
    """One search: seconds, epochs, the best value, what became of its trials."""
    began = time.monotonic()
    command = [sys.executable, "-m", "kd.cli", "tune", *items, f"runs_dir={runs}", f"name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder = next(runs.glob(f"*/tune/{name}"))
    study = Study(folder, ["maximize"], "random", "none", 1, 0)
    trials = study.trials("complete", "pruned", "failed")
    return {
        "s": time.monotonic() - began,
        "epochs": sum(t.user_attrs.get("epochs") or 0 for t in trials),
        "best": max(t.value for t in study.trials("complete")),
        "ended": {state: len(study.trials(state)) for state in ("complete", "pruned", "failed")},
        "confirmed": next((line for line in done.stdout.splitlines() if "fresh seeds" in line), ""),
    }


def main() -> None:
    """Runs every arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--confirm", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    lines = ["| search | best | s | epochs | to the end, stopped, failed |", "|---|---|---|---|---|"]
    confirmed = ""
    for number, (arm, items) in enumerate(ARMS.items()):
        own = [f"recipe={asked.recipe}", f"trials={asked.trials}", *items, *asked.set]
        found = search(f"bench-{number}", own + ([] if number else [f"confirm={asked.confirm}"]), asked.runs)
        confirmed = confirmed or found["confirmed"]
        ended = ", ".join(str(count) for count in found["ended"].values())
        lines.append(f"| {arm} | {found['best']:.4g} | {found['s']:.0f} | {found['epochs']} | {ended} |")
        print(json.dumps({arm: found}), flush=True)
    lines += ["", f"The seconds of the first search include its confirmation. {confirmed}"]
    write("tune", asked.hardware, asked.date, f"Searching on {asked.recipe}", lines, asked.write)


if __name__ == "__main__":
    main()
