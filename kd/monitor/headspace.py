"""A headspace run: the same steps with the input free, then with the teacher free as well."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch.utils.data import DataLoader

from kd.callbacks.context import RunContext
from kd.data.batch import Batch
from kd.errors import UserError
from kd.report.records import Writer
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer, Wanted

WARM_UP = 3  # number of the batch, from 0, after which the steps of each part count


class Replay:
    """A loader that keeps the batches of its first pass on the host, and gives those from memory in later ones.

    The first pass must be a whole one.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        self.batches = list[Any]()
        self.batch_sampler = loader.batch_sampler  # Lightning sets its epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches; the first time they come from the loader and are remembered."""
        if self.batches:
            yield from self.batches
            return
        for batch in self.loader:
            self.batches.append(batch)
            yield batch


class Remembered:
    """A teacher that keeps its answers by batch, or gives them back without looking. See :class:`kd.Teacher`.

    All else is the teacher's own.

    Args:
        teacher: whose answers are remembered.
        answers: by number of the batch in its epoch; filled while remembering, and read afterwards.
        number: gives that of the present batch.
        remembering: keep the teacher's answers; else return the kept ones.
    """

    def __init__(
        self,
        teacher: RunTeacher,
        answers: dict[int, Answer],
        number: Callable[[], int],
        remembering: bool,
    ) -> None:
        """Stores the arguments, which are the class's."""
        self.teacher = teacher
        self.answers = answers
        self.number = number
        self.remembering = remembering

    def __getattr__(self, name: str) -> Any:
        return getattr(self.teacher, name)

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The teacher's answer while remembering, afterwards the one that was kept of the batch with the same number."""
        if self.remembering:
            self.answers[self.number()] = self.teacher.answer(batch, wanted)
        return self.answers[self.number()]


class Headspace(Callback):
    """Three epochs over the same batches: as they come; from memory; from memory, with the teacher's answers too.

    Their times go to ``records/headspace.jsonl``. The overlay ``config=headspace`` adds it to a run.
    """

    def __init__(self) -> None:
        """Nothing is timed yet."""
        self._ends: dict[int, list[float]] = {0: [], 1: [], 2: []}
        """By epoch: seconds of the host's clock where counting begins, and at the epoch's end."""
        self._answers: dict[int, Answer] = {}
        self._batch_idx = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the settings, and puts :class:`Replay` between loader and trainer.

        Raises:
            UserError: not three epochs, or a cached or overlapped teacher.
        """
        run = RunContext.of(trainer)
        if trainer.max_epochs != 3:
            raise UserError(
                f"trainer.max_epochs: must be 3 in a headspace run, got {trainer.max_epochs}"
            )
        teacher = run.module.teacher
        # it would keep answers to views of another epoch
        if teacher is not None and teacher.cache_modes != {"off"}:
            raise UserError(
                "model.teacher.cache: must be off in a headspace run, which repeats an epoch's views"
            )
        if teacher is not None and any(member.spec.overlap for member in teacher.members.values()):
            raise UserError(
                "model.teacher.overlap: must be false in a headspace run, which removes the teacher"
            )
        run.data.wrap_loader = Replay

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that there is enough to measure.

        Raises:
            UserError: fewer than ten batches an epoch.
        """
        batches = trainer.num_training_batches
        if batches < 10:
            raise UserError(f"trainer.limit_train_batches: a headspace run needs 10, got {batches}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts :class:`Remembered` in the teacher's place: epoch 1 (from 0) keeps its answers, epoch 2 gives them back."""
        run = RunContext.of(trainer)
        if run.module.teacher is None or trainer.current_epoch == 0:
            return
        remembering = trainer.current_epoch == 1
        replayed: Any = Remembered(run.teacher, self._answers, lambda: self._batch_idx, remembering)
        run.module.answer_by(replayed)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Notes the batch's number, under which the teacher's answer is remembered."""
        self._batch_idx = batch_idx

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Notes the time where an epoch's counting begins, and at its end, once the device has come so far."""
        run = RunContext.of(trainer)
        if batch_idx in (WARM_UP, trainer.num_training_batches - 1):
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            self._ends[trainer.current_epoch].append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes and prints the mean ms of a batch as it is, with free input, and with a free teacher too, on rank 0.

        Without three whole epochs in this process it only prints that nothing was measured.
        """
        if not trainer.is_global_zero:
            return
        if any(len(ends) < 2 for ends in self._ends.values()):  # stopped early, or resumed
            print(
                "\nheadspace: the run ended before its third epoch did, or was resumed: nothing is measured"
            )
            return
        run = RunContext.of(trainer)
        steps = trainer.num_training_batches - 1 - WARM_UP
        step_ms = []  # of each part, in their order
        for ends in self._ends.values():
            seconds = ends[1] - ends[0]
            step_ms.append(1000 * seconds / steps)
        now, free_input, both = step_ms
        times = {"now_ms": round(now, 3), "free_input_ms": round(free_input, 3)}
        if run.module.teacher is not None:
            times["free_input_and_teacher_ms"] = round(both, 3)
        writer = Writer(run.folder / "records" / "headspace.jsonl", {"of": "headspace"})
        writer.write({"kind": "event", "name": "headspace", **times})
        writer.close()
        lines = [
            f"a step takes {now:.1f} ms",
            f"with a perfect input {free_input:.1f} ms ({now / free_input:.2f}x)",
        ]
        if run.module.teacher is not None:
            lines.append(f"with a free teacher as well {both:.1f} ms ({now / both:.2f}x)")
        print("\nheadspace: " + "; ".join(lines), flush=True)
