"""Teachers: models, caches and functions that give logits and features for a batch."""

from kd.teachers.answer import Answer
from kd.teachers.base import Ensemble, OwnTeacher, RunTeacher, Teacher
from kd.teachers.build import build_teacher, build_teachers
from kd.teachers.cached import CachedTeacher, caches_of, reading_of
from kd.teachers.frozen import FrozenTeacher, dtype_for
from kd.teachers.open_cache import open_cache
from kd.teachers.stored import StoredAnswers, attach_answers

__all__ = ["Answer", "CachedTeacher", "Ensemble", "FrozenTeacher", "OwnTeacher", "RunTeacher",
           "StoredAnswers", "Teacher", "attach_answers", "build_teacher", "build_teachers", "caches_of", "dtype_for",
           "open_cache", "reading_of"]  # fmt: skip
