"""The students of a run: usually one, or several on the same batches."""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.data.batch import Batch
from kd.data.info import DataInfo
from kd.distill.objective import Terms
from kd.distill.student import Student
from kd.optim import Pace, Together
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer, Wanted

ONLY = "student"
"""The name of a single student among its run's parameters; it is logged without one."""


class Students(nn.ModuleDict):
    """Students by name. What they share (task, data) is read from the first.

    Args:
        students: by name, or one without a name.
    """

    def __init__(self, students: Student | Mapping[str, Student]) -> None:
        """Registers the students. ``several`` is true for a mapping, even of one student."""
        super().__init__()
        self.several = not isinstance(students, Student)
        by_name = {ONLY: students} if isinstance(students, Student) else students
        # Not by add_module, which refuses names that are also methods of a ModuleDict.
        self._modules.update(by_name)

    def named(self) -> dict[str, Student]:
        """The students by name, in order; a single one has the empty name, which prefixes of metrics rely on."""
        students: dict[str, Any] = dict(self._modules)
        if self.several:
            return students
        return {"": students[ONLY]}

    @property
    def only_or_first(self) -> Student:
        """The only student, or the first of several."""
        return next(iter(self.named().values()))

    @property
    def measured(self) -> dict[str, Student]:
        """The students that validation measures, by name."""
        return {name: student for name, student in self.named().items() if student.is_measured}

    @property
    def data_info(self) -> DataInfo:
        """Classes and labels of the data; all students share them."""
        return self.only_or_first.data

    @property
    def wanted(self) -> Wanted:
        """What the losses of all students read of the teacher, joined: the teacher answers once for all."""
        wanted = Wanted(logits={})
        for student in self.named().values():
            wanted |= student.objective.wanted
        return wanted

    def without_gradient(self) -> list[str]:
        """Parameters that no loss reaches, by their name in this module (``student.model.head.weight``): DDP would wait for
        their gradients.
        """
        names = []
        for key, student in zip(self, self.named().values(), strict=True):
            for name in student.without_gradient():
                names.append(f"{key}.{name}")
        return names

    def compile_in_place(self) -> None:
        """Compiles the models whose settings ask for it (``compile``); names of parameters do not change.

        Called after the first weights are set and the losses settled, which run the models uncompiled.
        """
        for student in self.named().values():
            if student.spec is not None:
                student.spec.compile_in_place(student.model)

    def build_optimizers(self, pace: Pace) -> tuple[Optimizer, LambdaLR]:
        """The optimizer and the schedule of the learning rate; of several students as one, :class:`kd.optim.Together`.

        Args:
            pace: how many steps and epochs the run has.
        """
        pairs = [student.build_optimizer(pace) for student in self.named().values()]
        if not self.several:
            return pairs[0]
        optimizer = Together([optimizer for optimizer, _ in pairs])
        factors = []  # of the learning rate, by step, of each parameter group
        for _, schedule in pairs:
            factors += schedule.lr_lambdas
        return optimizer, LambdaLR(optimizer, factors)

    def ask(self, teacher: RunTeacher | None, batch: Batch) -> Answer:
        """The teacher's answer to a batch: what the students' losses read of it; an empty answer where they read nothing or
        ``teacher`` is None.
        """
        wanted = self.wanted
        if teacher is None or not wanted:
            return Answer()
        return teacher.answer(batch, wanted)

    def learn(
        self, batch: Batch, answer: Answer, before_each: Callable[[], None]
    ) -> dict[str, Terms]:
        """The losses of one batch, by student; the single one's key is "".

        Args:
            batch: on the students' device.
            answer: the teacher's to the same pictures.
            before_each: called before each student's turn; it seeds random numbers, so that each student draws what it
                would draw if it were trained alone.
        """
        terms = {}
        for name, student in self.named().items():
            before_each()
            terms[name] = student.learn(batch, answer)
        return terms

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Sets where training is, for all losses: ``epoch`` from 0, of ``max_epochs``; see :meth:`Objective.set_epoch`."""
        for student in self.named().values():
            student.objective.set_epoch(epoch, max_epochs)

    def move_averages(self, step: int) -> None:
        """Moves the average of each student's weights, where it has one; called after each optimizer step.

        Args:
            step: how many steps the optimizer has made, from 1; the average's decay grows with it.
        """
        for student in self.named().values():
            if student.average is not None:
                student.average.update(student.model, step)

    def take_classifiers(self) -> None:
        """SimKD: brings classifiers that are made of the teacher's up to date, :meth:`Student.take_classifier`.

        Called before validation, before a checkpoint is written and when training ends; in between they lag behind.
        """
        for student in self.named().values():
            student.take_classifier()


class StepOutput(TypedDict):
    """What a training step returns."""

    loss: Tensor
    """The sum of the students' losses, a scalar."""
    terms: dict[str, dict[str, Tensor]]
    """Each student's :attr:`Terms.named`, by its name; "" for a single one."""
    answer: Answer
    """The teacher's."""
