"""Reads the training's health every few steps: gradients, updates, activations, teacher and student side by side."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.callbacks.hooks import Recording, after_step
from kd.monitor.watched import Watched, float_logits
from kd.processes import whole
from kd.report.records import Writer
from kd.storage.elsewhere import Json

ENDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0, 1),
    nn.Hardsigmoid: (0, 1),
    nn.Tanh: (-1, 1),
}
END = 0.01  # of the range of such a layer counts as its end
T = TypeVar("T")
LAYERS = 8  # of each kind, whose activations are read, spread evenly over the model; and weights, for ``update_ratio``


class Health(Recording):
    """Writes ``records/health.jsonl`` on rank 0, a record every ``every`` batches; between them it is free.

    ``grad_norm`` is before clipping; ``update_ratio`` the median over a few weights of ``|w' - w| / |w|`` of one
    optimizer step; ``spread`` the activations' standard deviation and ``dead`` the share of a ReLU's units that never
    fire in the batch; ``teacher_entropy`` of the teacher's answers at the loss's temperature over its maximum;
    ``agreement`` of teacher and student on the training batch; ``loss_shares`` the weighted terms; ``zeros`` the share
    of an activation's values that are 0, ``saturated`` of a sigmoid's or tanh's at its ends; ``unchanged`` those of the
    few weights that the step left as they were; ``inputs`` what the pictures are like. Of several teachers the first is
    read. Every rank takes part: gradients and weights may be in shards.
    """

    def __init__(
        self, watched: Watched, every: int = 50, activations: Sequence[str] | None = None
    ) -> None:
        """Stores the settings.

        Args:
            watched: the training.
            every: batches from one reading to the next; 0: none.
            activations: patterns of the layers that are read; None: some, spread evenly over the model.
        """
        self.watched = watched
        self.every = every
        self.activations = activations
        self._reading: _Reading | None = None
        self._due = False  # the next batch that ends with an optimizer step is read
        self._eager = False  # a compiled model runs as it is written, for the batch that is read
        self.newest: Json = {}
        """The record that was made last, on every rank."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tries the patterns of ``activations``, so that a wrong one is reported before anything is written.

        Each reading finds its layers anew.

        Raises:
            UserError: a pattern of ``monitor.activations`` that matches no layer.
        """
        model = self.watched.model(trainer)
        if self.activations is not None and model is not None:
            self._chosen_layers(model)

    def _chosen_layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The layers whose activations are read, with their paths in the model; a UserError for a pattern without any."""
        if self.activations is None:
            return list(_layers_to_read(model))
        from kd.models.taps import layer_paths  # imports timm, which nothing else here needs

        paths = layer_paths(model, self.activations, "monitor.activations")
        return [(path, model.get_submodule(path)) for path in paths]

    def _write(self, trainer: Trainer, record: Json) -> None:
        """Writes a record on rank 0; opens the file with the first reading. Its header counts the classes."""
        if not trainer.is_global_zero:
            return
        if self._writer is None:
            header = {"of": "health", "counts": self.watched.class_counts(trainer)}
            file = self.watched.folder(trainer) / "records" / "health.jsonl"
            self._writer = Writer(file, header)
        self._writer.write(record)

    def _reads(self, trainer: Trainer, batch_idx: int) -> bool:
        """Whether a batch is read: of each :attr:`every` batches the first that ends with an optimizer step.

        Where gradients are accumulated most batches end without one, and have neither whole gradients nor new weights. It
        must be called for each batch: it remembers that a reading is due.
        """
        if not self.every:
            return False
        if trainer.fit_loop.epoch_loop.total_batch_idx % self.every == 0:
            self._due = True
        if not (self._due and after_step(trainer, batch_idx)):
            return False
        self._due = False
        return True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hooks into the model for a batch that is due; a compiled one runs eagerly in it.

        On every rank: which batch is due follows from its number alone.
        """
        model = self.watched.model(trainer) if self._reads(trainer, batch_idx) else None
        if model is None:
            return
        self._eager = is_compiled(model)
        if self._eager:  # hooks don't run in a compiled graph, or make it another one
            torch.compiler.set_stance("force_eager")
        self._reading = _Reading(model, self.watched.trained(trainer), self._chosen_layers(model))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the gradients of a batch that is read, and keeps a few weights to see how far the step moves them.

        Lightning calls it before gradients are clipped.
        """
        if self._reading is not None:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            self._reading.before_step(parameters)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Writes the reading of a batch that was hooked: a record of kind ``health``, which reports read.

        The record becomes :attr:`newest` on every rank. All ranks must call it; the host waits for the device here.
        """
        reading = self._reading
        if reading is None:
            return
        self._stop_listening()
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        record: Json = {"kind": "health", "step": step}
        pictures = self.watched.pictures(batch)
        if pictures is not None:
            record["inputs"] = _inputs(pictures)
        with torch.no_grad():
            scalars = self.watched.answers(trainer, outputs, reading.answer) | reading.scalars()
        numbers = _on_host(scalars)
        shares = self.watched.loss_shares(trainer, numbers.pop("terms"))
        record |= reading.record(numbers)
        if shares:
            record["loss_shares"] = shares
        self.newest = record
        self._write(trainer, record)
        self._reading = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the reading of a batch that was not trained: the module's ``on_train_batch_start`` returned -1.

        The next batch that ends with an optimizer step is read instead.
        """
        if self._reading is not None:
            self._stop_listening()
            self._reading = None
            self._due = True

    def _stop_listening(self) -> None:
        """Removes the hooks, and lets a compiled model run compiled again."""
        if self._eager:
            torch.compiler.set_stance("default")
            self._eager = False
        if self._reading is not None:
            self._reading.stop_listening()

    def close(self, trainer: Trainer) -> None:
        """Removes the hooks and closes the file."""
        self._stop_listening()
        self._reading = None
        super().close(trainer)


def is_compiled(model: nn.Module) -> bool:
    """Whether a model, or a part of it, was compiled."""
    for module in model.modules():
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            return True
    return False


class _Reading:
    """What one batch shows of a model: hooks note its outputs, the optimizer's step its gradients and weights."""

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], layers: list[tuple[str, nn.Module]]
    ) -> None:
        """Hooks a model for one batch; :meth:`stop_listening` removes the hooks.

        Args:
            model: the student.
            trained: its trained parameters.
            layers: path and module of the layers whose activations are read.
        """
        self.answer: Tensor | None = None
        """The model's logits ``(N, C, ...)``; None where it gave none."""
        self._trained = {id(parameter) for parameter in trained}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers: dict[str, dict[str, Tensor]] = {"spread": {}, "zeros": {}}
        self._grad_norm: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        """Weights, and copies of before the step."""
        self._handles = [model.register_forward_hook(self._keep_output)]
        for path, layer in layers:
            note = partial(self._note_layer, path)
            # first of the layer's hooks: before one of them scales its output
            handle = layer.register_forward_hook(note, prepend=True)
            self._handles.append(handle)

    def _keep_output(self, _module: nn.Module, _inputs: object, out: object) -> None:
        """Hook: keeps the logits of the model's newest call."""
        self.answer = float_logits(out)

    def _note_layer(self, path: str, layer: nn.Module, _inputs: object, out: object) -> None:
        """Hook: notes the statistics of a layer's output ``out`` under its ``path``; of several outputs the first is
        read.
        """
        if isinstance(out, list | tuple) and out:
            out = out[0]
        if not isinstance(out, Tensor):
            return
        output = out.detach()
        statistics = {
            "spread": output.float().std(),
            "zeros": (output == 0).float().mean(),
        }
        if isinstance(layer, tuple(ENDS)):
            low, high = ENDS[type(layer)]
            near = END * (high - low)
            at_an_end = (output < low + near) | (output > high - near)
            statistics["saturated"] = at_an_end.float().mean()
        if isinstance(layer, nn.ReLU):
            # Units are channels: the last dimension of (N, T, D), the second of maps (N, C, H, W).
            if output.ndim < 4:
                units = output.flatten(0, -2)  # (N T, D)
            else:
                units = output.transpose(0, 1).flatten(1).T  # (N H W, C)
            statistics["dead"] = (units <= 0).all(0).float().mean()
        for name, value in statistics.items():
            self._layers.setdefault(name, {})[path] = value

    def stop_listening(self) -> None:
        """Removes this reading's hooks; safe to call again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self, trained: Sequence[Tensor]) -> None:
        """Takes the norm of this model's gradients, and copies of a few of its weights.

        ``trained``: all parameters of the optimizer, of which other models' are left out. All ranks must call it, as
        gradients may be in shards.
        """
        parameters = [parameter for parameter in trained if id(parameter) in self._trained]

        # The norm of all gradients together: the norm of the norms.
        gradients = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append(parameter.grad.float())
        if gradients:
            norms = torch._foreach_norm(gradients)
            whole_norms = [whole(norm) for norm in norms]
            self._grad_norm = torch.linalg.vector_norm(torch.stack(whole_norms))

        # Copies of up to LAYERS matrices, spread evenly: how far the step moves them.
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        self._before = []
        for matrix in _spread_evenly(matrices):
            copy = matrix.detach().clone()
            self._before.append((matrix, copy))

    def scalars(self) -> Json:
        """The reading's scalars, still on the device; all ranks must call this, as weights may be in shards.

        Returns:
            ``spread``, ``zeros``, ``saturated`` and ``dead`` by the layer's path; after an optimizer's step also
            ``grad_norm``, ``ratios`` of the copied weights, and ``update_ratio``, their median (None without any).
        """
        scalars: Json = {**self._layers}
        if self._grad_norm is None:
            return scalars
        ratios: list[Tensor] = []  # |w' - w| / |w| of each kept weight
        for weight, before in self._before:
            change = whole((weight.detach() - before).norm())
            ratios.append(change / whole(before.norm()).clamp_min(1e-12))
        scalars["grad_norm"] = self._grad_norm
        scalars["ratios"] = ratios
        scalars["update_ratio"] = torch.stack(ratios).median() if ratios else None
        return scalars

    def record(self, numbers: Json) -> Json:
        """The record: ``numbers``, changed in place, with ``unchanged`` (names of weights) in the place of ``ratios``.

        Args:
            numbers: :meth:`scalars` and the answers' scalars as numbers of the host; NaN and infinity become None.
        """
        ratios = numbers.pop("ratios", [])
        unchanged: list[str] = []
        for (weight, _), ratio in zip(self._before, ratios, strict=False):
            if ratio == 0:
                unchanged.append(self._names.get(id(weight), "a weight of a loss"))
        if self._grad_norm is not None:
            numbers["unchanged"] = unchanged
        return apply_to_collection(numbers, float, _finite)


def _on_host(tree: Json) -> Json:
    """The tree with numbers in the place of its tensors of one number, by a single copy: each copy waits for the device."""
    leaves: list[Tensor] = []
    apply_to_collection(tree, Tensor, leaves.append)
    if not leaves:
        return tree
    numbers = iter(torch.stack([leaf.double() for leaf in leaves]).tolist())
    return apply_to_collection(tree, Tensor, lambda _: next(numbers))


def _layers_to_read(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Up to :data:`LAYERS` linear and convolution layers, as many ReLUs, and as many of :data:`ENDS`, each with its path."""
    matrices = (nn.Linear, nn.Conv2d)
    sigmoids = tuple(ENDS)
    for kinds in (matrices, (nn.ReLU,), sigmoids):
        layers = []
        for name, layer in model.named_modules():
            if isinstance(layer, kinds):
                layers.append((name, layer))
        yield from _spread_evenly(layers)


def _spread_evenly(items: list[T]) -> list[T]:
    """At most :data:`LAYERS` of the items, each as far from the next, from the first on."""
    every = math.ceil(len(items) / LAYERS) or 1
    return items[::every]


def _inputs(images: Tensor) -> Json:
    """What the pictures ``(N, C, H, W)`` of a batch are like, for the key ``inputs`` of a health record.

    Returns:
        ``constant``: the share of pictures with one value everywhere. ``duplicated``: the share that repeat another one of
        the batch, which itself does not count, decided by some thousand values of each. ``low`` and ``high``: the smallest
        and largest value of all. ``bytes``: whether they are whole numbers (0 to 255), not prepared floats.
    """
    flat = images.detach().flatten(1)
    low = flat.amin(1)
    high = flat.amax(1)
    some = flat[:, :: max(1, flat.shape[1] // 1000)]
    numbers = torch.stack([(low == high).double().mean(), low.min(), high.max()]).tolist()
    constant, least, most = (round(number, 4) for number in numbers)
    return {
        "constant": constant,
        "duplicated": round(1 - len(some.unique(dim=0)) / len(some), 4),
        "low": least,
        "high": most,
        "bytes": not images.is_floating_point(),
    }


def _finite(number: float) -> float | None:
    """A number rounded to six significant digits; None for NaN and infinity, which JSON does not have."""
    if math.isfinite(number):
        return float(f"{number:.6g}")
    return None
