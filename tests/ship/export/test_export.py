"""kd-export: every format against the student in torch, and what is refused."""

import json
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models import register_model

from kd.cli import main
from kd.run.open import open_run
from kd.ship.export.base import find_format
from tests._files import read_json
from tests._helpers import ARCH, CLASSES, Command, draw_folder, save_teacher, write_recipe
from tests._runs import run as trained


def exported(run: Path, name: str) -> dict:
    return read_json(run / "export" / "export.json")[name]


def test_onnx_takes_uint8_pictures_and_any_batch(finished: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main("export", [str(finished), "to=onnx"]) == 0
    found = exported(finished, "onnx")
    assert found["kept"] and found["agreement"] == 1.0 and found["student"] == found["export"]
    assert found["max_difference"] < 1e-4 and found["pictures"] == 16 and found["metric"] == "acc1"
    session = runtime.InferenceSession(finished / found["file"])
    meta = session.get_modelmeta().custom_metadata_map
    assert (
        json.loads(meta["kd.classes"]) == list(CLASSES) and json.loads(meta["kd.layout"]) == "nhwc"
    )
    pictures = np.random.RandomState(0).randint(0, 256, (5, 40, 40, 3), dtype=np.uint8)
    (together,) = session.run(None, {"pictures": pictures})
    alone = np.concatenate(
        [session.run(None, {"pictures": pictures[i : i + 1]})[0] for i in range(5)]
    )
    np.testing.assert_allclose(together, alone, atol=1e-5)
    # the same pictures through the run's own preprocessing, which resizes 40 px to 32 px by other code
    opened = open_run(str(finished))
    with torch.inference_mode():
        theirs = opened.model(
            opened.preprocess(torch.from_numpy(pictures.transpose(0, 3, 1, 2).copy()))
        )
    np.testing.assert_allclose(together, theirs.numpy(), atol=2e-2)


# triton's folder is what sagemaker's archive holds: the next test
def check_archive(finished: Path, out: Path) -> None:
    """SageMaker's archive holds Triton's repository of the student."""
    with tarfile.open(out / "model.tar.gz") as archive:
        names = {m.name for m in archive if m.isfile()}
        archive.extractall(out)
    assert names == {"student/config.pbtxt", "student/labels.txt", "student/1/model.onnx"}
    text = (out / "student" / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text and "dims: [40, 40, 3]" in text and "dims: [4]" in text
    assert 'label_filename: "labels.txt"' in text
    assert (out / "student" / "labels.txt").read_text().split() == list(CLASSES)


def check_backbone(finished: Path, out: Path) -> None:
    """timm's own features start from the file, with the student's weights."""
    file = out / "backbone.safetensors"
    with safe_open(file, "pt") as opened:
        meta = opened.metadata()
    kwargs = {k: v for k, v in json.loads(meta["kwargs"]).items() if k != "num_classes"}
    body = timm.create_model(
        meta["arch"],
        features_only=True,
        out_indices=[0],
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file)},
        **kwargs,
    ).eval()
    student = load_file(finished / "student.safetensors")
    for name, value in body.state_dict().items():
        assert torch.equal(value, student[name.removeprefix("model.")])


@pytest.mark.parametrize(("to", "needs", "check"), [
    ("torch_export", "torch", None), ("hub", "torch", None), ("backbone", "torch", check_backbone),
    ("openvino", "openvino", None), ("sagemaker", "onnxscript", check_archive),
])  # fmt: skip
def test_every_format_agrees_with_the_student(
    finished: Path,
    to: str,
    needs: str,
    check: Callable[[Path, Path], None] | None,
    tmp_path: Path,
    refusal: Command,
) -> None:
    """Triton's folder is what SageMaker's archive holds."""
    pytest.importorskip(needs)
    out = tmp_path / "out"
    words = [str(finished), f"to={to}", f"out={out}"]
    assert main("export", words) == 0
    found = exported(finished, to)
    assert found["agreement"] == 1.0 and found["max_difference"] < 0.1, (
        found
    )  # torch rounds a resize
    assert found["size_mb"] > 0 and Path(found["file"]).exists()
    assert read_json(out / "manifest.json")["size"] == [40, 40]
    assert "exists already" in refusal("export", words)  # never over what is there
    if check:
        check(finished, out)


# what OpenVINO writes: test_every_format_agrees_with_the_student; what nncf does to it, with ONNX
@pytest.mark.parametrize("to", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_int8_stays_within_its_limit(finished: Path, to: str) -> None:
    pytest.importorskip("nncf")
    pytest.importorskip("onnxscript")
    assert (
        main("export", [str(finished), f"to={to}", "int8=true", "calibrate=24", "max_drop=30"]) == 0
    )
    found = exported(finished, f"{to}_int8")
    assert found["int8"] and 1e-6 < found["max_difference"] < 1
    if to == "onnx":  # sums of two products of 8 bits overflow on CPUs without VNNI
        import onnx
        from onnx.numpy_helper import to_array

        file = finished / "export" / "onnx_int8" / "model.onnx"
        weights = [
            to_array(t)
            for t in onnx.load(file).graph.initializer
            if t.data_type == onnx.TensorProto.INT8
        ]
        largest = [np.abs(values.astype(int)).max() for values in weights if values.ndim > 1]
        assert len(largest) == 8 and max(largest) <= 64


def test_what_loses_too_much_is_not_kept(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A student that answers otherwise once exported: its batches are counted from the example on."""
    format_ = find_format("torch_export")
    opened = format_.open

    class Wrong(type(format_)):  # type: ignore[misc]
        """Shuffles the answers."""

        def open(self, file: Path, threads: int = 0):  # type: ignore[no-untyped-def]
            run = opened(file, threads)
            return lambda pictures: run(pictures)[:, ::-1].copy()

    globals()["Wrong"] = Wrong
    out = tmp_path / "out"
    assert main("export", [str(finished), f"to={__name__}.Wrong", f"out={out}"]) == 1
    told = capsys.readouterr().err
    assert "not kept: it agrees with the student on" in told and "(min_agreement)" in told
    assert not out.exists() and not list(tmp_path.iterdir())
    assert exported(finished, "Wrong")["kept"] is False


@register_model
def vit_with_bessel(pretrained: bool = False, **kwargs: object) -> torch.nn.Module:
    """A ViT that ends in an operator no format knows."""
    model = timm.create_model(
        ARCH, pretrained=False, **{k: v for k, v in kwargs.items() if "pretrained" not in k}
    )
    whole = model.forward_head
    model.forward_head = lambda x, **k: (
        whole(x, **k) + 0 * torch.special.bessel_j0(x.detach()).sum()
    )
    return model


def test_an_unsupported_operator_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    pytest.importorskip("onnxscript")
    data = draw_folder(tmp_path / "data", train=8, val=2)
    recipe = write_recipe(
        tmp_path / "tiny.yaml", data, save_teacher(tmp_path / "teacher.safetensors")
    )
    trained(recipe, "model.student.arch=vit_with_bessel", "trainer.max_epochs=1")
    capsys.readouterr()
    run = tmp_path / "runs" / "tiny" / "000"
    told = refusal("export", [str(run), "to=onnx"]).strip().splitlines()[-1]
    assert (
        "to=onnx: vit_with_bessel can't be exported: the operator" in told
        and "bessel_j0 is not supported" in told
    )
    assert not list((run / "export").iterdir())


@pytest.mark.skipif(not find_spec("nncf"), reason="nncf is not here")
def test_int8_is_bounded_by_another_number(finished: Path, refusal: Command) -> None:
    told = refusal("export", [str(finished), "to=onnx", "int8=true", "min_agreement=90"]).strip()
    assert "min_agreement: has no effect with int8=true, where max_drop= bounds the loss" in told
    assert "\n" not in told
