"""``kd-eval cascade=true`` and what follows from it: ``kd-serve defer=``, ``kd-export to=cascade``."""

import base64
import json
import runpy
import sys
import types
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kd.cli import main
from kd.report.tables import Table, results_of
from kd.ship.cascade_rule import read_rule
from kd.storage.of_weights import write_of_weights
from kd.storage.student_metadata import weights_digest
from tests._files import read_json, write_json
from tests._helpers import CLASSES, Command, other_weights, refuses
from tests._serving import serving


@pytest.fixture()
def measured(with_test: Path) -> Path:
    """A copy of the finished run with a rule that asks for at most 80 % of the pictures."""
    root = f"data.source.root={with_test.parent / 'data'}"
    assert main("eval", [str(with_test), "cascade=true", "share=0.8", root]) == 0
    return with_test


def test_the_curve_and_the_rule(with_test: Path, prints: Command) -> None:
    measured = with_test
    root = f"data.source.root={with_test.parent / 'data'}"
    out = prints("eval", [str(with_test), "cascade=true", "share=0.8", root])
    title = "The student where it is sure, else the teacher (64 pictures)"
    assert title in " ".join(out.split())
    assert "share=0.8: threshold " in out
    assert "checked on 32 others: " in out
    found = read_json(measured / "eval_test.json")
    cascade = found["cascade"]
    kept = read_json(measured / "cascade.json")
    assert kept.pop("weights") == weights_digest(measured)
    assert kept == cascade
    assert cascade["curve"][0]["accuracy"] == pytest.approx(found["student"]["acc1"])
    assert cascade["curve"][-1]["accuracy"] == pytest.approx(found["teacher"]["acc1"])
    last = cascade["curve"][-1]
    assert last["ms"] == pytest.approx(cascade["student_ms"] + cascade["teacher_ms"])
    assert read_json(measured / "looks.json")["looks"][0]["pictures"] == 64
    rule = read_rule(measured)
    assert rule.threshold == cascade["threshold"]


def test_pictures_that_chose_the_epoch_guarantee_nothing(with_test: Path, prints: Command) -> None:
    """Where they are taken all the same, the terminal, the page and the rule's file say so."""
    data = with_test.parent / "data"
    for picture in data.glob("val/*/*.jpg"):
        (data / "test" / picture.parent.name / f"val_{picture.name}").symlink_to(picture)
    words = ["cascade=true", "share=0.8", f"data.source.root={data}", "despite_choice=true"]
    out = prints("eval", [str(with_test), *words])
    caution = "no guarantee for new pictures: these (16 of them) chose the student's epoch"
    assert caution in out
    assert "guaranteed" not in out
    _, numbers, words = results_of(with_test, print)["cascade"]
    assert isinstance(numbers, Table) and isinstance(words, Table)
    assert any(caution in str(row[0]) for row in words.rows)


def test_a_goal_out_of_reach_leaves_the_rule(measured: Path, prints: Command) -> None:
    before = (measured / "cascade.json").read_bytes()
    root = f"data.source.root={measured.parent / 'data'}"
    out = prints("eval", [str(measured), "cascade=true", "accuracy=0.9999", root])
    assert "accuracy=0.9999: no threshold is sure to reach it" in out
    assert (measured / "cascade.json").read_bytes() == before


def test_a_rule_is_for_the_weights_it_was_measured_with(measured: Path) -> None:
    file = measured / "student.safetensors"
    before = file.read_bytes()
    other_weights(measured)
    for key in ("defer", "to=cascade"):
        with refuses(f"^{key}: .*made from other weights"):
            read_rule(measured, key)
    file.write_bytes(before)
    assert 0 < read_rule(measured).threshold <= 1


def test_served_the_answer_says_who_gave_it(measured: Path) -> None:
    """Of the test split's pictures those below the threshold are the teacher's, as both models say alone under ``/v2``."""
    pytest.importorskip("onnxruntime")
    pictures = sorted((measured.parent / "data" / "test").rglob("*.*"))[:24]
    found = read_json(measured / "cascade.json")
    median = {**found, "threshold": found["scores"][50]}
    write_json(measured / "cascade.json", median)
    rule = read_rule(measured)
    with serving(measured, "teacher=true", "defer=true") as (port, _):
        with_rule = [posted(port, picture) for picture in pictures]
        alone = [[inferred(port, name, p) for name in ("student", "teacher")] for p in pictures]
        metrics = (
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        )
    write_json(measured / "cascade.json", found)
    by = []
    for mine, (student, teacher) in zip(with_rule, alone, strict=True):
        asks = max(student) < rule.threshold
        expected = max(teacher if asks else student)
        assert mine["labels"][0]["p"] == pytest.approx(expected, abs=1e-6)
        by.append("teacher" if asks else "student")
    assert [mine["by"] for mine in with_rule] == by
    assert len(set(by)) == 2
    assert f'kd_answers_total{{by="teacher"}} {by.count("teacher"):.1f}' in metrics


def inferred(port: int, model: str, picture: Path) -> list[float]:
    """A model's probabilities of a picture's classes."""
    data = [base64.b64encode(picture.read_bytes()).decode()]
    pictures = {"name": "pictures", "datatype": "BYTES", "shape": [1], "data": data}
    body = {"inputs": [pictures], "outputs": [{"name": "probabilities"}]}
    url = f"http://127.0.0.1:{port}/v2/models/{model}/infer"
    answer = json.load(urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60))
    return answer["outputs"][0]["data"]


def posted(port: int, picture: Path) -> dict:
    """The server's prediction for a picture."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        picture.read_bytes(),
        {"Content-Type": "image/png" if picture.suffix == ".png" else "image/jpeg"},
    )
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return answer["predictions"][0]


def test_too_few_pictures_are_refused(finished: Path, refusal: Command) -> None:
    words = [str(finished), "cascade=true", "split=val", "despite_choice=true"]
    assert "cascade: needs 40 labelled pictures or more, got 16" in refusal("eval", words)


def test_a_damaged_rule_is_refused(measured: Path) -> None:
    write_of_weights(measured, "cascade.json", {"score": 3})
    with refuses("can't be read"):
        read_rule(measured)


def test_exported_both_models_answer_under_ten_lines(
    measured: Path, monkeypatch: pytest.MonkeyPatch, prints: Command
) -> None:
    pytest.importorskip("onnxruntime")
    root = f"data.source.root={measured.parent / 'data'}"
    assert "acc1 in torch" in prints("export", [str(measured), "to=cascade", root])
    folder = measured / "export" / "cascade"
    names = {file.name for file in folder.iterdir()}
    assert names >= {"student", "teacher", "cascade", "cascade.json", "answer.py"}
    monkeypatch.chdir(folder)
    answer = runpy.run_path("answer.py")["answer"]
    height, width = read_json(folder / "manifest.json")["size"]
    files = sorted((measured.parent / "data" / "test").rglob("*.*"))[:16]
    views = [np.asarray(Image.open(file).convert("RGB").resize((width, height))) for file in files]
    logits, asks = answer(np.stack(views))
    assert logits.shape == (16, 4)
    expected = read_rule(measured)
    import onnxruntime

    student = onnxruntime.InferenceSession("student/1/model.onnx").run(
        ["answer"], {"pictures": np.stack(views)}
    )[0]
    shifted = np.exp(student - student.max(1, keepdims=True))
    assert asks.tolist() == expected.asks(shifted / shifted.sum(1, keepdims=True)).tolist()
    np.testing.assert_array_equal(logits[~asks], student[~asks])
    teacher = onnxruntime.InferenceSession("teacher/1/model.onnx").run(
        ["answer"], {"pictures": np.stack(views)}
    )[0]
    np.testing.assert_allclose(logits[asks], teacher[asks], atol=1e-5)
    check_triton(folder, np.stack(views), student, teacher, monkeypatch)


def check_triton(
    folder: Path,
    pictures: np.ndarray,
    student: np.ndarray,
    teacher: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The repository's third model answers with both others, the pictures of two requests in one batch.

    Triton's own module exists in its server alone; here it runs the repository's ONNX files.
    """
    backend = TritonBackend(folder)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    program = runpy.run_path(str(folder / "cascade" / "1" / "model.py"))
    model = program["TritonPythonModel"]()
    model.initialize({})
    assert model.rule == read_json(folder / "cascade.json")
    shifted = np.exp(student - student.max(1, keepdims=True))
    sure = shifted.max(1) / shifted.sum(1)
    model.rule["threshold"] = float(np.median(sure))
    asks = sure < model.rule["threshold"]
    assert 0 < asks.sum() < len(asks)
    logits = np.where(asks[:, None], teacher, student)

    requests = [{"pictures": Tensor("pictures", part)} for part in (pictures[:5], pictures[5:])]
    answered = [response.output_tensors for response in model.execute(requests)]
    parts = {tensor.name: [] for tensor in answered[0]}
    for tensors in answered:
        for tensor in tensors:
            parts[tensor.name].append(tensor.as_numpy())
    assert [len(part) for part in parts["answer"]] == [5, len(pictures) - 5]
    np.testing.assert_allclose(np.concatenate(parts["answer"]), logits, atol=1e-5)
    assert np.concatenate(parts["by_teacher"])[:, 0].tolist() == asks.tolist()
    assert backend.pictures == {"student": len(pictures), "teacher": int(asks.sum())}

    for name, kind in (
        ("student", "onnxruntime"),
        ("teacher", "onnxruntime"),
        ("cascade", "python"),
    ):
        text = (folder / name / "config.pbtxt").read_text()
        assert text.startswith(f'name: "{name}"\nbackend: "{kind}"\n')
        assert ("by_teacher" in text) == (kind == "python")
        assert (folder / name / "labels.txt").read_text().split() == list(CLASSES)


class Tensor:
    """A tensor of Triton's Python backend."""

    def __init__(self, name: str, numbers: np.ndarray) -> None:
        self.name, self.numbers = name, numbers

    def as_numpy(self) -> np.ndarray:
        return self.numbers


class TritonBackend(types.ModuleType):
    """``triton_python_backend_utils``: requests to other models run the repository's ONNX files."""

    Tensor = Tensor
    TritonModelException = RuntimeError

    def __init__(self, folder: Path) -> None:
        super().__init__("triton_python_backend_utils")
        self.folder = folder
        self.pictures: dict[str, int] = {}

    def InferenceResponse(self, output_tensors: list[Tensor]) -> types.SimpleNamespace:
        return types.SimpleNamespace(output_tensors=output_tensors, has_error=lambda: False)

    def InferenceRequest(
        self, model_name: str, requested_output_names: list[str], inputs: list[Tensor]
    ) -> types.SimpleNamespace:
        import onnxruntime

        def run() -> types.SimpleNamespace:
            feed = {tensor.name: tensor.numbers for tensor in inputs}
            self.pictures[model_name] = self.pictures.get(model_name, 0) + len(inputs[0].numbers)
            session = onnxruntime.InferenceSession(self.folder / model_name / "1" / "model.onnx")
            answers = session.run(requested_output_names, feed)
            named = zip(requested_output_names, answers, strict=True)
            return self.InferenceResponse([Tensor(name, answer) for name, answer in named])

        return types.SimpleNamespace(exec=run)

    @staticmethod
    def get_input_tensor_by_name(request: dict[str, Tensor], name: str) -> Tensor:
        return request[name]

    @staticmethod
    def get_output_tensor_by_name(response: types.SimpleNamespace, name: str) -> Tensor:
        return next(tensor for tensor in response.output_tensors if tensor.name == name)
