"""``kd-launch``: sends a run to other machines."""

import sys
from collections.abc import Iterable
from importlib import import_module

from kd.errors import UserError
from kd.fleet.jobs.job import KEYS, read_job
from kd.fleet.jobs.sent import follow, send, sent_before
from kd.fleet.jobs.target import Target
from kd.run.own_keys import take, take_all
from kd.run.request import Request

TARGETS = {"sagemaker": "SageMaker", "sky": "SkyPilot", "slurm": "Slurm", "kubernetes": "Kubernetes",
           "torchrun": "Torchrun"}  # fmt: skip
SEARCH = "sagemaker search"
HELP = """\
kd-launch: sends a run to other machines, follows it and fetches its folder.

  kd-launch PLACE recipe=NAME instances=NxTYPE [config=OVERLAY ...] [key=value ...] [--dry-run]
  kd-launch PLACE job=NAME            follows and fetches a job that was sent before
  kd-launch endpoint RUN instances=1xml.c5.xlarge role= image= bucket= [serverless=true] [--dry-run]
                                      the run's student as a SageMaker endpoint: creates, waits, sends one picture;
                                      batch=s3://IN out=s3://OUT: over pictures in S3 instead
  kd-launch endpoint RUN --delete     removes endpoint, configuration and model; lists what is left

  PLACE             sagemaker, sky, slurm, kubernetes, torchrun
  instances=        machines that train: 2xml.p4d.24xlarge, 4xA100:8, 1xcpu:16
  data_instances=   machines that prepare data for them (config=remote_data)
  spot=true         on machines that may be interrupted; the run resumes on others
  image=            the container (scripts/container/Dockerfile)
  hours=            after which the job is stopped (24, or an hour more than monitor.max_hours)
  prices=FILE       instance: price of an hour; then monitor.budget= stops the run, and the report knows the cost
  job=NAME          of the job (recipe and time)
  wait=false        only sends it
  --dry-run         shows what would be sent, exactly (but for the secret of its machines), and sends nothing; what is
                    not known yet (image, role, bucket, channels) has placeholders
  --tune            a search in place of one run: search.KEY=SPACE trials=N jobs=K objective=val/acc1 (sagemaker)

All other keys are the run's (kd-train --keys). Keys of the places:
"""


def run(request: Request) -> int | None:
    """Sends a run to a place, or follows one that was sent; returns the exit status, None to show the help.

    Raises:
        UserError: an unknown place, a wrong key, or a refusal of the place.
    """
    if "help" in request.flags or not request.rest:
        return None
    place = request.rest.pop(0)
    if place == "endpoint":
        from kd.fleet import endpoint

        return endpoint.run(request)
    if "delete" in request.flags:
        raise UserError("--delete: is for kd-launch endpoint RUN")
    if place not in TARGETS or request.rest:
        raise UserError(
            f"what is '{(request.rest or [place])[0]}'? Places are {', '.join(TARGETS)}"
        )
    target = _target(place)
    own = _own_keys(request, target.keys)
    if "job" in own and not request.recipe:
        others = take_all(request, *KEYS, "runs_dir", of_data=False)
        return follow(sent_before(own["job"], others.get("runs_dir", "runs")), _target)
    if "tune" in request.flags:
        target, place = _search(place, request), SEARCH
    job = read_job(request, own)
    files = target.write(job)
    missing = job.what_is_missing()
    if missing and "dry-run" not in request.flags:
        raise UserError(missing)
    if "dry-run" in request.flags:
        if missing:
            print(f"kd-launch: to send it, {missing}", file=sys.stderr)
        print(
            f"kd-launch: pictures in an optimizer step: {job.step} (optim.lr_batch)",
            file=sys.stderr,
        )
        for name, text in files.items():
            text = (
                text.replace(job.secret, "SECRET") if job.secret else text
            )  # a terminal's lines are kept and shown
            print(text if len(files) == 1 else f"# {name}\n{text}", end="")
        return 0
    target.check(job)
    folder = job.runs_dir / job.recipe / "jobs" / job.name
    send(target, job, folder, files, place)
    return 0 if own.get("wait") == "false" else follow(folder, _target)


def usage() -> str:
    """The help, with the keys of each place."""
    lines = ((place, key, text) for place in TARGETS for key, text in _target(place).keys.items())
    return HELP + "".join(f"  {place:<12} {key + '=':<16} {text}\n" for place, key, text in lines)


def _target(place: str, *search: object) -> Target:
    module, kind = ("tune", "SageMakerSearch") if place == SEARCH else (place, TARGETS[place])
    return getattr(import_module(f"kd.fleet.jobs.{module}"), kind)(*search)


def _own_keys(request: Request, keys: Iterable[str]) -> dict[str, str]:
    prefixes = tuple(key.removesuffix("NAME") for key in keys if key.endswith(".NAME"))
    given = [item.partition("=")[0] for item in request.overrides]
    for key in ("dry_run", "tune"):
        if key in given:
            raise UserError(f"no key '{key}'; did you mean '--{key.replace('_', '-')}'?")
    return take(request, *KEYS, *keys, *(key for key in given if key.startswith(prefixes)))


def _search(place: str, request: Request) -> Target:
    if place != "sagemaker":
        raise UserError(
            f"--tune: needs sagemaker, got {place}; elsewhere kd-tune runs on several machines"
        )
    from kd.fleet.jobs.tune import planned

    return _target(SEARCH, *planned(request))
