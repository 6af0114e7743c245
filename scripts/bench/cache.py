"""What a cache of the teacher's answers gains: epochs live, from the cache, and without a teacher, in turn in one run.

    OMP_NUM_THREADS=1 python scripts/bench/cache.py foodtag_vit --views 2 --rounds 5 --write
    python scripts/bench/cache.py grocery_vit --pixels --set data.source.root=DIR model.teacher.checkpoint=FILE
    python scripts/bench/cache.py grocery_vit --pixels --set model.student.arch=resnet10t model.student.inherit=false

The ideal is an epoch of the same run without the teacher's forward: what is reached of it is ideal / cached. With
``--pixels`` two arms more: views' pixels kept beside the answers, and one batch that is in memory already, which is the
ideal then. All arms start their loader anew each epoch. Accuracy with few views is the affair of seeds.py:

    python scripts/bench/arms.py teacher --set recipe=foodtag_vit trainer.max_epochs=16 \\
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
from kd.teachers.reading import Reading
from scripts.bench.harness import Turns, options, spread, train, write

NO_TEACHER, PIXELS, MEMORY = "no teacher (ideal)", "cached with pixels", "cached, batch in memory"


class Modes:
    """Switches a module between answering live, from its cache, and not at all."""

    def __init__(self) -> None:
        self.cached: Any = None
        self.weights: dict[str, float] = {}
        self.labels: float | None = None

    def _set(self, module: Any, cached: bool, teacher: bool) -> None:
        objective = module.student.objective
        losses = objective.losses
        self.cached = self.cached or next(iter(module.caches.values()))
        self.weights = self.weights or {name: loss.weight for name, loss in losses.items()}
        module.answer_by(self.cached if cached else module.teacher)
        for name, loss in losses.items():
            loss.weight = self.weights[name] if teacher else 0.0
        if self.labels is None:
            self.labels = objective.task_loss_weight
        # without the teacher labels alone teach, also where the recipe has none
        objective.task_loss_weight = self.labels if teacher else self.labels or 1.0

    def live(self, module: Any) -> None:
        """The teacher computes every answer."""
        self._set(module, cached=False, teacher=True)

    def hit(self, module: Any) -> None:
        """Answers come from the cache, where they are."""
        self._set(module, cached=True, teacher=True)

    def ideal(self, module: Any) -> None:
        """No answers at all: labels alone."""
        self._set(module, cached=False, teacher=False)


class OneBatch:
    """Reads a batch of pictures and answers once, and gives it again and again."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.made = reading, None

    def __call__(self, pictures: Any, collate: Any) -> tuple[Any, Any]:
        """Keys in place of pictures; the batch."""
        self.pictures, self.collate = self.reading(pictures, collate)
        return self, self._batch

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitems__(self, keys: Any) -> Any:
        """The keys."""
        return keys

    def _batch(self, keys: Any) -> Any:
        self.made = self.made or self.collate(self.pictures.__getitems__(keys))
        return self.made


class Feeds(Turns):
    """Gives each arm's epoch its own way of reading: Lightning asks for loaders before an epoch starts."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Also chooses what the next epoch reads."""
        super().on_train_epoch_end(trainer, pl_module)
        data = trainer.datamodule
        self.whole = getattr(self, "whole", data.reading)
        ways = {
            "cached": Reading(self.whole.stores),
            PIXELS: self.whole,
            MEMORY: OneBatch(self.whole),
        }
        arm = self._arm(trainer.current_epoch + 1)
        data.reading = self.whole if arm is None else ways.get(arm)


def main() -> None:
    """Fills a fresh cache, then measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--views", type=int, default=2)
    parser.add_argument("--topk", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pixels", action="store_true", help="keep views' pixels too")
    parser.add_argument("--set", nargs="*", default=[])
    asked = options(parser)
    folder, modes = Path("runs/bench/answers"), Modes()
    shutil.rmtree(folder, ignore_errors=True)
    items = [
        "model.teacher.cache=on", f"model.teacher.cache_dir={folder}", f"model.teacher.cache_views={asked.views}",
        *([f"model.teacher.cache_topk={asked.topk}"] if asked.topk else []), *asked.set,
        f"model.teacher.cache_pixels={str(asked.pixels).lower()}", "trainer.reload_dataloaders_every_n_epochs=1",
    ]  # fmt: skip
    arms = {"live": modes.live, "cached": modes.hit, NO_TEACHER: modes.ideal}
    if asked.pixels:
        arms |= {PIXELS: modes.hit, MEMORY: modes.hit}
    items.append(f"trainer.max_epochs={asked.views + len(arms) * asked.rounds}")
    turns = Feeds(arms, after=asked.views, before=modes.hit)
    cli = train(asked.recipe, items, turns)
    seconds = {"filling": turns.first, **turns.seconds}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    pictures = cli.trainer.num_training_batches * cli.data.batch_size
    report = modes.cached.report()
    lines = [
        f"{asked.recipe} {' '.join(asked.set)}: batch {cli.data.batch_size}, {pictures} pictures an epoch, "
        f"{asked.views} view(s), {report['format']}, "
        f"{report['disk_mb']} MB. {asked.rounds} epochs of each in turn, behind the filling.",
        "",
        "| epoch | seconds: median (least to most) | images/s | against live |",
        "|---|---|---|---|",
        *(
            f"| {name} | {spread(values)} | {pictures / median[name]:,.0f} | {median['live'] / median[name]:.2f} |"
            for name, values in seconds.items()
        ),
        "",
        f"Reached of an epoch without a teacher: **{median[NO_TEACHER] / median['cached']:.1%}**.",
        *(
            [f"Pixels, of batches in memory: **{median[MEMORY] / median[PIXELS]:.1%}**."]
            if asked.pixels
            else []
        ),
    ]
    write(
        "cache",
        asked.hardware,
        asked.date,
        "Cached answers against a live teacher",
        lines,
        asked.write,
    )


if __name__ == "__main__":
    main()
