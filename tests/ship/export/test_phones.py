"""Formats for phones and small machines: ExecuTorch, LiteRT and CoreML, each by its own library."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kd.cli import main
from kd.errors import needs_extra
from kd.run.open import open_run
from kd.ship.export.base import find_format
from tests._files import read_json
from tests._helpers import Command, StopwatchHere, draw_folder, refuses, save_teacher, write_recipe
from tests._runs import run as trained

MODULES = {"executorch": "executorch.exir", "litert": "litert_torch", "coreml": "coremltools"}
"""What each format needs, by its name, which is its extra's too."""
FILES = {"executorch": "model.pte", "litert": "model.tflite", "coreml": "model.mlpackage"}


def export(run: Path, out: Path, *items: str) -> dict[str, Any]:
    """Exports to ``out``, which must succeed; the record of the comparison."""
    assert main("export", [str(run), *items, f"out={out}"]) == 0
    records = read_json(run / "export" / "export.json")
    del records["weights"]  # of which the file is
    return next(record for record in records.values() if Path(record["file"]).parent == out)


@pytest.mark.parametrize("to", MODULES)
def test_it_agrees_with_the_student(finished: Path, to: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[to])
    record = export(finished, tmp_path / "out", f"to={to}")
    assert record["kept"] and record["agreement"] == 1.0 and record["max_difference"] < 0.1
    assert Path(record["file"]).name == FILES[to] and record["pictures"] == 16
    manifest = read_json(tmp_path / "out" / "manifest.json")
    assert manifest["size"] == [40, 40] and manifest["layout"] == "nhwc"
    runs_here = to != "coreml"
    assert ("note" in record) == (not runs_here)


@pytest.mark.parametrize("to", ["executorch", "litert"])
def test_a_new_process_takes_uint8_pictures_in_any_number(
    finished: Path, to: str, tmp_path: Path
) -> None:
    """Without what the export has in memory, and without the run: the file alone."""
    pytest.importorskip(MODULES[to])
    record = export(finished, tmp_path / "out", f"to={to}")
    runtime = find_format(to).open(Path(record["file"]), 1)
    pictures = np.random.RandomState(0).randint(0, 256, (7, 40, 40, 3), dtype=np.uint8)
    answers = runtime(pictures)
    expected = open_run(str(finished)).prepared()(torch.from_numpy(pictures)).detach()
    np.testing.assert_allclose(answers, expected.numpy(), atol=0.1)
    one_by_one = np.concatenate([runtime(picture[None]) for picture in pictures])
    np.testing.assert_allclose(answers, one_by_one, atol=1e-5)


@pytest.mark.parametrize("to", ["executorch", "litert"])
def test_int8_is_smaller_and_within_its_limit(finished: Path, to: str, tmp_path: Path) -> None:
    """Smaller than the same format's float file: both hold the program, which is most of so small a student's file."""
    pytest.importorskip(MODULES[to])
    items = [f"to={to}", "int8=true", "calibrate=16", "max_drop=30"]
    record = export(finished, tmp_path / "out", *items)
    assert record["int8"] and 1e-6 < record["max_difference"] < 1
    float_record = export(finished, tmp_path / "float", f"to={to}")
    weights = load_file(finished / "student.safetensors").values()
    linear_mb = sum(weight.nbytes for weight in weights if weight.ndim == 2) / 1e6
    assert float_record["size_mb"] - record["size_mb"] > 0.5 * linear_mb
    assert read_json(tmp_path / "out" / "manifest.json")["int8"] is True


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a CNN, whose activations are calibrated."""
    root = tmp_path_factory.mktemp("convolutions")
    data = draw_folder(root / "data", train=8, val=4)
    teacher = save_teacher(root / "teacher.safetensors")
    student = {"arch": "mobilenetv3_small_050", "img_size": 32}
    recipe = write_recipe(
        root / "tiny.yaml", data, teacher, data__img_size=40, model__student=student
    )
    trained(recipe, "trainer.max_epochs=1")
    return root / "runs" / "tiny" / "000"


@pytest.mark.parametrize("to", ["executorch", "litert"])
def test_int8_of_a_cnn_is_calibrated(convolutions: Path, to: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[to])
    items = [f"to={to}", "int8=true", "calibrate=16", "max_drop=100"]
    record = export(convolutions, tmp_path / "out", *items)
    assert record["int8"] and record["max_difference"] > 1e-6
    weights_mb = (convolutions / "student.safetensors").stat().st_size / 1e6
    assert record["size_mb"] < 0.6 * weights_mb


def test_fp16_is_proven_and_halves_the_weights(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    pytest.importorskip("onnxscript")
    record = export(finished, tmp_path / "out", "to=coreml", "fp16=true", "min_agreement=90")
    assert record["fp16"] is True and record["simulated"]["agreement"] >= 0.9
    assert (tmp_path / "out" / "fp16.json").is_file()
    float_record = export(finished, tmp_path / "float", "to=coreml")
    weights = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    float_weights = [file for file in (tmp_path / "float").rglob("*") if file.is_file()]
    largest, largest_float = (
        max(f.stat().st_size for f in all_) for all_ in (weights, float_weights)
    )
    assert float_record["kept"] and largest < largest_float


def test_layers_that_need_float32_refuse_the_file(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that computes everything in FP16 does not ship a layer that FP16 is too small for."""
    pytest.importorskip("coremltools")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("kd.ship.export.fp16.LARGEST", 2.0)
    out = finished / "export" / "coreml_fp16"
    assert main("export", [str(finished), "to=coreml", "fp16=true"]) == 1
    message = capsys.readouterr().err
    assert "not kept: to=coreml keeps no layer in float32, and FP16 is too small for" in message
    assert not out.exists()


@pytest.mark.parametrize("to", ["executorch", "litert"])
def test_it_is_timed(finished: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[to])
    monkeypatch.setattr("kd.ship.latency.Stopwatch", StopwatchHere)
    assert main("export", [str(finished), f"to={to}"]) == 0
    items = [f"runtime={to}", "batch=1,9", "threads=1", "seconds=0.05"]
    assert main("latency", [str(finished), *items]) == 0
    rows = read_json(finished / "export" / "latency.json")["rows"]
    assert [(row["runtime"], row["batch"]) for row in rows] == [(to, 1), (to, 9)]


@pytest.mark.parametrize("to", ["executorch", "litert"])
def test_a_file_that_is_none_is_refused(to: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[to])
    file = tmp_path / FILES[to]
    file.write_bytes(b"not a model" * 100)
    with refuses(f"{file} is not a"):
        find_format(to).open(file)


def test_coremls_file_takes_an_image_and_gives_an_array(finished: Path, tmp_path: Path) -> None:
    tools = pytest.importorskip("coremltools")
    record = export(finished, tmp_path / "out", "to=coreml")
    description = tools.utils.load_spec(record["file"]).description
    (image,), (array,) = description.input, description.output
    kinds = tools.proto.FeatureTypes_pb2
    picture, numbers = image.type.imageType, array.type.multiArrayType
    assert (image.name, picture.height, picture.width) == ("pictures", 40, 40)
    assert picture.colorSpace == kinds.ImageFeatureType.RGB
    assert (array.name, *numbers.shape) == ("answer", 1, 4)
    assert numbers.dataType == kinds.ArrayFeatureType.FLOAT32


@pytest.mark.parametrize(("to", "module"), [*MODULES.items(), ("onnx", "onnx")])
def test_a_missing_extra_is_named(
    finished: Path, to: str, module: str, monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    last = refusal("export", [str(finished), f"to={to}"]).strip().splitlines()[-1]
    extra = "export" if to == "onnx" else to
    assert last == f"kd-export: to={to}: {needs_extra(extra)}"
