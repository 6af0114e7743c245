"""Models under ``torch.compile``."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn

from kd.machine import cache_dir

KEPT_IN = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(eq=False)
class WholeBatches:
    """A compiled forward, for batches that come again: one graph for training and one for evaluation.

    The first shape of pictures in each is compiled, others once they come twice running. An epoch's last, smaller batch
    runs as the model is written: it would take a graph of its own, or make the batch's size a variable of all.
    """

    model: nn.Module
    """As it is written."""
    compiled: Callable[..., Any]
    """Its forward, compiled."""
    _known: set[object] = field(default_factory=set)
    _last: object = None

    def __call__(self, images: Tensor, *args: object, **kwargs: object) -> object:
        """Runs the compiled model for a mode's first shape of pictures, and for shapes that have come twice running; for any
        other shape the model as it is written.

        A mode is whether the model trains, and whether gradients are on: each has graphs of its own.
        """
        mode = self.model.training, torch.is_grad_enabled()
        batch = mode, images.shape
        if batch == self._last or mode not in self._known:
            self._known |= {mode, batch}
        self._last = batch
        return (self.compiled if batch in self._known else self.model._call_impl)(
            images, *args, **kwargs
        )


def compile_in_place(model: nn.Module, mode: str | bool) -> None:
    """Lets ``model`` run compiled, or as it is written; its parameters keep their names.

    Incomplete batches run as the model is written.

    Args:
        model: on its device, before a strategy wraps it.
        mode: of ``torch.compile`` (true: ``default``); false and ``auto``: as the model is written.
    """
    model._compiled_call_impl = None
    if mode in (False, "auto"):
        return
    _keep_compiled_code()
    model.compile(mode="default" if mode is True else mode, dynamic=False)
    model._compiled_call_impl = WholeBatches(model, model._compiled_call_impl)  # type: ignore[arg-type]


def _keep_compiled_code() -> None:
    """Lets torch keep what it compiles in kd's cache folder, where the next run finds it.

    Sets the variable :data:`KEPT_IN`, unless the user has set it. torch's import may have set it to a folder of temporary
    files: that is replaced.
    """
    given = Path(os.environ.get(KEPT_IN, ""))
    is_temporary = given.parent == Path(gettempdir())
    is_torchs = given.name.startswith("torchinductor_") and is_temporary
    if is_torchs or not given.name:
        os.environ[KEPT_IN] = str(cache_dir() / "compiled")
