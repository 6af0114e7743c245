"""``kd-launch``: sends a run to other machines."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from kd.config.suggest import near
from kd.errors import UserError
from kd.fleet.jobs import places
from kd.fleet.jobs.job import Job, JobOptions, read_job
from kd.fleet.jobs.target import Target
from kd.run.options import names_of, options_help, refuse_others, take, take_options
from kd.run.request import Request

PLACES = sorted(file.stem for file in Path(places.__file__).parent.glob("[a-z]*.py"))
"""The places: the files of ``kd/fleet/jobs/places``."""
HELP = """\
  kd-launch PLACE recipe=NAME instances=NxTYPE [config=OVERLAY ...] [key=value ...] [--dry-run]
  kd-launch sagemaker job=NAME        waits for a job's end and fetches its run's folder
  kd-launch endpoint RUN instances=1xml.c5.xlarge role= image= bucket= [--dry-run]
                                      the run's student as a SageMaker endpoint: creates and waits;
                                      batch=s3://IN out=s3://OUT: over pictures in S3 instead
  kd-launch endpoint RUN --delete     removes endpoint, configuration and model; lists what is left

  PLACE              sagemaker, sky, slurm, torchrun
{options}
  --dry-run          shows what would be sent, exactly (but for the secret of its machines), and sends nothing; what is
                     not known yet (image, role, bucket, channels) has placeholders

All other keys are the run's (kd-train --keys). Of the places:
"""
OPTIONS = JobOptions
FLAGS = ("--dry-run", "--delete")
"""Options that take no value."""


def run(request: Request) -> int | None:
    """Sends a run to a place, or follows one that was sent; ``--dry-run`` shows what would be sent.

    Returns:
        The exit status: of :meth:`kd.fleet.jobs.target.Target.wait`, else 0; None without a place.

    Raises:
        UserError: an unknown place, a wrong key, or a refusal of the place.
    """
    if not request.rest:
        return None
    place = request.rest.pop(0)
    if place == "endpoint":
        from kd.fleet import endpoint

        return endpoint.run(request)
    if "delete" in request.flags:
        raise UserError("--delete: is for kd-launch endpoint RUN")
    if place not in PLACES or request.rest:
        word = (request.rest or [place])[0]
        places_are = f"Places are {', '.join(PLACES)}{near(word, PLACES)}"
        raise UserError(f"what is '{word}'? {places_are}")
    target = _target(place)
    options = take_options(target.options, request)
    if options.job and not request.recipe:
        runs_dir = take(request, "runs_dir").get("runs_dir", "runs")
        refuse_others(request, [*names_of(target.options), "runs_dir"], of_data=False)
        return target.follow(options.job, runs_dir)
    job = read_job(request, options, target.example)
    if job.data_machines and not target.takes_data:
        raise UserError(
            "data_instances: is for sagemaker and slurm; elsewhere kd-train starts by KD_ROLE=data on each "
            "(kd/launch/README.md)"
        )
    files = target.write(job)
    dry_run = "dry-run" in request.flags
    job.refuse_missing(dry_run)
    notes = "".join(f"{note}\n" for note in _local_paths(job, target))
    if dry_run:
        print(notes, end="", file=sys.stderr)
        _show(job, files)
        return 0
    target.check(job)
    target.send(job, files)
    # A mistake is one line: nothing is printed before it was sent.
    print(notes, end="", file=sys.stderr)
    return target.wait(job, files)


def _local_paths(job: Job, target: Target) -> list[str]:
    """A line for each folder or file in the job's ``data.*`` and ``model.*`` that the place's machines can't see; [] where
    they share this disk.
    """
    if target.shares_disk:
        return []
    remedy = (
        "give a URL (s3://BUCKET/FOLDER; for sagemaker channel.NAME=URL makes channel:NAME one), or its place on the "
        "job's machines"
    )
    return [f"kd-launch: {item} is on this machine alone: {remedy}" for item in job.local_paths]


def _show(job: Job, files: Mapping[str, str]) -> None:
    """Prints what would be sent, but for the job's secret: a terminal's lines are kept and shown.

    Args:
        job: to be sent.
        files: text by name, as the place has written them; of several each follows its name.
    """
    for name, text in files.items():
        if job.secret:
            text = text.replace(job.secret, "SECRET")
        if len(files) > 1:
            text = f"# {name}\n{text}"
        print(text, end="")


def usage(_request: Request) -> str:
    """The help of ``kd-launch``, with the options of each place; :mod:`kd.command_line` prints it in place of ``HELP``."""
    from kd.fleet.endpoint import EndpointOptions

    text = HELP
    for place in PLACES:
        target = _target(place)
        text += f"\n{place} (instances=, for example {target.example}):\n"
        text += options_help(target.options, JobOptions)
    return f"{text}\nendpoint:\n{options_help(EndpointOptions)}"


def _target(place: str) -> Target:
    """The place by its name, whose file is imported here."""
    target: Target = import_module(f"{places.__name__}.{place}").TARGET
    return target
