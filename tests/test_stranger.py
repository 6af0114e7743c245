"""A stranger's settings are data: thousands of hostile ones are tried under an audit hook, generated from the schema.

Which settings there are is read from the settings themselves, so that a new one is tried without anybody's thought.
"""

import json
from pathlib import Path

import pytest

from kd.cli import main
from kd.config import parts as listed
from kd.config.kinds import read
from kd.run import keys
from kd.run.gate import check_foreign
from tests._files import read_yaml, write_yaml
from tests._helpers import ROOT, draw_folder, refuses, save_teacher, write_recipe
from tests._stranger import result_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and its finished run."""
    folder = tmp_path_factory.mktemp("stranger")
    data = draw_folder(folder / "data", train=4, val=2)
    write_recipe(
        folder / "r.yaml", data, save_teacher(folder / "teacher.safetensors"), trainer__max_epochs=1
    )
    assert main("train", [f"recipe={folder / 'r.yaml'}"]) == 0
    return folder


def test_hostile_settings_do_nothing(folder: Path, tmp_path: Path) -> None:
    """Commands, and whatever else a stranger may have written: :mod:`tests.test_situations`."""
    found = result_of("_stranger", folder, cwd=tmp_path, KD_CACHE=str(folder / "cache"))
    assert found["count"] > 20_000 and found["classes"] > 500
    assert not found["harm"], "\n".join(found["harm"][:20])
    assert not list(folder.rglob("HACKED")) and not list(tmp_path.iterdir())


def test_every_setting_that_takes_a_class_says_which() -> None:
    """A new setting of a class type needs a kind in ``listed.PLACES``."""
    takes = {name for name, key in keys.schema().items() if "AnyClass" in str(key.kind)}
    assert {name for name in takes if not read(keys.declared(name)).part} <= {
        "model.distill_losses"
    }


def test_the_list_names_what_there_is() -> None:
    from kd.run.trust import Trust, class_named

    for one in listed.classes():
        kind = class_named(one.name, one.kind, "key", Trust())
        assert f"{kind.__module__}.{kind.__qualname__}" in one.paths


def test_recipes_and_overlays_name_listed_classes() -> None:
    for file in [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "configs").glob("*.yaml")]:
        if file.parent.name != "tune":
            check_foreign(file, [read_yaml(file)], [])


def test_run_is_replaced_in_all_of_the_trainer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {
        "callbacks": [
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"dirpath": "RUN/kept", "filename": "theirs"},
            }
        ],
        "profiler": {"class_path": "AdvancedProfiler", "init_args": {"filename": "profile"}},
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "RUN/logs"}},
        "default_root_dir": "RUN/root",
    }
    write_yaml(folder / "paths.yaml", {"trainer": trainer})
    monkeypatch.chdir(tmp_path)
    items = [f"recipe={folder / 'r.yaml'}", f"config={folder / 'paths.yaml'}", "name=paths"]
    assert main("train", items) == 0
    run = folder / "runs" / "tiny" / "paths"
    assert (
        (run / "kept" / "theirs.ckpt").is_file()
        and list(run.glob("*profile*.txt"))
        and (run / "logs").is_dir()
    )
    assert not list(tmp_path.iterdir()) and not (folder / "runs" / "tiny" / ".RUN").exists()


def test_a_students_file_asks_neither_the_hub_nor_timm(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save

    import kd
    from kd.storage.weights_files import read_metadata

    student = folder / "runs" / "tiny" / "000" / "student.safetensors"
    config = {
        "model_type": "timm_wrapper",
        "architecture": "resnet18",
        "model_args": {"checkpoint_path": "/etc/passwd"},
    }
    builder = {
        "class_path": "kd.models.hugging_face.HuggingFaceBuilder",
        "init_args": {"config": config},
    }
    file = tmp_path / "student.safetensors"
    file.write_bytes(
        save(load_file(student), {**read_metadata(student), "builder": json.dumps(builder)})
    )
    with refuses("its model is built by kd.models.hugging_face"):
        kd.load_student(file)
