"""The page: from any run's folder, in a real browser, without a network; kd-report."""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main, train_main
from kd.report.evaluated import run_table
from kd.report.facts import Facts
from kd.report.html import write_comparison, write_report
from kd.report.records import read_run
from kd.report.rules import Explained
from tests._files import json_lines, write_json, write_lines
from tests._helpers import ROOT, Command
from tests._pages import BROWSER, FLAGS, section, write_run
from tests._runs import run as trained
from tests._runs import run_of, summary_of


def test_an_eight_hour_run_stays_small_and_asks_for_nothing(tmp_path: Path) -> None:
    page = write_report(
        Explained(read_run(write_run(tmp_path / "run", 5_000, 5_000, cores=16, gpus=8))),
        tmp_path / "r.html",
    )
    assert page.stat().st_size < 5e6
    text = page.read_text()
    assert not re.search(r"(src|href)=[\"'](?!data:)", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_text_from_a_run_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    planted = "<!--<script></script><img src=x onerror=alert(1)>"
    (folder / "config.yaml").write_text(f'recipe: "{planted}"\n')
    page = write_report(Explained(read_run(folder)), folder / "report.html").read_text()
    data = re.search(r'id="data">(.*?)</script>', page, re.S).group(1)  # type: ignore[union-attr]
    assert "<" not in data  # a comment that opens a script would swallow the rest of the page
    assert planted in [row[1] for s in json.loads(data)["sections"] for row in s.get("rows", [])]


def test_it_says_what_is_missing_and_shows_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("recipe: demo\n")
    assert report_main([str(tmp_path / "empty")]) == 0
    out = capsys.readouterr()
    assert "the run has no records" in out.err
    assert (tmp_path / "empty" / "report.html").exists()
    folder = write_run(tmp_path / "run")
    steps = folder / "records" / "phases.rank0.jsonl"
    steps.write_bytes(steps.read_bytes()[:-40])
    assert report_main([str(folder)]) == 0
    assert "1 torn line left out" in capsys.readouterr().err
    (folder / "records" / "system.0-host.jsonl").write_text('{"kind": "header", "of": "system"}\n')
    assert report_main([str(folder)]) == 0
    assert "system.0-host.jsonl: 1 record left out" in capsys.readouterr().err


def test_whatever_is_torn_there_is_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file cut anywhere, without its first line, empty, or other than text."""
    folder = write_run(tmp_path / "run", steps=60, samples=40)
    rng = random.Random(0)
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        whole = file.read_bytes()
        cuts = [whole[: rng.randrange(len(whole))] for _ in range(5)]
        for torn in (
            *cuts,
            whole[len(whole) // 3 :],
            whole.partition(b"\n")[2],
            b"",
            b"\xff\x00\n" + whole,
        ):
            file.write_bytes(torn)
            assert report_main([str(folder)]) == 0, (file.name, torn[:200])
            lines = capsys.readouterr().err.splitlines()
            assert all(line.startswith(f"kd-report: {folder}: ") for line in lines)
        file.write_bytes(whole)
    steps = folder / "records" / "phases.rank0.jsonl"
    steps.write_bytes(steps.read_bytes().partition(b"\n")[2])
    assert report_main([str(folder)]) == 0
    assert "phases.rank0.jsonl: its header is torn" in capsys.readouterr().err


def test_the_page_opens_with_what_was_learnt(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = summary_of(folder)
    best = 0.5 + 3 / 400  # of four epochs
    summary["student"]["best_val"] = {"acc1": best, "epoch": 3}
    write_json(folder / "summary.json", summary)
    assert report_main([str(folder)]) == 0
    page = (folder / "report.html").read_text()
    sections = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))["sections"]  # type: ignore[union-attr]
    titles = [s.get("title", s["kind"]) for s in sections]
    of_classes = "Each class's accuracy, the worst first"
    assert titles[:7] == [
        "headline",
        "verdict",
        "cards",
        "demo: 4 epochs in 60.0 min",
        "Training losses, weighted",
        "Validation",
        "How faithful the student is",
    ]
    kept = f"{best / 0.9:.1%}"
    assert sections[0]["text"] == (
        f"The student keeps {kept} of its teacher's acc1 ({best:.1%} of 90.0%), with 7.3% of its parameters"
    )
    tables = {s["title"]: s for s in sections if s["kind"] == "table"}
    assert tables["demo: 4 epochs in 60.0 min"]["rows"] == [
        ["teacher", "vit_large_patch16_224", "300.00 M", "90.0%"],
        ["student, last epoch", "vit_small_patch16_224", "22.00 M", "80.0%"],
        ["student, kept epoch (3)", "vit_small_patch16_224", "22.00 M", f"{best:.1%}"],
    ]
    summary["student"]["best_val"] = {**summary["student"]["val"], "epoch": 4}
    assert [row[0] for row in run_table(summary).rows] == ["teacher", "student, last epoch (kept)"]
    in_mid_epoch = run_table({**summary, "steps": 400})
    assert [row[0] for row in in_mid_epoch.rows][1:] == [
        "student, last epoch",
        "student, kept epoch (4)",
    ]
    assert tables[of_classes]["rows"] == [
        ["bread", 5, "60.0%", "bibimbap 40%"], ["bibimbap", 5, "100.0%", ""]
    ]  # fmt: skip


def test_the_verdict_is_one_line_below_the_headline_with_what_to_change(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert report_main([str(folder)]) == 0
    (verdict,) = section(folder, "verdict")
    assert verdict["folded"]
    assert re.fullmatch(
        r"teacher-bound: the teacher takes \d+ of the step's \d+ ms \(\d+%\); .+x the speed",
        verdict["text"],
    )
    assert not any("teacher-bound" in other for other in verdict["others"])
    (folder / "summary.json").unlink()  # it has ended early: nothing is folded
    assert report_main([str(folder)]) == 0
    assert not section(folder, "verdict")[0]["folded"]


def test_a_page_has_the_name_of_its_run_and_prints_what_is_folded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "food" / "007")
    (tmp_path / "food" / "latest").symlink_to("007")
    assert report_main([str(tmp_path / "food" / "latest")]) == 0
    page = (folder / "report.html").read_text()
    title = re.search("<title>(.*)</title>", page)
    assert title is not None and re.fullmatch(r"\w+/007 - kd", title[1])
    assert '"beforeprint"' in page and "@media print" in page


def test_a_page_is_written_into_a_runs_folder_alone(tmp_path: Path, refusal: Command) -> None:
    folder = write_run(tmp_path / "demo" / "007")
    told = refusal("report", [str(tmp_path / "demo")])
    assert (
        f"{tmp_path / 'demo'} is no run's folder: it has no config.yaml, summary.json, metrics.csv or records"
        in told
    )
    assert f"did you mean {folder}?" in told
    assert not (tmp_path / "demo" / "report.html").exists()
    (folder / "report.html").mkdir()
    assert f"kd-report: {folder / 'report.html'}: is a folder; a file is written there" in refusal(
        "report", [str(folder)]
    )


def test_kd_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    code = (
        "import sys\n"
        "for name in ('torch', 'pytorch_lightning', 'timm', 'numpy'): sys.modules[name] = None\n"
        f"from kd.cli import report_main; sys.exit(report_main([{str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_failed_run_has_its_page_too(recipe: Path) -> None:
    fail = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": 3}})
    assert train_main([f"recipe={recipe}", f"trainer.callbacks+={fail}"]) == 1
    folder = run_of(recipe)
    page = (folder / "report.html").read_text()
    (found,) = section(folder, "verdict")
    assert found["text"].startswith("failed: RuntimeError: planted; until then ")
    assert '"kind":"phases"' in page
    summary = summary_of(folder)
    assert summary["status"] == "failed"
    assert set(summary["verdict"]) >= {"bound", "text", "lever", "predicted_speedup", "phases_ms"}


def test_a_report_that_fails_takes_no_run_down(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("kd.report.html.write_report", broken)
    trained(recipe, "trainer.max_epochs=1")
    assert "no report: KeyError: 'planted'" in capsys.readouterr().err
    assert summary_of(run_of(recipe))["status"] == "done"


PROBE = """
<script>window.problems = []; addEventListener('error', e => problems.push(e.message));
console.error = (...m) => problems.push(m.join(' '));</script>
"""
CHECK = """
<!doctype html><body><pre id="result"></pre><script>
const pages = %s, found = {};
for (const [name, [width, html]] of Object.entries(pages)) {
  const frame = document.createElement('iframe');
  frame.width = width; frame.height = 900; frame.srcdoc = html;
  frame.onload = () => {
    const w = frame.contentWindow, d = w.document, all = q => [...d.querySelectorAll(q)];
    const out = found[name] = { problems: w.problems, inner: w.innerWidth };
    out.overflow = d.documentElement.scrollWidth > w.innerWidth;
    out.wide = all('body *').filter(e => !e.closest('.wide') && e.getBoundingClientRect().right > w.innerWidth + 1).map(e => e.outerHTML.slice(0, 80));
    out.charts = all('.chart').map(c => c.querySelectorAll('rect, polyline[points*=" "]').length);
    out.titles = all('h2').map(h => h.textContent);
    const cells = () => [...table.querySelectorAll('tbody tr')].map(r => r.children[1].textContent);
    const table = all('table').find(t => t.querySelectorAll('th').length >= 4);
    const button = table.querySelectorAll('th button')[1];
    button.click(); out.down = cells(); button.click(); out.up = cells();
    out.verdict = d.querySelector('.verdict').textContent;
    out.paper = w.getComputedStyle(d.body).backgroundColor;
    document.getElementById('result').textContent = JSON.stringify(found);
  };
  document.body.appendChild(frame);
}
</script>
"""  # noqa: E501


def two_pages(folder: Path) -> list[Path]:
    """A run's, and its comparison with another."""
    run, other = read_run(write_run(folder / "a")), read_run(write_run(folder / "b", slow=10))
    return [
        write_report(Explained(run), folder / "r.html"),
        write_comparison([Explained(run), Explained(other)], folder / "c.html"),
    ]


def browsed(page: Path, flag: str) -> subprocess.CompletedProcess[str]:
    """What Chromium shows of a page, and what its console says."""
    with tempfile.TemporaryDirectory() as profile:
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=10000", "--dump-dom",
                   flag, page.as_uri()]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(tmp_path: Path, dark: bool) -> None:
    report, compared = (
        page.read_text().replace("<head>", "<head>" + PROBE) for page in two_pages(tmp_path)
    )
    pages = {
        f"{n} {w}": (w, h)
        for n, h in (("report", report), ("comparison", compared))
        for w in (400, 1400)
    }
    wrapper = tmp_path / "check.html"
    wrapper.write_text(CHECK % json.dumps(pages).replace("</", "<\\/"))
    dom = browsed(wrapper, f"--blink-settings=preferredColorScheme={0 if dark else 1}").stdout
    found = json.loads(
        re.search(r'<pre id="result">(.*?)</pre>', dom, re.S).group(1).replace("&amp;", "&")
    )  # type: ignore[union-attr]
    assert set(found) == set(pages)
    for name, page in found.items():
        assert page["problems"] == [], name
        assert page["inner"] == pages[name][0]
        assert not page["overflow"], name
        assert page["wide"] == [], name
        assert page["charts"], name
        assert min(page["charts"]) > 0, name
        numbers = [float(v) for v in page["down"] if v]
        assert numbers == sorted(numbers, reverse=True)
        assert [float(v) for v in page["up"] if v] == sorted(numbers)
        assert page["paper"] == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
    assert "teacher-bound" in found["report 400"]["verdict"]
    assert {"Phases of a step (ms)", "Cores and GPUs over time (% busy)", "Percentiles"} <= set(
        found["report 1400"]["titles"]
    )


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_browser_s_console_stays_empty_however_narrow_the_page(tmp_path: Path) -> None:
    """A page that is not shown has no width; a width below zero is an error in the console."""
    frames = [
        f'<iframe src="{page.name}" width="{width}"></iframe>'
        for page in two_pages(tmp_path)
        for width in (0, 60, 1400)
    ]
    (tmp_path / "all.html").write_text(
        f"<!doctype html><body>{''.join(frames)}<script>console.log('heard')</script>"
    )
    told = browsed(tmp_path / "all.html", "--enable-logging=stderr").stderr
    said = [line.split("CONSOLE", 1)[1] for line in told.splitlines() if "CONSOLE" in line]
    assert len(said) == 1, said
    assert "heard" in said[0]


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert read_run(folder).summary["status"] == "done"
    steps = folder / "records" / "phases.rank0.jsonl"
    steps.write_text(
        steps.read_text().replace('"max_epochs"', f'"t": {time.time() + 60}, "max_epochs"')
    )
    write_report(Explained(read_run(folder)), folder / "report.html")
    cards = {name: value for name, value, _ in section(folder, "cards")[0]["cards"]}
    assert cards["status"] != "done"
    assert "time left" in cards
    facts = Facts(read_run(folder))
    assert facts.run.summary["wall_s"] and facts.hours == facts.recorded_s / 3600


def test_the_operations_are_the_typical_ranks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    first = (folder / "records" / "kernels.rank0.jsonl").read_text()
    other = first.replace('"of": "kernels"', '"of": "kernels", "rank": 1').replace(
        "aten::op", "aten::other"
    )
    (folder / "records" / "kernels.rank1.jsonl").write_text(other)
    write_report(Explained(read_run(folder)), folder / "report.html")
    (table,) = (t for t in section(folder, "table") if t["title"].startswith("Top operations"))
    assert table["rows"][0][0] == "aten::op0"


def test_the_tasks_own_metric_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "records" / "phases.rank0.jsonl").read_text()
    (folder / "records" / "phases.rank0.jsonl").write_text(
        lines.replace('"batch_size"', '"primary": "miou", "batch_size"')
    )
    rows = [
        "epoch,step,train/loss,val/miou,val/iou_00",
        "0,9,1.0,,",
        "0,9,,0.25,0.9",
        "1,19,,0.5,0.1",
    ]
    (folder / "metrics.csv").write_text("\n".join(rows))
    summary = summary_of(folder)
    summary["teacher"]["val"] = {"miou": 0.75, "pixel_acc": 0.9}
    write_json(folder / "summary.json", summary)
    write_report(Explained(read_run(folder)), folder / "report.html")
    (cards,) = section(folder, "cards")
    assert ["teacher", "75.0%", "val miou, vit_large_patch16_224"] in cards["cards"]
    assert ["student", "50.0%", "val miou, kept epoch, vit_small_patch16_224"] in cards["cards"]
    (chart,) = (c for c in section(folder, "lines") if c["title"] == "Validation")
    assert list(chart["series"]) == ["val/miou"]
    report_main([str(folder), str(folder)])
    (table,) = (
        t for t in section(folder, "table", "comparison.html") if t["title"] == "In numbers"
    )
    assert ["val miou", "0.5", "0.5", "+0.0 points"] in table["rows"]


def test_a_running_runs_page_is_written_while_it_trains(tmp_path: Path) -> None:
    """By ``python -m kd.report``, which the run asks: progress, and it reloads itself; a finished run's page stays."""
    folder = write_run(tmp_path / "demo" / "000", steps=120)
    page = folder / "report.html"
    ask = [sys.executable, "-m", "kd.report", str(folder)]
    subprocess.run(ask, check=True, capture_output=True)
    assert not page.exists()
    (folder / "summary.json").unlink()
    file = folder / "records" / "phases.rank0.jsonl"
    lines = json_lines(file)
    lines = [line | {"t": time.time()} if line["kind"] == "step" else line for line in lines]
    lines[0]["teacher"] = {"arch": "vit_large_patch16_224", "params": 1, "val": {"acc1": 0.8}}
    write_lines(file, lines)
    answer = json.loads(subprocess.run(ask, check=True, capture_output=True).stdout)
    assert answer["verdict"]["bound"] == "teacher" and not answer["failures"]
    assert '"every":10' in page.read_text()
    (cards,) = section(folder, "cards")
    shown = {name: value for name, value, _ in cards["cards"]}
    assert list(shown)[:5] == ["status", "epoch", "step", "time left", "train/loss"]
    assert (shown["status"], shown["step"], shown["teacher"]) == ("running", "120", "80.0%")
    assert shown["epoch"] == "2 of 2" and shown["time left"].endswith((" s", " min"))
