"""What does watching cost? Epochs of one run with and without the monitor, in turn; median of the pairs.

    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench/observe.py --write
    python scripts/bench/observe.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

Without a recipe a tiny pair learns drawn pictures (batch 8, 100 steps an epoch): what watching takes hardly depends on
the models, and shows best where a step takes little else. On one core, as above, the thread that samples the machine
takes its time from the training; that is the worst case. Needs a machine to itself.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import Turns, options, spread, train, write


class Watching:
    """Takes the monitor out of a running training, and puts it back."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def _find(self, trainer: Any) -> tuple[Any, Any]:
        from kd.callbacks.phases import Phases
        from kd.callbacks.system import System

        self.all = self.all or list(trainer.callbacks)
        return next(c for c in self.all if isinstance(c, Phases)), next(c for c in self.all if isinstance(c, System))

    def off(self, module: Any) -> None:
        """No clock, no samples, no health."""
        from kd.callbacks.health import Health
        from kd.clock import run_clock

        phases, system = self._find(module.trainer)
        run_clock(None)
        module.trainer.profiler = phases.profiler.users
        system.on = False
        module.trainer.callbacks = [c for c in self.all if c not in (phases, system) and not isinstance(c, Health)]

    def on(self, module: Any) -> None:
        """As in any run."""
        from kd.clock import run_clock

        phases, system = self._find(module.trainer)
        module.trainer.callbacks = self.all
        module.trainer.profiler = phases.profiler
        run_clock(phases.clock)
        phases.clock.restart()
        system.on = True


def tiny_pair(place: Path) -> str:
    """A recipe of its own: drawn pictures, an untrained teacher (what it knows costs nothing)."""
    from tests._helpers import draw_folder, save_teacher, write_recipe

    teacher = save_teacher(place / "teacher.safetensors")
    pictures = draw_folder(place / "pictures", train=200, val=8)
    return str(write_recipe(place / "pair.yaml", pictures, teacher, trainer__log_every_n_steps=10))


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    asked = options(parser)
    watching = Watching()
    turns = Turns({"off": watching.off, "on": watching.on}, after=2, before=watching.on)
    with tempfile.TemporaryDirectory() as place:
        recipe = asked.recipe or tiny_pair(Path(place))
        cli = train(recipe, [*asked.set, f"trainer.max_epochs={2 + 2 * asked.rounds}"], turns)
    steps = cli.trainer.num_training_batches
    ms = {name: [1000 * s / steps for s in seconds] for name, seconds in turns.seconds.items()}
    pairs = [on - off for on, off in zip(ms["on"], ms["off"], strict=True)]
    quarters = statistics.quantiles(pairs, n=4)
    lines = [
        f"`{asked.recipe or 'tiny pair'}` {' '.join(asked.set)}: batch {cli.datamodule.batch_size}, {steps} steps an "
        f"epoch, {asked.rounds} epochs of each in turn in one run, behind two to warm up.",
        "",
        "| monitor | ms a step: median (least to most) |",
        "|---|---|",
        *(f"| {name} | {spread(values, 2)} |" for name, values in ms.items()),
        "",
        f"Cost: **{statistics.median(pairs):+.2f} ms** a step (median of the pairs; the middle half lies between "
        f"{quarters[0]:+.2f} and {quarters[2]:+.2f}): {statistics.median(pairs) / statistics.median(ms['off']):+.1%} "
        f"of this one, under 1 % of any above {100 * statistics.median(pairs):.0f} ms.",
    ]
    write("observe", asked.hardware, asked.date, "Cost of watching", lines, asked.write)


if __name__ == "__main__":
    main()
