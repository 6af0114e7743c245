"""kd-serve on kept connections beside ONNX Runtime called directly, in one run: pictures a second and latency.

    python scripts/bench/serve.py RUN [--clients 1 8 64] [--rounds 3] [--write]

RUN is a finished run. Each client keeps one connection and asks again when it has its answer. Directly means what a program
of its own would do in one process: decode, resize by Pillow, one picture at a time or 16 together, no HTTP; in as many
threads of the model as the server has. The arms are measured in turn; the medians of the rounds count.
"""

import argparse
import asyncio
import io
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

from scripts.bench.harness import options, served, write

SECONDS = 4.0
"""Of one arm in one round."""
SIDE = 256
"""Pixels of the picture that is sent."""
Arm = Callable[[], list[float]]
"""Runs for :data:`SECONDS`; the seconds that each picture took."""


def picture() -> bytes:
    """A JPEG of soft colours, which decodes as a photograph does."""
    colours = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(colours).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


async def client(port: int, request: bytes, until: float, times: list[float]) -> None:
    """Asks on one connection until the time is over.

    Raises:
        AssertionError: an answer is not 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        start = time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head.lower())
        assert b" 200 " in head[:16] and size, head
        await reader.readexactly(int(size[1]))
        times.append(time.perf_counter() - start)
    writer.close()


def asked(port: int, clients: int, jpeg: bytes) -> Arm:
    """The server under so many clients."""
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n"
    request = head.encode() + jpeg

    async def all_clients() -> list[float]:
        times: list[float] = []
        until = time.perf_counter() + SECONDS
        await asyncio.gather(*(client(port, request, until, times) for _ in range(clients)))
        return times

    return lambda: asyncio.run(all_clients())


def direct(model: Path, together: int, jpeg: bytes) -> Arm:
    """ONNX Runtime in this process, so many pictures at a time."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    taken = session.get_inputs()[0]
    _, height, width, _ = taken.shape

    def view() -> np.ndarray:
        seen = Image.open(io.BytesIO(jpeg)).convert("RGB").resize((width, height))
        return np.asarray(seen)

    kind = np.uint8 if "uint8" in taken.type else np.float32

    def call() -> list[float]:
        times: list[float] = []
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            start = time.perf_counter()
            batch = np.stack([view() for _ in range(together)]).astype(kind)
            session.run(None, {taken.name: batch})
            times += [(time.perf_counter() - start) / together] * together
        return times

    return call


def main() -> None:
    """Measures all arms in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    given = options(parser)
    jpeg = picture()
    with served([str(given.run.resolve())]) as (_, port):
        model = next(given.run.glob("export/onnx/*/model.onnx"), None) or next(
            given.run.rglob("model.onnx")
        )
        arms = {f"kd-serve, {n} clients": asked(port, n, jpeg) for n in given.clients}
        for together in (1, 16):
            arms[f"ONNX Runtime, {together} at a time"] = direct(model, together, jpeg)
        found: dict[str, list[list[float]]] = {name: [] for name in arms}
        for _ in range(given.rounds):
            for name, arm in arms.items():
                found[name].append(arm())
    lines = ["| arm | pictures/s | median ms | 99 % ms |", "|---|---:|---:|---:|"]
    for name, rounds in found.items():
        rate = statistics.median(len(times) / SECONDS for times in rounds)
        middle = statistics.median(statistics.median(times) for times in rounds)
        slow = statistics.median(float(np.percentile(times, 99)) for times in rounds)
        lines.append(f"| {name} | {rate:,.0f} | {middle * 1e3:.2f} | {slow * 1e3:.2f} |")
    write("serve", given.hardware, given.date, "kd-serve beside ONNX Runtime", lines, given.write)


if __name__ == "__main__":
    main()
