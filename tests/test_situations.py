"""Every command and Python door where each file is mine, a stranger's or missing (:mod:`tests._situations`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests._helpers import ROOT


@pytest.mark.timeout(600)
def test_no_situation_lets_a_stranger_do_anything(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("optuna")
    places = {"KD_CACHE": "cache", "TMPDIR": "temporary", "HF_HOME": "hub"}
    for name in places.values():
        (tmp_path / name).mkdir()
    child = subprocess.run(
        [sys.executable, "-m", "tests._situations", str(tmp_path / "world")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "temporary" / "inductor"),
             **{variable: str(tmp_path / name) for variable, name in places.items()}},
        cwd=tmp_path, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["count"] > 700
    assert not result["harm"], "\n".join(result["harm"][:20])
    assert not result["crashes"], "\n".join(result["crashes"][:20])
    # a new door takes one of the forms, or gets one: otherwise nothing of it is tried
    assert not {*result["doors"]} - {*result["forms"]}
    assert result["seen_with_trust"], "the net sees what --trust lets happen"
