"""kd-serve by real clients over real sockets: answers, refusals, load, back-pressure, a clean stop."""

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kd.cli import main
from kd.commands.serve import _model
from kd.data.pictures import decode
from kd.data.transforms import EvalView
from kd.run.request import Request
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.pictures import view
from tests._files import json_lines
from tests._helpers import ROOT, Command, refuses
from tests._serving import ask, serving

BOUNDARY = "----kd"


def form(*pictures: bytes) -> tuple[bytes, str]:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{i}.jpg"\r\n\r\n'.encode()
        + data
        for i, data in enumerate(pictures)
    ]
    return b"\r\n".join(
        [*parts, f"--{BOUNDARY}--\r\n".encode()]
    ), f"multipart/form-data; boundary={BOUNDARY}"


@pytest.fixture(scope="module")
def files(finished: Path) -> list[Path]:
    return sorted((finished.parents[2] / "data" / "val").rglob("*.jpg"))


@pytest.fixture(scope="module")
def port(finished: Path) -> Iterator[int]:
    """Of a run: it is exported first, where it has no export."""
    with serving(
        finished, "max_upload_mb=1", "max_pixels=1000000", "max_pictures=16", "teacher=true"
    ) as (port, _):
        yield port


def test_answers_are_those_of_kd_predict(
    finished: Path, port: int, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "labels.jsonl"
    assert (
        main("predict", [str(finished), *map(str, files), f"out={out}", "top=2", "device=cpu"]) == 0
    )
    expected = json_lines(out)
    encoded = [base64.b64encode(f.read_bytes()).decode() for f in files]
    by_json = ask(
        port, "/predict?top=2", json.dumps({"images": encoded}).encode(), "application/json"
    )
    by_form = ask(port, "/predict?top=2", *form(*(f.read_bytes() for f in files)))
    for status, body, _ in (by_json, by_form):
        assert status == 200, body
        answers = json.loads(body)["predictions"]
        assert len(answers) == len(expected) == 16
        for mine, theirs in zip(answers, expected, strict=True):
            probabilities = {x["label"]: x["p"] for x in theirs["labels"]}
            assert len(mine["labels"]) == 2 and "by" not in mine
            for found in mine["labels"]:
                assert found["p"] == pytest.approx(
                    probabilities.get(found["label"], found["p"]), abs=0.02
                )
    assert json.loads(by_form[1])["predictions"][0]["file"] == "0.jpg"


@pytest.mark.parametrize(
    ("size", "crop_ratio"), [((32, 32), 0.875), ((24, 32), 1.0), ((33, 33), 0.9)]
)
def test_the_servers_view_of_a_picture_is_validations(
    size: tuple[int, int], crop_ratio: float
) -> None:
    """By other code: of JPEG turned by EXIF, PNG with transparency, grey, 16 bits, a palette."""
    rng = np.random.RandomState(0)
    colours = Image.fromarray(rng.randint(0, 256, (50, 70, 3), dtype=np.uint8)).resize((140, 100))
    turned = colours.getexif()
    turned[0x112] = 6
    made: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (colours, "JPEG", {"exif": turned}), (colours.convert("RGBA"), "PNG", {}), (colours.convert("L"), "PNG", {}),
        (colours.quantize(16), "GIF", {}), (colours, "WEBP", {"lossless": True}),
        (Image.fromarray((rng.randint(0, 256, (60, 90)) * 256).astype(np.uint16)), "PNG", {}),
    ]  # fmt: skip
    manifest = ExportManifest(
        "classification", "x", ["a"], size, crop_ratio, [0.0] * 3, [1.0] * 3, "onnx"
    )
    for picture, kind, options in made:
        stream = io.BytesIO()
        picture.save(stream, kind, **options)
        theirs = EvalView(size, crop_ratio)(decode(stream.getvalue())).numpy().astype(int)
        mine = view(stream.getvalue(), manifest, 1_000_000).transpose(2, 0, 1).astype(int)
        assert mine.shape == theirs.shape and np.abs(mine - theirs).max() <= 1, kind


def test_what_is_refused_leaves_the_server_alive(port: int, files: list[Path]) -> None:
    good = files[0].read_bytes()
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    bomb = io.BytesIO()
    Image.new("1", (5000, 5000)).save(bomb, "PNG")
    wide = io.BytesIO()
    Image.new("RGB", (4000, 300)).save(wide, "JPEG")
    deep = io.BytesIO()
    Image.new("I", (40, 40)).save(deep, "TIFF")  # 32 bits: training refuses it too
    cases = [
        (415, *form(deep.getvalue())),
        (415, *form(b"no picture at all")),
        (415, *form(good[: len(good) // 3])),
        (415, *form(postscript)),
        (413, *form(bomb.getvalue())),
        (413, *form(wide.getvalue())),
        (413, *form(os.urandom(1_200_000))),
        (413, *form(*[good] * 17)),
        (400, *form()),
        (400, b"--wrong\r\n\r\n", f"multipart/form-data; boundary={BOUNDARY}"),
        (400, b"x", "multipart/form-data"),
        (400, b"{", "application/json"),
        (400, b"{}", "application/json"),
        (400, b'{"images": []}', "application/json"),
        (400, b'{"images": "abc"}', "application/json"),
        (400, b'{"images": ["%%%"]}', "application/json"),
        (400, b"[" * 100_000, "application/json"),
        (415, b"abc", "text/plain"),
    ]
    for expected, body, kind in cases:
        status, answer, _ = ask(port, "/predict", body, kind)
        assert status == expected, (kind, body[:60], status, answer)
        assert json.loads(answer)["error"]
    assert ask(port, "/predict?top=0", *form(good))[0] == 400
    assert ask(port, "/predict")[0] == 405 and ask(port, "/no")[0] == 404
    with socket.create_connection(("127.0.0.1", port)) as raw:  # no HTTP at all
        raw.sendall(os.urandom(4096))
    assert ask(port, "/predict", *form(good))[0] == 200 and ask(port, "/healthz")[0] == 200


def test_the_page_and_the_metrics(port: int) -> None:
    status, page, headers = ask(port, "/")
    assert (
        status == 200
        and b"vit_tiny_patch16_224" in page
        and "default-src 'none'" in headers["content-security-policy"]
    )
    text = ask(port, "/metrics")[1].decode()
    assert 'kd_requests_total{code="200"}' in text and "kd_batch_pictures_bucket" in text


async def client(port: int, body: bytes, kind: str, requests: int) -> list[int]:
    """One keep-alive connection that asks one after the other; the statuses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = f"Host: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    head = f"POST /predict HTTP/1.1\r\n{headers}".encode()
    statuses = []
    for _ in range(requests):
        writer.write(head + body)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        statuses.append(int(answer.split()[1]))
        await reader.readexactly(int(answer.split("content-length: ")[1].split()[0]))
        assert statuses[-1] != 503 or "retry-after: 1" in answer
    writer.close()
    return statuses


async def clients(port: int, count: int, body: bytes, kind: str, requests: int) -> list[int]:
    each = await asyncio.gather(*(client(port, body, kind, requests) for _ in range(count)))
    return [status for statuses in each for status in statuses]


def test_two_hundred_clients_at_once(finished: Path, files: list[Path]) -> None:
    with serving(finished) as (port, _):
        statuses = asyncio.run(clients(port, 200, *form(files[0].read_bytes()), requests=3))
        assert statuses == [200] * 600
        text = ask(port, "/metrics")[1].decode()
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    pictures, batches = (
        float(numbers["kd_batch_pictures_sum"]),
        float(numbers["kd_batch_pictures_count"]),
    )
    assert pictures == 600 and batches < 500  # what waits goes together


def test_back_pressure_time_out_and_a_clean_stop(finished: Path, files: list[Path]) -> None:
    body, kind = form(files[0].read_bytes())
    with serving(finished, "queue=2", "max_batch=1", "timeout_s=3") as (port, process):
        statuses = asyncio.run(clients(port, 40, body, kind, requests=5))
        assert set(statuses) == {200, 503}
        assert ask(port, "/predict", body, kind)[0] == 200
        head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            slow.sendall(head.encode() + body[:10])
            assert b" 408 " in slow.recv(4096)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as taken:
            taken.sendall(head.encode() + body[:10])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 4
            with pytest.raises(OSError):
                while time.monotonic() < until:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    time.sleep(0.1)
            taken.sendall(body[10:])
            assert b" 200 " in taken.recv(4096)
        assert process.wait(120) == 0
        assert process.stdout.read() == "kd-serve: stopped\n"


def test_what_can_not_be_served_is_reported_before_the_export(
    finished: Path, tmp_path: Path, refusal: Command
) -> None:
    """A port in use, and a teacher whose weights are gone."""
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("export"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = refusal("serve", [str(run), f"port={taken.getsockname()[1]}"])
    assert "can't be used: Address already in use" in told
    config = run / "config.yaml"
    teacher = finished.parents[2] / "teacher.safetensors"
    config.write_text(config.read_text().replace(str(teacher), str(tmp_path / "gone.safetensors")))
    told = refusal("serve", [str(run), "teacher=true", "port=0"])
    assert "has no teacher with a classifier that can be run here" in told
    assert not (run / "export").exists()


def test_an_export_on_the_way_trusts_what_the_server_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr("kd.run.open.open_run", lambda *given: made.append(given))
    monkeypatch.setattr(
        "kd.ship.export.gate.export", lambda _, wanted, *more: (made.append(wanted), {})
    )
    monkeypatch.setattr(
        "kd.ship.export.base.find_format", lambda _: SimpleNamespace(check=lambda *_: None)
    )
    found_exports = iter([None, tmp_path / "model.onnx"])  # before and after it is made
    monkeypatch.setattr("kd.run.open.export_at", lambda *_: next(found_exports))
    (tmp_path / "student.safetensors").touch()
    request = Request(
        trust=["own"], flags={"trust"}, rest=[str(tmp_path)], overrides=["data.seed=1"]
    )
    _model(request, True)
    opened, wanted = made
    assert opened == (str(tmp_path), request)
    assert (wanted.to, wanted.int8) == ("onnx", True)


def test_int8_of_an_export_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.touch()
    for place in (tmp_path, file):
        assert _model(Request(rest=[str(place)]), False) == file
        with refuses("int8: has no effect on an export"):
            _model(Request(rest=[str(place)]), True)


def test_the_server_loads_no_torch() -> None:
    code = "import sys, kd.commands.serve, kd.ship.serving.run, kd.ship.export.formats.onnx; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "False"
