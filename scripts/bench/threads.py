"""How compute threads shall wait: images/s of whole runs alone, with loaders, with two ranks, beside other work.

    python scripts/bench/threads.py --rounds 5 --write

The arms run in turn. ``spin`` is libgomp's default (300,000 turns of a loop), ``short`` a hundredth of it, ``asleep``
what kd-train sets where the environment says nothing (OMP_WAIT_POLICY=passive). OMP_NUM_THREADS stays as it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.launch.child import SAYS_HOW
from scripts.bench.harness import options, spread, write

ARMS = {
    "spin": {"GOMP_SPINCOUNT": "300000"},
    "short": {"GOMP_SPINCOUNT": "3000"},
    "asleep": {"OMP_WAIT_POLICY": "passive"},
}
SETTINGS = {
    "alone": [],
    "two loader processes": ["data.num_workers=2"],
    "two ranks": ["config=ddp_2cpu"],
    "beside as many busy programs as cores": [],
}


@contextmanager
def other_work(programs: int) -> Iterator[None]:
    """Programs that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in busy:
            program.kill()
            program.wait()


def images_per_s(items: list[str], variables: dict[str, str]) -> float:
    """The median of a whole run's steps, of all ranks together."""
    env = {name: value for name, value in os.environ.items() if name not in SAYS_HOW} | variables
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "kd.cli", *items, f"runs_dir={runs}", "trainer.enable_progress_bar=false"]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        (summary,) = Path(runs).glob("*/000/summary.json")
        return json.loads(summary.read_text())["images_per_s"]


def main() -> None:
    """Measures every arm in every setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="foodtag_vit")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    limits = [f"trainer.limit_train_batches={asked.steps}", "trainer.limit_val_batches=1", "trainer.max_epochs=1"]
    limits.append("preflight=warn")  # one batch of the validation set holds one or two classes
    cores = len(os.sched_getaffinity(0))
    lines = [f"Images/s, median (least to most) of {asked.rounds} runs of {asked.steps} steps, arms in turn.", ""]
    lines += [f"| {asked.recipe} | {' | '.join(ARMS)} |", f"|---|{'---|' * len(ARMS)}"]
    for name, items in SETTINGS.items():
        rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with other_work(cores if name.startswith("beside") else 0):
            for _ in range(asked.rounds):
                for arm, variables in ARMS.items():
                    rates[arm].append(images_per_s([f"recipe={asked.recipe}", *limits, *items, *asked.set], variables))
        lines.append(f"| {name} | {' | '.join(spread(values) for values in rates.values())} |")
    write("threads", asked.hardware, asked.date, "How compute threads wait", lines, asked.write)


if __name__ == "__main__":
    main()
