"""The layers that losses over features read: the student's, and those of one teacher."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from kd.distill.fitting import among
from kd.errors import UserError
from kd.losses import DistillLoss, EachLayer, FeatureLoss, FeatureRegression, LayersLoss
from kd.models import TapSpec
from kd.models.taps import Taps, tap_shapes
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Layer

Read = Callable[[list[str], str], list[Tensor]]
"""Gives the student's features, one tensor for each path, by the layers' paths and the form of tokens (``patch``,
``class``, ``all``)."""


class _Layers(NamedTuple):
    """The layers that one loss reads."""

    student: list[str]
    """Their paths in the student."""
    tokens: str
    """The form in which they are read: ``patch``, ``class`` or ``all`` tokens; maps have none."""
    teacher: list[Layer]
    """The teacher's, each as (name of the teacher, path, form of tokens)."""
    teacher_shapes: list[tuple[int, ...]]
    """Of the teacher's layers, for two pictures."""


class FeatureTaps:
    """What each loss over features reads, by the loss's name.

    Args:
        taps: the layers of both models, by loss.
        teacher_of: the one of several teachers that a loss reads, by loss.
    """

    def __init__(self, taps: Mapping[str, TapSpec], teacher_of: Mapping[str, str]) -> None:
        """Stores the taps; the arguments are the class's. Layers are found later, when each loss is built."""
        self._taps = dict(taps)
        self._teacher_of = dict(teacher_of)
        self._layers: dict[str, _Layers] = {}
        """By loss, set when it is built."""

    def __contains__(self, name: object) -> bool:
        """Whether a loss of that name was built."""
        return name in self._layers

    def complete(self, losses: Mapping[str, DistillLoss]) -> None:
        """Gives each loss without a tap the layer that it names itself (``default_tap``), in both models.

        Args:
            losses: those over features, by name, also those of weight 0.

        Raises:
            UserError: a tap for a loss that does not exist, or a loss that neither has a tap nor names a layer.
        """
        for name in self._taps:
            if name not in losses:
                raise UserError(
                    f"model.taps.{name}: feature loss '{name}' not found{among(losses)}"
                )
        for name, loss in losses.items():
            default = getattr(loss, "default_tap", None)
            if name not in self._taps and default is None:
                raise UserError(
                    f"model.taps.{name}: the loss {name} needs layers (student, teacher)"
                )
            self._taps.setdefault(name, TapSpec(default or "", default or ""))

    def teacher_of(self, name: str, teacher: RunTeacher) -> RunTeacher:
        """The one teacher that the loss ``name`` reads: by ``model.teacher_of``, or the run's only one.

        Args:
            name: of the loss.
            teacher: of the run, one or several.

        Raises:
            UserError: several teachers, and the loss names none.
        """
        member = self._teacher_of.get(name, ALL)
        if member not in teacher.members:
            raise UserError(
                f"model.teacher_of.{name}: a feature loss reads one teacher, name it"
                f"{among(teacher.members)}"
            )
        return teacher.members[member]

    def build(
        self,
        name: str,
        loss: FeatureLoss | LayersLoss,
        teacher: RunTeacher,
        student: nn.Module,
        taps: Taps,
        trial: Callable[[], Any],
    ) -> DistillLoss:
        """Finds a loss's layers in both models, and builds it for the shapes that these give.

        Args:
            name: of the loss.
            loss: reads one layer, or several; it gets its parameters here.
            teacher: the run's; its layers are tapped, too.
            student: the student's model.
            taps: on the student's model; the layers are added.
            trial: runs the student on two black pictures.

        Returns:
            The loss; of a loss over one layer that has several, an :class:`EachLayer` with a copy for each pair of layers.

        Raises:
            UserError: layers that do not exist or that the loss can't compare, or several teachers of which it names none.
        """
        spec = self._taps[name]
        member = self._teacher_of.get(name, ALL)
        key = f"model.taps.{name}"
        taps.add(spec.student, trial, f"{key}.student")
        student_shapes = tap_shapes(student, taps, spec.student, spec.tokens, trial)
        paths, teacher_shapes = self.teacher_of(name, teacher).listen(
            spec.teacher, spec.tokens, f"{key}.teacher"
        )
        self._layers[name] = _Layers(
            student=taps.paths(spec.student),
            tokens=spec.tokens,
            teacher=[(member, path, spec.tokens) for path in paths],
            teacher_shapes=teacher_shapes,
        )
        try:
            return _built(loss, student_shapes, teacher_shapes)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error

    def shapes(self, names: Iterable[str]) -> dict[Layer, tuple[int, ...]]:
        """The teachers' layers that losses read, with their shapes for two pictures.

        Args:
            names: losses; those that read no layer are left out.
        """
        shapes: dict[Layer, tuple[int, ...]] = {}
        for name in names:
            if name in self:
                layers = self._layers[name]
                shapes.update(zip(layers.teacher, layers.teacher_shapes, strict=True))
        return shapes

    def layers_of_student(self, names: Iterable[str]) -> dict[str, tuple[list[str], str]]:
        """By loss: the paths of the student's layers that it reads, and which tokens are read (``patch``, ``class``,
        ``all``).

        Args:
            names: losses; those that read no layer are left out.
        """
        layers: dict[str, tuple[list[str], str]] = {}
        for name in names:
            if name in self:
                of_loss = self._layers[name]
                layers[name] = of_loss.student, of_loss.tokens
        return layers

    def read(self, name: str, features: Read, answer: Answer) -> tuple[list[Tensor], list[Tensor]]:
        """Features of a batch for one loss.

        Args:
            name: of the loss.
            features: gives the student's, by layers and form of tokens; called once.
            answer: of the teacher, with its wanted layers.

        Returns:
            The student's and the teacher's features, paired layer by layer; each is a map ``(N, C, H, W)``, tokens
            ``(N, L, D)`` or vectors ``(N, D)``, as :meth:`kd.models.taps.Taps.read` gives them.
        """
        layers = self._layers[name]
        student_features = features(layers.student, layers.tokens)
        teacher_features = []
        for layer in layers.teacher:
            teacher_features.append(answer.features[layer])
        return student_features, teacher_features

    def regressions(
        self, losses: Mapping[str, DistillLoss], features: Read, answer: Answer
    ) -> Iterator[tuple[FeatureRegression, Tensor, Tensor]]:
        """Those of the losses that regress a layer, each with what student and teacher gave there for a batch.

        Args:
            losses: by name.
            features: gives the student's, by layers and form of tokens.
            answer: of the teacher to the same pictures.

        Yields:
            The loss of one layer (of a loss over several layers one after another), the student's features there, and
            the teacher's.
        """
        for name, loss in losses.items():
            if isinstance(loss, EachLayer):
                of_each_layer = list(loss.losses)
            else:
                of_each_layer = [loss]
            if isinstance(of_each_layer[0], FeatureRegression):
                student, teacher = self.read(name, features, answer)
                yield from zip(of_each_layer, student, teacher, strict=True)


def _built(
    loss: FeatureLoss | LayersLoss,
    student_shapes: list[tuple[int, ...]],
    teacher_shapes: list[tuple[int, ...]],
) -> DistillLoss:
    """A loss built for the shapes of its layers; raises a ValueError where it can't compare them.

    Args:
        loss: over one pair of layers, or over several.
        student_shapes: of the student's layers for two pictures: ``(2, C, H, W)``, ``(2, L, D)`` or ``(2, D)`` each.
        teacher_shapes: of the teacher's, likewise.

    Returns:
        The loss itself, changed in place; of a loss over one layer that has several pairs an :class:`EachLayer` of copies.
    """
    if isinstance(loss, FeatureLoss) and len(student_shapes) == len(teacher_shapes) == 1:
        loss.build(student_shapes[0], teacher_shapes[0])
        return loss
    several = EachLayer(loss) if isinstance(loss, FeatureLoss) else loss
    several.build(student_shapes, teacher_shapes)
    return several
