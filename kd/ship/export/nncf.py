"""int8 weights and activations, by NNCF's post-training quantisation."""

import contextlib
import io
import logging
from typing import TYPE_CHECKING

from kd.ship.export.base import INPUT, ExportJob, attends, need, quiet

if TYPE_CHECKING:
    import onnx
    import openvino


def quantized(
    model: "onnx.ModelProto | openvino.Model", job: ExportJob
) -> "onnx.ModelProto | openvino.Model":
    """An int8 copy of a model, calibrated on ``job.calibration``'s training pictures (NNCF's post-training
    quantisation).

    Args:
        model: ``onnx.ModelProto`` or ``openvino.Model`` in float32.
        job: what is exported. With attention layers NNCF's scheme for transformers is used.

    Returns:
        A model of the same type; weights use 7 bits, so that products do not overflow on CPUs without VNNI.

    Raises:
        UserError: the extra ``openvino`` is not installed.
    """
    nncf = need("nncf", "openvino", "int8=true")
    pictures = list(job.calibration())
    logging.getLogger("nncf").setLevel(logging.ERROR)
    of_onnx = type(model).__module__.startswith("onnx")
    # NNCF imports parts of torch here, which report a missing GPU; stdout has its progress bars
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        data = nncf.Dataset(pictures, (lambda picture: {INPUT: picture}) if of_onnx else None)
        kind = nncf.ModelType.TRANSFORMER if attends(job.student) else None
        # weights of 7 bits: on CPUs without VNNI products of 8 bits overflow, and a ViT loses 4 points in silence there
        fix = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
        return nncf.quantize(
            model, data, subset_size=len(pictures), model_type=kind, advanced_parameters=fix
        )
