"""Processes that end with the one that has started them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kd.launch.child import reason_in, start_kd_train
from kd.launch.cluster import recognise_launcher
from kd.launch.sagemaker import channel_folder, container, tell_failure
from tests._files import write_json
from tests._forks import ForkedRun, as_program, start


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, of whatever thread."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            children.append(int(stat.parent.name))
    return children


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def as_lightning_starts_ranks(items: list[str]) -> None:
    """As ``as_program``, but the ranks do not get the SIGTERM at their parent's end that other children ask for."""
    from pytorch_lightning.strategies.launchers import subprocess_script

    def rank(args: Sequence[str], env: dict[str, str], **_: Any) -> ForkedRun:
        words = list(args[list(args).index("kd.cli") + 1 :])
        return ForkedRun(words, env=env, first=lambda: os.environ.__delitem__("KD_PARENT"))

    as_program(items)
    subprocess_script.subprocess = SimpleNamespace(Popen=rank)  # type: ignore[assignment]


@pytest.mark.parametrize("seconds", [0, 0.6, 2])
def test_a_rank_ends_when_the_first_one_is_killed_while_both_start(
    recipe: Path, seconds: float
) -> None:
    log = recipe.parent / "log"
    items = [
        f"recipe={recipe}",
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "data.batch_size=4",
        "trainer.enable_progress_bar=false",
        "trainer.max_epochs=200",
    ]
    first = start(items, log, as_lightning_starts_ranks, items)
    deadline = time.monotonic() + 60
    while not (ranks := children_of(first)):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    try:
        deadline = time.monotonic() + 20
        while any(map(is_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in ranks if is_alive(pid)], log.read_text()
    finally:
        for pid in filter(is_alive, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        },
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"},
        {"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "0"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1", "TRAINING_JOB_NAME": "j"},
        {"KD_DATA_NODES": "2", "KD_ROLE": "train"},
    ],
)
def test_a_child_does_not_look_for_the_processes_of_the_job(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda command, **popen: given.update(popen))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert recognise_launcher(os.environ) is not None
    start_kd_train(["recipe=mine"])
    assert recognise_launcher(given["env"]) is None
    assert not variables.keys() & given["env"].keys()


@pytest.mark.parametrize("from_toolkit", [False, True])
def test_a_child_in_sagemakers_container_is_no_process_of_its_job(
    from_toolkit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hyperparameters are not its settings, its failure is not the job's; the channels stay known."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda command, **popen: given.update(popen))
    settings, hosts = '{"recipe": "job"}', ["algo-1", "algo-2"]
    config, data = tmp_path / "input" / "config", tmp_path / "input" / "data"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(settings)
    resources = {"hosts": hosts, "current_host": "algo-1"}
    write_json(config / "resourceconfig.json", resources)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    if from_toolkit:
        monkeypatch.setenv("SM_HPS", settings)
        monkeypatch.setenv("SM_HOSTS", json.dumps(hosts))
        monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
        monkeypatch.setenv("SM_CHANNEL_TRAIN", str(data / "train"))
    else:
        (data / "train").mkdir(parents=True)
    assert recognise_launcher() is not None
    assert container() is not None
    start_kd_train(["recipe=teacher"])
    assert recognise_launcher(given["env"]) is None
    assert container(given["env"]) is None
    tell_failure("no memory", given["env"])
    assert not (tmp_path / "output").exists()
    assert channel_folder("channel:train", given["env"]) == str(data / "train")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kd-train: failed: no memory\nkd-train: the traceback is in x\n", "no memory"),
        (
            "kd-eval: loading torch ...\nkd-eval: split: there is no test\n",
            "split: there is no test",
        ),
        ("kd-eval: loading torch ...\nKilled\n", "Killed"),
        ("", "no output"),
    ],
)
def test_the_reason_names_the_log_that_it_is_from(tmp_path: Path, text: str, reason: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert reason_in(log) == f"{reason} (log: {log})"
