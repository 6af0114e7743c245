"""A teacher whose classes are in another order is recognised before the first step, and told how to be used."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.models import preprocess_for
from tests._helpers import ARCH, TINY, draw_folder, tiny_vit, write_recipe
from tests._runs import run_folders


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose teacher is a good one with its classes in the order d, c, a, b."""
    home = tmp_path_factory.mktemp("order")
    data = draw_folder(home / "data", train=24, val=8)
    model = tiny_vit(seed=1)
    source = DistillationDataModule(ImageFolder(str(data)), 32, 96, 0)
    (batch,) = source.eval_dataloader("train")
    with (
        torch.no_grad()
    ):  # a ridge regression on random features; its classes are in the order d, c, a, b
        x = model.eval().forward_head(
            model.forward_features(preprocess_for(model, 32)(batch["image"])), True
        )
        y = torch.nn.functional.one_hot(batch["target"], 4)[:, [3, 2, 0, 1]].float()
        gram = torch.cov(x.T, correction=0)
        damped = gram + 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
        weight = torch.linalg.solve(damped, (x - x.mean(0)).T @ (y - y.mean(0)) / len(x)).T
        model.head.weight.copy_(20 * weight)
        model.head.bias.copy_(20 * (y.mean(0) - weight @ x.mean(0)))
    save_file(model.state_dict(), home / "shuffled.safetensors")
    teacher = {"arch": ARCH, "img_size": 32, "kwargs": TINY}
    given = {**teacher, "checkpoint": str(home / "shuffled.safetensors")}
    return write_recipe(
        home / "tiny.yaml", data, home / "x", model__teacher=given, preflight="stop"
    )


def test_another_order_of_classes_is_found_named_and_written(
    shuffled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_folders(shuffled)
    with monkeypatch.context() as patched:
        patched.setattr(
            "kd.distill.students.inherit_together",
            lambda *_: pytest.fail("inherits before the preflight"),
        )
        assert train_main([f"recipe={shuffled}", "model.student.inherit=true"]) == 2
    said = capsys.readouterr().err
    file = shuffled.parent / "runs" / "tiny" / "teacher_classes.json"
    assert "its classes are in another order, in the one found it reaches" in said
    assert f"%: model.teacher.classes={file}" in said
    assert json.loads(file.read_text()) == ["dates", "cake", "apple", "bread"]
    assert run_folders(shuffled) == before
    items = [
        f"model.teacher.classes={file}",
        "model.student.inherit=true",
        "model.student.kwargs.depth=2",
    ]
    items += ["trainer.max_epochs=1", "optim.lr=1e-9"]
    assert train_main([f"recipe={shuffled}", *items]) == 0
    (folder,) = set(run_folders(shuffled)) - set(before)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["teacher"]["val"]["acc1"] >= 0.9
    assert (
        summary["student"]["val"]["agreement"] >= 0.95
    )  # it inherited what the preflight has put into bfloat16


def test_a_teacher_that_knows_nothing_gets_no_such_advice(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([f"recipe={recipe}", "preflight=stop"]) == 2
    assert (
        "no better than guessing (wrong class order, size or weights?)" in capsys.readouterr().err
    )
