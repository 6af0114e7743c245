"""kd-serve for N minutes at twice its capacity, with hostile requests among them: wrong answers, statuses, memory.

    python scripts/bench/soak_server.py --minutes 30 --write

The served model is made here: its features are a picture's mean red, green and blue, so every answer is known. What the
server can do is measured first, by clients that wait for their answers; then requests come at twice that rate whether
they are answered or not. All of it on the loopback interface; Linux (it reads /proc).
"""

import argparse
import asyncio
import base64
import io
import json
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.ship.export.manifest import ExportManifest
from scripts.bench.harness import options, served, write

ROOT = Path(__file__).parents[2]
SIDE = 224
OPEN = 400
"""Requests that may be under way; more are counted as not sent."""
PREPARED = 2000
"""Honest requests, each of other colours; made before the first is sent, so that the clients keep up."""
LATE_S = 5.0
"""A client that sends its request so long after it connected is counted apart: the server gives it 10 s."""
MEMORY = 200 + 16 * 16 + 2 * (20 * 40 + 4 * 16)
"""MB that the server may hold: itself; requests' bodies; two decoders: 20 bytes a pixel and copies of an upload."""
FILES = 1024
"""That the server may open."""


def mean_colour(file: Path) -> Path:
    """An ONNX export whose features are a picture's mean red, green and blue, in 0..255."""
    about = ExportManifest("features", "mean", [], (SIDE, SIDE), 1.0, [0.0] * 3, [1.0] * 3, "onnx")
    nodes = [
        helper.make_node("Cast", ["pictures"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["answer"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "mean",
        [helper.make_tensor_value_info("pictures", TensorProto.UINT8, ["n", SIDE, SIDE, 3])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    for key, value in about.as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, file)
    return file


def head(
    length: int, path: str = "/predict", kind: str = "application/json", host: str = "127.0.0.1"
) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Type: {kind}",
        f"Content-Length: {length}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def in_json(*pictures: bytes) -> bytes:
    return json.dumps({"images": [base64.b64encode(data).decode() for data in pictures]}).encode()


def _of(body: bytes, **options: str) -> bytes:
    return head(len(body), **options) + body


def coloured(colour: tuple[int, ...], kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (320, 240), colour).save(stream, kind)
    return stream.getvalue()


def black(width: int, height: int) -> bytes:
    """A small PNG file of ``width`` x ``height`` pixels."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(width // 8 + 1)) for _ in range(height)) + rows.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x01\x00\x00\x00\x00"
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    coded = (
        len(d).to_bytes(4, "big") + k + d + zlib.crc32(k + d).to_bytes(4, "big") for k, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(coded)


class Client:
    """Sends, reads, judges and counts."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.of = port, random.Random(seed)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.late = 0
        self.prepared: list[tuple[list[tuple[int, ...]], bytes]] = []
        for _ in range(PREPARED):
            colours = [
                tuple(self.of.randrange(256) for _ in range(3))
                for _ in range(self.of.choice((1, 1, 1, 3)))
            ]
            self.prepared.append((colours, _of(in_json(*map(coloured, colours)))))

    async def exchange(self, data: bytes, wait_s: float = 0.0) -> tuple[int, bytes]:
        """One connection, one request; status 0: it was closed without an answer, -1: so to a late client."""
        begun = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            return 0, repr(error).encode()
        late = time.monotonic() > begun + LATE_S
        self.late += late
        try:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(wait_s)
            answered = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 90)).decode().lower()
            length = re.search(
                "content-length: (\\d+)", answered
            )  # a 400 of the HTTP library's has none
            body = reader.readexactly(int(length[1])) if length else reader.read()
            return int(answered.split()[1]), await asyncio.wait_for(body, 90)
        except (OSError, asyncio.IncompleteReadError) as error:
            return -late, repr(error).encode()
        finally:
            writer.close()

    async def honest(self) -> None:
        """Up to three pictures of colours that no other request under way has."""
        colours, request = self.prepared.pop()
        start = time.perf_counter()
        status, answered = await self.exchange(request)
        self.prepared.insert(0, (colours, request))
        self.counts["honest", status] += 1
        if status == 200:
            self.seconds.append(time.perf_counter() - start)
            told = [prediction["features"] for prediction in json.loads(answered)["predictions"]]
            right = len(told) == len(colours) and all(
                abs(x - y) < 0.01
                for mine, theirs in zip(told, colours, strict=True)
                for x, y in zip(mine, theirs, strict=True)
            )
            if not right:
                self.wrong.append(f"{colours} -> {told}")
        elif status not in (503, -1):
            self.wrong.append(f"honest: {status} {answered[:200]!r}")

    async def hostile(self) -> None:
        """One of many kinds; each has the statuses that are right."""
        name = self.of.choice(list(HOSTILE))
        make, right, wait_s = HOSTILE[name]
        status, answered = await self.exchange(make(self.of), wait_s)
        self.counts[name, status] += 1
        if status not in (*right, 503, -1):
            self.wrong.append(f"{name}: {status} {answered[:200]!r}")


GOOD = in_json(coloured((1, 2, 3)))
JPEG = coloured((9, 99, 199), "JPEG")
BOMB, THIN, LONG = (
    _of(in_json(black(*size))) for size in ((30_000, 30_000), (1, 100_000), (1, 30_000_000))
)
MANY, NESTED, HUGE = _of(in_json(*[JPEG] * 33)), _of(b"[" * 500_000), _of(b" " * 40_000_000)
VALUES, HALF = (
    _of(b'{"images": [' + b"[]," * 300_000 + b"[]]}"),
    head(4_000_000) + b'{"image": "' + b"A" * 2_000_000,
)
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="f"; filename="\\ud800"\r\n\r\n'
    + JPEG
    + b"\r\n--x--\r\n"
)
# By name: a request, the statuses that are right beside 503, seconds before its answer is read. 0 is right where the
# server may answer and close while the client still sends.
KIND = "multipart/form-data; boundary=x"
HOSTILE: dict[str, tuple[Callable[[random.Random], bytes], tuple[int, ...], float]] = {
    "truncated picture": (lambda of: _of(in_json(JPEG[: of.randrange(2, len(JPEG) // 2)])), (415,), 0),
    "turned bits": (lambda of: _of(in_json(JPEG[:300] + of.randbytes(40) + JPEG[340:])), (200, 413, 415), 0),
    "30,000 x 30,000": (lambda of: BOMB, (413,), 0),
    "1 x 100,000": (lambda of: THIN, (200,), 0),
    "1 x 30,000,000": (lambda of: LONG, (200, 413), 0),
    "33 pictures": (lambda of: MANY, (413,), 0),
    "nested lists": (lambda of: NESTED, (400, 0), 0),
    "many values": (lambda of: VALUES, (400, 0), 0),
    "a form's odd charset": (lambda of: _of(FORM, kind=f"{KIND}; charset=unicode_escape"), (200,), 0),
    "top of 5,000 digits": (lambda of: _of(GOOD, path="/predict?top=" + "9" * 5000), (400,), 0),
    "another host": (lambda of: _of(GOOD, host="evil.example"), (403,), 0),
    "40 MB": (lambda of: HUGE, (413, 0), 0),
    "no HTTP": (lambda of: of.randbytes(4096) + b"\r\n\r\n", (400, 0), 0),
    "half-sent headers": (lambda of: b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", (0,), 15),
    "half-sent body": (lambda of: HALF, (408, 0), 40),
}  # fmt: skip


async def load(
    client: Client, rate: float, seconds: float, hostile: float, ended: Callable[[], bool]
) -> int:
    """Sends at a rate, whatever is answered; returns how many were not sent because too many were under way."""
    running: set[asyncio.Task[None]] = set()
    start, sent, left_out = time.monotonic(), 0, 0
    while time.monotonic() < start + seconds and not ended():
        due = int((time.monotonic() - start) * rate)
        for _ in range(due - sent):
            sent += 1
            if len(running) >= OPEN:
                left_out += 1
                continue
            task = asyncio.create_task(
                client.hostile() if client.of.random() < hostile else client.honest()
            )
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*running)
    return left_out


async def capacity(client: Client, seconds: float, clients: int = 16) -> float:
    """Honest requests a second, by clients that wait."""
    end, done = time.monotonic() + seconds, 0

    async def one() -> None:
        nonlocal done
        while time.monotonic() < end:
            await client.honest()
            done += 1

    await asyncio.gather(*(one() for _ in range(clients)))
    return done / seconds


def sampled(pid: int, ended: threading.Event, out: list[float]) -> None:
    """The server's resident memory, MB, each second; in a thread, for the clients are busy."""
    while not ended.wait(1.0):
        out.append(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        )


async def soak(process: "subprocess.Popen[str]", port: int, args: argparse.Namespace) -> list[str]:
    """All of it; the result's lines."""
    able = await capacity(Client(port, 1), 10)
    client, memory = Client(port, 2), list[float]()
    ended = threading.Event()
    threading.Thread(target=sampled, args=(process.pid, ended, memory), daemon=True).start()
    left_out = await load(
        client,
        args.factor * able,
        60 * args.minutes,
        args.hostile,
        lambda: process.poll() is not None,
    )
    ended.set()
    status = Path(f"/proc/{process.pid}/status").read_text()
    most = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024 if "VmHWM" in status else 0  # type: ignore[index]
    alive = process.poll() is None
    process.send_signal(signal.SIGTERM)
    told, _ = await asyncio.to_thread(process.communicate, timeout=60)
    by_kind: dict[str, Counter[int]] = {}
    for (name, status), count in sorted(client.counts.items()):
        by_kind.setdefault(name, Counter())[status] += count
    seconds = sorted(client.seconds)
    parts = [memory[i * len(memory) // 10 : (i + 1) * len(memory) // 10] for i in range(10)]
    rows = [
        f"| {name} | {', '.join(f'{s}: {n:,}' for s, n in found.items())} |"
        for name, found in by_kind.items()
    ]
    return [
        f"kd-serve of a model of {SIDE} px with {FILES} files, queue={args.queue}, threads=1; the clients share its "
        f"cores. Able: {able:.0f} requests/s. Sent: {args.factor * able:.0f} a second for {args.minutes:g} minutes, "
        f"{args.hostile:.0%} hostile; {left_out:,} left out ({OPEN} were under way).",
        "",
        f"Wrong answers: {sum(': ' not in line for line in client.wrong)}; honest requests that were closed without "
        f"one: {client.counts['honest', 0]:,} (and {client.counts['honest', -1]:,} of {client.late:,} clients that "
        f"sent later than {LATE_S:g} s after they connected); all that is wrong: {len(client.wrong)}. Alive then: "
        f"{alive}; exit status {process.returncode}; lines of log: {max(0, told.count(chr(10)) - 1)}.",
        f"Honest requests that were answered: median {statistics.median(seconds):.2f} s, p99 "
        f"{seconds[len(seconds) * 99 // 100]:.2f} s.",
        "",
        "Memory in tenths of the time, MB (median, most): " + ", ".join(
            f"{statistics.median(part):.0f} {max(part):.0f}" for part in parts if part
        ) + f". At no moment more than {most:.0f}; bound: {MEMORY}.",
        "",
        "| requests | status: count (0: closed without an answer; -1: so to a late client) |",
        "|---|---|",
        *rows,
        *(f"\nWrong: {line}" for line in client.wrong[:20]),
        *(["", "```", *told.splitlines()[:40], "```"] if told.count("\n") > 1 else []),
    ]  # fmt: skip


def main() -> None:
    """Serves, soaks, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--factor", type=float, default=2.0, help="of what the server is able to do"
    )
    parser.add_argument("--hostile", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--queue", type=int, default=64)
    args = options(parser)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        model = mean_colour(Path(folder) / "model.onnx")
        files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
        words = [str(model), "threads=1", f"queue={args.queue}"]
        with served(words, preexec_fn=files) as (process, port):
            lines = asyncio.run(soak(process, port, args))
    title = "The server under twice what it is able to do, with hostile requests"
    write("soak_server", args.hardware, args.date, title, lines, args.write)


if __name__ == "__main__":
    main()
