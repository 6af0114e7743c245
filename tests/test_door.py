"""The Python door: any model, any loader, any Trainer."""

import copy
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EMAWeightAveraging, LambdaCallback
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kd
import kd.losses
from kd.distill.step import as_teacher
from kd.optim import Pace
from kd.teachers import Ensemble, FrozenTeacher
from tests._helpers import refuses

CLASSES = 4
KD = {"kd": kd.KDLoss(4.0)}


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
    before = module.student.model.fc.weight.clone()
    fit = trainer(tmp_path)
    fit.fit(module, loader(as_dict=as_dict), loader(as_dict=as_dict))
    assert not torch.equal(before, module.student.model.fc.weight)
    assert {"val/acc1", "val/agreement", "train/kd_loss", "train/loss"} <= set(fit.callback_metrics)


def test_uint8_is_prepared_floats_pass() -> None:
    """By the model's own size, mean and std; or by a function."""
    student = timm.create_model("resnet10t", num_classes=CLASSES)
    seen: list[torch.Tensor] = []
    student.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    module = kd.DistillationModule(student, task=kd.Classification(CLASSES))
    images, targets = next(iter(loader(uint8=True)))
    module.training_step((images, targets), 0)
    config = timm.data.resolve_model_data_config(student)
    prepare = kd.Preprocess(config["input_size"][1:], config["mean"], config["std"])
    torch.testing.assert_close(seen[-1], prepare(images))
    floats = torch.rand(8, 3, 64, 64)
    module.training_step((floats, targets), 0)
    assert seen[-1] is floats
    halved = kd.DistillationModule(
        student, task=kd.Classification(CLASSES), prepare=lambda x: x.float() / 510
    )
    halved.training_step((images, targets), 0)
    torch.testing.assert_close(seen[-1], images / 510)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kd.DistillationModule(nn.Flatten()), r"how many classes.*Classification\(num_classes\)"),
        (lambda: kd.DistillationModule(timm.create_model("resnet10t", num_classes=4), Plain(), losses=KD).training_step(
            (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2).long()), 0), "teacher_prepare=kd.Preprocess"),
        (lambda: kd.DistillationModule(
            nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), Plain(), losses={"hint": kd.losses.HintLoss()},
            taps={"hint": kd.TapSpec("1", "conv")}), "the student: its input size is not known.* give prepare=kd.Prep"),
        (lambda: kd.DistillationModule(Plain(), task=kd.Classification(4)).training_step(
            (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2).long()), 0), "wants uint8 pictures is not"),
        (lambda: kd.DistillationModule(Plain(), task=kd.Classification(4)).training_step({"x": 1}, 0), "needs one of"),
        (lambda: kd.DistillationModule(Plain(), lambda x: x, task=kd.Classification(4),
                                       losses={"hint": kd.losses.HintLoss()}), r"needs layers \(student, teacher\)"),
        (lambda: kd.Distillation(Plain(), losses=KD), "model.teacher: kd read its answers, but no teacher is given"),
    ],
)  # fmt: skip
def test_what_is_missing_is_asked_for_in_one_line(make: Callable[[], object], message: str) -> None:
    with refuses(message) as found:
        make()
    assert "\n" not in str(found.value)


def test_a_step_for_any_loop() -> None:
    torch.manual_seed(0)
    teacher, student = Named(), Plain()
    step = kd.Distillation(
        student, teacher, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(4.0)}
    )
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
    step = kd.Distillation(
        Plain(), asked, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(4.0)}
    )
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
        student,
        teacher,
        task=kd.Classification(CLASSES),
        losses={"hint": kd.losses.HintLoss()},
        taps=taps,
    )
    step(
        torch.rand(2, 3, 176, 176), torch.tensor([0, 1])
    ).total.backward()  # the size that timm names
    own = [p for name, p in step.named_parameters() if "losses" in name]
    assert own and all(p.grad is not None for p in own)


def test_the_student_is_saved_and_loaded(tmp_path: Path) -> None:
    """A timm model comes back as it was; of a model that only its owner can build the weights do."""
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    module = kd.DistillationModule(
        timm.create_model("resnet10t", num_classes=CLASSES), task=kd.Classification(CLASSES)
    )
    kd.save_student(module, tmp_path / "student.safetensors")
    model, prepare, classes = kd.load_student(tmp_path / "student.safetensors")
    assert classes == ["0", "1", "2", "3"]
    with torch.no_grad():
        torch.testing.assert_close(
            model(prepare(images)), module.student.model.eval()(prepare(images))
        )
    own = kd.DistillationModule(Plain(), task=kd.Classification(CLASSES))
    kd.save_student(own, tmp_path / "own.safetensors")
    assert set(load_file(tmp_path / "own.safetensors")) == set(Plain().state_dict())
    with refuses("holds the weights of a Plain, which kd can't build"):
        kd.load_student(tmp_path / "own.safetensors")


ALLOWED = {
    "task": (5, r"a task, such as kd.Classification\(num_classes=10\), got int"),
    "losses": ([kd.KDLoss(4.0)], "a dict of losses by name.*got list"),
    "losses['m']": (
        {"m": nn.MSELoss()},
        "a subclass of kd.losses.LogitLoss or kd.losses.FeatureLoss.*got MSELoss",
    ),
    "teacher": (
        [Plain(), Plain()],
        'a module or a function of pictures.*{"a": a, "b": b}.*got list',
    ),
    "teacher[none]": ({}, 'several go by name, {"a": a, "b": b}.*got dict'),
    "student": (5, "torch.nn.Module, got int"),
    "taps['kd']": ({"kd": "layer2"}, "kd.TapSpec.*got str"),
    "data": (["a", "b"], "kd.DataInfo.*got list"),
    "prepare": (3, "kd.Preprocess or a function of uint8 pictures, got 3"),
    "teacher_prepare": (3, "kd.Preprocess or a function of uint8 pictures, got 3"),
    "optim": (5, "kd.OptimSpec, a dict of its fields or a function"),
}


@pytest.mark.parametrize("argument", ALLOWED)
@pytest.mark.parametrize("door", [kd.DistillationModule, kd.Distillation])
def test_arguments_of_another_kind_are_refused_with_what_is_allowed(
    door: Any, argument: str
) -> None:
    given, message = ALLOWED[argument]
    name = argument.partition("[")[0]
    argument = argument.removesuffix("[none]")
    if name == "optim" and door is kd.Distillation:
        return
    arguments = {"student": Plain(), "teacher": Plain(), "losses": KD, name: given}
    with pytest.raises(TypeError, match=f"^{re.escape(argument)}: must be .*{message}"):
        door(**arguments)


def test_several_teachers_go_by_name() -> None:
    images, targets = next(iter(loader()))
    a, b = Plain(), Plain()
    step = kd.Distillation(Plain(), {"a": a, "b": b}, losses=KD)
    with torch.no_grad():
        expected = kd.KDLoss(4.0)(step.student.model(images), (a(images) + b(images)) / 2, targets)
    torch.testing.assert_close(step(images, targets).named["kd_loss"], expected)


def test_the_student_knows_the_number_of_classes() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Upsample(scale_factor=2))
    for model, task, count in (
        (timm.create_model("resnet10t", num_classes=7), None, 7), (Plain(), kd.Classification(label_smoothing=0.1), 4),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), None, 3),
        (nn.ModuleDict({"classifier": conv}), kd.tasks.Segmentation(), 5),
    ):  # fmt: skip
        assert kd.DistillationModule(model, task=task).task.num_classes == count


def test_segmentation_models_of_torchvision() -> None:
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        num_classes=3, weights_backbone=None
    )
    losses = {"pixels": kd.losses.PixelKDLoss()}
    module = kd.DistillationModule(
        model, copy.deepcopy(model), task=kd.tasks.Segmentation(3), losses=losses
    )
    loss = module.training_step((torch.rand(2, 3, 32, 32), torch.zeros(2, 32, 32).long()), 0)[
        "loss"
    ]
    assert loss.isfinite()


def test_a_checkpoint_of_lightning_is_loaded_predicts_and_is_tested(tmp_path: Path) -> None:
    student, teacher = timm.create_model("resnet10t", num_classes=CLASSES), Plain()
    arguments = {"losses": {"kd": kd.KDLoss(4.0), "hint": kd.losses.HintLoss()},
                 "taps": {"hint": kd.TapSpec("layer2", "conv")}, "ema_decay": 0.9}  # fmt: skip
    module = kd.DistillationModule(student, teacher, optim={"name": "sgd", "lr": 0.1}, **arguments)
    fit = trainer(tmp_path)
    fit.fit(module, loader(), loader())
    fit.save_checkpoint(tmp_path / "own.ckpt")
    fresh = timm.create_model("resnet10t", num_classes=CLASSES)
    loaded = kd.DistillationModule.load_from_checkpoint(
        tmp_path / "own.ckpt", student=fresh, teacher=Plain(), **arguments
    )
    for name, value in module.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    images = torch.cat([batch[0] for batch in loader()])
    expected = module.eval().student.logits(images)
    torch.testing.assert_close(loaded.eval()(images), expected)
    for batches in (loader(), DataLoader(images, batch_size=8)):
        predicted = trainer(tmp_path).predict(loaded, batches)
        torch.testing.assert_close(torch.cat(predicted), expected)
    targets = torch.cat([batch[1] for batch in loader()])
    (tested,) = trainer(tmp_path).test(loaded, loader(), verbose=False)
    assert tested["test/acc1"] == pytest.approx(
        float((expected.argmax(1) == targets).float().mean())
    )
    assert set(tested) == {"test/acc1", "test/acc5", "test/agreement"}


def test_a_checkpoint_names_the_place_in_the_samples(tmp_path: Path, pictures: Path) -> None:
    """In a step the batches before it are done; after a fit its epochs are, and no batch of the next one."""
    data = kd.DistillationDataModule(
        kd.data.sources.ImageFolder(str(pictures)), img_size=32, batch_size=8
    )
    places = []
    look = LambdaCallback(on_before_backward=lambda *_: places.append(data.state_dict()))
    fit = trainer(tmp_path, callbacks=look)
    fit.fit(kd.DistillationModule(Plain(), prepare=lambda x: x / 255), data)
    of_epoch = range(0, 48, 8)
    assert [place.popitem()[0] for place in places] == ["order"] * 12
    assert places == [{"epoch": e, "samples": done} for e in (0, 1) for done in of_epoch]
    fit.save_checkpoint(tmp_path / "after.ckpt")
    stored = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert stored["DistillationDataModule"] == {"epoch": 2, "samples": 0}


class Planted:
    """Marks that a name from a file was called."""

    calls = 0

    @classmethod
    def build(cls, *_: object, **__: object) -> None:
        cls.calls += 1


@pytest.mark.parametrize("key", ["hyper_parameters", "datamodule_hyper_parameters"])
def test_a_checkpoint_gives_weights_and_no_arguments(key: str, tmp_path: Path) -> None:
    """Lightning would take arguments, and functions by their names, from the file."""
    made = {"student": Plain(), "losses": KD, "teacher": Plain()}
    module = kd.DistillationModule(**made)
    planted = {"task_loss_weight": 0.0, "img_size": 8, "_instantiator": f"{__name__}.Planted.build",
               "_class_path": f"{__name__}.Planted", "class_path": f"{__name__}.Planted"}  # fmt: skip
    content = {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.0", key: planted,
               "DistillationDataModule": {"epoch": 3, "samples": 8}}  # fmt: skip
    torch.save(content, tmp_path / "a.ckpt")
    loaded = kd.DistillationModule.load_from_checkpoint(tmp_path / "a.ckpt", **made)
    assert loaded.student.objective.task_loss_weight == 1.0
    with refuses("make the data module from its arguments"):
        kd.DistillationDataModule.load_from_checkpoint(tmp_path / "a.ckpt", img_size=32)
    assert Planted.calls == 0
    data = kd.DistillationDataModule(img_size=32)
    for wrong in ({"epoch": "x", "samples": 0}, {"epoch": 0, "samples": -1}, {"epoch": 1}):
        with refuses("place in the samples"):
            data.load_state_dict(wrong)
    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    with refuses(r"checkpoint_path: .*a.ckpt can't be loaded"):
        kd.DistillationModule.load_from_checkpoint(tmp_path / "a.ckpt", **made)


def test_lightnings_own_average_of_weights(tmp_path: Path) -> None:
    module = kd.DistillationModule(
        Plain(), Plain(), losses=KD, optim=lambda p: torch.optim.SGD(p, lr=0.5)
    )
    before = module.student.model.fc.bias.detach().clone()
    average = EMAWeightAveraging(decay=0.5)
    fit = trainer(tmp_path, callbacks=[average])
    fit.fit(module, loader(), loader())
    assert not torch.equal(module.student.model.fc.bias, before)
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a_function_makes_the_optimizer() -> None:
    with pytest.raises(TypeError, match="optim: no key 'lrr'"):
        kd.DistillationModule(Plain(), optim={"lrr": 1})
    module = kd.DistillationModule(Plain(), optim=lambda p: p)
    with pytest.raises(TypeError, match="must give a torch.optim.Optimizer, got list"):
        module.student.build_optimizer(Pace(10, 5))


def test_float_pictures_that_nobody_has_scaled_are_warned_of_once() -> None:
    step = kd.Distillation(Plain(), Plain(), losses=KD)
    images, targets = next(iter(loader()))
    with pytest.warns(UserWarning, match="floats up to 255 pass to the models as they are"):
        step(images * 255, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(images * 255, targets)
        kd.Distillation(Plain(), Plain(), losses=KD)(images, targets)


def test_a_step_is_pickled_and_copied_whole() -> None:
    """Of the copy the copy's own layers are read, not the first one's."""
    step = kd.Distillation(
        Plain(),
        Plain(16),
        losses={"hint": kd.losses.HintLoss()},
        taps={"hint": kd.TapSpec("conv", "conv")},
    )
    images, targets = next(iter(loader()))
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert other(images, targets).named == step(images, targets).named
        with torch.no_grad():
            other.student.model.conv.weight.zero_()
        other(images, targets).total.backward()
        assert other.student.model.conv.weight.grad is not None
        assert other(images, targets).named["hint_loss"] != step(images, targets).named["hint_loss"]


def test_packages_are_reached_by_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has imported them."""
    for name in ("losses", "tasks"):
        monkeypatch.delattr(kd, name)
        assert name in dir(kd)
    assert (kd.losses.HintLoss.__name__, kd.tasks.Segmentation.__name__) == (
        "HintLoss",
        "Segmentation",
    )


# -- users' own objects --------------------------------------------------------------------------------------------------
SHARES = "student: shares {} of its parameters and buffers with the teacher"


@pytest.mark.parametrize(
    ("student_of", "count"),
    [
        (lambda teacher: teacher, 4),
        (lambda teacher: nn.Sequential(teacher.conv, nn.Flatten(), nn.LazyLinear(CLASSES)), 2),
        (lambda teacher: torch.compile(teacher, backend="eager"), 4),
    ],
)
def test_a_student_shares_nothing_with_its_teacher(
    student_of: Callable[[Plain], nn.Module], count: int
) -> None:
    teacher = Plain().requires_grad_()
    student = student_of(teacher)
    for given in (teacher, {"a": teacher, "b": Plain()}, torch.compile(teacher, backend="eager")):
        for build in (kd.Distillation, kd.DistillationModule):
            with refuses(SHARES.format(count) + ".*copy.deepcopy"):
                build(student, given, losses=KD, task=kd.Classification(CLASSES))
    assert all(weight.requires_grad for weight in teacher.parameters())
    kd.Distillation(copy.deepcopy(student), teacher, losses=KD, task=kd.Classification(CLASSES))


def state_of(model: nn.Module) -> list[Any]:
    """All of a model but its values: modes, flags, types, devices, hooks and compiled calls."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, t.dtype, t.device, t.requires_grad) for name, t in tensors],
        [(n, m.training, m._compiled_call_impl, getattr(m, "distilled_training", 0)) for n, m in model.named_modules()],
    ]  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda model: model, lambda m: torch.compile(m, backend="eager")])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_users_models_are_as_they_were_when_a_run_ends(
    tmp_path: Any,
    precision: Any,
    wrap: Callable[[nn.Module], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(
        "PL_SEED_WORKERS", raising=False
    )  # seed_everything has Lightning seed loaders
    tiny = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    student = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=CLASSES, **tiny)
    student.eval().blocks.train()
    student.pos_embed.requires_grad_(False)
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **tiny).half()
    teacher.blocks.eval()
    prepare = kd.Preprocess(32, [0.5] * 3, [0.5] * 3)
    given = loader(uint8=True)
    before = [state_of(student), state_of(teacher), prepare.floats, str(vars(given))]
    answers = copy.deepcopy(teacher.state_dict())
    module = kd.DistillationModule(
        wrap(student), wrap(teacher), losses=KD, prepare=prepare, teacher_prepare=prepare
    )
    modes = []
    look = LambdaCallback(on_train_batch_start=lambda *_: modes.append(student.norm.training))
    for _ in range(2):
        trainer(tmp_path, precision=precision, callbacks=look).fit(module, given, given)
        assert [state_of(student), state_of(teacher)] == before[:2]
    assert modes == [True] * 8
    trainer(tmp_path, precision=precision).validate(module, given)
    after = [state_of(student), state_of(teacher), prepare.floats, str(vars(given))]
    assert after == before
    assert all(torch.equal(value, answers[name]) for name, value in teacher.state_dict().items())


def test_a_compiled_model_trains_compiled_and_keeps_its_names() -> None:
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    student, teacher = Plain(), Plain()
    step = kd.Distillation(
        torch.compile(student, backend=backend), torch.compile(teacher, backend=backend),
        losses={"hint": kd.losses.HintLoss()}, taps={"hint": kd.TapSpec("conv", "conv")},
    )  # fmt: skip
    assert not graphs  # the layers' shapes are found without a graph
    images, targets = next(iter(loader()))
    step(images, targets).total.backward()
    assert len(graphs) >= 2
    assert student.conv.weight.grad is not None
    assert "student.model.conv.weight" in dict(step.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_teacher_answers_in_its_own_type_in_an_own_loop(dtype: torch.dtype) -> None:
    images, targets = next(iter(loader()))
    student, teacher = Plain(), Plain()
    losses = [
        kd.Distillation(student, t, losses=KD)(images, targets).total.item()
        for t in (teacher, copy.deepcopy(teacher).to(dtype))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_teacher_without_a_copy_goes_as_a_function() -> None:
    teacher: Any = Plain()
    teacher.lock = threading.Lock()
    with refuses("teacher: Plain can't be copied .*pickle.*; give a function"):
        kd.Distillation(Plain(), teacher, losses=KD)
    images, targets = next(iter(loader()))
    kd.Distillation(Plain(), lambda x: teacher(x), losses=KD)(images, targets)


IDS = torch.arange(4)
MASKS = torch.arange(4).repeat(4, 4, 1)
EYE = torch.eye(4)
TASKS = {
    kd.Classification: (IDS, "class ids \\(N,\\), whole numbers from 0 to 3"),
    kd.tasks.MultiLabel: (EYE, "floats \\(N, 4\\), 0 or 1 for each label"),
    kd.tasks.Regression: (EYE, "floats \\(N, 4\\), the numbers of each picture"),
    kd.tasks.Segmentation: (MASKS, "masks \\(N, H, W\\) of class ids, whole numbers from 0 to 3"),
}
"""The form of each task's targets, and its name in messages."""


class Dense(nn.Conv2d):
    """Logits for each pixel."""

    num_classes = 4


WRONG: list[tuple[type, Any, str]] = [
    (kd.Classification, IDS[:, None], r"int64 \(4, 1\)"),
    (kd.Classification, EYE.long(), r"int64 \(4, 4\)"),
    (kd.Classification, IDS.float(), r"float32 \(4,\)"),
    (kd.Classification, IDS - 100, r"int64 \(4,\) with values from -100 to -97"),
    (kd.Classification, IDS + 1, "with values from 1 to 4"),
    (kd.Classification, IDS[:3], r"int64 \(3,\) with values from 0 to 2 for 4 pictures"),
    (kd.Classification, [0, 1, 2, 3], "list for 4 pictures"),
    (kd.tasks.MultiLabel, EYE.long(), r"int64 \(4, 4\)"),
    (kd.tasks.MultiLabel, IDS, r"int64 \(4,\)"),
    (kd.tasks.MultiLabel, 2 * EYE, "with values from 0 to 2"),
    (kd.tasks.Regression, torch.rand(4), r"float32 \(4,\)"),
    (kd.tasks.Regression, EYE / 0, "nan"),
    (kd.tasks.Segmentation, MASKS[:, None], r"int64 \(4, 1, 4, 4\)"),
    (kd.tasks.Segmentation, MASKS / 3, r"float32 \(4, 4, 4\)"),
    (kd.tasks.Segmentation, MASKS + 1, "with values from 1 to 4"),
]


def model_for(task: type) -> nn.Module:
    return Dense(3, 4, 1) if task is kd.tasks.Segmentation else Plain()


def refusal_of(task: type, got: str) -> str:
    """The line in which targets in another form are refused, of a split to be named."""
    return rf"^{{}} targets: must be {TASKS[task][1]}[^\n]*; got [^\n]*{got}[^\n]*$"


@pytest.mark.parametrize(("task", "target", "got"), WRONG)
def test_targets_in_another_form_are_refused_in_one_line(task: type, target: Any, got: str) -> None:
    """With the form that is expected, in an own loop."""
    student = kd.Distillation(model_for(task), task=task(4), losses={}).student
    batch = {"image": torch.rand(4, 3, 4, 4), "target": target}
    with refuses(refusal_of(task, got).format("training")):
        student.objective.check_targets(batch)


@pytest.mark.parametrize("task", TASKS)
def test_they_are_refused_in_training_and_validation_by_a_trainer(
    task: type, tmp_path: Any
) -> None:
    wrong, got = next(row[1:] for row in WRONG if row[0] is task)
    settings = {"losses": {}, "optim": {"warmup_epochs": 0}}
    module = kd.DistillationModule(model_for(task), task=task(4), **settings)
    images = torch.rand(4, 3, 4, 4)
    other, fine = (
        DataLoader([{"image": images, "target": target}], batch_size=None)
        for target in (wrong, TASKS[task][0])
    )
    trainer(tmp_path, precision="32-true").fit(module, fine, fine)
    with refuses(refusal_of(task, got).format("training")):
        trainer(tmp_path).fit(module, other)
    with refuses(refusal_of(task, got).format("validation")):
        trainer(tmp_path).validate(module, other)
    trainer(tmp_path).predict(module, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_class_ids_of_any_whole_type_are_the_same(dtype: torch.dtype) -> None:
    step = kd.Distillation(Plain(), Plain(), losses={**KD, "dkd": kd.losses.DKDLoss()})
    images = torch.rand(4, 3, 8, 8)
    assert step(images, IDS.to(dtype)).named == step(images, IDS).named
    assert kd.Distillation(Plain(), Plain(), losses=KD, task_loss_weight=0)(images, -IDS).total > 0


class Unprojected(kd.losses.FeatureLoss):
    """Of layers whose shapes differ."""

    def compare(
        self, student_features: torch.Tensor, teacher_features: torch.Tensor
    ) -> torch.Tensor:
        return (student_features - teacher_features).square().mean()


def test_an_error_inside_a_users_loss_names_the_loss_its_layers_and_their_shapes() -> None:
    student, teacher = (timm.create_model("resnet10t", num_classes=4) for _ in range(2))
    taps = {"near": kd.TapSpec("layer2", "layer3")}
    step = kd.Distillation(student, teacher, losses={"near": Unprojected()}, taps=taps)
    said = (
        r"model.distill_losses.near: Unprojected over layer2 \(2, 128, 8, 8\), layer3 \(2, 256, 4, 4\), the student's "
        r"layers first: The size of tensor a"
    )
    with refuses(said):
        step(torch.rand(2, 3, 64, 64), torch.tensor([0, 1]))
    student.requires_grad_(False).fc.requires_grad_(True)  # layer2 is frozen, the head is not
    with refuses(r"model\.taps: what the student has up to these layers is frozen"):
        kd.DistillationModule(
            student, teacher, losses={"near": Unprojected()}, taps=taps, task_loss_weight=0
        )


def test_a_loss_over_features_teaches_no_teacher() -> None:
    student, teacher = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    Unprojected()(student, teacher, IDS).backward()
    assert teacher.grad is None
