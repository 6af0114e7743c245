"""One way to run a batch without gradients: validation, the preflight and ``kd-eval`` take it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import kd
from kd.callbacks.preflight import Preflight
from kd.data.batch import Batch
from kd.distill.step import as_teacher
from kd.models import TeacherSpec
from kd.module.evaluation import look
from kd.module.inference import Inference
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.base import OwnTeacher


def test_padding_is_left_out_and_what_is_known_is_not_asked_again() -> None:
    torch.manual_seed(0)
    model, task = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), kd.Classification(3)
    teacher = as_teacher(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    assert teacher is not None
    images, target = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 2])
    calls: list[int] = []

    def student(pictures: Tensor) -> Tensor:
        calls.append(len(pictures))
        return model(pictures)

    models = {"a": student}
    batch = {"image": images, "target": target, "index": torch.tensor([5, -1, 0, -1])}
    seen = look(batch, task, teacher, models, in_step=True)
    assert seen is not None and seen.index is not None and seen.decided is not None
    assert (seen.index.tolist(), seen.target.tolist(), calls) == ([5, 0], [0, 2], [2])
    assert (
        torch.equal(seen.logits["a"], model(images[[0, 2]])) and not seen.logits["a"].requires_grad
    )
    assert torch.equal(seen.taught[ALL], teacher(images[[0, 2]]))
    assert torch.equal(seen.decided, seen.taught[ALL].argmax(1))
    without_index = look({"image": images, "target": target}, task, teacher, models)
    assert without_index is not None and len(without_index.target) == 4
    padding = {"image": images, "target": target, "index": torch.full((4,), -1)}
    assert look(padding, task, teacher, models, in_step=True) is None
    assert calls == [
        2,
        4,
        4,
    ]  # sharded students are called all the same: other processes wait for their shards
    known = look(
        {"image": images[:1], "target": target[:1], "decided": torch.tensor([1])}, task, teacher, {}
    )
    assert (
        known is not None
        and known.decided is not None
        and (known.decided.tolist(), known.taught) == ([1], {})
    )


def test_a_metric_that_a_validation_lacks_is_no_earlier_one_s() -> None:
    """Lightning would keep its value for good."""
    results = [{"val/miou": 0.2, "val/miou_of_targets": 0.25}, {"val/miou": 0.5}]
    logged = {"train/loss": 1.0}
    module = SimpleNamespace(
        validation=SimpleNamespace(results=lambda: results.pop(0)),
        trainer=SimpleNamespace(callback_metrics=logged),
        log_dict=logged.update,
        _validated=frozenset(),
    )
    for _ in range(2):
        Inference.on_validation_epoch_end(module)  # type: ignore[arg-type]
    assert logged == {"train/loss": 1.0, "val/miou": 0.5}


def test_decisions_known_of_val_are_not_used_in_a_test() -> None:
    """Pictures of both splits are numbered from 0, and a test may have more of them."""
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)) for _ in range(2))
    module = kd.DistillationModule(student, teacher, task=kd.Classification(3))
    images = torch.rand(3, 3, 2, 2)
    agreeing = (student(images).argmax(1) == teacher(images).argmax(1)).float().mean()
    module.validation.known = student(images).argmax(1)  # of the validation pictures 0 to 2
    found = []
    for first in (0, 7):
        index = torch.arange(first, first + 3)
        module.test_step({"image": images, "target": torch.arange(3), "index": index}, 0)
        found.append(module.validation.results("test")["test/agreement"])
    assert found == [agreeing, agreeing]
    assert agreeing < 1
    module.validation_step(
        {"image": images, "target": torch.arange(3), "index": torch.arange(3)}, 0
    )
    assert module.validation.results()["val/agreement"] == 1


class InShards(OwnTeacher):
    """A teacher that answers only where all processes ask, and counts how often it runs."""

    is_shared_out = True

    def __init__(self, has_head: bool) -> None:
        super().__init__(nn.Identity(), TeacherSpec(arch="", head=has_head))
        self.runs = 0

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        if not self.has_head:  # it has nothing to give
            return Answer()
        self.runs += 1
        return Answer({name: torch.zeros(len(batch["image"]), 3)})


@pytest.mark.parametrize(("has_head", "runs"), [(False, 0), (True, 1)])
def test_a_teacher_in_shards_runs_on_padding_as_often_as_on_pictures(
    has_head: bool, runs: int
) -> None:
    """Else one process waits for another's shards for ever."""
    task = kd.Classification(3)
    for index in (torch.tensor([0, 1]), torch.tensor([-1, -1])):
        teacher = InShards(has_head)
        batch = {"image": torch.rand(2, 3, 2, 2), "target": torch.tensor([0, 1]), "index": index}
        look(batch, task, teacher, {})
        assert teacher.runs == runs


def test_a_preflight_of_padding_alone_knows_decisions_as_other_processes_do() -> None:
    """Without them this process would run the teacher in the validations, and a teacher in shards would wait."""
    batch = {
        "image": torch.rand(2, 3, 2, 2),
        "target": torch.zeros(2),
        "index": torch.full((2,), -1),
    }
    data = SimpleNamespace(
        eval_batches=lambda split: SimpleNamespace(pictures=1, used=1),
        split=lambda name: SimpleNamespace(targets=[0]),
        val_dataloader=lambda: [batch],
    )
    module = SimpleNamespace(task=kd.Classification(3))
    run = SimpleNamespace(data=data, module=module, teacher=InShards(True), device=None)
    trainer = SimpleNamespace(is_global_zero=False, world_size=2)
    decided, seen_here = Preflight()._measure(trainer, run, [], None, None)  # type: ignore[arg-type]
    assert seen_here == 0
    module = kd.DistillationModule(nn.Linear(1, 3), task=kd.Classification(3))
    module.validation.known = decided
    assert "decided" in module.validation.with_known(batch)
