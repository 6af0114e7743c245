"""SkyPilot: a managed job on any cloud or Kubernetes."""

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import field

import yaml

from kd.errors import UserError
from kd.fleet.jobs.job import Job, JobOptions
from kd.fleet.jobs.target import Target, ask, written
from kd.launch.sagemaker import channel_variable

RUNS, FILES, CHANNELS = "/kd-runs", "/kd-files", "/kd-channels"
"""Folders in every container: the job's runs, the user's own recipe and overlays, the channels' data."""
SCHEMES = "s3|gs|https|r2|cos|oci|nebius"  # of the stores that SkyPilot mounts


class SkyOptions(JobOptions):
    """What ``kd-launch sky`` is given."""

    bucket: str = ""
    """s3://BUCKET[/FOLDER], gs://... for the runs."""
    infra: str = ""
    """Cloud and region (aws/us-east-1), or kubernetes; default: the cheapest."""
    channel: dict[str, str] = field(default_factory=dict)
    """s3://... of data, as data.source.root=channel:NAME."""
    wait: bool = True
    """Only sends it."""


class SkyPilot(Target):
    """SkyPilot's managed job: an interrupted machine is replaced, and the run resumes from the bucket.

    ``hours`` counts anew on each machine that replaces one.
    """

    example = "2xA100:8"
    shares_disk = False
    takes_data = False
    options = SkyOptions

    def write(self, job: Job) -> dict[str, str]:
        """``sky.yaml``, as text by its name.

        Raises:
            UserError: a key with a value that SkyPilot does not take.
        """
        task = _task(job)
        return {"sky.yaml": yaml.safe_dump(task, sort_keys=False, width=1000)}

    def check(self, job: Job) -> None:
        """Checks that ``sky`` is installed and may use a cloud (``sky check``)."""
        ask(["sky", "check"], "pip install 'skypilot[aws]'")

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Launches the job with ``sky jobs launch``, detached; prints how its log and its run are seen."""
        with written(job, files) as folder:
            launch = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name]
            ask([*launch, str(folder / "sky.yaml")])
        bucket = job.bucket_url(job.options.bucket, SCHEMES)
        run = f"{bucket}/{job.name}/{job.recipe}/{job.name}"
        print(
            f"kd-launch: sent as {job.name}; sky jobs logs --name {job.name} shows its log, kd-report {run} its run",
            flush=True,
        )

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """``sky jobs logs`` until the job's end, unless ``wait=false``; returns 1 where it has failed or its log can't be
        followed.
        """
        if not job.options.wait:
            return 0
        logs = ["sky", "jobs", "logs", "--name", job.name]
        return int(subprocess.run(logs, check=False).returncode != 0)


def _task(job: Job) -> dict[str, object]:
    """The SkyPilot task as a dict for YAML. ``timeout`` ends the training after the job's hours; such a job counts as
    failed.

    Raises:
        UserError: as of :func:`_resources`, or a wrong ``bucket``.
    """
    arguments = [*job.command(FILES), f"runs_dir={RUNS}", f"name={job.name}"]
    environment = {channel_variable(name): f"{CHANNELS}/{name}" for name in job.channels}
    task: dict[str, object] = {
        "name": job.name,
        "num_nodes": job.machines.count,
        "resources": _resources(job),
        "file_mounts": _mounts(job),
    }
    if environment:
        task["envs"] = environment
    # as torchrun's line does
    limit = f"timeout --foreground --signal=TERM --kill-after=300 {job.seconds}"
    task["run"] = f"{limit} kd-train {shlex.join(arguments)}\n"
    return task


def _resources(job: Job) -> dict[str, object]:
    """The task's ``resources`` as SkyPilot reads them.

    A task that fails is not started again (0 restarts on errors); an interrupted machine is replaced in any case.

    Raises:
        UserError: ``gpu:N``, since SkyPilot wants the GPU's name.
    """
    machines = job.machines
    resources: dict[str, object] = {}
    if job.options.infra:
        resources["infra"] = job.options.infra
    if machines.parts is None:
        resources["instance_type"] = machines.type.removeprefix("ml.")
    elif machines.parts[0] == "cpu":
        resources["cpus"] = f"{machines.parts[1]}+"
    elif machines.parts[0] == "gpu":
        raise UserError(
            f"instances: SkyPilot wants a GPU's name ({machines.count}xA100:{machines.parts[1]})"
        )
    else:
        resources["accelerators"] = machines.type
    resources["use_spot"] = job.options.spot
    image = job.need("image", job.options.image, "REGISTRY/kd:TAG").removeprefix("docker:")
    resources["image_id"] = f"docker:{image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 0}
    return resources


def _mounts(job: Job) -> dict[str, object]:
    """SkyPilot's ``file_mounts``: place in the container -> source.

    The job's folder in the bucket at :data:`RUNS`, each channel's data below :data:`CHANNELS`, the user's own files
    below :data:`FILES`.
    """
    bucket = job.bucket_url(job.options.bucket, SCHEMES)
    runs = {"source": f"{bucket}/{job.name}", "mode": "MOUNT_CACHED"}
    mounts: dict[str, object] = {RUNS: runs}
    for name in job.channels:
        given = job.options.channel.get(name, "")
        example = f"s3://BUCKET/{name}"
        url = job.need(f"channel.{name}", given, example)
        place = f"{CHANNELS}/{name}"
        mounts[place] = {"source": url, "mode": "MOUNT"}
    for name, path in job.files.items():
        place = f"{FILES}/{name}"
        mounts[place] = str(path.absolute())
    return mounts


TARGET = SkyPilot()
