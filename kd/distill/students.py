"""The students of a run: usually one, or several on the same batches."""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.clock import part_of_the_start
from kd.data.batch import Batch, DataInfo
from kd.distill.inherit import inherit_together
from kd.distill.objective import Terms
from kd.distill.student import Student
from kd.errors import UserError
from kd.optim import Pace, Together
from kd.teachers import RunTeacher
from kd.teachers.answer import Answer, Wanted

ONLY = (
    "student"  # The name of a single student among its run's parameters; it is logged without one
)


class Students(nn.ModuleDict):
    """Students by name. What they share (task, data) is read from the first.

    Args:
        students: by name, or one without a name.
    """

    def __init__(self, students: Student | Mapping[str, Student]) -> None:
        super().__init__()
        self.several = not isinstance(students, Student)
        # past add_module, which refuses names that are also methods of a ModuleDict
        self._modules.update({ONLY: students} if isinstance(students, Student) else students)

    def named(self) -> dict[str, Student]:
        """The students by name; a single one has the empty name."""
        found: dict[str, Any] = dict(self._modules)
        return found if self.several else {"": found[ONLY]}

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
        """What the losses of all students read of the teacher."""
        found = Wanted(logits={})
        for student in self.named().values():
            found |= student.objective.wanted
        return found

    def without_gradient(self) -> list[str]:
        """Parameters that no term reaches, by their name in here."""
        students = zip(self, self.named().values(), strict=True)
        return [f"{key}.{name}" for key, student in students for name in student.without_gradient()]

    def begin(
        self, teacher: RunTeacher | None, pictures: Callable[[int], Tensor] | None
    ) -> list[str]:
        """Takes first weights from the teacher's layers where the settings say so; returns each student's message."""
        together: dict[tuple[str, int], list[Student]] = {}
        for student in self.named().values():
            if student.start == "inherited":
                together.setdefault((student.parent, student.sample_size), []).append(student)
        for (parent, count), students in together.items():
            if pictures is None:
                raise UserError(
                    "model.student.inherit: needs training pictures: a DistillationDataModule"
                )
            assert teacher is not None
            pairs, sample, giving = (
                [(s.model, s.prepare) for s in students],
                pictures(count),
                teacher.members[parent],
            )
            try:
                with part_of_the_start("fit of the inherited start"):
                    inherit_together(pairs, giving.original(), sample, giving.prepare)  # type: ignore[arg-type]
            except ValueError as error:
                raise UserError(f"model.student.inherit: {error}") from error
        return [student.begin(pictures) for student in self.named().values()]

    def compile_in_place(self) -> None:
        """Compiles the models whose settings ask for it; names of parameters do not change."""
        for student in self.named().values():
            if student.spec is not None:
                student.spec.compile_in_place(student.model)

    def build_optimizers(self, pace: Pace) -> tuple[Optimizer, LambdaLR]:
        """The students' optimizers and schedules; of several as one, :class:`kd.optim.Together`."""
        made = [student.build_optimizer(pace) for student in self.named().values()]
        if not self.several:
            return made[0]
        optimizer = Together([own for own, _ in made])
        return optimizer, LambdaLR(
            optimizer, [factor for _, own in made for factor in own.lr_lambdas]
        )

    def ask(self, teacher: RunTeacher | None, batch: Batch) -> Answer:
        """What the students' losses read of the teacher."""
        wanted = self.wanted
        return teacher.answer(batch, wanted) if teacher is not None and wanted else Answer()

    def learn(
        self, batch: Batch, answer: Answer, before_each: Callable[[], None]
    ) -> dict[str, Terms]:
        """What one batch costs each student; ``before_each`` is called before each student's turn."""
        found = {}
        for name, student in self.named().items():
            before_each()
            found[name] = student.learn(batch, answer)
        return found

    def set_epoch(self, epoch: float, max_epochs: int) -> None:
        """Sets where training is, for all losses; see :meth:`Objective.set_epoch`."""
        for student in self.named().values():
            student.objective.set_epoch(epoch, max_epochs)

    def move_averages(self, step: int) -> None:
        """After the optimizer's ``step`` (from 1)."""
        for student in self.named().values():
            if student.average is not None:
                student.average.update(student.model, step)

    def take_classifiers(self) -> None:
        """Brings classifiers that are made of the teacher's up to date."""
        for student in self.named().values():
            student.take_classifier()


class StepOutput(TypedDict):
    """What a training step returns: the sum of the losses, each student's terms by name, the teacher's answer."""

    loss: Tensor
    terms: dict[str, dict[str, Tensor]]
    answer: Answer
