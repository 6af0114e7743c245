"""On a GPU a step must not wait for the device: each place where it would, found without one (:mod:`tests._fake_gpu`).

Of each kind of training the third step counts: the first ones may settle what is settled once. A whole run with a Trainer
and two ranks is watched by :mod:`tests._as_if_on_gpu`.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from torch import Tensor, nn

import kd
from kd import losses
from kd.callbacks.class_order import Confusions
from kd.callbacks.fidelity import FidelityRecord
from kd.callbacks.finite import Finite
from kd.callbacks.host_copies import HostCopies
from kd.callbacks.preflight import JudgedTeacher, Preflight
from kd.callbacks.progress import Progress
from kd.data.engines import device
from kd.data.transforms import MixPairs
from kd.distill.objective import Objective
from kd.distill.step import moving_average
from kd.distill.student import Student
from kd.losses import (
    CosineLoss,
    DistillLoss,
    LogitLoss,
    OrthogonalProjection,
    RADIOLoss,
)
from kd.models import Preprocess, TeacherSpec
from kd.models.segmenter import DenseModel
from kd.monitor import health
from kd.monitor.own_run import OwnRun
from kd.optim import OptimSpec, build_optimizer
from kd.settings import Augment, TapSpec
from kd.tasks import Features, MultiLabel, Regression, Segmentation
from kd.tasks.base import TargetCounts
from kd.tasks.fidelity import KeptLogits
from kd.teachers import Ensemble, FrozenTeacher
from kd.teachers.answer_codec import Codec, Half, TopK
from tests._as_if_on_gpu import train_as_if_on_gpu
from tests._fake_gpu import CUDA, Waits, backward, gpu
from tests._files import read_json
from tests._forks import run_ranks

N, SIDE, CLASSES = 4, 32, 12
NAMES = [str(i) for i in range(CLASSES)]
BASES = (
    DistillLoss,
    LogitLoss,
    losses.FeatureLoss,
    losses.FeatureRegression,
)
LOSSES = [
    name for name in losses.__all__
    if isinstance(kind := getattr(losses, name), type) and issubclass(kind, DistillLoss) and kind not in BASES
]  # fmt: skip
SAMPLE = {"CRDLoss"}
LATER = pytest.mark.slow


def vit(classes: int = CLASSES, width: int = 32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("vit_tiny_patch16_224", img_size=SIDE, patch_size=8, num_classes=classes, depth=2,
                             embed_dim=width, num_heads=2)  # fmt: skip


def cnn() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=CLASSES)


def prepare() -> Preprocess:
    return Preprocess(SIDE, (0.5,) * 3, (0.5,) * 3)


def pair(
    distill: dict[str, DistillLoss], make: Callable[..., nn.Module] = vit, **more: Any
) -> kd.DistillationModule:
    """A pair of models and what the student learns."""
    given = {"task": kd.Classification(CLASSES), "prepare": prepare(), "teacher_prepare": prepare(),
             "data": kd.DataInfo(NAMES, train=100), **more}  # fmt: skip
    return kd.DistillationModule(make(), make(), losses=distill, **given)


def label_free() -> kd.DistillationModule:
    """A student without a classifier, and two teachers."""
    given, taps, of = {}, {}, {}
    for n in "ab":
        given |= {
            f"{n}_s": CosineLoss(OrthogonalProjection(), "phi_s"),
            f"{n}_p": RADIOLoss(standardize="phi_s"),
        }
        taps |= {f"{n}_s": TapSpec("prelogits", "prelogits"), f"{n}_p": TapSpec("norm", "norm")}
        of |= {f"{n}_s": n, f"{n}_p": n}
    spec = TeacherSpec("vit", head=False)
    teachers = Ensemble(
        {
            n: FrozenTeacher(vit(0, width, width), prepare(), spec=spec)
            for n, width in (("a", 32), ("b", 48))
        }
    )
    objective = Objective(Features(), given, 0.0, taps, of)
    objective.task.settle(0)
    info, model = kd.DataInfo([], labels=False, train=100), vit(0)
    average = moving_average(model, 0.999)
    student = Student(model, prepare(), objective, info, teachers, average)
    return kd.DistillationModule(student, teachers)


def dense(distill: dict[str, DistillLoss]) -> kd.DistillationModule:
    info = kd.DataInfo(NAMES, train=100, kind="masks", ignore_index=255)
    return pair(distill, lambda: DenseModel(vit(0), CLASSES), task=Segmentation(CLASSES), data=info)


def labels(distill: dict[str, DistillLoss]) -> kd.DistillationModule:
    return pair(
        distill,
        task=MultiLabel(CLASSES),
        data=kd.DataInfo(NAMES, train=100, kind="several labels a picture"),
    )


def numbers(distill: dict[str, DistillLoss]) -> kd.DistillationModule:
    info = kd.DataInfo(NAMES, train=100, kind="numbers", scales=[(0.0, 1.0)] * CLASSES)
    return pair(distill, task=Regression(CLASSES), data=info)


def place(module: kd.DistillationModule, waits: Waits) -> None:
    """Everything to the device, as ``setup`` does."""
    module.to(CUDA)
    if module.teacher is not None:
        module.teacher.to(CUDA, torch.bfloat16)
    waits.found.clear()


def batch_of(target: str, side: int = SIDE) -> dict[str, Tensor]:
    """A batch on the device; ``target``: what its labels are."""
    targets = {
        "ids": lambda: torch.zeros(N, dtype=torch.long, device=CUDA),
        "shares": lambda: torch.rand(N, CLASSES, device=CUDA),
        "labels": lambda: torch.zeros(N, CLASSES, dtype=torch.long, device=CUDA),
        "masks": lambda: torch.zeros(N, SIDE, SIDE, dtype=torch.uint8, device=CUDA),
    }
    return {"image": torch.zeros(N, 3, side, side, dtype=torch.uint8, device=CUDA), "target": targets[target](),
            "index": torch.zeros(N, dtype=torch.long, device=CUDA)}  # fmt: skip


def waits_of_third_step(
    module: kd.DistillationModule, target: str = "ids", side: int = SIDE
) -> set[tuple[str, str]]:
    """What stops the host in the third step: forward, backward, clipping, AdamW, the moving average, the log's end."""
    if module.teacher is not None:
        module.teacher.identity()  # hashes the weights while they are real
    with gpu() as waits:
        place(module, waits)
        optimizer, finite = build_optimizer([module], OptimSpec(lr=1e-3)), Finite()
        for number in range(3):
            batch = batch_of(target, side)
            waits.found.clear()
            with torch.autocast("cuda", torch.bfloat16):
                out = module.training_step(batch, number)
            backward(out["loss"], waits)
            trained = [p for p in module.parameters() if p.requires_grad]
            assert any(p.grad is not None for p in trained)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            module.student.move_average(number + 1)
            finite.on_train_batch_end(trainer_at(number), module, out, batch, number)
        return set(waits.found)


def trainer_at(batch: int) -> Any:
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=batch))
    return SimpleNamespace(fit_loop=loop, accumulate_grad_batches=1, current_epoch=0, global_rank=0, world_size=1,
                           is_global_zero=False, global_step=batch + 1)  # fmt: skip


def with_loss(name: str) -> tuple[kd.DistillationModule, str]:
    """A training with one loss of the library, and what its targets are."""
    kind = getattr(losses, name)
    loss = kind(kd.KDLoss(2.0)) if name == "StandardizedLoss" else kind()
    if getattr(kind, "for_maps", False):
        return dense({"x": loss}), "masks"
    if getattr(kind, "for_numbers", False):
        return numbers({"x": loss}), "shares"
    if name == "BinaryKDLoss":
        return labels({"x": loss}), "shares"
    if getattr(kind, "joint", False):
        taps = {"x": TapSpec(["blocks.0", "blocks.1"], ["blocks.0", "blocks.1"])}
    else:
        taps = (
            {}
            if issubclass(kind, LogitLoss) or kind.default_tap
            else {"x": TapSpec("blocks.1", "blocks.1")}
        )
    weight = 0.0 if name == "SimKDLoss" else 1.0
    return pair({"x": loss}, taps=taps, task_loss_weight=weight, ema_decay=0.999), "ids"


@pytest.mark.parametrize(
    "name", [n if n in SAMPLE else pytest.param(n, marks=LATER) for n in LOSSES]
)
def test_no_loss_makes_the_host_wait(name: str) -> None:
    assert waits_of_third_step(*with_loss(name)) == set()


def test_a_value_that_is_read_is_found_whichever_pass_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all the others would prove nothing."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * gradient.sum().item()

    plain = kd.KDLoss.forward
    monkeypatch.setattr(kd.KDLoss, "forward", lambda *a: Reads.apply(plain(*a)) + plain(*a).item())
    found = waits_of_third_step(pair({"kd": kd.KDLoss()}))
    assert len(found) == 2
    assert {kind for _, kind in found} == {"reads a value"}


KINDS: dict[str, tuple[Callable[[], kd.DistillationModule], str, int]] = {
    "mixed labels": (lambda: pair({"x": kd.KDLoss()}), "shares", SIDE),
    "pictures of another size": (lambda: pair({"x": kd.KDLoss()}), "ids", 48),
    "two losses over maps": (lambda: dense({"p": losses.PixelKDLoss(), "c": losses.CWDLoss()}), "masks", SIDE),
    "convolutions": (
        lambda: pair({"kd": kd.KDLoss(), "h": losses.HintLoss()}, cnn, taps={"h": TapSpec("layer3", "layer3")}),
        "ids", SIDE,
    ),
    "a loss of each layer": (
        lambda: pair({"h": losses.HintLoss()}, taps={"h": TapSpec(["blocks.0", "blocks.1"], ["blocks.0", "blocks.1"])}),
        "ids", SIDE,
    ),
    "a class token": (
        lambda: pair({"c": CosineLoss(losses.MLPProjection())}, taps={"c": TapSpec("blocks.1", "blocks.1", "class")}),
        "ids", SIDE,
    ),
    "no labels, two teachers": (label_free, "ids", SIDE),
}  # fmt: skip


@LATER
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_training_makes_the_host_wait(kind: str) -> None:
    make, target, side = KINDS[kind]
    assert waits_of_third_step(make(), target, side) == set()


@pytest.mark.parametrize(
    "codec",
    [Half((CLASSES,), relative=True), TopK((CLASSES,), 4, (2.0,)), Half((8, 4, 4))],
    ids=["dense", "topk", "features"],
)
def test_cached_answers_are_decoded_without_a_wait(codec: Codec) -> None:
    with gpu() as waits:
        for _ in range(2):
            waits.found.clear()
            codec.decode(torch.zeros(N, codec.record_bytes, dtype=torch.uint8, device=CUDA))
    assert not waits.found


def from_the_host(augment: Augment) -> tuple[dict[str, Any], device.DeviceViews]:
    """What a loader sends of N pictures, and what makes their views on the device."""
    torch.manual_seed(0)
    mix = MixPairs(augment, CLASSES, 0)
    views = device.DeviceViews((SIDE, SIDE), augment, mix)
    recipes = [device.draw(views.chain, 48, 64, (SIDE, SIDE)) for _ in range(N)]
    plan = device.Plan(recipes, mix.draw([(i, 0) for i in range(N)], (SIDE, SIDE)))
    ids = torch.zeros(N, dtype=torch.long)
    if mix.kinds:
        plan.labels = mix.labels(ids, plan.mixes).float().numpy()
    crops = torch.zeros(N, 3, SIDE, SIDE, dtype=torch.uint8)
    return {"image": crops, "target": ids, "plan": plan, "index": ids}, views


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=LATER), True])
def test_a_batch_is_copied_made_into_views_and_answered_without_a_wait(mixed: bool) -> None:
    module = pair({"kd": kd.KDLoss()})
    module.teacher.identity()
    augment = Augment(color_jitter=0.2, random_erasing=0.5, mixup=0.8 * mixed, cutmix=1.0 * mixed)
    sent, views = from_the_host(augment)
    with gpu() as waits:
        place(module, waits)
        for _ in range(3):
            waits.found.clear()
            batch = dict(sent)
            for name in ("image", "target", "index"):
                batch[name] = batch[name].to(CUDA, non_blocking=True)
            batch = views(batch)
            module.training_step(batch, 0)
            assert batch["image"].device == CUDA
    assert lines(waits) == set()


def lines(waits: Waits) -> set[str]:
    return {place for place, _ in waits.found}


STILL_WAIT = {
    "health": {
        'health.py: "duplicated": round(1 - len(some.unique(dim=0)) / len(some), 4),':
            "a reading, every 50 batches: equal pictures are counted",
        "health.py: numbers = torch.stack([(low == high).double().mean(), low.min(), high.max()]).tolist()":
            "a reading: one copy for all numbers of the pictures",
        "health.py: numbers = iter(torch.stack([leaf.double() for leaf in leaves]).tolist())":
            "a reading: one copy for all numbers of a student",
    },
    "two ranks": {
        "logger_connector.py: scalar_metrics = convert_tensors_to_scalars(metrics)":
            "Lightning's own, every trainer.log_every_n_steps: a row of the log",
    },
}  # fmt: skip
"""Lines outside training steps that wait, by what is done, and why they are allowed to."""


VALIDATED: dict[str, tuple[Callable[[], kd.DistillationModule], str]] = {
    "one label": (lambda: pair({"kd": kd.KDLoss()}), "ids"),
    "known answers": (lambda: pair({"kd": kd.KDLoss()}), "ids"),
    "several labels": (lambda: labels({"kd": losses.BinaryKDLoss()}), "labels"),
    "masks": (lambda: dense({"p": losses.PixelKDLoss()}), "masks"),
    "numbers": (lambda: numbers({"r": losses.RegressionKDLoss()}), "shares"),
    "no labels": (label_free, "ids"),
}


@pytest.mark.parametrize("padding", [pytest.param(0, marks=LATER), 1, pytest.param(N, marks=LATER)])
@pytest.mark.parametrize(
    "kind", [k if k == "masks" else pytest.param(k, marks=LATER) for k in VALIDATED]
)
def test_a_batch_of_validation_waits_nowhere(kind: str, padding: int) -> None:
    make, target = VALIDATED[kind]
    module = make().eval()
    module.teacher.identity()
    with gpu() as waits:
        place(module, waits)
        fidelity = FidelityRecord(SimpleNamespace(keep_as_it_comes=lambda run: None), None)  # type: ignore[arg-type]
        run = SimpleNamespace(module=module, student=module.student, device=CUDA)
        with mock.patch("kd.callbacks.fidelity.RunContext.of", lambda trainer: run):
            for _ in range(2):
                waits.found.clear()
                batch = {**batch_of(target), "real": N - padding}
                if kind == "known answers":
                    module.validation.known = torch.zeros(9, dtype=torch.long)  # on the host
                    index = {"index": torch.zeros(N, dtype=torch.long)}
                    known = module.validation.with_known({**batch, **index})["decided"]
                    batch["decided"] = known.to(CUDA, non_blocking=True)
                out = module.validation_step(batch, 0)
                if kind != "masks":  # whose maps are compared where they are
                    fidelity.on_validation_batch_end(None, module, out, batch, 0)  # type: ignore[arg-type]
    assert lines(waits) == set()


def test_the_preflight_and_the_progress_bar_wait_for_no_batch() -> None:
    """Their copies are read when they have come: at the end, and when the bar is drawn next."""
    module = pair({"kd": kd.KDLoss()})
    module.teacher.identity()
    given = Preflight()
    with gpu() as waits:
        place(module, waits)
        batches = [{**batch_of("ids"), "index": torch.arange(N), "real": N} for _ in range(2)]
        of_val = SimpleNamespace(used=2, pictures=2 * N)
        data = SimpleNamespace(val_dataloader=lambda: batches, eval_batches=lambda split: of_val,
                               batch_size=N, split=lambda name: SimpleNamespace(targets=range(N)))  # fmt: skip
        run = SimpleNamespace(data=data, module=module, teacher=module.teacher, device=CUDA)
        judge, seen, copies = module.task, TargetCounts(CLASSES).to(CUDA), HostCopies.take
        teacher = JudgedTeacher("", judge, Confusions(CLASSES).to(CUDA))
        with mock.patch.object(HostCopies, "take", lambda self, wait=False: copies(self, False)):
            for _ in range(2):
                waits.found.clear()
                given._measure(trainer_at(0), run, [teacher], seen, KeptLogits())  # type: ignore[arg-type]
        progress = Progress()
        progress._bar = SimpleNamespace(
            mininterval=0.0, update=lambda count: None, set_postfix_str=lambda *_, **__: None
        )
        trainer = SimpleNamespace(
            callback_metrics={"train/loss": torch.zeros((), device=CUDA)}, world_size=1
        )
        with mock.patch("kd.callbacks.progress.RunContext.of", lambda trainer: run):
            progress.on_train_batch_end(trainer, module)
    assert lines(waits) == set()


def test_a_reading_of_the_health_waits_for_one_copy() -> None:
    module = pair({"kd": kd.KDLoss()})
    module.teacher.identity()
    with gpu() as waits:
        place(module, waits)
        student, batch = module.student, batch_of("ids")
        layers = list(health._layers_to_read(student.model))
        trained = list(student.parameters())
        reading = health._Reading(student.model, trained, layers)
        out = module.training_step(batch, 0)
        backward(out["loss"], waits)
        waits.found.clear()
        reading.before_step([p for p in module.parameters() if p.requires_grad])
        reading.stop_listening()
        health._inputs(batch["image"])
        trainer: Any = SimpleNamespace(lightning_module=module)
        with torch.no_grad():
            scalars = OwnRun().answers(trainer, out, reading.answer) | reading.scalars()
        reading.record(health._on_host(scalars))
    assert lines(waits) == set(STILL_WAIT["health"])


def waits_of_two_ranks(recipe: Path, *planted: Callable[[], None]) -> list[set[tuple[str, ...]]]:
    """What stops the hosts in the batches of a real run of two processes (gloo), for each rank: part, line, kind.

    Also asserts how often they send something to each other in training batches.
    """
    record, log = recipe.parent / "waits", recipe.parent / "log"
    items = [
        f"recipe={recipe}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "data.batch_size=4",
        "trainer.max_epochs=4",
        "trainer.precision=32-true",
    ]
    run_ranks(items, log, program=train_as_if_on_gpu(record, *planted))
    of_ranks = [read_json(record.with_suffix(f".{rank}")) for rank in range(2)]
    for of_rank in of_ranks:
        assert of_rank["batches"]["training"] >= 6
        assert of_rank["batches"]["validation"] >= 4
        by_file: Counter[str] = Counter()
        for line, times in of_rank["collectives"].items():
            by_file[line.partition(":")[0]] += times
        # gradients of each batch; of each epoch an agreement (sent, received), and a text in two parts
        expected = {"phases.py": of_rank["batches"]["training"], "processes.py": 4 * 4}
        assert by_file == expected, of_rank["collectives"]
    return [{tuple(wait) for wait in of_rank["waits"]} for of_rank in of_ranks]


def test_no_batch_of_a_trainer_with_two_ranks_waits(recipe: Path) -> None:
    """All callbacks of a run, training and validation."""
    for waits in waits_of_two_ranks(recipe):
        assert {line for _, line, _ in waits} == set(STILL_WAIT["two ranks"])


def plant_reads() -> None:
    """Makes a callback read a value in each batch of training, and another in each of validation."""
    at_training, at_validation = Finite.on_train_batch_end, FidelityRecord.on_validation_batch_end

    def reads_the_loss(callback: Any, trainer: Any, module: Any, out: Any, *rest: Any) -> None:
        out["loss"].item()
        at_training(callback, trainer, module, out, *rest)

    def counts_a_class(
        callback: Any, trainer: Any, module: Any, out: Any, batch: Any, *rest: Any
    ) -> None:
        (batch["target"] == 0).nonzero()
        at_validation(callback, trainer, module, out, batch, *rest)

    Finite.on_train_batch_end = reads_the_loss  # type: ignore[method-assign]
    FidelityRecord.on_validation_batch_end = counts_a_class  # type: ignore[method-assign]


def test_a_wait_in_a_callback_of_a_trainer_with_two_ranks_is_found(recipe: Path) -> None:
    """Else the run without any would prove nothing."""
    for waits in waits_of_two_ranks(recipe, plant_reads):
        in_callbacks = {wait for wait in waits if wait[1] not in STILL_WAIT["two ranks"]}
        assert in_callbacks == {
            ("training", 'test_waits.py: out["loss"].item()', "reads a value"),
            (
                "validation",
                'test_waits.py: (batch["target"] == 0).nonzero()',
                "asks for the size of aten::nonzero",
            ),
        }
