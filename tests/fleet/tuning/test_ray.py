"""``kd-tune jobs=ray``: real trials on a cluster of two machines, one of which goes; stops; what is refused."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from kd.cli import main
from kd.errors import needs_extra
from tests._helpers import ROOT
from tests._runs import disturb
from tests._searches import of, trial_processes, trials


def test_without_ray_one_line_names_the_extra(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kd.fleet.tuning.ray_cluster", raising=False)
    items = [f"recipe={recipe}", "search.optim.lr=0..1"]
    assert main("tune", [*items, "jobs=ray"]) == 2
    assert f"kd-tune: jobs: ray {needs_extra('ray')}" in capsys.readouterr().err
    assert main("tune", [*items, "jobs=2", "cores=1"]) == 2
    assert "cores: is a trial's share of a cluster (jobs=ray)" in capsys.readouterr().err
    assert not (recipe.parent / "runs").exists()


@pytest.fixture()
def cluster(tmp_path: Path) -> Iterator[Any]:
    """Two machines of one core each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def begin(items: list[str], address: str, log: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": address}
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "kd.cli", "tune", *items, "jobs=ray", "trust=tests._stop"],
                                env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)  # fmt: skip


def wait_for(true: Callable[[], bool], search: subprocess.Popen[bytes], log: Path) -> None:
    """As long as it takes, while the search lives."""
    while not true():
        assert search.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_search_on_a_cluster_survives_a_machine_and_leaves_no_process(
    recipe: Path, cluster: Any
) -> None:
    """Stopped, killed, and a machine taken away while it runs a trial: each trial ends once, with every step."""
    second = cluster.add_node(num_cpus=1)
    items = [f"recipe={recipe}", "trainer.max_epochs=3", disturb("Slow", seconds=0.3), "trials=4", "pruner=none",
             "search.optim.lr=log:1e-4..1e-2"]  # fmt: skip
    log, folder = recipe.parent / "log", of(recipe)

    def begun() -> int:
        return len(list(folder.glob("trials/*/tiny/000/checkpoints/last.ckpt")))

    search = begin(items, cluster.address, log)
    wait_for(lambda: begun() == 2, search, log)  # a core each: two at a time
    search.send_signal(signal.SIGTERM)
    assert search.wait() == 143, log.read_text()
    assert not trial_processes(folder)
    search = begin(items, cluster.address, log)
    wait_for(lambda: len(trial_processes(folder)) >= 3, search, log)
    search.kill()
    search.wait()
    while trial_processes(folder):  # their parents end, and they save
        time.sleep(0.1)
    search = begin(items, cluster.address, log)
    wait_for(lambda: len(trial_processes(folder)) >= 3, search, log)
    cluster.remove_node(second)
    assert search.wait() == 0, log.read_text()
    assert [(t.number, t.state.name) for t in trials(folder)] == [(i, "COMPLETE") for i in range(4)]
    assert not trial_processes(folder)
    assert "about" in log.read_text()
