"""Weights files as people have them: wrapped, pickled, with names beside them, as folders, of other shapes."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from kd.data.info import DataInfo
from kd.errors import UserError
from kd.models import ModelSpec, StudentSpec, TeacherSpec, build_model, load_checkpoint
from kd.models.weights import about, read_names
from kd.run.assemble import assemble
from kd.teachers import build_teacher
from tests._files import write_json
from tests._helpers import (
    ARCH,
    CLASSES,
    TINY,
    WITHOUT_TEACHER,
    Command,
    refuses,
    save_teacher,
    tiny_vit,
    write_recipe,
)
from tests._runs import run

PICTURES = torch.randint(
    0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def test_a_pickled_model_is_told_what_to_save(
    recipe: Path, tmp_path: Path, refusal: Command
) -> None:
    torch.save(tiny_vit(), tmp_path / "model.pth")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pth")
    for name, what in (
        ("model", "timm.models.vision_transformer.VisionTransformer"),
        ("script", "a TorchScript program"),
    ):
        line = refusal(
            "train", [f"recipe={recipe}", f"model.teacher.checkpoint={tmp_path / name}.pth"]
        ).strip()
        assert line.count("\n") == 0, line
        assert (
            f"it pickles {what}, not weights alone; save them with torch.save(model.state_dict(), FILE)"
            in line
        )


@pytest.mark.parametrize(
    "names",
    [
        {"class_names": ["dates", "bread", "apple", "cake"]},
        {"class_to_idx": {"apple": 2, "bread": 1, "cake": 3, "dates": 0}},
        {"hyper_parameters": {"categories": ["dates", "bread", "apple", "cake"]}},
    ],
)
def test_class_names_in_the_file_bring_its_answers_into_the_datas_order(
    names: dict, tmp_path: Path
) -> None:
    file = tmp_path / "w.pth"
    model = tiny_vit(seed=3).eval()
    torch.save({"state_dict": model.state_dict(), **names}, file)
    teacher = build_teacher(TeacherSpec(ARCH, 32, checkpoint=str(file), kwargs=TINY), 4, CLASSES)
    expected = model(teacher.prepare(PICTURES))[:, [2, 1, 3, 0]]
    torch.testing.assert_close(teacher(PICTURES), expected)


def test_a_run_folder_brings_its_architecture_size_and_normalisation(
    recipe: Path, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(
        recipe,
        "trainer.max_epochs=1",
        "model.student.mean=[0.1,0.2,0.3]",
        "model.student.std=[0.3,0.2,0.1]",
    )
    student = timm.create_model(f"local-dir:{folder / 'student'}", pretrained=True).eval()
    capsys.readouterr()
    for named in (folder, folder / "student"):
        teacher = build_teacher(TeacherSpec("resnet18", 64, checkpoint=str(named)), 4, CLASSES)
        assert (
            f"model.teacher: {ARCH} at 32 px, as {named} says, not the settings' resnet18"
            in capsys.readouterr().out
        )
        assert teacher.columns is None
        pixels = PICTURES / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]
        expected = student(pixels / torch.tensor([0.3, 0.2, 0.1])[:, None, None])
        torch.testing.assert_close(teacher(PICTURES), expected)
    unnamed = write_recipe(
        tmp_path / "other.yaml", pictures, folder, model__teacher={"checkpoint": str(folder)}
    )
    run(unnamed, "trainer.max_epochs=1")


def test_a_student_of_other_classes_brings_its_backbone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five, renamed = (
        save_teacher(tmp_path / "five.safetensors", 5, depth=1),
        tmp_path / "renamed.safetensors",
    )
    state = tiny_vit(depth=1, seed=3).state_dict()
    save_file(state, renamed, {"classes": json.dumps(["apple", "bread", "cake", "figs"])})
    items = [*WITHOUT_TEACHER, "trainer.max_epochs=1", "optim.lr=1e-12"]
    for file, why in (
        (five, "names 5 classes, the data has 4"),
        (renamed, "class 3 is 'figs' there, 'dates' in the data"),
    ):
        folder = run(recipe, *items, f"model.student.checkpoint={file}")
        assert f"{why}: its backbone is taken, the classifier is new" in capsys.readouterr().out
    made = timm.create_model(f"local-dir:{folder / 'student'}", pretrained=True)
    torch.testing.assert_close(made.blocks[0].mlp.fc1.weight, state["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(made.head.weight, state["head.weight"])


def test_a_backbone_as_a_teacher_names_what_trains_its_classifier(tmp_path: Path) -> None:
    file = tmp_path / "backbone.safetensors"
    save_file({k: v for k, v in tiny_vit().state_dict().items() if not k.startswith("head.")}, file)
    with refuses(r"head.weight is missing; .* has no classifier: recipe=photos model.teacher.ba"
                       rf"ckbone={file} fine-tunes it first, recipe=foundation_vit learns its features"):  # fmt: skip
        load_checkpoint(tiny_vit(), file, "model.teacher.checkpoint", CLASSES, head=True)


def test_positions_of_a_file_that_is_not_square(tmp_path: Path) -> None:
    """2 x 8 patches are as many as 4 x 4: they fit pictures of the file's size alone."""
    model = timm.create_model(ARCH, img_size=(16, 64), num_classes=4, **TINY)
    file = tmp_path / "w.safetensors"
    save_file(model.state_dict(), file, {"img_size": json.dumps([16, 64])})
    kept = build_model(
        ModelSpec(ARCH, (16, 64), checkpoint=str(file), kwargs=TINY), 4, "model.student"
    )
    assert torch.equal(kept.pos_embed, model.pos_embed)
    for other in (32, (64, 16), 48):
        spec = ModelSpec(ARCH, other, checkpoint=str(file), kwargs=TINY)
        with refuses("does not fit: pos_embed is missing"):
            build_model(spec, 4, "model.student")


def test_a_teacher_without_a_name(tmp_path: Path) -> None:
    with refuses(r"model.teacher.arch: which model\?"):
        build_teacher(TeacherSpec(checkpoint=str(save_teacher(tmp_path / "t.safetensors"))), 4)
    with refuses(r"model.student.arch: which model\?"):
        assemble(DataInfo(list(CLASSES), 8, 8), StudentSpec())


@pytest.mark.parametrize("content", ['{"0": "cat", "1": "dog"}', '"cat"', "3"])
def test_a_file_of_names_that_is_no_list(content: str, tmp_path: Path) -> None:
    """The keys of a mapping, and the letters of a text, are no class names."""
    file = tmp_path / "names.json"
    file.write_text(content)
    with refuses("^model.teacher.classes: .*names.json holds no JSON list"):
        read_names(file, "model.teacher.classes")


def test_odd_values_of_a_transformers_folder_are_named(tmp_path: Path) -> None:
    """Of what is read of it: its architecture is that of its tensors."""
    patches = {"embeddings.patch_embeddings.projection.weight": torch.zeros(192, 3, 16, 16)}
    save_file(patches, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": "vit", "hidden_size": None})
    assert not about(str(tmp_path)).builder
    file = tmp_path / "preprocessor_config.json"
    write_json(file, {"image_mean": 0.5})
    with pytest.raises(UserError) as refused:
        load_checkpoint(tiny_vit(), tmp_path, "model.teacher.checkpoint")
    assert str(refused.value).startswith(f"model.teacher.checkpoint: {file}: image_mean: must be a")
