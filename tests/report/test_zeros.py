"""Zeros, gaps and NaN in the records: the page is whole, and what can't be worked out is named and takes nothing along.

``RuleThatFails`` and the drawn records stand for what nobody has thought of; the last test keeps new code to it.
"""

import ast
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kd.report import limits, rules
from kd.report.__main__ import __file__ as report_main_file
from kd.report.facts import Facts
from kd.report.html import _drawn, write_comparison, write_report
from kd.report.ratio import MOST
from kd.report.records import PHASES, RunRecords, read_run
from kd.report.rules import Explained
from kd.report.sections import PAGE, report
from kd.report.step_facts import known_utilisation
from tests._files import write_json, write_lines

VALUES = (0, 0.0, 1, 2.5, 100.0, 1e-12, 1e9)
STEPS = 40


def header(draw: random.Random, gpu: bool) -> dict[str, Any]:
    whole = {
        "of": "steps", "rank": 0, "world_size": 1, "host": "a", "device": "cuda" if gpu else "cpu", "cores": 8,
        "core_ids": [0, 1], "threads": 1, "batch_size": 8, "num_workers": 2, "processes": 1, "accumulate": 1, "t": 0.0,
        "batches_per_epoch": 5, "max_epochs": 2, "max_steps": -1, "primary": "acc1", "precision": "bf16-mixed",
        "bfloat16_time": 3.0, "val": 4, "price_per_hour": 3.0, "prices": {"on demand": 3.0},
    }  # fmt: skip
    counts = ("cores", "threads", "batch_size", "num_workers", "processes", "batches_per_epoch", "max_epochs", "val",
              "world_size", "bfloat16_time", "accumulate", "price_per_hour")  # fmt: skip
    for name in draw.sample(counts, 4):
        whole[name] = 0
    return whole


def records(folder: Path, draw: random.Random, gpu: bool, steps: int) -> Path:
    """A run's folder with numbers drawn from :data:`VALUES`; every third phase is all of the step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "trainer: {max_epochs: 2}\nmodel: {teacher: {cache: 'off'}}\n"
    )
    only = draw.choice(PHASES)
    lines = [{"kind": "header", "schema": 1, **header(draw, gpu)}]
    total: dict[str, float] = {}
    for number in range(steps):
        phases = {name: draw.choice(VALUES) for name in draw.sample(PHASES, 4)}
        phases = {only: draw.choice((0.0, 5.0))} if draw.random() < 0.5 else phases
        total = {name: total.get(name, 0.0) + phases.get(name, 0.0) for name in PHASES}
        lines.append({"kind": "step", "step": number, "epoch": number // 5, "t": float(number),
                      "ms": sum(phases.values()), "p": phases,
                      "host_ms": 0.0, "ready_ms": 0.0, "data_cpu_ms": 0.0, "launch_ms": 9.0})  # fmt: skip
    counted = {
        "kind": "total",
        "steps": max(0, steps - 1),
        "p": total,
        "ms": 0.0,
        "own_ms": 1.0,
        "launch_ms": 900.0,
    }
    lines.append(counted | {name: draw.choice(VALUES) for name in ("ready_ms", "data_cpu_ms")})
    lines.append(
        {"kind": "event", "name": "startup", "s": draw.choice((0, 100.0)), "parts": {"imports": 0}}
    )
    write(folder / "records" / "phases.rank0.jsonl", lines)
    machine = [{"kind": "header", "schema": 1, "of": "system", "node": "0-a", "core_ids": [0, 1]}]
    for number in range(steps):
        sample = {
            "kind": "sample",
            "t": float(number),
            "cpu": [0.0, 100.0],
            "mem": 0.0,
            "main": 0.0,
            "workers": [],
        }
        reading = draw.choice(({"util": 0, "mem": 0.0}, {"mem": 1.0}, {}))
        machine.append(sample | ({"gpu": [reading, reading]} if gpu else {}))
    write(folder / "records" / "system.0-a.jsonl", machine)
    zero = {"kind": "health", "step": 0, "grad_norm": 0.0, "update_ratio": 0.0, "spread": {"a": 0.0, "b": None},
            "zeros": {"a": 0.0}, "dead": {}, "loss_shares": {"kd": 0.0, "task": 0.0}}  # fmt: skip
    write(
        folder / "records" / "health.jsonl", [{"kind": "header", "schema": 1, "of": "health"}, zero]
    )
    mixed = {"kind": "classification", "pictures": 0, "score": "accuracy", "ece": {"student": 0.0}, "reliability": {},
             "per_class": [{"name": "a", "count": 0, "student": 0.0}],
             "confusions": [{"is": "a", "called": "b", "student": 0, "teacher": 0}]}  # fmt: skip
    write_json(folder / "fidelity.json", mixed)
    losses = "".join(
        f"{number // 5},{number},{draw.choice(('0', 'nan', '1e30'))},0.0\n"
        for number in range(steps)
    )
    (folder / "metrics.csv").write_text("epoch,step,train/loss,val/acc1\n" + losses)
    val = {"acc1": 0.0}
    student = {"arch": "s", "params": 0, "val": val, "best_val": {"acc1": 0.0, "epoch": 0}}
    summary = {"status": draw.choice(("done", "failed")), "student": student, "epochs": 0, "world_size": 0,
               "teacher": {"arch": "t", "params": 0, "val": val}, "error": ""}  # fmt: skip
    write_json(folder / "summary.json", summary)
    return folder


def write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    write_lines(file, lines)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, STEPS])
def test_zeros_make_a_whole_page_without_a_failure(tmp_path: Path, gpu: bool, steps: int) -> None:
    for seed in range(25):
        run = read_run(records(tmp_path / str(seed), random.Random(seed), gpu, steps))
        explained = Explained(run)
        sections = [_drawn(s) for s in report(explained)]
        assert explained.failures == [], (seed, explained.failures)
        assert {"verdict", "cards"} <= {section["kind"] for section in sections}
        assert explained.verdict["text"] and "nan" not in explained.verdict["text"]
        assert all(limit.gain is None or 0 < limit.gain <= MOST for limit in explained.limits)
        write_report(explained, tmp_path / "report.html")
        write_comparison([Explained(run), Explained(run)], tmp_path / "comparison.html")


def test_records_that_lack_a_field_or_hold_nan_are_left_out_and_counted(tmp_path: Path) -> None:
    """Each field of each line, taken away or replaced: the page is made every time."""
    whole = records(tmp_path / "whole", random.Random(0), True, 3)
    for file in sorted((whole / "records").glob("*.jsonl")):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            for name in json.loads(line):
                for bad in ({}, {name: float("nan")}, {name: None}, {name: "text"}, {name: []}):
                    left = {k: v for k, v in json.loads(line).items() if k != name}
                    changed = [*lines[:number], json.dumps({**left, **bad}), *lines[number + 1 :]]
                    file.write_text("\n".join(changed) + "\n")
                    explained = Explained(read_run(whole))
                    kinds = {section["kind"] for section in [_drawn(s) for s in report(explained)]}
                    assert {"verdict", "table"} <= kinds, (
                        file.name,
                        number,
                        name,
                        bad,
                        explained.failures,
                    )
        file.write_text("\n".join(lines) + "\n")


def test_a_rule_a_limit_and_a_section_that_fail_are_named_and_take_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("division by zero")

    run = read_run(records(tmp_path / "run", random.Random(1), False, STEPS))
    before = Explained(run)
    kinds, findings = (
        [section["kind"] for section in [_drawn(s) for s in report(before)]],
        before.findings,
    )
    for name in rules.RULES:
        with monkeypatch.context() as patch:
            patch.setitem(rules.RULES, name, replace(rules.RULES[name], judge=fails))
            explained = Explained(run)
            assert [f.rule for f in explained.findings] == [
                f.rule for f in findings if f.rule != name
            ]
            assert all(f"rule {name} can't" in text for text in explained.failures)
    for name in rules.LIMITS:
        with monkeypatch.context() as patch:
            patch.setitem(rules.LIMITS, name, fails)
            explained = Explained(run)
            assert explained.verdict["text"]
            assert explained.failures == [
                f"limit {name} can't be worked out: ZeroDivisionError: division by zero"
            ]
    monkeypatch.setitem(PAGE, "cores", fails)
    explained = Explained(run)
    sections = [_drawn(s) for s in report(explained)]
    assert {section["kind"] for section in sections} >= set(kinds) - {"heat"}
    (notes,) = [section["notes"] for section in sections if section["kind"] == "notes"]
    assert notes == ["section cores can't be worked out: ZeroDivisionError: division by zero"]


def test_a_gpu_that_reads_0_percent_is_unknown_and_not_idle() -> None:
    total = {"kind": "total", "steps": 50, "p": {"student": 500.0}, "launch_ms": 490.0}
    header = {"rank": 0, "device": "cuda"}
    for readings, busy in (
        ([{"util": 0}], None),
        ([{}], None),
        ([{"util": 40}], 0.4),
        ([{"util": 0}, {"util": 40}], 0.2),
    ):
        samples: Any = [{"t": 0.0, "cpu": [1.0], "mem": 1.0, "gpu": readings}]
        facts = Facts(
            RunRecords(Path(), headers={0: header}, totals={0: total}, samples={"a": samples})
        )
        assert facts.gpu_busy == (None if busy is None else pytest.approx(busy))
        limit = limits.launch_bound(facts)
        assert (limit is None) == (busy is None)
        assert known_utilisation(samples) == (
            [] if busy is None else [reading["util"] for reading in readings]
        )


GUARDED = ("limits", "facts", "step_facts", "rules", "judges", "series", "sections", "charts", "comparison",
           "learning", "tables")  # fmt: skip


@pytest.mark.parametrize("name", GUARDED)
def test_nothing_is_divided_by_a_variable_outside_the_guarded_functions(name: str) -> None:
    tree = ast.parse((Path(report_main_file).parent / f"{name}.py").read_text())
    divisions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.AugAssign)
                 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)]  # fmt: skip
    by_variables = [ast.unparse(node) for node in divisions if not _is_constant(node)]
    assert [text for text in by_variables if "folder" not in text] == []  # those join a path


def _is_constant(node: Any) -> bool:
    over = node.value if isinstance(node, ast.AugAssign) else node.right
    if isinstance(over, ast.BinOp):
        return all(
            isinstance(part, ast.Constant | ast.Name) for part in (over.left, over.right)
        ) and isinstance(over.left, ast.Constant)
    return isinstance(over, ast.Constant) or (isinstance(over, ast.Name) and over.id.isupper())
