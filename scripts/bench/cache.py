"""What a cache of the teacher's answers gains: epochs live, from the cache, and without a teacher, in turn in one run.

    OMP_NUM_THREADS=1 python scripts/bench/cache.py foodtag_vit --views 2 --rounds 5 --write
    python scripts/bench/cache.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

The ideal is an epoch of the same run without the teacher's forward: what is reached of it is ideal / cached. Accuracy
with few views is the affair of seeds.py:

    python scripts/bench/seeds.py foodtag_vit --set trainer.max_epochs=16 \\
        --arm v1:model.teacher.cache=on,model.teacher.cache_views=1 \\
        --arm v4:model.teacher.cache=on,model.teacher.cache_views=4 \\
        --arm v16:model.teacher.cache=on,model.teacher.cache_views=16
"""

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import Turns, options, spread, train, write


class Modes:
    """Switches a module between answering live, from its cache, and not at all."""

    def __init__(self) -> None:
        self.cached: Any = None
        self.weights: dict[str, float] = {}

    def _set(self, module: Any, cached: bool, teacher: bool) -> None:
        losses = module.student_of_one.objective.losses
        self.cached = self.cached or next(iter(module.caches.values()))
        self.weights = self.weights or {name: loss.weight for name, loss in losses.items()}
        object.__setattr__(module, "asked", self.cached if cached else module.teacher)
        for name, loss in losses.items():
            loss.weight = self.weights[name] if teacher else 0.0

    def live(self, module: Any) -> None:
        """The teacher computes every answer."""
        self._set(module, cached=False, teacher=True)

    def hit(self, module: Any) -> None:
        """Answers come from the cache, where they are."""
        self._set(module, cached=True, teacher=True)

    def ideal(self, module: Any) -> None:
        """No answers at all: labels alone."""
        self._set(module, cached=False, teacher=False)


def main() -> None:
    """Fills a fresh cache, then measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--views", type=int, default=2)
    parser.add_argument("--topk", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    folder, modes = Path("runs/bench/answers"), Modes()
    shutil.rmtree(folder, ignore_errors=True)
    items = [
        "model.teacher.cache=on", f"model.teacher.cache_dir={folder}", f"model.teacher.cache_views={asked.views}",
        *([f"model.teacher.cache_topk={asked.topk}"] if asked.topk else []), *asked.set,
        f"trainer.max_epochs={asked.views + 3 * asked.rounds}",
    ]  # fmt: skip
    turns = Turns(
        {"live": modes.live, "cached": modes.hit, "no teacher (ideal)": modes.ideal}, after=asked.views,
        before=modes.hit,
    )  # fmt: skip
    cli = train(asked.recipe, items, turns)
    seconds = {"filling": turns.first, **turns.seconds}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    pictures = cli.trainer.num_training_batches * cli.datamodule.batch_size
    report = modes.cached.report()
    lines = [
        f"{asked.recipe} {' '.join(asked.set)}: batch {cli.datamodule.batch_size}, {pictures} pictures an epoch, "
        f"{asked.views} view(s), {report['format']}, {modes.cached.record_bytes} bytes an answer, "
        f"{report['disk_mb']} MB. {asked.rounds} epochs of each in turn, behind the filling.",
        "",
        "| epoch | seconds: median (least to most) | images/s | against live |",
        "|---|---|---|---|",
        *(
            f"| {name} | {spread(values)} | {pictures / median[name]:,.0f} | {median['live'] / median[name]:.2f} |"
            for name, values in seconds.items()
        ),
        "",
        f"Reached of the ideal: **{median['no teacher (ideal)'] / median['cached']:.1%}**.",
    ]
    write("cache", asked.hardware, asked.date, "Cached answers against a live teacher", lines, asked.write)


if __name__ == "__main__":
    main()
