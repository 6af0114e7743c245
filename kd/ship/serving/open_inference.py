"""KServe's v2 protocol (the Open Inference Protocol) for one model: metadata, and tensors in JSON or binary.

https://github.com/kserve/open-inference-protocol with Triton's extension ``binary_tensor_data``.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from starlette.responses import Response

from kd.ship.export.base import INPUT
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.answers import mask_type, probabilities
from kd.ship.serving.bodies import Refused, check_count, count_marks, from_base64
from kd.storage.elsewhere import json_of

HEADER = "Inference-Header-Content-Length"
"""The header of a body in which binary tensors follow the JSON: its value is the JSON's length in bytes."""
EXTENSION = "binary_tensor_data"
VIEWS = "kd_views"
"""Parameter of the input: its pictures are views already."""
MARKS = 1_000_000
"""More brackets, commas and colons of JSON than pixels worth sending so: parsed, they would take much memory."""
T = TypeVar("T")


@dataclass(frozen=True)
class InferenceRequest:
    """A checked request for inference."""

    id: str | None
    """The request's own id, sent back with the answer."""
    pictures: Sequence[bytes | np.ndarray]
    """Encoded, or uint8 ``(H, W, 3)``."""
    outputs: dict[str, bool]
    """Names of the wanted tensors, and whether each is sent in binary."""
    are_views: bool = False
    """The pictures have the size of the model's input: they are not scaled and cropped again."""


def metadata(name: str, manifest: ExportManifest) -> dict[str, Any]:
    """A model's name, platform, inputs and outputs, for ``GET /v2/models/NAME``.

    Encoded pictures of datatype BYTES and shape [-1] are taken under the same input's name.
    """
    outputs = []
    for output, (datatype, shape) in outputs_of(manifest).items():
        outputs.append({"name": output, "datatype": datatype, "shape": shape})
    return {
        "name": name,
        "versions": ["1"],
        "platform": "onnxruntime_onnx" if name == "student" else "pytorch",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, -1, -1, 3]}],
        "outputs": outputs,
    }


def outputs_of(manifest: ExportManifest) -> dict[str, tuple[str, list[int]]]:
    """Datatypes and shapes of the outputs, by name, as the protocol's metadata has them; -1 is any size."""
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
    body: bytearray, header: str | None, manifest: ExportManifest, max_pictures: int
) -> InferenceRequest:
    """Checks the body of a request for inference.

    Args:
        body: JSON; after it the bytes of a binary tensor.
        header: value of :data:`HEADER`: how many bytes of the body are JSON. None: all are.
        manifest: of the model.
        max_pictures: pictures that a request may have.

    Raises:
        Refused: not such a request (400), or too many pictures or values (413).
    """
    json_size = len(body)
    if header is not None:
        json_size = _length(header, len(body))
    content = _json(body[:json_size])
    raw = memoryview(body)[json_size:]

    tensors = _typed(content, "inputs", list, [])
    names = [_shown_name(tensor) for tensor in tensors]
    if names != [INPUT]:
        raise Refused(400, f"inputs: must be one tensor '{INPUT}', got {names[:9]}")

    parameters = _typed(content, "parameters", dict, {})
    binary_by_default = _typed(parameters, "binary_data_output", bool, False)
    request_id = _typed(content, "id", str, "") or None
    known = list(outputs_of(manifest))
    outputs = _wanted(_typed(content, "outputs", list, []), known, binary_by_default)
    (tensor,) = tensors
    pictures = _pictures(tensor, raw, max_pictures)
    of_tensor = _typed(tensor, "parameters", dict, {})
    are_views = _typed(of_tensor, VIEWS, bool, False)
    view_shape = (*manifest.size, 3)
    if are_views and any(isinstance(p, bytes) or p.shape != view_shape for p in pictures):
        height, width = manifest.size
        raise Refused(400, f"{INPUT}: {VIEWS} needs UINT8 of [N, {height}, {width}, 3]")
    return InferenceRequest(request_id, pictures, outputs, are_views)


def _shown_name(tensor: object) -> str:
    """A tensor's name, cut for a message; "?" for what is no tensor."""
    if not isinstance(tensor, dict):
        return "?"
    return str(tensor.get("name"))[:40]


def _length(text: str, most: int) -> int:
    """The number of bytes in the header of a binary body; 400 for anything but a number up to ``most``."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= most):
        raise Refused(
            400, f"{HEADER}: must be a number of the body's {most} bytes, got {text[:20]!r}"
        )
    return int(text)


def _json(text: bytearray) -> dict[str, Any]:
    """The JSON object of a request; refused with 413 where it has too many values, else with 400."""
    if count_marks(text) > MARKS:
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
    """The value of a key; ``default`` where the key is missing.

    Args:
        content: an object of the request's JSON.
        key: of the value.
        kind: that the value must be of; of another one the request is refused with 400.
        default: of that kind, too.
    """
    value = content.get(key, default)
    if not isinstance(value, kind):
        raise Refused(400, f"{key}: must be a JSON {kind.__name__}, got {type(value).__name__}")
    return value


def _pictures(
    tensor: dict[str, Any], raw: memoryview, max_pictures: int
) -> Sequence[bytes | np.ndarray]:
    """The pictures of the input tensor: in its JSON, or in ``raw``, the bytes after the JSON.

    UINT8 ``[N, H, W, 3]`` holds pixels, BYTES ``[N]`` encoded pictures.

    Returns:
        N arrays of pixels ``(H, W, 3)``, or N files.

    Raises:
        Refused: another tensor, or data that do not fit its shape (400); too many pictures (413).
    """
    datatype = tensor.get("datatype")
    shape = _typed(tensor, "shape", list, [])
    has_sizes = all(type(side) is int and 0 < side < 1 << 31 for side in shape)
    holds_pixels = datatype == "UINT8" and len(shape) == 4 and shape[3] == 3
    holds_files = datatype == "BYTES" and len(shape) == 1
    if not (has_sizes and (holds_pixels or holds_files)):
        received = f"{str(datatype)[:20]!r} {str(shape)[:60]}"
        raise Refused(400, f"{INPUT}: must be UINT8 [N, H, W, 3] or BYTES [N], got {received}")
    check_count(shape[0], max_pictures)

    data: Any = tensor.get("data")
    raw_size = _typed(tensor, "parameters", dict, {}).get("binary_data_size")
    is_binary = raw_size is not None
    if is_binary and (raw_size != len(raw) or "data" in tensor):
        claimed = f"binary_data_size={str(raw_size)[:20]!r}"
        raise Refused(400, f"{INPUT}: {claimed}, but {len(raw)} bytes follow the JSON")
    if not is_binary and (raw or not isinstance(data, list)):
        raise Refused(
            400, f"{INPUT}: give its 'data', or bytes after the JSON with 'binary_data_size'"
        )

    if holds_pixels:
        pixels = raw if is_binary else _pixels_of_json(data, len(shape))
        _check_elements(shape, len(pixels))
        return list(np.frombuffer(pixels, np.uint8).reshape(shape))
    if is_binary:
        files = _split(raw, shape[0])
    else:
        files = _files_of_json(data)
    _check_elements(shape, len(files))
    return files


def _check_elements(shape: list[int], count: int) -> None:
    """Refuses data of ``count`` elements (pixels' values, or files) that a tensor of this shape does not have."""
    expected = math.prod(shape)
    if count != expected:
        raise Refused(400, f"{INPUT}: the shape {shape} has {expected} elements, the data {count}")


def _pixels_of_json(data: list[Any], depth: int) -> bytes:
    """The bytes of a JSON array, flat or nested ``depth`` deep, row by row; 400 for values other than 0..255."""
    try:
        for _ in range(depth - 1):
            if data and isinstance(data[0], list):
                data = [value for row in data for value in row]
        return bytes(data)
    except (TypeError, ValueError) as error:
        raise Refused(
            400, f"{INPUT}: the data of UINT8 must be whole numbers from 0 to 255"
        ) from error


def _files_of_json(data: list[Any]) -> list[bytes]:
    """The encoded pictures of a JSON array of base64; anything else is refused with 400."""
    if not all(isinstance(text, str) for text in data):
        raise Refused(400, f"{INPUT}: in JSON, the data of BYTES must be strings of base64")
    return [from_base64(i, text) for i, text in enumerate(data)]


def _split(raw: memoryview, count: int) -> list[bytes]:
    """Elements of a tensor of BYTES, each after its length in four bytes (little-endian).

    Args:
        raw: all of them.
        count: that the request's shape names; others are refused.
    """
    elements: list[bytes] = []
    end = 0
    while end < len(raw):
        start = end + 4
        end = start + int.from_bytes(raw[end:start], "little")
        if end > len(raw) or len(elements) == count:
            raise Refused(
                400, f"{INPUT}: must be {count} elements, each after its length in four bytes"
            )
        elements.append(bytes(raw[start:end]))
    return elements


def _wanted(outputs: list[Any], known: list[str], binary_by_default: bool) -> dict[str, bool]:
    """The requested tensors by name, and whether each is sent in binary; all known ones where none is named, and 400 for an
    unknown name or parameter.
    """
    wanted = {}
    for output in outputs:
        name = None
        if isinstance(output, dict):
            name = output.get("name")
        if name not in known:
            raise Refused(400, f"outputs: must be of {', '.join(known)}, got {str(name)[:40]!r}")
        parameters = _typed(output, "parameters", dict, {})
        unknown = sorted(set(parameters) - {"binary_data"})
        if unknown:
            raise Refused(
                400, f"outputs.{name}: the parameter {unknown[0][:40]!r} is not supported"
            )
        wanted[name] = _typed(parameters, "binary_data", bool, binary_by_default)
    return wanted or dict.fromkeys(known, binary_by_default)


def respond(
    request: InferenceRequest, model: str, numbers: np.ndarray, manifest: ExportManifest
) -> Response:
    """The response with a model's answers as tensors: JSON, after it the binary ones in their order.

    Args:
        request: names the wanted tensors.
        model: name of the model.
        numbers: its answers ``(N, ...)``.
        manifest: of the model.

    Raises:
        Refused: 500, a number is NaN or infinite.
    """
    if not np.isfinite(numbers).all():
        raise Refused(500, "the model's answer is NaN or infinite")
    outputs = []
    binaries = []
    for name, binary in request.outputs.items():
        values = _tensor(name, numbers, manifest)
        datatype, _ = outputs_of(manifest)[name]
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if binary:
            binaries.append(_bytes(values))
            output["parameters"] = {"binary_data_size": len(binaries[-1])}
        else:
            output["data"] = values.ravel().tolist()
        outputs.append(output)

    content: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": outputs}
    if request.id:
        content["id"] = request.id
    text = json.dumps(content).encode()
    if not binaries:
        return Response(text, media_type="application/json")
    return Response(
        b"".join([text, *binaries]),
        headers={HEADER: str(len(text))},
        media_type="application/octet-stream",
    )


def _tensor(output: str, numbers: np.ndarray, manifest: ExportManifest) -> np.ndarray:
    """One of :func:`outputs_of`'s tensors from the model's numbers ``(N, C, ...)``; labels ``(N,)`` as objects.

    Numbers are little-endian, as the binary extension wants them.
    """
    if output == "label":
        return np.array(manifest.classes, object)[numbers.argmax(1)]
    if output == "mask":
        small = mask_type(len(manifest.classes))
        return numbers.argmax(1).astype(np.dtype(small).newbyteorder("<"))
    if output == "probabilities":
        numbers = probabilities(numbers, manifest)
    return numbers.astype("<f4")


def _bytes(values: np.ndarray) -> bytes:
    """A tensor's bytes; each label after its length in four bytes."""
    if values.dtype != object:
        return values.tobytes()
    parts = []
    for label in values:
        encoded = label.encode("utf-8", "replace")
        parts.append(len(encoded).to_bytes(4, "little") + encoded)
    return b"".join(parts)
