"""A job by its command line, checked as a whole before anything is sent."""

import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.errors import UserError
from kd.launch.groups import WHY_TOO_OLD, gpus_in, has_gpus, too_old
from kd.launch.processes import devices_asked_for
from kd.report.metric import counted
from kd.report.prices import price_of, read_prices
from kd.run import files
from kd.run.keys import plain_key
from kd.run.needs import refuse_random_weights
from kd.run.options import CommandOptions, take
from kd.run.paths import find
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.objects import is_url
from kd.storage.run_urls import folder_of_recipe, folder_of_runs


class JobOptions(CommandOptions):
    """What ``kd-launch`` is given for every place; the group of a place has more."""

    OTHERS = "run"
    instances: str = ""
    """Machines that train: 2xml.p4d.24xlarge, 4xA100:8, 1xcpu:16."""
    data_instances: str = ""
    """Machines that prepare data for them (config=remote_data)."""
    spot: bool = False
    """On machines that may be interrupted; the run resumes on others."""
    image: str = ""
    """The container (scripts/container/Dockerfile)."""
    hours: Annotated[float, Range("> 0 and < 1000000")] | None = None
    """After which the job is stopped; default: 24, or an hour more than monitor.max_hours."""
    prices: Path | None = None
    """FILE of instance: price of an hour; then monitor.budget= stops the run, and the report knows the cost."""
    job: str = ""
    """Its name; default: of recipe and time."""


@dataclass(frozen=True)
class Machines:
    """So many machines of one type: a value of ``instances=`` or ``data_instances=``."""

    count: int
    """How many machines."""
    type: str
    """An instance type (``ml.p4d.24xlarge``), or what each has: ``A100:8``, ``gpu:8``, ``cpu:16``."""

    @property
    def parts(self) -> tuple[str, int] | None:
        """The kind and number of parts of a machine that is named by them: ``A100:8`` -> ``("A100", 8)``.

        None for an instance type.
        """
        match = re.fullmatch(r"([A-Za-z][\w.-]*):([1-9]\d*)", self.type)
        if match:
            return (match[1], int(match[2]))
        return None

    @property
    def gpus(self) -> int | None:
        """GPUs of each machine; 0 for ``cpu:N``, None for an instance type of which it is not known."""
        if self.parts is None:
            return gpus_in(self.type)
        kind, count = self.parts
        return 0 if kind == "cpu" else count

    @property
    def has_gpus(self) -> bool | None:
        """Whether each machine has a GPU; None where the instance type is not known."""
        if self.gpus is None:
            return has_gpus(self.type)
        return self.gpus > 0

    def __str__(self) -> str:
        return f"{self.count} x {self.type}"


def read_machines(key: str, text: str) -> Machines:
    """``4xml.p4d.24xlarge``, ``ml.g5.xlarge``, ``2xA100:8``: one machine where no number comes first.

    Which types there are is for the place to check.

    Args:
        key: of ``text``, for the message.
        text: as typed.

    Raises:
        UserError: of another form, or 0 machines.

    >>> read_machines("instances", "4xA100:8")
    Machines(count=4, type='A100:8')
    >>> read_machines("instances", "ml.g5.xlarge").count
    1
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w.:+-]*)", text)
    count = 0
    if match:
        count = int(match[1] or 1)
    if match is None or count < 1:
        raise UserError(
            f"{key}: must be a number of machines and their type (4xml.p4d.24xlarge, 2xA100:8, 1xcpu:16), "
            f"got '{text}'"
        )
    return Machines(count, match[2])


class Needs:
    """Keys that sending needs; a dry run shows an example in the place of a missing one."""

    missing: dict[str, str]
    """Keys that sending needs and that were not given, with an example of each; :meth:`need` adds them."""

    def need(self, key: str, given: str, example: str) -> str:
        """The value of a key that must be given; without one ``example``, as a placeholder.

        A key without a value is noted in ``missing``, which :meth:`refuse_missing` reports before anything is sent:
        placeholders are only shown (``--dry-run``).

        Args:
            key: the key.
            given: its value.
            example: a value that shows the user what is wanted.
        """
        if given:
            return given
        self.missing[key] = example
        return example

    def bucket_url(self, given: str, schemes: str) -> str:
        """The URL in ``bucket`` without a slash at its end; an example where the key is missing.

        Args:
            given: the key's value.
            schemes: the allowed ones as a regular expression, ``s3|gs``.

        Raises:
            UserError: not such a URL.
        """
        first = schemes.split("|")[0]
        example = f"{first}://BUCKET/FOLDER"
        url = self.need("bucket", given, example).rstrip("/")
        if not re.fullmatch(rf"(?:{schemes})://[^/]+(/.*)?", url):
            raise UserError(f"bucket: must be a URL ({first}://BUCKET[/FOLDER]), got '{url}'")
        return url

    def refuse_missing(self, dry_run: bool) -> None:
        """Names all keys in :attr:`missing` with examples, of a dry run on stderr. Called after the request is made, which
        fills :attr:`missing`.

        Raises:
            UserError: a key is missing, and it is to be sent.
        """
        if not self.missing:
            return
        keys = ", ".join(self.missing)
        examples = " ".join(f"{key}={example}" for key, example in self.missing.items())
        line = f"{keys}: must be given ({examples})"
        if not dry_run:
            raise UserError(line)
        print(f"kd-launch: to send it, {line}", file=sys.stderr)


@dataclass(frozen=True)
class Job(Needs):
    """A training run that another place carries out: what :meth:`kd.fleet.jobs.target.Target.write` turns into a
    request.
    """

    name: str
    """Name of the job."""
    recipe: str
    """Name of the recipe, for folders."""
    files: dict[str, Path]
    """The user's own recipe and overlays, by their names on the other machine."""
    items: list[str]
    """Command line of ``kd-train``; files by those names."""
    machines: Machines
    """Machines that train."""
    data_machines: Machines | None
    """Machines that prepare data."""
    hours: float
    """Hours after which the job is stopped; on SkyPilot and SLURM counted anew each time that it starts."""
    processes: int | None
    """Training processes of each machine; None: one on each of its GPUs, whose number the type does not say."""
    runs_dir: Path
    """Folder of the runs on this machine."""
    options: Any
    """The place's group of :class:`JobOptions`."""
    prices: dict[str, float]
    """Price of an hour of all machines of a group (``train``, ``data``), in the file's currency; {} without
    ``prices=``."""
    secret: str = ""
    """Ray's token, by which the machines of a data tier recognise each other; "" where no machine prepares data."""
    missing: dict[str, str] = field(default_factory=dict)
    """Keys that sending needs and that were not given, with an example of each; :meth:`need` adds them."""

    @property
    def settings(self) -> list[tuple[str, str]]:
        """Key and value of each setting of the command line and of the user's own files, as texts."""
        settings = []
        for item in self.items:
            key, _, text = item.partition("=")
            settings.append((key, text))
        for file in self.files.values():
            content = files.read_settings(file)
            for key, value in files.leaves(content):
                settings.append((key, str(value)))
        return settings

    @property
    def channels(self) -> list[str]:
        """Sorted names of the channels that the settings name as ``channel:NAME``."""
        names: set[str] = set()
        for _, value in self.settings:
            names.update(re.findall(r"(?<![\w/])channel:([\w.-]+)", value))
        return sorted(names)

    @property
    def local_paths(self) -> list[str]:
        """The settings of ``data.*`` and ``model.*`` that name an existing file or folder of this machine, as
        ``key=value``, sorted: other machines may not have these paths.
        """
        paths = set()
        for key, value in self.settings:
            if not key.startswith(("data.", "model.")) or not value or is_url(value):
                continue
            if Path(value).expanduser().exists():
                paths.add(f"{plain_key(key)}={value}")
        return sorted(paths)

    @property
    def seconds(self) -> int:
        """:attr:`hours` in whole seconds, at least 1: 0 would be no limit, or one that a place refuses."""
        return max(1, round(3600 * self.hours))

    @property
    def groups(self) -> dict[str, Machines]:
        """The machines by what they do: ``train``, and ``data`` where some prepare data."""
        return _groups(self.machines, self.data_machines)

    @property
    def folder(self) -> Path:
        """Where this machine keeps what it knows of the job: ``runs_dir/RECIPE/jobs/NAME``."""
        return folder_of_recipe(self.runs_dir, self.recipe) / "jobs" / self.name

    def command(self, place: str) -> list[str]:
        """The arguments of ``kd-train`` for a machine where the job's files lie in the folder ``place``."""
        return self.with_files({name: f"{place}/{name}" for name in self.files})

    def with_files(self, places: Mapping[str, object]) -> list[str]:
        """The arguments of ``kd-train``, with the places of the job's own files.

        Args:
            places: path or URL on the job's machines, by the file's name in :attr:`files`.
        """
        arguments = []
        for item in self.items:
            key, _, value = item.partition("=")
            if key in ("recipe", "config") and value in places:
                arguments.append(f"{key}={places[value]}")
            else:
                arguments.append(item)
        return arguments


def _groups(machines: Machines, data_machines: Machines | None) -> dict[str, Machines]:
    if data_machines is None:
        return {"train": machines}
    return {"train": machines, "data": data_machines}


def read_job(request: Request, options: JobOptions, example: str) -> Job:
    """Checks a command line of ``kd-launch`` as a whole, with the settings of the run that it would start.

    Nothing is written or sent. Pictures, teachers and paths of the run are not looked for: they may be elsewhere.

    Args:
        request: the command line without ``options``; changed here: ``runs_dir`` is taken out, and
            ``monitor.price_per_hour`` of all machines is added where there are ``prices``.
        options: of the place.
        example: of ``instances=``, as the place counts machines.

    Raises:
        UserError: a mistake in it, or in the settings of the run.
    """
    if not request.recipe:
        raise UserError("recipe: must be given (kd-train --list)")
    if not options.instances:
        raise UserError(f"instances: must be given: the machines that train (instances={example})")
    machines = read_machines("instances", options.instances)
    data_machines = None
    if options.data_instances:
        data_machines = read_machines("data_instances", options.data_instances)
    prices = _prices(options, machines, data_machines)
    if prices:
        request.overrides.append(f"monitor.price_per_hour={sum(prices.values()):.6g}")

    # the command line as the job has it: the user's own files by their names alone
    users_files: dict[str, Path] = {}
    items = [f"recipe={_name(request.recipe, 'recipes', users_files)}"]
    for overlay in request.overlays:
        items.append(f"config={_name(overlay, 'configs', users_files)}")
    items += request.trusted

    # the settings, checked as the run itself would check them
    taken = take(request, "runs_dir", "name")
    if "name" in taken:
        raise UserError(f"name: the run has the job's name, which job={taken['name']} gives")
    runs_dir = taken.get("runs_dir")
    run = Run.of(replace(request, here=False))
    if run.config["optim"]["kwargs"]:  # the optimizer says what it takes: torch
        from kd.optim import OptimSpec

        OptimSpec(**run.config["optim"])
    refuse_random_weights(run.config)
    config = run.config
    _check_machines(config, machines, data_machines)
    longest_run = config["monitor"]["max_hours"] or 23
    return Job(
        name=_job_name(options.job, request.recipe),
        recipe=config["recipe"],
        files=users_files,
        items=[*items, *request.overrides],
        machines=machines,
        data_machines=data_machines,
        hours=options.hours or longest_run + 1.0,
        processes=_processes(config, machines),
        runs_dir=folder_of_runs(config["runs_dir"] if runs_dir is None else runs_dir, "kd-launch"),
        options=options,
        prices=prices,
        secret=secrets.token_hex(32) if data_machines else "",
    )


def _name(name: str, kind: str, users_files: dict[str, Path]) -> str:
    """The name by which the job finds a recipe or overlay on its machines.

    A shipped one keeps its name. A file of the user's goes by its name without folders and is added to ``users_files``;
    the place brings these files to the job's machines, or their paths to machines that share this one's folders.

    Args:
        name: as typed: a name, or the path of a file.
        kind: ``recipes`` or ``configs``.
        users_files: files here by that name; added to.

    Raises:
        UserError: not found, or two files of one name.
    """
    path = find(kind, name)
    if str(path) != name:
        return name
    if path.name in users_files:
        raise UserError(f"{path}: another file of the job has the same name")
    users_files[path.name] = path
    return path.name


def _check_machines(config: dict[str, Any], machines: Machines, data: Machines | None) -> None:
    """Refuses settings that the machines can't run. With ``trainer.accelerator=cpu`` their GPUs are not checked.

    Args:
        config: all settings of the job.
        machines: that train.
        data: that prepare pictures; None: none.

    Raises:
        UserError: no GPU, one that is too old, or fewer than ``trainer.devices``; or machines for data without Ray.
    """
    trainer = config["trainer"]
    accelerator = str(trainer["accelerator"])
    if accelerator in ("gpu", "cuda") and machines.has_gpus is False:
        raise UserError(
            f"instances: {machines.type} has no GPU, but trainer.accelerator={accelerator} needs one"
        )
    engine = config["data"]["engine"]
    if data is not None and engine != "ray":
        raise UserError(
            f"data_instances: {data} needs data.engine=ray (config=remote_data), got {engine}"
        )
    gpu = too_old(machines.parts[0] if machines.parts else machines.type)
    if gpu and accelerator != "cpu":
        raise UserError(f"instances: {machines.type} has {gpu} GPUs, and {WHY_TOO_OLD}")
    gpus = machines.gpus
    processes = devices_asked_for(trainer["devices"])
    if gpus and processes and processes > gpus and accelerator != "cpu":
        raise UserError(
            f"trainer.devices: {processes} processes, but {machines.type} has {counted(gpus, 'GPU')}"
        )


def _processes(config: dict[str, Any], machines: Machines) -> int | None:
    """Training processes of each machine: ``trainer.devices``, else one on each GPU, and one where there are only CPUs.

    None for an instance type of which the number of GPUs is not known here.
    """
    processes = devices_asked_for(config["trainer"]["devices"])
    if processes:
        return processes
    if machines.has_gpus is False:
        return 1
    return machines.gpus


def _prices(
    options: JobOptions, machines: Machines, data_machines: Machines | None
) -> dict[str, float]:
    """Price of an hour of all machines of each group (``train``, ``data``), by ``prices=FILE``; {} without one.

    In the file's currency; with ``spot`` the price of ``TYPE:spot``.

    Raises:
        UserError: a file that can't be read, or a type that it has no price of.
    """
    if options.prices is None:
        return {}
    table = read_prices(options.prices.expanduser(), "prices")
    suffix = ":spot" if options.spot else ""
    prices = {}
    for name, group in _groups(machines, data_machines).items():
        key = "data_instances" if name == "data" else "instances"
        prices[name] = price_of([f"{group.count}*{group.type}{suffix}"], table, key)
    return prices


def _job_name(given: str, recipe: str) -> str:
    """The name that is given, or one of the recipe's name and the time (UTC): ``foodtag-vit-20260131-235959``.

    Raises:
        UserError: a name that a place can't have.
    """
    stem = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")[:30] or "run"
    name = given or f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise UserError(
            f"job: must be lower-case letters, digits, dashes, a letter first, at most 52, got '{name}'"
        )
    return name
