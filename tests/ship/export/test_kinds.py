"""Scenes and a student without a classifier: predicted, exported, served."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kd.cli import main
from kd.ship.export import load_student
from tests._files import read_json
from tests._helpers import Command, draw_folder, save_teacher, write_recipe
from tests._runs import run as trained
from tests._scenes import draw, recipe_of


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over scenes of 30 x 40 pixels, at 24 x 32; its name is that of tests/tasks."""
    root = tmp_path_factory.mktemp("scenes")
    draw(root / "scenes")
    assert (
        main("train", [f"recipe={recipe_of(root, root / 'scenes')}", "trainer.max_epochs=3"]) == 0
    )
    return root / "runs" / "tiny" / "000"


def test_masks_of_whole_pictures(scenes: Path, tmp_path: Path) -> None:
    folder = scenes.parents[2] / "scenes" / "images" / "val"
    assert (
        main("predict", [str(scenes), str(folder), f"out={tmp_path / 'masks'}", "device=cpu"]) == 0
    )
    ids = np.array(Image.open(tmp_path / "masks" / "0.jpg.ids.png"))
    colours = np.array(Image.open(tmp_path / "masks" / "0.jpg.colours.png"))
    assert (
        ids.shape == (30, 40) and colours.shape == (30, 40, 3) and set(np.unique(ids)) <= {0, 1, 2}
    )
    truth = np.array(Image.open(scenes.parents[2] / "scenes" / "masks" / "val" / "0.png"))
    assert (ids == truth)[truth != 9].mean() > 0.8
    assert (tmp_path / "masks" / "classes.txt").read_text().split() == ["left", "right", "never"]
    assert main("predict", [str(scenes), str(folder), "out=masks.csv"]) == 2


def test_an_exported_scene_student(scenes: Path, tmp_path: Path, refusal: Command) -> None:
    pytest.importorskip("onnxscript")
    assert main("export", [str(scenes), "to=triton", f"out={tmp_path / 'out'}"]) == 0
    found = read_json(scenes / "export" / "export.json")["triton"]
    assert (
        found["metric"] == "miou"
        and found["agreement"] == 1.0
        and found["student"] == found["export"]
    )
    text = (tmp_path / "out" / "student" / "config.pbtxt").read_text()
    assert "dims: [3, 24, 32]" in text and "labels.txt" not in text
    assert main("export", [str(scenes), "to=backbone", f"out={tmp_path / 'backbone'}"]) == 0
    assert "timm builds no models for dense prediction" in refusal(
        "export", [str(scenes), "to=hub"]
    )


def test_a_served_scene_student(scenes: Path) -> None:
    from kd.ship.export.manifest import ExportManifest
    from kd.ship.serving.answers import answer
    from kd.ship.serving.pictures import view

    file = scenes.parents[2] / "scenes" / "images" / "val" / "0.jpg"
    model, prepare, classes = load_student(scenes / "student.safetensors")
    manifest = ExportManifest(
        "segmentation", "x", classes, (24, 32), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
    )
    pixels = torch.from_numpy(view(file.read_bytes(), manifest, 10_000).copy()).permute(2, 0, 1)[
        None
    ]
    with torch.inference_mode():
        told = answer(model(prepare(pixels))[0].numpy(), manifest, 5)
    mask = np.array(Image.open(io.BytesIO(base64.b64decode(told["mask"]))))
    assert mask.shape == (24, 32) and sum(share["p"] for share in told["shares"]) == pytest.approx(
        1, abs=1e-4
    )


def test_a_student_without_a_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    """Features alone have taught it: its classifier is as it was drawn, and nobody is shown its answers."""
    data = draw_folder(tmp_path / "data", train=8, val=2)
    recipe = write_recipe(
        tmp_path / "tiny.yaml", data, save_teacher(tmp_path / "teacher.safetensors"),
        model__task_loss_weight=0.0, model__distill_losses={"at": {"class_path": "kd.losses.ATLoss"}},
        model__taps={"at": {"student": "blocks.0", "teacher": "blocks.1"}},
    )  # fmt: skip
    trained(recipe, "trainer.max_epochs=1")
    run = tmp_path / "runs" / "tiny" / "000"
    out = tmp_path / "features.npz"
    assert main("predict", [str(run), str(data / "val"), f"out={out}", "device=cpu"]) == 0
    found = np.load(out)
    assert found["features"].shape == (8, 32) and found["features"].dtype == np.float32
    assert [Path(name).suffix for name in found["files"]] == [".jpg"] * 8
    assert main("export", [str(run), "to=hub"]) == 0
    told = read_json(run / "export" / "export.json")["hub"]
    assert told["agreement"] == 1.0 and "metric" not in told
    assert main("eval", [str(run), f"data.probe.root={data}"]) == 0
    assert {"rankme", "knn1", "probe1"} <= set(read_json(run / "eval_val.json")["student"])
    capsys.readouterr()
    assert "folder: needs a classifier" in refusal("eval", [str(run), f"folder={data / 'val'}"])
