"""The fit of a start runs where the run trains: on the first process's GPU, where there is one.

A fit is matrix products, which a GPU does a hundred times faster than the cores beside it, in float32 and float64. A
context of torch's (``with device:``) makes its new tensors there, so the fit itself names no device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kd.errors import UserError

CPU = torch.device("cpu")


@contextmanager
def fitting_on(device: torch.device, *models: nn.Module) -> Iterator[torch.device]:
    """Inside, models are on a GPU, as all new tensors; afterwards they are where they were.

    Float32 products keep all bits: with TF32's ten a copy of a model does not answer as the model.

    Args:
        device: where the run trains. On another kind of device than a GPU (an Apple one has no float64) the models stay
            where they are.
        models: whose weights the fit reads or sets.

    Yields:
        The device, for what the fit brings along (pictures).

    Raises:
        UserError: the GPU's memory is too small.
    """
    if device.type != "cuda":
        yield CPU
        return
    places = [next(model.parameters()).device for model in models]
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        for model in models:
            model.to(device)
        with device:
            yield device
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            "model.student.inherit_pictures: the GPU's memory is too small for the fit of the first weights; "
            "fewer pictures need less"
        ) from error
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        for model, place in zip(models, places, strict=True):
            model.to(place)
