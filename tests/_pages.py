"""Records of runs that were never made, and what their pages hold."""

import json
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kd.report.records import SCHEMA, RunRecords
from tests._files import json_lines, write_json, write_lines
from tests._runs import summary_of

BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
)


FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip


CURVE = [
    {"share": 0.0, "accuracy": 0.776, "ms": 98.0},
    {"share": 0.1, "accuracy": 0.806, "ms": 126.9},
    {"share": 1.0, "accuracy": 0.867, "ms": 388.1},
]
CASCADE = {"curve": CURVE, "teacher": 0.867, "teacher_ms": 290.1, "goal": "accuracy=0.98*teacher",
           "confidence": 0.95, "score": "probability", "chosen_on": 632, "threshold": None}  # fmt: skip
"""What ``cascade.json`` holds where no threshold was found."""


def dom(page: Path) -> str:
    """A page as a browser has built it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            str(BROWSER),
            *FLAGS,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=5000",
            "--dump-dom",
        ]
        return subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=240
        ).stdout


def write_run(
    folder: Path,
    steps: int = 400,
    samples: int = 300,
    cores: int = 4,
    gpus: int = 2,
    slow: float = 1,
) -> Path:
    """A run's folder with all kinds of records, as long as asked for."""
    rng, records = random.Random(0), folder / "records"
    records.mkdir(parents=True)

    def save(name: str, lines: list[dict[str, Any]]) -> None:
        write_lines(records / name, lines)

    mean = {"data": 10 * slow, "h2d": 1, "teacher": 90, "student": 20, "loss": 3, "backward": 40, "communication": 5,
            "optimizer": 6, "logging": 2, "checkpoint": 1}  # fmt: skip
    rows = [
        {"kind": "step", "step": n, "epoch": n // 100, "t": 1e9 + n, "p": (p := {k: v * rng.uniform(0.8, 1.3)
         for k, v in mean.items()}), "ms": sum(p.values())} for n in range(steps)
    ]  # fmt: skip
    sums = {k: sum(r["p"][k] for r in rows) for k in mean}
    head = {"kind": "header", "schema": SCHEMA}
    save("phases.rank0.jsonl", [
        {**head, "of": "steps", "rank": 0, "world_size": 1, "batch_size": 64, "num_workers": 2, "device": "cuda",
         "cores": cores, "threads": 1, "batches_per_epoch": 100, "max_epochs": steps // 100 + 1},
        {"kind": "event", "name": "startup", "s": 12.0, "parts": {"imports": 5.0, "first step": 7.0}},
        *rows,
        {"kind": "total", "steps": steps, "ms": sum(sums.values()), "max_ms": 200.0, "p": sums, "own_ms": 9.0},
    ])  # fmt: skip
    save("system.0-host.jsonl", [
        {**head, "of": "system", "node": "0-host", "gpus": ["GPU"] * gpus},
        *({"kind": "sample", "t": 1e9 + n / 2, "cpu": [rng.randint(0, 100) for _ in range(cores)],
           "iowait": 1.0, "mem": 40.0, "swap_mb": 0, "main": 99.0, "workers": [50.0, 51.0], "rss_mb": 900.0,
           "disk_r": 1.5, "disk_w": 0.1, "net_r": 0.0, "net_w": 0.0,
           "gpu": [{"util": rng.randint(60, 100), "mem": 55.0, "w": 300} for _ in range(gpus)]}
          for n in range(samples)),
    ])  # fmt: skip
    save("health.rank0.jsonl", [
        {**head, "of": "health", "counts": {"train": [10, 10], "val": [5, 5]}},
        *({"kind": "health", "step": n, "grad_norm": 1.0 + n / 100, "update_ratio": 1e-3, "agreement": 0.8,
           "teacher_entropy": 0.5, "loss_shares": {"kd": 0.6, "task": 0.4}} for n in range(0, steps, 50)),
    ])  # fmt: skip
    write_json(folder / "fidelity.json", {
        "kind": "classification", "pictures": 10, "score": "accuracy", "ece": {"student": 0.1}, "reliability": {},
        "per_class": [{"name": "bibimbap", "count": 5, "student": 1.0}, {"name": "bread", "count": 5, "student": 0.6}],
        "confusions": [{"is": "bread", "called": "bibimbap", "student": 2, "teacher": 0}],
    })  # fmt: skip
    save("kernels.rank0.jsonl", [
        {**head, "of": "kernels"},
        {"kind": "kernels", "first": 10, "last": 14, "busy": 0.9, "top": [
            {"name": f"aten::op{i}", "range": "teacher", "ms": 30.0 / (i + 1), "share": 0.3 / (i + 1), "calls": 9}
            for i in range(8)]},
    ])  # fmt: skip
    metrics = ["epoch,step,train/loss,train/kd_loss,val/acc1,val/agreement"]
    metrics += [
        f"{n // 100},{n},{2 - n / steps},{1 - n / steps / 2},," for n in range(0, steps, 10)
    ]
    metrics += [f"{e},{e * 100 + 99},,,{0.5 + e / steps},0.8" for e in range(steps // 100)]
    (folder / "metrics.csv").write_text("\n".join(metrics) + "\n")
    (folder / "config.yaml").write_text(
        "recipe: demo\nmonitor: {price_per_hour: 4.0}\ntrainer: {max_epochs: 5}\n"
    )
    (folder / "export").mkdir()
    write_json(folder / "export" / "latency.json", {"rows": [
        {"model": model, "runtime": "torch", "threads": 1, "batch": 1, "median_ms": ms}
        for model, ms in (("teacher", 80.0), ("student", 9.5))]})  # fmt: skip
    summary = {"status": "done", "recipe": "demo", "epochs": steps // 100, "wall_s": 3600.0, "kd_version": "0",
               "teacher": {"arch": "vit_large_patch16_224", "params": 300_000_000, "val": {"acc1": 0.9}},
               "student": {"arch": "vit_small_patch16_224", "params": 22_000_000, "val": {"acc1": 0.8}},
               "data": {"train": 6400, "val": 10, "classes": 2}}  # fmt: skip
    write_json(folder / "summary.json", summary)
    return folder


def section(folder: Path, kind: str, page: str = "report.html") -> list[dict[str, Any]]:
    """The sections of a kind on a run's page."""
    text = (folder / page).read_text()
    data = re.search(r'id="data">(.*?)</script>', text, re.S).group(1)  # type: ignore[union-attr]
    return [found for found in json.loads(data)["sections"] if found["kind"] == kind]


def made(folder: Path, devices: int, hours: float, epochs: int, name: str, **monitor: Any) -> Path:
    """A run's folder with the figures of a case; its steps fit its hours."""
    write_run(folder, steps=40 * epochs if epochs < 20 else 400)
    steps = folder / "records" / "phases.rank0.jsonl"
    lines = json_lines(steps)
    lines[0] |= {"world_size": devices, "processes": min(devices, 8), "device_name": name}
    batches = lines[0]["batches_per_epoch"] = (lines[-2]["step"] + 1) / epochs
    for line in lines[2:-1]:
        line["epoch"] = int(line["step"] / batches)
    write_lines(steps, lines)
    summary = summary_of(folder)
    write_json(folder / "summary.json", summary | {"wall_s": 3600 * hours, "world_size": devices})
    write_json(
        folder / "config.yaml",
        {"recipe": "demo", "monitor": monitor, "trainer": {"devices": devices}},
    )
    return folder


def sections_of(file: Path) -> list[dict[str, Any]]:
    data = re.search(r'id="data">(.*?)</script>', file.read_text(), re.S)
    return json.loads(data.group(1))["sections"]  # type: ignore[union-attr]


HEALTHY = {
    "data": 1.0, "h2d": 0.5, "teacher": 22.0, "student": 25.0, "loss": 2.0, "backward": 45.0, "optimizer": 3.0,
    "logging": 1.0, "checkpoint": 0.5,
}  # fmt: skip


def run_of(phases: dict[str, float], device: str = "cpu", **header: Any) -> RunRecords:
    step = sum(phases.values())
    run = RunRecords(Path("x"))
    run.headers[0] = {
        "device": device,
        "cores": 8,
        "threads": 2,
        "num_workers": 2,
        "batch_size": 64,
        **header,
    }
    run.totals[0] = {
        "steps": 100, "ms": 100 * step, "max_ms": step, "p": {k: 100 * ms for k, ms in phases.items()},
        "ready_ms": 0.0, "data_cpu_ms": 100 * phases["data"],
        "launch_ms": 50 * step, "callbacks": {"Progress.on_train_batch_end": 10.0},
    }  # fmt: skip
    return run


def tier_run(
    busy_s: float, batches: int = 200, may_ask: int = 18, step_ms: float = 500, wait_ms: float = 300
) -> RunRecords:
    """100 s of two ranks with 4 makers each on two machines of 4 cores; a third machine has gone."""

    def machine(node: str, makers: int, done: float, gone: bool = False) -> dict[str, Any]:
        share = {
            "batches": round(batches * done),
            "busy_s": busy_s * done,
            "mb": 10.0 * batches * done,
        }
        return {"node": node, "name": node, "cores": 4, "makers": makers, "gone": gone, **share}

    def reading(t: float, done: float) -> dict[str, Any]:
        machines = [
            machine("a", 2, done / 2),
            machine("b", 2, done / 2),
            machine("c", 0, 0, gone=True),
        ]
        return {"kind": "tier", "t": t, "ready": 0, "may_ask": may_ask, "made_again": 1, "made_twice": 0,
                "machines": machines}  # fmt: skip

    steps = {"kind": "total", "steps": 200, "ms": 200 * step_ms, "p": {"data": 200.0 * wait_ms}}
    steps["p"]["student"] = 200.0 * (step_ms - wait_ms)
    header = {
        "of": "steps",
        "rank": 0,
        "num_workers": 0,
        "cores": 8,
        "threads": 1,
        "device": "cuda",
    }
    readings = [reading(0, 0), reading(100, 1)]
    return RunRecords(
        Path("x"), headers={0: header}, totals={0: steps}, tier={0: readings, 1: readings}
    )
