"""Every loss in a real run: trained, logged, checkpointed, resumed, left out of the student; and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from pytorch_lightning import Callback, Trainer
from safetensors.torch import load_file, save_file

from kd.cli import train_main
from kd.data.info import DataInfo
from kd.distill.step import Distillation
from kd.losses import (
    CRDLoss,
    CWDLoss,
    DistillLoss,
    DISTLoss,
    DKDLoss,
    HardKDLoss,
    HintLoss,
    KDLoss,
    NKDLoss,
    SimKDLoss,
    StandardizedLoss,
    WSLDLoss,
    kd_loss,
    targets,
)
from kd.models import StudentSpec, TeacherSpec
from kd.module.distillation import DistillationModule
from kd.run.assemble import assemble
from kd.settings import TapSpec
from kd.tasks import Classification, MultiLabel, Regression
from tests._forks import run_ranks
from tests._helpers import ARCH, CLASSES, TINY, Command, refuses, write_recipe
from tests._runs import (
    assert_same_runs,
    resumed,
    run,
    run_folders,
    student_of,
    summary_of,
)

LEARNT = "student.objective.losses"  # where checkpoints keep the losses' parameters
INFO = DataInfo(list(CLASSES), 48, 16)
PICTURES = torch.randint(
    0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
BATCH = {"image": PICTURES, "target": torch.tensor([0, 1, 2, 3, 0, 1]), "index": torch.arange(6)}


def module(
    teacher: Path, info: DataInfo = INFO, arch: str = ARCH, **kwargs: Any
) -> DistillationModule:
    torch.manual_seed(0)
    return assemble(
        info,
        StudentSpec(arch, 32, kwargs=TINY),
        TeacherSpec(ARCH, 32, checkpoint=str(teacher), kwargs=TINY),
        **kwargs,
    )


LOGIT = ["HardKDLoss", "DKDLoss", "DISTLoss", "NKDLoss", "WSLDLoss", "MLKDLoss", "BinaryKDLoss"]
BLOCKS = {"student": "blocks.0", "teacher": "blocks.1"}
FEATURE: dict[str, dict | None] = {
    "ATLoss": BLOCKS, "PKDLoss": BLOCKS, "MGDLoss": BLOCKS, "CWDFeatureLoss": BLOCKS, "PairwiseLoss": BLOCKS,
    "ReviewKDLoss": {"student": "blocks.*", "teacher": "blocks.*"},
    "ViTKDLoss": {"student": "blocks.*", "teacher": "blocks.*"},
    "CosineLoss": BLOCKS, "SmoothL1Loss": BLOCKS, "MSELoss": BLOCKS, "RADIOLoss": BLOCKS, "GramKLLoss": BLOCKS,
    "RKDLoss": None, "SPLoss": None, "CKALoss": None, "CRDLoss": None, "PseudoClassLoss": None,
}  # fmt: skip


def test_all_losses_together_train_and_resume_bit_for_bit(
    tmp_path: Path, pictures: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in one recipe under its class's name; killed at a step in the second epoch, it goes on as if nothing was."""
    monkeypatch.setattr(
        targets, "BATCHES", 10
    )  # the kill falls between: statistics, then their rotation, carry on
    chosen: dict[str, Any] = {
        name: {"class_path": f"kd.losses.{name}"} for name in [*LOGIT, *FEATURE]
    }
    chosen["std"] = {
        "class_path": "kd.losses.StandardizedLoss",
        "init_args": {
            "loss": {"class_path": "kd.losses.KDLoss", "init_args": {"temperature": 2.0}},
            "weight": 2.0,
        },
    }
    chosen["CRDLoss"]["init_args"] = {"negatives": 16}
    chosen["DKDLoss"]["init_args"] = {"warmup_epochs": 2}
    chosen["RADIOLoss"]["init_args"] = {"standardize": "phi_s"}
    chosen["SmoothL1Loss"]["init_args"] = {"standardize": "variance"}
    chosen["PseudoClassLoss"]["init_args"] = {"queue_size": 20}
    taps = {name: tap for name, tap in FEATURE.items() if tap}
    recipe = write_recipe(
        tmp_path / "tiny.yaml",
        pictures,
        teacher,
        model__distill_losses=chosen,
        model__taps=taps,
        model__ema_decay=0.9,
    )
    depth = "model.student.kwargs.depth=2"
    assert train_main([f"recipe={recipe}", depth]) == 0
    stop = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": 8}})
    assert train_main([f"recipe={recipe}", depth, f"trainer.callbacks+={stop}"]) == 1
    whole, part = run_folders(recipe)
    header = (whole / "metrics.csv").read_text().splitlines()[0]
    assert all(f"train/{name}_loss" in header for name in chosen)
    resumed(part, "trainer.callbacks=null")
    assert_same_runs(part, whole)
    saved = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    for key in (
        "RADIOLoss.targets.turn",
        "PseudoClassLoss.queue",
        "ViTKDLoss.mask_token",
        "CRDLoss.memory_student",
        "MGDLoss.generator.0.weight",
    ):
        assert f"{LEARNT}.{key}" in saved["state_dict"]
    trained = sum(len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"])
    assert trained > len(student_of(whole))
    plain = timm.create_model(ARCH, num_classes=4, img_size=32, **TINY)
    assert set(student_of(whole)) == set(plain.state_dict())


class MemoryOfEachRank(Callback):
    """Writes what a rank remembers, and whether DDP broadcasts it each step."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        memory = pl_module.student.objective.losses["crd"].memory_teacher
        broadcast = [buffer.data_ptr() for buffer in trainer.model.modules_buffers]
        found = {
            "memory": memory,
            "broadcast": memory.data_ptr() in broadcast,
            "counted": len(broadcast),
        }
        torch.save(found, Path(trainer.default_root_dir) / f"rank{trainer.global_rank}.pt")


def test_losses_with_parameters_on_two_processes_with_sharded_state(
    tmp_path: Path, pictures: Path, teacher: Path
) -> None:
    """One of them has no weight: its parameters get no gradient, and DDP must not wait for one."""
    chosen = {"hint": {"class_path": "kd.losses.HintLoss"}, "crd": {"class_path": "kd.losses.CRDLoss"},
              "off": {"class_path": "kd.losses.HintLoss", "init_args": {"weight": 0}}}  # fmt: skip
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, teacher, model__distill_losses=chosen,
        model__taps={"hint": BLOCKS, "off": BLOCKS},
    )  # fmt: skip
    look = json.dumps({"class_path": "tests.distill.test_losses_in_training.MemoryOfEachRank"})
    two_ranks(recipe, "config=ddp_2cpu", "config=zero", f"trainer.callbacks+={look}",
              f"trainer.default_root_dir={tmp_path}", "model.student.kwargs.depth=2", "model.task_loss_weight=0",
              "model.distill_losses.crd.weight=1e-3")  # fmt: skip
    (folder,) = run_folders(recipe)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert torch.equal(ranks[0]["memory"], ranks[1]["memory"])
    assert [(r["broadcast"], r["counted"] > 0) for r in ranks] == [(False, True)] * 2
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")[
        "state_dict"
    ]
    memory = state[f"{LEARNT}.crd.memory_student"]
    assert memory.shape == (48, 128)
    torch.testing.assert_close(memory.norm(dim=1), torch.ones(48))


def two_ranks(recipe: Path, *items: str) -> None:
    shared = [f"recipe={recipe}", "data.batch_size=4", "trainer.max_epochs=1", *items]
    run_ranks(shared, recipe.parent / "log.txt")


def test_losses_over_the_batch_see_the_batches_of_all_processes(
    tmp_path: Path, pictures: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of 4 pictures train the student that one of 8 trains."""
    monkeypatch.setattr(targets, "BATCHES", 3)
    chosen: dict[str, Any] = {
        name: {"class_path": name} for name in ("RKDLoss", "SPLoss", "CKALoss")
    }
    chosen |= {n: {"class_path": n, "init_args": {"gather": True}} for n in ("DISTLoss", "PKDLoss")}
    chosen["PseudoClassLoss"] = {"class_path": "PseudoClassLoss", "init_args": {"queue_size": 20}}
    chosen["RADIOLoss"] = {"class_path": "RADIOLoss", "init_args": {"standardize": "phi_s"}}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, teacher, model__distill_losses=chosen,
        model__taps={"PKDLoss": BLOCKS, "RADIOLoss": BLOCKS},
        optim={"name": "sgd", "lr": 0.02, "warmup_epochs": 0}, trainer__precision="32-true", trainer__max_epochs=1,
    )  # fmt: skip
    two_ranks(recipe, "config=ddp_2cpu")
    assert train_main([f"recipe={recipe}"]) == 0
    assert train_main([f"recipe={recipe}", "model.distill_losses.RKDLoss.weight=0"]) == 0
    two, one, other = (student_of(folder) for folder in run_folders(recipe))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-5)
    assert max((two[key] - value).abs().max() for key, value in other.items()) > 1e-3


def test_features_alone_of_a_vit_teach_a_cnn(
    tmp_path: Path, pictures: Path, teacher: Path, prints: Command, refusal: Command
) -> None:
    """Under bfloat16, by every feature loss. An untrained classifier has no accuracy; the last epoch counts."""
    stages = {
        "student": "layer[13]",
        "teacher": "blocks.*",
    }  # a finer and a coarser grid than the teacher's
    chosen: dict[str, Any] = {name: {"class_path": name} for name in ("HintLoss", *FEATURE)}
    taps = {name: stages for name in ("HintLoss", *FEATURE) if FEATURE.get(name, BLOCKS)}
    recipe = write_recipe(
        tmp_path / "tiny.yaml", pictures, teacher, model__distill_losses=chosen, model__taps=taps,
        model__task_loss_weight=0.0, trainer__precision="bf16-mixed",
        model__student={"arch": "resnet18", "img_size": 32, "kwargs": {"channels": [8, 16, 24, 32]}},
    )  # fmt: skip
    out = prints("train", [f"recipe={recipe}", "trainer.max_epochs=1"])
    assert "student.safetensors holds the last epoch" in out
    assert "acc1" not in out
    (folder,) = run_folders(recipe)
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    assert "val/" not in header
    assert all(f"train/{name}_loss" in header for name in chosen)
    assert "nan" not in "".join(rows)
    summary = summary_of(folder)
    assert summary["student"]["val"] == summary["student"]["best_val"] == {}
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")[
        "state_dict"
    ]
    for key, value in student_of(folder).items():
        assert torch.equal(value, last[f"student.model.{key}"]), key
    assert "checkpoint.monitor: nothing trains the student's classifier" in refusal(
        "train", [f"recipe={recipe}", "checkpoint.monitor=val/acc1"]
    )


# -- single losses ---------------------------------------------------------------------------------------------------


def test_crd_remembers_what_it_saw() -> None:
    torch.manual_seed(0)
    loss = CRDLoss(embed_dim=8, negatives=5, momentum=0.0)
    loss.bind(4, 12)
    loss.build((2, 16), (2, 24))
    before = loss.memory_student.clone()
    index = torch.tensor([3, 7])
    student, teacher = torch.randn(2, 16), torch.randn(2, 24)
    value = loss(student, teacher, torch.zeros(2), index=index)
    value.backward()
    seen = torch.nn.functional.normalize(loss.project_student(student), dim=1)
    torch.testing.assert_close(loss.memory_student[index], seen)
    of_teacher = torch.nn.functional.normalize(loss.project_teacher(teacher), dim=1)
    torch.testing.assert_close(loss.memory_teacher[index], of_teacher)
    others = [i for i in range(12) if i not in (3, 7)]
    assert torch.equal(loss.memory_student[others], before[others])
    assert loss.project_teacher.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="index must hold the samples' numbers"):
        loss(student, teacher, torch.zeros(2))


def test_crd_needs_the_number_of_training_pictures() -> None:
    with pytest.raises(ValueError, match="^CRDLoss needs the number of training pictures"):
        CRDLoss().bind(4, 0)


def test_a_temperature_moves_over_the_epochs() -> None:
    loss = KDLoss(temperature=8.0, final_temperature=2.0)
    student, teacher = torch.randn(2, 4, 5)
    for epoch, temperature in ((0, 8.0), (1, 6.0), (3, 2.0), (9, 2.0)):
        loss.epoch, loss.max_epochs = float(epoch), 4
        torch.testing.assert_close(
            loss(student, teacher, None), kd_loss(student, teacher, temperature)
        )


def test_dkd_warms_up() -> None:
    loss, full = DKDLoss(warmup_epochs=4), DKDLoss()
    student, teacher, target = torch.randn(3, 5), torch.randn(3, 5), torch.tensor([0, 1, 2])
    for epoch, share in ((0, 0.25), (1, 0.5), (3, 1.0), (7, 1.0)):
        loss.epoch = float(epoch)
        torch.testing.assert_close(
            loss(student, teacher, target), share * full(student, teacher, target)
        )
    loss.eval().epoch = 0.0  # a validation is compared with those of later epochs
    assert loss(student, teacher, target) == full(student, teacher, target)


def test_the_module_tells_losses_the_epoch(teacher: Path) -> None:
    built = module(
        teacher, distill_losses={"std": StandardizedLoss(KDLoss(4.0, final_temperature=2.0))}
    )
    built.student.objective.set_epoch(3, 10)
    inner = built.student.objective.losses["std"].loss
    assert (inner.epoch, inner.max_epochs) == (3.0, 10)


def test_a_distillation_token_answers_to_the_logit_losses(teacher: Path) -> None:
    """DeiT: the class head learns from labels, the distillation head from the teacher; inference averages them."""
    for loss, reference in (
        (HardKDLoss(), lambda s, t: torch.nn.functional.cross_entropy(s, t.argmax(1))),
        (KDLoss(3.0), lambda s, t: kd_loss(s, t, 3.0)),
    ):
        built = module(
            teacher, arch="deit_tiny_distilled_patch16_224", distill_losses={"token": loss}
        )
        own, distilled = built.student.model(built.student.prepare(PICTURES))
        found = built.distillation.learn(BATCH, built.distillation.answer(BATCH))
        total, terms = found.total, found.named
        answers = built.teacher(PICTURES)
        torch.testing.assert_close(terms["token_loss"], reference(distilled, answers).detach())
        torch.testing.assert_close(
            terms["task_loss"], torch.nn.functional.cross_entropy(own, BATCH["target"]).detach()
        )
        total.backward()
        assert all(p.grad is not None for p in built.student.model.parameters())
        average = built.student.model.eval()(built.student.prepare(PICTURES))
        torch.testing.assert_close(average, (own + distilled) / 2)


@pytest.mark.parametrize(
    "items",
    [
        ["trainer.precision=bf16-mixed", "trainer.max_epochs=1"],
        ["trainer.max_steps=4", "trainer.max_epochs=5"],
        ["trainer.limit_val_batches=0", "trainer.max_epochs=1", "model.ema_decay=0.5"],
        ["several", "trainer.max_epochs=1"],
    ],
)
def test_simkd_exports_the_teachers_classifier_however_a_run_ends(
    items: list[str], recipe: Path, teacher: Path
) -> None:
    """In float32, from one of several teachers, where no validation ran since the last step, or none at all."""
    if items[0] == "several":
        own = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)}
        both = json.dumps({"a": own, "b": {**own, "img_size": 48}})
        items = [
            "model.teacher=null",
            f"model.teachers={both}",
            "model.teacher_of={x: a}",
            *items[1:],
        ]
    simkd = "model.distill_losses={x: {class_path: SimKDLoss}}"
    folder = run(recipe, "model.task_loss_weight=0", simkd, *items)
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")[
        "state_dict"
    ]
    theirs = load_file(teacher)
    weight = theirs["head.weight"] @ saved[f"{LEARNT}.x.projection.layers.weight"]
    for found in (student_of(folder)["head.weight"], saved["student.model.head.weight"]):
        torch.testing.assert_close(found, weight, rtol=1e-5, atol=1e-6)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "info", "extra", "message"),
    [
        ({"dkd": DKDLoss()}, DataInfo(["a", "b"], 48, 16), {}, "distill_losses.dkd: DKDLoss needs >= 3 classes"),
        ({"nkd": NKDLoss()}, DataInfo(list(CLASSES), 48, 16, soft_targets=True), {},
         "distill_losses.nkd: NKDLoss needs a class id for each picture, the data mixes labels"),
        ({"dkd": DKDLoss()}, DataInfo(list(CLASSES), 48, 16, unlabeled=8), {}, "has pictures without a label"),
        ({"std": StandardizedLoss(DKDLoss())}, DataInfo(list(CLASSES), 48, 16, soft_targets=True), {},
         "StandardizedLoss needs a class id"),
        ({"kd": KDLoss()}, INFO, {"taps": {"at": TapSpec("norm", "norm")}},
         r"model.taps.at: feature loss 'at' not found"),
        ({"kd": KDLoss()}, INFO, {"teacher_of": {"x": "a"}}, r"teacher_of.x: loss 'x' not found \(kd\)"),
        ({"kd": KDLoss()}, INFO, {"teacher_of": {"kd": "a"}}, "teacher 'a' not found in model.teachers"),
        ({"simkd": SimKDLoss()}, INFO, {}, "set model.task_loss_weight=0"),
        ({"wsld": WSLDLoss()}, DataInfo(list(CLASSES), 48, 16, unlabeled=8), {},
         "distill_losses.wsld: WSLDLoss needs a label for each picture, the data has pictures without a label"),
        ({"std": StandardizedLoss(WSLDLoss())}, DataInfo(list(CLASSES), 48, 16, kind="several labels a picture"),
         {"task": MultiLabel()}, "StandardizedLoss compares classes that exclude each other, the data has several lab"),
        ({"std": StandardizedLoss(KDLoss())}, DataInfo(["a", "b"], 48, 16), {}, "StandardizedLoss needs >= 3 classes"),
        ({"dist": DISTLoss()}, DataInfo(["a", "b"], 48, 16), {}, "DISTLoss needs >= 3 classes"),
        ({"cwd": CWDLoss()}, INFO, {}, r"CWDLoss is defined for masks alone \(model.task=Segmentation\)"),
        ({"simkd": SimKDLoss()}, INFO, {"arch": "deit_tiny_distilled_patch16_224", "task_loss_weight": 0.0},
         "model.student.arch: SimKDLoss needs a student with one linear classifier, which VisionTransformerDist"),
    ],
)  # fmt: skip
def test_what_a_loss_is_not_defined_for_is_refused(
    losses: dict[str, DistillLoss],
    info: DataInfo,
    extra: dict,
    message: str,
    teacher: Path,
    tmp_path: Path,
) -> None:
    from tests._helpers import save_teacher

    if len(info.classes) == 2:
        teacher = save_teacher(tmp_path / "two.safetensors", 2)
    with refuses(message):
        module(teacher, info, distill_losses=losses, **extra)


class OwnNetwork(torch.nn.Module):
    """A network of the user's own, without timm's ``get_classifier``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Conv2d(3, 4, 3)
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).mean((2, 3)))


def test_simkd_finds_the_classifier_of_a_model_that_timm_has_not_built() -> None:
    student, teacher = OwnNetwork(), OwnNetwork()
    loss = SimKDLoss()
    step = Distillation(
        student, teacher, task=Classification(2), losses={"simkd": loss}, task_loss_weight=0.0
    )
    assert not student.fc.weight.requires_grad
    step(torch.rand(2, 3, 8, 8), torch.tensor([0, 1])).total.backward()
    step.student.take_classifier()
    weight, bias = loss.fold(teacher.fc.weight, teacher.fc.bias)
    torch.testing.assert_close((student.fc.weight, student.fc.bias), (weight, bias))


def backbone_in(folder: Path, teacher: Path) -> str:
    """A file of the teacher's weights without its classifier."""
    weights = load_file(teacher)
    backbone = {name: value for name, value in weights.items() if not name.startswith("head.")}
    file = folder / "backbone.safetensors"
    save_file(backbone, file)
    return str(file)


def test_a_classifier_that_no_file_has_and_features_alone_teach_means_nothing(
    teacher: Path, tmp_path: Path
) -> None:
    """A backbone's checkpoint brings no classifier: what was drawn is neither measured nor exported as one."""
    of_file = StudentSpec(ARCH, 32, kwargs=TINY, checkpoint=str(teacher))
    of_backbone = replace(of_file, checkpoint=backbone_in(tmp_path, teacher))
    inherited = StudentSpec(ARCH, 32, kwargs=TINY, inherit=True)
    teaching = TeacherSpec(ARCH, 32, checkpoint=str(teacher), kwargs=TINY)
    headless = replace(teaching, head=False)
    for spec, of_teacher, is_brought in (
        (of_file, teaching, True),
        (of_backbone, teaching, False),
        (inherited, teaching, True),
        (inherited, headless, False),
    ):
        built = assemble(
            INFO,
            spec,
            of_teacher,
            task_loss_weight=0.0,
            distill_losses={"hint": HintLoss()},
            taps={"hint": TapSpec("norm", "norm")},
        )
        student = built.student
        assert student.classifies == student.is_measured == is_brought


def test_a_new_classifier_on_a_files_backbone_begins_at_the_mean_of_the_numbers(
    teacher: Path, tmp_path: Path
) -> None:
    data = DataInfo(["kcal"], 48, 16, kind="numbers", scales=[(500.0, 2.0)])
    spec = StudentSpec(ARCH, 32, kwargs=TINY, checkpoint=backbone_in(tmp_path, teacher))
    student = assemble(data, spec, task=Regression()).student
    answers = student.logits(PICTURES).squeeze(1)
    assert (answers - 500).abs().max() < 50  # it was 0 kcal


def test_simkd_of_weight_0_leaves_the_classifier_to_the_labels(teacher: Path) -> None:
    """It was refused beside labels, and beside features alone it set a classifier by a projection that nothing trains."""
    losses = {"simkd": SimKDLoss(weight=0.0)}
    losses["simkd"].own = torch.nn.Parameter(torch.ones(1))
    student = module(teacher, distill_losses=losses).student
    assert student.objective.takeover is None
    assert not any(x.requires_grad for x in student.objective.losses.parameters())
    assert student.model.get_classifier().weight.requires_grad  # type: ignore[operator, union-attr]
    before = student.model.get_classifier().weight.clone()  # type: ignore[operator, union-attr]
    student.take_classifier()
    assert torch.equal(student.model.get_classifier().weight, before)  # type: ignore[operator, union-attr]
