"""SageMaker's channels: data in S3, in FSx for Lustre or in EFS."""

import re
from dataclasses import dataclass
from typing import Any

from kd.errors import UserError
from kd.fleet.jobs.job import Job

OPTIONS = {"input_mode": ("File", "FastFile"), "access": ("ro", "rw")}
"""Settings of a channel, and their values."""
PIPE = "Pipe is a stream that is read once, from start to end; kd reads pictures and packs by name; take FastFile"
"""Why ``input_mode=Pipe`` is refused."""
PLACES = "s3://BUCKET[/FOLDER], fsx://FILE_SYSTEM_ID/MOUNT_NAME[/FOLDER] or efs://FILE_SYSTEM_ID[/FOLDER]"
"""What a channel's place may be, for messages."""
_FILE_SYSTEM = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,})(/.*)?")


@dataclass(frozen=True)
class Channel:
    """One input channel of a SageMaker job: a name below ``/opt/ml/input/data/`` and where its data is."""

    name: str
    """The channel's name."""
    url: str
    """``s3://``, ``fsx://`` or ``efs://``."""
    input_mode: str | None = None
    """``File`` or ``FastFile`` (of S3 alone); None: the job's, ``File``."""
    access: str = "ro"
    """``ro`` or ``rw``, of a file system."""

    @property
    def in_s3(self) -> bool:
        """Whether the data is in S3; else in a file system of the job's VPC."""
        return self.url.startswith("s3://")

    def request(self) -> dict[str, Any]:
        """The channel as an item of ``InputDataConfig`` of SageMaker's ``CreateTrainingJob``.

        Raises:
            UserError: as :meth:`_source`.
        """
        mode = {}
        if self.input_mode:
            mode = {"InputMode": self.input_mode}
        return {"ChannelName": self.name, "DataSource": self._source(), **mode}

    def _source(self) -> dict[str, Any]:
        """Its ``DataSource``: S3, FSx for Lustre or EFS, by the URL.

        Raises:
            UserError: a URL of another kind, FSx without its mount name, or an option that this kind does not have; it
                names the key.
        """
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
        match = _FILE_SYSTEM.fullmatch(self.url)
        if match is None:
            raise UserError(f"{key}: must be {PLACES}, got '{self.url}'")
        if self.input_mode not in (None, "File"):
            raise UserError(
                f"{key}.input_mode: a file system is mounted (File), got '{self.input_mode}'"
            )
        kind, system, path = match.groups()
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

    Then those that the settings name as ``channel:NAME`` without such a key: an example stands for their URL, and the
    key is noted as missing.

    Raises:
        UserError: a value that an option does not have, or an option of a channel that neither a key nor a setting names.
            URLs are checked by :meth:`Channel.request`.
    """
    options: dict[str, dict[str, str]] = {}  # by channel
    with_url = []  # channels that are given themselves
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
            with_url.append(channel)
    names = dict.fromkeys([*with_url, *job.channels])
    for name, of_channel in options.items():
        if name not in names:
            option = next(iter(of_channel))
            raise UserError(f"channel.{name}.{option}: there is no channel.{name}")
    all_channels = []
    for name in names:
        url = job.need(f"channel.{name}", f"s3://BUCKET/{name}")
        all_channels.append(Channel(name, url, **options.get(name, {})))
    return all_channels


def network(job: Job, data: list[Channel]) -> dict[str, Any]:
    """The request's ``VpcConfig``, by that key, of the job's ``subnets`` and ``security_groups``; {} without them.

    Args:
        job: its options.
        data: its channels: one in a file system needs a VPC.

    Raises:
        UserError: a malformed id, one of the two alone, or a channel in a file system without a VPC.
    """
    subnets = _ids(job, "subnets", "subnet-")
    security_groups = _ids(job, "security_groups", "sg-")
    if bool(subnets) != bool(security_groups):
        raise UserError("subnets, security_groups: a VPC needs both")
    if subnets:
        return {"VpcConfig": {"Subnets": subnets, "SecurityGroupIds": security_groups}}
    for channel in data:
        if not channel.in_s3:
            raise UserError(
                f"channel.{channel.name}: {channel.url} is in a VPC: give subnets= and security_groups="
            )
    return {}


def _ids(job: Job, key: str, prefix: str) -> list[str]:
    """The ids in the option ``key`` of a job, with commas between, [] without it; a user's error unless each
    begins with ``prefix``.
    """
    ids = []
    for word in job.options.get(key, "").split(","):
        id_ = word.strip()
        if not id_:
            continue
        if not re.fullmatch(rf"{prefix}[0-9a-z]+", id_):
            raise UserError(f"{key}: must be {prefix}... with commas between, got '{id_}'")
        ids.append(id_)
    return ids
