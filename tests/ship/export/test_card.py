"""kd-card: Markdown that the hub's own library reads, from what a run's folder holds."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from kd.cli import main


def test_a_card_of_a_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    fidelity = json.loads((run / "fidelity.json").read_text())
    fidelity["per_class"][0]["name"] = "a | b <script>"
    (run / "fidelity.json").write_text(json.dumps(fidelity))
    assert main("card", [str(run), "license=apache-2.0", "teacher_license=mit"]) == 0
    assert "kd-card: data_license= not given" in capsys.readouterr().err
    text = (run / "README.md").read_text()
    card = ModelCard(text)
    best = json.loads((run / "summary.json").read_text())["student"]["best_val"]
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
    assert main("card", [str(run), "licence=mit"]) == 2
    assert (
        "no key 'licence' (it takes license=, teacher_license=, data_license=, out=)"
        in capsys.readouterr().err
    )


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("card", [str(tmp_path)]) == 2
    assert "is no finished run" in capsys.readouterr().err
