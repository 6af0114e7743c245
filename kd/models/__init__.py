"""Teacher and student models: timm's by name, weights of several kinds, each model's own input."""

from kd.models.build import build_model, check_arch, completed, count_parameters, timm_model
from kd.models.loading import load_checkpoint
from kd.models.preprocess import Images, Prepare, Preprocess, input_of, preprocess_for, trial
from kd.models.spec import ModelSpec, StudentSpec, TeacherSpec
from kd.models.weights import read_names
from kd.settings import TapSpec, height_width

__all__ = [
    "Images", "ModelSpec", "Prepare", "Preprocess", "StudentSpec", "TapSpec", "TeacherSpec", "build_model",
    "check_arch", "completed", "count_parameters", "height_width", "input_of", "load_checkpoint", "preprocess_for",
    "read_names", "timm_model", "trial",
]  # fmt: skip
