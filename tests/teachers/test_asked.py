"""A teacher behind an address: the same student as with the local one, and nothing is asked twice."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kd.cli import main, train_main
from kd.errors import UserError
from kd.teachers.answer import Wanted
from kd.teachers.asked import HEADER, Address, AnswerJournal
from tests._helpers import write_recipe
from tests._serving import serving

CLASSES = 4


class Model(ThreadingHTTPServer):
    """A KServe v2 server whose logits are the means of a view's colours and 1; it counts what it is asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.seen: list[bytes] = []
        self.failures: list[int] = []
        self.connections: list[socket.socket] = []
        self.answer = lambda views: np.column_stack([views.mean((1, 2)), np.ones(len(views))])
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v2/models/colours"


class Answers(BaseHTTPRequestHandler):
    server: Model
    protocol_version = "HTTP/1.1"  # connections are kept

    def setup(self) -> None:
        self.server.connections.append(self.request)
        super().setup()

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        about = {"name": "colours", "outputs": [{"name": "logits", "shape": [-1, CLASSES]}]}
        self._reply(200, json.dumps(about).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.failures:
            self._reply(self.server.failures.pop(0), b"busy")
            return
        size = int(self.headers[HEADER])
        shape = json.loads(body[:size])["inputs"][0]["shape"]
        views = np.frombuffer(body[size:], np.uint8).reshape(shape)
        if shape[1] != 64:  # the fixed picture that tells models apart
            self.server.seen += [view.tobytes() for view in views]
        logits = self.server.answer(views).astype("<f4")
        output = {"name": "logits", "shape": list(logits.shape), "datatype": "FP32",
                  "parameters": {"binary_data_size": logits.nbytes}}  # fmt: skip
        text = json.dumps({"outputs": [output]}).encode()
        self._reply(200, text + logits.tobytes(), len(text))

    def _reply(self, status: int, body: bytes, header: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if header:
            self.send_header(HEADER, str(header))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture()
def server() -> Iterator[Model]:
    model = Model()
    yield model
    model.shutdown()
    model.server_close()


def views_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), np.uint8)


def test_each_view_is_asked_for_once(server: Model, tmp_path: Path) -> None:
    teacher = Address(server.url, folder=str(tmp_path), batch=4, price=2.0).build(CLASSES)
    views = views_of(10)
    expected = server.answer(views).astype(np.float32)
    np.testing.assert_array_equal(teacher.logits_of(views), expected)
    again = np.concatenate([views[5:], views[:1], views_of(2, 1), views_of(2, 1)])
    batch = {"image": torch.from_numpy(again).permute(0, 3, 1, 2)}
    logits = teacher.answer(batch, Wanted()).logits[""]  # type: ignore[arg-type]
    np.testing.assert_array_equal(logits, server.answer(again).astype(np.float32))
    assert len(server.seen) == len(set(server.seen)) == 12
    later = Address(server.url, folder=str(tmp_path)).build(CLASSES)
    np.testing.assert_array_equal(later.logits_of(views), expected)
    assert len(server.seen) == 12
    assert (later.asked, later.report()["kept"]) == (0, 12)
    report = teacher.report()
    assert (report["asked"], report["price"], report["repeated"]) == (12, 0.024, 0)
    server.answer = lambda views: np.zeros((len(views), CLASSES))
    other = Address(server.url, folder=str(tmp_path)).build(CLASSES)
    assert not other.logits_of(views).any()  # another model at the same address
    assert other.identity() != teacher.identity()


def test_connections_are_kept_without_delay(server: Model, tmp_path: Path) -> None:
    """And one that the server has closed is opened again, which is no second try."""
    teacher = Address(server.url, folder=str(tmp_path), batch=2).build(CLASSES)
    teacher.logits_of(views_of(6))
    (kept,) = teacher._idle
    assert kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    (accepted,) = server.connections
    accepted.shutdown(socket.SHUT_RDWR)
    teacher.logits_of(views_of(6, 1))
    assert len(server.connections) == 2
    assert len(server.seen) == 12
    assert teacher.report()["repeated"] == 0


def test_failures_rate_and_budget(
    server: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    teacher = Address(server.url, folder=str(tmp_path), budget=6, rate=1000.0, batch=4).build(
        CLASSES
    )
    monkeypatch.setattr("kd.teachers.asked.time.sleep", pauses.append)
    server.failures = [503, 500]
    teacher.logits_of(views_of(4))
    assert [pause for pause in pauses if pause >= 0.5] == [0.5, 1.0]
    assert teacher.report()["repeated"] == 2
    with pytest.raises(UserError, match="the budget of 6 pictures is used up \\(4 asked\\)"):
        teacher.logits_of(views_of(9))
    server.failures = [400]
    with pytest.raises(UserError, match="can't be asked: 400, busy"):
        teacher.logits_of(views_of(2, 3))
    server.failures = [503] * 9
    with pytest.raises(UserError, match="can't be asked: 503, busy"):
        teacher.logits_of(views_of(2, 3))
    server.answer = lambda views: np.full((len(views), CLASSES), np.nan)
    with pytest.raises(UserError, match="answers NaN or infinity"):
        teacher.logits_of(views_of(2, 3))
    with pytest.raises(UserError, match=r"answers in \[-1, 4\], the data has 5 classes"):
        Address(server.url).build(5)
    with pytest.raises(UserError, match="no output 'scores'"):
        Address(server.url, output="scores").build(CLASSES)


def test_a_record_that_was_cut_off_is_asked_for_again(tmp_path: Path) -> None:
    """At any byte: whole records before it are kept, and later ones are added in its place."""
    digests = [bytes([i]) * 32 for i in range(6)]
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    whole = tmp_path / "whole"
    AnswerJournal(whole, 4).add(digests, rows)
    content = whole.read_bytes()
    size = len(content) // 6
    for length in (0, 1, size - 1, size, 3 * size + 7, len(content) - 1):
        file = tmp_path / f"cut{length}"
        file.write_bytes(content[:length])
        journal = AnswerJournal(file, 4)
        assert len(journal) == length // size
        journal.add(digests[length // size :], rows[length // size :])
        assert file.read_bytes() == content
    damaged = bytearray(content)
    damaged[size + 40] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    assert len(AnswerJournal(tmp_path / "damaged", 4)) == 1


def test_killed_at_ten_moments_it_asks_for_nothing_twice(server: Model, tmp_path: Path) -> None:
    """Only a request that was under way when the process died is sent again."""
    fast = server.answer
    server.answer = lambda views: (time.sleep(0.05), fast(views))[1]
    views = views_of(60)
    random = np.random.default_rng(0)
    for _ in range(10):
        child = os.fork()
        if not child:
            Address(server.url, folder=str(tmp_path), batch=3).build(CLASSES).logits_of(views)
            os._exit(0)
        enough = min(50, len(server.seen) + int(random.integers(1, 8)))
        while len(server.seen) < enough:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    before = len(server.seen)
    last = Address(server.url, folder=str(tmp_path), batch=3).build(CLASSES)
    np.testing.assert_array_equal(last.logits_of(views), fast(views).astype(np.float32))
    assert 0 < last.asked < 60
    assert len(server.seen) == before + last.asked
    times = [server.seen.count(view.tobytes()) for view in views]
    assert min(times) == 1
    assert sum(times) <= 60 + 10 * 3


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_a_student_of_kd_serve_is_that_of_the_local_teacher(
    layout: str, finished: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the same views in batches of the same size, and logits in float32 over the loopback."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    run = finished
    checkpoint = f"model.teacher.checkpoint={run.parents[2] / 'teacher.safetensors'}"
    common = [
        f"recipe={recipe}",
        "trainer.max_epochs=1",
        "data.img_size=40",
        "data.batch_size=16",
        "trainer.precision=32-true",
    ]
    assert train_main([*common, checkpoint, f"runs_dir={tmp_path / 'local'}"]) == 0
    settings = ["teacher=true", "max_batch=16", "max_wait_ms=2000", "max_pictures=64"]
    served = tmp_path / "served"
    shutil.copytree(run, served, ignore=shutil.ignore_patterns("export"))
    assert main("export", [str(served), "to=onnx", f"layout={layout}"]) == 0
    with serving(served, *settings) as (port, _):
        answers = f"model.teacher.answers=http://127.0.0.1:{port}"
        assert train_main([*common, answers, f"runs_dir={tmp_path / 'asked'}"]) == 0
    students = [
        load_file(tmp_path / place / "tiny" / "000" / "student.safetensors")
        for place in ("local", "asked")
    ]
    for name, tensor in students[0].items():
        torch.testing.assert_close(students[1][name], tensor, rtol=0, atol=0)
    summary = json.loads((tmp_path / "asked" / "tiny" / "000" / "summary.json").read_text())
    asked = summary["teacher"]["asked"][""]
    assert asked["asked"] == asked["kept"] > 48
    assert summary["verdict"]["phases_ms"]["teacher"] > 0  # waiting for it is nobody else's time


def test_what_is_no_place_of_answers_is_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, text in (
        ("answers.txt", "no class 'answers.txt'"),
        ("9", "model.teacher.answers: must be an address (http://...), a file"),
        (
            str(tmp_path / "none.csv"),
            f"model.teacher.answers: file {tmp_path / 'none.csv'} not found",
        ),
        (
            "http://127.0.0.1:9",
            "model.teacher.answers: http://127.0.0.1:9 can't be asked: no answer",
        ),
    ):
        items = [f"recipe={recipe}", f"model.teacher.answers={place}"]
        if place.startswith("http"):
            items.append("model.teacher.builder.retries=0")
        assert main("train", items) == 2
        err = capsys.readouterr().err.strip().splitlines()
        assert text.lower() in err[-1].lower(), err
        assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize(
    "url",
    ["http://host/v2/models/a?key=SECRET", "http://host/v2/models/a#b", "http://SECRET:x@host/v2"],
)
def test_a_part_of_an_address_that_would_not_be_sent_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no user and no part after") as refused:
        Address(url)
    assert "SECRET" not in str(refused.value)


@pytest.fixture()
def asking(
    server: Model, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The command line of a run of two epochs that asks the server for 16 + 48 + 48 pictures; its answers are kept here."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "asking.yaml", pictures, None, model__distill_losses=losses)
    return [f"recipe={recipe}", f"model.teacher.answers={server.url}"]


def test_a_budget_that_ends_before_the_first_checkpoint(
    asking: list[str], server: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", [*asking, "model.teacher.builder.budget=40"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "kd-train: model.teacher.answers: the budget of 40 pictures is used up (40 asked); give a larger "
        "model.teacher.builder.budget; the run has no checkpoint yet, so start it again; nothing is asked twice"
    )
    run = tmp_path / "runs" / "tiny" / "000"
    assert main("train", [f"resume={run}", "model.teacher.builder.budget=1000"]) == 2
    assert "it ended before its first one, so start it again" in capsys.readouterr().err
    assert main("train", [*asking, "model.teacher.builder.budget=1000"]) == 0
    assert len(server.seen) == len(set(server.seen))


def test_a_budget_that_ends_after_a_checkpoint(
    asking: list[str], server: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = [*asking, "model.teacher.builder.price=2"]
    assert main("train", [*priced, "model.teacher.builder.budget=80"]) == 2
    run = tmp_path / "runs" / "tiny" / "000"
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"to resume: kd-train resume={run}; nothing is asked twice")
    )
    assert main("train", [f"resume={run}", "model.teacher.builder.budget=1000"]) == 0
    assert len(server.seen) == len(set(server.seen))

    first = json.loads((run / "asked.json").read_text())["processes"][0][""]
    assert 64 <= first["asked"] <= 80
    asked = json.loads((run / "summary.json").read_text())["teacher"]["asked"][""]
    whole = asked["run"]
    assert whole["asked"] == len(server.seen) == first["asked"] + asked["asked"]
    assert (whole["processes"], whole["price"]) == (2, 2 * len(server.seen) / 1000)
    assert whole["requests"] == first["requests"] + asked["requests"]
    page = (run / "report.html").read_text()
    for text in ("the run, 2 processes", "its last process", f"{whole['price']:g}"):
        assert text in page
