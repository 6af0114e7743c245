"""Counts what a run asks of teachers behind an address, over all processes that have trained it: all ranks, each time that
it was begun or resumed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.storage.elsewhere import mapping_of, number_in
from kd.storage.writing import write_json
from kd.teachers import Address, OwnTeacher, RunTeacher

COUNTED = ("asked", "requests", "repeated", "seconds", "price")
"""What can be added of :meth:`kd.teachers.Address.report`: pictures asked, requests, how many of these repeat a failed one,
seconds spent in requests for answers, and the price in the currency of the settings.
"""


def addresses_of(teacher: RunTeacher | None) -> dict[str, Address]:
    """A run's teachers behind an address, by name ("" for a single one); {} without any."""
    addresses = {}
    for name, member in teacher.members.items() if teacher is not None else ():
        if isinstance(member, OwnTeacher) and isinstance(member.given, Address):
            addresses[name] = member.given
    return addresses


class AskedAnswers(Callback):
    """Writes ``asked.json`` in the run's folder after each request that a teacher's address has answered.

    The file holds ``processes``, a list: what each process that trained the run has asked of each teacher, by name. Rank
    N > 0 has a file of its own, ``asked.rankN.json``. A process that is killed while it trains has counted all that it was
    answered.
    """

    def __init__(self) -> None:
        """Nothing is counted before training starts."""
        self._file = Path()
        self._earlier: list[Any] = []
        self._addresses: dict[str, Address] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads what earlier processes of this rank have asked, and has each answered request written from here on.

        Nothing without a teacher behind an address. What this process has asked before, in the preflight, counts too.
        """
        run = RunContext.of(trainer)
        self._addresses = addresses_of(run.module.teacher)
        if not self._addresses:
            return
        name = "asked.json"
        if trainer.global_rank:
            name = f"asked.rank{trainer.global_rank}.json"
        self._file = run.folder / name
        self._earlier = _processes(self._file)
        for address in self._addresses.values():
            address.on_asked = self._write
        self._write()  # what the preflight has asked

    def _write(self) -> None:
        """Replaces the file: the earlier processes, and this one so far."""
        now = {name: address.report() for name, address in self._addresses.items()}
        write_json(self._file, {"processes": [*self._earlier, now]})


def _processes(file: Path) -> list[Any]:
    """The entries of an ``asked.json``; none where it is missing or damaged."""
    processes = mapping_of(file).get("processes")
    if isinstance(processes, list):
        return [entry for entry in processes if isinstance(entry, dict)]
    return []


def asked_by_run(folder: Path, name: str, now: Mapping[str, Any]) -> dict[str, float]:
    """What a run has asked of one teacher in all: sums over its processes.

    Args:
        folder: of the run.
        name: of the teacher; "" for a single one.
        now: what this process has asked; it is read where no file has counted this teacher yet.

    Returns:
        The sums of :data:`COUNTED`, without those that no process reports (``price``), and ``processes``: how many there
            were, over all ranks, at least 1.
    """
    reports: list[Mapping[str, Any]] = []
    for file in sorted(folder.glob("asked*.json")):
        for process in _processes(file):
            if isinstance(process.get(name), dict):
                reports.append(process[name])
    totals: dict[str, float] = {"processes": max(1, len(reports))}
    for report in reports or [now]:
        for key in COUNTED:
            number = number_in(report, key)
            if number is not None:
                totals[key] = round(totals.get(key, 0) + number, 4)
    return totals
