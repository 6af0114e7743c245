"""A stranger's settings are data: thousands of hostile ones are tried under an audit hook, generated from the schema.

Which settings there are is read from the settings themselves, so that a new one is tried without anybody's thought.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kd.cli import main
from kd.config import parts as listed
from kd.config.kinds import read
from kd.run import keys
from kd.run.gate import check_foreign
from tests._helpers import ROOT, draw_folder, save_teacher, write_recipe


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
    run = folder / "runs" / "tiny" / "000"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "KD_CACHE": str(folder / "cache"),
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests._stranger", str(folder), str(run)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["count"] > 20_000 and result["classes"] > 500
    assert not result["harm"], "\n".join(result["harm"][:20])
    assert not list(folder.rglob("HACKED")) and not list(tmp_path.iterdir())


def test_commands_do_nothing_for_a_stranger(folder: Path, tmp_path: Path) -> None:
    """Every command, up to where its long work begins, on hostile settings, runs, students and records.

    What it prints moves no cursor and forges no line.
    """
    run = folder / "runs" / "tiny" / "000"
    assert main("eval", [str(run)]) == main("export", [str(run), "to=onnx"]) == 0
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "KD_CACHE": str(folder / "cache"),
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests._commands", str(folder)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["count"] > 200
    # a run that no search has made has nothing to be compared with; a job lacks its image
    assert {*result["warm_failed"]} <= {"compare 2", "launch 2"}
    assert not result["harm"], "\n".join(result["harm"][:20])
    assert not result["left"] and not list(folder.rglob("HACKED"))


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
            check_foreign(file, [yaml.safe_load(file.read_text())], [])


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
    (folder / "paths.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
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
    from kd.errors import UserError
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
    with pytest.raises(UserError, match="its model is built by kd.models.hugging_face"):
        kd.load_student(file)
