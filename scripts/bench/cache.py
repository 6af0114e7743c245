"""What a cache of the teacher's answers gains: epochs live, from the cache, and without a teacher, in turn in one run.

    OMP_NUM_THREADS=1 python scripts/bench/cache.py foodtag_vit --views 2 --rounds 5 --write
    python scripts/bench/cache.py grocery_vit --pixels --set data.source.root=DIR model.teacher.checkpoint=FILE
    python scripts/bench/cache.py grocery_vit --pixels --set model.student.arch=resnet10t model.student.inherit=false

The ideal is an epoch of the same run without the teacher's forward: what is reached of it is ideal / cached. With
``--pixels`` two arms more: views' pixels kept beside the answers, and one batch that is in memory already, which is the
ideal then. All arms start their loader anew each epoch.
"""

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, Trainer

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.teachers.reading import Reading
from scripts.bench.harness import options, spread, synchronize, table, write

LIVE, CACHED, NO_TEACHER = "live", "cached", "no teacher (ideal)"
PIXELS, MEMORY = "cached with pixels", "cached, batch in memory"


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


class Turns(Callback):
    """Gives each epoch to the next arm in turn, and times it.

    Args:
        arms: names; each has its own answers, weights of the losses and way of reading.
        after: epochs before the first turn, which fill the cache.

    Attributes:
        seconds: of each epoch, by arm; those before the first turn are "filling".
    """

    def __init__(self, arms: list[str], after: int) -> None:
        self.arms, self.after = arms, after
        self.seconds: dict[str, list[float]] = {name: [] for name in ("filling", *arms)}
        self._start = 0.0

    def arm_of(self, epoch: int) -> str:
        """The arm whose turn an epoch is."""
        if epoch < self.after:
            return "filling"
        return self.arms[(epoch - self.after) % len(self.arms)]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Notes what the recipe has."""
        objective = pl_module.student.objective
        self.cached = next(iter(pl_module.caches.values()))
        self.weights = {name: loss.weight for name, loss in objective.losses.items()}
        self.labels = objective.task_loss_weight

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Sets the arm up and starts its clock."""
        arm = self.arm_of(trainer.current_epoch)
        objective = pl_module.student.objective
        pl_module.answer_by(pl_module.teacher if arm in (LIVE, NO_TEACHER) else self.cached)
        for name, loss in objective.losses.items():
            loss.weight = 0.0 if arm == NO_TEACHER else self.weights[name]
        # without the teacher labels alone teach, also where the recipe has none
        objective.task_loss_weight = (self.labels or 1.0) if arm == NO_TEACHER else self.labels
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Stops it; chooses what the next epoch reads, as Lightning asks for loaders before an epoch starts."""
        synchronize()
        seconds = time.perf_counter() - self._start
        self.seconds[self.arm_of(trainer.current_epoch)].append(seconds)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self.whole = getattr(self, "whole", data.reading)
        ways = {"filling": self.whole, CACHED: Reading(self.whole.stores)}
        ways |= {PIXELS: self.whole, MEMORY: OneBatch(self.whole)}
        data.reading = ways.get(self.arm_of(trainer.current_epoch + 1))


def main() -> None:
    """Fills a fresh cache, then measures."""
    from kd.run.build import build
    from kd.run.request import translate
    from kd.run.run import Run
    from kd.run.train_first import train_teacher_if_missing

    asked = options(__doc__, "recipe", views=2, topk=0, rounds=5, pixels=False, set=[])
    folder = Path("runs/bench/answers")
    shutil.rmtree(folder, ignore_errors=True)
    arms = [LIVE, CACHED, NO_TEACHER]
    if asked.pixels:
        arms += [PIXELS, MEMORY]
    items = [
        f"recipe={asked.recipe}", "trainer.limit_val_batches=0", "trainer.enable_progress_bar=false",
        "runs_dir=runs/bench", "model.teacher.cache=on", f"model.teacher.cache_dir={folder}",
        f"model.teacher.cache_views={asked.views}", f"model.teacher.cache_pixels={str(asked.pixels).lower()}",
        "trainer.reload_dataloaders_every_n_epochs=1", f"trainer.max_epochs={asked.views + len(arms) * asked.rounds}",
        *([f"model.teacher.cache_topk={asked.topk}"] if asked.topk else []), *asked.set,
    ]  # fmt: skip
    run = Run.of(translate(items))
    train_teacher_if_missing(run)
    build(run)
    turns = Turns(arms, asked.views)
    run.trainer.callbacks.append(turns)
    run.trainer.fit(run.module, datamodule=run.data)
    median = {name: statistics.median(values) for name, values in turns.seconds.items()}
    pictures = run.trainer.num_training_batches * run.data.batch_size
    report = turns.cached.report()
    rows = []
    for name, values in turns.seconds.items():
        rate, gain = pictures / median[name], median[LIVE] / median[name]
        rows.append([name, spread(values), f"{rate:,.0f}", f"{gain:.2f}"])
    lines = [
        f"{asked.recipe} {' '.join(asked.set)}: batch {run.data.batch_size}, {pictures} pictures an epoch, {asked.views} "
        f"view(s), {report['format']}, {report['disk_mb']} MB. {asked.rounds} epochs of each in turn, behind the filling.",
        "",
        *table(["epoch", "seconds: median (least to most)", "images/s", "against live"], rows),
        "",
        f"Reached of an epoch without a teacher: **{median[NO_TEACHER] / median[CACHED]:.1%}**.",
    ]
    if asked.pixels:
        lines.append(f"Pixels, of batches in memory: **{median[MEMORY] / median[PIXELS]:.1%}**.")
    write(asked, "cache", "Cached answers against a live teacher", lines)


if __name__ == "__main__":
    main()
