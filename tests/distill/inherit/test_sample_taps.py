"""Losses over features settle on what the fit of the start has read: no second pass, the same numbers."""

import pytest
import timm
import torch
from torch import Tensor, nn

from kd.data.info import DataInfo
from kd.distill import settle
from kd.distill.first_weights import give_first_weights
from kd.distill.objective import Objective
from kd.distill.settle import settle_losses
from kd.distill.student import Student
from kd.losses import MSELoss
from kd.settings import TapSpec
from kd.tasks import Classification
from kd.teachers.frozen import FrozenTeacher
from tests.distill.inherit._vits import OURS, THEIRS, eva, small_vit, vit

CONVNEXT = {"num_classes": 5, "patch_size": 4, "depths": (1, 1, 2, 1)}
BIG = (16, 24, 32, 40)
SMALL = (8, 12, 16, 20)


def vits(**kwargs: object) -> tuple[nn.Module, nn.Module]:
    """Student and teacher."""
    return vit(1, 32, 2, **kwargs), vit(2, 64, 4, **kwargs)


def rotary() -> tuple[nn.Module, nn.Module]:
    """Student and teacher."""
    arch = "vit_small_patch16_dinov3"
    return eva(arch, 1, 32, 2), eva(arch, 2, 64, 4)


def other_grid() -> tuple[nn.Module, nn.Module]:
    """A student of other patches than its teacher's: the teacher runs on both grids."""
    return small_vit(16, 2, 2, patch_size=16, num_classes=5), vit(2, 64, 4)


def convnexts() -> tuple[nn.Module, nn.Module]:
    """Student and teacher."""
    torch.manual_seed(0)
    student = timm.create_model("convnext_atto", dims=SMALL, **CONVNEXT)
    return student.eval(), timm.create_model("convnext_atto", dims=BIG, **CONVNEXT).eval()


def resnets() -> tuple[nn.Module, nn.Module]:
    """Student and teacher."""
    torch.manual_seed(0)
    student = timm.create_model("resnet18", num_classes=5, channels=SMALL)
    return student.eval(), timm.create_model("resnet18", num_classes=5, channels=BIG).eval()


def inheriting(student: nn.Module, teacher: FrozenTeacher, layers: list[str]) -> Student:
    """One student that inherits, with a loss over each of some layers of both models."""
    losses = {f"loss{i}": MSELoss(standardize="variance") for i in range(len(layers))}
    taps = {f"loss{i}": TapSpec(layer, layer) for i, layer in enumerate(layers)}
    task = Classification(5)
    objective = Objective(task, losses, 0.0, taps, None)
    data = DataInfo([str(i) for i in range(5)])
    return Student(student, OURS, objective, data, teacher, start="inherited")


@pytest.mark.parametrize(
    ("models", "layers"),
    [
        (vits, ["prelogits", "maps", "maps@1/3", "maps@2/3"]),
        (lambda: vits(global_pool="avg"), ["prelogits", "maps@1/3"]),
        (rotary, ["prelogits", "maps", "maps@1/3"]),
        (other_grid, ["prelogits", "maps"]),
        (convnexts, ["prelogits", "maps", "stages.1"]),
        (resnets, ["prelogits", "maps", "layer2"]),
    ],
    ids=["vit", "mean of tokens", "rotary", "other patches", "convnext", "resnet"],
)
def test_the_start_reads_what_the_losses_need(
    models, layers: list[str], sample: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics and projections are those of a pass over the sample, which does not take place."""
    student_model, teacher_model = models()
    teacher = FrozenTeacher(teacher_model, THEIRS, classes=5)
    student = inheriting(student_model, teacher, layers)
    give_first_weights([student], teacher, lambda _: sample)
    taps = student.sample_taps
    assert taps is not None

    # as before: run both models anew
    student.sample_taps = None
    settle_losses(student, teacher, lambda _: sample, lambda value: value)
    losses = student.objective
    anew = {name: value.clone() for name, value in losses.state_dict().items()}

    for standardizer in student.standardizers:
        for buffer in standardizer.buffers():
            buffer.zero_()
    student.sample_taps = taps

    def refuse(*_: object) -> None:
        raise AssertionError("a second pass")

    monkeypatch.setattr(settle, "_read_anew", refuse)
    settle_losses(student, teacher, lambda _: sample, lambda value: value)
    assert student.sample_taps is None
    assert any(value.numel() > 1 for value in anew.values())
    for name, value in losses.state_dict().items():
        torch.testing.assert_close(value, anew[name], rtol=1e-3, atol=1e-3)


def test_a_layer_that_the_fit_does_not_run_is_read_anew(sample: Tensor) -> None:
    """The fit fits what is inside of a block one by one: it never runs the block's MLP as it will be."""
    student_model, teacher_model = vits()
    teacher = FrozenTeacher(teacher_model, THEIRS, classes=5)
    student = inheriting(student_model, teacher, ["blocks.1.mlp"])
    give_first_weights([student], teacher, lambda _: sample)
    settle_losses(student, teacher, lambda _: sample, lambda value: value)
    (standardizer,) = student.standardizers
    assert standardizer.rows > 0


def test_a_student_without_a_fit_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's statistics need the size of the student's maps alone: they are equal to the bit."""
    sample = torch.randint(0, 256, (3 * 64, 3, 32, 32), dtype=torch.uint8)
    batches: list[int] = []
    buffers: list[dict[str, Tensor]] = []
    for start in ("inherited", "scratch"):
        student_model, teacher_model = resnets()
        teacher = FrozenTeacher(teacher_model, THEIRS, classes=5)
        student = inheriting(student_model, teacher, ["layer2"])
        monkeypatch.setattr(student, "start", start)
        student_model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
        settle_losses(student, teacher, lambda _: sample, lambda value: value)
        (standardizer,) = student.standardizers
        buffers.append(dict(standardizer.named_buffers()))
    assert batches == [64, 64, 64, 64]  # three parts, then one
    assert buffers[0]["rows"] >= len(sample)
    torch.testing.assert_close(buffers[0], buffers[1], rtol=0, atol=0)
