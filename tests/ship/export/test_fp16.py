"""FP16: what overflows is named, the simulation rounds as NumPy's float16 does, and norms stay in float32."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models import register_model
from torch import Tensor, nn

from kd.cli import main
from kd.ship.export import fp16
from kd.ship.export.formats import onnx as onnx_format
from tests._files import read_json
from tests._helpers import ARCH, Command, refuses

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PICTURES = np.random.RandomState(0).randint(0, 256, (5, 8), dtype=np.uint8)


def graph_of(nodes: Sequence[Any], weights: Mapping[str, Any]) -> Any:
    """A float32 graph from uint8 ``pictures`` (N, 8) to ``answer`` (N, 8)."""
    types = onnx.TensorProto
    pictures = onnx.helper.make_tensor_value_info("pictures", types.UINT8, ["n", 8])
    answer = onnx.helper.make_tensor_value_info("answer", types.FLOAT, ["n", 8])
    initializers = [
        onnx.numpy_helper.from_array(np.float32(value), name) for name, value in weights.items()
    ]
    graph = onnx.helper.make_graph(nodes, "graph", [pictures], [answer], initializers)
    opset = onnx.helper.make_opsetid("", 20)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)


def node(operation: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(
        operation, inputs.split(), [output], name=f"the_{output}", **attributes
    )


def planted() -> Any:
    """Two results in a row overflow, and the third is small again; a norm follows."""
    nodes = [
        node("Cast", "pictures", "numbers", to=onnx.TensorProto.FLOAT),
        node("Mul", "numbers thousand", "large"),
        node("Relu", "large", "large_too"),
        node("Mul", "large_too hundredth", "small"),
        node("LayerNormalization", "small ones", "normed", axis=-1),
        node("Mul", "normed third", "answer"),
    ]
    return graph_of(nodes, {"thousand": 1000, "hundredth": 0.01, "ones": np.ones(8), "third": 0.3})


def in_numpy(model: Any) -> np.ndarray:
    """ONNX's own reference, which computes FP16 graphs in NumPy's float16."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model).run(None, {"pictures": PICTURES})[0]


def test_what_overflows_stays_in_float32_and_so_does_the_way_between() -> None:
    half = fp16.HalfPrecision(lambda: [PICTURES])
    exact = in_numpy(planted())
    converted = half.convert(planted())
    onnx.checker.check_model(converted, full_check=True)
    assert half.float32_layers == ["the_large", "the_large_too", "the_normed"]
    answers = half.simulation()(PICTURES)
    assert 0 < np.abs(answers - exact).max() < 1e-3
    np.testing.assert_array_equal(answers, in_numpy(converted))


def test_what_is_too_small_for_fp16_shows_in_the_simulation() -> None:
    nodes = [
        node("Cast", "pictures", "numbers", to=onnx.TensorProto.FLOAT),
        node("Mul", "numbers billionth", "tiny"),
        node("Mul", "tiny billion", "answer"),
    ]
    model = graph_of(nodes, {"billionth": 1e-9, "billion": 1e6})
    half = fp16.HalfPrecision(lambda: [PICTURES])
    half.convert(model)
    assert np.abs(half.simulation()(PICTURES) - in_numpy(model)).max() > 0.05


class TakenApart(nn.LayerNorm):
    """A layer norm in single operations, as onnxsim and older converters leave it."""

    def forward(self, x: Tensor) -> Tensor:
        """``(..., D)``: ``(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias``."""
        deviation = x - x.mean(-1, keepdim=True)
        variance = (deviation * deviation).mean(-1, keepdim=True)
        return deviation / torch.sqrt(variance + self.eps) * self.weight + self.bias


@register_model
def vit_with_norms_taken_apart(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """The tiny ViT with each of its norms in single operations."""
    kwargs = {key: value for key, value in kwargs.items() if "pretrained" not in key}
    return timm.create_model(ARCH, norm_layer=TakenApart, **kwargs)


def with_large_activations(finished: Path, folder: Path, arch: str) -> Path:
    """A copy of a run whose position embedding is in the hundreds, where squares leave FP16."""
    run = folder / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("export"))
    file = run / "student.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = {**opened.metadata(), "arch": arch}
    weights = load_file(file)
    weights["pos_embed"] = 400 * weights["pos_embed"] / weights["pos_embed"].std()
    save_file(weights, file, metadata)
    return run


@pytest.mark.parametrize("arch", [ARCH, "vit_with_norms_taken_apart"])
def test_norms_that_overflow_stay_in_float32(
    finished: Path, tmp_path: Path, prints: Command, arch: str
) -> None:
    """A ViT in FP16 fell to 19 % where its layer norms were taken apart (onnxsim, pull request 1742)."""
    pytest.importorskip("onnxscript")
    run = with_large_activations(finished, tmp_path, arch)
    assert "onnx_fp16 keeps in float32: blocks.0.norm1" in prints(
        "export", [str(run), "to=onnx", "fp16=true"]
    )
    record = read_json(run / "export" / "export.json")["onnx_fp16"]
    assert record["kept"] and record["simulated"]["agreement"] == 1.0
    assert all("norm" in layer for layer in record["float32_layers"])
    layers = read_json(run / "export" / "onnx_fp16" / "fp16.json")
    assert max(layer["largest"] for layer in layers) > fp16.LARGEST


def test_an_fp16_export_is_smaller_and_agrees(finished: Path) -> None:
    pytest.importorskip("onnxscript")
    for options in ([], ["fp16=true"]):
        assert main("export", [str(finished), "to=onnx", *options]) == 0
    records = read_json(finished / "export" / "export.json")
    half, whole = records["onnx_fp16"], records["onnx"]
    assert half["simulated"]["agreement"] == 1.0 and half["float32_layers"] == []
    assert 0 < half["simulated"]["max_difference"] < 0.1
    size = [(finished / record["file"]).stat().st_size for record in (half, whole)]
    assert size[0] < 0.8 * size[1]  # names and shapes are a third of so small a graph


# -- what operations compute inside --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "attributes", "factor"),
    [
        ("LayerNormalization", {"axis": -1}, 10),  # 255 * 10: squares of millions, a result near 1
        ("ReduceL2", {"keepdims": 1}, 10),
        ("Gelu", {"approximate": "tanh"}, 1),  # 255 in cubes
        ("LpNormalization", {"axis": -1}, 1),  # in no table
    ],
)
def test_what_overflows_inside_stays_in_float32(
    operation: str, attributes: dict[str, Any], factor: float
) -> None:
    """Its results are small: a converter that takes it apart meets the large ones."""
    inputs = "small ones" if operation == "LayerNormalization" else "small"
    nodes = [
        node("Cast", "pictures", "numbers", to=onnx.TensorProto.FLOAT),
        node("Mul", "numbers factor", "small"),
        node(operation, inputs, "inside", **attributes),
        node("Mul", "inside ones", "answer"),
    ]
    model = graph_of(nodes, {"factor": factor, "ones": np.ones(8)})
    half = fp16.HalfPrecision(lambda: [PICTURES])
    half.convert(model)
    assert half.float32_layers == ["the_inside"]


FAST = ("convnextv2_atto", "vit_tiny_patch16_224")
"""A norm of rows and columns, a norm of channels with a Gelu."""


RECURRENT = {"LSTM"}
"""In no table: what one sums inside is not known, so it stays in float32 (timm's Sequencer)."""


def families() -> list[Any]:
    """The smallest model of each of timm's files, as its name tells; the fast ones first."""
    from timm.models._registry import _module_to_models

    sizes = (
        "atto",
        "femto",
        "pico",
        "nano",
        "xxs",
        "tiny",
        "mini",
        "small",
        "050",
        "10",
        "18",
        "b0",
    )
    cases: list[Any] = [*FAST]
    for names in _module_to_models.values():
        ranked = sorted(
            names, key=lambda name: ([size in name for size in sizes], -len(name)), reverse=True
        )
        if ranked[0] not in FAST:
            cases.append(pytest.param(ranked[0], marks=pytest.mark.slow))
    return cases


@pytest.mark.parametrize("arch", families())
def test_each_operation_of_each_family_is_in_a_table(arch: str) -> None:
    """New ones (of a newer timm, or a newer exporter) stay in float32 until they are."""
    pytest.importorskip("onnxscript")
    model = timm.create_model(arch, num_classes=4).eval()
    size = timm.data.resolve_data_config({}, model=model)["input_size"]
    batch = torch.export.Dim("batch")
    try:
        program = torch.onnx.export(
            model, (torch.rand(2, *size),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
    except Exception as error:
        pytest.skip(f"can't be exported: {type(error).__name__}")
    assert program is not None
    graph = program.model_proto.graph
    in_float32 = {n.op_type for n in graph.node if not fp16.is_proven(n)}
    assert in_float32 <= RECURRENT
    assert not program.model_proto.functions


def with_weights_at(file: Path, location: str) -> Path:
    """Writes a model whose weight is in another file; returns ``file``."""
    nodes = [node("Cast", "pictures", "numbers", to=1), node("Mul", "numbers w", "answer")]
    model = graph_of(nodes, {"w": 1})
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    file.write_bytes(model.SerializeToString())
    return file


def test_a_graph_reads_no_file_of_another_folder(tmp_path: Path) -> None:
    """Its answers would hold what is in it."""
    (tmp_path / "export").mkdir()
    (tmp_path / "secret").write_bytes(bytes(4))
    (tmp_path / "export" / "link").symlink_to(tmp_path / "secret")
    for place in ("../secret", str(tmp_path / "secret"), "link"):
        file = with_weights_at(tmp_path / "export" / "model.onnx", place)
        with refuses("is not a readable ONNX model"):
            onnx_format.open_session(file)


def test_a_graphs_names_reach_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime prints errors by itself, in colours, with what the file says."""
    name = "w\x1b]0;EVIL\x07"
    os.mkfifo(tmp_path / name)
    with_weights_at(tmp_path / "model.onnx", name)
    with refuses("is not a readable ONNX model"):
        onnx_format.open_session(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")
