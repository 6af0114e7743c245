"""Every command and Python door where each file is mine, a stranger's or missing (:mod:`tests._situations`)."""

from pathlib import Path

import pytest

from tests._stranger import result_of


@pytest.mark.timeout(600)
def test_no_situation_lets_a_stranger_do_anything(tmp_path: Path) -> None:
    """Nor has what is printed a letter that moves the cursor, or a line that a record forges."""
    pytest.importorskip("transformers")
    pytest.importorskip("optuna")
    pytest.importorskip("onnxruntime")
    places = {"KD_CACHE": "cache", "TMPDIR": "temporary", "HF_HOME": "hub"}
    variables = {variable: str(tmp_path / name) for variable, name in places.items()}
    for name in places.values():
        (tmp_path / name).mkdir()
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "temporary" / "inductor")
    result = result_of("_situations", tmp_path / "world", cwd=tmp_path, **variables)
    assert result["count"] > 700
    assert not result["harm"], "\n".join(result["harm"][:20])
    assert not result["crashes"], "\n".join(result["crashes"][:20])
    # a new door takes one of the forms, or gets one: otherwise nothing of it is tried
    assert not {*result["doors"]} - {*result["forms"]}
    assert result["seen_with_trust"], "the net sees what --trust lets happen"
