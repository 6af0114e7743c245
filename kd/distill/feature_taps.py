"""The layers that losses over features read: the student's, and those of one teacher."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from kd.distill.fitting import among
from kd.errors import UserError
from kd.losses import DistillLoss, EachLayer, FeatureLoss, FeatureRegression, LayersLoss
from kd.models import TapSpec
from kd.models.taps import Taps, tap_shapes
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL, Answer, Layer

Read = Callable[[list[str], str], list[Tensor]]  # Gives the student's features, by layers and form


class FeatureTaps:
    """What each loss over features reads, by the loss's name."""

    def __init__(self, taps: Mapping[str, TapSpec], teacher_of: Mapping[str, str]) -> None:
        self._taps, self._teacher_of = dict(taps), dict(teacher_of)
        self._layers: dict[
            str, tuple[list[str], list[Layer]]
        ] = {}  # loss -> the student's, the teacher's
        self._shapes: dict[str, dict[Layer, tuple[int, ...]]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._layers

    def complete(self, losses: Mapping[str, DistillLoss]) -> None:
        """A loss without a tap reads the layers that it names itself."""
        for name in self._taps:
            if name not in losses:
                raise UserError(
                    f"model.taps.{name}: there is no feature loss '{name}'{among(losses)}"
                )
        for name, loss in losses.items():
            default = getattr(loss, "default_tap", None)
            if name not in self._taps and default is None:
                raise UserError(
                    f"model.taps.{name}: the loss {name} needs layers (student, teacher)"
                )
            self._taps.setdefault(name, TapSpec(default or "", default or ""))

    def teacher_of(self, name: str, teacher: RunTeacher) -> RunTeacher:
        """The one teacher that the loss ``name`` reads.

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
        """Finds the layers, and builds a loss for what they give; see :meth:`kd.distill.objective.Objective.bind`."""
        spec, member = self._taps[name], self._teacher_of.get(name, ALL)
        taps.add(spec.student, trial, f"model.taps.{name}.student")
        student_shapes = tap_shapes(student, taps, spec.student, spec.tokens, trial)
        layers, teacher_shapes = self.teacher_of(name, teacher).listen(
            spec.teacher, spec.tokens, f"model.taps.{name}.teacher"
        )
        self._layers[name] = (
            taps.paths(spec.student),
            [(member, layer, spec.tokens) for layer in layers],
        )
        self._shapes[name] = dict(zip(self._layers[name][1], teacher_shapes, strict=True))
        try:
            if isinstance(loss, FeatureLoss) and len(student_shapes) == len(teacher_shapes) == 1:
                loss.build(student_shapes[0], teacher_shapes[0])
                return loss
            several = EachLayer(loss) if isinstance(loss, FeatureLoss) else loss
            several.build(student_shapes, teacher_shapes)
            return several
        except ValueError as error:
            raise UserError(f"model.taps.{name}: {error}") from error

    def shapes(self, names: Iterable[str]) -> dict[Layer, tuple[int, ...]]:
        """The teachers' layers that losses read, with their shapes for two pictures."""
        return {
            layer: shape for name in names for layer, shape in self._shapes.get(name, {}).items()
        }

    def layers_of_student(self, names: Iterable[str]) -> dict[str, tuple[list[str], str]]:
        """The student's layers, and their form, by loss."""
        return {
            name: (self._layers[name][0], self._taps[name].tokens) for name in names if name in self
        }

    def read(self, name: str, features: Read, answer: Answer) -> tuple[list[Tensor], list[Tensor]]:
        """Features for one loss.

        Args:
            name: of the loss.
            features: gives the student's, by layers and form of tokens.
            answer: of the teacher, with its wanted layers.

        Returns:
            The student's and the teacher's features, paired layer by layer.
        """
        layers, keys = self._layers[name]
        return features(layers, self._taps[name].tokens), [answer.features[key] for key in keys]

    def regressions(
        self, losses: Mapping[str, DistillLoss], features: Read, answer: Answer
    ) -> Iterator[tuple[FeatureRegression, Tensor, Tensor]]:
        """Those of the losses that regress a layer, each with what student and teacher gave there for a batch."""
        for name, loss in losses.items():
            parts = list(loss.losses) if isinstance(loss, EachLayer) else [loss]
            if isinstance(parts[0], FeatureRegression):
                student, teacher = self.read(name, features, answer)
                yield from zip(parts, student, teacher, strict=True)
