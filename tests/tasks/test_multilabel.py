"""Several labels a picture."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kd.cli import eval_main, train_main
from kd.data.sources import Manifest
from kd.tasks import MultiLabel
from tests._helpers import ARCH, TINY, Command, draw_picture, write_recipe
from tests._runs import run_folders, summary_of

LABELS = ("blue", "green", "red")


def draw(root: Path) -> Path:
    """Pictures with a bright band for each of their labels, and lists of them."""
    rng = np.random.RandomState(0)
    root.mkdir()
    for split, count in (("train", 48), ("val", 24)):
        rows = ["path,label"]
        for i in range(count):
            chosen = [c for c in range(3) if rng.rand() < 0.5]
            pixels = rng.normal(60, 15, (32, 32, 3))
            for c in chosen:
                pixels[10 * c : 10 * c + 10, :, 2 - c] += 150
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / f"{split}{i}.png")
            rows.append(f"{split}{i}.png,{';'.join(LABELS[c] for c in chosen)}")
        (root / f"{split}.csv").write_text("\n".join(rows))
    return root


def test_a_run_end_to_end(tmp_path: Path, prints: Command, refusal: Command) -> None:
    root = draw(tmp_path / "foods")
    recipe = write_recipe(
        tmp_path / "tiny.yaml", root, None, model__task={"class_path": "MultiLabel"}
    )
    source = {"class_path": "Manifest", "init_args": {
        "train": str(root / "train.csv"), "val": str(root / "val.csv"), "multi_label": True}}  # fmt: skip
    items = [
        f"recipe={recipe}",
        f"data.source={json.dumps(source)}",
        "data.augment.scale=0.9",
        "data.augment.hflip=0",
    ]
    assert train_main([*items, "optim.lr=0.003", "trainer.max_epochs=12", "data.crop_ratio=1"]) == 0
    (first,) = run_folders(recipe)
    assert summary_of(first)["student"]["best_val"]["map"] > 0.8
    teacher = {
        "arch": ARCH,
        "img_size": 32,
        "kwargs": {**TINY, "depth": 1},
        "checkpoint": str(first),
    }
    loss = '{"kd": {"class_path": "BinaryKDLoss"}}'
    taught = [
        *items,
        f"model.teacher={json.dumps(teacher)}",
        f"model.distill_losses={loss}",
        "preflight=stop",
    ]
    assert "reaches map" in prints("train", taught)
    folder = run_folders(recipe)[-1]
    assert set(summary_of(folder)["student"]["val"]) == {
        "map",
        "f1",
        "agreement",
        "kl",
    }
    assert '"val map, kept epoch, ' in (folder / "report.html").read_text()
    assert eval_main([str(folder)]) == 0
    draw_picture(tmp_path / "others/blue/0.png")
    words = [str(folder), f"folder={tmp_path / 'others'}"]
    assert "folder: has one label a picture, and the model learnt from several" in refusal(
        "eval", words
    )


def test_labels_of_a_manifest(tmp_path: Path) -> None:
    root = draw(tmp_path / "foods")
    (root / "list.jsonl").write_text(
        '{"path": "a.png", "label": ["red", "blue"]}\n{"path": "b.png", "label": []}\n'
        '{"path": "c.png", "label": "green"}'
    )
    source = Manifest(str(root / "list.jsonl"), str(root / "val.csv"), multi_label=True)
    assert source.load("train").targets == [[2, 0], [], [1]]
    assert source.classes == list(LABELS)


def test_the_loss_against_its_formula() -> None:
    task = MultiLabel()
    task.build(3)
    logits, target = torch.randn(5, 3), torch.randint(0, 2, (5, 3)).float()
    p = logits.sigmoid()
    rows = -(target * p.log() + (1 - target) * (1 - p).log()).sum(1)
    torch.testing.assert_close(task.loss(logits, target), rows.mean())
    target[2] = float("nan")  # a picture without labels
    torch.testing.assert_close(task.loss(logits, target), rows[[0, 1, 3, 4]].mean())


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """The precision at each positive, averaged."""
    hits = labels[np.argsort(-scores)]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits == 1].mean())


@pytest.mark.parametrize(
    ("shift", "scale"), [(0, 1), (-8, 1), (0, 20)], ids=["plain", "unsure", "saturated"]
)
def test_metrics_are_exact_over_the_labels_that_occur(shift: float, scale: float) -> None:
    rng = np.random.RandomState(0)
    labels = (rng.rand(300, 4) < 0.3).astype(float)
    labels[:, 3] = 0  # such a label has neither precision nor F1
    logits = (scale * (2 * labels + rng.normal(size=labels.shape)) + shift).astype(np.float32)
    task = MultiLabel()
    task.build(4)
    for half in (slice(0, 100), slice(100, 300)):
        task.update(torch.tensor(logits[half]), torch.tensor(labels[half]).float(), None)
    found = task.compute()
    assert found["map"].item() == pytest.approx(
        np.mean([average_precision(logits[:, c], labels[:, c]) for c in range(3)]), abs=1e-6
    )
    yes = logits > 0
    f1 = [2 * (yes * labels)[:, c].sum() / (yes[:, c].sum() + labels[:, c].sum()) for c in range(3)]
    assert found["f1"].item() == pytest.approx(np.mean(f1), abs=1e-6)
    chance = task.chance(torch.tensor([90.0, 90, 90, 0]), 100)
    assert 0.9 < chance < 1
    every_label = task.chance(torch.tensor([100.0, 100, 100, 0]), 100)
    assert 0.99 < every_label < 1, "a teacher that is right on all would be no better than luck"
