"""Which job this is, from what launchers leave behind."""

import json
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.launch.cluster import Cluster, marker, recognise

NOWHERE = Path("/nonexistent")


def test_a_process_of_its_own() -> None:
    assert recognise({}, NOWHERE) is None
    assert recognise({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, NOWHERE) is None


def test_torchrun() -> None:
    env = {"TORCHELASTIC_RUN_ID": "night", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}
    assert recognise(env, NOWHERE) == Cluster("torchrun", 4, 8, job="night")
    assert recognise({**env, "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, NOWHERE) == Cluster(
        "torchrun", 4, 8, job="night"
    )


def test_slurm() -> None:
    env = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "9", "SLURM_NTASKS": "32", "SLURM_NNODES": "4",
           "SLURM_STEP_ID": "0"}  # fmt: skip
    found = recognise(env, NOWHERE)
    assert found == Cluster("SLURM", 4, 8, job="123")
    assert found.arguments() == ["--trainer.num_nodes=4", "--trainer.devices=8"]
    with pytest.raises(UserError, match="SLURM_NTASKS: 32 processes can't be dealt evenly to 5 machines"):
        recognise({**env, "SLURM_NNODES": "5"}, NOWHERE)
    del env["SLURM_STEP_ID"]
    with pytest.raises(UserError, match="start it with: srun kd-train"):  # the batch script itself, alone
        recognise(env, NOWHERE)


def test_sagemakers_resource_file_and_variables(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps({
        "current_host": "algo-2", "hosts": ["algo-2", "algo-1"], "network_interface_name": "eth0",
        "current_instance_type": "ml.p4d.24xlarge",
    }))  # fmt: skip
    network = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    want = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "29500", "NODE_RANK": "1", **network}
    assert recognise({"SM_NUM_GPUS": "8"}, file) == Cluster("SageMaker", 2, 8, want)
    env = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NETWORK_INTERFACE_NAME": "eth0"}
    assert recognise(env, NOWHERE) == Cluster("SageMaker", 2, None, want)
    with pytest.raises(UserError, match="SM_CURRENT_HOST: 'algo-3' is none of the job's hosts algo-1, algo-2"):
        recognise({**env, "SM_CURRENT_HOST": "algo-3"}, NOWHERE)


def test_a_job_finds_its_run_by_its_name_and_its_command(tmp_path: Path) -> None:
    jobs = [Cluster("SLURM", 1, 2, job=job) for job in ("1", "1", "2")]
    a, same, other = (marker(job, tmp_path, ["seed=0"]) for job in jobs)
    assert a == same != other
    assert marker(jobs[0], tmp_path, ["seed=1"]) != a
    assert marker(Cluster("torchrun", 1, 2), tmp_path, []) is None
