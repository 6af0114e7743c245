"""Where a run at a URL has its folder, and what is fetched of it."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kd.commands.runs import _described
from kd.report.records import read_run
from kd.storage.objects import TIMES, file_system
from kd.storage.run_urls import (
    fetched_run,
    folder_of_recipe,
    run_at,
)
from kd.storage.weights_files import weights_file
from scripts import house
from tests._helpers import refuses


@pytest.fixture
def recipe_in_store(own_cache: Path) -> Iterator[str]:
    """URL of a recipe's runs with one run, 000, which ``latest`` names."""
    url = "memory://urls/tiny"
    files, path = file_system(url)
    files.pipe_file(f"{path}/000/config.yaml", b"recipe: tiny\n")
    files.pipe_file(f"{path}/000/student.safetensors", b"weights")
    files.pipe_file(f"{path}/000/checkpoints/last.ckpt", b"x" * 5000)
    files.pipe_file(f"{path}/latest", b"000\n")
    yield url
    files.rm(path, recursive=True)


def test_links_are_refused_in_a_run_and_not_in_a_folder_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").symlink_to("/data/a.jpg")
    assert run_at(str(tmp_path / "pictures")) == tmp_path / "pictures"
    (tmp_path / "pictures" / "config.yaml").touch()
    with refuses("a.jpg: is a link"):
        run_at(str(tmp_path / "pictures"))


def test_the_folder_of_a_recipes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    assert folder_of_recipe("runs", "tiny") == folder_of_recipe(Path("runs"), "tiny")
    assert folder_of_recipe("s3://bucket/runs/", "tiny") == tmp_path / "runs/s3/bucket/runs/tiny"
    with refuses(r"^runs_dir: "):
        folder_of_recipe("s3://../../../runs", "tiny")


def test_the_folder_of_a_recipes_runs_is_built_in_one_place() -> None:
    """``FOLDER / recipe`` elsewhere would not know of URLs; ``kd-size`` keeps its sizes beside the runs."""
    places = []
    for module, file in house.sources().items():
        for node in ast.walk(house.tree_of(file)):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                continue
            if re.search(r"(\brecipe|\['recipe'\])$", ast.unparse(node.right)):
                places.append(module)
    assert places == ["kd.fleet.sizing.search", "kd.storage.run_urls"]


def test_weights_are_taken_from_the_run_that_latest_names(
    recipe_in_store: str, tmp_path: Path
) -> None:
    for run in ("000", "latest", "latest/"):
        file = weights_file(Path(f"{recipe_in_store}/{run}"), "model.student.checkpoint")
        assert file.read_bytes() == b"weights"
    with refuses("^weights: run memory://urls/other/latest not found$"):
        weights_file(Path("memory://urls/other/latest"), "weights")
    with refuses("^weights: https://host/w.pth.download=true: .* leave out what follows"):
        weights_file(Path("https://host/w.pth?download=true"), "weights")
    (tmp_path / "a.pth").touch()
    assert weights_file(Path(f"file://{tmp_path}/a.pth"), "weights").is_file()


def test_a_finished_run_that_was_fetched_is_finished(recipe_in_store: str) -> None:
    """Its files' times stand for their states in the store, not for when the run ended."""
    files, path = file_system(recipe_in_store)
    header = {"kind": "header", "schema": 1, "of": "steps", "rank": 0, "t": 1.8e9}
    files.pipe_file(f"{path}/000/records/phases.rank0.jsonl", json.dumps(header).encode())
    files.pipe_file(f"{path}/000/summary.json", b'{"status": "done"}')
    folder = run_at(f"{recipe_in_store}/000")
    assert read_run(folder).summary["status"] == "done"
    assert _described(folder)["changed"] > TIMES  # kd-runs shows it


def test_checkpoints_that_are_not_fetched_need_no_room(
    recipe_in_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("kd.storage.objects.shutil.disk_usage", lambda path: room)
    folder = fetched_run(f"{recipe_in_store}/latest", "run", checkpoints=False)
    assert (folder / "student.safetensors").is_file()
    assert not (folder / "checkpoints").exists()
    with refuses("resume: .* has room for 0 MB"):
        fetched_run(f"{recipe_in_store}/000", "resume")
