"""How long until something happens: `import kd`, `kd-train --help`, the first step of `config=debug`.

python scripts/bench/startup.py --rounds 7 --write
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import measure, options, spread, write

IMPORT = "import sys, time; t = time.perf_counter(); import kd; sys.stdout.write(str(time.perf_counter() - t))"
FIRST_STEP = """
import os, sys, time
from pytorch_lightning import Callback
class Told(Callback):
    def on_train_batch_end(self, *_):
        sys.stderr.flush()
        os._exit(7)
from kd.run import objects
own = objects.make_trainer
def told(run):
    trainer = own(run)
    trainer.callbacks.append(Told())
    return trainer
objects.make_trainer = told
from kd.cli import train_main
train_main(sys.argv[1:])
"""


def python(*arguments: str, status: int = 0) -> str:
    """Runs Python on ``arguments``; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    if done.returncode != status:
        raise SystemExit(done.stderr)
    return done.stdout


def main() -> None:
    """Runs all, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    asked = options(parser)
    imports: list[float] = []
    debug = ["recipe=foodtag_vit", "config=debug", "config=cpu", "runs_dir=runs/bench"]
    arms = {
        "Python itself": lambda: python("-c", "pass"),
        "import torch, timm, Lightning": lambda: python(
            "-c", "import torch, timm, pytorch_lightning"
        ),
        "kd-train --help": lambda: python("-m", "kd.cli", "--help"),
        "kd-train: the first step of config=debug": lambda: python(
            "-c", FIRST_STEP, *debug, status=7
        ),
    }
    start = time.perf_counter()
    times = measure(arms, asked.rounds)
    for _ in range(asked.rounds):
        imports.append(float(python("-c", IMPORT)))
    lines = [
        f"{asked.rounds} rounds in turn after one to warm up ({time.perf_counter() - start:.0f} s in all); "
        f"{os.cpu_count()} cores. The teacher of config=debug is there already.",
        "",
        "| | seconds: median (least to most) |",
        "|---|---|",
        f"| import kd (within Python) | {spread(imports, 4)} |",
        *(f"| {name} | {spread(values, 2)} |" for name, values in times.items()),
    ]
    write("startup", asked.hardware, asked.date, "Start-up", lines, asked.write)


if __name__ == "__main__":
    main()
