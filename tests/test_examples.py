"""The examples run, and teach."""

import runpy
from pathlib import Path

import pytest

from tests._files import read_json
from tests._helpers import ROOT

NOTEBOOK = ROOT / "scripts/examples/distil.ipynb"


def test_models_data_and_trainer_of_ones_own() -> None:
    found = runpy.run_path(str(ROOT / "scripts/examples/own_models.py"))["main"]()
    assert found["teacher"] > 0.9 and found["student"] > 0.8


def test_a_loop_of_ones_own() -> None:
    losses = runpy.run_path(str(ROOT / "scripts/examples/plain_loop.py"))["main"]()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("cell", read_json(NOTEBOOK)["cells"], ids=lambda cell: cell["id"])
def test_the_notebook_is_kept_without_what_came_out(cell: dict) -> None:
    assert not cell.get("outputs") and cell.get("execution_count") is None


def test_the_notebook_runs_in_a_fresh_kernel(tmp_path: Path) -> None:
    """With fewer pictures; it shows tables, the page, and pictures of mistakes."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("onnxruntime")
    text = NOTEBOOK.read_text().replace("= 40, 15, 3", "= 4, 2, 1")
    notebook = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, resources=resources).execute()
    shown = [
        output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    for content in (
        "<td>student, last epoch",
        "<iframe srcdoc=",
        "<td>student</td>",
        "<th>label_2",
    ):
        assert any(content in page for page in pages), content
    assert any("image/png" in data for data in shown)
    assert (tmp_path / "runs/foodtag_vit/000/export/onnx/model.onnx").is_file()
