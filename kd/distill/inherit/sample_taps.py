"""What losses over features read of both models while a start is fitted: they need no second pass over the sample.

A fit runs the teacher as it is, and each of the student's layers once it has its weights. Taps on either model catch
what their layers give in just these runs; in all others (a layer that is not fitted yet, a teacher that is cut into
another grid of patches) they catch nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from kd.models.taps import Taps


class SampleTaps:
    """Outputs of tapped layers on the sample, part by part.

    Args:
        taps: by the model that they are on; other models are not read.
        teacher: the one of these whose layers the others take; None without models.
    """

    def __init__(self, taps: Mapping[nn.Module, Taps], teacher: nn.Module | None = None) -> None:
        self.teacher = teacher
        self._taps = dict(taps)
        self._parts: dict[nn.Module, dict[int, dict[str, Tensor]]] = {model: {} for model in taps}

    def reads(self, model: nn.Module) -> bool:
        """Whether there are taps on a model."""
        return model in self._taps

    def on(self, model: nn.Module | None) -> Taps:
        """The taps on a model; raises a KeyError where it has none."""
        return self._taps[model]  # type: ignore[index]

    @contextmanager
    def of_part(self, model: nn.Module, number: int) -> Iterator[None]:
        """Inside, a model's layers run on a part of the sample as they will in training; outputs are kept on the CPU.

        A part may run in several blocks, some layers in each; of a layer that runs again the last output counts. A model
        without taps just runs.

        Args:
            model: student or teacher.
            number: of the part, from 0.
        """
        if not self.reads(model):
            yield
            return
        caught = self._parts[model].setdefault(number, {})
        with self._taps[model].into(caught):
            yield
        for path, output in caught.items():
            caught[path] = output.cpu()

    def caught(self, model: nn.Module | None) -> list[dict[str, Tensor]]:
        """What a model's layers gave on each part of the sample, in order, by path; [] of a model without taps, or that has
        not run inside :meth:`of_part`.
        """
        parts = self._parts.get(model, {})  # type: ignore[arg-type]
        return [parts[number] for number in sorted(parts)]
