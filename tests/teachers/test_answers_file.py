"""Answers from a file: any of the forms teaches the same, and a wrong file is one line."""

import codecs
import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import save_file

from kd.cli import main, train_main
from kd.teachers import answers_file
from kd.teachers.answers_file import AnswersFile
from tests._files import read_json
from tests._helpers import (
    ARCH,
    CLASSES,
    TINY,
    Command,
    draw_folder,
    refuses,
    tiny_vit,
    write_recipe,
)
from tests._runs import evaluated, summary_of
from tests._runs import run as trained

NAMES = [f"train/{label}/{i}.png" for label in CLASSES for i in range(2)]


def shares(count: int) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(len(CLASSES)), count).round(6)


def wide(file: Path, names: list[str], numbers: np.ndarray) -> Path:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["picture", *CLASSES])
        writer.writerows([name, *row] for name, row in zip(names, numbers.tolist(), strict=True))
    return file


def logits_of(file: Path) -> np.ndarray:
    logits, missing = AnswersFile(str(file), CLASSES).logits_of([f"/data/{name}" for name in NAMES])
    assert missing == []
    return logits


def test_four_forms_of_the_same_answers(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    p = shares(8)
    expected = np.log(p).astype(np.float32)
    np.testing.assert_allclose(logits_of(wide(tmp_path / "a.csv", NAMES, p)), expected, rtol=1e-5)
    long = tmp_path / "long.csv"
    lines = [f"{n},{c},{p[i, j]}" for i, n in enumerate(NAMES) for j, c in enumerate(CLASSES)]
    long.write_text("\n".join(["picture,label,p", *lines]))
    np.testing.assert_allclose(logits_of(long), expected, rtol=1e-5)
    columns = {"picture": NAMES, **{c: p[:, j] for j, c in enumerate(CLASSES)}}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    np.testing.assert_allclose(logits_of(tmp_path / "a.parquet"), expected, rtol=1e-5)

    many = {"picture": ["a"] * 10**6, "label": ["x"] * 10**6, "p": [1.0] * 10**6}
    parquet.write_table(pyarrow.table(many), tmp_path / "many.parquet")
    with refuses("more rows than bytes"):
        logits_of(tmp_path / "many.parquet")
    metadata = {"pictures": json.dumps(NAMES), "classes": json.dumps(list(CLASSES))}
    save_file({"answers": p}, tmp_path / "a.safetensors", metadata)
    np.testing.assert_allclose(logits_of(tmp_path / "a.safetensors"), expected, rtol=1e-5)
    raw = np.random.default_rng(1).normal(0, 3, (8, 4))
    np.testing.assert_allclose(logits_of(wide(tmp_path / "raw.csv", NAMES, raw)), raw, rtol=1e-5)


def test_of_the_largest_two_the_rest_is_spread_over_the_others(tmp_path: Path) -> None:
    file = tmp_path / "top.csv"
    lines = [f"{name},bread,0.6\n{name},cake,0.2" for name in NAMES]
    file.write_text("\n".join(["picture,label,p", *lines]))
    found = np.exp(logits_of(file))
    np.testing.assert_allclose(found, np.tile([0.1, 0.6, 0.2, 0.1], (8, 1)), rtol=1e-5)


def test_no_picture_gets_the_answer_of_another_with_the_same_file_name(tmp_path: Path) -> None:
    """A row names a picture if the picture's whole path ends with it, and one picture alone."""
    names = ["apple/0.png", "bread/1.png"]
    file = AnswersFile(str(wide(tmp_path / "a.csv", names, shares(2))), CLASSES)
    logits, missing = file.logits_of(["/data/cake/0.png", "/data/bread/1.png"])
    assert missing == ["/data/cake/0.png"]
    assert np.isnan(logits[0]).all()
    short = AnswersFile(str(wide(tmp_path / "b.csv", ["0.png", "1.png"], shares(2))), CLASSES)
    assert short.logits_of(["/data/cake/0.png", "/data/bread/1.png"])[1] == []
    message = "0.png is the end of /data/cake/0.png and of /data/apple/0"
    with refuses(message):
        short.logits_of(["/data/apple/0.png"])  # of another split


# -- kd-cache from=FILE --------


@pytest.fixture()
def filled(pictures: Path, tmp_path: Path, own_cache: Path) -> tuple[Path, Path]:
    """A recipe without a teacher, and the folder that a file with the right answers has filled for it."""
    return fill_from_file(pictures, tmp_path)


def fill_from_file(pictures: Path, tmp_path: Path) -> tuple[Path, Path]:
    names = sorted(
        str(file.relative_to(pictures)) for file in pictures.rglob("*.*") if file.is_file()
    )
    right = np.array([[float(label in name) * 0.96 + 0.01 for label in CLASSES] for name in names])
    file = wide(tmp_path / "answers.csv", names, right)
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "file.yaml", pictures, None, model__distill_losses=losses)
    assert main("cache", [f"recipe={recipe}", f"from={file}"]) == 0
    (folder,) = (tmp_path / "cache" / "stored").iterdir()
    file.unlink()
    return recipe, folder


def test_a_pretrained_student_that_no_labels_train_learns_from_a_file(
    filled: tuple[Path, Path], tmp_path: Path
) -> None:
    """No classifier is fitted to the answers before: they are known by the numbers of a loader's pictures."""
    recipe, folder = filled
    weights = tiny_vit(len(CLASSES)).state_dict()
    backbone = {name: value for name, value in weights.items() if not name.startswith("head.")}
    safetensors.torch.save_file(backbone, tmp_path / "backbone.safetensors")
    student = [
        f"model.student.checkpoint={tmp_path / 'backbone.safetensors'}",
        f"model.student.kwargs={json.dumps(TINY)}",
        "model.task_loss_weight=0",
    ]
    items = [f"model.teacher.answers={folder}", *student, "trainer.max_epochs=1"]
    trained(recipe, *items)


def test_a_run_learns_from_a_file(
    filled: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
    refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured settings too: nothing runs in a step. ``kd-eval`` compares with its answers where there are some."""
    recipe, folder = filled
    items = [f"recipe={recipe}", f"model.teacher.answers={folder}", "trainer.max_epochs=1"]
    capsys.readouterr()
    measured = ["data.batch_size=auto", "data.num_workers=auto", "optim.lr_batch=8"]
    assert train_main([*items, *measured]) == 0
    told = "".join(capsys.readouterr())
    assert "answers.csv answers for whole pictures" in told
    assert "model.student: begins with random weights, as stored answers have no layers" in told
    assert "0.00 M" not in told
    assert "is read-only" in refusal("cache", items)
    assert f"model.teacher.answers={folder} reads stored answers" in refusal(
        "cache", ["--describe", str(folder), f"recipe={recipe}"]
    )
    assert "logits: fits" in prints("cache", ["--describe", str(folder), *items[:2]])
    for words, message in (
        (["data.augment.mixup=0.8"], "has no answer to mixed pictures; give data.augment.mixup=0"),
        (
            ["model.teacher.cache=only", "model.teacher.cache_pixels=true"],
            "cache_pixels: needs views that come again",
        ),
    ):
        assert message in refusal("train", [*items, *words])
    run = tmp_path / "runs" / "tiny" / "000"
    summary = summary_of(run)
    assert summary["teacher"]["val"]["acc1"] == 1
    assert (summary["cache"]["answers_read"], summary["cache"]["views"]) == (48, None)
    assert "as stored answers have no layers" in (run / "report.html").read_text()
    assert "0.00 M" not in prints("eval", [str(run)])
    assert read_json(run / "eval_val.json")["teacher"]["acc1"] == 1
    others = draw_folder(tmp_path / "others", train=1, val=30) / "val"
    assert main("eval", [str(run), f"folder={others}", "cascade=true"]) == 2
    assert main("eval", [str(run), f"folder={others}"]) == 0
    assert "only the student is measured" in capsys.readouterr().err
    assert "teacher" not in read_json(run / "eval_folder_val.json")
    assert main("eval", [str(run), f"folder={others}", "margin=5"]) == 2
    copied = tmp_path / "copied"  # as on another machine: no trust= is needed for a class of kd's
    shutil.copytree(run, copied)
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "other_cache"))
    assert evaluated(copied)["teacher"]["acc1"] == 1
    capsys.readouterr()
    shutil.rmtree(folder)
    assert main("eval", [str(run)]) == 0
    assert f"the teacher's answers {folder} not found" in capsys.readouterr().err


def test_the_curve_of_a_cascade_reads_stored_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal, own_cache: Path
) -> None:
    """Without milliseconds: stored answers can't be timed."""
    data = draw_folder(tmp_path / "data", train=4, val=2)
    shutil.copytree(draw_folder(tmp_path / "more", train=1, val=30) / "val", data / "test")
    recipe, folder = fill_from_file(data, tmp_path)
    run = trained(recipe, f"model.teacher.answers={folder}", "trainer.max_epochs=1")
    measure = ["eval", str(run), "cascade=true"]
    assert main(measure[0], [*measure[1:], "share=0.5"]) == 0
    rule = read_json(run / "cascade.json")
    assert rule["teacher"] == 1
    assert rule["teacher_ms"] is None
    assert "ms a picture" not in capsys.readouterr().out
    assert "latency_ms: stored answers can't be timed" in refusal(
        measure[0], [*measure[1:], "latency_ms=3"]
    )


def test_stored_answers_beside_a_cached_teacher(
    filled: tuple[Path, Path], pictures: Path, teacher: Path, tmp_path: Path
) -> None:
    """Its two views come again; the answers of whole pictures are read for each."""
    _, folder = filled
    cached = {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher), "cache": "on",
              "cache_views": 2}  # fmt: skip
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(
        tmp_path / "two.yaml",
        pictures,
        None,
        model__teachers={"b": cached},
        model__distill_losses=losses,
    )
    run = trained(recipe, f"model.teachers.a.answers={folder}", "trainer.max_epochs=3")
    caches = summary_of(run)["cache"]
    assert {name: caches[name]["views"] for name in "ab"} == {"a": None, "b": 2}
    assert {name: caches[name]["answers_computed"] for name in "ab"} == {"a": 0, "b": 96}
    assert caches["a"]["answers_read"] == 3 * 48


def test_few_ends_of_a_path_are_compared() -> None:
    """A path of 60,000 folders has ends of 3.6 GB."""
    whole, *ends = answers_file._ends("a/" * 60_000 + "x.jpg")
    assert len(whole) > 120_000 and len(ends) == answers_file.MOST_PARTS and ends[-1] == "x.jpg"


def test_a_file_is_probabilities_or_logits_as_a_whole(tmp_path: Path) -> None:
    """One row that adds up to more than 1 made logits of all others, without a word."""
    p = shares(8)
    rounded = p.copy()
    rounded[3] *= 1.02
    kept = AnswersFile(str(wide(tmp_path / "rounded.csv", NAMES, rounded)), CLASSES)
    assert kept.are_probabilities
    for row, fault in ((p[3] * 2, "add up to 2"), (np.log(p[3]), "hold one below 0")):
        wrong = p.copy()
        wrong[3] = row
        with refuses(f"most pictures have probabilities, but .*{fault}"):
            logits_of(wide(tmp_path / "wrong.csv", NAMES, wrong))
    with refuses("divide them by 100"):
        logits_of(wide(tmp_path / "percent.csv", NAMES, 100 * p))


def test_two_answers_to_one_picture_are_refused_however_they_are_spelt(tmp_path: Path) -> None:
    p = shares(9)
    short = [*NAMES, Path(NAMES[0]).name]
    with refuses(f"/data/{NAMES[0]} has two answers: {NAMES[0]} and"):
        logits_of(wide(tmp_path / "short.csv", short, p))
    with refuses("has two answers"):
        logits_of(wide(tmp_path / "dot.csv", [*NAMES, f"./{NAMES[0]}"], p))


def test_a_spreadsheets_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    p = shares(8)
    file = wide(tmp_path / "a.csv", NAMES, p)
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    np.testing.assert_allclose(logits_of(file), np.log(p), rtol=1e-5)
