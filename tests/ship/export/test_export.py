"""kd-export: every format against the student in torch, and what is refused."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models import register_model

from kd.cli import main
from kd.errors import needs_extra
from kd.run.open import open_run
from kd.ship.export.base import ExportJob, find_format
from kd.ship.export.formats import onnx
from tests._helpers import ARCH, CLASSES, draw_folder, save_teacher, write_recipe

EXTRAS = {
    "onnx": "onnxscript",
    "triton": "onnxscript",
    "sagemaker": "onnxscript",
    "openvino": "openvino",
}


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One student in one layout is one ONNX program, from which several formats are made."""

    def program(job: ExportJob) -> Any:
        about = (job.manifest.arch, job.manifest.layout)
        if about not in PROGRAMS:
            PROGRAMS[about] = trace(job)
        return PROGRAMS[about]

    trace = onnx.onnx_program
    monkeypatch.setattr(onnx, "onnx_program", program)


PROGRAMS: dict[tuple[str, str], Any] = {}


def exported(run: Path, name: str) -> dict:
    return json.loads((run / "export" / "export.json").read_text())[name]


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
@pytest.mark.parametrize(
    "to",
    ["torch_export", pytest.param("triton", marks=pytest.mark.slow), "hub", "backbone", "openvino"],
)
def test_every_format_agrees_with_the_student(finished: Path, to: str, tmp_path: Path) -> None:
    if to in EXTRAS:
        pytest.importorskip(EXTRAS[to])
    out = tmp_path / "out"
    assert main("export", [str(finished), f"to={to}", f"out={out}"]) == 0
    found = exported(finished, to)
    assert found["agreement"] == 1.0 and found["max_difference"] < 0.1, (
        found
    )  # torch rounds a resize
    assert found["size_mb"] > 0 and Path(found["file"]).exists()
    assert json.loads((out / "manifest.json").read_text())["size"] == [40, 40]
    assert (
        main("export", [str(finished), f"to={to}", f"out={out}"]) == 2
    )  # never over what is there


def test_tritons_repository_and_sagemakers_archive(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    out = [f"out={tmp_path / 'out'}"]
    assert main("export", [str(finished), "to=sagemaker", *out]) == 0
    found = exported(finished, "sagemaker")
    assert found["agreement"] == 1.0 and found["max_difference"] < 0.1, (
        found
    )  # torch rounds a resize
    assert found["size_mb"] > 0 and Path(found["file"]).exists()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["size"] == [40, 40]
    assert main("export", [str(finished), "to=sagemaker", *out]) == 2  # never over what is there
    with tarfile.open(tmp_path / "out" / "model.tar.gz") as archive:
        names = {m.name for m in archive if m.isfile()}
        archive.extractall(tmp_path / "repository")
    assert names == {"student/config.pbtxt", "student/labels.txt", "student/1/model.onnx"}
    text = (tmp_path / "repository" / "student" / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text and "dims: [40, 40, 3]" in text and "dims: [4]" in text
    assert (tmp_path / "repository" / "student" / "labels.txt").read_text().split() == list(CLASSES)


def test_the_backbone_starts_timms_features(finished: Path, tmp_path: Path) -> None:
    assert main("export", [str(finished), "to=backbone", f"out={tmp_path / 'out'}"]) == 0
    file = tmp_path / "out" / "backbone.safetensors"
    with safe_open(file, "pt") as opened:
        meta = opened.metadata()
    kwargs = {k: v for k, v in json.loads(meta["kwargs"]).items() if k != "num_classes"}
    there = {"file": str(file)}
    body = timm.create_model(
        meta["arch"],
        features_only=True,
        out_indices=[0],
        pretrained=True,
        pretrained_cfg_overlay=there,
        **kwargs,
    ).eval()
    student = load_file(finished / "student.safetensors")
    assert all(
        torch.equal(v, student[k.removeprefix("model.")]) for k, v in body.state_dict().items()
    )


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    data = draw_folder(tmp_path / "data", train=8, val=2)
    recipe = write_recipe(
        tmp_path / "tiny.yaml", data, save_teacher(tmp_path / "teacher.safetensors")
    )
    assert (
        main(
            "train",
            [f"recipe={recipe}", "model.student.arch=vit_with_bessel", "trainer.max_epochs=1"],
        )
        == 0
    )
    capsys.readouterr()
    run = tmp_path / "runs" / "tiny" / "000"
    assert main("export", [str(run), "to=onnx"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "to=onnx: vit_with_bessel can't be exported: the operator" in told
        and "bessel_j0 is not supported" in told
    )
    assert not list((run / "export").iterdir())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "to: must name a format"),
        (["to=onx"], "got 'onx'; did you mean 'onnx'?"),
        (["to=hub", "int8=true"], "int8: to=hub has no int8"),
        (["to=hub", "int8=maybe"], "int8: must be true or false, got 'maybe'"),
        (["to=hub", "layout=nchw"], "no key 'layout'"),
        (["to=hub", "max_drop=101"], "max_drop: must be >= 0 and <= 100, got 101"),
        (
            ["to=hub", "data.source.root=/nowhere"],
            "data.source.root: folder /nowhere not found (ImageFolder reads train/<class>/*.jpg",
        ),
        (["to=hub", "calibrate=5"], "calibrate: has no effect without int8=true"),
        (
            ["to=torch_export", "max_drop=2"],
            "max_drop: has no effect without int8=true",
        ),
    ],
)
def test_mistakes_take_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str], items: list[str], message: str
) -> None:
    before = sorted((finished / "export").iterdir()) if (finished / "export").exists() else []
    assert main("export", [str(finished), *items]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told and "\n" not in told
    assert (
        sorted((finished / "export").iterdir()) if (finished / "export").exists() else []
    ) == before


def test_the_bound_that_does_not_decide_about_int8_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nncf")
    assert main("export", [str(finished), "to=onnx", "int8=true", "min_agreement=90"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "kd-export: min_agreement: has no effect with int8=true, where max_drop= bounds the loss of accuracy"
    )


def test_a_missing_extra_is_named(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main("export", [str(finished), "to=onnx"]) == 2
    assert (
        capsys.readouterr().err.strip().splitlines()[-1]
        == f"kd-export: to=onnx: {needs_extra('export')}"
    )
