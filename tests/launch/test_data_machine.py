"""A job of machines that train and machines that prepare data: one command on all of them, as SageMaker starts it."""

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from tests._forks import start, status_of, survivors
from tests._helpers import write_recipe


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)  # not imported here: it forks
def test_one_command_on_a_heterogeneous_cluster(
    tmp_path: Path, pictures: Path, teacher: Path
) -> None:
    """The data machine's name comes first, and it neither trains nor is rank 0; it ends when training has ended."""
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    kinds = {
        "data_group": ("ml.c5.xlarge", "127.0.0.0"),
        "dnn_group": ("ml.g5.xlarge", "127.0.0.1"),
    }
    groups = [
        {"instance_group_name": n, "instance_type": t, "hosts": [host]}
        for n, (t, host) in kinds.items()
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = {}
    for number, host in enumerate(("127.0.0.0", "127.0.0.1")):
        base = tmp_path / f"ml{number}"
        (base / "input" / "config").mkdir(parents=True)
        (base / "output").mkdir()
        (base / "input/config/hyperparameters.json").write_text(
            json.dumps(
                {"recipe": str(recipe), "config": '["remote_data"]', "trainer.max_epochs": "1"}
            )
        )
        (base / "input/config/resourceconfig.json").write_text(json.dumps(
            {"hosts": ["127.0.0.0", "127.0.0.1"], "current_host": host, "instance_groups": groups,
             "current_group_name": groups[number]["instance_group_name"]}
        ))  # fmt: skip
        env = {
            "SAGEMAKER_BASE_DIR": str(base),
            "KD_RAY_PORT": port,
            "RAY_TMPDIR": "/tmp",
            "RAY_AUTH_TOKEN": "ab" * 32,
        }
        started[host] = start([], tmp_path / f"log{number}", **env)
    logs = [tmp_path / "log0", tmp_path / "log1"]
    assert status_of(started["127.0.0.1"], timeout_s=280) == 0, [log.read_text() for log in logs]
    assert status_of(started["127.0.0.0"]) == 0, logs[0].read_text()
    assert "prepares data for 127.0.0.1" in logs[0].read_text()
    assert (tmp_path / "ml1/model/student.safetensors").is_file()
    assert not (tmp_path / "ml0/model").exists()
    assert not (tmp_path / "ml0/checkpoints").exists()
    assert [survivors(pid) for pid in started.values()] == [[], []]
