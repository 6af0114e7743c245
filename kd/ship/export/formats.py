"""The formats by the names that ``kd-export to=`` takes; another one is given by its class path."""

import difflib
from importlib import import_module

from kd.errors import UserError
from kd.ship.export.base import Format

FORMATS = {
    "onnx": "kd.ship.export.onnx.Onnx",
    "openvino": "kd.ship.export.openvino.OpenVino",
    "torch_export": "kd.ship.export.torch_export.TorchExport",
    "triton": "kd.ship.export.triton.Triton",
    "sagemaker": "kd.ship.export.sagemaker.SageMaker",
    "hub": "kd.ship.export.hub.Hub",
    "backbone": "kd.ship.export.backbone.Backbone",
}


def find_format(name: str) -> Format:
    module, _, kind = FORMATS.get(name, name).rpartition(".")
    try:
        found = getattr(import_module(module), kind)()
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"to: must be one of {', '.join(FORMATS)}, got '{name}'{hint}") from error
    return found
