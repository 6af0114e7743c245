"""A model's numbers -> what a client reads; and whether they are what its manifest says."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from kd.data.class_facts import picture_facts
from kd.errors import UserError, first_line
from kd.ship.export.base import Runtime
from kd.ship.export.manifest import ExportManifest


def try_out(model: Runtime, manifest: ExportManifest, what: str) -> None:
    """Runs a model on two black pictures, which also warms it up.

    Args:
        model: its runtime.
        manifest: says which shape its numbers have.
        what: the model, which begins a user's error.

    Raises:
        UserError: it can't run, or its numbers are not what the manifest says.
    """
    try:
        numbers = model(np.zeros((2, *manifest.shape), np.uint8))
    except Exception as error:  # a runtime's classes derive from Exception alone
        reason = first_line(error)
        raise UserError(
            f"{what} does not take uint8 pictures of {manifest.shape}: {reason}"
        ) from error
    shape: tuple[int, ...] = getattr(numbers, "shape", ())
    axes = 4 if manifest.task == "segmentation" else 2
    outputs = len(manifest.classes)
    fits = len(shape) == axes and shape[0] == 2 and outputs in (0, shape[1])
    if not fits:
        raise UserError(
            f"{what} answers two pictures in the shape {shape}, not {manifest.task} of "
            f"{len(manifest.classes)} classes, as its metadata state"
        )


def answer(numbers: np.ndarray, manifest: ExportManifest, top: int) -> dict[str, Any]:
    """One picture's numbers as a client reads them: values of JSON by name, of the manifest's task.

    - Classes: ``labels``, the likeliest first, each ``{"label": NAME, "p": 0..1}``; and, where classes have numbers that
      belong to them, ``facts`` (:func:`kd.data.class_facts.picture_facts`).
    - Segmentation: ``mask``, a PNG of class ids in base64, of 16 bits where there are more than 256 classes; ``shares``
      of the pixels, as ``labels``.
    - ``features``: a list; ``numbers``: by the name of each.

    Args:
        numbers: logits ``(C,)`` or ``(C, H, W)``, numbers ``(C,)`` or features ``(D,)``.
        manifest: of the model.
        top: the likeliest labels that are listed.

    Raises:
        ValueError: one of ``numbers`` is NaN or infinite.
    """
    if not np.isfinite(numbers).all():
        raise ValueError("the model's answer is NaN or infinite")
    if manifest.task == "features":
        return {"features": [round(float(x), 6) for x in numbers]}
    if manifest.task == "numbers":
        named = zip(manifest.classes, numbers, strict=True)
        return {"numbers": {name: round(float(x), 6) for name, x in named}}
    if manifest.task == "segmentation":
        return _mask(numbers, manifest.classes)
    p = probabilities(numbers, manifest)
    labels = [{"label": manifest.classes[i], "p": round(float(p[i]), 6)} for i in largest(p, top)]
    if manifest.facts:
        return {"labels": labels, "facts": picture_facts(manifest.facts, p)}
    return {"labels": labels}


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the ``count`` largest of ``(C,)`` values, the largest first, equal ones in their order; all where fewer.

    Only values as large as the last of these are sorted: a whole sort takes a millisecond for 20,000 classes.
    """
    places = np.arange(len(values))
    if count < len(values):
        partly_sorted = np.partition(values, -count)
        least = partly_sorted[-count]
        places = np.flatnonzero(values >= least)
    candidates = values[places]
    falling = np.argsort(-candidates, kind="stable")
    largest_first = places[falling]
    return largest_first[:count]


def probabilities(numbers: np.ndarray, manifest: ExportManifest) -> np.ndarray:
    """Logits -> probabilities of the same shape: sigmoid for several labels a picture, else softmax (last axis)."""
    if manifest.task == "multilabel":
        return 1 / (1 + np.exp(-numbers))
    return softmax(numbers)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of the same shape, along the last axis."""
    largest = logits.max(-1, keepdims=True)  # taken off: exp would overflow
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / total


def mask_type(classes: int) -> type[np.uint8] | type[np.uint16]:
    """The smaller of two types that holds all class ids of a mask: uint8 up to 256 ``classes``."""
    if classes <= 256:
        return np.uint8
    return np.uint16


def _mask(numbers: np.ndarray, classes: list[str]) -> dict[str, Any]:
    """A map of logits ``(C, H, W)`` as a client reads it: a PNG of class ids in base64, and each class's share of
    pixels.
    """
    count = len(classes)
    ids_HW = numbers.argmax(0).astype(mask_type(count))
    buffer = io.BytesIO()
    Image.fromarray(ids_HW).save(buffer, "PNG")
    pixels_C = np.bincount(ids_HW.ravel(), minlength=count)
    shares = []
    for i in np.argsort(-pixels_C, kind="stable"):  # the largest first
        pixels = pixels_C[i]
        if pixels:
            share = float(pixels / ids_HW.size)
            shares.append({"label": classes[i], "p": round(share, 6)})
    mask = base64.b64encode(buffer.getvalue()).decode()
    return {"mask": mask, "shares": shares}
