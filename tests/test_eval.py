"""``kd-eval``: models side by side, bare weights files, a line a picture."""

import csv
import shutil
from pathlib import Path

import pytest
import timm
import torch

from kd.cli import main
from kd.storage.student_metadata import weights_digest
from tests._files import read_json, write_yaml
from tests._helpers import ARCH, TINY, Command, plain_answers, save_teacher, tiny_vit


def test_a_run_and_weights_files_side_by_side(
    finished: Path, tmp_path: Path, prints: Command
) -> None:
    """The run's own file again is the run's student; another model differs by points, on the same pictures."""
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "other.pth")
    table = tmp_path / "answers.csv"
    words = [str(finished), str(finished / "student.safetensors"), str(tmp_path / "other.pth")]
    out = prints("eval", [*words, "arch=resnet10t", "img_size=32", f"out={table}"])
    assert main("eval", [*words, "arch=resnet10t", "img_size=32", f"out={tmp_path}/all.json"]) == 0
    run, same, other = read_json(tmp_path / "all.json")
    assert (run["student"], run["teacher"], run["fidelity"]) == (
        same["student"],
        same["teacher"],
        same["fidelity"],
    )
    written = read_json(finished / "eval_val.json")
    assert written.pop("weights") == weights_digest(finished)
    assert written == run
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == run["pictures"] == 16
    for name, result in zip(words, (run, same, other), strict=True):
        right = [row["label"] == row[f"{name} student"] for row in rows]
        assert sum(right) / 16 == pytest.approx(result["student"]["acc1"])
        assert all(0.25 <= float(row[f"{name} student_p"]) <= 1 for row in rows)
        agreed = [row[f"{name} student"] == row[f"{name} teacher"] for row in rows]
        assert sum(agreed) / 16 == pytest.approx(result["student"]["agreement"])
    assert "alone is right on 0 of 16 pictures" in out
    assert "other.pth - " in out
    gap = 100 * (other["student"]["acc1"] - run["student"]["acc1"])
    assert f"{gap:+.1f}" in out


def test_a_run_whose_teacher_can_not_be_measured_is_compared_with_a_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file ended the command, where the run alone is measured without."""
    folder = shutil.copytree(
        finished, tmp_path / "000"
    )  # its files of figures are other tests' too
    words = [str(folder), str(folder / "student.safetensors")]
    items = ["model.teacher.checkpoint=gone.pth", f"out={tmp_path}/all.json"]
    assert main("eval", [*words, *items]) == 0, capsys.readouterr().err
    run, same = read_json(tmp_path / "all.json")
    assert "teacher" not in run and run["student"] == same["student"]


def test_a_weights_file_alone_needs_only_pictures(finished: Path, tmp_path: Path) -> None:
    """timm's folder knows its model, input and classes; the figures are those of the run on these pictures."""
    val = finished.parents[2] / "data" / "val"
    items = [f"folder={val}", "data.img_size=40"]
    assert main("eval", [str(finished / "student"), *items, f"out={tmp_path}/bare.json"]) == 0
    assert main("eval", [str(finished), f"folder={val}"]) == 0
    bare, run = (read_json(f) for f in (tmp_path / "bare.json", finished / "eval_folder_val.json"))
    assert bare["student"]["acc1"] == run["student"]["acc1"]
    assert "teacher" not in bare


def test_every_setting_of_a_file_counts_in_kd_eval(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    """Each key of ``FILE_KEYS`` changes the figures, or what is built, as the same key of model.teacher would."""
    models = {name: tiny_vit(seed=seed) for seed, name in enumerate(("query", "key"))}
    torch.save(
        {
            f"{name}.{key}": v
            for name, model in models.items()
            for key, v in model.state_dict().items()
        },
        tmp_path / "two.pth",
    )
    places = {name: save_teacher(tmp_path / f"{name}.pth", seed=i) for i, name in enumerate(models)}
    common = [f"folder={pictures / 'val'}", f"arch={ARCH}", "img_size=32"]
    common += [f"kwargs.{key}={value}" for key, value in TINY.items()]

    def figures(file: Path, *items: str) -> dict:
        out = tmp_path / "out.json"
        assert main("eval", [str(file), *common, *items, f"out={out}"]) == 0, (
            capsys.readouterr().err
        )
        return read_json(out)["student"]

    for name, file in places.items():
        shutil.copy(file, tmp_path / f"{name}.safetensors")
        alone = figures(tmp_path / f"{name}.safetensors")
        assert figures(tmp_path / "two.pth", f"checkpoint_key={name}") == alone
    assert "checkpoint_key=NAME says which" in refusal("eval", [str(tmp_path / "two.pth"), *common])

    file = tmp_path / "query.safetensors"
    torch.manual_seed(0)
    whole = models["query"]
    items = ["mean=[0.9,0.9,0.9]", "std=[1,1,1]"]
    answers = plain_answers(whole, pictures / "val", 32, [0.9] * 3, [1.0] * 3)
    right = [label == answer for label, answer in answers]
    assert figures(file, *items)["acc1"] == sum(right) / len(right)
    names = ["dates", "cake", "bread", "apple"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    reverse = [label == 3 - answer for label, answer in answers]
    found = figures(file, *items, f"classes={tmp_path / 'names.txt'}")
    assert found["acc1"] == sum(reverse) / len(reverse)


def test_what_a_source_notes_is_printed(finished: Path, tmp_path: Path, prints: Command) -> None:
    shutil.copytree(finished.parents[2] / "data" / "val", tmp_path / "mine")
    (tmp_path / "mine" / "nothing").mkdir()
    notes = [
        line
        for line in prints("eval", [str(finished), f"folder={tmp_path / 'mine'}"]).splitlines()
        if "'nothing'" in line or "nothing (" in line
    ]
    assert len(notes) == 1


def test_other_pictures_do_not_replace_the_runs_own_comparison(with_test: Path) -> None:
    """``fidelity.json`` is of the pictures and the teacher that the run had."""
    file = with_test / "fidelity.json"
    file.write_text("{}")
    overlay = with_test.parent / "o.yaml"
    write_yaml(overlay, {"data": {"val_fraction": 0.3}})
    for other in ("data.val_fraction=0.3", f"config={overlay}"):
        assert main("eval", [str(with_test), other]) == 0
        assert file.read_text() == "{}"
    assert main("eval", [str(with_test), "data.batch_size=4"]) == 0
    assert file.read_text() != "{}"
