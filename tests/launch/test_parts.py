"""Instance groups, threads and the meeting point, each by itself."""

import os
from pathlib import Path

import pytest
from pytorch_lightning import Trainer

from kd.errors import UserError
from kd.launch.child import SAYS_HOW, wait_asleep
from kd.launch.groups import base, has_gpus, machines
from kd.launch.loopback import meet_on_loopback


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


@pytest.mark.parametrize("said", [None, *SAYS_HOW])
def test_threads_wait_asleep_unless_the_environment_says_how(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SAYS_HOW:
        monkeypatch.delenv(name, raising=False)
    if said:
        monkeypatch.setenv(said, "1")
    wait_asleep()
    assert os.environ.get("OMP_WAIT_POLICY") == {None: "passive", "OMP_WAIT_POLICY": "1"}.get(said)


def test_one_process_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    meet_on_loopback(
        Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    )
    assert "MASTER_PORT" not in os.environ
