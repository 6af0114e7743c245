"""KServe's v2 protocol by its public client, and SageMaker's two paths."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.bodies import Refused
from kd.ship.serving.open_inference import (
    InferenceRequest,
    _split,
    metadata,
    read_request,
    respond,
)
from tests._serving import ABOUT, ask, mean_colour, serving


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The model's logits are a picture's mean red, green and blue."""
    model = mean_colour(tmp_path_factory.mktemp("v2") / "model.onnx")
    with serving(model, "max_pictures=8", "max_upload_mb=1", "max_pixels=100000") as (port, _):
        yield port


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with pytest.importorskip("tritonclient.http").InferenceServerClient(
        f"127.0.0.1:{port}"
    ) as client:
        yield client


def png(*colour: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(stream, "PNG")
    return stream.getvalue()


def tensor(values: np.ndarray, binary: bool) -> Any:
    http = pytest.importorskip("tritonclient.http")
    kind = "BYTES" if values.dtype == object else "UINT8"
    made = http.InferInput("pictures", values.shape, kind)
    return made.set_data_from_numpy(values, binary_data=binary)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("student") and client.is_model_ready("student", "1")
    assert not client.is_model_ready("other") and not client.is_model_ready("student", "2")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    found = client.get_model_metadata("student")
    assert found["inputs"] == [{"name": "pictures", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
    assert [(o["name"], o["datatype"], o["shape"]) for o in found["outputs"]] == [
        ("logits", "FP32", [-1, 3]), ("probabilities", "FP32", [-1, 3]), ("label", "BYTES", [-1]),
    ]  # fmt: skip


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("encoded", [True, False])
def test_tensors_there_and_back(client: Any, binary: bool, encoded: bool) -> None:
    http = pytest.importorskip("tritonclient.http")
    if encoded:
        files = [png(200, 10, 20), png(5, 7, 250)]
        values = np.array([f if binary else base64.b64encode(f) for f in files], dtype=object)
    else:
        values = np.zeros((2, 10, 20, 3), np.uint8)
        values[0], values[1] = (200, 10, 20), (5, 7, 250)
    names = ("logits", "probabilities", "label")
    wanted = [http.InferRequestedOutput(name, binary_data=binary) for name in names]
    for outputs in (wanted, None):
        found = client.infer("student", [tensor(values, binary)], outputs=outputs, request_id="a7")
        assert found.as_numpy("logits").tolist() == [[200, 10, 20], [5, 7, 250]]
        assert found.as_numpy("probabilities").sum(1) == pytest.approx(1)
        assert [x.decode() if isinstance(x, bytes) else x for x in found.as_numpy("label")] == [
            "r",
            "b",
        ]
        assert (
            found.get_response()["id"] == "a7" and found.get_response()["model_name"] == "student"
        )
    only = client.infer("student", [tensor(values, binary)], outputs=wanted[2:])
    assert [o["name"] for o in only.get_response()["outputs"]] == ["label"]


def test_several_clients_get_their_own_answers(port: int) -> None:
    http = pytest.importorskip("tritonclient.http")
    wrong: list[object] = []

    def ask(mine: int) -> None:
        with http.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for i in range(15):
                colours = [(mine, i, k) for k in range(1 + (mine + i) % 3)]
                values = np.stack([np.full((9 + i, 8, 3), colour, np.uint8) for colour in colours])
                found = client.infer("student", [tensor(values, bool(i % 2))]).as_numpy("logits")
                if found.round().astype(int).tolist() != [list(colour) for colour in colours]:
                    wrong.append((colours, found))

    threads = [threading.Thread(target=ask, args=(40 * n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_the_public_client_is_told_why(client: Any) -> None:
    http, utils = (
        pytest.importorskip("tritonclient.http"),
        pytest.importorskip("tritonclient.utils"),
    )
    good = np.zeros((1, 8, 8, 3), np.uint8)
    for model, made, reason, status in [
        ("other", tensor(good, True), "no model 'other'", 404),
        (
            "student",
            tensor(np.zeros((9, 8, 8, 3), np.uint8), True),
            "9 pictures are more than 8",
            413,
        ),
        (
            "student",
            tensor(np.zeros((1, 400, 300, 3), np.uint8), True),
            "pixels are more than max_pixels=100000",
            413,
        ),
        ("student", tensor(np.zeros((1, 800, 800, 3), np.uint8), True), "larger than 1 MB", 413),
        (
            "student",
            tensor(np.array([b"no picture"], dtype=object), True),
            "pictures[0]: not a picture",
            415,
        ),
    ]:
        with pytest.raises(utils.InferenceServerException) as caught:
            client.infer(model, [made])
        assert reason in caught.value.message() and caught.value.status() == str(status), (
            caught.value
        )
    for output in (
        http.InferRequestedOutput("mask"),
        http.InferRequestedOutput("label", class_count=2),
    ):
        with pytest.raises(utils.InferenceServerException, match="outputs"):
            client.infer("student", [tensor(good, True)], outputs=[output])
    with pytest.raises(utils.InferenceServerException, match="Content-Encoding"):
        client.infer("student", [tensor(good, True)], request_compression_algorithm="gzip")


PIXEL = {"name": "pictures", "datatype": "UINT8", "shape": [1, 1, 1, 3], "data": [1, 2, 3]}


@pytest.mark.parametrize(("change", "reason"), [
    ({"data": [1, 2]}, "has 3 elements, the data 2"), ({"data": [1, 2, 256]}, "from 0 to 255"),
    ({"data": [1, 2, 0.5]}, "from 0 to 255"), ({"data": [[1, 2], 3]}, "from 0 to 255"), ({"data": None}, "'data'"),
    ({"shape": [0, 1, 1, 3]}, "shape.0: "), ({"shape": [True, 1, 1, 3]}, "shape.0: "), ({"shape": 3}, "shape"),
    ({"shape": [1, 1, 3]}, r"got UINT8 \[1, 1, 3\]"), ({"name": "images"}, "inputs.0.name: Input should be 'pictures'"),
    ({"shape": [1, 2**30, 2**30, 3]}, "elements"), ({"parameters": {"binary_data_size": 3}}, "0 bytes follow"),
    ({"parameters": []}, "parameters"), ({"datatype": "BYTES", "shape": [3]}, "base64"),
    ({"datatype": "BYTES", "shape": [1], "data": ["?"]}, "not base64"), ({"name": "\ud800"}, "inputs.0.name: "),
    ({"datatype": "\ud800"}, "inputs.0.datatype: "), ({"datatype": "FP32"}, "should be 'UINT8' or 'BYTES'"),
])  # fmt: skip
def test_wrong_tensors_are_refused(change: dict[str, Any], reason: str) -> None:
    body = bytearray(json.dumps({"inputs": [PIXEL | change]}).encode())
    with pytest.raises(Refused, match=reason) as caught:
        read_request(body, None, ABOUT, 8)
    assert caught.value.status == 400 and str(caught.value).encode()


@pytest.mark.parametrize(("body", "header", "reason"), [
    (b"", None, "not JSON"), (b"[]", None, "the request: Input should be"), (b"{}", None, "inputs: Field required"),
    (b"{}", "3", "Header"),
    (b"{}", "-1", "Header"), (b"{}", "x", "Header"), (b"[" * 90_000, None, "not JSON"),
    (b"[" * 1_100_000, None, "in binary"), (b'{"inputs": [1]}', None, "inputs.0: Input should be"),
    (b'{"inputs": [], "id": 1}', None, "id: Input should be a valid string"),
    (b"\xff", None, "not JSON"),
])  # fmt: skip
def test_wrong_bodies_are_refused(body: bytes, header: str | None, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        read_request(bytearray(body), header, ABOUT, 8)


def test_binary_elements_must_fit() -> None:
    assert _split(memoryview(b"\x01\0\0\0a\x02\0\0\0bc"), 2) == [b"a", b"bc"]
    for raw in (b"\x05\0\0\0ab", b"\x01\0", b"\0\0\0\0" * 2, b""):
        made = {
            "name": "pictures",
            "datatype": "BYTES",
            "shape": [1],
            "parameters": {"binary_data_size": len(raw)},
        }
        head = json.dumps({"inputs": [made]}).encode()
        with pytest.raises(Refused, match=r"elements"):
            read_request(bytearray(head + raw), str(len(head)), ABOUT, 8)


@pytest.mark.parametrize(("task", "numbers", "name", "kind", "data"), [
    ("segmentation", np.eye(2)[None, :, None, :], "mask", "UINT8", [0, 1]),
    ("features", np.array([[1.5, 2.0]]), "features", "FP32", [1.5, 2.0]),
    ("numbers", np.array([[1.5, 2.0]]), "numbers", "FP32", [1.5, 2.0]),
    ("multilabel", np.array([[0.0, 1000.0]]), "probabilities", "FP32", [0.5, 1.0]),
])  # fmt: skip
def test_every_task_has_its_tensors(
    task: str, numbers: np.ndarray, name: str, kind: str, data: list[float]
) -> None:
    classes = [] if task == "features" else ["a", "b"]
    manifest = ExportManifest(task, "x", classes, (8, 8), 1.0, [0.0] * 3, [1.0] * 3, "onnx")
    assert name in {o["name"] for o in metadata("student", manifest)["outputs"]}
    numbers = numbers.astype(np.float32)
    answer = respond(InferenceRequest(None, [], {name: False}), "student", numbers, manifest)
    found = json.loads(answer.body)["outputs"][0]
    assert (found["name"], found["datatype"], found["data"]) == (name, kind, data)
    with pytest.raises(Refused, match="NaN"):
        respond(InferenceRequest(None, [], {name: True}), "student", numbers * np.nan, manifest)


def test_unknown_paths_are_refused_in_json(port: int) -> None:
    assert ask(port, "/v2/nothing", b"")[:2] == (404, b'{"error":"Not Found"}')
    assert ask(port, "/v2", b"")[:2] == (405, b'{"error":"Method Not Allowed"}')


def test_sagemaker_pings_and_invokes(port: int) -> None:
    assert ask(port, "/ping")[0] == 200
    picture = png(200, 10, 20)
    bodies = [(picture, "image/png"), (picture, "application/x-image"),
              (json.dumps({"images": [base64.b64encode(picture).decode()]}).encode(), "application/json")]  # fmt: skip
    for body, kind in bodies:
        status, found, _ = ask(port, "/invocations", body, kind)
        assert status == 200 and json.loads(found)["predictions"][0]["labels"][0]["label"] == "r"
    for body, kind in ((b"no picture", "image/png"), (b"x", "text/csv")):
        assert ask(port, "/invocations", body, kind)[0] == 415
