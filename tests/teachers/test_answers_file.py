"""Answers from a file: any of the forms teaches the same, and a wrong file is one line."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from kd.cli import main, train_main
from kd.errors import UserError
from kd.teachers.answer import Wanted
from kd.teachers.answers_file import AnswersFile
from tests._helpers import CLASSES, TINY, draw_folder, tiny_vit, write_recipe

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
    teacher = AnswersFile(str(file)).build(len(CLASSES))
    teacher.match("train", [f"/data/{name}" for name in NAMES], CLASSES)
    batch = {"image": torch.zeros(8, 3, 4, 4), "index": torch.arange(8), "view": 0}
    return teacher.answer(batch, Wanted()).logits[""].numpy()  # type: ignore[arg-type, union-attr]


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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.replace("bread", "bred", 1), "the data has no class 'bred'; did you mean 'bread'?"),
        (lambda s: s.replace("bread", "zucchini", 1),
         "the data has no class 'zucchini'; its classes are apple, bread, cake, dates"),
        (lambda s: "\n".join(s.splitlines()[:-1]), "has no answer to 1 of 8 pictures of train, such as /data/train/dates"),
        (lambda s: s.replace(s.splitlines()[2].split(",")[1], "nan"), "row 2, apple: must be a finite number, got 'nan'"),
        (lambda s: s + s.splitlines()[-1] + "\n", "train/dates/1.png has two answers (row 9)"),
        (lambda s: s.replace("picture", "file", 1), "has no column 'picture' (file, apple"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(change, text: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = wide(tmp_path / "a.csv", NAMES, shares(8))
    file.write_text(change(file.read_text().replace("\r\n", "\n")))
    with pytest.raises(UserError) as caught:
        logits_of(file)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_picture_gets_the_answer_of_another_with_the_same_file_name(tmp_path: Path) -> None:
    """A row names a picture if the picture's whole path ends with it, and one picture alone."""
    names = ["apple/0.png", "bread/1.png"]
    teacher = AnswersFile(str(wide(tmp_path / "a.csv", names, shares(2)))).build(len(CLASSES))
    teacher.match("train", ["/data/apple/0.png", "/data/bread/1.png"], CLASSES)
    with pytest.raises(UserError, match="has no answer to 1 of 2 .* such as /data/cake/0.png"):
        teacher.match("train", ["/data/cake/0.png", "/data/bread/1.png"], CLASSES)
    short = AnswersFile(str(wide(tmp_path / "b.csv", ["0.png", "1.png"], shares(2)))).build(4)
    short.match("train", ["/data/cake/0.png", "/data/bread/1.png"], CLASSES)
    with pytest.raises(
        UserError, match="0.png is the end of /data/cake/0.png and of /data/apple/0"
    ):
        short.match("train", ["/data/cake/0.png", "/data/apple/0.png"], CLASSES)


def test_two_answers_of_one_class_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_text("picture,label,p\na.png,bread,0.6\na.png,bread,0.2\n")
    with pytest.raises(UserError, match="a.png has two answers for bread \\(row 2\\)"):
        AnswersFile(str(file)).build(4).match("train", ["a.png"], CLASSES)


def test_a_pretrained_student_that_no_labels_train_learns_from_a_file(
    pictures: Path, tmp_path: Path
) -> None:
    """No classifier is fitted to the answers before: those of a file are known by the numbers of a loader's pictures."""
    names = sorted(str(file.relative_to(pictures)) for file in pictures.rglob("*.jpg"))
    file = wide(tmp_path / "answers.csv", names, shares(len(names)))
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "file.yaml", pictures, None, model__distill_losses=losses)
    weights = tiny_vit(len(CLASSES)).state_dict()
    backbone = {name: value for name, value in weights.items() if not name.startswith("head.")}
    safetensors.torch.save_file(backbone, tmp_path / "backbone.safetensors")
    student = [
        f"model.student.checkpoint={tmp_path / 'backbone.safetensors'}",
        f"model.student.kwargs={json.dumps(TINY)}",
        "model.task_loss_weight=0",
    ]
    items = [f"model.teacher.answers={file}", *student, "trainer.max_epochs=1"]
    assert train_main([f"recipe={recipe}", *items]) == 0


def test_a_run_learns_from_a_file(
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured settings too: nothing of a file runs in a step. ``kd-eval`` compares with its answers where it has them."""
    names = sorted(
        str(file.relative_to(pictures)) for file in pictures.rglob("*.*") if file.is_file()
    )
    right = np.array([[float(label in name) * 0.96 + 0.01 for label in CLASSES] for name in names])
    file = wide(tmp_path / "answers.csv", names, right)
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "file.yaml", pictures, None, model__distill_losses=losses)
    items = [f"recipe={recipe}", f"model.teacher.answers={file}", "trainer.max_epochs=1"]
    measured = ["data.batch_size=auto", "data.num_workers=auto", "optim.lr_batch=8"]
    assert train_main([*items, *measured]) == 0
    told = "".join(capsys.readouterr())
    assert "answers for whole pictures" in told
    assert "0.00 M" not in told
    assert main("cache", [*items]) == 2
    assert "so there is nothing to cache" in capsys.readouterr().err
    run = tmp_path / "runs" / "tiny" / "000"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["teacher"]["val"]["acc1"] == 1
    capsys.readouterr()
    assert main("eval", [str(run)]) == 0
    assert "0.00 M" not in capsys.readouterr().out
    assert json.loads((run / "eval_val.json").read_text())["teacher"]["acc1"] == 1
    assert main("eval", [str(run), "cascade=true"]) == 2
    others = draw_folder(tmp_path / "others", train=1, val=30) / "val"
    assert main("eval", [str(run), f"folder={others}", "cascade=true"]) == 2
    assert "kd-eval: cascade: the teacher's answers are in a file" in capsys.readouterr().err
    assert main("eval", [str(run), f"folder={others}"]) == 0
    assert "such as" in (err := capsys.readouterr().err)
    assert "only the student is measured" in err
    assert "teacher" not in json.loads((run / "eval_folder_val.json").read_text())
    assert main("eval", [str(run), f"folder={others}", "margin=5"]) == 2
    copied = tmp_path / "copied"  # as on another machine: no trust= is needed for a class of kd's
    shutil.copytree(run, copied)
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "other_cache"))
    assert main("eval", [str(copied)]) == 0
    assert json.loads((copied / "eval_val.json").read_text())["teacher"]["acc1"] == 1
    capsys.readouterr()
    file.unlink()
    assert main("eval", [str(run)]) == 0
    assert f"the teacher's answers {file} not found" in capsys.readouterr().err
