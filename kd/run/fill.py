"""Fills the caches of a recipe's teachers ahead of training: what ``kd-cache`` does."""

import time

import numpy as np
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.launch.loopback import meet_on_loopback
from kd.module.distillation import DistillationModule
from kd.processes import total
from kd.progress import bar
from kd.teachers import (
    CachedTeacher,
    RunTeacher,
    caches_of,
    dtype_for,
    open_cache,
    reading_of,
)
from kd.teachers.answer import Wanted
from kd.teachers.answer_store import publish
from kd.teachers.cache_layout import PUBLISHED, Layout


class Fill(LightningModule):
    """Asks the teachers for their answers to one view after another; a validation loop over training pictures."""

    def __init__(self, teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted) -> None:
        """A module whose validation computes and stores answers, on all processes of a trainer.

        Args:
            teacher: the run's; :meth:`setup` puts caches before it.
            data: pictures and views.
            wanted: what the student's losses read.
        """
        super().__init__()
        self.teacher = teacher
        self.pictures = data
        self.wanted = wanted
        self.answering_teacher: RunTeacher = teacher
        self.view = 0  # the view that is filled

    @property
    def caches(self) -> dict[str, CachedTeacher]:
        """The caches that are filled, by the teacher's name."""
        return caches_of(self.answering_teacher)

    @property
    def views(self) -> int:
        """Views of each picture, of which all caches have as many."""
        first, *_ = self.caches.values()
        return first.stores[0].views

    def setup(self, stage: str) -> None:
        """Puts the teachers on their device and opens the caches; a second call changes nothing.

        Raises:
            UserError: as of :func:`kd.teachers.open_cache.open_cache`.
        """
        if self.caches:
            return
        device = self.trainer.strategy.root_device
        self.teacher.to(device, dtype_for(str(self.trainer.precision)))
        announce = self.trainer.is_global_zero
        self.answering_teacher = open_cache(
            self.teacher, self.pictures, self.wanted, announce, filling=True
        )
        self.pictures.reading = reading_of(self.answering_teacher)

    def val_dataloader(self) -> DataLoader:
        """This process's batches of the current view in which a picture lacks its answer; opens their progress bar.

        The bar counts pictures of all processes, as if each had as many batches as this one.
        """
        rank = self.trainer.global_rank
        ranks = self.trainer.world_size
        batches = self.pictures.fill_batches(self.view, self._present, rank, ranks)
        number = self.view + 1
        pictures = sum(map(len, batches)) * ranks
        label = f"view {number}/{self.views}"
        hidden = not self.trainer.is_global_zero
        self._bar = bar(label=label, total=pictures, disable=hidden)
        return self.pictures.fill_dataloader(batches)

    def _present(self, view: int, index: np.ndarray) -> np.ndarray:
        """Which of the samples ``index`` ``(n,)`` have all their answers (and pixels) of a view, bool ``(n,)``."""
        present = []
        for cache in self.caches.values():
            present.append(cache.present(view, index))
            if cache.pixels:
                present.append(cache.pixels.present(view, index))
        return np.logical_and.reduce(present)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Computes and stores the answers to one batch, and advances the bar by the pictures of all processes."""
        batch = self.pictures.on_after_batch_transfer(batch, 0)
        for name, cache in self.caches.items():
            cache.answer(batch, self.wanted, name)
        pictures = len(batch["index"])
        ranks = self.trainer.world_size
        self._bar.update(pictures * ranks)

    def on_validation_end(self) -> None:
        """Closes the progress bar."""
        self._bar.close()


def fill(
    model: DistillationModule,
    data: DistillationDataModule,
    trainer: Trainer,
    out: str | None = None,
) -> None:
    """Fills all views, on as many processes as the trainer has; the first one prints what was computed.

    Args:
        model: teachers, and the losses that decide what of their answers is kept.
        data: the training pictures.
        trainer: on which processes; it loses its callbacks, its profiler and a limit of validation batches.
        out: folder or URL of a packed data set, below which the answers are published as well; None: this machine's
            cache alone.

    Raises:
        UserError: the recipe has no teacher, or no loss that reads its answers.
    """
    data.prepare_data()
    teacher = model.teacher
    wanted = model.student.objective.wanted
    if teacher is None or not wanted:
        raise UserError(
            "model.teacher: there is nothing to cache, the recipe has no teacher or no distillation loss"
        )
    module = Fill(teacher, data, wanted)
    trainer.limit_val_batches = 1.0  # an overlay for short runs must not leave holes
    trainer.callbacks = []  # type: ignore[attr-defined]  # the recipe's are for training
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]  # likewise
    meet_on_loopback(trainer)
    start = time.monotonic()
    trainer.validate(module, verbose=False)  # opens the caches
    for view in range(1, module.views):
        module.view = view
        trainer.validate(module, verbose=False)
    seconds = time.monotonic() - start
    data.teardown("fit")
    for name, cache in module.caches.items():
        computed = int(total(trainer.strategy, cache.computed))
        if trainer.is_global_zero:
            _say(name, cache, computed, seconds)
            if out is None:
                print(f"       use them with {cache.live.key}.cache=on (or only)", flush=True)
    if trainer.is_global_zero and out:
        _publish(module, data, out)


def _publish(module: Fill, data: DistillationDataModule, out: str) -> None:
    """Copies the filled caches beside the packed data set at ``out``; prints places and sizes."""
    layout = Layout(data)
    for cache in module.caches.values():
        for store in cache.stores:
            name = store.kind.folder.name
            place = f"{out}/{PUBLISHED}/{layout.name(cache.live)}/{name}"
            size = publish(store, place, bar(range(store.views), label=f"writing {name}"))
            print(f"       {size / 1e6:,.1f} MB in {place}")
        print(
            f"       read them with {cache.live.key}.cache=only {cache.live.key}.cache_dir={out}",
            flush=True,
        )


def _say(name: str, cache: CachedTeacher, computed: int, seconds: float) -> None:
    """Prints how many answers were computed and how fast, and the size on disk of all answers in MB.

    Args:
        name: of the teacher; "" for a single one.
        cache: of its answers.
        computed: answers, by all processes together.
        seconds: for all views, of all teachers.
    """
    of_teacher = f" of {name}" if name else ""
    print(
        f"cache{of_teacher}: {computed} answers computed in {seconds:.0f} s "
        f"({computed / seconds:,.0f} images/s); {cache.views} view(s) of {cache.samples} pictures, "
        f"{cache.disk_bytes / 1e6:,.1f} MB in {cache.place}"
    )
    if cache.pixels:
        print(
            f"       {cache.pixels.disk_bytes / 1e6:,.1f} MB of them are the views' pixels in {cache.pixels.kind.place}"
        )
