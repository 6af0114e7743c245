"""``backbone.safetensors``: the layers below the classifier, for detectors on timm and torchvision."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save
from torch import nn

from kd.models import Preprocess
from kd.models.arguments import check_arguments
from kd.models.loading import classifier_names
from kd.models.segmenter import backbone_of
from kd.ship.export.base import ExportJob, Format, Runtime, in_torch
from kd.ship.export.formats.hub import made_by_timm
from kd.ship.export.manifest import from_metadata
from kd.ship.export.student import in_order, input_size, shapes_in
from kd.ship.export.torchvision_keys import BODY, PLACE, detector_body
from kd.storage.elsewhere import LARGEST_STUDENT, regular
from kd.storage.student_metadata import student_metadata_in
from kd.storage.weights_files import read_metadata
from kd.storage.writing import write_bytes


class Backbone(Format):
    """``backbone.safetensors``: a plain timm state dict without a classifier.

    ``timm.create_model(arch, features_only=True, pretrained=True, pretrained_cfg_overlay={"file": FILE}, **kwargs)``
    loads it; ``arch`` and ``kwargs`` are in the file's metadata. Beside it is a file under the names of torchvision's
    detectors, where torchvision has the same network (:mod:`kd.ship.export.torchvision_keys`).
    """

    features = True

    def write(self, job: ExportJob, folder: Path) -> Path:
        """``backbone.safetensors``: the weights without the classifier; architecture, arguments and manifest in its
        metadata.

        Raises:
            UserError: a student that timm has not built.
        """
        file = folder / "backbone.safetensors"
        student = made_by_timm(job.weights, "to=backbone")
        model = backbone_of(job.student)
        classifier = tuple(f"{name}." for name in classifier_names(model))
        state = {}
        for name, tensor in model.state_dict().items():
            if not name.startswith(classifier):
                state[name] = tensor
        metadata = {
            "arch": student.arch,
            "kwargs": json.dumps({**student.kwargs, "num_classes": 0}),
            "img_size": json.dumps(student.img_size),
            "dense": json.dumps(model is not job.student),
            **job.manifest.as_metadata(),
        }
        write_bytes(file, in_order(save(_contiguous(state), metadata)))
        of_detector = detector_body(model, student.arch)
        if of_detector is not None:
            about = {**metadata, "torchvision": f"detector.{PLACE}.load_state_dict"}
            write_bytes(folder / BODY, in_order(save(of_detector, about)))
        return file

    def reference(self, job: ExportJob) -> Runtime:
        """Runs a copy of ``job.prepared`` that ends before the classifier; it shares the student's weights."""
        below = copy.copy(job.prepared)
        features = _Features(backbone_of(job.student))
        below._modules = {**below._modules, "model": features}
        return in_torch(below)

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """A callable that gives all values of the last layer's features, unpooled and flattened.

        It takes NumPy, uint8 ``(N, *manifest.shape)``, and gives float32 ``(N, D)``. ``threads`` is not read: torch's
        own setting counts.

        Raises:
            UserError: the metadata is not that of such an export, or names arguments that do not fit the tensors.
        """
        manifest = from_metadata(read_metadata(file), file)
        metadata = student_metadata_in(file)
        size = input_size(metadata, file)
        check_arguments(metadata.kwargs, f"{file}: ", shapes_in(file))
        model: Any = timm.create_model(metadata.arch, **metadata.kwargs)
        state = load_file(regular(file, LARGEST_STUDENT))
        # the backbone of a dense student ends earlier than timm's
        model.load_state_dict(state, strict=not metadata.has_own_form)
        prepare = Preprocess(size, manifest.mean, manifest.std)
        features = _Features(model.eval())
        return in_torch(lambda images: features(prepare(images)), channels_first=True)


def _contiguous(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as safetensors takes them: it refuses views of another order in memory."""
    return {name: tensor.contiguous() for name, tensor in state.items()}


class _Features(nn.Module):
    """The last layer's features of a timm model, flattened: ``(N, D)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model.forward_features(images).flatten(1)
