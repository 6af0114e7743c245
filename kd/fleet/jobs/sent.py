"""A job that was sent: the folder that keeps what was sent, and following it until its run is here."""

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.target import Target
from kd.launch.groups import read_json
from kd.storage.elsewhere import text_of
from kd.storage.writing import write_json, write_text

RECORD = "job.json"
"""A sent job's record, in its folder: ``target``, ``job``, ``recipe``, ``groups`` of machines, ``handle``; at its end
also the fields of :class:`kd.fleet.jobs.target.Outcome` but ``done``. Copied into the run's folder for the report."""


def send(target: Target, job: Job, folder: Path, files: dict[str, str], place: str) -> None:
    """Writes the job's folder and sends it; the folder of a job that could not be sent is removed.

    Args:
        target: that runs it.
        job: checked.
        folder: of the job's files, made here.
        files: content by name, what :meth:`Target.write` returned; readable by the user alone.
        place: the target's name, which :func:`follow` reads again.

    Raises:
        UserError: a folder of this name exists, or the place refuses the job.
        OSError: the disk's errors.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(
            f"job: there is a job {folder} already; without a recipe, job= follows it"
        ) from error
    try:
        for name, text in files.items():
            (folder / name).touch(0o600)  # it may hold the secret of the job's machines
            (folder / name).write_text(text, encoding="utf-8")
        handle = target.submit(job, folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    groups = []
    for name, machines in job.groups.items():
        price = job.prices.get(name)
        groups.append({"name": name, "machines": str(machines), "price_per_hour": price})
    record = {
        "target": place,
        "job": job.name,
        "recipe": job.recipe,
        "groups": groups,
        "handle": handle,
    }
    write_json(folder / RECORD, record)
    print(f"kd-launch: sent as {handle}; {folder / next(iter(files))}", flush=True)


def sent_before(name: str, runs: str) -> Path:
    """The folder of a job that was sent from here; where several recipes have a job of this name, the first recipe's.

    Args:
        name: of the job.
        runs: ``runs_dir``.

    Raises:
        UserError: no such job.
    """
    records = sorted(Path(runs).glob(f"*/jobs/{name}/{RECORD}"))
    if not records:
        raise UserError(
            f"job: no job '{name}' was sent from here ({runs}/*/jobs); "
            "to send it, give recipe= and instances="
        )
    return records[0].parent


def _runs_dir(folder: Path) -> str:
    """The word by which :func:`sent_before` finds the job of a ``folder`` again, after a space; "" for its default."""
    runs = folder.parents[2]
    return "" if runs == Path("runs") else f" {shlex.quote(f'runs_dir={runs}')}"


def follow(folder: Path, target_of: Callable[[str], Target]) -> int:
    """Follows a sent job until its end and brings its run to ``runs_dir/RECIPE/JOB``, unless it is there.

    Args:
        folder: of the job, see :func:`sent_before`.
        target_of: gives the place of a name.

    Its end is noted in the job's record, which is copied into the run's folder. Nothing is fetched of a job that has
    failed.

    Returns:
        The exit status: 0, 1 where the job has failed or was stopped, 130 after Ctrl-C (the job continues).

    Raises:
        UserError: the place can't be reached, or the run can't be fetched, which may pass; the message says how to
            follow the job again.
    """
    record = read_json(text_of(folder / RECORD), str(folder / RECORD), dict)
    target = target_of(record["target"])
    again = (
        f"kd-launch {record['target'].split()[0]} job={record['job']}{_runs_dir(folder)} follows it"
    )
    try:
        outcome = target.follow(record["handle"], folder)
    except KeyboardInterrupt:
        print(f"\nkd-launch: the job continues; {again}", file=sys.stderr)
        return 130
    except UserError as error:  # such as a cluster that can't be reached for a moment
        raise UserError(f"{error}; {again} again") from error
    end = asdict(outcome)
    del end["done"]
    write_json(folder / RECORD, record | end)
    if not outcome.done:
        print(f"kd-launch: {record['job']}: {outcome.text}", file=sys.stderr)
        return 1
    into = folder.parent.parent / record["job"]
    run = into
    if not into.exists():
        try:
            run = target.fetch(outcome, into)
        except UserError as error:
            raise UserError(f"{error}; {again} again") from error
    text = f"kd-launch: {record['job']}: {outcome.text}"
    if run is not None:
        write_text(run / RECORD, text_of(folder / RECORD))
        text += f"; run folder: {run}"
    print(text, flush=True)
    return 0
