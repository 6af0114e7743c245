"""Pages that follow a run while it trains."""

import json
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main
from kd.report.live import Live
from tests._pages import BROWSER, FLAGS, write_run


def still_trains(folder: Path) -> Path:
    """As it is before the end: no summary, steps of this minute."""
    write_run(folder, steps=120)
    (folder / "summary.json").unlink()
    steps = folder / "records" / "phases.rank0.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    lines = [line | {"t": time.time()} if line["kind"] == "step" else line for line in lines]
    lines[0]["teacher"] = {"arch": "vit_large_patch16_224", "params": 1, "val": {"acc1": 0.8}}
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def one_more_step(folder: Path, step: int) -> None:
    with (folder / "records" / "phases.rank0.jsonl").open("a") as out:
        record = {
            "kind": "step",
            "step": step,
            "epoch": 1,
            "t": time.time(),
            "ms": 100.0,
            "p": {"student": 100.0},
        }
        out.write(json.dumps(record) + "\n")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    still_trains(tmp_path / "demo" / "000")
    with Live(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode()


def cards(address: str) -> dict[str, str]:
    sections = json.loads(get(f"{address}?json"))["sections"]
    return {
        name: value for name, value, _ in next(s for s in sections if s["kind"] == "cards")["cards"]
    }


def test_runs_are_listed_and_each_is_followed(live: Live) -> None:
    (table,) = json.loads(get(f"{live.address}?json"))["sections"]
    assert table["columns"][:6] == ["run", "status", "epoch", "time left", "student", "teacher"]
    (row,) = table["rows"]
    assert row[:3] == ["demo/000", "running", "2 of 2"]
    assert row[3].endswith((" s", " min"))
    assert row[4].startswith("acc1 ") and row[5] == "80.0%"
    run = f"{live.address}demo/000"
    before = cards(run)
    assert before["status"] == "running"
    assert before["step"] == "120"
    assert {"train/loss", "student", "images/s"} <= set(before)
    assert list(before)[:5] == ["status", "epoch", "step", "time left", "train/loss"]
    assert before["teacher"] == "80.0%"
    one_more_step(live.folder / "demo" / "000", 120)
    assert cards(run)["step"] == "121"


def test_a_failed_run_is_listed_with_its_error(live: Live) -> None:
    failed = live.folder / "demo" / "001"
    write_run(failed, steps=120)
    summary = json.loads((failed / "summary.json").read_text())
    summary |= {"status": "failed", "error": "RuntimeError: planted\nmore"}
    (failed / "summary.json").write_text(json.dumps(summary))
    (table,) = json.loads(get(f"{live.address}?json"))["sections"]
    (row,) = (row for row in table["rows"] if row[0] == "demo/001")
    assert row[1] == "failed"
    assert row[-1].startswith("failed: RuntimeError: planted; until then ")


def test_nothing_else_is_served(live: Live) -> None:
    (live.folder / "demo" / "secret").mkdir()
    for name in ("demo/001", "demo/secret", "../", "demo/000/config.yaml", "%2e%2e/%2e%2e/etc"):
        with pytest.raises(urllib.error.HTTPError):
            get(live.address + name)
    with pytest.raises(urllib.error.HTTPError):  # a page elsewhere that calls itself us
        get(live.address, Host="evil.example:80")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_an_open_page_follows_the_run(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on between the page and its first look for news."""
    folder, asked, content = live.folder / "demo" / "000", list[str](), live.content

    def and_the_run_goes_on(name: str) -> dict[str, Any] | None:
        asked.append(name)
        if asked.count("demo/000") == 2:
            one_more_step(folder, 777)
        return content(name)

    monkeypatch.setattr(live, "content", and_the_run_goes_on)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            str(BROWSER),
            *FLAGS,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=20000",
            "--dump-dom",
        ]
        dom = subprocess.run(
            [*command, f"{live.address}demo/000"], capture_output=True, text=True, timeout=240
        ).stdout
    assert asked.count("demo/000") > 2
    assert "<span>step</span><b>778</b>" in dom
    assert len(re.findall("<svg", dom)) > 5


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_main(["--live", str(tmp_path / "nowhere")]) == 2
    assert (
        f"--live takes one folder, of runs or of a run, got {tmp_path / 'nowhere'}"
        in capsys.readouterr().err
    )
    assert report_main(["--live", str(tmp_path), "port=much"]) == 2
    assert "port: must be a whole number, got 'much'" in capsys.readouterr().err
    assert report_main(["--live", str(tmp_path), "prot=80"]) == 2
    assert "no key 'prot' (it takes port=); did you mean 'port'?" in capsys.readouterr().err
    assert report_main(["--live"]) == 2


def test_runs_with_names_are_listed_and_a_file_may_go_meanwhile(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    still_trains(live.folder / "demo" / "first-try")
    (live.folder / "demo" / "latest").symlink_to("first-try")
    content = live.content("")
    assert content is not None
    assert sorted(row[0] for row in content["sections"][0]["rows"]) == [
        "demo/000",
        "demo/first-try",
    ]

    part, glob = live.folder / "demo" / "000" / "metrics.csv.part", Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [*glob(self, pattern), *[part] * (pattern == "*.*")]
    )
    assert live.content("demo/000") is not None
