"""Teachers: models, caches and functions that give logits and features for a batch."""

from kd.teachers.answer import Answer
from kd.teachers.answers_file import AnswersFile
from kd.teachers.asked import Address
from kd.teachers.base import Ensemble, OwnTeacher, RunTeacher, Teacher
from kd.teachers.build import build_teacher, build_teachers, shared_teachers
from kd.teachers.cached import AnsweringCollate, CachedTeacher, caches_of, reading_of
from kd.teachers.chat import ChatAddress
from kd.teachers.frozen import FrozenTeacher, dtype_for
from kd.teachers.matching import match_answers
from kd.teachers.open_cache import open_cache

__all__ = ["Address", "Answer", "AnsweringCollate", "AnswersFile", "CachedTeacher", "ChatAddress", "Ensemble",
           "FrozenTeacher", "OwnTeacher", "RunTeacher", "Teacher", "build_teacher", "build_teachers", "caches_of",
           "dtype_for", "match_answers", "open_cache", "reading_of", "shared_teachers"]  # fmt: skip
