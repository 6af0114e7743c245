"""A model's numbers -> what a client reads."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from kd.export.manifest import Manifest


def answer(numbers: np.ndarray, manifest: Manifest, top: int) -> dict[str, Any]:
    """Of one picture: ``labels`` with probabilities; ``mask`` (PNG of class ids, base64) and ``shares``; ``features``.

    Args:
        numbers: ``(C,)``, ``(C, H, W)`` or ``(D,)``.
        manifest: of the model.
        top: how many labels.
    """
    if manifest.task == "features":
        return {"features": [round(float(x), 6) for x in numbers]}
    if manifest.task == "segmentation":
        return _mask(numbers, manifest.classes)
    p = 1 / (1 + np.exp(-numbers)) if manifest.task == "multilabel" else _softmax(numbers)
    best = np.argsort(-p, kind="stable")[:top]
    return {"labels": [{"label": manifest.classes[i], "p": round(float(p[i]), 6)} for i in best]}


def _softmax(numbers: np.ndarray) -> np.ndarray:
    e = np.exp(numbers - numbers.max())
    return e / e.sum()


def _mask(numbers: np.ndarray, classes: list[str]) -> dict[str, Any]:
    ids = numbers.argmax(0).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(ids).save(buffer, "PNG")
    counts = np.bincount(ids.ravel(), minlength=len(classes)) / ids.size
    shares = sorted(zip(classes, counts.tolist(), strict=True), key=lambda pair: -pair[1])
    return {
        "mask": base64.b64encode(buffer.getvalue()).decode(),
        "shares": [{"label": name, "p": round(share, 6)} for name, share in shares if share],
    }
