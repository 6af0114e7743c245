"""What is kept about a student counts for the weights that it was made from: every reader compares them."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from kd.cli import main
from kd.errors import UserError
from kd.fleet.tuning.plan import SearchObjective
from kd.report.card import card
from kd.report.records import RunRecords, read_run
from kd.report.tables import results_of
from kd.ship.cascade_rule import read_rule
from kd.ship.timed_exports import runtimes_of
from kd.storage import of_weights
from kd.storage.of_weights import (
    CASCADE,
    EXPORTS,
    LATENCY,
    export_at,
    write_of_weights,
)
from scripts.house import tree_of
from tests._helpers import ROOT, other_weights
from tests._pages import CASCADE as CURVE

Read = Callable[[RunRecords], object]


ONNX = {"to": "onnx", "kept": True, "int8": False, "file": "summary.json", "size_mb": 4.0,
        "agreement": 1.0, "max_difference": 0.0}  # fmt: skip
ROW = {"model": "student", "runtime": "torch", "threads": 1, "batch": 1, "median_ms": 1.0, "p95_ms": 1.0,
       "images_per_s": 1.0}  # fmt: skip
RULE = {**CURVE, "threshold": 0.5, "asked": 2, "pictures": 9, "scores": [0.5] * 101,
        "chosen": {"accuracy": 1, "share": 1}, "share_interval": [0, 1], "checked": {"pictures": 1, "accuracy": 1,
        "teacher": 1, "share": 1, "ms": 1}}  # fmt: skip
PARTS = {"parts": [{"kind": "table", "title": "", "columns": [""], "rows": [["not worse"]]}]}
CERTIFICATE = "tables/certificate_test.json"
READERS: dict[str, tuple[str, dict, Read]] = {
    "kd-serve": (EXPORTS, {"onnx": ONNX}, lambda run: export_at(run.folder, "onnx", print)),
    "kd-latency": (
        EXPORTS,
        {"onnx": ONNX},
        lambda run: "onnx" in runtimes_of(run.folder, None, lambda _: True),
    ),
    "kd-tune times": (
        LATENCY,
        {"rows": [ROW]},
        lambda run: SearchObjective("latency_ms", False).value(run.folder),
    ),
    "page tables": (CERTIFICATE, PARTS, lambda run: results_of(run.folder, run.notes.append)),
    "kd-card tables": (CERTIFICATE, PARTS, lambda run: "not worse" in card(run)),
    "kd-serve defer": (CASCADE, RULE, lambda run: read_rule(run.folder)),
}
"""Who reads: the file, what it holds, and what the reader makes of it, empty where the file does not count."""


@pytest.mark.parametrize("reader", READERS)
def test_what_was_made_from_older_weights_is_left_out_and_named(
    reader: str, with_test: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, read = READERS[reader]
    run = RunRecords(with_test)
    write_of_weights(with_test, name, content)
    assert read(run)
    assert not run.notes
    other_weights(with_test)
    reason = f"{name} is left out: it was made from other weights than the student has now"
    try:
        assert not read(run)
    except (UserError, KeyError) as error:  # of a rule; of a trial that was not timed
        run.notes.append(str(error))
    printed = capsys.readouterr()
    assert reason in " ".join([*run.notes, *read_run(with_test).notes, *printed])


def test_kd_serve_exports_anew_of_other_weights(with_test: Path, tmp_path: Path) -> None:
    """And the exports of a run that was moved stay its own."""
    pytest.importorskip("onnxscript")
    from kd.commands.serve import _model
    from kd.run.request import translate

    assert main("export", [str(with_test), "to=onnx"]) == 0
    before = (with_test / "export" / "onnx" / "model.onnx").read_bytes()
    run = with_test.rename(tmp_path / "moved")
    file = _model(translate([str(run)]), False)
    assert file.is_relative_to(run)
    assert file.read_bytes() == before
    other_weights(run)
    assert _model(translate([str(run)]), False).read_bytes() != before


NAMES = {value for key, value in vars(of_weights).items() if key.isupper() and key != "WEIGHTS"}
WRITTEN = {
    "kd.commands.export": "EXPORT",
    "kd.run.open": "EXPORT",
    "kd.run.labels_alone": "LABELS_ALONE",
}
"""Modules that write below a folder of these: they join a path themselves."""
OTHERS = {
    "kd.ship.export.formats.cascade": "cascade.json",
    "kd.commands.train": "labels_alone",
    "kd.run.labels_alone": "labels_alone",
}
"""Modules with another thing of the same name: the rule beside two exported models, the setting ``labels_alone``."""


def paths_in(tree: ast.Module) -> set[str]:
    """Names of the files that a module spells, or joins to a path, by itself."""
    own = set()
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == of_weights.__name__:
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            joined = node.right
            if isinstance(joined, ast.Name) and imported.get(joined.id, "").isupper():
                own.add(imported[joined.id])
            elif isinstance(joined, ast.Constant) and joined.value == of_weights.EXPORT:
                own.add(joined.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.rpartition("/")[2]
            names = {Path(name).name for name in NAMES} - {of_weights.EXPORT}
            if text in names - {of_weights.EVALUATION} or text.startswith("eval_*"):
                own.add(text)
        if isinstance(node, ast.JoinedStr) and node.values:
            first = node.values[0]
            if isinstance(first, ast.Constant) and str(first.value).endswith("eval_"):
                own.add("eval_")
    return own


def test_no_reader_goes_round_the_comparison() -> None:
    found = {}
    for file in sorted((ROOT / "kd").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        own = paths_in(tree_of(file)) - {WRITTEN.get(module), OTHERS.get(module)}
        if own and module != of_weights.__name__:
            found[module] = own
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        'mapping_of(run / "export" / "latency.json")',
        'mapping_of(run / f"eval_{split}.json")',
        'run.glob("eval_*.json")',
        "from kd.storage.of_weights import CASCADE as C\nread(run / C)",
        '(run / "export").iterdir()',
    ],
)
def test_a_reader_that_goes_round_it_is_found(text: str) -> None:
    assert paths_in(ast.parse(text))
