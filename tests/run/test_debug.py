"""What ``config=debug`` changes of a recipe yields to the pictures and models that the command line names."""

from kd.run.request import translate

DINO = "model.teachers.dino"


def settings(*words: str) -> dict:
    return translate([*words, "config=debug"]).resolved()


def test_own_pictures_and_checkpoints_take_the_place_of_drawn_and_small_ones() -> None:
    own = settings("recipe=finetune", "data.source.root=DIR", "model.student.checkpoint=RUN")
    assert own["data"]["source"]["init_args"]["root"] == "DIR"
    assert own["model"]["student"]["arch"] == ""
    own = settings("recipe=foundation_vit", "data.source.root=DIR", f"{DINO}.checkpoint=FILE")
    assert "dinov2" in own["model"]["teachers"]["dino"]["arch"]
    drawn = settings("recipe=finetune")
    assert "root" not in drawn["data"]["source"]["init_args"]
    assert drawn["model"]["student"]["arch"] == "vit_tiny_patch16_224"
