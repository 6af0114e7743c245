"""What a stranger sends to kd-serve, or gives it to serve: answered or refused, within seconds and bounded memory."""

import asyncio
import base64
import io
import itertools
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kd.ship.export.manifest import ExportManifest
from kd.ship.serving import batcher as batching
from kd.ship.serving.answers import answer
from kd.ship.serving.app import Server
from kd.ship.serving.limits import Limits
from kd.ship.serving.metrics import Metrics
from kd.ship.serving.run import PIPELINED, _Connection
from tests._helpers import ROOT, Command
from tests._serving import ABOUT, Served, mean_colour, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mean_colour(tmp_path_factory.mktemp("served") / "model.onnx")


@pytest.fixture(scope="module")
def port(model: Path) -> Iterator[int]:
    with serving(model, "max_upload_mb=1", "hosts=pictures.example,Other") as (port, _):
        yield port


def picture(colour: tuple[int, int, int] = (250, 5, 5)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 16), colour).save(stream, "PNG")
    return stream.getvalue()


def head(
    length: int, kind: str = "application/json", path: str = "/predict", **headers: str
) -> bytes:
    lines = {"Host": "127.0.0.1", "Content-Type": kind, "Content-Length": length, **headers}
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]
    ).encode()


def in_json(*pictures: bytes) -> bytes:
    return json.dumps({"images": [base64.b64encode(data).decode() for data in pictures]}).encode()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def receive(raw: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response; status 0: the connection has ended without."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            part = raw.recv(65536)
        except ConnectionError:
            part = b""
        if not part:
            assert not data
            return 0, {}, b""
        data += part
    first, *lines = data.split(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = data.partition(b"\r\n\r\n")[2]
    while len(body) < int(headers["content-length"]):
        body += raw.recv(65536)
    return int(first.split()[1]), headers, body


def ask(port: int, body: bytes, **options: Any) -> tuple[int, bytes]:
    with connect(port) as raw:
        raw.sendall(head(len(body), **options) + body)
        status, _, answered = receive(raw)
        return status, answered


# -- connections -------------------------------------------------------------------------------------------------------


def test_answers_on_a_kept_connection_are_sent_at_once(model: Path, tmp_path: Path) -> None:
    """An answer's head and body are sent apart; without the option the body waits 40 ms for the client."""
    noted = tmp_path / "noted"

    def note_options() -> None:
        answered = _Connection.on_response_complete

        def note(connection: Any) -> None:
            accepted = connection._socket.get_extra_info("socket")
            option = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            with noted.open("a") as file:
                file.write(f"{accepted.getpeername()[1]} {option}\n")
            answered(connection)

        _Connection.on_response_complete = note  # type: ignore[method-assign]

    body = in_json(picture())
    with serving(model, first=note_options) as (port, _), connect(port) as raw:
        for _ in range(3):
            raw.sendall(head(len(body)) + body)
            assert receive(raw)[0] == 200
        answered = f"{raw.getsockname()[1]} 1\n"
        assert noted.read_text().startswith(
            2 * answered
        )  # the third may be noted after it has come


def test_half_sent_headers_hold_nobody_up(model: Path) -> None:
    """400 of them, of a server that may open 128 files: each request is answered, and the log stays empty."""
    body = in_json(picture())
    with serving(model, files=128) as (port, process), ExitStack() as opened:
        half = [opened.enter_context(connect(port)) for _ in range(400)]
        for raw in half:
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        start = time.monotonic()
        answers = [ask(port, body) for _ in range(20)]
        assert [answer for answer in answers if answer[0] != 200] == []
        assert time.monotonic() - start < 10
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == "kd-serve: stopped\n"


def test_pipelined_requests_hold_nobody_up(model: Path) -> None:
    """200 connections with 40 requests each: every connection gets a few answers, and a picture is not after them all."""
    get = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(model) as (port, _), ExitStack() as opened:
        many = [opened.enter_context(connect(port)) for _ in range(200)]
        for raw in many:
            raw.sendall(40 * get)
        assert ask(port, in_json(picture()))[0] == 200
        answers = []
        for raw in many:
            text = b""
            while part := raw.recv(1 << 16):
                text += part
            answers.append(text.count(b"HTTP/1.1 200"))
        assert set(answers) == {PIPELINED + 1}
        alone = opened.enter_context(connect(port))
        for _ in range(3 * PIPELINED):  # one after another is as many as a client likes
            alone.sendall(get)
            assert receive(alone)[0] == 200


def test_connections_that_die_in_a_burst_are_not_taken_for_open_ones(model: Path) -> None:
    """One of each eight that come: once, those that came meanwhile were all let in, and more than 100 were open."""

    def dying() -> None:
        from kd.ship.serving.run import _Connection

        made, count = _Connection.connection_made, itertools.count(1)

        def dies(self: _Connection, transport: asyncio.Transport) -> None:
            made(self, transport)
            if next(count) % 8 == 0:
                alive = [c for c in self.connections if c.idle and not c.transport.is_closing()]
                self.loop.call_soon(min(alive, key=lambda c: c._due.when())._socket.abort)

        _Connection.connection_made = dies  # type: ignore[method-assign]

    body = in_json(picture())
    with serving(model, files=128, first=dying) as (port, process), ExitStack() as opened:
        for number in range(144):
            if number == 48:
                time.sleep(0.3)
                process.send_signal(signal.SIGSTOP)
            opened.enter_context(connect(port))
        process.send_signal(signal.SIGCONT)
        assert [answer for answer in (ask(port, body) for _ in range(20)) if answer[0] != 200] == []


def test_a_request_that_meets_a_closing_connection_reads_its_answer(model: Path) -> None:
    """Of a client that was still to send, as another took its place; and of one whose body was not waited for."""
    body = in_json(picture())
    with serving(model, files=128) as (port, _), ExitStack() as opened:
        first = opened.enter_context(connect(port))
        for _ in range(56):  # 48 may be open, 16 more are read
            opened.enter_context(connect(port))
        time.sleep(0.5)
        first.sendall(head(len(body)) + body[:9])
        time.sleep(
            0.2
        )  # clients give up where sending meets a reset, though an answer may have come
        first.sendall(body[9:])
        assert receive(first)[0] == 503
        assert ask(port, body)[0] == 200
        with connect(port) as refused:
            refused.sendall(head(900_000, Host="evil.example", Connection="close") + b" " * 100_000)
            for _ in range(8):
                time.sleep(0.05)
                refused.sendall(b" " * 100_000)
            assert receive(refused)[0] == 403


def test_headers_are_awaited_for_seconds_however_they_trickle(model: Path) -> None:
    def sooner() -> None:
        import kd.ship.serving.run

        kd.ship.serving.run.HEADERS_S = 1.0

    with serving(model, first=sooner) as (port, _):
        body = in_json(picture())
        with connect(port) as silent, connect(port) as trickling, connect(port) as second:
            second.sendall(head(len(body)) + body)
            assert receive(second)[0] == 200
            second.sendall(
                b"POST /predict HTTP/1.1\r\n"
            )  # the next request of a connection that had one
            start, ended = time.monotonic(), False
            while not ended and time.monotonic() < start + 10:
                try:
                    trickling.sendall(b"G")
                    time.sleep(0.1)
                except OSError:
                    ended = True
            assert ended and time.monotonic() - start < 5
            assert receive(silent)[0] == receive(second)[0] == 0
        assert ask(port, body)[0] == 200


def test_failing_to_accept_is_said_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """As the event loop reports it: 128 times a second where files are short."""
    import uvicorn

    from kd.ship.serving.run import _Uvicorn

    running = _Uvicorn(uvicorn.Config(lambda: None), SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(1000):
        error = OSError(24, "Too many open files")
        running._failed(
            None, {"message": "socket.accept() out of system resource", "exception": error}
        )  # type: ignore[arg-type]
    assert capsys.readouterr().err == "kd-serve: new connections must wait: Too many open files\n"


@pytest.mark.parametrize("clients", [8, 40])
def test_requests_on_open_connections_are_answered_at_the_end(model: Path, clients: int) -> None:
    """Each connection asks again and again while SIGTERM comes, and ends with an answer that says so."""
    body = in_json(picture())

    async def client(port: int) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        statuses = []
        while True:
            writer.write(head(len(body)) + body)
            answered = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode().lower()
            statuses.append(int(answered.split()[1]))
            await reader.readexactly(int(answered.split("content-length: ")[1].split()[0]))
            if "connection: close" in answered:
                writer.close()
                return statuses
            await asyncio.sleep(0.02)

    async def ended(port: int, process: Served) -> list[list[int]]:
        asking = [asyncio.create_task(client(port)) for _ in range(clients)]
        await asyncio.sleep(1)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asking)

    with serving(model) as (port, process):
        statuses = asyncio.run(ended(port, process))
        assert {status for each in statuses for status in each} <= {200, 503} and all(
            each for each in statuses
        )
        assert process.wait(20) == 0


def test_a_decoder_that_hangs_does_not_keep_the_server_from_ending(model: Path) -> None:
    def hang() -> None:
        import kd.ship.serving.app

        kd.ship.serving.app.view = lambda *_: time.sleep(3600)  # type: ignore[assignment]

    with serving(model, "timeout_s=1", first=hang) as (port, process):
        assert [ask(port, in_json(picture()))[0] for _ in range(3)] == [408] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == "kd-serve: stopped\n"


def test_two_models_that_hang_hold_the_end_up_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batching, "ENDING_S", 1.0)

    async def ended() -> float:
        limits = Limits(max_batch=4, max_wait_ms=0.0, queue=8)
        models: Any = {name: lambda _: time.sleep(3600) for name in ("student", "teacher")}
        server = Server(ABOUT, models, limits)
        async with server.life(server.app()):
            waiting = [
                batcher.submit(np.zeros((8, 8, 3), np.uint8))
                for batcher in server.batchers.values()
            ]
            await asyncio.sleep(0.1)
            start = time.monotonic()
        for future in waiting:
            future.cancel()
        return time.monotonic() - start

    assert 0.9 < asyncio.run(ended()) < 1.9


@pytest.mark.parametrize(
    ("shapes", "answers"),
    [([(8, 8, 3)], 0), ([(8, 8, 3), (8, 9, 3)], 2)],
    ids=["too few", "unlike"],
)
def test_a_batch_that_fails_is_not_the_last(shapes: list[tuple[int, ...]], answers: int) -> None:
    """Too few answers of a model, or pictures that make no batch: the clients get the error, the next its answer."""

    async def ended() -> list[Any]:
        limits = Limits(max_batch=4, max_wait_ms=20.0, queue=8)
        given = [np.zeros((answers, 3), np.float32), np.ones((1, 3), np.float32)]
        if answers:
            given.pop(0)  # the model is not reached
        batches = batching.Batcher(lambda _: given.pop(0), limits, Metrics())  # type: ignore[arg-type]
        batches.start()
        async with asyncio.timeout(5):
            failed = [batches.submit(np.zeros(shape, np.uint8)) for shape in shapes]
            outcomes = await asyncio.gather(*failed, return_exceptions=True)
            answer = await batches.submit(np.zeros((8, 8, 3), np.uint8))
        await batches.stop()
        return [*outcomes, answer]

    *outcomes, answered = asyncio.run(ended())
    assert [type(outcome) for outcome in outcomes] == [ValueError] * len(shapes)
    assert answered.tolist() == [1, 1, 1]


def test_requests_that_the_model_fails_are_counted() -> None:
    """Starlette answers them with 500: /metrics must not hide them."""

    def broken(pictures: np.ndarray) -> np.ndarray:
        raise RuntimeError("out of memory")

    async def counted() -> tuple[list[int], float | None]:
        server = Server(ABOUT, {"student": broken}, Limits(max_wait_ms=0.0))
        app = server.app()
        headers = [(b"host", b"localhost"), (b"content-type", b"image/png")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/predict",
            "query_string": b"",
            "headers": headers,
        }
        statuses = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": picture(), "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async with server.life(app):
            with pytest.raises(
                RuntimeError, match="out of memory"
            ):  # after the answer, for the log
                await app(scope, receive, send)
        number = server.metrics.registry.get_sample_value("kd_requests_total", {"code": "500"})
        return statuses, number

    assert asyncio.run(counted()) == ([500], 1.0)


# -- requests ----------------------------------------------------------------------------------------------------------


def memory(process: subprocess.Popen[str]) -> int:
    """MB that a process holds."""
    return (
        int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        >> 20
    )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_unfinished_uploads_hold_bounded_memory_and_leave_room_for_small_ones(model: Path) -> None:
    """40 of 1.9 MB, of which the last byte never comes: they may hold 32 MB. A program, whose memory begins small."""
    large, body = b'{"image": "' + b"A" * 1_900_000, in_json(picture())
    command = [
        sys.executable,
        "-m",
        "kd.cli",
        "serve",
        str(model),
        "port=0",
        "threads=1",
        "max_upload_mb=2",
    ]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as opened,
    ):
        opened.callback(process.kill)
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert " on http://" in line
        port = int(line.rpartition(":")[2])
        assert ask(port, body)[0] == 200
        before = memory(process)
        unfinished = [opened.enter_context(connect(port)) for _ in range(40)]
        for raw in unfinished:
            raw.setblocking(False)
        left, until = dict.fromkeys(unfinished, head(len(large) + 1) + large), time.monotonic() + 20
        while left and time.monotonic() < until:
            for raw, data in list(left.items()):
                try:
                    left[raw] = data[raw.send(data[:100_000]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    left[raw] = b""
                if not left[raw]:
                    del left[raw]
        assert not left
        assert ask(port, body)[0] == 200
        assert memory(process) - before < 120
        statuses = []
        for raw in unfinished:
            raw.setblocking(True)
            raw.settimeout(0.1)
            try:
                statuses.append(receive(raw)[0])
            except TimeoutError:
                statuses.append(-1)  # its last byte is awaited
        assert (
            statuses.count(503) >= 20
            and statuses.count(-1) >= 10
            and statuses.count(503) + statuses.count(-1) == 40
        )


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(("mode", "most"), [("RGB", 5), ("I;16", 8)])
def test_a_decoded_picture_takes_bounded_memory(tmp_path: Path, mode: str, most: int) -> None:
    """Bytes a pixel: of one copy of four, and of what Pillow and numpy hold beside it."""
    Image.new(mode, (5000, 4000)).save(tmp_path / "x.png")
    code = (
        "import sys\nfrom kd.storage.decoding import decoded, open_picture\n"
        "def most(): return next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line)\n"
        "before = most()\nwith open(sys.argv[1], 'rb') as file: decoded(open_picture(file))\n"
        "print((most() - before) * 1024 / 20e6)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < most


def test_lists_of_pictures_are_counted_before_they_are_decoded(port: int) -> None:
    assert ask(port, json.dumps({"images": ["%"] * 33}).encode())[0] == 413
    assert ask(port, json.dumps({"images": ["%"]}).encode())[0] == 400
    for deep in (
        b"[" * 900_000,
        b'{"images": [' + b"[]," * 300_000 + b"[]]}",
        b'{"image": ' + b"9" * 900_000 + b"}",
    ):
        start = time.monotonic()
        assert ask(port, deep)[0] == 400
        assert time.monotonic() - start < 5


def test_odd_requests_are_refused_in_words(port: int) -> None:
    body = in_json(picture())
    for top in ("9" * 5000, "0", "-1", "1_0", "1001", "x", "%EF%BC%91"):
        status, answered = ask(port, body, path=f"/predict?top={top}")
        assert status == 400 and json.loads(answered)["error"].startswith(
            "top: must be a whole number"
        ), top
    assert ask(port, body, path="/predict?top=1000")[0] == 200
    form = (
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="\\ud800a"\r\n\r\n'
        + picture()
        + b"\r\n--x--\r\n"
    )
    for charset in ("undefined", "unicode_escape", "punycode", "\x01", "zlib"):
        status, _ = ask(port, form, kind=f"multipart/form-data; boundary=x; charset={charset}")
        assert status in (200, 400), charset


def test_other_sites_names_and_pages_are_refused(port: int) -> None:
    body = in_json(picture())
    here = f"127.0.0.1:{port}"
    known = [
        "127.0.0.1",
        here,
        "localhost",
        f"LOCALHOST:{port}",
        "[::1]:1",
        "pictures.example",
        "other:80",
        "10.1.2.3",
    ]
    for host in known:
        assert ask(port, body, Host=host)[0] == 200, host
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "[::1",
        "evil@localhost:x",
        "user@localhost",
    ):
        assert ask(port, body, Host=host)[0] == 403, host
    assert ask(port, body, Host=here, Origin=f"http://{here}")[0] == 200
    assert ask(port, body, Host="pictures.example", Origin="https://pictures.example")[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", ""):
        assert ask(port, body, Host=here, Origin=origin)[0] == 403, origin


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"size": "[0, 8]"}, "size: not what an export says"),
        ({"size": "[1000000, 1000000]"}, "size: not what an export says"),
        ({"size": "8"}, "does not say what goes in"),
        ({"layout": '"hwc"'}, "layout: not what an export says"),
        ({"task": '"poetry"'}, "task: not what an export says"),
        ({"task": '"segmentation"'}, "answers two pictures in the shape (2, 3)"),
        ({"classes": '["r", "g"]'}, "answers two pictures in the shape (2, 3)"),
        ({"classes": '"rgb"'}, "classes: not what an export says"),
        ({"classes": '["r", "g", 3]'}, "classes: not what an export says"),
        ({"classes": "[]"}, "classes: not what an export says"),
        ({"crop_ratio": "0"}, "crop_ratio: not what an export says"),
        ({"crop_ratio": "NaN"}, "crop_ratio: not what an export says"),
        ({"crop_ratio": "1e-300"}, "crop_ratio: not what an export says"),
        ({"crop_ratio": "1.5"}, "crop_ratio: not what an export says"),
        ({"arch": '"\\u001b[31m"'}, "arch: not what an export says"),
        ({"arch": "3"}, "arch: not what an export says"),
        ({"taken": "FLOAT"}, "does not take uint8 pictures of (8, 8, 3)"),
    ],
)
def test_a_strangers_model_is_checked_at_the_start(
    tmp_path: Path, refusal: Command, metadata: dict[str, str], message: str
) -> None:
    file = mean_colour(tmp_path / "model.onnx", **metadata)
    told = refusal("serve", [str(file), "port=0"]).strip()
    assert message in told and str(file) in told and "\n" not in told


def test_masks_of_more_than_256_classes_keep_their_ids() -> None:
    for count, mode in ((256, "L"), (300, "I;16")):
        names = [f"c{i}" for i in range(count)]
        about = ExportManifest(
            "segmentation", "x", names, (2, 2), 1.0, [0.0] * 3, [1.0] * 3, "onnx"
        )
        ids = np.array([[0, 7], [count - 1, count - 1]])
        logits = np.moveaxis(np.eye(count, dtype=np.float32)[ids], -1, 0)
        found = answer(logits, about, 5)
        with Image.open(io.BytesIO(base64.b64decode(found["mask"]))) as mask:
            assert mask.mode == mode and np.array_equal(np.asarray(mask), ids)
        assert found["shares"][0] == {"label": f"c{count - 1}", "p": 0.5}


def test_kd_predict_keeps_them_too(tmp_path: Path) -> None:
    import torch

    from kd.ship.predict import _write_masks, ids_at
    from kd.tasks.segmentation import colours

    for count, mode in ((256, "L"), (300, "I;16")):
        logits, palette = torch.zeros(count, 2, 3), colours(count)
        logits[count - 1, :, 1:] = 1
        names = [f"c{i}" for i in range(count)]
        files = [str(tmp_path / "a" / "x.jpg"), str(tmp_path / "b" / "x.jpg")]
        _write_masks([{"file": files[0], "mask": ids_at(logits, (2, 3))}], files, names, tmp_path)
        with (
            Image.open(tmp_path / "a" / "x.jpg.ids.png") as ids,
            Image.open(tmp_path / "a" / "x.jpg.colours.png") as drawn,
        ):
            assert ids.mode == mode and np.array_equal(
                np.asarray(ids), [[0, count - 1, count - 1]] * 2
            )
            assert np.array_equal(np.asarray(drawn)[0, 2], palette[count - 1])


def test_an_answer_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        answer(np.array([0.0, np.nan, 1.0], np.float32), ABOUT, 5)
