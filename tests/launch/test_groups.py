"""Instance groups: which machines train, which have GPUs."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.launch.groups import base, has_gpus, machines


def described(tmp_path: Path, groups: dict[str, tuple[str, list[str]]], here: str) -> Path:
    import json

    listed = [
        {"instance_group_name": n, "instance_type": t, "hosts": h} for n, (t, h) in groups.items()
    ]
    file = tmp_path / "resourceconfig.json"
    hosts = [host for _, names in groups.values() for host in names]
    file.write_text(json.dumps({"current_host": here, "hosts": hosts, "instance_groups": listed}))
    return file


def test_the_training_group_is_known_by_its_name(tmp_path: Path) -> None:
    file = described(tmp_path, {"gpu-train": ("ml.p4d.24xlarge", ["algo-2", "algo-1"]),
                                "cpu-data": ("ml.c5.18xlarge", ["algo-3"])}, "algo-3")  # fmt: skip
    found = machines({}, file)
    assert found is not None
    assert (found.train, found.data, found.here) == (["algo-1", "algo-2"], ["algo-3"], "algo-3")


def test_without_a_description_there_is_no_job(tmp_path: Path) -> None:
    assert machines({}, tmp_path / "none.json") is None
    assert base({}) == Path("/opt/ml")
    assert base({"SAGEMAKER_BASE_DIR": "/x"}) == Path("/x")


@pytest.mark.parametrize(("groups", "message"), [
    ({"a": ("ml.p4d.24xlarge", ["algo-1"]), "b": ("ml.p4d.24xlarge", ["algo-2"])}, "KD_ROLE"),
    ({"train": ("ml.c5.18xlarge", ["algo-1"]), "data": ("ml.p4d.24xlarge", ["algo-2"])}, "has no GPU"),
])  # fmt: skip
def test_groups_that_do_not_say_which_trains_are_refused(
    tmp_path: Path, groups: dict[str, tuple[str, list[str]]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        machines({}, described(tmp_path, groups, "algo-1"))


def test_contradictions_name_both_sides(tmp_path: Path) -> None:
    file = described(tmp_path, {"train": ("ml.g5.xlarge", ["algo-1"])}, "algo-1")
    with pytest.raises(UserError, match="SM_HOSTS: algo-9"):
        machines({"SM_HOSTS": '["algo-9"]'}, file)


def test_gpus_by_the_family_of_an_instance() -> None:
    kinds = {
        "ml.p5.48xlarge": True,
        "ml.g6e.xlarge": True,
        "ml.m7i.large": False,
        "ml.trn1.2xlarge": False,
    }
    assert {name: has_gpus(name) for name in kinds} == kinds
    assert has_gpus("my-machine") is None


def test_has_gpus() -> None:
    assert has_gpus("ml.p4d.24xlarge")
    assert has_gpus("g5.xlarge")
    assert not has_gpus("ml.c5.18xlarge")
    assert not has_gpus("g4ad.xlarge"), "AMD's"
    assert has_gpus("local") is None
