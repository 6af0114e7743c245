"""Instance groups: which machines train, which have GPUs."""

from pathlib import Path

from kd.launch.groups import base, machines


def test_without_a_description_there_is_no_job(tmp_path: Path) -> None:
    assert machines({}, tmp_path / "none.json") is None
    assert base({}) == Path("/opt/ml")
    assert base({"SAGEMAKER_BASE_DIR": "/x"}) == Path("/x")
