"""Instance groups: which machines train, which have GPUs."""

from pathlib import Path

from kd.launch.groups import base, has_gpus, machines


def test_without_a_description_there_is_no_job(tmp_path: Path) -> None:
    assert machines({}, tmp_path / "none.json") is None
    assert base({}) == Path("/opt/ml")
    assert base({"SAGEMAKER_BASE_DIR": "/x"}) == Path("/x")


def test_gpus_by_the_family_of_an_instance() -> None:
    kinds = {
        "ml.p5.48xlarge": True,
        "ml.g6e.xlarge": True,
        "ml.m7i.large": False,
        "ml.trn1.2xlarge": False,
    }
    assert {name: has_gpus(name) for name in kinds} == kinds
    assert has_gpus("my-machine") is None
