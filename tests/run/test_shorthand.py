"""Short ways of writing settings."""

from kd.run.shorthand import written_out


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
