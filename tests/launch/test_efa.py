"""Machines with EFA over which NCCL does not send: its own log lines, as recorded in public reports."""

import os
from pathlib import Path

import pytest

from kd import machine

OVER_EFA = """\
8h200-2:6831:6840 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-2:6831:6840 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so.
8h200-2:6831:6840 [0] NCCL INFO Using network Libfabric
"""  # NVIDIA/nccl issue 1597
OVER_TCP = """\
a:362:362 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
a:362:362 [0] NCCL INFO NET/Socket : Using [0]eth0:10.3.35.83<0>
a:362:362 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(
    ("log", "network"),
    [(OVER_EFA, "Libfabric"), (OVER_TCP, "Socket"), ("a [0] NCCL INFO Using network AWS Libfabric\n", "Libfabric"),
     ("", "")],
)  # fmt: skip
def test_the_network_is_that_of_nccls_log(tmp_path: Path, log: str, network: str) -> None:
    (tmp_path / f"nccl.{os.getpid()}").write_text(log)
    assert machine.nccl_network({"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p")}) == network
    assert machine.nccl_network({}) == ""


def test_nccl_is_logged_where_there_is_efa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("mlx5_0", "0x101b"), ("rdmap16s27", "0xefa1")):
        assert not machine.has_efa(tmp_path)
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "device").write_text(f"{kind}\n")
    assert machine.has_efa(tmp_path)
    monkeypatch.setattr(machine, "has_efa", lambda: True)
    env: dict[str, str] = {}
    machine.log_nccl(env)
    assert env["NCCL_DEBUG"] == "INFO" and env["NCCL_DEBUG_FILE"].endswith("%p")
    users = {"NCCL_DEBUG": "WARN"}
    machine.log_nccl(users)
    assert users == {"NCCL_DEBUG": "WARN"}
