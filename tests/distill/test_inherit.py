"""A student that starts from its teacher's layers."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from kd.cli import train_main
from kd.data.info import DataInfo
from kd.distill.student import Student
from kd.losses import KDLoss
from kd.models import StudentSpec, TeacherSpec, build_model
from kd.report.records import FIT_OF_THE_START, read_run
from kd.run.assemble import assemble
from tests._files import read_json, write_json
from tests._helpers import ARCH, CLASSES, TINY, Command, refuses, save_teacher
from tests._runs import resumed, run, run_of, student_of, summary_of


def test_a_teacher_without_a_classifier_gives_a_student_its_layers(
    recipe: Path, tmp_path: Path, prints: Command
) -> None:
    headless = save_teacher(tmp_path / "headless.safetensors", num_classes=0)
    items = [
        f"model.teacher.checkpoint={headless}",
        "model.teacher.head=false",
        "model.student.inherit=true",
    ]
    items += [
        "model.distill_losses={hint: {class_path: HintLoss}}",
        "model.taps.hint={student: norm, teacher: norm}",
    ]
    assert "starts from random weights" not in prints(
        "train", [f"recipe={recipe}", *items, "trainer.max_epochs=1", "optim.lr=1e-12"]
    )
    run = run_of(recipe)
    startup = read_run(run).event("startup")
    assert startup is not None
    assert {FIT_OF_THE_START, "pictures for the fits"} <= set(startup["parts"])
    file = run / "student.safetensors"
    ours, theirs = (load_file(f)["patch_embed.proj.weight"].flatten(1) for f in (file, headless))
    # of one width: turned, but for the direction that LayerNorm does not see, and of another size
    theirs = theirs - theirs.mean(0)
    ours, theirs = ours / ours.norm(), theirs / theirs.norm()
    torch.testing.assert_close(ours.T @ ours, theirs.T @ theirs, atol=1e-4, rtol=1e-3)


def test_a_recipe_bends_to_its_student(
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
    refusal: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``inherit=auto``: another kind of student starts from random weights, at its rate; a refusal names it. One that is
    larger than its teacher is reported, and timm's weights are no tip where they can't be had.
    """
    reachable = iter([True, False])
    monkeypatch.setattr("kd.distill.student.is_downloadable", lambda arch: next(reachable))
    cnn = [
        "model.student.arch=test_resnet.r160_in1k",
        "model.student.kwargs={}",
        "optim.lr_scratch=0.01",
    ]
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
    students = recipe.parent / "runs" / "tiny"

    def student(number: int) -> dict:
        return summary_of(students / f"{number:03d}")["student"]

    said = prints("train", [*items, *cnn, "model.student.inherit=auto"])
    reason = (
        "(student and teacher must be of one family, got ResNet and VisionTransformer; "
        "model.student.arch=auto is a smaller relative of the teacher, which can), at optim.lr_scratch=0.01; "
    )
    assert (
        f"starts from random weights, not from the teacher's layers {reason}model.student.pretrained=true"
        in said
    )
    assert "M parameters, more than its teacher vit_tiny_patch16_224" in said
    assert (student(0)["start"], student(0)["lr"]) == ("scratch", 0.01)
    assert "model.student.pretrained" not in prints(
        "train", [*items, *cnn, "model.student.inherit=auto"]
    )
    assert "model.student.inherit=auto trains such a student without them" in refusal(
        "train", [*items, *cnn, "model.student.inherit=true"]
    )
    assert train_main([*items, "optim.lr_scratch=0.01", "model.student.inherit=auto"]) == 0
    assert (student(2)["start"], student(2)["lr"]) == ("inherited", 0.001)
    assert "random weights" not in capsys.readouterr().out
    weights = f"model.student.checkpoint={students / '002'}"
    assert "inherit: true would overwrite the weights of model.student.checkpoint" in refusal(
        "train", [*items, "model.student.inherit=true", weights]
    )
    assert train_main([*items, "optim.lr_scratch=0.01", "model.student.inherit=auto", weights]) == 0
    assert (student(3)["start"], student(3)["lr"]) == ("pre-trained", 0.001)
    assert train_main([f"resume={students / '000'}", "trainer.max_epochs=2"]) == 0
    assert (student(0)["start"], student(0)["lr"]) == ("scratch", 0.01)


def test_arch_auto_is_a_quarter_of_the_teacher(recipe: Path, prints: Command) -> None:
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
    auto = ["model.student.arch=auto", "model.student.kwargs={}", "model.student.inherit=true"]
    assert f"{ARCH} with {{'depth': 2, 'embed_dim': 16" in prints("train", [*items, *auto])
    folder = run_of(recipe)
    assert student_of(folder)["blocks.1.attn.qkv.weight"].shape == (48, 16)
    assert summary_of(folder)["student"]["start"] == "inherited"
    resumed(folder, "trainer.max_epochs=2")


@pytest.mark.parametrize(
    ("arch", "kwargs", "halves"),
    [
        ("vit_small_patch16_dinov3", TINY, {"embed_dim": 16, "num_heads": 1}),
        ("convnext_tiny.dinov3_lvd1689m", {"depths": [1, 1, 1, 1], "dims": [8, 16, 24, 32]}, {"dims": [4, 8, 12, 16]}),
    ],
)  # fmt: skip
def test_arch_auto_of_a_transformer_and_a_cnn(
    arch: str, kwargs: dict, halves: dict, recipe: Path, prints: Command
) -> None:
    """A whole run, and the relative that it names; of all families: :mod:`tests.distill.inherit.test_cnns`."""
    takes_size = {"img_size": 32} if "patch_size" in kwargs else {}
    teacher = timm.create_model(arch, num_classes=len(CLASSES), **kwargs, **takes_size)
    weights = recipe.parent / "teacher.safetensors"
    save_file(teacher.state_dict(), weights)
    given = json.dumps(kwargs)
    if arch.startswith("vit_small"):  # a folder of timm's, whose file alone knows the arguments
        weights = recipe.parent / "teacher"
        timm.models.save_for_hf(teacher, weights, model_args=kwargs, safe_serialization=True)
        given = "{}"
    items = [
        f"recipe={recipe}",
        f"model.teacher.arch={arch}",
        f"model.teacher.kwargs={given}",
        f"model.teacher.checkpoint={weights}",
        "model.student.arch=auto",
        "model.student.kwargs={}",
        "model.student.inherit=true",
        "preflight=off",
        "trainer.max_epochs=1",
    ]
    (line,) = (x for x in prints("train", items).splitlines() if f"student: {arch} with" in x)
    assert [
        pair for pair in {**kwargs, **halves}.items() if "'{}': {}".format(*pair) not in line
    ] == []
    summary = read_json(run_of(recipe) / "summary.json")
    assert summary["student"]["start"] == "inherited"


def test_a_student_takes_as_many_patches_as_its_teacher_has(recipe: Path, prints: Command) -> None:
    """``patch_size: auto``; without it a line says that there are fewer."""
    teacher = save_teacher(recipe.parent / "of14.safetensors", patch_size=14, img_size=28)
    shape = {name: size for name, size in TINY.items() if name != "patch_size"}
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "model.student.inherit=auto", "model.student.img_size=28",
             f"model.teacher.checkpoint={teacher}", f"model.teacher.kwargs={json.dumps({**shape, 'patch_size': 14})}",
             "model.teacher.img_size=28", "trainer.enable_progress_bar=false"]  # fmt: skip
    students = recipe.parent / "runs" / "tiny"

    def grid(number: int) -> tuple[int, ...]:
        file = students / f"{number:03d}" / "student.safetensors"
        return load_file(file)["patch_embed.proj.weight"].shape[2:]

    own, auto = (
        f"model.student.kwargs={json.dumps({**shape, **given})}"
        for given in ({}, {"patch_size": "auto"})
    )
    assert "model.student.kwargs.patch_size=auto gives it as many (14 pixels)" in prints(
        "train", [*items, own]
    )
    assert f"student: {ARCH} has patches of 14 pixels, as many as its teacher" in prints(
        "train", [*items, auto]
    )
    assert [grid(0), grid(1)] == [(16, 16), (14, 14)]
    assert "as many" not in prints("train", [f"resume={students / '001'}", "trainer.max_epochs=2"])
    assert grid(1) == (14, 14)


class Vits:
    """A builder of the user's whose students have patches of 16 pixels, whatever the settings say."""

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> torch.nn.Module:
        return timm.create_model(
            ARCH, num_classes=num_classes, img_size=img_size, **{**TINY, "patch_size": 16}
        )


def test_auto_is_the_students_alone_and_is_told_where_it_can_do_nothing(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "teacher.safetensors", patch_size=14, img_size=56)

    def made(side: int, patch_size: object = "auto", inherit: Any = True, **more: Any) -> Student:
        small = StudentSpec(
            ARCH, side, inherit=inherit, kwargs={**TINY, "patch_size": patch_size}, **more
        )
        big = TeacherSpec(ARCH, 56, kwargs={**TINY, "patch_size": 14}, checkpoint=str(file))
        module = assemble(
            DataInfo(list(CLASSES), 8, 8), small, big, distill_losses={"kd": KDLoss()}
        )
        return module.student

    def note(*given: Any, **more: Any) -> str:
        return made(*given, **more).note

    for patch_size in (16, 14):  # a student of its own weights keeps its own
        own = tmp_path / str(patch_size) / "model.safetensors"
        own.parent.mkdir()
        save_teacher(own, patch_size=patch_size, img_size=56)
        of_timm = {"architecture": ARCH, "model_args": {**TINY, "patch_size": patch_size}}
        write_json(own.with_name("config.json"), of_timm)
        student = made(56, inherit="auto", checkpoint=str(own))
        assert student.model.patch_embed.patch_size == (patch_size, patch_size)
    assert made(56, inherit=False).model.patch_embed.patch_size == (16, 16)
    assert note(56).startswith("has patches of 14 pixels, as many as its teacher")
    assert note(56, 16).startswith(
        "has fewer patches than its teacher; model.student.kwargs.patch_size=auto gives"
    )
    assert note(46).startswith("keeps its own patches, fewer than its teacher's")
    assert note(64) == note(46, 16) == note(56, 16, builder=Vits()) == ""
    assert note(56, builder=Vits()).startswith("keeps its own patches")
    with refuses(r"can't be built with patch_size=auto"):
        build_model(StudentSpec(ARCH, 64, kwargs={"patch_size": "auto"}), 4, "model.student")


def test_projections_of_an_inherited_classifier_begin_fitted(recipe: Path) -> None:
    """Features beside answers: drawn projections would spoil what was inherited. A copy has its teacher's features."""
    losses = {"summary": "prelogits", "patches": "maps", "middle": "maps@1/2"}
    items = [f"model.distill_losses.{name}={{class_path: MSELoss, init_args: {{standardize: variance}}}}"
             for name in losses]  # fmt: skip
    items += [
        f"model.taps.{name}={{student: {layer}, teacher: {layer}}}"
        for name, layer in losses.items()
    ]
    copy_of = [
        f"model.student.kwargs={json.dumps(TINY)}",
        "model.student.inherit=true",
        "optim.lr=1e-9",
    ]
    run(recipe, *items, *copy_of, "trainer.max_epochs=1")
    rows = list(csv.DictReader((run_of(recipe) / "metrics.csv").open()))
    for name in losses:
        assert (
            float(
                next(
                    row[key]
                    for row in rows
                    for key in row
                    if key.endswith(f"{name}_loss") and row[key]
                )
            )
            < 0.1
        )


def test_a_pretrained_student_without_labels_begins_with_its_teachers_answers(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its features are the teacher's own here, so the answers are too, before the first step."""
    teacher = load_file(save_teacher(tmp_path / "teacher.safetensors"))
    backbone = {name: value for name, value in teacher.items() if not name.startswith("head.")}
    save_file(backbone, tmp_path / "backbone.safetensors")
    items = [
        f"model.teacher.checkpoint={tmp_path / 'teacher.safetensors'}",
        f"model.student.checkpoint={tmp_path / 'backbone.safetensors'}",
        f"model.student.kwargs={json.dumps(TINY)}",
        "model.task_loss_weight=0",
        "model.distill_losses={kd: {class_path: KDLoss}}",
        "optim.lr=1e-9",
        "trainer.max_epochs=1",
    ]
    run(recipe, *items)
    assert (
        "a ridge regression of the teacher's answers on the features of" in capsys.readouterr().out
    )
    student = load_file(run_of(recipe) / "student.safetensors")
    ours, theirs = student["head.weight"], teacher["head.weight"]
    ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.4
