"""Names of runs, and values that need each other."""

from kd.run.checks import notes_on_patches
from kd.run.request import translate


def test_a_size_that_patches_do_not_divide_is_noted() -> None:
    words = ["recipe=foodtag_vit", "model.student.img_size=99", "model.distill_losses=null"]
    request = translate(words)
    request.check_read(request.resolved())
    assert "model.distill_losses: none, so the student learns" in str(request.notes)
    assert any(
        note.startswith("model.student.img_size: 99 is no multiple") for note in request.notes
    )
    arch = "vit_small_patch16_224"
    model = {"arch": arch, "img_size": (224, 96), "kwargs": {"patch_size": 14}, "builder": None}
    assert notes_on_patches({"model.student": model}) == [
        "model.student.img_size: 96 is no multiple of 14, the side of a patch: the model does not see the rest"
    ]
    padded = {**model, "kwargs": {"patch_size": 14, "dynamic_img_pad": True}}
    assert not notes_on_patches({"a": padded, "b": {**model, "kwargs": {}}})
