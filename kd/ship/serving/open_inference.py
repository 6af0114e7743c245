"""KServe's v2 protocol (the Open Inference Protocol) for one model: metadata, and tensors in JSON or binary.

https://github.com/kserve/open-inference-protocol with Triton's extension ``binary_tensor_data``.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from starlette.responses import Response

from kd.ship.export.base import INPUT
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.answers import mask_type, probabilities
from kd.ship.serving.bodies import Refused, check_count, from_base64
from kd.storage.elsewhere import json_of

HEADER = "Inference-Header-Content-Length"
EXTENSION = "binary_tensor_data"
MARKS = 1_000_000
"""More brackets, commas and colons of JSON than pixels worth sending so: parsed, they would take much memory."""
T = TypeVar("T")


@dataclass(frozen=True)
class InferenceRequest:
    """A checked request for inference."""

    id: str | None
    """The request's own id, sent back with the answer."""
    pictures: list[bytes | np.ndarray]
    """Encoded, or uint8 ``(H, W, 3)``."""
    outputs: dict[str, bool]
    """Names of the wanted tensors, and whether each is sent in binary."""


def metadata(name: str, manifest: ExportManifest) -> dict[str, Any]:
    """Encoded pictures of datatype BYTES and shape [-1] are taken under the same input's name."""
    return {
        "name": name,
        "versions": ["1"],
        "platform": "onnxruntime_onnx" if name == "student" else "pytorch",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, -1, -1, 3]}],
        "outputs": [
            {"name": n, "datatype": k, "shape": s} for n, (k, s) in outputs_of(manifest).items()
        ],
    }


def outputs_of(manifest: ExportManifest) -> dict[str, tuple[str, list[int]]]:
    """Datatypes and shapes by name; -1 is any size."""
    count = len(manifest.classes)
    if manifest.task == "features":
        return {"features": ("FP32", [-1, -1])}
    if manifest.task == "numbers":
        return {"numbers": ("FP32", [-1, count])}
    if manifest.task == "segmentation":
        return {"mask": (mask_type(count).__name__.upper(), [-1, -1, -1])}
    return {
        "logits": ("FP32", [-1, count]),
        "probabilities": ("FP32", [-1, count]),
        "label": ("BYTES", [-1]),
    }


def read(
    body: bytearray, header: str | None, manifest: ExportManifest, most: int
) -> InferenceRequest:
    """A request's body, of which ``header`` says how many bytes are JSON; at most so many pictures."""
    size = len(body) if header is None else _length(header, len(body))
    content = _json(body[:size])
    tensors = _typed(content, "inputs", list, [])
    if len(tensors) != 1 or not isinstance(tensors[0], dict) or tensors[0].get("name") != INPUT:
        names = [str(t.get("name"))[:40] if isinstance(t, dict) else "?" for t in tensors[:9]]
        raise Refused(400, f"inputs: must be one tensor '{INPUT}', got {names}")
    every = _typed(_typed(content, "parameters", dict, {}), "binary_data_output", bool, False)
    name = _typed(content, "id", str, "") or None
    wanted = _wanted(_typed(content, "outputs", list, []), list(outputs_of(manifest)), every)
    return InferenceRequest(name, _pictures(tensors[0], memoryview(body)[size:], most), wanted)


def _length(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) <= most):
        raise Refused(
            400, f"{HEADER}: must be a number of the body's {most} bytes, got {text[:20]!r}"
        )
    return int(text)


def _json(text: bytearray) -> dict[str, Any]:
    if sum(map(text.count, (b"[", b"{", b",", b":"))) > MARKS:
        raise Refused(
            413,
            f"the JSON has more than {MARKS} values: send the tensor in binary, or encoded pictures",
        )
    try:
        content = json_of(text)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the request is not JSON") from error
    if not isinstance(content, dict):
        raise Refused(400, "the request must be a JSON object")
    return content


def _typed(content: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    value = content.get(key, default)
    if not isinstance(value, kind):
        raise Refused(400, f"{key}: must be a JSON {kind.__name__}, got {type(value).__name__}")
    return value


def _pictures(tensor: dict[str, Any], raw: memoryview, most: int) -> list[bytes | np.ndarray]:
    kind, shape = tensor.get("datatype"), _typed(tensor, "shape", list, [])
    whole = all(type(side) is int and 0 < side < 1 << 31 for side in shape)
    pixels = kind == "UINT8" and len(shape) == 4 and shape[3] == 3
    if not (whole and (pixels or (kind == "BYTES" and len(shape) == 1))):
        got = f"{str(kind)[:20]!r} {str(shape)[:60]}"
        raise Refused(400, f"{INPUT}: must be UINT8 [N, H, W, 3] or BYTES [N], got {got}")
    check_count(shape[0], most)
    size = _typed(tensor, "parameters", dict, {}).get("binary_data_size")
    found: bytes | memoryview | list[bytes | np.ndarray]
    if size is None:
        if raw or not isinstance(tensor.get("data"), list):
            raise Refused(
                400, f"{INPUT}: give its 'data', or bytes after the JSON with 'binary_data_size'"
            )
        found = (
            _pixels_of_json(tensor["data"], len(shape))
            if pixels
            else _encoded_of_json(tensor["data"])
        )
    else:
        if size != len(raw) or "data" in tensor:
            raise Refused(
                400,
                f"{INPUT}: binary_data_size={str(size)[:20]!r}, but {len(raw)} bytes follow the JSON",
            )
        found = raw if pixels else _split(raw, shape[0])
    if len(found) != math.prod(shape):
        raise Refused(
            400,
            f"{INPUT}: the shape {shape} has {math.prod(shape)} elements, the data {len(found)}",
        )
    return list(np.frombuffer(found, np.uint8).reshape(shape)) if pixels else found  # type: ignore[arg-type, return-value]


def _pixels_of_json(data: list[Any], depth: int) -> bytes:
    try:
        for _ in range(depth - 1):
            if data and isinstance(data[0], list):
                data = [value for row in data for value in row]
        return bytes(data)
    except (TypeError, ValueError) as error:
        raise Refused(
            400, f"{INPUT}: the data of UINT8 must be whole numbers from 0 to 255"
        ) from error


def _encoded_of_json(data: list[Any]) -> list[bytes | np.ndarray]:
    if not all(isinstance(text, str) for text in data):
        raise Refused(400, f"{INPUT}: in JSON, the data of BYTES must be strings of base64")
    return [from_base64(i, text) for i, text in enumerate(data)]


def _split(raw: memoryview, count: int) -> list[bytes | np.ndarray]:
    """Elements of BYTES, each after its length in four bytes."""
    found: list[bytes | np.ndarray] = []
    at = 0
    while at < len(raw):
        start = at + 4
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw) or len(found) == count:
            raise Refused(
                400, f"{INPUT}: must be {count} elements, each after its length in four bytes"
            )
        found.append(bytes(raw[start:at]))
    return found


def _wanted(outputs: list[Any], known: list[str], binary: bool) -> dict[str, bool]:
    found = {}
    for output in outputs:
        name = output.get("name") if isinstance(output, dict) else None
        if name not in known:
            raise Refused(400, f"outputs: must be of {', '.join(known)}, got {str(name)[:40]!r}")
        parameters = _typed(output, "parameters", dict, {})
        if others := sorted(set(parameters) - {"binary_data"}):
            raise Refused(400, f"outputs.{name}: the parameter {others[0][:40]!r} is not supported")
        found[name] = _typed(parameters, "binary_data", bool, binary)
    return found or dict.fromkeys(known, binary)


def respond(
    asked: InferenceRequest, name: str, numbers: np.ndarray, manifest: ExportManifest
) -> Response:
    """The model's ``numbers`` ``(N, ...)`` as tensors: JSON, then the binary ones in their order."""
    if not np.isfinite(numbers).all():
        raise Refused(500, "the model's answer is NaN or infinite")
    outputs, parts = [], []
    for output, binary in asked.outputs.items():
        kind, _ = outputs_of(manifest)[output]
        values = _tensor(output, numbers, manifest)
        described: dict[str, Any] = {
            "name": output,
            "datatype": kind,
            "shape": list(np.shape(values)),
        }
        if binary:
            parts.append(_bytes(values))
            described["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            described["data"] = (
                np.ravel(values).tolist() if isinstance(values, np.ndarray) else values
            )
        outputs.append(described)
    about = {"model_name": name, "model_version": "1", "outputs": outputs} | (
        {"id": asked.id} if asked.id else {}
    )
    text = json.dumps(about).encode()
    if not parts:
        return Response(text, media_type="application/json")
    return Response(
        b"".join([text, *parts]),
        headers={HEADER: str(len(text))},
        media_type="application/octet-stream",
    )


def _tensor(output: str, numbers: np.ndarray, manifest: ExportManifest) -> np.ndarray | list[str]:
    if output == "label":
        return [manifest.classes[i] for i in numbers.argmax(1)]
    if output == "mask":
        return numbers.argmax(1).astype("<u1" if len(manifest.classes) <= 256 else "<u2")
    return (probabilities(numbers, manifest) if output == "probabilities" else numbers).astype(
        "<f4"
    )


def _bytes(values: np.ndarray | list[str]) -> bytes:
    if isinstance(values, np.ndarray):
        return values.tobytes()
    encoded = [value.encode("utf-8", "replace") for value in values]
    return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)
