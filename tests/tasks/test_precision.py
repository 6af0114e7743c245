"""Half precision throughout a run (``bf16-true``) changes no metric: sums, weights and scales keep their type."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric, R2Score

import kd
import kd.callbacks.class_order  # its metric is among the subclasses below
from kd.tasks import Classification, Features, MultiLabel, Regression, Segmentation, Task
from kd.tasks import __all__ as names
from kd.tasks.base import ExactMetric, KeepsDtype
from tests._helpers import ROOT

COUNT = 2000
CASTS: dict[str, Callable[[torch.nn.Module], object]] = {
    "to": lambda module: module.to(torch.bfloat16),
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
}


class OfTheUser(Task):
    """A task of a user's own with torchmetrics' sums."""

    def build(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.r2 = R2Score()
        self.register_buffer("factor", torch.tensor(1.0009765625))

    def update(self, logits: Tensor, target: Tensor, teacher_answer: Tensor | None) -> None:
        self.r2.update(self.factor * logits[:, 0].float(), target[:, 0])


def _ids(classes: int) -> Tensor:
    return torch.arange(COUNT) % classes


def _weighted(task: Classification | Segmentation) -> Task:
    task.settle(3, 255 if isinstance(task, Segmentation) else None)
    task.weigh(["a", "b", "c"], None)
    return task


def _numbers(task: Task) -> Task:
    task.settle(2)
    task.scale([550.0, 3.0], [86.3, 0.7])
    return task


def _features() -> Features:
    task = Features()
    task.measure(["feature_loss"], 8, probed=False)
    return task


def _make(name: str) -> tuple[Task, list[tuple[Tensor, Tensor]]]:
    """A task, and batches of 2,000 answers and targets."""
    torch.manual_seed(0)
    if name == "Features":
        return _features(), [(x, torch.zeros(0)) for x in torch.randn(COUNT, 8).split(250)]
    if name in ("Regression", "OfTheUser"):
        target = torch.tensor([550.0, 3.0]) + torch.tensor([86.3, 0.7]) * torch.randn(COUNT, 2)
        answer = target + torch.tensor([30.1, 0.3]) * torch.randn(COUNT, 2)
        task = _numbers(Regression() if name == "Regression" else OfTheUser())
        return task, list(zip(answer.split(250), target.split(250), strict=True))
    if name == "MultiLabel":
        multi = MultiLabel(3)
        multi.settle(3)
        target = (torch.rand(COUNT, 3) < 0.3).float()
        return multi, list(
            zip((target + torch.randn(COUNT, 3)).split(250), target.split(250), strict=True)
        )
    weights = [1.1, 2.3, 0.7]
    dense = name == "Segmentation"
    task = _weighted(
        Segmentation(3, 255, weights) if dense else Classification(3, class_weights=weights)
    )
    shape = (3, 2, 2) if dense else (3,)
    target = _ids(3)[:, None, None].repeat(1, 2, 2) if dense else _ids(3)
    logits = torch.randn(COUNT, *shape) + torch.nn.functional.one_hot(_ids(3), 3).view(
        COUNT, 3, *([1, 1] * dense)
    )
    return task, list(zip(logits.split(250), target.split(250), strict=True))


def _measured(task: Task, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    for answer, target in batches:
        if isinstance(task, Features):
            task.held_out.update(answer, {"feature_loss": answer.abs().mean()})
            continue
        task.update(answer, target, task.decide(answer))
        if type(task) is not OfTheUser:
            assert task.loss(answer, target).dtype == torch.float32
    return {name: float(value) for name, value in task.compute().items()}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", [*sorted(set(names) - {"Task"}), "OfTheUser"])
def test_every_task_has_the_metrics_and_the_loss_of_float32_in_every_precision(
    name: str, cast: str
) -> None:
    task, batches = _make(name)
    exact = _measured(task, batches)
    other, _ = _make(name)
    CASTS[cast](other)
    assert _measured(other, batches) == exact
    if name not in ("Features", "OfTheUser"):
        assert torch.equal(other.loss(*batches[0]), task.loss(*batches[0]))


@pytest.mark.parametrize("cast", [*CASTS, "set_dtype"])
def test_every_metric_keeps_its_type(cast: str) -> None:
    """Of each class that there is: a new one need not be listed here."""
    made = {
        "TargetCounts": (3,), "HeldOut": (["feature_loss"], 4), "NumberErrors": (2,), "PixelCounts": (3, None),
        "Confusions": (3,),
    }  # fmt: skip
    kinds = {
        kind.__name__: kind
        for kind in ExactMetric.__subclasses__()
        if kind.__module__.startswith("kd.")
    }
    assert set(kinds) == set(made), "give arguments for the new metric"
    for name, kind in kinds.items():
        metric = kind(*made[name])
        before = {state: getattr(metric, state).dtype for state in metric._defaults}
        metric.set_dtype(torch.bfloat16) if cast == "set_dtype" else CASTS[cast](metric)
        metric.reset()
        assert {state: getattr(metric, state).dtype for state in metric._defaults} == before, name


def test_no_metric_of_ours_goes_round_the_base() -> None:
    sources = [path for path in (ROOT / "kd").rglob("*.py") if "(Metric)" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in sources] == ["kd/tasks/base.py"]
    assert issubclass(Task, KeepsDtype)
    assert issubclass(ExactMetric, Metric)


def test_a_run_in_half_precision_throughout_measures_the_targets_as_they_are(
    tmp_path: Path,
) -> None:
    """Lightning casts whatever is a float in a batch; 550.3 kcal would be 552. It ends with a model that has units."""
    student = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    student.fc = torch.nn.Linear(12, 1)
    module = kd.DistillationModule(
        student, task=Regression(1), data=kd.DataInfo(["kcal"], kind="numbers", scales=[(550, 9)])
    )
    target = 550.3 + torch.arange(16.0)[:, None]
    loader = DataLoader(list(zip(torch.rand(16, 3, 8, 8), target, strict=True)), batch_size=8)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    error = float(trainer.callback_metrics["val/mae"])
    answers = torch.cat(trainer.predict(module, loader)).float()
    assert error == pytest.approx(float((answers - target).abs().mean()), rel=1e-5)
