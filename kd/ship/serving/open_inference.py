"""KServe's v2 protocol (the Open Inference Protocol) for one model: metadata, and tensors in JSON or binary.

https://github.com/kserve/open-inference-protocol with Triton's extension ``binary_tensor_data``.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
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


class _Json(BaseModel):
    """An object of the protocol's JSON, its values of the very types; keys that are not listed are passed over."""

    model_config = ConfigDict(strict=True)


class _InputParameters(_Json):
    binary_data_size: int | None = None
    kd_views: bool = False


class _Input(_Json):
    name: Literal["pictures"]
    datatype: Literal["UINT8", "BYTES"]
    shape: list[Annotated[int, Field(gt=0, lt=1 << 31)]]
    data: list[Any] | None = None
    parameters: _InputParameters = _InputParameters()


class _OutputParameters(_Json, extra="forbid"):
    binary_data: bool | None = None


class _Output(_Json):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Parameters(_Json):
    binary_data_output: bool = False


class _Content(_Json):
    id: str = ""
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=1)]
    outputs: list[_Output] = []
    parameters: _Parameters = _Parameters()


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


def read_request(
    body: bytearray, header: str | None, manifest: ExportManifest, max_pictures: int
) -> InferenceRequest:
    """Reads and checks the body of a request for inference. All of the model's outputs are wanted where it names none.

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
    (tensor,) = content.inputs
    pictures = _pictures(tensor, memoryview(body)[json_size:], max_pictures)
    view_shape = (*manifest.size, 3)
    are_views = tensor.parameters.kd_views
    if are_views and any(isinstance(p, bytes) or p.shape != view_shape for p in pictures):
        height, width = manifest.size
        raise Refused(400, f"{INPUT}: {VIEWS} needs UINT8 of [N, {height}, {width}, 3]")

    known = list(outputs_of(manifest))
    by_default = content.parameters.binary_data_output
    outputs = {}
    for output in content.outputs:
        if output.name not in known:
            raise Refused(400, f"outputs: must be of {', '.join(known)}, got {output.name[:40]!r}")
        binary = output.parameters.binary_data
        outputs[output.name] = by_default if binary is None else binary
    outputs = outputs or dict.fromkeys(known, by_default)
    return InferenceRequest(content.id or None, pictures, outputs, are_views)


def _length(text: str, most: int) -> int:
    """The number that :data:`HEADER` holds: the JSON's bytes; anything but a number up to ``most`` is refused with 400."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= most):
        raise Refused(
            400, f"{HEADER}: must be a number of the body's {most} bytes, got {text[:20]!r}"
        )
    return int(text)


def _json(text: bytearray) -> _Content:
    """The JSON of a request; refused with 413 where it has too many values, with 400 where it is no such request."""
    if count_marks(text) > MARKS:
        raise Refused(
            413,
            f"the JSON has more than {MARKS} values: send the tensor in binary, or encoded pictures",
        )
    try:
        return _Content.model_validate(json_of(text))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])).encode("utf-8", "replace").decode()[:60]
        problem = first["msg"].partition(" or instance")[0]
        raise Refused(400, f"{place or 'the request'}: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the request is not JSON") from error


def _pictures(tensor: _Input, raw: memoryview, max_pictures: int) -> Sequence[bytes | np.ndarray]:
    """The pictures of the input tensor: in its JSON, or in ``raw``, the bytes after the JSON.

    UINT8 ``[N, H, W, 3]`` holds pixels, BYTES ``[N]`` encoded pictures.

    Returns:
        N arrays of pixels ``(H, W, 3)``, or N files.

    Raises:
        Refused: another shape, or data that do not fit it (400); too many pictures (413).
    """
    shape = tensor.shape
    holds_pixels = tensor.datatype == "UINT8"
    if (len(shape) != 4 or shape[3] != 3) if holds_pixels else len(shape) != 1:
        received = f"{tensor.datatype} {str(shape)[:60]}"
        raise Refused(400, f"{INPUT}: must be UINT8 [N, H, W, 3] or BYTES [N], got {received}")
    check_count(shape[0], max_pictures)

    data: Any = tensor.data
    raw_size = tensor.parameters.binary_data_size
    is_binary = raw_size is not None
    if is_binary and (raw_size != len(raw) or data is not None):
        claimed = f"binary_data_size={raw_size}"
        raise Refused(400, f"{INPUT}: {claimed}, but {len(raw)} bytes follow the JSON")
    if not is_binary and (raw or data is None):
        raise Refused(
            400, f"{INPUT}: give its 'data', or bytes after the JSON with 'binary_data_size'"
        )

    if holds_pixels:
        pixels = raw if is_binary else _pixels_of_json(data)
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


def _pixels_of_json(data: list[Any]) -> bytes:
    """The bytes of a flat JSON array; 400 for values other than 0..255."""
    try:
        return bytes(data)
    except (TypeError, ValueError) as error:
        raise Refused(
            400, f"{INPUT}: the data of UINT8 must be one list of whole numbers from 0 to 255"
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
        count: the most elements, as the request's shape says; fewer are left to the caller.

    Raises:
        Refused: 400, more elements, or one that is cut short.
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

    Other outputs are ``numbers`` themselves, as float32. All are little-endian, as the binary extension wants them.
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
