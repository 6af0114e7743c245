"""Reads the training's health every few steps: gradients, updates, activations, teacher and student side by side."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.callbacks.run_folder import RunFolder
from kd.report.records import Writer
from kd.shards import whole
from kd.taps import layer_paths

LAYERS = 8  # whose activations are looked at, spread evenly over the student


class Health(Callback):
    """Writes ``records/health.jsonl`` on rank 0, a record every ``every`` batches; between them it costs nothing.

    ``grad_norm`` is before clipping; ``update_ratio`` the median over a few weights of ``|w' - w| / |w|`` of one
    optimizer step; ``spread`` the activations' standard deviation and ``dead`` the share of a ReLU's units that never
    fire in the batch; ``teacher_entropy`` of the teacher's answers at the loss's temperature over ``log(C)``;
    ``agreement`` of teacher and student on the training batch; ``loss_shares`` the weighted terms. Of several students
    the first is read, of several teachers likewise.

    Every rank takes part in a reading: gradients and weights may be in shards.

    Args:
        folder: the run's.
        every: batches between two readings.
        activations: module paths or patterns below the student (:class:`kd.taps.TapSpec`) of the layers that ``spread``
            and ``dead`` look at; default: linear layers, convolutions and ReLUs, spread evenly.

    Raises:
        UserError: a pattern that matches no layer.
    """

    def __init__(self, folder: RunFolder, every: int = 50, activations: Sequence[str] | None = None) -> None:
        self.folder, self.every, self.activations = folder, every, activations
        self._writer: Writer | None = None
        self._handles: list[Any] = []
        self._seen: dict[str, Tensor] = {}
        self._spread: dict[str, Tensor] = {}
        self._dead: dict[str, Tensor] = {}
        self._grad_norm: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Finds the layers before anything is written."""
        self._chosen(_first(pl_module).student)

    def _chosen(self, student: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.activations is None:
            return list(_spread_evenly(student))
        paths = layer_paths(student, self.activations, "monitor.activations")
        return [(path, student.get_submodule(path)) for path in paths]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Opens the file; its header counts the classes."""
        if not trainer.is_global_zero:
            return
        assert self.folder.path is not None
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        counts = {split: _class_counts(data.split(split).targets) for split in ("train", "val")}
        header = {"of": "health", "counts": {split: found for split, found in counts.items() if found}}
        self._writer = Writer(self.folder.path / "records" / "health.jsonl", header)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Listens to this batch where it is due."""
        if trainer.fit_loop.epoch_loop.total_batch_idx % self.every:
            return
        first = _first(pl_module)
        self._listen("student", first.student)
        if pl_module.teacher is not None:
            self._listen("teacher", next(iter(pl_module.teacher.members.values())).model)
        for name, layer in self._chosen(first.student):
            self._handles.append(layer.register_forward_hook(lambda _m, _i, out, name=name: self._layer(name, _m, out)))

    def _listen(self, who: str, model: nn.Module) -> None:
        def keep(_module: nn.Module, _inputs: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.ndim >= 2:
                self._seen[who] = out.detach().float()

        self._handles.append(model.register_forward_hook(keep))

    def _layer(self, name: str, layer: nn.Module, out: Any) -> None:
        out = out[0] if isinstance(out, list | tuple) and out else out
        if isinstance(out, Tensor):
            self._spread[name] = out.detach().float().std()
            if isinstance(layer, nn.ReLU):
                units = out.detach().flatten(0, -2) if out.ndim < 4 else out.detach().transpose(0, 1).flatten(1).T
                self._dead[name] = (units <= 0).all(0).float().mean()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Measures the gradient, and keeps a few weights to see how far the step moves them."""
        if not self._handles:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad.float() for p in parameters if p.grad is not None]
        if gradients:
            norms = [whole(norm) for norm in torch._foreach_norm(gradients)]
            self._grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        weights = [p for p in parameters if p.ndim >= 2]
        chosen = weights[:: max(1, len(weights) // LAYERS)][:LAYERS]
        self._before = [(p, p.detach().clone()) for p in chosen]

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Writes the reading."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        record = {"kind": "health", "step": trainer.fit_loop.epoch_loop.total_batch_idx, **self._reading(pl_module)}
        shares = _loss_shares(_first(pl_module))
        if self._writer is not None:
            self._writer.write(record | ({"loss_shares": shares} if shares else {}))
        self._handles, self._before, self._grad_norm = [], [], None
        self._seen, self._spread, self._dead = {}, {}, {}

    @torch.no_grad()
    def _reading(self, pl_module: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._grad_norm is not None:
            found["grad_norm"] = _finite(self._grad_norm)
            ratios = [whole((p.detach() - old).norm()) / whole(old.norm()).clamp_min(1e-12) for p, old in self._before]
            found["update_ratio"] = _finite(torch.stack(ratios).median()) if ratios else None
        if "teacher" in self._seen:
            teacher, student = self._seen["teacher"], self._seen.get("student")
            found["teacher_entropy"] = _finite(_entropy(teacher, _temperature(_first(pl_module))))
            if student is not None and student.shape == teacher.shape:
                found["agreement"] = _finite((student.argmax(1) == teacher.argmax(1).to(student.device)).float().mean())
        found["spread"] = {name: _finite(value) for name, value in self._spread.items()}
        if self._dead:
            found["dead"] = {name: _finite(value) for name, value in self._dead.items()}
        return found

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Closes the file."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Closes the file."""
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _spread_evenly(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Up to :data:`LAYERS` linear and convolution layers, and as many ReLUs."""
    for kinds in ((nn.Linear, nn.Conv2d), (nn.ReLU,)):
        found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
        yield from found[:: math.ceil(len(found) / LAYERS) or 1]


def _class_counts(targets: Any) -> list[int]:
    """Pictures by class, where targets are class ids."""
    with suppress(TypeError, ValueError):
        ids = np.asarray(targets)
        if ids.ndim == 1 and len(ids) and np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0:
            return [int(n) for n in np.bincount(ids)]
    return []


def _first(pl_module: Any) -> Any:
    """The module of the student, or of the first of several."""
    return next(iter(pl_module.named_students().values()))


def _temperature(module: Any) -> float:
    found = [getattr(loss, "temperature", None) for loss in module.distill_losses.values()]
    return next((float(t) for t in found if isinstance(t, int | float)), 1.0)


def _entropy(logits: Tensor, temperature: float) -> Tensor:
    """Mean entropy of ``(N, C, ...)`` logits at a temperature, over its maximum: 0 one-hot, 1 uniform."""
    log_p = (logits / temperature).log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean() / math.log(max(2, logits.shape[1]))


def _loss_shares(module: Any) -> dict[str, float]:
    weights = {name: float(loss.weight) for name, loss in module.distill_losses.items()}
    weights["task"] = float(module.task_loss_weight)
    terms = module.terms
    values = {n: w * abs(float(terms[f"{n}_loss"])) for n, w in weights.items() if f"{n}_loss" in terms}
    total = sum(values.values())
    return {n: round(v / total, 4) for n, v in values.items()} if total and math.isfinite(total) else {}


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
