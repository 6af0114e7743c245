"""How good candidates are before they are trained: right after inheriting."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

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
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL

PICTURES = 256
"""Most training pictures that a candidate's inherited layers are fitted on: sizes rank alike on 128, and a fit on all
takes minutes."""
HELD_OUT = 0.2
"""Share of the training pictures that candidates are scored on: few pictures rank poorly."""
AT_ONCE = 12
"""Candidates that start together, with one pass over the teacher's layers; more take more memory."""
TEACHER = "teacher"
"""Name of the teacher among the scores."""
Keep = Callable[[dict[str, float]], None]
"""Takes scores by candidate as soon as they are known."""


def score(run: Run, candidates: Sequence[Candidate], keep: Keep) -> None:
    """Scores candidates right after they have inherited, on training pictures that are held out; candidates without a
    classifier on the pictures of ``data.probe``.

    The scores go to ``keep``: a metric in its own unit, of accuracies a share in [0, 1].

    Args:
        run: the recipe's; it is built again for each group of candidates.
        candidates: to be scored, :data:`AT_ONCE` at a time; all inherit.
        keep: is called with the scores of each group, and with the teacher's.
    """
    # the largest first: a batch size that is measured for it suits all
    ordered = sorted(candidates, key=lambda candidate: candidate.cost, reverse=True)
    for first in range(0, len(ordered), AT_ONCE):
        group = ordered[first : first + AT_ONCE]
        modules, data = _built(run, group)
        students = {name: module.student for name, module in modules.items()}
        teacher = run.module.teacher
        # read once for the whole group
        data.sample_pictures = cache(data.sample_pictures)  # type: ignore[method-assign]
        begun = list(students.values())
        give_first_weights(begun, teacher, data.sample_pictures, data.sample)
        scores = measured(students, data, run.module.device, teacher)
        keep(scores)


def _built(
    run: Run, group: Sequence[Candidate]
) -> tuple[dict[str, DistillationModule], DistillationDataModule]:
    """Builds the run on one device, and a module for each candidate.

    The modules share the run's teacher. Nothing is inherited yet. From here on this process shows Lightning's warnings and
    none of its notes on each build.

    Args:
        run: the recipe's; its settings are changed.
        group: the candidates.

    Returns:
        The modules by the candidates' names, and the data, part of which is held out.
    """
    run.change(
        {
            "trainer.devices": 1,
            "trainer.num_nodes": 1,
            "trainer.strategy": "auto",
            "trainer.callbacks": None,
        }
    )
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.trainer.connectors"):
        logging.getLogger(name).setLevel(logging.WARNING)
    modules = {}
    build(run)
    for candidate in group:
        settings = {f"model.student.{key}": v for key, v in candidate.settings().items()}
        settings["model.student.inherit_pictures"] = fitted_on(run.module.student)
        modules[candidate.name] = module_of(run, settings)
    return modules, hold_out(run.module, run.data)


def fitted_on(student: Student) -> int:
    """How many training pictures a candidate's inherited layers are fitted on, at most."""
    return min(PICTURES, student.sample_size)


def scoring_split(student: Student) -> str:
    """The split that scores students: ``probe`` (labelled pictures) without a classifier, else ``val``.

    :func:`hold_out` makes ``val`` a part of the training pictures first.
    """
    return "probe" if student.gives_features else "val"


def hold_out(module: DistillationModule, data: DistillationDataModule) -> DistillationDataModule:
    """Makes :data:`HELD_OUT` of each class of the labelled training pictures the validation split, in place.

    Training leaves them out. Students without a classifier are scored on the probe's pictures: then nothing changes.
    Returns ``data``.
    """
    if scoring_split(module.student) == "val":
        data.splits.validate_in_training(HELD_OUT)
    return data


@torch.no_grad()
def measured(
    students: Mapping[str, Student],
    data: DistillationDataModule,
    device: torch.device,
    teacher: RunTeacher | None = None,
) -> dict[str, float]:
    """The main metric of each student by name, and of the teacher, in one pass over the pictures of :func:`scoring_split`.

    Several teachers are scored by the mean of their answers, and not at all by features. A teacher without a classifier is
    scored by features alone.

    Args:
        students: the candidates.
        data: reads the pictures.
        device: of the students.
        teacher: scored too, as :data:`TEACHER`; None: it is not.
    """
    of_kind = _of_features
    if scoring_split(next(iter(students.values()))) == "val":
        of_kind = _of_answers
    with evaluating(*students.values()):
        return of_kind(students, data, device, teacher)


def _of_answers(
    students: Mapping[str, Student],
    data: DistillationDataModule,
    device: torch.device,
    teacher: RunTeacher | None,
) -> dict[str, float]:
    """The task's main metric of each candidate, and of the teacher where it has a classifier, on the pictures held out, by
    name. Arguments as of :func:`measured`.
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
