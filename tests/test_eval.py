"""``kd-eval``: models side by side, bare weights files, a line a picture."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from kd.cli import main
from kd.storage.student_metadata import weights_digest
from tests._helpers import ARCH, TINY, save_teacher, tiny_vit


def test_a_run_and_weights_files_side_by_side(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own file again is the run's student; another model differs by points, on the same pictures."""
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), tmp_path / "other.pth")
    table = tmp_path / "answers.csv"
    words = [str(finished), str(finished / "student.safetensors"), str(tmp_path / "other.pth")]
    assert main("eval", [*words, "arch=resnet10t", "img_size=32", f"out={table}"]) == 0
    out = capsys.readouterr().out
    assert main("eval", [*words, "arch=resnet10t", "img_size=32", f"out={tmp_path}/all.json"]) == 0
    run, same, other = json.loads((tmp_path / "all.json").read_text())
    assert (run["student"], run["teacher"], run["fidelity"]) == (
        same["student"],
        same["teacher"],
        same["fidelity"],
    )
    written = json.loads((finished / "eval_val.json").read_text())
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
    run, same = json.loads((tmp_path / "all.json").read_text())
    assert "teacher" not in run and run["student"] == same["student"]


def test_a_weights_file_alone_needs_only_pictures(
    finished: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal
) -> None:
    """timm's folder knows its model, input and classes; the figures are those of the run on these pictures."""
    val = finished.parents[2] / "data" / "val"
    items = [f"folder={val}", "data.img_size=40"]
    assert main("eval", [str(finished / "student"), *items, f"out={tmp_path}/bare.json"]) == 0
    assert main("eval", [str(finished), f"folder={val}"]) == 0
    bare, run = (
        json.loads(f.read_text())
        for f in (tmp_path / "bare.json", finished / "eval_folder_val.json")
    )
    assert bare["student"]["acc1"] == run["student"]["acc1"]
    assert "teacher" not in bare
    capsys.readouterr()
    assert "needs pictures: folder=DIR" in refusal("eval", [str(finished / "student")])
    (tmp_path / "x.pth").write_bytes(b"")
    odd = timm.create_model(
        "resnet10t", num_classes=4, block_args={"attn_layer": "se"}
    )  # in no table
    torch.save(odd.state_dict(), tmp_path / "x.pth")
    no_model = "arch: must be one of timm's models (builder=CLASS takes one of your own)"
    for items, told in (
        ([], "arch: "),
        (["arch=resnet10"], f"{no_model}, got 'resnet10'; did you mean"),
        (
            ["arch=vit_smal_patch16_224.augreg_in21k"],
            f"{no_model}, got 'vit_smal_patch16_224.augreg_in21k'; did you mean 'vit_small_patch16_224'",
        ),
        (["arch=mine.Nets"], f"{no_model}, got 'mine.Nets'"),
        (["arch=resnet18"], "checkpoint: "),
    ):
        err = refusal("eval", [str(tmp_path / "x.pth"), f"folder={val}", *items])
        assert err.startswith(f"kd-eval: {told}")
        assert err.count("\n") == 1


def test_every_setting_of_a_file_counts_in_kd_eval(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal
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
        return json.loads(out.read_text())["student"]

    for name, file in places.items():
        shutil.copy(file, tmp_path / f"{name}.safetensors")
        alone = figures(tmp_path / f"{name}.safetensors")
        assert figures(tmp_path / "two.pth", f"checkpoint_key={name}") == alone
    assert "checkpoint_key=NAME says which" in refusal("eval", [str(tmp_path / "two.pth"), *common])

    file = tmp_path / "query.safetensors"
    torch.manual_seed(0)
    whole = models["query"]
    expected = accuracy_of(whole, pictures / "val", mean=0.9)
    assert figures(file, "mean=[0.9,0.9,0.9]", "std=[1,1,1]")["acc1"] == expected
    names = ["dates", "cake", "bread", "apple"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    reverse = accuracy_of(whole, pictures / "val", mean=0.9, order=[3, 2, 1, 0])
    items = ["mean=[0.9,0.9,0.9]", "std=[1,1,1]"]
    assert figures(file, *items, f"classes={tmp_path / 'names.txt'}")["acc1"] == reverse
    for item, message in (
        ("img_size=-1", "img_size: "),
        ("mean=[1]", "mean: must be a list of 3"),
    ):
        assert refusal("eval", [str(file), *common, item]).startswith(f"kd-eval: {message}")


def accuracy_of(
    model: torch.nn.Module, folder: Path, mean: float, order: list[int] | None = None
) -> float:
    """Share of the 40 px pictures of ``folder/<class>`` that a model names: short side to 36 px, 32 in the middle.

    Args:
        model: gives 4 logits.
        folder: classes' folders, whose names are in the order of the classes.
        mean: subtracted from pixels in 0..1.
        order: the class that each logit is of.
    """
    correct = []
    for label, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for file in sorted((folder / name).iterdir()):
            picture = Image.open(file).convert("RGB")
            scale = 36 / min(picture.size)
            size = round(picture.width * scale), round(picture.height * scale)
            small = np.asarray(picture.resize(size, Image.Resampling.BILINEAR))
            top, left = ((side - 32) // 2 for side in small.shape[:2])
            pixels = torch.tensor(small[top : top + 32, left : left + 32] / 255 - mean)
            logits = model.eval()(pixels.permute(2, 0, 1)[None].float())[0].detach()
            correct.append((order or range(4))[int(logits.argmax())] == label)
    return sum(correct) / len(correct)


def test_what_a_source_notes_is_printed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished.parents[2] / "data" / "val", tmp_path / "mine")
    (tmp_path / "mine" / "nothing").mkdir()
    assert main("eval", [str(finished), f"folder={tmp_path / 'mine'}"]) == 0
    notes = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "'nothing'" in line or "nothing (" in line
    ]
    assert len(notes) == 1


def test_what_can_not_be_compared_is_refused(finished: Path, tmp_path: Path, refusal) -> None:
    for items, told in (
        ([str(tmp_path)], "is no finished run: it has no config.yaml"),
        ([str(finished), "arch=resnet18"], "arch: is for a weights file"),
        ([str(finished), "recipe=foodtag_vit"], "recipe: "),
        ([str(finished), "out=answers.txt"], "out: must be FILE.csv or FILE.json"),
        ([str(finished), "splt=val"], "did you mean 'split'?"),
        ([str(finished), "split=val", "folder=x"], "folder: can't be given together with split="),
        ([str(finished), "folder="], "folder: must not be empty"),
        ([str(finished), "out="], "out: must not be empty"),
    ):
        assert told in refusal("eval", items)


def test_other_pictures_do_not_replace_the_runs_own_comparison(with_test: Path) -> None:
    """``fidelity.json`` is of the pictures and the teacher that the run had."""
    file = with_test / "fidelity.json"
    file.write_text("{}")
    assert main("eval", [str(with_test), "data.val_fraction=0.3"]) == 0
    assert file.read_text() == "{}"
    assert main("eval", [str(with_test), "data.batch_size=4"]) == 0
    assert file.read_text() != "{}"
