"""Ships finished runs: exports each to every runtime, times them beside the teacher, serves them under load.

    python scripts/bench/ship.py RUN [RUN ...] [--out FILE.md] [--seconds 2]

Needs the extras openvino and serve, and a quiet machine: the load's clients run on the same cores as the server.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

EXPORTS = (["to=onnx"], ["to=openvino"], ["to=onnx", "int8=true"], ["to=openvino", "int8=true"])
CLIENTS = ((1, 200), (8, 50), (50, 20), (200, 10))  # clients, requests of each
BOUNDARY = "----kd"


def kd(*items: str, check: bool = True) -> int:
    """One of kd's commands in a process of its own."""
    status = subprocess.run([sys.executable, "-m", "kd.cli", *items]).returncode
    if check and status:
        sys.exit(f"kd-{' '.join(items)} ended with status {status}")
    return status


def table_head(columns: list[str]) -> list[str]:
    """Of a Markdown table."""
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def ship(run: Path, seconds: float) -> list[str]:
    """Exports what is not there yet, times everything; the run's part of the report."""
    for items in EXPORTS:
        name = items[0].removeprefix("to=") + ("_int8" if len(items) > 1 else "")
        if not (run / "export" / name).exists():
            kd(
                "export", str(run), *items, check=False
            )  # one below its limit is not kept: the table says so
    kd(
        "latency",
        str(run),
        "runtime=torch,onnx,openvino,int8",
        "batch=1,64",
        "threads=1,2",
        f"seconds={seconds}",
    )
    exports = json.loads((run / "export" / "export.json").read_text())
    latency = json.loads((run / "export" / "latency.json").read_text())
    lines = [f"## {run}, {latency['machine']}", ""]
    lines += [
        "| export | kept | MB | agreement % | metric of the student % | of the export % |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in exports.items():
        scores = " | ".join(f"{100 * found[key]:.2f}" for key in ("agreement", "student", "export"))
        lines.append(
            f"| {name} | {'yes' if found['kept'] else 'no'} | {found['size_mb']:.1f} | {scores} |"
        )
    lines += [
        "",
        "| model | runtime | threads | batch | median ms | p95 ms | images/s | x torch student | x teacher | MB |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    rows = latency["rows"]
    torch = {
        (r["threads"], r["batch"]): r["median_ms"]
        for r in rows
        if (r["model"], r["runtime"]) == ("student", "torch")
    }
    for r in rows:
        own = f"{torch[r['threads'], r['batch']] / r['median_ms']:.2f}"
        cells = [
            r["model"],
            r["runtime"],
            r["threads"],
            r["batch"],
            f"{r['median_ms']:.2f}",
            f"{r['p95_ms']:.2f}",
        ]
        cells += [
            f"{r['images_per_s']:.0f}",
            own,
            r.get("times_the_teacher", ""),
            r["peak_memory_mb"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


async def client(
    port: int, request: bytes, count: int, took: list[float], failed: list[int]
) -> None:
    """One keep-alive connection that asks one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        start = time.perf_counter()
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
        took.append(1000 * (time.perf_counter() - start))
        if head.split()[1] != "200":
            failed.append(int(head.split()[1]))
    writer.close()


async def load(
    port: int, request: bytes, clients: int, each: int
) -> tuple[float, list[float], list[int]]:
    """All clients at once: seconds, milliseconds of each request, statuses other than 200."""
    took: list[float] = []
    failed: list[int] = []
    start = time.perf_counter()
    await asyncio.gather(*(client(port, request, each, took, failed) for _ in range(clients)))
    return time.perf_counter() - start, took, failed


def serve(run: Path, picture: Path, int8: bool) -> list[str]:
    """The server's load table."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", "serve", str(run), "port=0", f"int8={str(int8).lower()}"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    line = ""
    while " on http://" not in line:
        line = process.stdout.readline()  # type: ignore[union-attr]
    port, data = int(line.rstrip().rpartition(":")[2]), picture.read_bytes()
    body = b"".join((
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'.encode(), data,
        f"\r\n--{BOUNDARY}--\r\n".encode(),
    ))  # fmt: skip
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    time.sleep(2)
    asyncio.run(load(port, request, 4, 10))  # warms up
    lines = [
        f"Served from ONNX Runtime{', int8' if int8 else ''}, {picture.name} of {len(data) / 1000:.0f} kB:",
        "",
    ]
    lines += table_head(["clients", "requests", "requests/s", "p50 ms", "p99 ms", "errors"])
    for clients, each in CLIENTS:
        seconds, took, failed = asyncio.run(load(port, request, clients, each))
        p99 = statistics.quantiles(took, n=100)[98]
        lines.append(
            f"| {clients} | {len(took)} | {len(took) / seconds:.0f} | {statistics.median(took):.1f} | {p99:.1f} "
            f"| {len(failed)} |"
        )
    process.terminate()
    status = process.wait(60)
    return [*lines, "", f"Stopped by SIGTERM with status {status}.", ""]


def main() -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--picture", type=Path, help="what the load's clients send")
    asked = parser.parse_args()
    lines = [
        "# What ships",
        "",
        f"`python scripts/bench/ship.py {' '.join(map(str, asked.runs))}`",
        "",
    ]
    for run in asked.runs:
        lines += ship(run.resolve(), asked.seconds)
        if asked.picture:
            for int8 in (False, True):
                lines += serve(run.resolve(), asked.picture, int8)
    text = "\n".join(lines)
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
