"""Whole runs from Python."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import kd
from kd.api import _request
from kd.cli import main
from kd.errors import RunError
from kd.run.run import Run
from tests._files import json_lines
from tests._helpers import refuses
from tests._runs import evaluated, run_of, summary_of


def test_a_run_from_python_is_that_of_the_command_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = kd.train(
        recipe,
        {"config": ["debug"], "trainer.max_epochs": 2, "seed": 3, "runs_dir": tmp_path / "a"},
    )
    items = [
        f"recipe={recipe}",
        "config=debug",
        "trainer.max_epochs=2",
        "seed=3",
        f"runs_dir={tmp_path / 'b'}",
    ]
    assert main("train", items) == 0
    other = tmp_path / "b" / "tiny" / "000"
    assert result.folder == tmp_path / "a" / "tiny" / "000"
    assert result.summary["student"]["val"] == summary_of(other)["student"]["val"]
    own, theirs = (
        kd.load_student(folder)[0] for folder in (result.folder, str(other / "student.safetensors"))
    )
    for mine, a, b in zip(
        result.student().parameters(), own.parameters(), theirs.parameters(), strict=True
    ):
        assert torch.equal(mine, a)
        assert torch.equal(a, b)

    found = kd.evaluate(result, {"split": "val"})
    assert found["student"] == evaluated(other)["student"]
    more = kd.train(resume=result.folder, settings={"trainer.max_epochs": 3})
    assert (more.folder.resolve(), more.summary["epochs"]) == (result.folder.resolve(), 3)
    (more.folder / "student.safetensors").unlink()
    with refuses("is no finished run: it has no student.safetensors"):
        more.student()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({1: 2}, "what is '1=2'"),
        ({"lr": 1}, r"no key 'lr'; did you mean 'optim\.lr'\?"),
        ({"optim.lr": "much"}, r"optim\.lr: must be a number, got 'much'"),
        ({"optim.kwargs": {"betas": [0.9]}}, r"optim\.kwargs: adamw can't work with"),
        ({"recipe": "x"}, "recipe is given twice"),
        ({"config": "debgu"}, "no overlay 'debgu'; did you mean 'debug'"),
    ],
)
def test_a_mistake_has_the_command_lines_words(recipe: Path, settings: dict, message: str) -> None:
    with refuses(message):
        kd.train(recipe, settings)
    assert not (recipe.parent / "runs").exists()


def test_a_word_without_a_dot_is_an_argument(recipe: Path) -> None:
    with refuses(r"^no key 'epochs'; did you mean 'trainer\.max_epochs'\?$"):
        kd.train(recipe, epochs=1)
    with refuses(r"^seed: must be a whole number"):
        kd.train(recipe, {"seed": 1}, seed="many")


def test_answers_and_an_export_from_python_are_the_commands(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = finished.parents[2] / "data" / "val"
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no picture")
    capsys.readouterr()
    answers = kd.predict(finished, [pictures, broken], top=2, device="cpu")
    assert f"left out {broken}" in capsys.readouterr().err
    out = tmp_path / "answers.jsonl"
    assert main("predict", [str(finished), str(pictures), "top=2", f"out={out}"]) == 0
    written = json_lines(out)
    assert [{"file": file, **row} for file, row in answers.items()] == written
    first = next(iter(answers))
    assert (
        f"<td>{first}</td><td>{answers[first]['labels'][0]['label']}</td>" in answers._repr_html_()
    )
    with refuses("^out: kd.predict returns the answers"):
        kd.predict(finished, pictures, out=out)

    run = tmp_path / "run"
    shutil.copytree(finished, run)
    export = kd.export(run, "torch_export")
    assert Path(export["file"]).is_file() and export["agreement"] == 1.0
    assert "<table>" in export._repr_html_()
    with refuses("^to: must be one of .* got 'onyx'; did you mean 'onnx'"):
        kd.export(run, "onyx")


def test_a_run_that_fails_raises(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="the run ended with status 1, see .*000"):
        kd.train(
            recipe,
            {"optim.lr": 1e30, "trainer.gradient_clip_val": 0, "trainer.precision": "32-true"},
        )
    with refuses("is no finished run"):
        kd.evaluate(run_of(recipe))


def test_the_data_module_is_found_where_it_was() -> None:
    from kd.data import DistillationDataModule

    assert DistillationDataModule is kd.DistillationDataModule
    assert not hasattr(kd.data, "DataModule")


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kd.__file__).parent / "py.typed").is_file()


def test_an_evaluation_takes_a_module_that_is_trusted(tmp_path: Path) -> None:
    with refuses(f"{tmp_path}"):  # no run is there
        kd.evaluate(tmp_path, {"trust": "tests._kills"})
    with refuses("resume: kd-eval resumes no run"):
        kd.evaluate(tmp_path, resume=tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("optim.lr", np.float64(1e-5), 1e-5),
        ("trainer.max_epochs", np.int64(3), 3),
        ("runs_dir", np.datetime64("2026-11-27"), "2026-11-27"),
        ("optim.min_lr_ratio", torch.tensor(0.5), 0.5),
        ("runs_dir", Path("007"), "007"),
        ("runs_dir", "a=b # c", "a=b # c"),
        ("runs_dir", "a: b", "a: b"),
        ("runs_dir", "[a, b]", "[a, b]"),
        ("data.source.init_args.root", "{x} [y]", "{x} [y]"),
        ("data.source.init_args.root", "'true'", "'true'"),
        ("data.img_size", (48, 64), (48, 64)),
        ("optim.kwargs", {"betas": (0.9, 0.95)}, {"betas": [0.9, 0.95]}),
        ("model.teacher.checkpoint", None, None),
    ],
)
def test_a_value_arrives_as_it_is(key: str, value: object, found: object) -> None:
    request = _request({key: value}, {}, ["recipe=grocery_vit", "preflight=off"])
    here = Run.of(request).config
    for part in key.split("."):
        here = here[part]
    assert here == found
    assert type(here) is type(found)
