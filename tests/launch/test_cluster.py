"""Which job this is, from what launchers leave behind."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kd.cli import train_main
from kd.launch.cluster import RANKS, Cluster, is_rank_zero, marker, recognise_launcher
from kd.launch.ray_nodes import prepare_data
from tests._files import write_json
from tests._forks import start, status_of
from tests._helpers import refuses

NOWHERE = Path("/nonexistent")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "night", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
SLURM = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "9", "SLURM_NTASKS": "32", "SLURM_NNODES": "4",
         "SLURM_STEP_ID": "0"}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
       "OMPI_COMM_WORLD_LOCAL_RANK": "1"}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NETWORK_INTERFACE_NAME": "eth0",
             "SM_NUM_GPUS": "8", "TRAINING_JOB_NAME": "food"}  # fmt: skip
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
       "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-7"}  # fmt: skip
TRAIN_JOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400",
             "PET_MASTER_ADDR": "food-node-0-0.food"}  # fmt: skip
ETH0 = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
OF_HOST_2 = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "29500", "NODE_RANK": "1"}
RANK_9 = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "MASTER_PORT": "29500",
}


def of_groups(**groups: tuple[str, list[str]]) -> dict[str, Any]:
    """SageMaker's description of a cluster of several groups."""
    listed = [
        {"instance_group_name": n, "instance_type": t, "hosts": h} for n, (t, h) in groups.items()
    ]
    return {"hosts": sorted(host for _, hosts in groups.values() for host in hosts), "instance_groups": listed,
            "network_interface_name": "eth0"}  # fmt: skip


FOOD = of_groups(
    data_group=("ml.c5.18xlarge", ["algo-1", "algo-4"]),
    dnn_group=("ml.p4d.24xlarge", ["algo-3", "algo-2"]),
)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        (TORCHRUN, Cluster("torchrun", 4, 8, job="night")),
        ({**TORCHRUN, "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Cluster("torchrun", 4, 8, job="night")),
        (TRAIN_JOB | TORCHRUN | SKY | SAGEMAKER, Cluster("torchrun", 4, 8, job="night")),
        (SLURM, Cluster("SLURM", 4, 8, job="123")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "food"}, Cluster("SLURM", 1, None, job="123")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, None),
        (MPI | {"MASTER_ADDR": "a"}, Cluster("mpirun", 2, 8, RANK_9 | {"MASTER_ADDR": "a"})),
        (SLURM | MPI | {"MASTER_ADDR": "a"}, Cluster("mpirun", 2, 8, RANK_9 | {"MASTER_ADDR": "a"}, "123")),
        (MPI | SAGEMAKER, Cluster("mpirun", 2, 8, RANK_9 | {"MASTER_ADDR": "algo-1"}, "food")),
        (SAGEMAKER, Cluster("SageMaker", 2, 8, OF_HOST_2 | ETH0, "food")),
        (SKY, Cluster("SkyPilot", 2, 4, OF_HOST_2 | {"MASTER_ADDR": "10.0.0.1"}, "sky-7")),
        (SKY | SLURM | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"},
         Cluster("SkyPilot", 2, None, OF_HOST_2 | {"MASTER_ADDR": "10.0.0.1"}, "sky-7")),
        (TRAIN_JOB, Cluster("TrainJob", 2, None, {"MASTER_ADDR": "food-node-0-0.food", "MASTER_PORT": "29400",
                                                  "NODE_RANK": "1"})),
        (SKY | {"KD_DATA_NODES": "3"},
         Cluster("SkyPilot", 2, 4, OF_HOST_2 | {"MASTER_ADDR": "10.0.0.1"}, "sky-7", data_nodes=3)),
        ({"KD_DATA_NODES": "1"}, Cluster("KD_DATA_NODES", 1, None, data_nodes=1)),
        ({"KD_ROLE": "data", "MASTER_ADDR": "gpu-0"} | SKY,
         Cluster("KD_ROLE", 1, None, {"MASTER_ADDR": "gpu-0"}, role="data", data_nodes=1)),
    ],
)  # fmt: skip
def test_each_launcher_is_recognised(env: dict[str, str], found: Cluster | None) -> None:
    assert recognise_launcher(env, NOWHERE) == found


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (SLURM | {"SLURM_NNODES": "5"}, "SLURM_NTASKS: 32 processes can't be split evenly over 5 machines"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, "start all with: srun kd-train"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "6"}, "WORLD_SIZE: 32 processes can't be split evenly over machines with 6 each"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE: must be a whole number >= 1, got ''"),
        (TORCHRUN | {"KD_ROLE": "data"}, "KD_ROLE: data, but torchrun starts processes that train"),
        (MPI, "MASTER_ADDR: mpirun on several machines does not say where rank 0 is"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "ranks must be dealt machine by machine .mpirun --map-by slot."),
        (MPI | SAGEMAKER | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"},
         "8 processes, 8 on a machine, make 1 machine.s., but SageMaker's job trains on 2: algo-1, algo-2"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST: 'algo-3' is none of the job's hosts algo-1"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS: is not JSON"),
        (SKY | {"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES: 3, but SKYPILOT_NODE_IPS has 2"),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK: must be 0 to 1 for 2 machines, got 2"),
        (TRAIN_JOB | {"PET_MASTER_ADDR": ""}, "PET_NODE_RANK: this is machine 1 of 2, but the first machine's"),
        (TRAIN_JOB | {"PET_NNODES": "1:4"}, "PET_NNODES: must be a whole number >= 1, got '1:4'"),
        ({"KD_DATA_NODES": "some"}, "KD_DATA_NODES: must be a whole number >= 1, got 'some'"),
        ({"RANK": "x"}, "RANK: must be a whole number >= 0, got 'x'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: must be a whole number >= 0, got ''"),
        ({"KD_ROLE": "gpu"}, "KD_ROLE: must be train or data, got 'gpu'"),
        ({"KD_ROLE": "data"}, "KD_ROLE: a data machine needs MASTER_ADDR"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_an_error_in_one_line(env: dict[str, str], told: str) -> None:
    with refuses(told) as error:
        recognise_launcher(env, NOWHERE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["x", "", "-1", "\u00b2"])
def test_a_rank_that_is_no_number_is_told_in_one_line(
    text: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    assert train_main([f"recipe={recipe}"]) == 2
    told = f"kd-train: LOCAL_RANK: must be a whole number >= 0, got '{text}'\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("env", "speaks"),
    [
        ({}, True),
        ({"SLURM_PROCID": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        # c10d numbers the machines as they come: torchrun's first may be SLURM's second
        ({"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "a", "RANK": "8", "LOCAL_RANK": "0", "SLURM_PROCID": "0"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),  # before its variables are set
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0", "SLURM_PROCID": "1"}, True),
    ],
)
def test_one_process_speaks_for_the_job(
    env: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*RANKS, "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() is speaks


def test_sagemakers_resource_file(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    alone = of_groups(homogeneousCluster=("ml.p4d.24xlarge", ["algo-2", "algo-1"]))
    write_json(
        file, {**alone, "current_host": "algo-2", "current_group_name": "homogeneousCluster"}
    )
    assert recognise_launcher({"SM_NUM_GPUS": "8"}, file) == Cluster(
        "SageMaker", 2, 8, OF_HOST_2 | ETH0
    )
    with refuses("SM_HOSTS: a, b, but .*resourceconfig.json has algo-1, algo-2"):
        recognise_launcher({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"}, file)


@pytest.mark.parametrize("key", ["current_group_name", "current_instance_group"])
def test_only_the_training_group_trains(key: str, tmp_path: Path) -> None:
    """A CPU machine is neither rank 0, though its name is the first, nor any other rank."""
    file = tmp_path / "resourceconfig.json"
    found = {}
    for group in FOOD["instance_groups"]:
        for host in group["hosts"]:
            write_json(file, {**FOOD, "current_host": host, key: group["instance_group_name"]})
            found[host] = recognise_launcher({}, file)
    main = {"MASTER_ADDR": "algo-2", "MASTER_PORT": "29500", **ETH0}
    for rank, host in enumerate(("algo-2", "algo-3")):
        trains = Cluster(
            "SageMaker", 2, None, {**main, "NODE_RANK": str(rank)}, role="train", data_nodes=2
        )
        assert found[host] == trains
    for host in ("algo-1", "algo-4"):
        assert found[host] == Cluster("SageMaker", 2, None, main, role="data", data_nodes=2)
    by_variables = {"SM_HOSTS": json.dumps(FOOD["hosts"]), "SM_CURRENT_HOST": "algo-3", "SM_CURRENT_INSTANCE_GROUP":
                    "dnn_group", "SM_NETWORK_INTERFACE_NAME": "eth0", "SM_INSTANCE_GROUPS_DICT":
                    json.dumps({g["instance_group_name"]: g for g in FOOD["instance_groups"]})}  # fmt: skip
    assert recognise_launcher(by_variables, NOWHERE) == found["algo-3"]


C5, P4 = "ml.c5.18xlarge", "ml.p4d.24xlarge"


@pytest.mark.parametrize(
    ("groups", "role", "outcome"),
    [
        ({"a": (C5, ["1"]), "b": (P4, ["2"])}, None, "instance_groups: a, b: 'a, b' would train; one must"),
        ({"a": (C5, ["1"]), "b": (P4, ["2"])}, "data", ["2"]),
        ({"b": (P4, ["1"]), "a": (C5, ["2"])}, "train", ["1"]),
        ({"a": (C5, ["1"]), "b": (P4, ["2"])}, "train", "'a' would train on ml.c5.18xlarge, which has no GPU, while"),
        ({"a": (C5, ["1"]), "train": (P4, ["2"])}, None, ["2"]),
        ({"a": (C5, ["1"]), "b": (C5, ["2"]), "gpu": (P4, ["3"])}, None, ["3"]),
        ({"train": (C5, ["1"]), "data": (P4, ["2"])}, None, "'train' would train on ml.c5.18xlarge"),
        ({"train-a": (P4, ["1"]), "train-b": (P4, ["2"])}, None, "'train-a, train-b' would train"),
        ({"data-1": (C5, ["1"]), "data-2": (C5, ["2"])}, None, "none of them trains"),
        ({"a": (P4, ["1"])}, "data", "instance_groups: a: none of them trains"),
    ],
)  # fmt: skip
def test_roles_of_groups(
    groups: dict, role: str | None, outcome: list[str] | str, tmp_path: Path
) -> None:
    file = tmp_path / "resourceconfig.json"
    write_json(file, {**of_groups(**groups), "current_host": "1"})
    env = {"KD_ROLE": role} if role else {}
    if isinstance(outcome, str):
        with refuses(outcome):
            recognise_launcher(env, file)
        return
    found = recognise_launcher(env, file)
    assert found is not None
    assert found.variables["MASTER_ADDR"] == outcome[0]
    assert found.num_nodes == 1
    assert found.role == ("train" if outcome == ["1"] else "data")


def test_a_group_that_is_told_wrong(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    write_json(file, {**FOOD, "current_host": "algo-1", "current_group_name": "dnn_group"})
    with refuses("current_group_name: dnn_group, but algo-1 is listed in 'data_group'"):
        recognise_launcher({}, file)
    write_json(file, {**FOOD, "hosts": ["algo-1"], "current_host": "algo-1"})
    with refuses(
        "instance_groups: their hosts are algo-1, algo-2, algo-3, algo-4, the job's algo-1"
    ):
        recognise_launcher({}, file)


def test_a_data_machine_is_stopped_while_it_waits(tmp_path: Path) -> None:
    """Nobody answers at the port, and it says for whom it waits. Ray must be there, but is not used yet."""
    (tmp_path / "packages" / "ray").mkdir(parents=True)
    (tmp_path / "packages" / "ray" / "__init__.py").touch()
    log = tmp_path / "log"
    env = {"KD_ROLE": "data", "MASTER_ADDR": "127.0.0.1", "KD_RAY_PORT": "1"}
    assert status_of(start(["recipe=foodtag_vit"], log, **env)) == 2
    assert "RAY_AUTH_TOKEN: must be a secret that all machines of the job share" in log.read_text()
    env["RAY_AUTH_TOKEN"] = "ab" * 32
    if importlib.util.find_spec("ray") is None:
        without = tmp_path / "without"
        assert status_of(start(["recipe=foodtag_vit"], without, **env)) == 2
        assert "machines that prepare data: needs the extra ray" in without.read_text()
    packages = str(tmp_path / "packages")
    pid = start(["recipe=foodtag_vit"], log, sys.path.insert, 0, packages, **env)
    deadline = time.monotonic() + 120
    while not (
        log.exists() and "waiting for the training machine at 127.0.0.1:1" in log.read_text()
    ):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == 143, log.read_text()


@pytest.mark.parametrize("port", ["ray", "0", "65536"])
def test_a_port_of_ray_that_is_no_port_is_named(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setattr("kd.launch.ray_nodes.check_ray", lambda: None)
    monkeypatch.setattr("kd.launch.ray_nodes.WAIT_S", 0)
    monkeypatch.setenv("KD_RAY_PORT", port)
    machine = Cluster("KD_ROLE", num_nodes=1, devices=None, role="data", data_nodes=1)
    message = f"KD_RAY_PORT: must be a whole number from 1 to 65535, got '{port}'"
    with refuses(message):
        prepare_data(machine)


def test_a_job_finds_its_run_by_its_name_and_its_command(tmp_path: Path) -> None:
    a, same, other = (marker(job, tmp_path, ["seed=0"]) for job in ("1", "1", "2"))
    assert a == same != other
    assert marker("1", tmp_path, ["seed=1"]) != a
    assert marker(None, tmp_path, []) is None
