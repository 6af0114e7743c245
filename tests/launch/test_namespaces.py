"""Two machines, as two network namespaces with a wire between them: gloo, one process each, found by SageMaker-style
variables without a flag."""

import ctypes
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._forks import run_ranks, start, status_of, statuses_of, survivors
from tests._runs import assert_same, student_of

HOSTS = {"kd-test-a": "10.77.0.1", "kd-test-b": "10.77.0.2"}
TIMEOUT_S = 8


def ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture()
def wire() -> Iterator[None]:
    """Two namespaces, a pair of virtual cards between them."""
    if not all(ip("netns", "add", name) for name in HOSTS):
        _remove()
        pytest.skip("needs network namespaces (root, iproute2)")
    a, b = HOSTS
    ip("link", "add", "kd-wire", "netns", a, "type", "veth", "peer", "name", "kd-wire", "netns", b)
    for name, address in HOSTS.items():
        for item in (["addr", "add", f"{address}/24", "dev", "kd-wire"], ["link", "set", "kd-wire", "up"],
                     ["link", "set", "lo", "up"]):  # fmt: skip
            assert ip("-n", name, *item)
    yield
    _remove()


def _remove() -> None:
    for name in HOSTS:
        ip("netns", "del", name)


def enter(namespace: str) -> None:
    """Moves this process, with the children to come, into a network namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000) == 0
    os.close(handle)


def start_on(host: str, items: list[str], log: Path) -> int:
    env = {
        "SM_HOSTS": '["10.77.0.1", "10.77.0.2"]', "SM_CURRENT_HOST": HOSTS[host],
        "SM_NETWORK_INTERFACE_NAME": "kd-wire",
    }  # fmt: skip
    return start(items, log, enter, host, **env)


def items_for(recipe: Path, *more: str) -> list[str]:
    return [
        f"recipe={recipe}", "data.batch_size=4", "trainer.devices=1", "trainer.strategy=kd.strategies.ddp.DDP",
        f"rank_timeout_s={TIMEOUT_S}", "checkpoint.every_n_steps=1", *more,
    ]  # fmt: skip


@pytest.mark.usefixtures("wire")
def test_two_machines_learn_what_one_learns(recipe: Path) -> None:
    log = recipe.parent / "log"
    pids = [
        start_on(host, items_for(recipe, "trainer.max_epochs=1"), log.with_suffix(f".{host}"))
        for host in HOSTS
    ]
    assert statuses_of(pids) == [0, 0], log.with_suffix(".kd-test-a").read_text()
    said = log.with_suffix(".kd-test-a").read_text()
    (line,) = [text for text in said.splitlines() if text.startswith("processes:")]
    assert line.startswith(
        "processes: 2 on 2 machines (started by SageMaker), gloo, meeting at 10.77.0.1:29500; "
    )
    assert "(10.77.0.1): rank 0; " in line
    assert line.endswith("(10.77.0.2): rank 1")
    assert "processes:" not in log.with_suffix(".kd-test-b").read_text()
    run_ranks(
        [*items_for(recipe, "trainer.max_epochs=1"), "trainer.devices=2"], log.with_suffix(".txt")
    )
    a, b = (student_of(recipe.parent / "runs" / "tiny" / n) for n in ("000", "001"))
    assert_same(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("wire")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_a_machine_prepares_data_for_another(recipe: Path) -> None:
    """The README's two commands; the batches come over the wire, and teach what this machine's own would."""
    logs = {host: recipe.parent / f"log.{host}" for host in HOSTS}
    shared = {"RAY_AUTH_TOKEN": "ab" * 32, "MASTER_ADDR": HOSTS["kd-test-a"], "RAY_TMPDIR": "/tmp"}
    own = {"kd-test-a": {"KD_DATA_NODES": "1"}, "kd-test-b": {"KD_ROLE": "data"}}
    items = [f"recipe={recipe}", "config=remote_data", "config=audit"]
    pids = {host: start(items, logs[host], enter, host, **shared, **own[host]) for host in HOSTS}
    assert status_of(pids["kd-test-a"], timeout_s=280) == 0, [
        log.read_text() for log in logs.values()
    ]
    assert status_of(pids["kd-test-b"]) == 0, logs["kd-test-b"].read_text()
    assert "prepares data for 10.77.0.1" in logs["kd-test-b"].read_text()
    assert status_of(start([f"recipe={recipe}", "config=audit"], logs["kd-test-a"])) == 0
    tier, here = (recipe.parent / "runs" / "tiny" / number for number in ("000", "001"))
    told = json.loads((tier / "records" / "tier.rank0.jsonl").read_text().splitlines()[-1])
    assert [machine["batches"] >= 12 for machine in told["machines"]] == [
        True
    ]  # the one across the wire makes all
    a, b = (student_of(folder) for folder in (tier, here))
    assert_same(a, b)
    assert [survivors(pid) for pid in pids.values()] == [[], []]
