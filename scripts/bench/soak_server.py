"""kd-serve for N minutes at twice its capacity, with hostile requests among them: wrong answers, statuses, memory.

    python scripts/bench/soak_server.py --minutes 30 --write

The served model is made here: its features are a picture's mean red, green and blue, so every answer is known. What the
server can do is measured first, by clients that wait for their answers; then requests come at twice (``--factor``) that
rate, whether they are answered or not, a share of them hostile (``--hostile``). All of it on the loopback interface; Linux
(it reads /proc).
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
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import options, served, table, write
from tests._serving import mean_colour

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


def head(length: int, path: str = "/predict", kind: str = "application/json", host: str = "127.0.0.1") -> bytes:  # fmt: skip
    """The head of a request with a body of so many bytes."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Type: {kind}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def of(body: bytes, **options: str) -> bytes:
    """A whole request."""
    return head(len(body), **options) + body


def in_json(*pictures: bytes) -> bytes:
    """The body that asks for pictures."""
    return json.dumps({"images": [base64.b64encode(data).decode() for data in pictures]}).encode()


def coloured(colour: Any, kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (320, 240)) -> bytes:  # fmt: skip
    """A file of a picture of one colour."""
    stream = io.BytesIO()
    Image.new(mode, size, colour).save(stream, kind)
    return stream.getvalue()


class Client:
    """Sends, reads, judges and counts."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.late = 0
        self.prepared: list[tuple[list[tuple[int, ...]], bytes]] = []
        for _ in range(PREPARED):
            colours = [
                tuple(self.rng.randrange(256) for _ in range(3))
                for _ in range(self.rng.choice((1, 1, 1, 3)))
            ]
            self.prepared.append((colours, of(in_json(*map(coloured, colours)))))

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
        name = self.rng.choice(list(HOSTILE))
        make, right, wait_s = HOSTILE[name]
        status, answered = await self.exchange(make(self.rng), wait_s)
        self.counts[name, status] += 1
        if status not in (*right, 503, -1):
            self.wrong.append(f"{name}: {status} {answered[:200]!r}")


JPEG = coloured((9, 99, 199), "JPEG")
KIND = "multipart/form-data; boundary=x"
FORM = b'--x\r\nContent-Disposition: form-data; name="f"; filename="\\ud800"\r\n\r\n' + JPEG + b"\r\n--x--\r\n"  # fmt: skip


def black(width: int, height: int) -> Callable[[random.Random], bytes]:
    """The request of a small file of so many pixels."""
    request = of(in_json(coloured(0, mode="1", size=(width, height))))
    return lambda rng: request


# By name: a request, the statuses that are right beside 503, seconds before its answer is read. 0 is right where the
# server may answer and close while the client still sends.
HOSTILE: dict[str, tuple[Callable[[random.Random], bytes], tuple[int, ...], float]] = {
    "truncated picture": (lambda rng: of(in_json(JPEG[: rng.randrange(2, len(JPEG) // 2)])), (415,), 0),
    "turned bits": (lambda rng: of(in_json(JPEG[:300] + rng.randbytes(40) + JPEG[340:])), (200, 413, 415), 0),
    "30,000 x 30,000": (black(30_000, 30_000), (413,), 0),
    "1 x 100,000": (black(1, 100_000), (200,), 0),
    "1 x 30,000,000": (black(1, 30_000_000), (200, 413), 0),
    "33 pictures": (lambda rng: of(in_json(*[JPEG] * 33)), (413,), 0),
    "nested lists": (lambda rng: of(b"[" * 500_000), (400, 0), 0),
    "many values": (lambda rng: of(b'{"images": [' + b"[]," * 300_000 + b"[]]}"), (400, 0), 0),
    "a form's odd charset": (lambda rng: of(FORM, kind=f"{KIND}; charset=unicode_escape"), (200,), 0),
    "top of 5,000 digits": (lambda rng: of(in_json(JPEG), path="/predict?top=" + "9" * 5000), (400,), 0),
    "another host": (lambda rng: of(in_json(JPEG), host="evil.example"), (403,), 0),
    "40 MB": (lambda rng: of(b" " * 40_000_000), (413, 0), 0),
    "no HTTP": (lambda rng: rng.randbytes(4096) + b"\r\n\r\n", (400, 0), 0),
    "half-sent headers": (lambda rng: b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", (0,), 15),
    "half-sent body": (lambda rng: head(4_000_000) + b'{"image": "' + b"A" * 2_000_000, (408, 0), 40),
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
                client.hostile() if client.rng.random() < hostile else client.honest()
            )
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*running)
    return left_out


async def capacity(client: Client, seconds: float, clients: int = 16) -> float:
    """Honest requests a second, by clients that wait."""
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            await client.honest()

    await asyncio.gather(*(one() for _ in range(clients)))
    return client.counts.total() / seconds


def sampled(pid: int, ended: threading.Event, out: list[float]) -> None:
    """The server's resident memory, MB, each second; in a thread, for the clients are busy."""
    server = psutil.Process(pid)
    while not ended.wait(1.0):
        out.append(server.memory_info().rss / 2**20)


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
    by_kind: dict[str, list[str]] = {}
    for (name, answered), count in sorted(client.counts.items()):
        by_kind.setdefault(name, []).append(f"{answered}: {count:,}")
    seconds = sorted(client.seconds)
    tenths = [memory[i * len(memory) // 10 : (i + 1) * len(memory) // 10] for i in range(10)]
    held = ", ".join(f"{statistics.median(part):.0f} {max(part):.0f}" for part in tenths if part)
    columns = ["requests", "status: count (0: closed without an answer; -1: so to a late client)"]
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
        f"Memory in tenths of the time, MB (median, most): {held}. At no moment more than {most:.0f}; bound: {MEMORY}.",
        "",
        *table(columns, [[name, ", ".join(found)] for name, found in by_kind.items()]),
        *(f"\nWrong: {line}" for line in client.wrong[:20]),
        *(["", "```", *told.splitlines()[:40], "```"] if told.count("\n") > 1 else []),
    ]


def main() -> None:
    """Serves, soaks, writes."""
    args = options(__doc__, minutes=2.0, factor=2.0, hostile=0.05, queue=64)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        size = f"[{SIDE}, {SIDE}]"
        model = mean_colour(Path(folder) / "model.onnx", task='"features"', classes="[]", size=size)
        files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
        words = [str(model), "threads=1", f"queue={args.queue}"]
        with served(words, preexec_fn=files) as (process, port):
            lines = asyncio.run(soak(process, port, args))
    title = "The server under twice what it is able to do, with hostile requests"
    write(args, "soak_server", title, lines)


if __name__ == "__main__":
    main()
