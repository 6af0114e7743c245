"""The Python door: any model, any loader, any Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from pytorch_lightning import Trainer
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kd
import kd.losses
from kd.distill.step import as_teacher
from kd.errors import UserError
from kd.teachers import Ensemble, FrozenTeacher

CLASSES = 4


class Plain(nn.Module):
    """A model that no library knows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(images).relu().mean((2, 3)))


class Named(Plain):
    """Gives an output with ``.logits``, as transformers' models do."""

    def forward(self, images: torch.Tensor) -> Any:
        return {"logits": super().forward(images), "loss": None}


def loader(uint8: bool = False, as_dict: bool = False) -> DataLoader:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    data = TensorDataset(images if uint8 else images / 255, torch.arange(16) % CLASSES)

    def collate(samples: list[Any]) -> Any:
        pictures, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        return {"pixel_values": pictures, "labels": targets} if as_dict else (pictures, targets)

    return DataLoader(data, batch_size=8, collate_fn=collate)


def trainer(tmp_path: Any, **kwargs: Any) -> Trainer:
    return Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize(
    "teacher", [Named(), lambda x: Plain()(x), timm.create_model("resnet10t", num_classes=CLASSES)]
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_any_model_any_loader(tmp_path: Any, teacher: Any, as_dict: bool) -> None:
    module = kd.DistillationModule(
        Plain(), teacher, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(temperature=4.0)},
        task_loss_weight=0.1,
    )  # fmt: skip
    before = module.student.fc.weight.clone()
    fit = trainer(tmp_path)
    fit.fit(module, loader(as_dict=as_dict), loader(as_dict=as_dict))
    assert not torch.equal(before, module.student.fc.weight)
    assert {"val/acc1", "val/agreement", "train/kd_loss", "train/loss"} <= set(fit.callback_metrics)


def test_uint8_is_prepared_floats_pass(tmp_path: Any) -> None:
    student = timm.create_model("resnet10t", num_classes=CLASSES)
    seen: list[torch.Tensor] = []
    student.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    module = kd.DistillationModule(student, task=kd.Classification(CLASSES))
    images = next(iter(loader(uint8=True)))[0]
    module.training_step((images, torch.zeros(8, dtype=torch.long)), 0)
    config = timm.data.resolve_model_data_config(student)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    resized = torch.nn.functional.interpolate(images.float(), (176, 176), mode="bilinear", antialias=True) / 255
    assert seen[-1].shape[-2:] == config["input_size"][1:]
    if seen[-1].shape[-1] == 176:
        torch.testing.assert_close(seen[-1], (resized - mean) / std, atol=0.02, rtol=0)
    floats = torch.rand(8, 3, 64, 64)
    module.training_step((floats, torch.zeros(8, dtype=torch.long)), 0)
    assert seen[-1] is floats
    halved = kd.DistillationModule(Plain(), task=kd.Classification(CLASSES), prepare=lambda x: x.float() / 510)
    halved.training_step((images, torch.zeros(8, dtype=torch.long)), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kd.DistillationModule(Plain()), r"how many classes.*Classification\(num_classes\)"),
        (lambda: kd.DistillationModule(Plain(), task=kd.Classification(4)).training_step(
            (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2).long()), 0), "wants uint8 pictures is not"),
        (lambda: kd.DistillationModule(Plain(), task=kd.Classification(4)).training_step({"x": 1}, 0), "needs one of"),
        (lambda: kd.DistillationModule(Plain(), lambda x: x, task=kd.Classification(4),
                                       losses={"hint": kd.losses.HintLoss()}), "needs the layers to look at"),
    ],
)  # fmt: skip
def test_what_is_missing_is_asked_for_in_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        make()
    assert "\n" not in str(found.value)


def test_a_step_for_any_loop() -> None:
    torch.manual_seed(0)
    teacher, student = Named(), Plain()
    step = kd.Distillation(student, teacher, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(4.0)})
    assert {id(p) for p in step.parameters()} == {id(p) for p in student.parameters()}
    images, targets = next(iter(loader()))
    terms = step(images, targets)
    expected = kd.KDLoss(4.0)(student(images), teacher(images)["logits"], targets)
    torch.testing.assert_close(terms.named["kd_loss"], expected.detach())
    cross_entropy = torch.nn.functional.cross_entropy(student(images), targets)
    torch.testing.assert_close(terms.total, expected + cross_entropy)
    terms.total.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(compiled(images, targets).total, terms.total)


@pytest.mark.parametrize("several", [False, True])
def test_a_teacher_follows_a_step_that_is_moved_again(several: bool) -> None:
    images, targets = next(iter(loader()))
    teacher = as_teacher(Plain())
    assert isinstance(teacher, FrozenTeacher)
    asked = Ensemble({"a": teacher}) if several else teacher
    step = kd.Distillation(Plain(), asked, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(4.0)})
    before = step(images, targets).named
    teacher.to(torch.device("cpu"))
    teacher.device = torch.device("cuda")  # as if the step had been on a GPU in between
    assert step(images, targets).named == before
    assert teacher.device == images.device
    for dtype in (torch.bfloat16, torch.float32):
        assert next(teacher.to(torch.device("cpu"), dtype).model.parameters()).dtype == dtype
        assert teacher(images).dtype == torch.float32


def test_a_step_with_a_feature_loss_trains_its_projection() -> None:
    student, teacher = (timm.create_model("resnet10t", num_classes=CLASSES) for _ in range(2))
    taps = {"hint": kd.TapSpec(student="layer2", teacher="layer4")}
    step = kd.Distillation(
        student, teacher, task=kd.Classification(CLASSES), losses={"hint": kd.losses.HintLoss()}, taps=taps
    )
    step(torch.rand(2, 3, 176, 176), torch.tensor([0, 1])).total.backward()  # the size that timm names
    own = [p for name, p in step.named_parameters() if "losses" in name]
    assert own and all(p.grad is not None for p in own)


def test_the_student_is_saved_and_loaded(tmp_path: Path) -> None:
    """A timm model comes back as it was; of a model that only its owner can build the weights do."""
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    module = kd.DistillationModule(timm.create_model("resnet10t", num_classes=CLASSES), task=kd.Classification(CLASSES))
    kd.save_student(module, tmp_path / "student.safetensors")
    model, prepare, classes = kd.load_student(tmp_path / "student.safetensors")
    assert classes == ["0", "1", "2", "3"]
    with torch.no_grad():
        torch.testing.assert_close(model(prepare(images)), module.student_of_one.model.eval()(prepare(images)))
    own = kd.DistillationModule(Plain(), task=kd.Classification(CLASSES))
    kd.save_student(own, tmp_path / "own.safetensors")
    assert set(load_file(tmp_path / "own.safetensors")) == set(Plain().state_dict())
    with pytest.raises(UserError, match="holds the weights of a Plain, which kd can't build"):
        kd.load_student(tmp_path / "own.safetensors")
