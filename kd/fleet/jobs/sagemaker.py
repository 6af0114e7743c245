"""SageMaker: the request of one training job, sent with boto3 (extra ``aws``)."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from kd.errors import UserError, did_you_mean, needs_extra
from kd.fleet.jobs.channels import Channel, channels, network
from kd.fleet.jobs.job import Job, Machines
from kd.fleet.jobs.target import Outcome, Target, followed
from kd.run.own_keys import positive
from kd.storage.archives import unpack
from kd.storage.elsewhere import json_of, text_of

if TYPE_CHECKING:
    from boto3 import Session
    from botocore.client import BaseClient
    from botocore.model import ServiceModel

POLL_S = 20
"""Seconds between two questions for the job's state."""
EFA = re.compile(r"ml\.(p4d|p4de|p5|p6)")  # instances with AWS's fast network between machines
LISTABLE = "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may list (s3:ListBucket)"
"""What the place of data in S3 must be, for messages."""
WRITABLE = (
    "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may write to (s3:PutObject)"
)
"""What the place of uploads must be, for messages."""
METRICS = ("train/loss", "val/acc1", "val/miou", "val/map")
"""Metrics that SageMaker reads from a job's log and shows as curves."""
METRIC = r"(?:^|\s){name} (-?[0-9.]+(?:e[+-]?[0-9]+)?)"  # A value in the line that ``kd-train`` prints after each epoch


class SageMaker(Target):
    """A SageMaker training job, one request of CreateTrainingJob."""

    example = "2xml.p4d.24xlarge"
    keys: Mapping[str, str] = {
        "role": "ARN of the role that the job takes",
        "bucket": "s3://BUCKET[/FOLDER] for results and checkpoints",
        "channel.NAME": "data for data.source.root=channel:NAME: s3://, fsx://FILE_SYSTEM_ID/MOUNT_NAME/..., efs://",
        "channel.NAME.input_mode": "File (copied before the start) or FastFile (read when opened)",
        "channel.NAME.access": "ro or rw, of fsx:// and efs:// (ro)",
        "subnets": "of the VPC, with commas between; fsx:// and efs:// need one",
        "security_groups": "of the VPC, with commas between",
        "volume_gb": "disk of each machine (100)",
        "kms_key": "encrypts disks and results (instances with disks of their own encrypt these themselves)",
        "tags": "KEY=VALUE of the job, with commas between",
        "max_wait_hours": "with spot=true: hours until the end, waiting for machines included (twice hours=)",
    }

    def write(self, job: Job) -> dict[str, str]:
        """``request.json``: the request, validated against the service's own model, as text by its name.

        Raises:
            UserError: a key with a value that SageMaker does not take.
        """
        request = {
            "TrainingJobName": job.name,
            **common(job),
            **tags(job),
            "HyperParameters": hyperparameters(job),
        }
        # as the SDK's ModelTrainer does
        request["AlgorithmSpecification"]["ContainerEntrypoint"] = ["kd-train"]
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
        _check_bucket(s3, "bucket", job.options["bucket"])
        for channel in channels(job):
            if channel.in_s3:
                key = f"channel.{channel.name}"
                bucket, prefix = _check_bucket(s3, key, channel.url)
                with boto_errors(f"{key}: can't list {channel.url}", LISTABLE):
                    listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
                if not listed["KeyCount"]:
                    raise UserError(f"{key}: there is nothing at {channel.url}")

    def submit(self, job: Job, folder: Path) -> str:
        """Uploads the user's own files and sends ``request.json`` of ``folder``; returns the job's name."""
        with uploaded(job) as session:
            session.client("sagemaker").create_training_job(**read_request(folder))
        return job.name

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints the job's status and its log's new lines until the end.

        Args:
            handle: the job's name.
            folder: of the job here; not read.
        """
        session = aws_session()
        client = session.client("sagemaker")
        log = _Log(session.client("logs"), handle)

        def poll() -> tuple[str, Outcome | None]:
            """One look at the job, whose new lines are printed: its status, and the outcome once it has ended."""
            with boto_errors():
                answer = client.describe_training_job(TrainingJobName=handle)
                log.print_new()
            status = answer["TrainingJobStatus"]
            text = f"{status}: {answer.get('SecondaryStatus', '')}"
            if status in ("Completed", "Failed", "Stopped"):
                return text, _outcome(answer)
            return text, None

        return followed(handle, poll, POLL_S)

    def fetch(self, outcome: Outcome, into: Path) -> Path | None:
        """Unpacks the job's ``model.tar.gz``, which holds the run's folder, to ``into``, whole or not at all.

        Args:
            outcome: ``where`` is the archive's URL; "": the job has left none, and None is returned.
            into: the run's folder here, made by this.
        """
        bucket, _, key = outcome.where.removeprefix("s3://").partition("/")
        if not key:
            return None
        part = into.with_name(f".{into.name}.part")
        with tempfile.TemporaryDirectory() as folder, boto_errors():
            archive = Path(folder) / "model.tar.gz"
            aws_session().client("s3").download_file(bucket, key, str(archive))
            unpack(archive, part)
        part.rename(into)
        return into


def _check_bucket(s3: "BaseClient", key: str, url: str) -> tuple[str, str]:
    """Checks that the bucket of a URL exists and can be accessed.

    Args:
        s3: boto3's client.
        key: that names the URL, for the message.
        url: ``s3://BUCKET[/FOLDER]``.

    Returns:
        The bucket and the path in it, "" without one.

    Raises:
        UserError: no such bucket, or no access to it.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    with boto_errors(f"{key}: can't access the bucket '{bucket}'", LISTABLE):
        s3.head_bucket(Bucket=bucket)
    return bucket, prefix


@contextmanager
def uploaded(job: Job) -> Iterator["Session"]:
    """Uploads the user's own recipe and overlays to ``files/`` of the job's folder in the bucket.

    The block sends the request; where it fails they are deleted again. Inside, errors of boto3 become a UserError.

    Yields:
        The session that uploaded them.
    """
    session = aws_session()
    bucket, _, prefix = f"{_place(job)}/files/".removeprefix("s3://").partition("/")
    s3 = session.client("s3")
    sent = []
    try:
        for name, path in job.files.items():
            with boto_errors(f"bucket: can't upload {name} to {_place(job)}/files/", WRITABLE):
                s3.upload_file(str(path), bucket, prefix + name)
            sent.append(prefix + name)
        with boto_errors():
            yield session
    except BaseException:
        for key in sent:
            remove_upload(s3, bucket, key)
        raise


def remove_upload(s3: "BaseClient", bucket: str, key: str) -> None:
    """Deletes what was uploaded for a request that was not sent; where that is refused, a line on stderr names it.

    Args:
        s3: boto3's client.
        bucket: its name.
        key: the object's path in it.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        s3.delete_object(Bucket=bucket, Key=key)
    except (BotoCoreError, ClientError) as error:
        print(f"kd-launch: s3://{bucket}/{key} is left: {error}", file=sys.stderr)


def read_request(folder: Path) -> dict[str, Any]:
    """The request in a job's folder, as it was shown to the user."""
    return json_of(text_of(folder / "request.json"))


def common(job: Job) -> dict[str, Any]:
    """The keys that a training job's request and a tuning job's definition of its trials have in common.

    Needed keys that were not given have placeholders, and are noted in the job (:meth:`kd.fleet.jobs.job.Needs.need`).

    Raises:
        UserError: a key with a value that SageMaker does not take.
    """
    data = channels(job)
    inputs = [channel.request() for channel in data]
    if job.files:
        inputs.append(Channel("files", f"{_place(job)}/files/").request())
    key = {}
    if job.options.get("kms_key"):
        key = {"KmsKeyId": job.options["kms_key"]}
    return {
        **network(job, data),
        "RoleArn": job.need("role", "arn:aws:iam::ACCOUNT:role/NAME"),
        "AlgorithmSpecification": {
            "TrainingImage": job.need("image", "ACCOUNT.dkr.ecr.REGION.amazonaws.com/kd:TAG"),
            "TrainingInputMode": "File",
            "MetricDefinitions": [
                {"Name": name, "Regex": METRIC.format(name=name)} for name in METRICS
            ],
        },
        **({"InputDataConfig": inputs} if inputs else {}),
        "OutputDataConfig": {
            "S3OutputPath": f"{_place(job)}/output",
            "CompressionType": "GZIP",
            **key,
        },
        "StoppingCondition": _stop(job),
        "EnableManagedSpotTraining": job.spot,
        "CheckpointConfig": {
            "S3Uri": f"{_place(job)}/checkpoints",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "ResourceConfig": {
            **_machines(job),
            **({"VolumeKmsKeyId": job.options["kms_key"]} if key and not _has_disks(job) else {}),
            "VolumeSizeInGB": int(positive("volume_gb", job.options.get("volume_gb", "100"))),
        },
        "Environment": {
            "PYTHONUNBUFFERED": "1",
            **({"RAY_AUTH_TOKEN": job.secret} if job.secret else {}),
            **(
                {"FI_PROVIDER": "efa"}
                if job.machines.count > 1 and EFA.match(job.machines.type)
                else {}
            ),
        },
    }


def _place(job: Job) -> str:
    """The job's folder in the bucket, with ``files/``, ``output/`` and ``checkpoints/`` below it."""
    return f"{job.bucket_url('s3')}/{job.name}"


def hyperparameters(job: Job) -> dict[str, str]:
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


def _stop(job: Job) -> dict[str, int]:
    """``StoppingCondition``: seconds of training, and with ``spot`` seconds until the end, waiting included.

    ``max_wait_hours`` is twice ``hours`` where it is not given.

    Raises:
        UserError: ``max_wait_hours`` without ``spot``, no number > 0, or less than ``hours``.
    """
    text = job.options.get("max_wait_hours")
    if text is not None and not job.spot:
        raise UserError("max_wait_hours: only a job with spot=true waits for machines")
    wait_hours = 2 * job.hours
    if text is not None:
        wait_hours = positive("max_wait_hours", text)
    if wait_hours < job.hours:
        raise UserError(
            f"max_wait_hours: must be at least hours ({job.hours:g}), got {wait_hours:g}"
        )
    condition = {"MaxRuntimeInSeconds": job.seconds}
    if job.spot:
        condition["MaxWaitTimeInSeconds"] = max(1, round(wait_hours * 3600))
    return condition


def tags(job: Job) -> dict[str, list[dict[str, str]]]:
    """``Tags`` of the job's key ``tags`` (``KEY=VALUE,KEY=VALUE``); {} without it.

    Raises:
        UserError: an item without a key or ``=``.
    """
    pairs = []
    for word in job.options.get("tags", "").split(","):
        if not word:
            continue
        key, equals, value = word.partition("=")
        if not key.strip() or not equals:
            raise UserError(f"tags: must be KEY=VALUE with commas between, got '{key}{equals}'")
        pairs.append({"Key": key.strip(), "Value": value.strip()})
    return {"Tags": pairs} if pairs else {}


def _has_disks(job: Job) -> bool:
    """Whether any machine of the job has disks of its own, for whose volume SageMaker refuses a key."""
    return any(
        re.match(r"ml\.(p3dn|p[4-9]|g\d|trn|[a-z]+\dd)", group.type)
        for group in job.groups.values()
    )


def _machines(job: Job) -> dict[str, Any]:
    """The machines as keys of ``ResourceConfig``: type and number; where some prepare data, a list of groups with these.

    Raises:
        UserError: an instance type that SageMaker does not have.
    """
    for key, group in (("instances", job.machines), ("data_instances", job.data_machines)):
        if group is not None:
            check_type(key, group)
    if job.data_machines is None:
        return {"InstanceType": job.machines.type, "InstanceCount": job.machines.count}
    groups = []
    for name, group in job.groups.items():
        groups.append(
            {"InstanceGroupName": name, "InstanceType": group.type, "InstanceCount": group.count}
        )
    return {"InstanceGroups": groups}


def check_type(key: str, machines: Machines, kind: str = "TrainingInstanceType") -> None:
    """Checks an instance type against boto3's model of the service; without boto3 only that it begins with ``ml.``.

    Args:
        key: named in the message.
        machines: of that type.
        kind: the shape in the service's model that lists the types.

    Raises:
        UserError: unknown type; the message has the nearest one, or examples.
    """
    model = _model()
    if model is None:
        if not machines.type.startswith("ml."):
            raise UserError(
                f"{key}: SageMaker has no '{machines.type}' ({SageMaker.example}, 1xml.g5.xlarge, ...)"
            )
        return
    known = model.shape_for(kind).enum
    if machines.type not in known:
        hint = did_you_mean(machines.type, known) or " (ml.p4d.24xlarge, ml.g5.xlarge, ...)"
        raise UserError(f"{key}: SageMaker has no '{machines.type}'{hint}")


def _model() -> "ServiceModel | None":
    """boto3's description of the service; None without boto3, which a dry run does not need."""
    try:
        session = import_module("botocore.session").get_session()
    except ImportError:
        return None
    return cast("ServiceModel", session.get_service_model("sagemaker"))


def check_request(operation: str, request: dict[str, Any]) -> None:
    """Validates a request against the service's own model; without boto3 it prints that it did not.

    Args:
        operation: of the service, ``CreateTrainingJob``.
        request: its arguments.

    Raises:
        UserError: SageMaker would refuse it.
    """
    model = _model()
    if model is None:
        unchecked = "kd-launch: the request is not held against SageMaker's own model"
        print(f"{unchecked}: {needs_extra('aws')}", file=sys.stderr)
        return
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, model.operation_model(operation).input_shape)
    if report.has_errors():
        raise UserError(
            f"SageMaker would refuse the request: {' '.join(report.generate_report().split())[:300]}"
        )


def _import(name: str) -> ModuleType:
    """A module of AWS's SDK; a user's error names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"sagemaker: {needs_extra('aws')}") from error


def aws_session() -> "Session":
    """The user's session with AWS.

    Raises:
        UserError: no credentials, no region, or no boto3.
    """
    session = _import("boto3").Session()
    if session.get_credentials() is None:
        raise UserError("sagemaker: no AWS credentials (aws configure, or AWS_PROFILE)")
    if session.region_name is None:
        raise UserError("sagemaker: no AWS region (AWS_DEFAULT_REGION)")
    return session


@contextmanager
def boto_errors(problem: str = "sagemaker", allowed: str = "") -> Iterator[None]:
    """Inside, errors of boto3 become a UserError of one line; needs boto3, which :func:`aws_session` checks.

    Args:
        problem: begins the message; AWS's reason follows.
        allowed: what the setting may be, at the end of the message; "": nothing is said of it.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error) as error:
        reason = " ".join(str(error).split())[:300]
        remedy = f"; {allowed}" if allowed else ""
        raise UserError(f"{problem}: {reason}{remedy}") from error


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    """How a training job has ended, from ``DescribeTrainingJob``: hours, hours billed, and of a completed one
    its model's place in S3.
    """
    status = answer["TrainingJobStatus"]
    text = f"{status}: {answer.get('FailureReason', '')}".rstrip(": ")
    hours = _hours(answer.get("TrainingTimeInSeconds"))
    billed_hours = _hours(answer.get("BillableTimeInSeconds"))
    if status != "Completed":
        return Outcome(False, text, hours=hours, billed_hours=billed_hours)
    artifacts = answer.get("ModelArtifacts") or {}
    return Outcome(
        True,
        text,
        hours=hours,
        billed_hours=billed_hours,
        where=artifacts.get("S3ModelArtifacts", ""),
    )


def _hours(seconds: float | None) -> float | None:
    """Seconds as hours; None, where the service reports none, stays None."""
    if seconds is None:
        return None
    return seconds / 3600


class _Log:
    """New lines of a job's log streams, one stream a machine."""

    GROUP = "/aws/sagemaker/TrainingJobs"

    def __init__(self, client: "BaseClient", job: str) -> None:
        """Begins before the first line of the job ``job``; ``client`` is CloudWatch Logs'."""
        self._client = client
        self._job = job
        self._next: dict[str, str] = {}  # by stream: the token of its next page

    def print_new(self) -> None:
        """Prints all lines since the last call, each after its machine's name; nothing before the job has a log."""
        pages = self._client.get_paginator("describe_log_streams").paginate(
            logGroupName=self.GROUP, logStreamNamePrefix=f"{self._job}/"
        )
        try:
            streams = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except self._client.exceptions.ResourceNotFoundException:  # nothing has been written yet
            return
        for name in sorted(streams):
            _, _, stream = name.rpartition("/")
            machine, _, _ = stream.rpartition("-")
            for message in self._new_messages(name):
                print(f"{machine}: {message}", flush=True)

    def _new_messages(self, stream: str) -> Iterator[str]:
        """The messages of a stream since the last call; a page holds 10,000 of them at most.

        At the end of a stream the service returns the token that it was given.
        """
        while True:
            token = {}
            if stream in self._next:
                token = {"nextToken": self._next[stream]}
            page = self._client.get_log_events(
                logGroupName=self.GROUP, logStreamName=stream, startFromHead=True, **token
            )
            for event in page["events"]:
                yield event["message"]
            at_the_end = page["nextForwardToken"] == self._next.get(stream)
            self._next[stream] = page["nextForwardToken"]
            if at_the_end:
                return
