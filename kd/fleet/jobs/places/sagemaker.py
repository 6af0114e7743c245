"""SageMaker: one request of CreateTrainingJob, sent and awaited with boto3 (extra ``aws``)."""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.aws import (
    IMAGE,
    ROLE,
    aws_session,
    boto_errors,
    bucket_and_path,
    check_request,
    check_type,
    uploaded,
    waited,
)
from kd.fleet.jobs.job import Job, JobOptions
from kd.fleet.jobs.target import Target, written
from kd.run import files
from kd.storage.archives import unpack
from kd.storage.elsewhere import json_of, mapping_of
from kd.storage.run_urls import folder_of_recipe
from kd.storage.writing import write_json

RECORD = "job.json"
"""A sent job's record, in its folder: ``target``, ``job``, ``recipe``, ``groups`` of machines. In the run's folder, where
the report reads it, also ``hours``, ``billed_hours`` and ``text``."""
EFA = re.compile(r"ml\.(p4d|p4de|p5|p6)")  # instances with AWS's fast network between machines
LISTABLE = "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may list (s3:ListBucket)"
"""What a place in S3 must be, for messages."""
METRICS = ("train/loss", "val/acc1", "val/miou", "val/map")
"""Metrics that SageMaker reads from a job's log and shows as curves."""
METRIC = r"(?:^|\s){name} (-?[0-9.]+(?:e[+-]?[0-9]+)?)"  # A value in the line that ``kd-train`` prints after each epoch
FILE_SYSTEM = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,})(/.*)?")
PLACES = "s3://BUCKET[/FOLDER], fsx://FILE_SYSTEM_ID/MOUNT_NAME[/FOLDER] or efs://FILE_SYSTEM_ID[/FOLDER]"
"""What a channel's place may be, for messages."""


class SageMakerOptions(JobOptions):
    """What ``kd-launch sagemaker`` is given."""

    role: str = ""
    """ARN of the role that the job takes."""
    bucket: str = ""
    """s3://BUCKET[/FOLDER] for results and checkpoints."""
    channel: dict[str, str] = field(default_factory=dict)
    """Data for data.source.root=channel:NAME: s3://, fsx://FILE_SYSTEM_ID/MOUNT_NAME/..., efs://."""
    request: Path | None = None
    """YAML of more of CreateTrainingJob's own keys: VpcConfig (fsx://, efs://), KmsKeyId, Tags, ..."""
    wait: bool = True
    """Only sends it; job=NAME alone waits for its end and fetches its run."""


class SageMaker(Target):
    """A SageMaker training job, one request of CreateTrainingJob."""

    example = "2xml.p4d.24xlarge"
    shares_disk = False
    takes_data = True
    options = SageMakerOptions

    def write(self, job: Job) -> dict[str, str]:
        """``request.json``: the request, validated against the service's own model, as text by its name.

        Raises:
            UserError: a key with a value that SageMaker does not take.
        """
        request = _request(job)
        if job.options.request:
            try:
                _put_in(request, files.read_settings(job.options.request.expanduser()))
            except UserError as error:
                raise UserError(f"request: {error}") from error
        check_request("CreateTrainingJob", request)
        return {"request.json": json.dumps(request, indent=2) + "\n"}

    def check(self, job: Job) -> None:
        """Checks the credentials, access to the bucket, and that something is listed at each channel's place in S3.

        It changes nothing. Data in file systems are not checked, and no object is read.

        Raises:
            UserError: no credentials, or a bucket or a channel's place that can't be listed, or with nothing at it; all
                but the first name the key.
        """
        s3 = aws_session().client("s3")
        channels = {f"channel.{name}": url for name, url in _channels(job).items()}
        places = {"bucket": job.options.bucket, **channels}
        for key, url in places.items():
            if not url.startswith("s3://"):
                continue
            bucket, prefix = bucket_and_path(url)
            with boto_errors(f"{key}: can't list {url}", LISTABLE):
                listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
            is_empty = not listed["KeyCount"]
            if is_empty and key in channels:
                raise UserError(f"{key}: there is nothing at {url}")

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Uploads the user's own files, sends the request, writes :data:`RECORD`, and prints how the log is seen. Where the
        request is refused, the uploads and the job's folder are deleted.
        """
        session = aws_session()
        own = {f"{_place(job)}/files/{name}": path for name, path in job.files.items()}
        request = json_of(files["request.json"])
        with written(job, files) as folder, uploaded(session.client("s3"), own):
            with boto_errors():
                session.client("sagemaker").create_training_job(**request)
            groups = [
                {"name": name, "machines": str(machines), "price_per_hour": job.prices.get(name)}
                for name, machines in job.groups.items()
            ]
            about = {"target": "sagemaker", "job": job.name, "recipe": job.recipe}
            write_json(folder / RECORD, {**about, "groups": groups})
        log = "aws logs tail /aws/sagemaker/TrainingJobs --follow --log-stream-name-prefix"
        print(f"kd-launch: sent as {job.name}; its log: {log} {job.name}", flush=True)

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """As :meth:`follow`, unless ``wait=false``."""
        return self.follow(job.name, str(job.runs_dir)) if job.options.wait else 0

    def follow(self, name: str, runs: str) -> int:
        """Waits for the end of a training job, and unpacks its run to ``runs/RECIPE/NAME`` unless it is there. Hours and
        state are written to :data:`RECORD` in that folder.

        Args:
            name: of the job, sent from here or from elsewhere.
            runs: ``runs_dir``.

        Returns:
            The exit status: 0; 1 where the job has failed or was stopped; 130 after Ctrl-C (the job continues).

        Raises:
            UserError: SageMaker has no such job, or can't be reached.
        """
        try:
            answer = waited("training_job", name)
        except KeyboardInterrupt:
            again = f"kd-launch sagemaker job={name} follows it again"
            print(f"\nkd-launch: the job continues; {again}", file=sys.stderr)
            return 130
        given = answer.get("HyperParameters", {}).get("recipe", "")
        recipe = Path(given).stem.lstrip(".") or "run"
        into = folder_of_recipe(Path(runs), recipe) / name
        text = answer["text"]
        url = (answer.get("ModelArtifacts") or {}).get("S3ModelArtifacts")
        if url and text == "Completed" and not into.exists():
            with boto_errors():
                _fetch(url, into)
        if text != "Completed":
            print(f"kd-launch: {name}: {text}", file=sys.stderr)
            return 1
        if into.exists():
            record = {"target": "sagemaker", "job": name, "recipe": recipe, "text": text}
            record |= mapping_of(into.parent / "jobs" / name / RECORD)
            record["hours"] = answer.get("TrainingTimeInSeconds", 0) / 3600
            record["billed_hours"] = answer.get("BillableTimeInSeconds", 0) / 3600
            write_json(into / RECORD, record)
            text += f"; run folder: {into}"
        print(f"kd-launch: {name}: {text}", flush=True)
        return 0


def _fetch(archive_url: str, into: Path) -> None:
    """Downloads ``model.tar.gz`` from S3, which holds a run's folder, and unpacks it to ``into``: whole, or ``into`` is not
    made. Errors of boto3 are the caller's to catch.
    """
    bucket, key = bucket_and_path(archive_url)
    part = into.with_name(f".{into.name}.part")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "model.tar.gz"
        aws_session().client("s3").download_file(bucket, key, str(archive))
        unpack(archive, part)
    part.rename(into)


def _request(job: Job) -> dict[str, Any]:
    """The request of CreateTrainingJob.

    Needed keys that were not given have placeholders, and are noted in the job (:meth:`kd.fleet.jobs.job.Needs.need`).

    Raises:
        UserError: a key with a value that SageMaker does not take.
    """
    inputs = [_channel(name, url) for name, url in _channels(job).items()]
    role = job.need("role", job.options.role, ROLE)
    image = job.need("image", job.options.image, IMAGE)
    place = _place(job)
    if job.files:
        inputs.append(_channel("files", f"{place}/files/"))
    metrics = [{"Name": name, "Regex": METRIC.format(name=name)} for name in METRICS]
    request: dict[str, Any] = {
        "TrainingJobName": job.name,
        "HyperParameters": _settings(job),
        "RoleArn": role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["kd-train"],  # as the SDK's ModelTrainer does
            "MetricDefinitions": metrics,
        },
        "OutputDataConfig": {"S3OutputPath": f"{place}/output", "CompressionType": "GZIP"},
        "StoppingCondition": {"MaxRuntimeInSeconds": job.seconds},
        "EnableManagedSpotTraining": job.options.spot,
        "CheckpointConfig": {
            "S3Uri": f"{place}/checkpoints",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "ResourceConfig": {**_machines(job), "VolumeSizeInGB": 100},
        "Environment": {"PYTHONUNBUFFERED": "1"},
    }
    if inputs:
        request["InputDataConfig"] = inputs
    if job.options.spot:  # waiting for machines included
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 2 * job.seconds
    if job.secret:
        request["Environment"]["RAY_AUTH_TOKEN"] = job.secret
    if job.machines.count > 1 and EFA.match(job.machines.type):
        request["Environment"]["FI_PROVIDER"] = "efa"
    return request


def _put_in(request: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Puts more keys into a request, mapping by mapping; what is there already is replaced."""
    for key, value in more.items():
        below = request.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _put_in(below, value)
        else:
            request[key] = value


def _place(job: Job) -> str:
    """The job's folder in the bucket, with ``files/``, ``output/`` and ``checkpoints/`` below it."""
    return f"{job.bucket_url(job.options.bucket, 's3')}/{job.name}"


def _settings(job: Job) -> dict[str, str]:
    """The run's settings by key, as texts; in the container they become words of ``kd-train``'s command line.

    All overlays are one setting, ``config``, a JSON list. Of another key that is given twice the last one counts.

    Raises:
        UserError: what SageMaker's map of settings can't hold: ``--trust``, ``KEY+=`` or ``trust=`` twice, a value of
            more than 2,500 characters.
    """
    settings: dict[str, str] = {}
    overlays = []
    for item in job.command("channel:files"):
        key, _, value = item.partition("=")
        if key == "config":
            overlays.append(value)
        elif key == "--trust":
            raise UserError(
                "--trust: SageMaker takes settings alone; name the module (trust=MODULE)"
            )
        elif (key.endswith("+") or key == "trust") and key in settings:
            once = "SageMaker takes a key once; put it into an overlay of your own"
            raise UserError(f"{key}: is given twice, but {once}")
        else:
            settings[key] = value
    if overlays:
        settings["config"] = json.dumps(overlays)
    for key, value in settings.items():
        if len(value) > 2500:
            raise UserError(
                f"{key}: SageMaker takes 2,500 characters; put it into an overlay of your own"
            )
    return settings


def _machines(job: Job) -> dict[str, Any]:
    """The machines as ``ResourceConfig`` takes them: type and number; where some prepare data, such a pair for each group.

    Raises:
        UserError: an instance type that SageMaker does not have.
    """
    groups = []
    for name, group in job.groups.items():
        check_type("data_instances" if name == "data" else "instances", group)
        groups.append({"InstanceType": group.type, "InstanceCount": group.count})
    if len(groups) == 1:
        return groups[0]
    named = zip(job.groups, groups, strict=True)
    return {"InstanceGroups": [{"InstanceGroupName": name, **group} for name, group in named]}


def _channels(job: Job) -> dict[str, str]:
    """The URL of each channel of a job, by its name.

    First those given by ``channel.NAME=URL``, in their order; then those that only a setting names, as ``channel:NAME``:
    their URL is an example, and the key is noted as missing.
    """
    given = job.options.channel
    channels = {}
    for name in [*given, *job.channels]:
        url = given.get(name, "")
        example = f"s3://BUCKET/{name}"
        channels[name] = job.need(f"channel.{name}", url, example)
    return channels


def _channel(name: str, url: str) -> dict[str, Any]:
    """A channel as an item of ``InputDataConfig``: S3, FSx for Lustre or EFS, by its URL; all are only read.

    Raises:
        UserError: a URL of another kind, or FSx without its mount name; it names the key.
    """
    if url.startswith("s3://"):
        s3 = {"S3DataType": "S3Prefix", "S3Uri": url, "S3DataDistributionType": "FullyReplicated"}
        return {"ChannelName": name, "DataSource": {"S3DataSource": s3}}
    match = FILE_SYSTEM.fullmatch(url)
    if match is None:
        raise UserError(f"channel.{name}: must be {PLACES}, got '{url}'")
    kind, system, path = match.groups("/")
    if kind == "fsx" and not path.strip("/"):
        raise UserError(
            f"channel.{name}: FSx wants its mount name as the first folder (fsx://{system}/MOUNT_NAME)"
        )
    mounted = {
        "FileSystemId": system,
        "FileSystemAccessMode": "ro",
        "FileSystemType": {"fsx": "FSxLustre", "efs": "EFS"}[kind],
        "DirectoryPath": path,
    }
    source = {"FileSystemDataSource": mounted}
    return {"ChannelName": name, "DataSource": source, "InputMode": "File"}


TARGET = SageMaker()
