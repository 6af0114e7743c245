"""A student without a classifier: its output is its features."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kd.data.batch import Batch, real_rows
from kd.data.info import DataInfo
from kd.distill.inherit.families import last_norm
from kd.distill.objective import Objective
from kd.distill.student import Student
from kd.errors import UserError
from kd.models.own import features_of
from kd.models.preprocess import evaluating
from kd.models.taps import Taps
from kd.tasks import Features, Task
from kd.teachers.answer import Answer


class HeadlessStudent(Student):
    """A model that gives features ``(N, D)``, taught by teachers' features and validated by those of the same losses that
    held-out pictures have (:attr:`Objective.measurable`).
    """

    def _make_measures(self) -> None:
        """Makes the metrics of its losses and features, whose width D is that of a trial forward without gradient.

        Raises:
            UserError: the model gives neither features nor maps.
        """
        self._taps_of_final = self.taps
        """On the weights that are validated (:attr:`final`): the average's, where there is one."""
        if self.average is not None:
            layers: list[Any] = [of_loss.student for of_loss in self.objective.layers.values()]
            self._taps_of_final = Taps(self.average.module, layers, self.prepare)
        with torch.no_grad(), evaluating(self.model):
            features = self.answer_in(self._trial())
        if features.ndim != 2:
            raise UserError(
                f"model.student: without a classifier {self.arch} gives numbers of shape {tuple(features.shape)} for "
                "two pictures, but features are (N, D), or maps (N, C, H, W)"
            )
        losses = ["feature_loss"]
        for name in self.objective.measurable:
            losses.append(f"{name}_loss")
        width = features.shape[1]
        self._measures.measure(losses, width, self.data.probed)

    answer_in = staticmethod(features_of)
    """The features ``(N, D)`` in what the model gives; of maps the last, averaged over its places."""

    @staticmethod
    def info_of(task: Task, model: nn.Module) -> DataInfo:
        """Data without classes and labels: none are used. Neither argument is read."""
        return DataInfo([], labels=False)

    def begin(self, pictures: Callable[[int], Tensor] | None) -> str:
        """As :meth:`Student.begin`; then an inherited student's features are centred, and the sample of its losses freed:
        without pictures neither.

        Args:
            pictures: gives so many training pictures, uint8 ``(count, 3, H, W)``; None: there are none.

        Returns:
            The message of :meth:`Student.begin`, or "".
        """
        message = super().begin(pictures)
        if self.start == "inherited" and pictures is not None:
            self._centre(pictures(self.sample_size))
            self.sample_taps = None  # of features that were not centred
        return message

    @torch.no_grad()
    def _centre(self, pictures: Tensor) -> None:
        """Subtracts the features' mean over a sample from the last norm's shift: in cosines it would hide how pictures
        differ. A model whose features are not the output of one norm with a shift (a ResNet, a ViT that pools by attention)
        stays as it is.

        Args:
            pictures: uint8 ``(N, 3, H, W)``.
        """
        bias = getattr(last_norm(self.model), "bias", None)
        if bias is None:
            return
        with evaluating(self.model):
            features = []
            for part in pictures.split(64):
                features.append(self.answer_in(self.model(self.prepare(part))))
        bias -= torch.cat(features).mean(dim=0)
        if self.average is not None:
            self.average.set(self.model)

    @property
    def _measures(self) -> Features:
        """The task, which holds the metrics."""
        assert isinstance(self.task, Features)
        return self.task

    @property
    def classes(self) -> list[str]:
        """No class names."""
        return []

    @property
    def classifies(self) -> bool:
        """False: there are no logits."""
        return False

    @property
    def is_measured(self) -> bool:
        """True: its losses on held-out pictures need no labels."""
        return True

    def measure(self, batch: Batch, answer: Answer) -> None:
        """Adds the losses of a validation batch to the metrics; padding is left out.

        Called on all ranks, also without pictures.

        Args:
            batch: on the student's device.
            answer: the teacher's features of the same pictures, in the batch's order, padding among them.
        """
        with self._taps_of_final as tapped:
            outputs = self.logits(batch["image"])
        real = real_rows(batch)
        count = len(outputs)
        outputs = outputs[real]
        if not len(outputs):
            self._measures.held_out.update(outputs, {})
            return

        def read(layers: list[str], form: str) -> list[Tensor]:
            features = self._taps_of_final.read(tapped, layers, form)
            return [_rows(each, real, count) for each in features]

        teacher_features = {}
        for layer, features in answer.features.items():
            teacher_features[layer] = _rows(features, real, count)
        losses = self.objective.held_out(read, Answer(features=teacher_features), len(outputs))
        self._measures.held_out.update(outputs, losses)


def student_of(objective: Objective) -> type[Student]:
    """The class of a student that learns an objective: :class:`HeadlessStudent` where its task reads no labels."""
    return Student if objective.task.labels else HeadlessStudent


def _rows(x: Tensor, real: slice | Tensor, count: int) -> Tensor:
    """Of a layer's output what belongs to the ``real`` of ``count`` pictures: windows are several rows a picture.

    Args:
        x: ``(count * W, ...)``, a picture's W rows one after another; W is 1 but for layers that work on windows.
        real: which of the pictures are no padding.
        count: of all pictures of the batch.
    """
    return x.unflatten(0, (count, -1))[real].flatten(0, 1)
