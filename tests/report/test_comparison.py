"""Runs side by side: what differs, per device and per device-hour, what it costs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main
from kd.report.records import read_run
from kd.report.rules import Explained
from tests._files import read_yaml, write_json, write_yaml
from tests._helpers import Command
from tests._pages import made, sections_of
from tests._runs import summary_of


def titled(sections: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(section for section in sections if section.get("title") == title)


def verdict_in(sections: list[dict[str, Any]]) -> str:
    return next(section["text"] for section in sections if section["kind"] == "verdict")


def test_it_opens_with_what_came_of_the_runs(tmp_path: Path, prints: Command) -> None:
    before, after = made(tmp_path / "a", 1, 10, 4, "GPU"), made(tmp_path / "b", 1, 5, 4, "GPU")
    for folder, agreement in ((before, 0.5), (after, 0.75)):
        summary = summary_of(folder)
        summary["student"]["best_val"] = {"acc1": agreement, "agreement": agreement}
        write_json(folder / "summary.json", summary)
    why, *table, place = prints("report", [str(before), str(after)]).splitlines()
    assert "images/s before" in why
    assert "Settings that differ: None." in table
    shown = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in table if line[0] == "│"}
    assert [cell.strip() for cell in shown["hours"]] == ["10", "5", "0.50x"]
    assert [cell.strip() for cell in shown["val agreement"]] == ["0.5", "0.75", "+25.0 points"]
    assert place == f"written to {after / 'comparison.html'}"
    sections = sections_of(after / "comparison.html")
    titles = [section.get("title", section["kind"]) for section in sections]
    assert titles[:5] == ["verdict", "In numbers", "Settings that differ", "train/loss", "val/acc1"]
    _, numbers, _, loss, _ = sections[:5]
    assert set(loss["series"]) == {"demo/a", "demo/b"}  # one axis, in epochs of both
    rows = {row[0]: row[1:] for row in numbers["rows"]}
    assert rows["val agreement"] == ["0.5", "0.75", "+25.0 points"]
    assert rows["parameters (M)"] == ["22", "22", "1.00x"]


def test_runs_of_one_name_are_told_apart_and_their_pictures_compared(
    tmp_path: Path, prints: Command
) -> None:
    first, second = tmp_path / "first" / "000", tmp_path / "second" / "000"
    for folder, root in ((first, "own"), (second, "split")):
        folder.parent.mkdir()
        made(folder, 1, 10, 4, "GPU")
        config = read_yaml(folder / "config.yaml")
        config["data"] = {"source": {"class_path": "ImageFolder", "init_args": {"root": root}}}
        write_yaml(folder / "config.yaml", config)
    lines = prints("report", [str(first), str(second)]).splitlines()
    assert lines[1].startswith("they have different data.source: ")
    page = sections_of(second / "comparison.html")
    assert str(first) in titled(page, "In numbers")["columns"]


def test_a_run_without_an_accuracy_is_compared_by_its_time(tmp_path: Path, prints: Command) -> None:
    """A training that is not kd's has no validation of kd's: nothing is said of it."""
    before, after = made(tmp_path / "a", 1, 10, 4, "GPU"), made(tmp_path / "b", 1, 5, 4, "GPU")
    for folder in (before, after):
        (folder / "summary.json").unlink()
        (folder / "metrics.csv").unlink()
    out = prints("report", [str(before), str(after)])
    assert "val acc1" not in out
    assert re.search(r"hours +│ +[\d.]+ │ +[\d.]+ │ +[\d.]+x", out)


def test_the_page_of_one_run_is_written_and_its_verdict_is_printed(
    tmp_path: Path, prints: Command
) -> None:
    folder = made(tmp_path / "a", 1, 10, 4, "GPU")
    *findings, verdict, place = prints("report", [str(folder)]).splitlines()
    explained = Explained(read_run(folder))
    assert verdict == f"{explained.verdict['text']} (report.html)"
    rules = [finding.rule for finding in explained.findings]
    assert [line.split(":")[0] for line in findings] == rules
    assert place == f"written to {folder / 'report.html'}"


def test_kts_two_runs_are_28x_and_per_gpu_hour_1_75x(tmp_path: Path) -> None:
    """2 x A100-80: 40 days for 300 epochs; 32 x A100-40: 24 h for 210 epochs. Sixteen of the 28 are more GPUs."""
    before = made(tmp_path / "a", 2, 960, 300, "NVIDIA A100-SXM4-80GB")
    after = made(tmp_path / "b", 32, 24, 210, "NVIDIA A100-SXM4-40GB")
    assert report_main([str(before), str(after)]) == 0
    sections = sections_of(after / "comparison.html")
    text = verdict_in(sections)
    assert ["trainer.devices", "2", "32"] in titled(sections, "Settings that differ")["rows"]
    assert (
        "3.2 hours an epoch before, 0.114 after: 28.0x faster on 16x the devices, 1.75x per device-hour"
        in text
    )
    rows = {row[0]: row[1:] for row in titled(sections, "In numbers")["rows"]}
    assert rows["hours"] == ["960", "24", "0.025x"]
    assert rows["epochs"] == ["300", "210", "0.70x"]
    assert rows["hours per epoch"] == ["3.2", "0.1143", "0.036x"]
    assert rows["devices"] == ["2", "32", "16.00x"]
    assert rows["device-hours per epoch"] == ["6.4", "3.657", "0.57x"]
    assert {"images/s", "step p99 (ms)", "data (ms)"} <= set(rows)
    assert {"GPU p50 (%)", "GPU p90 (%)", "GPU p95 (%)", "GPU p99 (%)"} <= set(rows)
    titles = [s.get("title", "") for s in sections]
    assert sum(title.startswith("Cores and GPUs over time") for title in titles) == 2
    curve = next(s for s in sections if s.get("title") == "val/acc1")
    assert set(curve["series"]) == {"demo/a", "demo/b"}


def test_accuracy_differs_in_points_and_cost_by_price(tmp_path: Path) -> None:
    before = made(tmp_path / "a", 1, 10, 4, "GPU", price_per_hour=3.0)
    after = made(tmp_path / "b", 1, 5, 4, "GPU", price_per_hour=4.0)
    metrics = (after / "metrics.csv").read_text() + "4,499,,,0.6,0.9\n"
    (after / "metrics.csv").write_text(metrics)
    assert report_main([str(before), str(after)]) == 0
    sections = sections_of(after / "comparison.html")
    rows = {row[0]: row[1:] for row in titled(sections, "In numbers")["rows"]}
    gained = 100 * (0.6 - float(rows["val acc1"][0]))
    assert rows["val acc1"][2] == f"{gained:+.1f} points"
    assert rows["cost"] == ["30", "20", "0.67x"]
    step_ms = sum(float(row[0]) for name, row in rows.items() if re.fullmatch(r"\w+ \(ms\)", name))
    cost, _, change = rows["cost per 1000 steps"]
    assert float(cost) == pytest.approx(3.0 * step_ms / 3600, rel=1e-3)
    assert change == "1.33x"


def test_three_runs_are_side_by_side(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, 1, 1, 4, "GPU") for name in ("a", "b", "c")]
    assert report_main([str(folder) for folder in folders]) == 0
    sections = sections_of(folders[2] / "comparison.html")
    assert titled(sections, "In numbers")["columns"] == ["", "demo/a", "demo/b", "demo/c"]
    assert titled(sections, "Settings that differ")["rows"] == []


def test_a_run_of_kd_and_another_training_are_compared_by_what_both_have(
    tmp_path: Path, prints: Command
) -> None:
    """Measured: 148 settings "differed" since kd.Monitor knows none of them; times were not those of the own tables."""
    own = made(tmp_path / "demo" / "a", 1, 10, 4, "GPU")
    other = made(tmp_path / "mine" / "b", 1, 10, 4, "GPU")
    settings = {"max_epochs": 3, "max_steps": -1, "precision": "auto", "devices": "auto"}
    config = {"recipe": "demo", "seed": 0, "data": {"img_size": 64}, "trainer": settings}
    write_json(own / "config.yaml", config)
    as_watched = {"max_epochs": 2, "max_steps": -1, "precision": "32-true", "devices": 1}
    write_json(other / "config.yaml", {"trainer": as_watched, "module": {"width": 4}})
    phases = other / "records" / "phases.rank0.jsonl"
    header, *lines = phases.read_text().splitlines()
    watched = json.loads(header) | {"of_kd": False}
    renamed = [
        line.replace('"student"', '"forward"').replace('"teacher"', '"rest"') for line in lines
    ]
    phases.write_text("\n".join([json.dumps(watched), *renamed]) + "\n")
    (other / "metrics.csv").unlink()
    for folder, seconds in ((own, 15.6), (other, 31.2)):  # the records explain more: 400 steps
        summary = summary_of(folder)
        summary |= {"wall_s": seconds, "precision": "32-true", "strategy": "SingleDeviceStrategy"}
        if folder == other:
            del summary["student"], summary["teacher"], summary["recipe"]
        write_json(folder / "summary.json", summary)
    keys = {"trainer.max_epochs", "trainer.precision", "trainer.devices"}  # those that both have
    for pair in ([own, other], [other, own]):
        assert "teacher" not in prints("report", [str(folder) for folder in pair]).splitlines()[0]
        sections = sections_of(pair[-1] / "comparison.html")
        hours = next(row for row in titled(sections, "In numbers")["rows"] if row[0] == "hours")
        assert sorted(map(float, hours[1:3])) == [0.004333, 0.008667]
        differing = titled(sections, "Settings that differ")
        assert {row[0] for row in differing["rows"]} == keys
        values = ["3", "2"] if pair[0] == own else ["2", "3"]
        assert ["trainer.max_epochs", *values] in differing["rows"]
