"""Helpers that are pure functions, one call each."""

from kd.launch.groups import has_gpus
from kd.launch.sagemaker import _as_text, folder_of


def test_has_gpus() -> None:
    assert has_gpus("ml.p4d.24xlarge")
    assert has_gpus("g5.xlarge")
    assert not has_gpus("ml.c5.18xlarge")
    assert has_gpus("local") is None


def test_as_text() -> None:
    assert _as_text("0.1") == "0.1"
    assert _as_text(0.1) == "0.1"
    assert _as_text('"tiny"') == "tiny"
    assert _as_text("tiny") == "tiny"
    assert _as_text({"a": True}) == '{"a": true}'


def test_folder_of() -> None:
    assert folder_of("channel:train/photos", {"SM_CHANNEL_TRAIN": "/data"}) == "/data/photos"
