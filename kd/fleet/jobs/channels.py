"""SageMaker's channels: data in S3, in FSx for Lustre or in EFS."""

import re
from dataclasses import dataclass
from typing import Any

from kd.errors import UserError
from kd.fleet.jobs.job import Job

OPTIONS = {"input_mode": ("File", "FastFile"), "access": ("ro", "rw")}
PIPE = "Pipe is a stream that is read once, from start to end; kd reads pictures and packs by name; take FastFile"
PLACES = "s3://BUCKET[/FOLDER], fsx://FILE_SYSTEM_ID/MOUNT_NAME[/FOLDER] or efs://FILE_SYSTEM_ID[/FOLDER]"
_FILE_SYSTEM = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,})(/.*)?")


@dataclass(frozen=True)
class Channel:
    """One input channel of a SageMaker job: a name below ``/opt/ml/input/data/`` and where its data is."""

    name: str
    """The channel's name."""
    url: str
    """``s3://``, ``fsx://`` or ``efs://``."""
    input_mode: str | None = None
    """``File`` or ``FastFile``, of S3; None: as the service does by default."""
    access: str = "ro"
    """``ro`` or ``rw``, of a file system."""

    @property
    def in_s3(self) -> bool:
        """Whether the data is in S3; else in a file system of the job's VPC."""
        return self.url.startswith("s3://")

    def request(self) -> dict[str, Any]:
        """The channel as an item of ``InputDataConfig``."""
        mode = {"InputMode": self.input_mode} if self.input_mode else {}
        return {"ChannelName": self.name, "DataSource": self._source(), **mode}

    def _source(self) -> dict[str, Any]:
        key = f"channel.{self.name}"
        if self.in_s3:
            if self.access != "ro":
                raise UserError(
                    f"{key}.access: {self.access} is for fsx:// and efs://; SageMaker only reads from S3"
                )
            source = {
                "S3DataType": "S3Prefix",
                "S3Uri": self.url,
                "S3DataDistributionType": "FullyReplicated",
            }
            return {"S3DataSource": source}
        found = _FILE_SYSTEM.fullmatch(self.url)
        if found is None:
            raise UserError(f"{key}: must be {PLACES}, got '{self.url}'")
        if self.input_mode not in (None, "File"):
            raise UserError(
                f"{key}.input_mode: a file system is mounted (File), got '{self.input_mode}'"
            )
        kind, system, path = found.groups()
        if kind == "fsx" and not (path or "/").strip("/"):
            raise UserError(
                f"{key}: FSx wants its mount name as the first folder (fsx://{system}/MOUNT_NAME)"
            )
        kinds = {"fsx": "FSxLustre", "efs": "EFS"}
        return {
            "FileSystemDataSource": {
                "FileSystemId": system,
                "FileSystemAccessMode": self.access,
                "FileSystemType": kinds[kind],
                "DirectoryPath": path or "/",
            }
        }


def channels(job: Job) -> list[Channel]:
    """The channels of a job's keys ``channel.NAME`` and ``channel.NAME.OPTION``, in the order given.

    Raises:
        UserError: an option or value that SageMaker does not take, or a URL of another kind.
    """
    options: dict[str, dict[str, str]] = {}
    given = []
    for key, value in job.options.items():
        start, _, channel = key.partition(".")
        name, _, option = channel.rpartition(".")
        if start == "channel" and name and option in OPTIONS:
            if option == "input_mode" and value == "Pipe":
                raise UserError(f"{key}: {PIPE}")
            if value not in OPTIONS[option]:
                raise UserError(f"{key}: must be {' or '.join(OPTIONS[option])}, got '{value}'")
            options.setdefault(name, {})[option] = value
        elif start == "channel":
            given.append(channel)
    if foreign := [name for name in options if name not in (*given, *job.channels)]:
        raise UserError(
            f"channel.{foreign[0]}.{next(iter(options[foreign[0]]))}: there is no channel.{foreign[0]}"
        )
    names = dict.fromkeys([*given, *job.channels])
    urls = {name: job.need(f"channel.{name}", f"s3://BUCKET/{name}") for name in names}
    return [Channel(name, url, **options.get(name, {})) for name, url in urls.items()]


def network(job: Job, data: list[Channel]) -> dict[str, Any]:
    """``VpcConfig`` of the job's ``subnets`` and ``security_groups``; {} without them.

    Raises:
        UserError: a malformed id, one of the two alone, or a channel in a file system without a VPC.
    """
    found = {}
    for key, kind, prefix in (
        ("subnets", "Subnets", "subnet-"),
        ("security_groups", "SecurityGroupIds", "sg-"),
    ):
        found[kind] = [item.strip() for item in job.options.get(key, "").split(",") if item.strip()]
        wrong = next(
            (item for item in found[kind] if not re.fullmatch(rf"{prefix}[0-9a-z]+", item)), None
        )
        if wrong:
            raise UserError(f"{key}: must be {prefix}... with commas between, got '{wrong}'")
    if any(found.values()) and not all(found.values()):
        raise UserError("subnets, security_groups: a VPC needs both")
    mounted = next((channel for channel in data if not channel.in_s3), None)
    if mounted and not any(found.values()):
        raise UserError(
            f"channel.{mounted.name}: {mounted.url} is in a VPC: give subnets= and security_groups="
        )
    return {"VpcConfig": found} if any(found.values()) else {}
