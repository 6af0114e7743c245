"""Short ways of writing settings."""

from kd.run.request import translate
from kd.run.shorthand import notes, written_out


def test_a_list_of_pictures_is_a_manifest() -> None:
    assert written_out(["data.source=a.csv"], []) == [
        "data.source=Manifest",
        "data.source.train=a.csv",
    ]


def test_an_architecture_of_another_family_has_no_arguments_of_the_recipes() -> None:
    recipe = {"model": {"student": {"arch": "vit_tiny_patch16_224", "kwargs": {"depth": 3}}}}
    word = "model.student.arch=resnet18"
    assert written_out([word], [recipe]) == ["model.student.kwargs={}", word]
    assert written_out(["model.student.arch=vit_small_patch16_224"], [recipe])[1:] == []


def test_several_labels_are_read_and_not_mixed() -> None:
    typed = ["data.source=train.csv", "model.task=MultiLabel"]
    request = translate(["recipe=grocery_vit", *typed, "model.distill_losses.kd=BinaryKDLoss"])
    config = request.resolved()
    assert config["data"]["source"]["init_args"]["multi_label"] is True
    assert config["data"]["augment"]["mixup"] == config["data"]["augment"]["cutmix"] == 0
    (line,) = request.notes
    assert line.startswith(
        "data.augment.mixup=0 data.augment.cutmix=0, as pictures with several labels"
    )
    request.resolved()
    assert len(request.notes) == 1  # it is said once

    recipe = {"data": {"augment": {"mixup": 0.8}}}
    mixed = [*typed, "data.augment.mixup=0.8"]
    assert not notes(mixed, written_out(mixed, [recipe]))  # what is typed stays
    assert not notes(["data.source=train.csv"], written_out(["data.source=train.csv"], [recipe]))
