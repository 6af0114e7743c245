"""The module, its teacher, models and checkpoints, optimizer."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, list_optimizers, muon, param_groups_layer_decay
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from kd.data.info import DataInfo
from kd.losses import KDLoss, kd_loss
from kd.models import ModelSpec, StudentSpec, TeacherSpec, build_model, load_checkpoint
from kd.module.distillation import DistillationModule
from kd.optim import (
    OptimSpec,
    Pace,
    build_optimizer,
    build_schedule,
    group_settings,
    parameter_groups,
    settle_resumed,
    warmup_cosine,
)
from kd.run.assemble import assemble
from kd.teachers import build_teacher
from tests._helpers import ARCH, CLASSES, TINY, refuses, save_teacher, tiny_vit

INFO = DataInfo(list(CLASSES), 48, 16)


def make_module(teacher: Path | None, **kwargs: object) -> DistillationModule:
    spec = TeacherSpec(ARCH, 32, checkpoint=str(teacher), kwargs=TINY) if teacher else None
    losses = {"kd": KDLoss(temperature=3.0, weight=0.7)} if teacher else {}
    torch.manual_seed(0)
    student = StudentSpec(ARCH, 32, kwargs={**TINY, "depth": 1})
    return assemble(INFO, student, spec, task_loss_weight=0.3, distill_losses=losses, **kwargs)


@pytest.fixture()
def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    return {"image": images, "target": torch.tensor([0, 1, 2, 3, 0, 1]), "index": torch.arange(6)}


def logged(module: DistillationModule, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    seen: dict[str, float] = {}
    module.log = lambda name, value, **_: seen.__setitem__(name, float(value))  # type: ignore[method-assign]
    module.training_step(batch, 0)
    return seen


# -- the teacher --------


def test_the_teacher_is_off_the_module_tree(teacher: Path) -> None:
    module = make_module(teacher)
    assert not any("teacher" in name for name, _ in module.named_modules())
    assert not any("teacher" in key for key in module.state_dict())
    assert all(not p.requires_grad for p in module.teacher.model.parameters())


def test_train_mode_does_not_wake_the_teacher(
    teacher: Path, batch: dict[str, torch.Tensor]
) -> None:
    frozen = build_teacher(
        TeacherSpec(ARCH, 32, checkpoint=str(teacher), kwargs={**TINY, "proj_drop_rate": 0.5}), 4
    )
    frozen.model.train()
    assert torch.equal(frozen(batch["image"]), frozen(batch["image"]))
    assert not frozen.model.training
    assert not frozen(batch["image"]).requires_grad


def test_the_student_trains_even_if_built_in_eval_mode(teacher: Path) -> None:
    assert all(m.training for m in make_module(teacher).student.modules())


def test_bf16_weights_give_nearly_the_same_answers(
    teacher: Path, batch: dict[str, torch.Tensor]
) -> None:
    frozen = build_teacher(TeacherSpec(ARCH, 32, checkpoint=str(teacher), kwargs=TINY), 4)
    exact = frozen(batch["image"])
    rounded = frozen.to(torch.device("cpu"), torch.bfloat16)(batch["image"])
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0.05)


# -- the total loss --------


def test_the_total_is_the_weighted_sum_and_each_term_is_logged(
    teacher: Path, batch: dict[str, torch.Tensor]
) -> None:
    module = make_module(teacher)
    seen = logged(module, batch)
    logits = module.student.logits(batch["image"])
    kd = kd_loss(logits, module.teacher(batch["image"]), 3.0)
    task = torch.nn.functional.cross_entropy(logits, batch["target"])
    assert seen["train/kd_loss"] == pytest.approx(kd.item(), rel=1e-5)
    assert seen["train/task_loss"] == pytest.approx(task.item(), rel=1e-5)
    assert seen["train/loss"] == pytest.approx(0.7 * kd.item() + 0.3 * task.item(), rel=1e-5)


def test_a_loss_of_weight_zero_is_not_computed(
    teacher: Path, batch: dict[str, torch.Tensor]
) -> None:
    module = make_module(teacher)
    module.student.objective.losses["kd"].weight = 0.0
    object.__setattr__(module.distillation, "answering_teacher", lambda *_: 1 / 0)
    assert set(logged(module, batch)) == {"train/task_loss", "train/loss"}


def test_soft_targets(teacher: Path, batch: dict[str, torch.Tensor]) -> None:
    module = make_module(teacher)
    hard = logged(module, batch)
    soft = logged(
        module, {**batch, "target": torch.nn.functional.one_hot(batch["target"], 4).float()}
    )
    assert soft == pytest.approx(hard)


# -- models and checkpoints --------


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "hacked"),)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"state_dict": Evil()}))
    with refuses(r"evil.pth is not a readable checkpoint"):
        load_checkpoint(tiny_vit(), tmp_path / "evil.pth", "model.teacher.checkpoint")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04N."])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_damaged_checkpoint_is_named(content: bytes, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"bad.{suffix}").write_bytes(content)
    with refuses(rf"model.teacher.checkpoint: .*bad.{suffix}"):
        load_checkpoint(tiny_vit(), tmp_path / f"bad.{suffix}", "model.teacher.checkpoint")


def test_a_checkpoint_that_does_not_fit_names_the_first_keys(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "wide.safetensors", embed_dim=64)
    with refuses(r"cls_token is \(1, 1, 64\) there, \(1, 1, 32\) here.*and \d+ more"):
        load_checkpoint(tiny_vit(), file, "model.teacher.checkpoint")


def test_position_embeddings_of_another_size_are_resampled(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "t.safetensors")
    model = build_model(ModelSpec(ARCH, 64, checkpoint=str(file), kwargs=TINY), 4, "model.student")
    assert model.pos_embed.shape == (1, 65, 32)


def test_a_backbone_alone_is_enough_for_a_student_but_not_for_a_teacher(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "headless.safetensors", num_classes=0)
    spec = ModelSpec(ARCH, 32, checkpoint=str(file), kwargs=TINY)
    build_model(spec, 4, "model.student")
    with refuses("head.weight is missing"):
        build_model(spec, 4, "model.teacher", head=True)


def test_class_names_are_compared(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "named.safetensors"
    save_file(
        tiny_vit().state_dict(), file, {"classes": json.dumps(["apple", "cake", "bread", "dates"])}
    )
    with refuses("class 1 is 'cake' there, 'bread' in the data"):
        load_checkpoint(tiny_vit(), file, "model.teacher.checkpoint", CLASSES, head=True)


def test_convolutional_models_take_any_size() -> None:
    model = build_model(ModelSpec("resnet10t", img_size=64), 4, "model.student")
    assert [tuple(model(torch.zeros(2, 3, *size)).shape) for size in ((64, 64), (96, 32))] == [
        (2, 4),
        (2, 4),
    ]


def test_a_pretrained_teacher_of_other_classes_is_refused() -> None:
    with refuses(r"model.teacher.pretrained: .* names 1000 classes, expected 4"):
        build_model(ModelSpec("resnet18", pretrained=True), 4, "model.teacher", head=True)


# -- optimizer --------


WRAPS = [lambda model: model, nn.Sequential, partial(torch.compile, backend="eager")]
"""A model itself, and in modules of the user's own."""


@pytest.mark.parametrize("wrap", WRAPS)
def test_no_weight_decay_on_norms_biases_and_positions(wrap: Callable[[Any], nn.Module]) -> None:
    model = tiny_vit()
    by_decay = {
        g["weight_decay"]: {id(p) for p in g["params"]}
        for g in parameter_groups([wrap(model)], 0.1)
    }
    decayed = {name for name, p in model.named_parameters() if id(p) in by_decay[0.1]}
    assert decayed == {
        n for n, p in model.named_parameters() if p.ndim > 1 and n not in ("cls_token", "pos_embed")
    }
    assert sum(len(ids) for ids in by_decay.values()) == len(list(model.parameters()))


def test_weight_decay_on_norms_and_biases_where_asked() -> None:
    model = tiny_vit()
    (group,) = build_optimizer(
        [model], OptimSpec(weight_decay=0.1, decay_norm_and_bias=True)
    ).param_groups
    assert group["weight_decay"] == 0.1
    assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("wrap", WRAPS)
def test_rates_fall_with_the_depth_as_timms_do(wrap: Callable[[Any], nn.Module]) -> None:
    model = tiny_vit()
    projection = nn.Linear(4, 4)
    settings = OptimSpec(lr=0.1, weight_decay=0.2, layer_decay=0.5)
    optimizer = build_optimizer([wrap(model), projection], settings)
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[parameter] = (group["lr"], group["weight_decay"])
    expected = {}
    exempt = model.no_weight_decay()
    for group in param_groups_layer_decay(model, 0.2, exempt, layer_decay=0.5):
        for parameter in group["params"]:
            expected[parameter] = (pytest.approx(0.1 * group["lr_scale"]), group["weight_decay"])
    expected |= {projection.weight: (0.1, 0.2), projection.bias: (0.1, 0.0)}
    assert found == expected
    assert len({rate for rate, _ in found.values()}) == len(model.blocks) + 2

    pace = Pace(total_steps=10, steps_per_epoch=10)
    made, schedule = OptimSpec(lr=0.1, layer_decay=0.5, warmup_epochs=0).build([model], pace)
    rates = [group["lr"] for group in made.param_groups]
    for _ in range(5):
        made.step()
        schedule.step()
    halfway = warmup_cosine(5, 0, 10, 0.01)
    assert [group["lr"] for group in made.param_groups] == pytest.approx(
        [rate * halfway for rate in rates]
    )


def test_a_model_that_tells_no_layers_is_refused() -> None:
    with refuses("optim.layer_decay: needs a model of timm"):
        build_optimizer([nn.Linear(2, 2)], OptimSpec(layer_decay=0.5))


@pytest.mark.parametrize("before, after", [(1.0, 0.7), (0.7, 1.0)])
def test_layer_decay_can_not_begin_or_end_in_a_resumed_run(before: float, after: float) -> None:
    with refuses("optim.layer_decay: can't be turned on or off"):
        OptimSpec(layer_decay=after).check_resumed(OptimSpec(layer_decay=before).settings())
    OptimSpec(layer_decay=0.6).check_resumed(OptimSpec(layer_decay=0.7).settings())


def test_steps_are_those_of_torch() -> None:
    def rates(schedule: Callable[[Optimizer], LRScheduler]) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
        made, found = schedule(optimizer), []
        for _ in range(20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            made.step()
        return found

    spec = OptimSpec("sgd", lr=0.05, warmup_epochs=0, schedule="steps", milestones=[2, 3.5])
    wanted = rates(lambda optimizer: MultiStepLR(optimizer, [8, 14]))
    assert rates(lambda optimizer: build_schedule(optimizer, spec, 20, 4)) == pytest.approx(wanted)


@pytest.mark.parametrize("name", [n for n in list_optimizers() if n != "adahessian"])
def test_optimizers_are_those_of_timms_own_factory(name: str) -> None:
    try:
        theirs = create_optimizer_v2(nn.Linear(8, 8), opt=name, lr=0.1, weight_decay=0.1)
    except (AssertionError, ImportError) as error:  # packages that are not installed, and on a GPU
        pytest.skip(str(error))
    ours = build_optimizer([nn.Linear(8, 8)], OptimSpec(name, lr=0.1, weight_decay=0.1))
    assert str(type(ours)) == str(type(theirs))  # Muon's is of a copy of timm's module
    own = {"params", "weight_decay", "fused"} | (
        {"momentum"} if "muon" in name else set()
    )  # Muon keeps 0.95
    settings = [
        {k: v for k, v in o.param_groups[0].items() if k not in own} for o in (ours, theirs)
    ]
    assert settings[0] == settings[1]


def test_timms_own_muon_stays_as_it_is() -> None:
    gradient = torch.randn(8, 8)
    assert (
        muon.zeropower_via_newtonschulz(gradient, 5, muon._COEFFICIENTS["quintic"]).dtype
        == torch.bfloat16
    )


def test_arguments_that_muon_refuses_in_its_step_are_found_out_before() -> None:
    with refuses("optim.kwargs: muon can't work with {'adjust_lr_fn': 'rms'}"):
        OptimSpec("muon", kwargs={"adjust_lr_fn": "rms"})


@pytest.mark.parametrize(
    ("name", "key", "now"), [("adamc", "max_lr_snapshot", 0.01), ("muon", "fallback_lr_scale", 2.0)]
)
def test_what_timm_keeps_of_the_rate_is_this_runs_after_a_resume(
    name: str, key: str, now: float
) -> None:
    spec = OptimSpec(name, lr=0.01, kwargs={"adamw_lr": 0.02} if name == "muon" else {})
    before, after = (build_optimizer([nn.Linear(8, 8)], s) for s in (OptimSpec(name, lr=0.1), spec))
    schedules = [build_schedule(optimizer, spec, 20, 4) for optimizer in (before, after)]
    if key not in after.param_groups[0]:
        pytest.skip(f"timm {timm.__version__} does not keep {key}")
    made_with = group_settings(after)
    after.load_state_dict(before.state_dict())
    settle_resumed(after, schedules[1], made_with, spec.kwargs, 0)
    assert [group[key] for group in after.param_groups] == [now] * len(after.param_groups)


def test_settings_of_other_optimizers() -> None:
    sgd = build_optimizer([tiny_vit()], OptimSpec("sgd", lr=0.1, kwargs={"momentum": 0.8}))
    assert sgd.param_groups[0]["momentum"] == 0.8
    with refuses("optim.kwargs: adamw"):
        build_optimizer([tiny_vit()], OptimSpec(kwargs={"momentun": 0.9}))
