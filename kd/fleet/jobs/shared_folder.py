"""Places whose machines share this machine's folders: nothing is copied, neither there nor back."""

import shlex
from pathlib import Path

from kd.errors import UserError
from kd.fleet.jobs.job import Job


def command(job: Job) -> str:
    """``kd-train``'s arguments for a shell: the job's own files where they lie, its run under the job's name."""
    items = [item if item.partition("=")[2] not in job.files else _absolute(item, job) for item in job.items]
    return shlex.join([*items, f"runs_dir={job.runs_dir.absolute()}", f"name={job.name}"])


def _absolute(item: str, job: Job) -> str:
    key, _, value = item.partition("=")
    return f"{key}={job.files[value].absolute()}" if key in ("recipe", "config") else item


def refuse_spot(job: Job, who: str) -> None:
    """Raises a UserError where machines are asked for that such a place does not have."""
    if job.spot:
        raise UserError(f"spot: {who} have no price by the hour; spot=true is for sagemaker and sky")
    if job.channels:
        raise UserError(f"channel:{job.channels[0]}: {who} see this machine's folders; give the folder itself")


def fetched(into: Path) -> Path | None:
    return into if into.is_dir() else None
