"""Names of runs, and values that need each other."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kd.config.kinds import wrong
from kd.errors import UserError
from kd.run import keys
from kd.run.checks import notes_on_patches
from kd.run.request import translate


def test_names_of_runs() -> None:
    kind = keys.schema()["name"].kind
    assert wrong(kind, "first-try") == ""
    assert wrong(kind, "../x").startswith(
        "must be letters, digits, . + - _ alone, the first a letter"
    )


def test_zero_on_one_process_is_refused_before_torch(finished: Path, tmp_path: Path) -> None:
    """As of a run of two processes that is resumed on one."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("zero: false", "zero: true"))
    items = [f"resume={run}", "trainer.devices=1", "trainer.max_epochs=3"]
    code = f"import sys; from kd.cli import main; print(main('train', {items}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.endswith("; optim.zero=false trains on one\n")


def test_a_size_that_patches_do_not_divide_is_noted() -> None:
    request = translate(["recipe=foodtag_vit", "model.student.img_size=99"])
    request.check_read(request.resolved())
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


def test_a_least_number_of_epochs_beyond_the_end_is_refused() -> None:
    for given, told in (
        (
            "trainer.min_epochs=90",
            "trainer.min_epochs: 90 has no effect beyond trainer.max_epochs=",
        ),
        ("trainer.min_steps=90", "trainer.min_steps: 90 has no effect beyond trainer.max_steps=9"),
    ):
        with pytest.raises(UserError, match=told):
            translate(["recipe=foodtag_vit", "trainer.max_steps=9", given]).resolved()
    translate(["recipe=foodtag_vit", "trainer.min_epochs=2", "trainer.max_epochs=3"]).resolved()
