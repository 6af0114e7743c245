"""kd-launch to SkyPilot, SLURM and torchrun: what is sent is what the place takes."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kd.cli import main
from kd.launch.sagemaker import channel_folder
from tests._helpers import ROOT, Command, run_cli, write_recipe
from tests._runs import summary_of

CLOUD = ["image=registry.example.com/kd:1"]


@pytest.fixture()
def tiny(tmp_path: Path, pictures: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of one's own."""
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path / "tiny.yaml", pictures, teacher)


def shown(capsys: pytest.CaptureFixture[str], *items: str) -> str:
    """What ``--dry-run`` prints; it leaves nothing."""
    before = sorted(Path().rglob("*"))
    assert main("launch", [*items, "--dry-run", "job=food-1"]) == 0, capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    return capsys.readouterr().out


def check_script(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_sky_takes_an_image_with_or_without_its_prefix(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [
        f"recipe={tiny}",
        "instances=1xA100:8",
        "bucket=s3://kd-test",
        "image=docker:registry/kd:1",
    ]
    assert "image_id: docker:registry/kd:1\n" in shown(capsys, "sky", *items)


def test_sky(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "sky", f"recipe={tiny}", "instances=2xA100:8", "spot=true", "bucket=s3://kd-test/runs", *CLOUD,
                 "hours=2", "infra=aws", "data.source.root=channel:train-set",
                 "channel.train-set=s3://kd-test/food")  # fmt: skip
    (task,) = yaml.safe_load_all(text)
    assert (task["name"], task["num_nodes"]) == ("food-1", 2)
    assert task["resources"] == {
        "infra": "aws", "accelerators": "A100:8", "use_spot": True, "image_id": f"docker:{CLOUD[0][6:]}",
        "job_recovery": {"max_restarts_on_errors": 0},
    }  # fmt: skip
    assert task["file_mounts"] == {
        "/kd-runs": {"source": "s3://kd-test/runs/food-1", "mode": "MOUNT_CACHED"},
        "/kd-channels/train-set": {"source": "s3://kd-test/food", "mode": "MOUNT"},
        "/kd-files/tiny.yaml": str(tiny),
    }
    assert task["envs"] == {"SM_CHANNEL_TRAIN_SET": "/kd-channels/train-set"}
    assert channel_folder("channel:train-set/a", task["envs"]) == "/kd-channels/train-set/a"
    assert task["run"] == (
        "timeout --foreground --signal=TERM --kill-after=300 7200 "
        "kd-train recipe=/kd-files/tiny.yaml data.source.root=channel:train-set runs_dir=/kd-runs name=food-1\n"
    )
    _check_by_skypilot([task])


def _check_by_skypilot(tasks: list[dict]) -> None:
    """By SkyPilot's own schemas, where it is installed."""
    if importlib.util.find_spec("sky") is None:
        return
    import jsonschema
    from sky.utils import schemas

    for task in tasks:
        jsonschema.validate(task, schemas.get_task_schema())
        jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_fewer_processes_than_gpus(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher starts as many as the run wants: it would refuse others when the job has begun."""
    settings = [
        f"recipe={tiny}",
        "instances=1xgpu:8",
        "trainer.accelerator=auto",
        "trainer.devices=4",
        "data.batch_size=16",
    ]
    assert "--nproc-per-node=4 " in shown(capsys, "torchrun", *settings)
    assert "--ntasks-per-node=4\n" in shown(capsys, "slurm", *settings)
    items = [*settings[:3], "trainer.devices=[0, 1]", "data.batch_size=16"]
    assert "--ntasks-per-node=2\n" in shown(capsys, "slurm", *items)


def test_slurm(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "slurm", f"recipe={tiny}", "instances=4xa100:8", "hours=2", "sbatch.partition=gpu", "optim.lr=0.1",
                 "trust=tests")  # fmt: skip
    asked = {
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    }
    assert asked >= {"--nodes=4", "--gpus-per-node=a100:8", "--ntasks-per-node=8", "--cpus-per-task=8", "--time=120",
                     "--partition=gpu", "--signal=TERM@300", "--requeue"}  # fmt: skip
    assert f"recipe={tiny} trust=tests optim.lr=0.1 runs_dir={tmp_path}/runs name=food-1\n" in text
    check_script(text)
    more = ["sbatch.qos=high", "sbatch.mem-per-cpu=4G", "sbatch.constraint=a100|h100", "sbatch.exclude=node7",
            "sbatch.exclusive=", "setup=module load cuda/12; ulimit -n 9999"]  # fmt: skip
    text = shown(capsys, "slurm", f"recipe={tiny}", "instances=1xgpu:8", *more)
    options = [
        "--qos=high",
        "--mem-per-cpu=4G",
        "--constraint='a100|h100'",
        "--exclude=node7",
        "--exclusive",
    ]
    assert "".join(f"#SBATCH {option}\n" for option in options) in text
    assert (
        f"cd {Path.cwd()} || exit 1\nmodule load cuda/12; ulimit -n 9999\nexport OMP_NUM_THREADS=${{OMP_NUM_THREADS:-8}}\n"
        in text
    )
    check_script(text)
    text = shown(
        capsys,
        "slurm",
        f"recipe={tiny}",
        "config=remote_data",
        "instances=1xgpu:4",
        "data_instances=2xcpu:32",
    )
    assert (
        "#SBATCH hetjob\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=32\n"
        in text
    )
    assert "KD_ROLE=data MASTER_ADDR=$head srun --cpus-per-task=32 --het-group=1 " in text
    assert (
        "export KD_DATA_NODES=2 MASTER_ADDR=$head\nsrun --kill-on-bad-exit=1 --cpus-per-task=8 --het-group=0 "
        in text
    )
    check_script(text)


def test_the_train_job_is_valid() -> None:
    """The file for ``kubectl`` runs the same command, and each key is one that the schemas know."""
    train, claim = yaml.safe_load_all((ROOT / "scripts/kubernetes/trainjob.yaml").read_text())
    assert train["spec"]["trainer"]["args"] == [
        "recipe=foodtag_vit", "runs_dir=/kd-runs", "name=food-1",
    ]  # fmt: skip
    patch = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    if importlib.util.find_spec("kubernetes_validate"):
        from kubernetes_validate import validate

        described = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, **pod}
        for document in (claim, described):
            validate(document, "1.34", strict=True)
    if importlib.util.find_spec("kubeflow_trainer_api"):
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        found = TrainerV1alpha1TrainJob.from_dict(train)
        assert json.loads(json.dumps(found.to_dict())) == train  # no key that the schema lacks


def test_a_place_s_keys_run_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(
        capsys,
        "slurm",
        f"recipe={tiny}",
        "instances=1xgpu:8",
        "sbatch.partition=a; id",
        "sbatch.account=$(id)",
    )
    assert "#SBATCH --partition='a; id'\n#SBATCH --account='$(id)'\n" in text
    text = shown(capsys, "torchrun", f"recipe={tiny}", "instances=2xgpu:8", "hosts=$(id),b")
    assert text.count("--rdzv-endpoint='$(id):29500'") == 2
    check_script(text)


@pytest.mark.skipif(shutil.which("sbatch") is not None, reason="sbatch is here")
def test_a_program_that_is_not_here(tiny: Path, tmp_path: Path, refusal: Command) -> None:
    assert "kd-launch: no program sbatch here" in refusal(
        "launch", ["slurm", f"recipe={tiny}", "instances=1xcpu:2"]
    )
    assert list(tmp_path.iterdir()) == [tiny]


@pytest.mark.slow
def test_torchrun_on_this_machine(tiny: Path, tmp_path: Path) -> None:
    items = [
        "config=ddp_2cpu",
        "instances=1xcpu:2",
        "job=two",
        "trainer.max_epochs=1",
        "hosts=localhost",
    ]
    done = run_cli("torchrun", f"recipe={tiny}", *items, program="launch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# localhost\ncd " in done.stdout
    assert "processes: 2 on 1 machine (started by torchrun)" in done.stdout
    run = tmp_path / "runs" / "tiny" / "two"
    assert summary_of(run)["status"] == "done"
    items = ["instances=1xcpu:1", "job=bad", "data.source.root=/nowhere"]
    failed = run_cli("torchrun", f"recipe={tiny}", *items, program="launch", cwd=tmp_path)
    assert failed.returncode == 1


def test_lines_of_other_machines_are_only_printed(tiny: Path, prints: Command) -> None:
    items = [
        f"recipe={tiny}",
        "instances=2xcpu:2",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "job=two",
    ]
    shown = prints("launch", ["torchrun", *items, "hosts=a.invalid,b.invalid"])
    assert shown.count("--rdzv-endpoint=a.invalid:29500") == 2
    assert shown.endswith("none of these is this machine: type each machine's line there\n")
    assert list(Path().iterdir()) == [Path("tiny.yaml")]


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Puts shell scripts before all programs of their names; each notes its arguments in ``NAME.calls``."""
    folder.mkdir()
    for name, text in programs.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/{name}.calls"\n{text}\n')
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(("status", "wait"), [(0, "true"), (100, "true"), (100, "false")])
def test_skypilot_is_called_and_its_log_shown(
    status: int, wait: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stand_in(tmp_path / "bin", monkeypatch, sky=f'[ "$2" = logs ] && exit {status}; exit 0')
    items = [
        f"recipe={tiny}",
        "instances=1xA100:8",
        "bucket=s3://kd-test/runs",
        "job=food-1",
        f"wait={wait}",
        *CLOUD,
    ]
    waits = wait == "true"
    assert main("launch", ["sky", *items]) == int(waits and status != 0)
    file = tmp_path / "runs/tiny/jobs/food-1/sky.yaml"
    calls = ["check", f"jobs launch --yes --detach-run --name food-1 {file}"]
    if waits:
        calls.append("jobs logs --name food-1")
    assert (tmp_path / "bin/sky.calls").read_text().splitlines() == calls
    assert file.is_file() and file.stat().st_mode & 0o77 == 0
    assert "kd-report s3://kd-test/runs/food-1/tiny/food-1 its run" in capfd.readouterr().out


def test_a_job_that_slurm_takes_or_refuses(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Command,
) -> None:
    refuses = 'case "$*" in *late*) echo "no partition" >&2; exit 1;; esac; echo "7;here"'
    stand_in(tmp_path / "bin", monkeypatch, sbatch=refuses)
    items = ["slurm", f"recipe={tiny}", "instances=1xgpu:8"]
    assert main("launch", [*items, "job=food-1"]) == 0
    told = capsys.readouterr()
    folder = tmp_path / "runs/tiny/jobs/food-1"
    assert f"sent as 7; squeue --job=7 shows its state, tail -F {folder}/log its log" in told.out
    assert (folder / "train.sbatch").is_file()
    assert f"job: there is a job {folder} already" in refusal("launch", [*items, "job=food-1"])
    assert "kd-launch: sbatch --parsable: no partition" in refusal("launch", [*items, "job=late"])
    assert not Path("runs/tiny/jobs/late").exists()
