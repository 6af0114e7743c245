"""Records: bounded, honest after thinning, readable when torn or newer."""

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kd
from kd.report.facts import Facts
from kd.report.records import (
    Writer,
    percentile,
    read_lines,
    read_results,
    read_run,
    read_siblings,
)
from kd.report.series import Series
from kd.storage.elsewhere import LARGEST
from tests._files import write_json
from tests._helpers import refuses
from tests._pages import write_run

STEP: dict[str, Any] = {"kind": "step", "epoch": 0, "t": 0.0, "p": {}}


def write_steps(path: Path, values: list[float], limit: int) -> Writer:
    writer = Writer(path, {"of": "steps", "rank": 0}, limit)
    total: dict[str, Any] = {"kind": "total", "steps": 0, "ms": 0.0, "p": {}}
    for number, ms in enumerate(values):
        writer.write({**STEP, "step": number, "ms": ms})
        total = {**total, "steps": number + 1, "ms": total["ms"] + ms}
        if number % 100 == 99:
            writer.write(total)
    writer.close()
    return writer


def test_a_file_stays_bounded_and_its_percentiles_hold(tmp_path: Path) -> None:
    rng = random.Random(0)
    # slow at first, periodic (every 10th step logs), and an outlier now and then
    values = [rng.gauss(100 if n < 20_000 else 50, 5) + 30 * (n % 10 == 0) for n in range(60_000)]
    file = tmp_path / "phases.rank0.jsonl"
    written = write_steps(file, values, limit=2_000)
    records, notes = read_lines(file)
    assert len(records) <= 2_000
    assert not notes
    kept = [r["ms"] for r in records if r["kind"] == "step"]
    assert len(kept) > 500
    for q in (5, 50, 90, 95, 99):
        assert percentile(kept, q) == pytest.approx(percentile(values, q), rel=0.03), q
    numbers = [r["step"] for r in records if r["kind"] == "step"]
    assert sum(n < 20_000 for n in numbers) / len(numbers) == pytest.approx(1 / 3, abs=0.03)
    assert sum(n % 10 == 0 for n in numbers) / len(numbers) == pytest.approx(0.1, abs=0.03)
    total = [r for r in records if r["kind"] == "total"][-1]
    assert total["steps"] == 60_000
    assert total["ms"] == pytest.approx(sum(values))
    again = Writer(file, {"of": "steps", "rank": 0}, 2_000)  # as a resumed run opens it
    assert again.share == written.share < 1
    assert again.last_total == total
    again.close()


def test_torn_lines_are_left_out_and_the_file_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "records" / "phases.rank0.jsonl"
    write_steps(file, [1.0, 2.0], limit=1_000)
    with file.open("a") as out:
        out.write('{"kind":"step","step":2,"m')
    records, notes = read_lines(file)
    assert [r["step"] for r in records if r["kind"] == "step"] == [0, 1]
    assert notes == ["phases.rank0.jsonl: 1 torn line left out"]
    writer = Writer(file, {"of": "steps", "rank": 0})
    writer.write({**STEP, "step": 2, "ms": 3.0})
    writer.close()
    assert [s["ms"] for s in read_run(tmp_path).steps[0]] == [1.0, 2.0, 3.0]


def test_a_machine_of_many_cores_is_reported(tmp_path: Path) -> None:
    """Its records take more bytes than a text may have."""
    file = tmp_path / "records" / "phases.rank0.jsonl"
    write_steps(file, [1.0, 2.0], limit=1_000)
    os.truncate(file, LARGEST + 1)
    assert len(read_run(tmp_path).steps[0]) == 2


def test_a_small_number_of_the_summary_is_a_number(tmp_path: Path) -> None:
    """YAML takes 1e-05, as JSON writes it, for a word."""
    write_json(tmp_path / "summary.json", {"student": {"lr": 1e-5}})
    assert read_run(tmp_path).summary["student"]["lr"] == 1e-5


def test_a_repeated_step_counts_once_and_the_newest_wins(tmp_path: Path) -> None:
    file = tmp_path / "records" / "phases.rank0.jsonl"
    write_steps(file, [1.0, 2.0, 3.0], limit=100)
    writer = Writer(file, {"of": "steps", "rank": 0})  # resumed from a checkpoint at step 1
    health = Writer(tmp_path / "records" / "health.jsonl", {"of": "health"})
    for step, norm in ((0, 1.0), (2, None)):
        health.write({"kind": "health", "step": step, "grad_norm": norm})
    health.write({"kind": "health", "step": 1, "grad_norm": 2.0})
    for step in (1, 2):
        writer.write({**STEP, "step": step, "ms": 10.0})
        run = read_run(tmp_path)
        assert [s["ms"] for s in run.steps[0]] == [1.0, *[10.0] * step]
        assert [reading["grad_norm"] for reading in run.health] == [1.0, 2.0]
    writer.close()
    health.close()


def test_a_run_that_was_just_resumed_has_not_stalled(tmp_path: Path) -> None:
    file = tmp_path / "records" / "phases.rank0.jsonl"
    write_steps(file, [1.0, 2.0], limit=100)
    assert Series("run", Facts(read_run(tmp_path)))["silent_s"] > 1e9
    Writer(file, {"of": "steps", "rank": 0, "t": time.time()}).close()
    assert Series("run", Facts(read_run(tmp_path)))["silent_s"] < 60


def test_runs_are_read_from_python(tmp_path: Path) -> None:
    run = kd.read_run(str(write_run(tmp_path / "run")))
    assert run.steps[0][0]["p"]["teacher"] > 0 and run.samples["0-host"][0]["mem"] == 40.0
    names = r"config\.yaml, summary\.json, metrics\.csv or records"
    (tmp_path / "empty").mkdir()
    with refuses(rf"empty is no run's folder: it has no {names}$"):
        kd.read_run(tmp_path / "empty")
    with refuses("run folder .*nowhere not found"):
        kd.read_run(tmp_path / "nowhere")


def test_other_runs_of_a_recipe_have_numbers_or_names(tmp_path: Path) -> None:
    for i, name in enumerate(("1000", "999", "first-try", "000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("epoch,step,val/acc1\n0,1,0.5\n")
        os.utime(tmp_path / name / "metrics.csv", (i, i))
    (tmp_path / "latest").symlink_to("000")
    parent = tmp_path.name
    assert [*read_siblings(tmp_path / "000", newest=2)] == [f"{parent}/999", f"{parent}/first-try"]


def test_readings_of_health_are_thinned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full file would be written anew with each of them, in the training's own process."""
    writer = Writer(tmp_path / "health.jsonl", {"of": "health"}, limit=100)
    rewritten: list[Path] = []
    thin = Writer._thin
    monkeypatch.setattr(Writer, "_thin", lambda self: (rewritten.append(self.path), thin(self)))
    for step in range(1000):
        writer.write({"kind": "health", "step": step})
    writer.close()
    records, _ = read_lines(writer.path)
    steps = [record["step"] for record in records if record["kind"] == "health"]
    assert len(records) <= 100 and len(rewritten) < 10
    assert steps[0] == 0, "the first reading says how the weights began"


def test_torn_lines_and_broken_records_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    step = {"kind": "step", "step": 0, "epoch": 0, "t": 1, "ms": 2.0, "p": {"data": 2.0}}
    broken = [{"kind": "step"}, {**step, "p": {"data": "2"}}, {**step, "ms": True}]
    lines = [{"kind": "event", "name": "x"}, {"kind": "header", "of": "x"}, step, *broken]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n[1]\n"x"\n{"kind": "st')
    records, notes = read_lines(file)
    assert [r["kind"] for r in records] == ["header", "step"]
    assert notes == [
        "x.jsonl: 3 torn lines left out",
        "x.jsonl: 3 records left out: a field is missing, or a number is NaN or infinite",
        "x.jsonl: its header is torn: records before the next one are left out",
    ]


def test_a_long_table_of_metrics_is_thinned_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps thin out evenly; each validation stays."""
    monkeypatch.setattr("kd.report.records.MOST_ROWS", 100)
    lines = ["epoch,step,train/loss,val/acc1"]
    for step in range(1000):
        lines.append(f"{step // 100},{step},1.0,")
        if step % 100 == 99:
            lines.append(f"{step // 100},{step},,0.5")
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    metrics = read_results(tmp_path).metrics
    assert len(metrics) < 100
    assert sum("val/acc1" in row for row in metrics) == 10
    steps = [row["step"] for row in metrics if "train/loss" in row]
    gaps = [after - before for before, after in pairwise(steps)]
    assert steps[0] < 40 and steps[-1] > 960 and max(gaps) <= min(gaps) + 2
