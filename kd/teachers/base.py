"""What a teacher is: for whoever writes one, and for the run that holds one."""

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kd.clock import annotate
from kd.data.batch import Batch
from kd.errors import UserError, plain
from kd.models import Images, TeacherSpec
from kd.models.own import frozen_copy
from kd.models.weights import say
from kd.tasks import Task
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.probabilities import INVERSE, are_probabilities, logits_of_probabilities


@runtime_checkable
class Teacher(Protocol):
    """Answers for a batch. These two methods are all that a teacher of one's own needs.

    It may also have ``to(device)``, and as ``model.teacher.answers`` ``build(num_classes, img_size)``, which gives the
    teacher.
    """

    def answer(self, batch: Batch, wanted: Wanted) -> Answer:
        """The answer to a batch: ``Answer({"": logits})``, float32 ``(N, C)`` (dense: ``(N, C, h, w)``), on the device of
        the pictures.
        """

    def identity(self) -> dict[str, Any]:
        """Plain values that tell it from other teachers: they are stored in checkpoints, and name its cache."""


class RunTeacher:
    """A teacher as a run holds it: a model, a cache before one, several, or a user's own.

    Not an ``nn.Module``, so a LightningModule keeps it out of checkpoints, optimizer, DDP's broadcasts and ``train()``.
    """

    arch: str
    """Name for people."""
    model: nn.Module
    """The weights, to count and to hash."""
    spec: TeacherSpec
    key = "model.teacher"  # its configuration key, named in errors
    closed = ""  # why its layers can't be used
    link = ""  # what makes probabilities of its logits, see Task.link
    gives_numbers = False  # whether its answers are numbers in units
    gives_probabilities: bool | None = None
    """Whether its model ends with ``link``; None before its first answer."""
    device = torch.device("cpu")
    dtype = torch.float32

    @property
    def members(self) -> Mapping[str, Any]:
        """The teachers that it is made of, by name; a single one is itself under the name of all."""
        return {ALL: self}

    @property
    def has_head(self) -> bool:
        """Whether it gives logits: each of several must."""
        return self.spec.head

    @property
    def cache_modes(self) -> set[str]:
        """The setting ``cache`` of all members."""
        return {member.spec.cache for member in self.members.values()}

    @property
    def cache_views(self) -> int | None:
        """Views of a picture that its cache keeps; None: its answers are of whole pictures, for any view."""
        return self.spec.cache_views

    @property
    def stored(self) -> bool:
        """Whether it is stored answers alone, or one of several is: then it can't be asked for other pictures."""
        return any(member.stored for member in self.members.values() if member is not self)

    @property
    def is_shared_out(self) -> bool:
        """Whether it answers only where all processes ask."""
        return any(member.is_shared_out for member in self.members.values() if member is not self)

    def to(
        self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False
    ) -> "RunTeacher":
        """Moves each member to where it answers; a later call moves it again. A single model overrides this.

        Args:
            device: the student's; ``placement`` of a member may name another.
            dtype: of the weights, see :func:`kd.teachers.frozen.dtype_for`.
            keep: keep the weights as loaded until :meth:`forget_original`: students may start from them.

        Returns:
            The teacher itself.
        """
        for member in self.members.values():
            member.to(device, dtype, keep)
        return self

    def follow(self, device: torch.device) -> None:
        """Moves members that are on another device to ``device``, in their precision; their ``placement`` counts."""
        for member in self.members.values():
            if member.device != device:
                member.to(device, member.dtype)

    def expect(self, task: Task) -> None:
        """Takes over the ``link`` of the task that the answers serve, by which :meth:`as_logits` recognises probabilities,
        and whether they are numbers, which a model gives in float32.

        Members take it over too; a teacher without a classifier has none. Before the call outputs count as logits.
        """
        self.link = task.link if self.has_head else ""
        self.gives_numbers = self.has_head and task.answers == "numbers"
        for member in self.members.values():
            if member is not self:
                member.expect(task)

    def as_logits(self, outputs: Tensor) -> Tensor:
        """The logits for a model's outputs ``(N, C, ...)``, which are logits or, after the task's softmax or sigmoid,
        probabilities. Logits are returned as they are.

        The first outputs after :meth:`expect` decide for all later ones, and a line is printed where they are
        probabilities. While torch compiles a model, nothing is decided.
        """
        first = self.gives_probabilities is None and not torch.compiler.is_compiling()
        if first and self.link:
            self.gives_probabilities = are_probabilities(outputs, self.link)
            if self.gives_probabilities:
                say(
                    f"{self.key}: {self.arch} gives probabilities, not logits: "
                    f"{INVERSE[self.link]} is used in their place"
                )
        if self.gives_probabilities:
            return logits_of_probabilities(outputs, self.link)
        return outputs

    def forget_original(self) -> None:
        """Lets go of what :meth:`to` has kept."""
        for member in self.members.values():
            if member is not self:
                member.forget_original()

    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        """On the host, before a training batch travels: adds what it knows already (a cache's records, under ``name``)."""
        return batch

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The answer to a batch, with at least what is wanted.

        Args:
            batch: on the device of the student; a cache also reads its ``view``, ``index`` and ``records``.
            wanted: of this teacher, and perhaps of others.
            name: under which its logits and layers are answered, and looked up in ``wanted``.
        """
        raise NotImplementedError

    def names_of_its_columns(self, names: Sequence[str]) -> list[str] | None:
        """Names of the data's classes, in the order in which the model itself has them; None where it has more classes."""
        return list(names)

    def __call__(self, images: Images) -> Tensor:
        """Logits ``(N, C)`` of all together."""
        logits: Any = self.answer({"image": images}, Wanted()).logits[ALL]
        return logits

    def identity(self) -> dict[str, Any]:
        """What tells its weights from any other's, as plain values (``arch`` and a digest): part of a cache's
        fingerprint.
        """
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """What its answers to a picture depend on."""
        return {**self.identity(), "dtype": str(self.dtype).removeprefix("torch.")}


class Ensemble(RunTeacher):
    """Several teachers: each answers with its own input size and normalisation, all together with the weighted mean.

    The mean is of the logits: ``sum(weight_i * logits_i) / sum(weight_i)``. It exists where each has a classifier.

    Args:
        members: the teachers by name, each itself or behind a cache.
    """

    def __init__(self, members: Mapping[str, RunTeacher]) -> None:
        """Joins teachers by name; their weights become shares that add to 1.

        Raises:
            UserError: a weight other than 1, where a teacher without a classifier leaves no mean of logits.
        """
        self._members = dict(members)
        teachers = members.values()
        self.arch = " + ".join(teacher.arch for teacher in teachers)
        self.model: nn.Module = nn.ModuleList([teacher.model for teacher in teachers])
        weights_T = torch.tensor([teacher.spec.weight for teacher in teachers])
        for teacher in teachers:
            if teacher.spec.weight != 1 and not self.has_head:
                raise UserError(
                    f"{teacher.key}.weight: counts in the mean of logits, and not all teachers have a classifier; "
                    "model.distill_losses.NAME.weight is a loss's"
                )
        shares_T = weights_T / weights_T.sum()
        self._shares: list[float] = shares_T.tolist()

    @property
    def members(self) -> Mapping[str, RunTeacher]:
        """The teachers by name, in the order of ``model.teachers``."""
        return self._members

    @property
    def has_head(self) -> bool:
        """Whether each teacher gives logits."""
        return all(teacher.has_head for teacher in self.members.values())

    def fetch(self, batch: Batch, name: str = ALL) -> Batch:
        """Adds what the members' caches hold of the batch, each under its name."""
        for member, teacher in self.members.items():
            batch = teacher.fetch(batch, member)
        return batch

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The logits of each teacher by name and, where wanted, their weighted mean; the wanted layers of each.

        Dense answers are resized to the first teacher's size for the mean. A teacher of which nothing is wanted is not
        run. ``name`` is not read.
        """
        together = Answer()
        for member, teacher in self.members.items():
            if not wanted.of(member):
                continue
            answer = teacher.answer(batch, wanted, member)
            together.features |= answer.features
            together.logits |= answer.logits
        if ALL in wanted.logits and self.has_head:
            mean = self._mean(list(together.logits.values()))
            together.logits = {ALL: mean, **together.logits}
        return together

    def _mean(self, logits: list[Any]) -> Tensor:
        """The weighted mean of all teachers' logits, ``(N, C)``, or maps ``(N, C, h, w)`` of the first teacher's size."""
        size = logits[0].shape[2:]
        weighted = []
        for share, teacher_logits in zip(self._shares, logits, strict=True):
            if teacher_logits.shape[2:] != size:
                teacher_logits = nn.functional.interpolate(teacher_logits, size, mode="bilinear")
            weighted.append(share * teacher_logits)
        first, *others = weighted
        return sum(others, first)

    def identity(self) -> dict[str, Any]:
        """The members' identities by name."""
        return {name: teacher.identity() for name, teacher in self.members.items()}


@contextmanager
def errors_of_user(given: object, method: str, key: str) -> Iterator[None]:
    """Turns an error that a user's method raises in the block into one line: the class, the key and the line of code.

    Raised as they are: a UserError, any error where ``given`` is of a class of kd's own, and an error of a device without
    memory, by which batch sizes are found.

    Args:
        given: the user's object.
        method: name of its method that the block calls.
        key: of the teacher in the settings.

    Raises:
        UserError: in the place of any other error.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cls = type(given)
        if cls.__module__.startswith("kd."):
            raise
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        place = ""
        if file and lines:
            place = f" ({Path(file).name}, line {lines[-1]})"
        of_class = f"{key}: {cls.__module__}.{cls.__name__}.{method}"
        raise UserError(f"{of_class}: {plain(error)}{place}") from error


class OwnTeacher(RunTeacher):
    """A teacher of the user's own (:class:`Teacher`) in a run: it gives logits."""

    closed = "is a teacher of your own, whose layers are unknown"

    def __init__(
        self, given: Teacher, spec: TeacherSpec | None = None, key: str = "model.teacher"
    ) -> None:
        """Wraps a user's teacher. Of a module a frozen copy is held (:func:`kd.models.own.frozen_copy`), also as ``model``;
        of any other teacher ``model`` is an empty module.
        """
        self.given: Any = given
        if isinstance(given, nn.Module):
            self.given = frozen_copy(given, key)
        self.key = key
        self.arch = type(given).__name__
        self.spec = spec or TeacherSpec(arch=self.arch)
        self.model: nn.Module = nn.Module()
        if isinstance(given, nn.Module):
            self.model = self.given

    def to(
        self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False
    ) -> "OwnTeacher":
        """Moves the user's object, where it has a method ``to``; precision and ``keep`` have no effect."""
        self.device = device
        if hasattr(self.given, "to"):
            self.given.to(device)
        return self

    @annotate("teacher")
    @torch.no_grad()
    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The user's logits ``(N, C, ...)`` in float32, under ``name``; the user's ``answer`` returns them under "".

        Probabilities are turned into logits (:meth:`as_logits`). Features are not requested.

        Raises:
            UserError: the user's ``answer`` fails, or does not return :class:`Answer` with a row of logits a picture.
        """
        with errors_of_user(self.given, "answer", self.key):
            answer = self.given.answer(batch, Wanted(wanted.of(name).logits))
        logits = None
        if isinstance(answer, Answer):
            logits = answer.logits.get(ALL)
        if not isinstance(logits, Tensor) or len(logits) != len(batch["image"]):
            raise UserError(
                f'{self.key}: {self.arch}.answer must give kd.teachers.Answer({{"": logits}}) with a row '
                "for each picture"
            )
        return Answer({name: self.as_logits(logits.float())})

    def identity(self) -> dict[str, Any]:
        """The class's name, and what the user's own ``identity`` returns."""
        with errors_of_user(self.given, "identity", self.key):
            return {"arch": self.arch, **self.given.identity()}
