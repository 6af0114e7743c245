"""The formats by the names that ``kd-export to=`` takes; another one is given by its class path."""

from importlib import import_module

from kd.errors import UserError, did_you_mean
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
        return getattr(import_module(module), kind)()
    except (ImportError, AttributeError, ValueError) as error:
        hint = did_you_mean(name, FORMATS)
        raise UserError(f"to: must be one of {', '.join(FORMATS)}, got '{name}'{hint}") from error
