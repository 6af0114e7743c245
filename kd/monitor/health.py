"""Reads the training's health every few steps: gradients, updates, activations, teacher and student side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from kd.callbacks.context import RunContext, output_of
from kd.callbacks.hooks import Recording
from kd.data.batch import Batch, Target
from kd.distill.objective import Objective
from kd.distill.student import Student
from kd.models.sharding import whole
from kd.models.taps import layer_paths
from kd.report.records import Writer
from kd.teachers.answer import ALL

ENDS: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0, 1),
    nn.Hardsigmoid: (0, 1),
    nn.Tanh: (-1, 1),
}
END = 0.01  # of the range of such a layer counts as its end
LAYERS = 8  # whose activations are looked at, spread evenly over the student


class Health(Recording):
    """Writes ``records/health.jsonl`` on rank 0, a record a student every ``every`` batches; between them it is free.

    ``grad_norm`` is before clipping; ``update_ratio`` the median over a few weights of ``|w' - w| / |w|`` of one
    optimizer step; ``spread`` the activations' standard deviation and ``dead`` the share of a ReLU's units that never
    fire in the batch; ``teacher_entropy`` of the teacher's answers at the loss's temperature over its maximum;
    ``agreement`` of teacher and student on the training batch; ``loss_shares`` the weighted terms; ``zeros`` the share
    of an activation's values that are 0, ``saturated`` of a sigmoid's or tanh's at its ends; ``unchanged`` the weights
    that the step left as they were; ``inputs`` what the pictures are like. Of several teachers the first is read. Every
    rank takes part: gradients and weights may be in shards.
    """

    def __init__(self, every: int = 50, activations: Sequence[str] | None = None) -> None:
        self.every, self.activations = every, activations
        self._readings: list[_Reading] = []
        self._eager = False  # a compiled student runs as it is written, for the batch that is read
        self.newest: dict[str, dict[str, Any]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the layers that are read, so that a wrong pattern is reported before anything is written."""
        for student in RunContext.of(trainer).students.named().values():
            self._chosen(student.model)

    def _chosen(self, student: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.activations is None:
            return list(_spread_evenly(student))
        paths = layer_paths(student, self.activations, "monitor.activations")
        return [(path, student.get_submodule(path)) for path in paths]

    def _write(self, run: RunContext, record: dict[str, Any]) -> None:
        """On rank 0; opens the file with the first reading. Its header counts the classes."""
        if not run.trainer.is_global_zero:
            return
        if self._writer is None:
            counts = {
                split: _class_counts(run.data.split(split).targets) for split in ("train", "val")
            }
            header = {
                "of": "health",
                "counts": {split: found for split, found in counts.items() if found},
            }
            self._writer = Writer(run.folder / "records" / "health.jsonl", header)
        self._writer.write(record)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Hooks into the students for a batch that is due; compiled models run eagerly in it."""
        run = RunContext.of(trainer)
        if not self.every or trainer.fit_loop.epoch_loop.total_batch_idx % self.every:
            return
        self._eager = any(
            s.model._compiled_call_impl is not None for s in run.students.named().values()
        )
        if self._eager:  # hooks don't run in a compiled graph, or make it another one
            torch.compiler.set_stance("force_eager")
        self._readings = [
            _Reading(name, student, self._chosen(student.model))
            for name, student in run.students.named().items()
        ]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the gradients, and keeps a few weights to see how far the step moves them."""
        for reading in self._readings:
            reading.before_step([p for group in optimizer.param_groups for p in group["params"]])

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Writes the reading of a batch that was hooked."""
        if not self._readings:
            return
        run = RunContext.of(trainer)
        self._stop_listening()
        out, inputs = output_of(outputs), _inputs(batch["image"])
        logits = out["answer"].logits
        teacher = _logits(next((x for name, x in logits.items() if name), None))
        teacher = _logits(logits.get(ALL)) if teacher is None else teacher
        for reading in self._readings:
            record = {
                "kind": "health",
                "step": trainer.fit_loop.epoch_loop.total_batch_idx,
                "inputs": inputs,
            }
            record |= {"student": reading.name} if reading.name else {}
            record |= reading.values(teacher, out["terms"][reading.name])
            self.newest[reading.name] = record
            self._write(run, record)
        self._readings = []

    def _stop_listening(self) -> None:
        if self._eager:
            torch.compiler.set_stance("default")
            self._eager = False
        for reading in self._readings:
            reading.stop_listening()

    def close(self, trainer: Trainer) -> None:
        """Removes the hooks and closes the file."""
        self._stop_listening()
        self._readings = []
        super().close(trainer)


class _Reading:
    def __init__(self, name: str, student: Student, layers: list[tuple[str, nn.Module]]) -> None:
        self.name, self.student = name, student
        self._student: Tensor | None = None
        self._layers: dict[str, dict[str, Tensor]] = {"spread": {}, "zeros": {}}
        self._names = {id(p): name for name, p in student.model.named_parameters()}
        self._grad_norm: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        self._handles = [student.model.register_forward_hook(self._keep_output)]
        for path, layer in layers:
            note = partial(self._layer, path)
            self._handles.append(
                layer.register_forward_hook(note, prepend=True)
            )  # before its output is scaled

    def _keep_output(self, _module: nn.Module, _inputs: object, out: object) -> None:
        self._student = _logits(out)

    def _layer(self, path: str, layer: nn.Module, _inputs: object, out: object) -> None:
        """Notes the statistics of a layer's output; of several outputs the first is read."""
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
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_step(self, trained: Sequence[Tensor]) -> None:
        """Reads the gradients of those of the ``trained`` parameters that are this student's."""
        of_student = {id(parameter) for parameter in self.student.parameters()}
        parameters = [parameter for parameter in trained if id(parameter) in of_student]

        # The norm of all gradients together: the norm of the norms.
        gradients = [p.grad.float() for p in parameters if p.grad is not None]
        if gradients:
            norms = [whole(norm) for norm in torch._foreach_norm(gradients)]
            self._grad_norm = torch.linalg.vector_norm(torch.stack(norms))

        # Copies of up to LAYERS matrices, spread evenly: how far the step moves them.
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        every = max(1, len(matrices) // LAYERS)
        chosen = matrices[::every][:LAYERS]
        self._before = [(matrix, matrix.detach().clone()) for matrix in chosen]

    @torch.no_grad()
    def values(self, teacher: Tensor | None, terms: Mapping[str, Tensor]) -> dict[str, Any]:
        read: dict[str, Any] = {"terms": dict(terms), "ratios": []}
        if self._grad_norm is not None:
            read["grad_norm"] = self._grad_norm
            ratios = [
                whole((p.detach() - old).norm()) / whole(old.norm()).clamp_min(1e-12)
                for p, old in self._before
            ]
            read |= {
                "ratios": ratios,
                "update_ratio": torch.stack(ratios).median() if ratios else None,
            }
        if teacher is not None:
            task = self.student.task
            entropy = task.entropy(self.student.objective.softened(teacher))
            read |= {"teacher_entropy": entropy} if entropy is not None else {}
            if self._student is not None and self._student.shape == teacher.shape:
                read["agreement"] = (
                    task.same(self._student, teacher.to(self._student.device)).float().mean()
                )
        read = _on_host(read | self._layers)
        shares = _loss_shares(self.student.objective, read.pop("terms"))
        still = [
            p for (p, _), ratio in zip(self._before, read.pop("ratios"), strict=False) if ratio == 0
        ]
        if self._grad_norm is not None:
            read["unchanged"] = [self._names.get(id(p), "a weight of a loss") for p in still]
        return apply_to_collection(read, float, _finite) | (
            {"loss_shares": shares} if shares else {}
        )


def _on_host(tree: dict[str, Any]) -> dict[str, Any]:
    """Numbers in the place of all scalars of a tree, by one copy: each one waits for the device."""
    leaves: list[Tensor] = []
    apply_to_collection(tree, Tensor, leaves.append)
    numbers = iter(torch.stack([leaf.double() for leaf in leaves]).tolist())
    return apply_to_collection(tree, Tensor, lambda _: next(numbers))


def _logits(out: object) -> Tensor | None:
    """What a classifier answered; nothing of a cache that keeps only the largest."""
    return out.detach().float() if isinstance(out, Tensor) and out.ndim >= 2 else None


def _spread_evenly(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Up to :data:`LAYERS` linear and convolution layers, as many ReLUs, and as many sigmoids."""
    for kinds in ((nn.Linear, nn.Conv2d), (nn.ReLU,), tuple(ENDS)):
        found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
        yield from found[:: math.ceil(len(found) / LAYERS) or 1]


def _inputs(images: Tensor) -> dict[str, Any]:
    """What the pictures ``(N, 3, H, W)`` of a batch are like; a thousand values of each decide which are equal."""
    flat = images.detach().flatten(1)
    low, high = flat.amin(1), flat.amax(1)
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


def _class_counts(targets: Sequence[Target]) -> list[int]:
    with suppress(TypeError, ValueError):
        ids = np.asarray(targets)
        if ids.ndim == 1 and len(ids) and np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0:
            return [int(n) for n in np.bincount(ids)]
    return []


def _loss_shares(objective: Objective, terms: Mapping[str, float]) -> dict[str, float]:
    weights = {name: float(objective.weight_of(name)) for name in objective.losses}
    weights["task"] = float(objective.task_loss_weight)
    values = {n: w * abs(terms[f"{n}_loss"]) for n, w in weights.items() if f"{n}_loss" in terms}
    total = sum(values.values())
    return (
        {n: round(v / total, 4) for n, v in values.items()}
        if total and math.isfinite(total)
        else {}
    )


def _finite(number: float) -> float | None:
    return float(f"{number:.6g}") if math.isfinite(number) else None
