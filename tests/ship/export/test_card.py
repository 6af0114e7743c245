"""kd-card: Markdown that the hub's own library reads, from what a run's folder holds."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from kd.cli import main
from tests._files import read_json, write_json
from tests._helpers import Command
from tests._runs import summary_of


def test_a_card_of_a_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    fidelity = read_json(run / "fidelity.json")
    fidelity["per_class"][0]["name"] = "a | b <script>"
    write_json(run / "fidelity.json", fidelity)
    assert main("card", [str(run), "license=apache-2.0", "teacher_license=mit"]) == 0
    assert "kd-card: data_license= not given" in capsys.readouterr().err
    text = (run / "README.md").read_text()
    card = ModelCard(text)
    best = summary_of(run)["student"]["best_val"]
    assert (card.data.license, card.data.pipeline_tag, card.data.library_name) == (
        "apache-2.0", "image-classification", "timm"
    )  # fmt: skip
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert results["accuracy"] == pytest.approx(100 * best["acc1"], abs=0.01)
    for part in (
        "## How to load",
        "KDLoss (temperature 2.0",
        "expected calibration error",
        "## Limits",
    ):
        assert part in text
    assert "a \\| b \\<script\\>" in text and f"{fidelity['agreement']:.1%}" in text
    assert "| teacher | mit |" in text and "| training pictures | not stated |" in text
