"""SageMaker: the request of one training job, validated by botocore's model, sent and awaited with boto3 (extra ``aws``)."""

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from kd.config.kinds import Range
from kd.errors import UserError, did_you_mean, needs_extra
from kd.fleet.jobs.job import Hours, Job, Machines
from kd.fleet.jobs.target import Target, written
from kd.launch.groups import read_json
from kd.run.options import option
from kd.storage.archives import unpack
from kd.storage.elsewhere import json_of, text_of
from kd.storage.run_urls import folder_of_recipe
from kd.storage.writing import write_json

if TYPE_CHECKING:
    from boto3 import Session
    from botocore.client import BaseClient
    from botocore.model import ServiceModel

RECORD = "job.json"
"""A sent job's record, in its folder: ``target``, ``job``, ``recipe``, ``groups`` of machines. In the run's folder, where
the report reads it, also ``hours``, ``billed_hours`` and ``text``."""
EFA = re.compile(r"ml\.(p4d|p4de|p5|p6)")  # instances with AWS's fast network between machines
HAS_DISKS = re.compile(r"ml\.(p3dn|p[4-9]|g\d|trn|[a-z]+\dd)")
"""Instances with disks of their own, for whose volume SageMaker refuses a key."""
LISTABLE = "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may list (s3:ListBucket)"
"""What the place of data in S3 must be, for messages."""
WRITABLE = (
    "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may write to (s3:PutObject)"
)
"""What the place of uploads must be, for messages."""
METRICS = ("train/loss", "val/acc1", "val/miou", "val/map")
"""Metrics that SageMaker reads from a job's log and shows as curves."""
METRIC = r"(?:^|\s){name} (-?[0-9.]+(?:e[+-]?[0-9]+)?)"  # A value in the line that ``kd-train`` prints after each epoch
CHANNEL_OPTIONS = {"input_mode": ("File", "FastFile"), "access": ("ro", "rw")}
"""Settings of a channel, and their values."""
PLACES = "s3://BUCKET[/FOLDER], fsx://FILE_SYSTEM_ID/MOUNT_NAME[/FOLDER] or efs://FILE_SYSTEM_ID[/FOLDER]"
"""What a channel's place may be, for messages."""
MONTH = {"Delay": 30, "MaxAttempts": 86_400}
"""Of boto3's waiters: a look each 30 seconds, for 30 days at most."""


class SageMaker(Target):
    """A SageMaker training job, one request of CreateTrainingJob."""

    also = ("aws",)
    example = "2xml.p4d.24xlarge"
    shares_disk = False
    takes_data = True
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
        "wait": "false: only sends it; job=NAME alone waits for its end and fetches its run",
    }

    def write(self, job: Job) -> dict[str, str]:
        """``request.json``: the request, validated against the service's own model, as text by its name.

        Raises:
            UserError: a key with a value that SageMaker does not take.
        """
        request = _request(job)
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
        places = {"bucket": job.options["bucket"]}
        places |= {f"channel.{name}": url for name, url in _channels(job).items()}
        for key, url in places.items():
            if not url.startswith("s3://"):
                continue
            bucket, prefix = _bucket_and_path(url)
            with boto_errors(f"{key}: can't access the bucket '{bucket}'", LISTABLE):
                s3.head_bucket(Bucket=bucket)
            if key == "bucket":
                continue
            with boto_errors(f"{key}: can't list {url}", LISTABLE):
                listed = s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
            if not listed["KeyCount"]:
                raise UserError(f"{key}: there is nothing at {url}")

    def send(self, job: Job, files: Mapping[str, str]) -> None:
        """Uploads the user's own files and sends the request; where it is refused, what was uploaded is deleted."""
        session = aws_session()
        bucket, prefix = _bucket_and_path(f"{_place(job)}/files/")
        s3 = session.client("s3")
        sent: list[str] = []
        with written(job, files) as folder:
            try:
                for name, path in job.files.items():
                    with boto_errors(
                        f"bucket: can't upload {name} to {_place(job)}/files/", WRITABLE
                    ):
                        s3.upload_file(str(path), bucket, prefix + name)
                    sent.append(prefix + name)
                request = json_of(files["request.json"])
                with boto_errors():
                    session.client("sagemaker").create_training_job(**request)
            except BaseException:
                for key in sent:
                    remove_upload(s3, bucket, key)
                raise
            groups = [
                {"name": name, "machines": str(machines), "price_per_hour": job.prices.get(name)}
                for name, machines in job.groups.items()
            ]
            record = {
                "target": "sagemaker",
                "job": job.name,
                "recipe": job.recipe,
                "groups": groups,
            }
            write_json(folder / RECORD, record)
        log = "aws logs tail /aws/sagemaker/TrainingJobs --follow --log-stream-name-prefix"
        print(f"kd-launch: sent as {job.name}; its log: {log} {job.name}", flush=True)

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """As :meth:`follow`."""
        return self.follow(job.name, str(job.runs_dir))

    def follow(self, name: str, runs: str) -> int:
        """Waits for the end of a training job, and unpacks its run to ``runs/RECIPE/NAME`` unless it is there.

        Args:
            name: of the job, sent from here or from elsewhere.
            runs: ``runs_dir``.

        Returns:
            The exit status: 0; 1 where the job has failed or was stopped; 130 after Ctrl-C (the job continues).

        Raises:
            UserError: SageMaker does not know the job, or can't be reached, which may pass.
        """
        where = "" if runs == "runs" else f" {shlex.quote(f'runs_dir={runs}')}"
        again = f"kd-launch sagemaker job={name}{where} follows it"
        try:
            client = aws_session().client("sagemaker")
            with boto_errors():
                answer = _ended(client, name)
                record_file = next(iter(sorted(Path(runs).glob(f"*/jobs/{name}/{RECORD}"))), None)
                record = {"target": "sagemaker", "job": name, "recipe": _recipe(answer)}
                if record_file:
                    record = read_json(text_of(record_file), str(record_file), dict)
                into = folder_of_recipe(Path(runs), record["recipe"]) / name
                url = (answer.get("ModelArtifacts") or {}).get("S3ModelArtifacts")
                reason = answer.get("FailureReason", "")
                text = f"{answer['TrainingJobStatus']}: {reason}".rstrip(": ")
                if url and text == "Completed" and not into.exists():
                    _fetch(url, into)
        except KeyboardInterrupt:
            print(f"\nkd-launch: the job continues; {again}", file=sys.stderr)
            return 130
        except UserError as error:
            raise UserError(f"{error}; {again} again") from error
        if text != "Completed":
            print(f"kd-launch: {name}: {text}", file=sys.stderr)
            return 1
        hours = {"hours": _hours(answer.get("TrainingTimeInSeconds")), "text": text}
        hours["billed_hours"] = _hours(answer.get("BillableTimeInSeconds"))
        if into.exists():
            write_json(into / RECORD, record | hours)
            text += f"; run folder: {into}"
        print(f"kd-launch: {name}: {text}", flush=True)
        return 0


def _ended(client: "BaseClient", name: str) -> dict[str, Any]:
    """A training job's description, once it is completed, stopped or failed."""
    from botocore.exceptions import WaiterError

    with suppress(WaiterError):  # a failed job: its description says why
        waiter = client.get_waiter("training_job_completed_or_stopped")
        waiter.wait(TrainingJobName=name, WaiterConfig=MONTH)
    return client.describe_training_job(TrainingJobName=name)


def _recipe(answer: Mapping[str, Any]) -> str:
    """The recipe's name, of a job that was sent from elsewhere, for its folder."""
    given = answer.get("HyperParameters", {}).get("recipe", "")
    return Path(given).stem.lstrip(".") or "run"


def _hours(seconds: float | None) -> float | None:
    """Seconds as hours; None, where the service reports none, stays None."""
    return None if seconds is None else seconds / 3600


def _fetch(archive_url: str, into: Path) -> None:
    """Unpacks ``model.tar.gz`` in S3, which holds a run's folder, to ``into``, whole or not at all."""
    bucket, key = _bucket_and_path(archive_url)
    part = into.with_name(f".{into.name}.part")
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "model.tar.gz"
        aws_session().client("s3").download_file(bucket, key, str(archive))
        unpack(archive, part)
    part.rename(into)


def _bucket_and_path(url: str) -> tuple[str, str]:
    """``s3://BUCKET/FOLDER`` -> its bucket, and the path in it ("" without one)."""
    bucket, _, path = url.removeprefix("s3://").partition("/")
    return bucket, path


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


# -- the request -------------------------------------------------------------------------------------------------------
def _request(job: Job) -> dict[str, Any]:
    """The request of CreateTrainingJob.

    Needed keys that were not given have placeholders, and are noted in the job (:meth:`kd.fleet.jobs.job.Needs.need`).

    Raises:
        UserError: a key with a value that SageMaker does not take.
    """
    options = job.options
    inputs = [_channel(job, name, url) for name, url in _channels(job).items()]
    if job.files:
        inputs.append(_channel(job, "files", f"{_place(job)}/files/"))
    request = {
        "TrainingJobName": job.name,
        "HyperParameters": _settings(job),
        **_network(job),
        "RoleArn": job.need("role", "arn:aws:iam::ACCOUNT:role/NAME"),
        "AlgorithmSpecification": {
            "TrainingImage": job.need("image", "ACCOUNT.dkr.ecr.REGION.amazonaws.com/kd:TAG"),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["kd-train"],  # as the SDK's ModelTrainer does
            "MetricDefinitions": [
                {"Name": name, "Regex": METRIC.format(name=name)} for name in METRICS
            ],
        },
        "OutputDataConfig": {"S3OutputPath": f"{_place(job)}/output", "CompressionType": "GZIP"},
        "StoppingCondition": _stop(job),
        "EnableManagedSpotTraining": job.spot,
        "CheckpointConfig": {
            "S3Uri": f"{_place(job)}/checkpoints",
            "LocalPath": "/opt/ml/checkpoints",
        },
        "ResourceConfig": {
            **_machines(job),
            "VolumeSizeInGB": option(
                options, "volume_gb", Annotated[int, Range(">= 1 and < 1000000")], 100
            ),
        },
        "Environment": {"PYTHONUNBUFFERED": "1"},
    }
    if inputs:
        request["InputDataConfig"] = inputs
    if options.get("kms_key"):
        request["OutputDataConfig"]["KmsKeyId"] = options["kms_key"]
        if not any(HAS_DISKS.match(group.type) for group in job.groups.values()):
            request["ResourceConfig"]["VolumeKmsKeyId"] = options["kms_key"]
    if options.get("tags"):
        request["Tags"] = _tags(options["tags"])
    if job.secret:
        request["Environment"]["RAY_AUTH_TOKEN"] = job.secret
    if job.machines.count > 1 and EFA.match(job.machines.type):
        request["Environment"]["FI_PROVIDER"] = "efa"
    return request


def _place(job: Job) -> str:
    """The job's folder in the bucket, with ``files/``, ``output/`` and ``checkpoints/`` below it."""
    return f"{job.bucket_url('s3')}/{job.name}"


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


def _stop(job: Job) -> dict[str, int]:
    """``StoppingCondition``: seconds of training, and with ``spot`` seconds until the end, waiting included.

    ``max_wait_hours`` is twice ``hours`` where it is not given.

    Raises:
        UserError: ``max_wait_hours`` without ``spot``, no number > 0, or less than ``hours``.
    """
    seconds = {"MaxRuntimeInSeconds": job.seconds}
    hours = option(job.options, "max_wait_hours", Hours, 2 * job.hours)
    if "max_wait_hours" in job.options and not (job.spot and hours >= job.hours):
        raise UserError(
            f"max_wait_hours: needs spot=true, and at least hours ({job.hours:g}), got {hours:g}"
        )
    if job.spot:
        seconds["MaxWaitTimeInSeconds"] = max(1, round(hours * 3600))
    return seconds


def _tags(text: str) -> list[dict[str, str]]:
    """``KEY=VALUE,KEY=VALUE`` as the service takes it; a UserError for an item without ``=``."""
    tags = []
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"tags: must be KEY=VALUE with commas between, got '{key}'")
        tag = {
            "Key": key.strip(),
            "Value": value.strip(),
        }
        tags.append(tag)
    return tags


def _machines(job: Job) -> dict[str, Any]:
    """The machines as keys of ``ResourceConfig``: type and number; where some prepare data, a list of groups with these.

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


# -- data --------------------------------------------------------------------------------------------------------------
def _channels(job: Job) -> dict[str, str]:
    """The channels of a job, by name their URL: those of the keys ``channel.NAME``, in the order given, then those that the
    settings name as ``channel:NAME`` alone: an example stands for their URL, and the key is noted as missing.

    Raises:
        UserError: a value that an option does not have, or an option of a channel that neither a key nor a setting names.
    """
    names = []
    options = []
    for key, value in job.options.items():
        _, _, option = key.rpartition(".")
        if option in CHANNEL_OPTIONS:
            options.append(key)
            if value not in CHANNEL_OPTIONS[option]:
                allowed = " or ".join(CHANNEL_OPTIONS[option])
                raise UserError(f"{key}: must be {allowed}, got '{value}'")
        elif key.startswith("channel."):
            names.append(key.removeprefix("channel."))
    channels = {}
    for name in dict.fromkeys([*names, *job.channels]):
        channels[name] = job.need(f"channel.{name}", f"s3://BUCKET/{name}")
    for key in options:
        name = key.removeprefix("channel.").rpartition(".")[0]
        if name not in channels:
            raise UserError(f"{key}: there is no channel.{name}")
    return channels


def _channel(job: Job, name: str, url: str) -> dict[str, Any]:
    """A channel as an item of ``InputDataConfig``: S3, FSx for Lustre or EFS, by its URL.

    Raises:
        UserError: a URL of another kind, FSx without its mount name, a file system without a VPC, or an option that this
            kind does not have; it names the key.
    """
    key = f"channel.{name}"
    mode = job.options.get(f"{key}.input_mode")
    access = job.options.get(f"{key}.access", "ro")
    if url.startswith("s3://"):
        if access != "ro":
            raise UserError(
                f"{key}.access: {access} is for fsx:// and efs://; SageMaker only reads from S3"
            )
        s3 = {"S3DataType": "S3Prefix", "S3Uri": url, "S3DataDistributionType": "FullyReplicated"}
        item: dict[str, Any] = {"ChannelName": name, "DataSource": {"S3DataSource": s3}}
        return item | ({"InputMode": mode} if mode else {})
    match = re.fullmatch(r"(fsx|efs)://(fs-[0-9a-f]{8,})(/.*)?", url)
    if match is None:
        raise UserError(f"{key}: must be {PLACES}, got '{url}'")
    kind, system, path = match.groups()
    if mode not in (None, "File"):
        raise UserError(f"{key}.input_mode: a file system is mounted (File), got '{mode}'")
    if kind == "fsx" and not (path or "/").strip("/"):
        raise UserError(
            f"{key}: FSx wants its mount name as the first folder (fsx://{system}/MOUNT_NAME)"
        )
    if not job.options.get("subnets"):
        raise UserError(f"{key}: {url} is in a VPC: give subnets= and security_groups=")
    mounted = {
        "FileSystemId": system,
        "FileSystemAccessMode": access,
        "FileSystemType": {"fsx": "FSxLustre", "efs": "EFS"}[kind],
        "DirectoryPath": path or "/",
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": mounted}}


def _network(job: Job) -> dict[str, Any]:
    """The request's ``VpcConfig``, by that key, of the job's ``subnets`` and ``security_groups``; {} without them.

    Raises:
        UserError: one of the two alone.
    """
    ids = {}
    for key in ("subnets", "security_groups"):
        ids[key] = [word.strip() for word in job.options.get(key, "").split(",") if word.strip()]
    if bool(ids["subnets"]) != bool(ids["security_groups"]):
        raise UserError("subnets, security_groups: a VPC needs both")
    if not ids["subnets"]:
        return {}
    return {"VpcConfig": {"Subnets": ids["subnets"], "SecurityGroupIds": ids["security_groups"]}}


# -- boto3 -------------------------------------------------------------------------------------------------------------
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
    examples = " (ml.p4d.24xlarge, ml.g5.xlarge, ...)"
    known = model.shape_for(kind).enum if model else []
    if machines.type in known or (model is None and machines.type.startswith("ml.")):
        return
    hint = did_you_mean(machines.type, known) or examples
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


def aws_session() -> "Session":
    """The user's session with AWS.

    Raises:
        UserError: no credentials, no region, or no boto3.
    """
    try:
        session = import_module("boto3").Session()
    except ImportError as error:
        raise UserError(f"sagemaker: {needs_extra('aws')}") from error
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
