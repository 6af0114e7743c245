"""The examples run, and teach."""

import ast
import json
import runpy
from pathlib import Path

import pytest

from tests._helpers import ROOT

NOTEBOOK = ROOT / "scripts/examples/distil.ipynb"


def test_models_data_and_trainer_of_ones_own() -> None:
    found = runpy.run_path(str(ROOT / "scripts/examples/own_models.py"))["main"]()
    assert found["teacher"] > 0.9 and found["student"] > 0.8


def test_a_loop_of_ones_own() -> None:
    losses = runpy.run_path(str(ROOT / "scripts/examples/plain_loop.py"))["main"]()
    assert losses[-1] < 0.7 * losses[0]


CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_shows_what_came_out() -> None:
    """And what it imports is there; runs from Python are those of test_api.py."""
    trees = [ast.parse("".join(cell["source"])) for cell in CELLS]
    imports = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    exec(compile(ast.Module(imports, []), NOTEBOOK.name, "exec"), {})
    assert all(cell["outputs"] for cell in CELLS[1:])  # the imports print nothing
    assert any(
        "image/png" in output.get("data", {}) for cell in CELLS for output in cell["outputs"]
    )


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict = {"__name__": "__main__"}
    for cell in CELLS:
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), found)
    assert found["result"].summary["student"]["val"]["acc1"] > 0.5
    assert len(Path("labels.csv").read_text().splitlines()) == 1 + len(found["lost"])
    assert found["logits"].shape == (len(found["lost"]), 20)
