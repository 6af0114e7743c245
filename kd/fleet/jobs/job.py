"""A job by its command line, checked as a whole before anything is sent."""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.launch.groups import gpus_of, has_gpus
from kd.report.prices import price_of, read_prices
from kd.run import files
from kd.run.own_keys import positive, take, truth
from kd.run.paths import find
from kd.run.request import Request
from kd.run.run import Run
from kd.run.train_first import refuse_random_weights
from kd.storage.run_urls import folder_of_runs

KEYS = ("instances", "data_instances", "spot", "image", "hours", "prices", "job", "wait")


@dataclass(frozen=True)
class Machines:
    """So many machines of one type."""

    count: int
    """How many machines."""
    type: str
    """An instance type (``ml.p4d.24xlarge``), or what each has: ``A100:8``, ``gpu:8``, ``cpu:16``."""

    @property
    def parts(self) -> tuple[str, int] | None:
        """``("A100", 8)``; None for an instance type."""
        match = re.fullmatch(r"([A-Za-z][\w.-]*):([1-9]\d*)", self.type)
        return (match[1], int(match[2])) if match else None

    @property
    def gpus(self) -> int | None:
        """GPUs of each machine; 0 for ``cpu:N``, None for an instance type, which does not say."""
        return None if self.parts is None else 0 if self.parts[0] == "cpu" else self.parts[1]

    @property
    def has_gpus(self) -> bool | None:
        """Whether each machine has a GPU; None where the instance type is not known."""
        return has_gpus(self.type) if self.gpus is None else self.gpus > 0

    def __str__(self) -> str:
        return f"{self.count} x {self.type}"


def read_machines(key: str, text: str) -> Machines:
    """``4xml.p4d.24xlarge``, ``ml.g5.xlarge``, ``2xA100:8``.

    Raises:
        UserError: it is none of these.

    >>> read_machines("instances", "4xA100:8")
    Machines(count=4, type='A100:8')
    >>> read_machines("instances", "ml.g5.xlarge").count
    1
    """
    match = re.fullmatch(r"(?:(\d+)x)?([A-Za-z][\w.:+-]*)", text)
    if not match or int(match[1] or 1) < 1:
        raise UserError(
            f"{key}: must be a number of machines and their type (4xml.p4d.24xlarge, 2xA100:8, 1xcpu:16), "
            f"got '{text}'"
        )
    return Machines(int(match[1] or 1), match[2])


class Needs:
    """Keys that sending needs; a dry run shows an example in the place of a missing one."""

    own: dict[str, str]
    """The keys that were given."""
    missing: dict[str, str]
    """Keys that sending needs, with an example of each."""

    def need(self, key: str, example: str) -> str:
        """The value of a place's key that must be given.

        Args:
            key: the key.
            example: stands in for it and is shown to the user; the key is noted in ``missing``.
        """
        if not self.own.get(key):
            self.missing[key] = example
        return self.own.get(key) or example

    def bucket_url(self, schemes: str) -> str:
        """The URL in ``bucket`` without a slash at its end; one of the ``schemes`` (``s3|gs``).

        Raises:
            UserError: not such a URL, or not a valid name of a bucket.
        """
        first = schemes.split("|")[0]
        url = self.need("bucket", f"{first}://BUCKET/FOLDER").rstrip("/")
        found = re.fullmatch(rf"(?:{schemes})://([^/]+)(/.*)?", url)
        if not found:
            raise UserError(f"bucket: must be a URL ({first}://BUCKET[/FOLDER]), got '{url}'")
        if "bucket" not in self.missing and not re.fullmatch(
            r"[a-z0-9][a-z0-9_.-]{1,61}[a-z0-9]", found[1]
        ):
            raise UserError(
                "bucket: a bucket's name has 3 to 63 lower-case letters, digits, dots and dashes, got "
                f"'{found[1]}'"
            )
        return url

    def what_is_missing(self) -> str:
        """One line that names all missing keys with examples; "" where all were given."""
        examples = " ".join(f"{key}={example}" for key, example in self.missing.items())
        return f"{', '.join(self.missing)}: must be given ({examples})" if self.missing else ""


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
    spot: bool
    """Use machines that may be interrupted; the job resumes on others."""
    hours: float
    """Hours after which the job is stopped."""
    image: str | None
    """The container."""
    processes: int | None
    """Training processes of each machine, where its type says so."""
    runs_dir: Path
    """Folder of the runs on this machine."""
    own: dict[str, str]
    """Keys of ``kd-launch`` and of the place."""
    prices: dict[str, float]
    """Price of an hour of all machines of a group."""
    secret: str = ""
    """By it the machines of a data tier recognise each other."""
    step: str = ""
    """How many pictures an optimizer step takes, in words."""
    missing: dict[str, str] = field(default_factory=dict)
    """Keys that sending needs, with an example of each."""

    @property
    def channels(self) -> list[str]:
        """Names of the data roots that the settings, or files of one's own, name as ``channel:NAME``."""
        values = [item.partition("=")[2] for item in self.items]
        values += [
            str(value)
            for path in self.files.values()
            for _, value in files.leaves(files.read(path))
        ]
        return sorted(
            {name for value in values for name in re.findall(r"(?<![\w/])channel:([\w.-]+)", value)}
        )

    @property
    def groups(self) -> dict[str, Machines]:
        """The machines by what they do: ``train``, and ``data`` where some prepare data."""
        return {
            "train": self.machines,
            **({"data": self.data_machines} if self.data_machines else {}),
        }

    def command(self, place: str) -> list[str]:
        """The arguments of ``kd-train`` for a machine where the job's files lie in the folder ``place``."""
        return self.with_files({name: f"{place}/{name}" for name in self.files})

    def with_files(self, places: Mapping[str, object]) -> list[str]:
        """The arguments of ``kd-train``, with the places of the job's own files."""
        pairs = (
            (item, *item.split("=", 1)) if "=" in item else (item, "", "") for item in self.items
        )
        return [
            f"{k}={places[v]}" if k in ("recipe", "config") and v in places else item
            for item, k, v in pairs
        ]


def read_job(request: Request, own: dict[str, str]) -> Job:
    """Checks a command line of ``kd-launch`` as a whole, with the settings of the run that it would start.

    Args:
        request: the command line without the keys in ``own``; a price given is added to it.
        own: keys of ``kd-launch`` and of the place.

    Raises:
        UserError: a mistake in it, or in the settings of the run.
    """
    if not request.recipe:
        raise UserError("recipe: must be given (kd-train --list)")
    if "instances" not in own:
        raise UserError(
            "instances: must be given: the machines that train (instances=2xml.p4d.24xlarge)"
        )
    machines = read_machines("instances", own["instances"])
    data = (
        read_machines("data_instances", own["data_instances"]) if "data_instances" in own else None
    )
    prices = _prices(own, machines, data)
    if prices:
        request.overrides.append(f"monitor.price_per_hour={sum(prices.values()):.6g}")
    own_files: dict[str, Path] = {}
    items = [f"recipe={_name(request.recipe, 'recipes', own_files)}"]
    items += [
        *(f"config={_name(overlay, 'configs', own_files)}" for overlay in request.overlays),
        *request.trusted,
    ]
    runs_dir = take(request, "runs_dir").get("runs_dir")
    run = Run.of(replace(request, here=False))
    run.cli.check_groups()
    refuse_random_weights(run.config)
    config = run.config
    _check_machines(config, machines, data)
    return Job(
        name=_job_name(own, request.recipe),
        recipe=config["recipe"],
        files=own_files,
        items=[*items, *request.overrides],
        machines=machines,
        data_machines=data,
        spot=truth(own, "spot"),
        hours=positive("hours", own.get("hours", str((config["monitor"]["max_hours"] or 23) + 1))),
        image=own.get("image"),
        processes=_processes(config, machines),
        runs_dir=folder_of_runs(config["runs_dir"] if runs_dir is None else runs_dir, "kd-launch"),
        own=own,
        prices=prices,
        secret=secrets.token_hex(32) if data else "",
        step=_step(config, machines),
    )


def _step(config: dict[str, Any], machines: Machines) -> str:
    batch, each = config["data"]["batch_size"], _processes(config, machines)
    accumulate = config["trainer"]["accumulate_grad_batches"] or 1
    parts = f"{batch} x {machines.count * each if each else 'all'} processes"
    parts += f" x {accumulate} batches" if accumulate > 1 else ""
    return (
        f"{batch * machines.count * each * accumulate} = {parts}"
        if isinstance(batch, int) and each
        else parts
    )


def _name(name: str, kind: str, own: dict[str, Path]) -> str:
    """A recipe's or overlay's name as the job knows it; a file of one's own is noted in ``own``."""
    path = find(kind, name)
    if str(path) != name:
        return name
    if path.name in own:
        raise UserError(f"{path}: another file of the job has the same name")
    own[path.name] = path
    return path.name


def _check_machines(config: dict[str, Any], machines: Machines, data: Machines | None) -> None:
    accelerator = str(config["trainer"]["accelerator"])
    if accelerator in ("gpu", "cuda") and machines.has_gpus is False:
        raise UserError(
            f"instances: {machines.type} has no GPU, but trainer.accelerator={accelerator} needs one"
        )
    if data is not None and (engine := config["data"]["engine"]) != "ray":
        raise UserError(
            f"data_instances: {data} needs data.engine=ray (config=remote_data), got {engine}"
        )
    if accelerator != "cpu":
        _check_processes(config, machines)
    _check_strategy(config["trainer"]["strategy"], machines)


def _check_processes(config: dict[str, Any], machines: Machines) -> None:
    gpus = gpus_of(machines.type) if machines.gpus is None else machines.gpus
    if not gpus:
        return
    devices = config["trainer"]["devices"]
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    wanted = (
        len(devices)
        if isinstance(devices, list)
        else int(devices)
        if str(devices).isdigit()
        else None
    )
    if wanted and wanted > gpus:
        raise UserError(
            f"trainer.devices: {wanted} processes, but {machines.type} has {gpus} GPU{'s' * (gpus > 1)}"
        )
    if config["optim"]["zero"] and machines.count == 1 and (wanted or gpus) == 1:
        raise UserError(f"optim.zero: needs several processes, and {machines} has one GPU")


def _check_strategy(strategy: str | dict[str, Any], machines: Machines) -> None:
    spec: dict[str, Any] = {"class_path": strategy} if isinstance(strategy, str) else strategy
    options = spec.get("init_args") or {}
    backend = options.get("backend") or options.get("process_group_backend")
    if backend == "smddp" or spec["class_path"].endswith(".SMDDPStrategy"):
        raise UserError(
            "trainer.strategy: no image can have smddp and kd: the newest smddp (2.5.0) is for torch "
            "2.4.1, kd needs torch 2.8; config=nodes_4x8 trains over NCCL"
        )
    if backend == "nccl" and machines.has_gpus is False:
        raise UserError(f"trainer.strategy: nccl needs GPUs, and {machines.type} has none")


def _processes(config: dict[str, Any], machines: Machines) -> int | None:
    if machines.gpus != 0:
        return machines.gpus
    devices = str(config["trainer"]["devices"])
    return int(devices) if devices.isdigit() else 1


def _prices(own: dict[str, str], machines: Machines, data: Machines | None) -> dict[str, float]:
    if "prices" not in own:
        return {}
    table, kind = (
        read_prices(Path(own["prices"]).expanduser()),
        ":spot" if truth(own, "spot") else "",
    )
    groups = {"train": machines, **({"data": data} if data else {})}
    return {
        name: price_of([f"{group.count}*{group.type}{kind}"], table)
        for name, group in groups.items()
    }


def _job_name(own: dict[str, str], recipe: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")[:30] or "run"
    name = own.get("job") or f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise UserError(
            f"job: must be lower-case letters, digits, dashes, a letter first, at most 52, got '{name}'"
        )
    return name
