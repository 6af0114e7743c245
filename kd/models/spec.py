"""The settings of a model, with a builder of the user's."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import SkipValidation
from torch import Tensor, nn

from kd.config.kinds import checked_group
from kd.models.own import Builder
from kd.settings import ModelSettings, StudentSettings, TeacherSettings

SIZES = {"embed_dim": "w", "dims": "w", "channels": "w", "depth": "d", "depths": "d", "layers": "d"}
"""timm's arguments that say how wide and how deep a model is, each with its letter in a model's title."""


@checked_group
class ModelSpec(ModelSettings):
    """A model; :class:`kd.settings.ModelSettings` explains the arguments."""

    arch: str = ""  # also what is no timm's: a class's name
    builder: SkipValidation[Builder | None] = None

    def __post_init__(self) -> None:
        """Takes timm's prefix off the architecture's name."""
        self.arch = re.sub(r"^(hf[-_]hub:)?timm/", "", self.arch)

    @property
    def title(self) -> str:
        """The architecture for people; of a size of its own the family, width and depth.

        >>> ModelSpec("vit_tiny_patch16_224", kwargs={"embed_dim": 128, "depth": 6}).title
        'vit_tiny w128 d6'
        """
        sizes = []
        for name, letter in SIZES.items():
            if name in self.kwargs:
                size = self.kwargs[name]
                numbers = size if isinstance(size, list | tuple) else [size]
                sizes.append(letter + "-".join(map(str, numbers)))
        family = self.arch.partition("_patch")[0] if sizes else self.arch
        return " ".join([family, *sizes])

    def compile_in_place(self, model: nn.Module) -> None:
        """Compiles the model where ``compile`` is set; its parameters keep their names. Incomplete batches run
        uncompiled.
        """
        if self.compile:
            model.compile(mode="default" if self.compile is True else self.compile, dynamic=False)
            model._compiled_call_impl = WholeBatches(model, model._compiled_call_impl)  # type: ignore[arg-type]


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
        """Runs the compiled model for shapes that come again; a shape that comes once in between runs uncompiled."""
        mode = self.model.training, torch.is_grad_enabled()
        batch = mode, images.shape
        if batch == self._last or mode not in self._known:
            self._known |= {mode, batch}
        self._last = batch
        return (self.compiled if batch in self._known else self.model._call_impl)(
            images, *args, **kwargs
        )


@checked_group
class TeacherSpec(ModelSpec, TeacherSettings):
    """A teacher's model; :class:`kd.settings.TeacherSettings` explains the arguments."""

    def __post_init__(self) -> None:
        """Makes a truth value of ``cache`` the word ``on`` or ``off``, as YAML 1.1 reads these bare."""
        super().__post_init__()
        if isinstance(self.cache, bool):
            self.cache = "on" if self.cache else "off"


@checked_group
class StudentSpec(ModelSpec, StudentSettings):
    """A student's model; :class:`kd.settings.StudentSettings` explains the arguments."""

    def __post_init__(self) -> None:
        """As of both: a frozen backbone needs a classifier."""
        super().__post_init__()
        StudentSettings.__post_init__(self)
