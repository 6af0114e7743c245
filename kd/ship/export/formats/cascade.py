"""Student, teacher (each a ``model.onnx``) and the rule of kd-eval cascade=true, for Triton, and ten lines of Python."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kd.errors import UserError
from kd.ship.cascade_rule import CascadeRule, read_rule
from kd.ship.export.base import ExportJob, Format, Runtime, in_torch
from kd.ship.export.formats.onnx import EXTRA, as_runtime, onnx_program, open_session
from kd.ship.export.formats.triton import NAME, config, describe
from kd.ship.serving.answers import softmax
from kd.storage.writing import make_folder, write_json, write_text

TEACHER, CASCADE = "teacher", "cascade"
"""Folders of the repository beside the student's."""
FILE = "cascade.json"
"""The rule beside the exported models."""
PROGRAM = '''\
"""Answers of the student where it is sure, else of the teacher. Needs numpy and onnxruntime."""

import json
import numpy as np
import onnxruntime as ort
rule = json.load(open("cascade.json"))
student, teacher = (ort.InferenceSession(f"{name}/1/model.onnx") for name in ("student", "teacher"))
def answer(pictures):  # uint8 SHAPE -> logits (N, classes), and which pictures the teacher answered
    z = student.run(["answer"], {"pictures": pictures})[0]
    p = np.exp(z - z.max(1, keepdims=True)) / np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)
    asks = ~(p.max(1) >= rule["threshold"])  # also where the student answers NaN
    if asks.any():
        z[asks] = teacher.run(["answer"], {"pictures": pictures[asks]})[0]
    return z, asks
'''

TRITON_PROGRAM = '''\
"""Answers of the student where it is sure, else of the teacher: both run as models of this repository."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.rule = json.loads(Path(__file__).with_name("cascade.json").read_text())

    def execute(self, requests):
        parts = [pb_utils.get_input_tensor_by_name(r, "pictures").as_numpy() for r in requests]
        z, asks = self.answer(np.concatenate(parts))  # the pictures of all requests together
        responses = []
        for part in parts:
            answer, by_teacher, z, asks = z[: len(part)], asks[: len(part)], z[len(part) :], asks[len(part) :]
            tensors = [pb_utils.Tensor("answer", answer), pb_utils.Tensor("by_teacher", by_teacher[:, None])]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

    def answer(self, pictures):
        z = logits("student", pictures).copy()
        p = np.exp(z - z.max(1, keepdims=True)) / np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)
        asks = ~(p.max(1) >= self.rule["threshold"])  # also where the student answers NaN
        if asks.any():
            z[asks] = logits("teacher", np.ascontiguousarray(pictures[asks]))
        return z, asks


def logits(model, pictures):
    inputs = [pb_utils.Tensor("pictures", pictures)]
    request = pb_utils.InferenceRequest(model_name=model, requested_output_names=["answer"], inputs=inputs)
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "answer").as_numpy()
'''
"""``model.py`` of Triton's Python backend, which may ask other models: an ensemble can't, it runs all of them."""
BY_TEACHER = """,
  {
    name: "by_teacher"
    data_type: TYPE_BOOL
    dims: [1]
  }"""


class Cascade(Format):
    """Triton's model repository with ``student``, ``teacher`` and ``cascade``; ``cascade.json`` and ``answer.py`` beside.

    Both models take the same pictures.
    """

    needs: Mapping[str, Sequence[str]] = {EXTRA: ("onnx", "onnxscript", "onnxruntime")}

    def write(self, job: ExportJob, folder: Path) -> Path:
        """Writes both models and the rule.

        ``student/1/model.onnx`` and ``teacher/1/model.onnx``, each with its ``config.pbtxt`` and ``labels.txt``;
        ``cascade/1/model.py`` (:data:`TRITON_PROGRAM`), which asks them; ``answer.py`` (:data:`PROGRAM`) for ONNX Runtime
        alone; and ``cascade.json``, the rule, which is returned: ``threshold`` and ``classes``.

        Raises:
            UserError: no rule, or a teacher that can't be exported.
        """
        rule = read_rule(job.weights.parent, "to=cascade")
        answer = (len(job.manifest.classes),)
        for name, of_model in ((NAME, job), (TEACHER, _teachers_job(job))):
            program = onnx_program(of_model)
            place = folder / name
            program.save(make_folder(place / "1") / "model.onnx")
            text = config(of_model.manifest, answer, name)
            describe(place, job.manifest, text)
        shape = f"(N, {', '.join(str(side) for side in job.manifest.shape)})"
        write_text(folder / "answer.py", PROGRAM.replace("SHAPE", shape))
        file = folder / FILE
        content = {"threshold": rule.threshold, "classes": job.manifest.classes}
        write_json(file, content)
        cascade = folder / CASCADE
        program_folder = make_folder(cascade / "1")
        write_json(program_folder / FILE, content)
        write_text(program_folder / "model.py", TRITON_PROGRAM)
        of_cascade = config(job.manifest, answer, CASCADE, "python", BY_TEACHER)
        describe(cascade, job.manifest, of_cascade)
        self._read_rule = rule
        return file

    def open(self, file: Path, threads: int = 0) -> Runtime:
        """Both models in ONNX Runtime on the CPU, with the teacher's answers where the rule asks for them. The rule is the
        one that :meth:`write` of this object has read: it must be called first.

        Args:
            file: ``cascade.json`` beside the folders of both models.
            threads: of each model; 0: as many as there are cores.
        """
        student, teacher = (
            as_runtime(open_session(file.parent / name / "1" / "model.onnx", threads))
            for name in (NAME, TEACHER)
        )
        return _runtime(student, teacher, self._read_rule)

    def reference(self, job: ExportJob) -> Runtime:
        """Both models in torch, with the teacher's answers where the rule of :meth:`write`, called before, asks for them."""
        teacher = in_torch(_teachers_job(job).prepared)
        return _runtime(in_torch(job.prepared), teacher, self._read_rule)


def _teachers_job(job: ExportJob) -> ExportJob:
    """The same job for the teacher: its model in the data's classes, on pictures of the same size.

    Raises:
        UserError: no single teacher whose weights kd loads, or one whose pictures a function of the user's prepares.
    """
    from kd.models.preprocess import Preprocess
    from kd.ship.export.prepared import Prepared
    from kd.teachers import FrozenTeacher

    teacher = job.teacher()
    if not isinstance(teacher, FrozenTeacher):
        raise UserError("to=cascade: needs one teacher, with weights that kd loads")
    preprocess = teacher.prepare
    if not isinstance(preprocess, Preprocess):
        raise UserError(
            "to=cascade: the teacher prepares its pictures by a function of yours, which no file can hold"
        )
    prepared = Prepared(teacher.in_the_datas_classes(), preprocess, job.manifest.size)
    return replace(job, prepared=prepared, manifest=replace(job.manifest, arch=teacher.arch))


def _runtime(student: Runtime, teacher: Runtime, rule: CascadeRule) -> Runtime:
    """The cascade as one runtime: the student's logits ``(N, C)``, replaced by the teacher's where the rule asks it.

    The exported programs (:data:`PROGRAM`, :data:`TRITON_PROGRAM`) compute the same without kd.
    """

    def run(pictures: np.ndarray) -> np.ndarray:
        """Pictures -> logits ``(N, C)``."""
        logits = np.array(student(pictures))
        asks = rule.asks(softmax(logits))
        if asks.any():
            unsure = np.ascontiguousarray(pictures[asks])
            logits[asks] = teacher(unsure)
        return logits

    return run
