"""``kd-launch``: sends a run to other machines."""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.jobs.job import KEYS, Job, read_job
from kd.fleet.jobs.target import Target
from kd.launch.groups import read_json
from kd.run.request import Request
from kd.storage.elsewhere import json_of, text_of

TARGETS = {"sagemaker": "SageMaker", "sky": "SkyPilot", "slurm": "Slurm", "kubernetes": "Kubernetes",
           "torchrun": "Torchrun"}  # fmt: skip
SEARCH = "sagemaker search"
HELP = """\
kd-launch: sends a run to other machines, follows it and fetches its folder.

  kd-launch PLACE recipe=NAME instances=NxTYPE [config=OVERLAY ...] [key=value ...] [--dry-run]
  kd-launch PLACE job=NAME            follows and fetches a job that was sent before

  PLACE             sagemaker, sky, slurm, kubernetes, torchrun
  instances=        machines that train: 2xml.p4d.24xlarge, 4xA100:8, 1xcpu:16
  data_instances=   machines that prepare data for them (config=remote_data)
  spot=true         on machines that may be interrupted; the run resumes on others
  image=            the container (scripts/container/Dockerfile)
  hours=            after which the job is stopped (24, or an hour more than monitor.max_hours)
  prices=FILE       instance: price of an hour; then monitor.budget= stops the run, and the report knows the cost
  job=NAME          of the job (recipe and time)
  wait=false        only sends it
  --dry-run         shows what would be sent, exactly (but for the secret of its machines), and sends nothing
  --tune            a search in place of one run: search.KEY=SPACE trials=N jobs=K objective=val/acc1 (sagemaker)

All other keys are the run's (kd-train --keys). Keys of the places:
"""


def run(request: Request) -> int:
    if "help" in request.flags or not request.rest:
        print(HELP + _help_of_places(), end="")
        return 0 if "help" in request.flags else 2
    place = request.rest.pop(0)
    if place not in TARGETS or request.rest:
        raise UserError(f"what is '{(request.rest or [place])[0]}'? Places are {', '.join(TARGETS)}")
    target = _target(place)
    own = _own_keys(request, target.keys)
    if "job" in own and not request.recipe:
        return _follow(_sent_before(own["job"], request))
    if "tune" in request.flags:
        target, place = _search(place, request), SEARCH
    job = read_job(request, own)
    files = target.write(job)
    if "dry-run" in request.flags:
        print(f"kd-launch: pictures an optimizer step: {job.step} (optim.lr_batch)", file=sys.stderr)
        for name, text in files.items():
            text = text.replace(job.secret, "SECRET") if job.secret else text  # a terminal's lines are kept and shown
            print(text if len(files) == 1 else f"# {name}\n{text}", end="")
        return 0
    target.check(job)
    folder = job.runs_dir / job.recipe / "jobs" / job.name
    _write(folder, files, {"target": place, "job": job.name, "recipe": job.recipe, "groups": _groups(job)})
    try:
        handle = target.submit(job, folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    _note(folder, handle=handle)
    print(f"kd-launch: sent as {handle}; {folder / next(iter(files))}", flush=True)
    return 0 if own.get("wait") == "false" else _follow(folder)


def _target(place: str) -> Target:
    if place == SEARCH:
        from kd.fleet.jobs.tune import SageMakerSearch

        return SageMakerSearch()
    return getattr(import_module(f"kd.fleet.jobs.{place}"), TARGETS[place])()


def _help_of_places() -> str:
    lines = [(place, key, text) for place in TARGETS for key, text in _target(place).keys.items()]
    return "".join(f"  {place:<12} {key + '=':<16} {text}\n" for place, key, text in lines)


def _own_keys(request: Request, keys: Iterable[str]) -> dict[str, str]:
    """Removes the keys of ``kd-launch`` and of the place from the request; the last of each counts."""
    prefixes = tuple(key.removesuffix("NAME") for key in keys if key.endswith(".NAME"))
    found, rest = {}, []
    for item in request.overrides:
        key, _, value = item.partition("=")
        if key in KEYS or key in keys or (prefixes and key.startswith(prefixes)):
            found[key] = value
        elif key in ("dry_run", "tune"):
            raise UserError(f"no key '{key}'; did you mean '--{key.replace('_', '-')}'?")
        else:
            rest.append(item)
    request.overrides = rest
    return found


def _groups(job: Job) -> list[dict[str, Any]]:
    return [
        {"name": name, "machines": str(group), "price_per_hour": job.prices.get(name)}
        for name, group in job.groups.items()
    ]


def _write(folder: Path, files: dict[str, str], record: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UserError(f"job: there is a job {folder} already; without a recipe, job= follows it") from error
    for name, text in files.items():
        (folder / name).touch(0o600)  # it may hold the secret of the job's machines
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "job.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _note(folder: Path, **more: object) -> None:
    file = folder / "job.json"
    record = json_of(text_of(file)) | more
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _sent_before(name: str, request: Request) -> Path:
    runs = next((item.split("=", 1)[1] for item in request.overrides if item.startswith("runs_dir=")), "runs")
    found = sorted(Path(runs).glob(f"*/jobs/{name}/job.json"))
    if not found:
        raise UserError(
            f"job: no job '{name}' was sent from here ({runs}/*/jobs); to send it, give recipe= and instances="
        )
    return found[0].parent


def _follow(folder: Path) -> int:
    record = read_json((folder / "job.json").read_text(encoding="utf-8"), str(folder / "job.json"), dict)
    target = _target(record["target"])
    try:
        outcome = target.follow(record["handle"], folder)
    except KeyboardInterrupt:
        print(
            f"\nkd-launch: the job continues; kd-launch {record['target'].split()[0]} job={record['job']} follows it",
            file=sys.stderr,
        )
        return 130
    _note(folder, **{key: value for key, value in asdict(outcome).items() if key != "done"})
    if not outcome.done:
        print(f"kd-launch: {record['job']}: {outcome.text}", file=sys.stderr)
        return 1
    into = folder.parent.parent / record["job"]
    run = into if into.exists() else target.fetch(outcome, into)
    if run is not None:
        shutil.copy(folder / "job.json", run / "job.json")
    print(f"kd-launch: {record['job']}: {outcome.text}" + (f"; run folder: {run}" if run else ""), flush=True)
    return 0


def _search(place: str, request: Request) -> Target:
    if place != "sagemaker":
        raise UserError(f"--tune: {place} has no search of its own; kd-tune on its machines searches together")
    from kd.fleet.jobs.tune import SageMakerSearch, planned

    return SageMakerSearch(*planned(request))
