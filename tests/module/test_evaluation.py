"""One way to run a batch without gradients: validation, the preflight and ``kd-eval`` take it."""

import torch
from torch import Tensor, nn

import kd
from kd.distill.step import as_teacher
from kd.module.evaluation import look
from kd.teachers.answer import ALL


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


def test_a_students_name_stays_whole_in_the_metrics_of_a_test() -> None:
    """``retrieval/val/acc1`` has ``val/`` twice."""
    logged: dict[str, Tensor] = {}
    modules = {}
    for name in ("retrieval", "plain"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        modules[name] = kd.DistillationModule(model, task=kd.Classification(3))
    module = kd.DistillationModule.together(modules)
    module.log_dict = logged.update
    module.test_step({"image": torch.rand(3, 3, 2, 2), "target": torch.arange(3)}, 0)
    module.on_test_epoch_end()
    of_accuracy = [name for name in logged if name.endswith("acc1")]
    assert of_accuracy == ["retrieval/test/acc1", "plain/test/acc1"]
