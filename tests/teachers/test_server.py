"""Answers of an address fill a cache: the same student as with the local teacher, and nothing is asked twice."""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kd.cli import main
from kd.settings import AskSettings
from kd.teachers.server import HEADER, AnswerServer
from tests._files import read_json
from tests._forks import start, status_of
from tests._helpers import Command, refuses, write_recipe
from tests._http import Handler, http_server
from tests._runs import losses, run, student_of, summary_of
from tests._serving import serving

CLASSES = 4
NAMES = ["a", "b", "c", "d"]


def colours(views: np.ndarray) -> np.ndarray:
    """Logits: the means of a view's colours, and 1."""
    return np.column_stack([views.mean((1, 2)), np.ones(len(views))])


class Answers(Handler):
    """KServe v2; the server counts what it is asked for."""

    server: Any
    protocol_version = "HTTP/1.1"  # connections are kept

    def setup(self) -> None:
        self.server.connections.append(self.request)
        super().setup()

    def do_GET(self) -> None:
        about = {"name": "colours", "outputs": [{"name": "logits", "shape": [-1, CLASSES]}]}
        self.reply(200, json.dumps(about).encode())

    def do_POST(self) -> None:
        body = self.posted()
        self.server.requests += 1
        if self.server.fails_each and not self.server.requests % self.server.fails_each:
            self.server.failures.append(503)
        if self.server.failures:
            self.reply(self.server.failures.pop(0), b"busy")
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
        self.reply(200, text + logits.tobytes(), **{HEADER: str(len(text))})


@pytest.fixture()
def server() -> Iterator[Any]:
    """It keeps views and connections, and fails as ``failures`` says, or one request of ``fails_each``."""
    kept: dict[str, Any] = {"seen": [], "failures": [], "connections": []}
    counts = {"fails_each": 0, "requests": 0}
    with http_server(Answers, **kept, **counts, answer=colours) as found:
        found.url = f"{found.address}/v2/models/colours"
        yield found


def views_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), np.uint8)


def connected(server: Any, **settings: object) -> AnswerServer:
    asked = AnswerServer(server.url, AskSettings(**settings))  # type: ignore[arg-type]
    asked.connect(NAMES)
    return asked


def test_connections_are_kept_without_delay(server: Any) -> None:
    """And one that the server has closed is opened again, which is no second try."""
    asked = connected(server)
    asked.logits_of(views_of(6))
    (kept,) = asked._idle
    assert kept.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    (accepted,) = server.connections
    accepted.shutdown(socket.SHUT_RDWR)
    views = views_of(6, 1)
    np.testing.assert_array_equal(asked.logits_of(views), server.answer(views).astype("f4"))
    assert len(server.connections) == 2
    assert len(server.seen) == 12
    assert "(0 repeated)" in asked.spent()


def test_failures_rate_and_budget(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    asked = connected(server, budget=6, rate=1000.0, price=2.0)
    monkeypatch.setattr("kd.teachers.server.time.sleep", pauses.append)
    server.failures = [503, 500]
    asked.logits_of(views_of(4))
    assert [pause for pause in pauses if pause >= 0.5] == [0.5, 1.0]
    spent = r"4 pictures asked in 5 requests \(2 repeated\), .* s, price 0.008$"
    assert re.match(spent, asked.spent())
    with refuses("the budget of 6 pictures is used up \\(4 asked\\)"):
        asked.logits_of(views_of(9))
    for failures, reason in (([400], "400"), ([503] * 9, "503")):
        server.failures = failures
        with refuses(f"can't be asked: {reason}, busy"):
            asked.logits_of(views_of(2, 3))
    server.answer = lambda views: np.full((len(views), CLASSES), np.nan)
    with refuses("answers NaN or infinity"):
        asked.logits_of(views_of(2, 3))
    with refuses(r"answers in \[-1, 4\], the data has 5 classes"):
        AnswerServer(server.url, AskSettings()).connect([*NAMES, "e"])
    with refuses("no output 'scores'"):
        connected(server, output="scores")


@pytest.mark.parametrize(
    "url",
    ["http://host/v2/models/a?key=SECRET", "http://host/v2/models/a#b", "http://SECRET:x@host/v2"],
)
def test_a_part_of_an_address_that_would_not_be_sent_is_refused(url: str) -> None:
    with refuses("no user and no part after") as refused:
        AnswerServer(url, AskSettings())
    assert "SECRET" not in str(refused.value)


# -- kd-cache from=ADDRESS --------

ALL = 2 * 48 + 16
"""Answers of :func:`filling`."""


@pytest.fixture()
def filling(server: Any, pictures: Path, tmp_path: Path, own_cache: Path) -> list[str]:
    """The command line that asks the server for two views of 48 pictures, and for the 16 of the validation."""
    losses_ = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "asking.yaml", pictures, None, model__distill_losses=losses_)
    return [f"recipe={recipe}", f"from={server.url}", "from.views=2"]


def stored(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "cache" / "stored").iterdir()
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """What a cache's folders hold, without locks."""
    files = sorted([*folder.glob("*/view-*.bin"), *folder.glob("*/fingerprint.json")])
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_run_reads_what_was_asked_once(
    filling: list[str], server: Any, tmp_path: Path, prints: Command, refusal
) -> None:
    """Training and kd-eval ask nothing; of the probabilities of a server the logits are kept."""
    logits_of = server.answer

    def shares(views: np.ndarray) -> np.ndarray:
        weights = np.exp(logits_of(views) / 50)
        return weights / weights.sum(1, keepdims=True)

    server.answer = shares
    said = prints("cache", [*filling, "from.price=2"])
    folder = stored(tmp_path)
    assert f"use them with model.teacher.answers={folder}\n" in said
    assert "they have no layers to start a student from" in said
    assert f"cache: {ALL} pictures asked in " in said
    assert "price 0.224" in said
    assert main("cache", filling) == 0
    assert len(server.seen) == len(set(server.seen)) == ALL
    server.shutdown()
    recipe = Path(filling[0].partition("=")[2])
    answers = f"model.teacher.answers={folder}"
    trained = run(recipe, answers, "trainer.max_epochs=3")
    summary = summary_of(trained)
    assert summary["teacher"]["arch"] == "colours"
    assert "acc1" in summary["teacher"]["val"]
    assert (summary["cache"]["answers_read"], summary["cache"]["answers_computed"]) == (3 * 48, 0)
    assert summary["cache"]["views"] == 2
    assert main("eval", [str(trained)]) == 0
    assert "teacher" in read_json(trained / "eval_val.json")
    assert main("eval", [str(trained), "split=train"]) == 0
    assert "teacher" not in read_json(trained / "eval_train.json"), "its answers are to other views"
    assert len(server.seen) == ALL
    assert "2 view(s), 100% filled" in prints("cache", ["--describe", str(folder)])
    hint = ["model.distill_losses.hint=HintLoss", "model.taps.hint={student: norm, teacher: norm}"]
    for words, message in (
        (["seed=1"], "was filled with other transforms: seed is 0 there, 1 here"),
        (["data.img_size=24"], f"model.teacher.answers: {folder}/train-"),
        (
            ["model.teacher.cache=only", "model.teacher.cache_topk=2"],
            "cache_topk: has no effect on stored answers",
        ),
        (hint, "is stored answers alone, without layers"),
    ):
        assert message in refusal("train", [f"recipe={recipe}", answers, *words])


def test_a_budget_ends_it_and_the_same_command_resumes(
    filling: list[str], tmp_path: Path, server: Any, refusal
) -> None:
    assert refusal("cache", [*filling, "from.budget=40"]).splitlines()[-1] == (
        "kd-cache: from.budget: the budget of 40 pictures is used up (40 asked); run the same command again with a larger "
        "one to resume, nothing is asked twice"
    )
    train = [filling[0], f"model.teacher.answers={stored(tmp_path)}"]
    assert "is not whole yet: run kd-cache again to resume" in refusal("train", train)
    assert main("cache", [*filling, "from.budget=1000"]) == 0
    assert len(server.seen) == len(set(server.seen)) == ALL
    (view,) = stored(tmp_path).glob("val-*/view-0000.bin")
    data = bytearray(view.read_bytes())
    data[-5] ^= 1  # a damaged record alone is asked for again
    view.write_bytes(data)
    assert "1 answers to val are damaged" in refusal("train", train)
    assert main("cache", filling) == 0
    assert len(server.seen) == ALL + 1
    assert main("train", [*train, "trainer.max_epochs=1"]) == 0


def test_killed_failing_and_beside_another_one_it_stores_the_same_bytes(
    filling: list[str], server: Any, tmp_path: Path
) -> None:
    """Only a request that was under way when the process died is sent again."""
    assert main("cache", filling) == 0
    whole = files_of(stored(tmp_path))
    shutil.rmtree(tmp_path / "cache" / "stored")
    server.seen.clear()
    fast = server.answer
    server.answer = lambda views: (time.sleep(0.03), fast(views))[1]
    server.fails_each = 10  # one request in ten
    slowly = [*filling, "from.batch=4"]
    for count in (7, 60):
        pid = start(slowly, tmp_path / "log", program="cache")
        while len(server.seen) < count:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert status_of(pid) == -signal.SIGKILL
    both = [start(slowly, tmp_path / f"log{i}", program="cache") for i in (0, 1)]
    assert [status_of(pid) for pid in both] == [0, 0]
    assert files_of(stored(tmp_path)) == whole
    assert len(set(server.seen)) == ALL
    assert len(server.seen) <= ALL + 2 * 4


def test_a_student_of_kd_serve_is_that_of_the_local_teacher(
    finished: Path, recipe: Path, tmp_path: Path, own_cache: Path
) -> None:
    """Bit for bit: the same views in batches of the same size, float32 over the loopback, the rounding of one cache."""
    pytest.importorskip("onnxruntime")
    checkpoint = f"model.teacher.checkpoint={finished.parents[2] / 'teacher.safetensors'}"
    common = ["data.img_size=40", "data.batch_size=16", "trainer.precision=32-true"]
    local = run(
        recipe, *common, checkpoint, "model.teacher.cache=on", "model.teacher.cache_views=2"
    )
    served = tmp_path / "served"
    shutil.copytree(finished, served, ignore=shutil.ignore_patterns("export"))
    assert main("export", [str(served), "to=onnx"]) == 0
    settings = ["teacher=true", "max_batch=16", "max_wait_ms=2000", "max_pictures=64"]
    with serving(served, *settings) as (port, _):
        fill = [f"recipe={recipe}", f"from=http://127.0.0.1:{port}", "from.views=2"]
        assert main("cache", [*fill, *common]) == 0
    asked = run(recipe, *common, f"model.teacher.answers={stored(tmp_path)}")
    assert losses(asked) == losses(local)
    theirs = student_of(asked)
    for name, tensor in student_of(local).items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)


def test_an_address_where_nobody_answers_is_one_line(
    recipe: Path, tmp_path: Path, refusal: Command
) -> None:
    asked = [f"recipe={recipe}", "from=http://127.0.0.1:9", "from.retries=0"]
    (line,) = refusal("cache", asked).strip().splitlines()
    assert "from: http://127.0.0.1:9 can't be asked: no answer" in line
    assert not list(tmp_path.rglob("summary.json"))
