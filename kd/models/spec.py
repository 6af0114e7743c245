"""What a recipe says of a model, with a builder of one's own."""

from dataclasses import dataclass

from torch import nn

from kd.models.own import Builder
from kd.run.settings import ModelSettings, StudentSettings, TeacherSettings


@dataclass
class ModelSpec(ModelSettings):
    """A model; :class:`kd.run.settings.ModelSettings` explains the arguments."""

    builder: Builder | None = None

    def compile_in_place(self, model: nn.Module) -> None:
        """Compiles ``model`` where it is asked for; its parameters keep their names."""
        if self.compile:
            model.compile(mode="default" if self.compile is True else self.compile)


@dataclass
class TeacherSpec(ModelSpec, TeacherSettings):
    """A teacher's model; :class:`kd.run.settings.TeacherSettings` explains the arguments."""


@dataclass
class StudentSpec(ModelSpec, StudentSettings):
    """A student's model; :class:`kd.run.settings.StudentSettings` explains the arguments."""
