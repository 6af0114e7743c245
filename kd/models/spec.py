"""The settings of a model, with a builder of the user's."""

import re

from pydantic import SkipValidation

from kd.models.own import Builder
from kd.settings import ModelSettings, StudentSettings, TeacherSettings

SIZES = {"embed_dim": "w", "dims": "w", "channels": "w", "depth": "d", "depths": "d", "layers": "d"}
"""timm's arguments that say how wide and how deep a model is, each with its letter in a model's title."""


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


class TeacherSpec(ModelSpec, TeacherSettings):
    """A teacher's model; :class:`kd.settings.TeacherSettings` explains the arguments."""

    def __post_init__(self) -> None:
        """Makes a truth value of ``cache`` the word ``on`` or ``off``, as YAML 1.1 reads these bare."""
        super().__post_init__()
        if isinstance(self.cache, bool):
            self.cache = "on" if self.cache else "off"


class StudentSpec(ModelSpec, StudentSettings):
    """A student's model; :class:`kd.settings.StudentSettings` explains the arguments."""

    def __post_init__(self) -> None:
        """As of both: a frozen backbone needs a classifier."""
        super().__post_init__()
        StudentSettings.__post_init__(self)
