"""How good candidates are before they are trained: right after inheriting, and after a short distillation."""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor

from kd.data.datamodule import DistillationDataModule
from kd.distill.headless import HeadlessStudent
from kd.distill.student import Student
from kd.distill.students import Students
from kd.fleet.sizing.candidates import Candidate
from kd.models.preprocess import evaluating
from kd.module.distillation import DistillationModule
from kd.module.evaluation import look, look_at
from kd.progress import bar
from kd.run.run import Run
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL

PICTURES = 256  # at most, that a candidate is fitted on: sizes rank alike on 128, and a fit on all takes minutes
HELD_OUT = 0.2  # of the training pictures: few pictures rank poorly
AT_ONCE = 12  # candidates that inherit together; more take memory
IN_STEP = 4  # that are distilled in one run, on one teacher's answers: all their activations are in memory
NEVER = 10**6  # epochs between validations
TEACHER = "teacher"
Keep = Callable[
    [dict[str, dict[str, float]]], None
]  # takes scores by candidate as soon as they are known


def score(run: Run, candidates: Sequence[Candidate], steps: int, keep: Keep) -> None:
    """Scores candidates of a run's settings on training pictures that are held out; ``steps``: of the distillation."""
    for first in range(0, len(candidates), AT_ONCE):
        part = candidates[first : first + AT_ONCE]
        module, data = _students(run, part, steps)
        module.begin(cache(data.sample_pictures), data)
        drawn = {one.name for one in part if not one.inherits}  # whose weights say nothing yet
        found = {
            name: {} if name in drawn else {"before": value}
            for name, value in measured(module, data).items()
        }
        keep(found)
        students = module.students.named()
        for start in range(0, len(part) if steps else 0, IN_STEP):
            names = [one.name for one in part[start : start + IN_STEP]]
            module.take(Students({name: students[name] for name in names}))
            trainer = run.cli.instantiate_trainer()
            with bar(
                label=f"distilling {', '.join(names)}", unit=" steps", total=trainer.max_steps
            ) as left:
                show = LambdaCallback(
                    on_train_batch_end=lambda t, *_, left=left: left.update(t.global_step - left.n)
                )
                trainer.callbacks[:] = [show]  # type: ignore[attr-defined]
                trainer.fit(module, data)
            after = measured(module, data, teacher=False)
            keep({name: {**found[name], "after": after[name]} for name in names})


def _students(
    run: Run, part: Sequence[Candidate], steps: int
) -> tuple[DistillationModule, DistillationDataModule]:
    each = {
        one.name: {f"model.student.{key}": v for key, v in one.settings().items()} for one in part
    }
    for one in part:
        if one.inherits:
            each[one.name]["model.student.inherit_pictures"] = fitted_on(
                run.cli.model.student_of_one
            )
    run.cli.change(
        {
            "students": each,
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
    run.cli.build()
    return run.cli.model, hold_out(run.cli.model, run.cli.datamodule)


def fitted_on(student: Student) -> int:
    """How many training pictures a candidate is fitted and scored on."""
    return min(PICTURES, student.sample_size)


def split_of(student: Student) -> str:
    """Where it is measured: features on labelled pictures of their own, else in validation."""
    return "probe" if isinstance(student, HeadlessStudent) else "val"


def hold_out(module: DistillationModule, data: DistillationDataModule) -> DistillationDataModule:
    """Makes a share of the training pictures validation, where students are measured there."""
    if split_of(module.student_of_one) == "val":
        data.splits.validate_in_training(HELD_OUT)
    return data


@torch.no_grad()
def measured(
    module: DistillationModule, data: DistillationDataModule, teacher: bool = True
) -> dict[str, float]:
    """The main metric of each student, and of the teacher, in one pass over the pictures."""
    score = _of_answers if split_of(module.student_of_one) == "val" else _of_features
    with evaluating(*module.students.named().values()):
        return score(module, data, module.teacher if teacher else None)


def _of_answers(
    module: DistillationModule, data: DistillationDataModule, teacher: RunTeacher | None
) -> dict[str, float]:
    students, task = module.students.named(), module.task
    judges = {name: student.task for name, student in students.items()}
    for judge in judges.values():
        judge.reset()
    of_teacher = copy.deepcopy(task)
    answering = {name: student.logits for name, student in students.items()}
    for batch in bar(
        data.eval_dataloader("val"), label=f"scoring {len(students)} candidates", unit=" batches"
    ):
        seen = look(batch, task, teacher, answering, module.device)
        if seen is None:
            continue
        for name, logits in seen.logits.items():
            judges[name].update(logits, seen.target, seen.decided)
        if seen.taught:
            judges.setdefault(TEACHER, of_teacher).update(seen.taught[ALL], seen.target, None)
    return {name: float(judge.compute()[task.primary]) for name, judge in judges.items()}


def _of_features(
    module: DistillationModule, data: DistillationDataModule, teacher: RunTeacher | None
) -> dict[str, float]:
    models: dict[str, Callable[[Tensor], Tensor]] = {
        n: s.logits for n, s in module.students.named().items()
    }
    if teacher is not None and ALL in teacher.members:
        models[TEACHER] = teacher
    batches = bar(
        data.eval_dataloader("probe"), label=f"scoring {len(models)} models", unit=" batches"
    )
    seen = look_at(models, data, batches, module.device)
    return {name: seen.accuracy(name)[module.task.primary] for name in models}
