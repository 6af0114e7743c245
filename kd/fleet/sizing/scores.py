"""How good candidates are before they are trained: right after inheriting, and after a short distillation."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from kd.data.batch import Batch
from kd.data.datamodule import DistillationDataModule
from kd.distill.first_weights import give_first_weights
from kd.distill.student import Student
from kd.fleet.sizing.candidates import Candidate
from kd.models.preprocess import evaluating
from kd.module.distillation import DistillationModule
from kd.module.evaluation import look, look_at
from kd.progress import bar
from kd.run.build import build, module_of
from kd.run.run import Run
from kd.run.trainer import make_trainer
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer
from kd.teachers.build import shared_teachers

PICTURES = 256
"""Most training pictures that a candidate's inherited layers are fitted on: sizes rank alike on 128, and a fit on all
takes minutes."""
HELD_OUT = 0.2
"""Share of the training pictures that candidates are scored on: few pictures rank poorly."""
AT_ONCE = 12
"""Candidates that start together, with one pass over the teacher's layers; more take more memory."""
SCORED_TOGETHER = 4
"""Candidates that are scored by one pass over the held-out pictures after their distillation."""
KEPT_BYTES = 2 << 30
"""Most memory for the training batches that all candidates share; beyond it each reads its own."""
NEVER = 10**6
"""Epochs between validations."""
TEACHER = "teacher"
"""Name of the teacher among the scores."""
Keep = Callable[[dict[str, dict[str, float]]], None]
"""Takes scores by candidate as soon as they are known."""


def score(run: Run, candidates: Sequence[Candidate], steps: int, keep: Keep) -> None:
    """Scores candidates on training pictures that are held out; without a classifier on the probe's.

    A metric is in its own unit, of accuracies a share in [0, 1].

    Args:
        run: the recipe's; it is built again for each group of candidates.
        candidates: to be scored, :data:`AT_ONCE` at a time.
        steps: of the short distillation; 0: none.
        keep: is called with scores by candidate: after each group has inherited, with ``before`` of each one that
            inherits ({} of others) and of the teacher; then, with ``steps``, after each :data:`SCORED_TOGETHER` of them
            are distilled, with their ``before``, if any, and ``after``.
    """
    reading = SharedReading()
    # the largest first: a batch size that is measured for it suits all
    ordered = sorted(candidates, key=lambda candidate: candidate.cost, reverse=True)
    for first in range(0, len(ordered), AT_ONCE):
        group = ordered[first : first + AT_ONCE]
        modules, data = _built(run, group, steps)
        students = {name: module.student for name, module in modules.items()}
        module = run.module
        data.sample_pictures = cache(data.sample_pictures)  # type: ignore[method-assign]
        pictures = data.sample_pictures
        give_first_weights(list(students.values()), module.teacher, pictures, data.sample)
        drawn = {candidate.name for candidate in group if not candidate.inherits}
        scores: dict[str, dict[str, float]] = {}
        before = measured(students, data, module.device, module.teacher)
        for name, value in before.items():
            scores[name] = {}
            # of drawn or pre-trained weights none is kept before a distillation
            if name not in drawn:
                scores[name]["before"] = value
        keep(scores)
        if not steps:
            continue
        all_names = [candidate.name for candidate in group]
        for start in range(0, len(group), SCORED_TOGETHER):
            names = all_names[start : start + SCORED_TOGETHER]
            for name in names:
                _distill(run, modules[name], reading, label=f"distilling {name}")
            after = measured({name: students[name] for name in names}, data, module.device)
            for name in names:
                scores[name]["after"] = after[name]
            keep({name: scores[name] for name in names})


class SharedReading:
    """What the first candidate's distillation reads and all others read again: batches, and the teacher's answers.

    All are trained by the same settings and so on the same batches; the loader, its workers and the teacher run once.
    """

    def __init__(self) -> None:
        self.passes: list[list[Batch]] = []  # the batches of each epoch, in order
        self.answers: list[Answer] = []  # of the steps, in order
        self.bytes_left = KEPT_BYTES

    def share(self, module: DistillationModule, data: DistillationDataModule) -> None:
        """Makes the next fit of a module read what there is, and keep what it is the first to read."""
        module.begun = True
        step = module.distillation
        step.answer = self._answer(step.answer)  # type: ignore[assignment,method-assign]
        data.wrap_loader = lambda loader: SharedLoader(loader, self)

    def _answer(self, ask: Callable[[Batch], Answer]) -> Callable[[Batch], Answer]:
        """The teacher's answer to each batch of a training.

        Answers of features and maps are not kept: they would fill the memory.

        Args:
            ask: gives a new answer.
        """
        steps = count()

        def answer(batch: Batch) -> Answer:
            """The answer of this step."""
            step = next(steps)
            if step < len(self.answers):
                return self.answers[step]
            given = ask(batch)
            rows = all(isinstance(x, Tensor) and x.ndim == 2 for x in given.logits.values())
            if rows and not given.features:
                self.answers.append(given)
            return given

        return answer

    def read(self, epoch: int, loader: DataLoader) -> Iterator[Batch]:
        """The batches of an epoch, from memory where they are all there.

        Args:
            epoch: of the fit, from 0.
            loader: reads them where they are not kept: at first, and where they would take more than
                :data:`KEPT_BYTES`.
        """
        if epoch < len(self.passes):
            yield from self.passes[epoch]
            return
        kept: list[Batch] = []
        if self.bytes_left > 0:
            self.passes.append(kept)
        for batch in loader:
            if self.bytes_left > 0:
                # a copy: a worker's batch is in shared memory, of which containers have little
                kept.append(apply_to_collection(batch, Tensor, Tensor.clone))
                apply_to_collection(batch, Tensor, self._count)
            if self.bytes_left <= 0:
                self.passes.clear()
            yield batch

    def _count(self, part: Tensor) -> None:
        """Subtracts a tensor that is kept from what the memory may take."""
        self.bytes_left -= part.nbytes


class SharedLoader:
    """A fit's training loader that takes its batches from a :class:`SharedReading`."""

    def __init__(self, loader: DataLoader, reading: SharedReading) -> None:
        """Wraps a loader; Lightning reads ``batch_sampler``, to set its epoch."""
        self.loader = loader
        self.reading = reading
        self.batch_sampler = loader.batch_sampler
        self._epochs = count()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        return self.reading.read(next(self._epochs), self.loader)


def _distill(run: Run, module: DistillationModule, reading: SharedReading, label: str) -> None:
    """Trains a module for the run's ``max_steps`` optimizer steps, with a bar in place of callbacks.

    Args:
        run: its settings make the trainer, a new one at each call; nothing is validated. What its data leave to be
            measured (``auto``) is measured for the first module that is trained.
        module: has its first weights.
        reading: gives batches and answers.
        label: of the bar.
    """
    data = run.data
    run.module = module
    reading.share(module, data)
    trainer = make_trainer(run)
    with bar(label=label, unit=" steps", total=trainer.max_steps) as left:

        def show(trainer: Trainer, *_: object) -> None:
            left.update(trainer.global_step - left.n)

        trainer.callbacks[:] = [LambdaCallback(on_train_batch_end=show)]  # type: ignore[attr-defined]
        trainer.fit(module, data)
    data.auto.clear()


def _built(
    run: Run, group: Sequence[Candidate], steps: int
) -> tuple[dict[str, DistillationModule], DistillationDataModule]:
    """Builds the run on one device, without validation and callbacks, and a module for each candidate.

    The modules share the run's teacher. Nothing is trained or inherited yet.

    Args:
        run: the recipe's; its settings are changed.
        group: the candidates.
        steps: optimizer steps that they train; for 0 the trainer, which needs one at least, is not used.

    Returns:
        The modules by the candidates' names, and the data, part of which is held out.
    """
    run.change(
        {
            "trainer.max_steps": max(1, steps),
            "trainer.max_epochs": -1,
            "trainer.devices": 1,
            "trainer.num_nodes": 1,
            "trainer.strategy": "auto",
            "trainer.logger": False,
            "trainer.callbacks": None,
            "trainer.check_val_every_n_epoch": NEVER,
            "trainer.enable_progress_bar": False,
        }
    )
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.trainer.connectors"):
        logging.getLogger(name).setLevel(logging.WARNING)
    modules = {}
    with shared_teachers():
        build(run)
        for candidate in group:
            settings = {f"model.student.{key}": v for key, v in candidate.settings().items()}
            if candidate.inherits:
                pictures = fitted_on(run.module.student)
                settings["model.student.inherit_pictures"] = pictures
            modules[candidate.name] = module_of(run, settings)
    return modules, hold_out(run.module, run.data)


def fitted_on(student: Student) -> int:
    """How many training pictures a candidate's inherited layers are fitted on, at most."""
    return min(PICTURES, student.sample_size)


def split_of(student: Student) -> str:
    """The split that scores students: ``probe`` (labelled pictures) without a classifier, else ``val``.

    :func:`hold_out` makes ``val`` a part of the training pictures first.
    """
    return "probe" if student.gives_features else "val"


def hold_out(module: DistillationModule, data: DistillationDataModule) -> DistillationDataModule:
    """Makes :data:`HELD_OUT` of each class of the labelled training pictures the validation split, in place.

    Training leaves them out. Students without a classifier are scored on the probe's pictures: then nothing changes.
    Returns ``data``.
    """
    if split_of(module.student) == "val":
        data.splits.validate_in_training(HELD_OUT)
    return data


@torch.no_grad()
def measured(
    students: Mapping[str, Student],
    data: DistillationDataModule,
    device: torch.device,
    teacher: RunTeacher | None = None,
) -> dict[str, float]:
    """The main metric of each student by name, and of the teacher, in one pass over the pictures of :func:`split_of`.

    Of several teachers their mean's, by features none; a teacher without a classifier has one by features alone.

    Args:
        students: the candidates.
        data: reads the pictures.
        device: of the students.
        teacher: scored too, as :data:`TEACHER`; None: it is not.
    """
    of_kind = _of_features
    if split_of(next(iter(students.values()))) == "val":
        of_kind = _of_answers
    with evaluating(*students.values()):
        return of_kind(students, data, device, teacher)


def _of_answers(
    students: Mapping[str, Student],
    data: DistillationDataModule,
    device: torch.device,
    teacher: RunTeacher | None,
) -> dict[str, float]:
    """The task's main metric of each candidate, and of the teacher, on the pictures held out, by name.

    Arguments as of :func:`measured`.
    """
    tasks = {name: student.task for name, student in students.items()}
    for student_task in tasks.values():
        student_task.reset()
    task = next(iter(tasks.values()))
    teachers_task = copy.deepcopy(task)
    logits_of = {name: student.logits for name, student in students.items()}
    label = f"scoring {len(students)} candidates"
    for batch in bar(data.eval_dataloader("val"), label=label, unit=" batches"):
        seen = look(batch, task, teacher, logits_of, device)
        if seen is None:
            continue
        for name, logits in seen.logits.items():
            tasks[name].update(logits, seen.target, seen.decided)
        if seen.taught:
            tasks.setdefault(TEACHER, teachers_task).update(seen.taught[ALL], seen.target, None)
    scores = {}
    for name, of_model in tasks.items():
        metrics = of_model.compute()
        scores[name] = float(metrics[task.primary])
    return scores


def _of_features(
    students: Mapping[str, Student],
    data: DistillationDataModule,
    device: torch.device,
    teacher: RunTeacher | None,
) -> dict[str, float]:
    """The metric of nearest neighbours by features of each candidate, and of a single teacher, by name.

    On the labelled pictures of ``data.probe``. Arguments as of :func:`measured`.
    """
    models: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, student in students.items():
        models[name] = student.logits
    if teacher is not None and ALL in teacher.members:
        models[TEACHER] = teacher
    label = f"scoring {len(models)} models"
    batches = bar(data.eval_dataloader("probe"), label=label, unit=" batches")
    features = look_at(models, data, batches, device)
    metric = next(iter(students.values())).task.primary
    scores = {}
    for name in models:
        scores[name] = features.accuracy(name)[metric]
    return scores
