"""Short ways of writing settings."""

from pathlib import Path

import pytest

from kd.data.sources import Manifest
from kd.run.request import translate
from kd.run.run import Run
from kd.run.shorthand import written_out
from tests._helpers import refuses


def test_a_list_of_pictures_is_a_manifest() -> None:
    words, notes = written_out(["data.source=a.csv"], [])
    assert words == ["data.source=Manifest", "data.source.train=a.csv"] and not notes


def test_a_task_that_is_no_yaml_is_refused_by_its_key() -> None:
    with refuses("^model.task: no class '{a'"):
        translate(["recipe=foodtag_vit", "model.task={a"]).resolved()


def test_an_architecture_of_another_family_has_no_arguments_of_the_recipes() -> None:
    recipe = {"model": {"student": {"arch": "vit_tiny_patch16_224", "kwargs": {"depth": 3}}}}
    word = "model.student.arch=resnet18"
    assert written_out([word], [recipe])[0] == ["model.student.kwargs={}", word]
    assert len(written_out(["model.student.arch=vit_small_patch16_224"], [recipe])[0]) == 1


def test_a_teacher_by_its_name_on_the_hub_or_its_file(tmp_path: Path) -> None:
    """The settings that load it, and a line that shows them; a plain name stays a mistake."""
    none = ["model.teacher.checkpoint=null", "model.teacher.recipe=null"]
    timm = "vit_small_patch14_dinov2.lvd142m"
    vit = "model.teacher.builder.path=google/vit-base-patch16-224"
    loads = {
        str(tmp_path): [f"model.teacher.checkpoint={tmp_path}"],
        "best.pth.tar": ["model.teacher.checkpoint=best.pth.tar"],
        "google/vit-base-patch16-224": [*none, "model.teacher.builder=HuggingFaceBuilder", vit],
        f"hf-hub:timm/{timm}": [
            *none, f"model.teacher.arch={timm}", "model.teacher.kwargs={}", "model.teacher.pretrained=true"
        ],
    }  # fmt: skip
    for place, words in loads.items():
        typed = f"model.teacher={place}"
        found, notes = written_out([typed], [])
        assert found == words
        assert notes == [f"{typed}: {' '.join(words)}"]
    assert written_out([f"model.teachers.a={tmp_path}"], [])[0] == [
        f"model.teachers.a.checkpoint={tmp_path}"
    ]
    assert written_out([f"model.student=timm/{timm}"], [])[0] == [
        "model.student.checkpoint=null",
        f"model.student.arch={timm}",
        "model.student.kwargs={}",
        "model.student.pretrained=true",
    ]
    whole = (
        f"model.teacher={{arch: resnet18, checkpoint: {'a' * 300}}}"  # no file's name is so long
    )
    for word in ("model.teacher=null", whole):
        assert written_out([word], []) == ([word], [])
    with refuses("model.teacher: has settings of its own"):
        written_out(["model.teacher=resnet18"], [])
    with refuses("model.teacher.arch: .*model.teacher=OWNER/NAME loads"):
        translate(["recipe=distill", "model.teacher.arch=google/vit-base-patch16-224"]).resolved()
    request = translate(["recipe=distill", "model.teacher=google/vit-base-patch16-224"])
    assert (
        request.resolved()["model"]["teacher"]["builder"]["init_args"]["path"]
        == vit.partition("=")[2]
    )


def test_several_labels_are_read_and_not_mixed() -> None:
    typed = ["data.source=train.csv", "model.task=MultiLabel"]
    request = translate(["recipe=grocery_vit", *typed, "model.distill_losses.kd=BinaryKDLoss"])
    config = request.resolved()
    assert config["data"]["source"]["init_args"]["multi_label"] is True
    assert config["data"]["augment"]["mixup"] == config["data"]["augment"]["cutmix"] == 0
    (line,) = request.notes
    assert line.startswith(
        "data.augment.mixup=0 data.augment.cutmix=0, as the pictures have several labels"
    )
    request.resolved()
    assert len(request.notes) == 1  # it is said once
    another = translate(["recipe=grocery_vit", *typed])
    Run.settings(None, another)
    assert another.notes == []  # the caller's request stays as it is

    recipe = {"data": {"augment": {"mixup": 0.8}}}
    mixed = [*typed, "data.augment.mixup=0.8"]
    assert not written_out(mixed, [recipe])[1]  # what is typed stays
    assert not written_out(["data.source=train.csv"], [recipe])[1]


TABLE = ["recipe=distill", "data.source=train.csv"]
EXCHANGED = [
    (["model.task=MultiLabel"], "MultiLabel", "BinaryKDLoss"),
    (["data.source.multi_label=true"], "MultiLabel", "BinaryKDLoss"),
    (["model.task=Regression"], "Regression", "RegressionKDLoss"),
    (["data.source.targets=[calories, fat]"], "Regression", "RegressionKDLoss"),
    (["data.source.targets=label"], "Regression", "RegressionKDLoss"),
    (["model.task={class_path: Regression, init_args: {loss: l1}}"], "Regression", "RegressionKDLoss"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "task", "loss"), EXCHANGED, ids=str)
def test_a_recipe_gets_the_losses_of_the_task_that_the_pictures_have(
    typed: list[str], task: str, loss: str
) -> None:
    request = translate([*TABLE, *typed])
    config = request.resolved()
    assert config["model"]["task"]["class_path"] == f"kd.tasks.{task}"
    losses = config["model"]["distill_losses"]
    assert losses["kd"]["class_path"] == f"kd.losses.{loss}"
    assert losses["kd"]["init_args"]["weight"] == 0.9  # the recipe's
    assert losses["summary"]["class_path"] == "kd.losses.MSELoss"
    assert config["data"]["augment"]["mixup"] == config["data"]["augment"]["cutmix"] == 0
    (line,) = request.notes
    changed = f"data.augment.mixup=0 data.augment.cutmix=0 model.distill_losses.kd={loss}, as the pictures have"
    assert changed in line
    arguments = config["data"]["source"]["init_args"]
    source = Manifest(**arguments)
    assert (arguments["multi_label"], source.targets) == {
        "MultiLabel": (True, None),
        "Regression": (False, ["calories", "fat"] if "fat" in str(typed) else ["label"]),
    }[task]


def test_numbers_are_those_of_the_column_that_was_named() -> None:
    request = translate([*TABLE, "model.task=Regression", "data.source.label_column=kcal"])
    assert request.resolved()["data"]["source"]["init_args"]["targets"] == ["kcal"]
    assert request.notes[0].startswith("data.source.targets=[kcal] data.augment.mixup=0")


def test_a_loss_that_was_typed_stays_and_is_refused_with_all_that_does_not_fit() -> None:
    typed = ["model.task=MultiLabel", "model.distill_losses.kd=DISTLoss", "model.distill_losses.more=KDLoss"]  # fmt: skip
    request = translate([*TABLE, *typed, "data.augment.mixup=0.8"])
    losses = "model.distill_losses.kd=BinaryKDLoss model.distill_losses.more=BinaryKDLoss"
    remedy = f"{losses} data.augment.mixup=0"
    with refuses(f"^model.distill_losses.kd: DISTLoss .*: {remedy}$"):
        request.resolved()
    translate([*TABLE, typed[0], *remedy.split(" ")]).resolved()


def test_a_student_without_a_classifier_keeps_the_recipes_losses() -> None:
    typed = [*TABLE, "model.task=MultiLabel", "model.student.head=false"]
    losses = translate(typed).resolved()["model"]["distill_losses"]
    assert losses["kd"]["class_path"] == "kd.losses.KDLoss"


def test_a_recipe_of_the_task_is_left_as_it_is() -> None:
    request = translate(["recipe=foodtag_calories", "model.task=Regression"])
    losses = request.resolved()["model"]["distill_losses"]
    assert losses["kd"]["class_path"] == "kd.losses.RegressionKDLoss"
    assert not request.notes
