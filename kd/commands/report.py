"""``kd-report``: what limits a run, as one page. Needs neither torch nor lightning."""

import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kd.errors import UserError
from kd.report.costs import Change
from kd.report.prices import machines_of, price_of, read_prices
from kd.report.records import is_run, not_a_run, read_run
from kd.run.options import CommandOptions, names_of, take_options
from kd.run.request import Request
from kd.storage.run_urls import latest_hint, run_at
from kd.storage.shown import on_terminal

if TYPE_CHECKING:
    from kd.report.rules import Explained

HELP = """\
kd-report: what limits a run, as one page.

  kd-report RUN_FOLDER [--open]           writes RUN_FOLDER/report.html; also while the run trains, or after it failed
  kd-report RUN_FOLDER --what-if cache=on workers=4 gpus=8 epochs=100 price=32.8
                                          what a changed run would take and cost, from the records of this one; also
                                          machines=4 batch_size=128; instances=4*p4d.24xlarge prices=prices.yaml
  kd-report RUN_FOLDER --set kernels=5    changes what a run records while it trains, on its machine; words: on, off,
                                          interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off
  kd-report BEFORE AFTER [...] [--open]   compares runs: comparison.html in the last one's folder

Needs neither torch nor a network.
"""


class WhatIf(Change, CommandOptions):
    """The words after ``--what-if``."""

    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "instances": ("prices=FILE",),
        "prices": ("instances=NAMES",),
    }
    EXCLUDES: ClassVar[Mapping[str, Sequence[str]]] = {
        "machines": ("gpus", "instances"),
        "instances": ("gpus", "price"),
    }
    instances: list[str] | None = None
    """Training machines by their names in ``prices``, 2*p4d.24xlarge: sets ``machines`` and ``price``."""
    prices: Path | None = None
    """A table of instances and prices of an hour, as ``monitor.prices``."""

    def __post_init__(self) -> None:
        """Refuses options that exclude each other; counts the instances and adds up their prices."""
        super().__post_init__()
        if self.instances and self.prices:
            self.machines = sum(count for count, _ in machines_of(self.instances))
            table = read_prices(self.prices.expanduser(), "prices")
            self.price = price_of(self.instances, table, "instances")


FLAGS = ("--open", "--what-if", "--set")
"""Options that take no value."""


def run(request: Request) -> int | None:
    """Writes the page of a run, or of several to compare, and prints its findings; or does what a flag asks for.

    The page goes into the run's folder, of several into the last one's; ``--open`` shows it in a browser.

    Returns:
        The exit status, None to show the help.

    Raises:
        UserError: no run's folder, a wrong word, or a page that can't be written.
    """
    from kd.report.rules import Explained

    if "help" in request.flags or not request.rest:
        return None
    for flag, command in {"set": _set, "what-if": _what_if}.items():
        if flag in request.flags:
            return command(request)
    if request.overrides:
        raise UserError(
            "takes a run's folder, or several to compare, and --open (kd-report RUN_FOLDER)"
        )
    folders = [_seen_run(run_at(name)) for name in request.rest]
    runs = [read_run(folder) for folder in folders]
    for records in runs:
        for note in records.notes:
            print(f"kd-report: {records.folder}: {note}", file=sys.stderr)
    try:
        file = _write_page([Explained(records) for records in runs], folders[-1])
    except OSError as error:
        raise UserError(f"{folders[-1]}: the page can't be written: {error.strerror}") from error
    print(f"written to {file}")
    if "open" in request.flags and not webbrowser.open(file.resolve().as_uri()):
        print("no browser was found to open it in", file=sys.stderr)
    return 0


def _write_page(explained: "list[Explained]", folder: Path) -> Path:
    """Writes the page of one run, or of several to compare, and prints its findings or the comparison.

    Args:
        explained: the runs, one at least, in the order of the command line.
        folder: of the last one.

    Returns:
        The file in it: ``report.html`` of one run, ``comparison.html`` of several.
    """
    from kd.report.comparison import comparison_tables, differences_in_words
    from kd.report.html import write_comparison, write_report
    from kd.report.terminal import print_diagnosis, print_parts

    if len(explained) == 1:
        (of_one,) = explained
        file = write_report(of_one, folder / "report.html")
        findings = [asdict(finding) for finding in of_one.findings]
        print_diagnosis(findings, of_one.verdict)
        return file
    file = write_comparison(explained, folder / "comparison.html")
    for line in differences_in_words(explained):
        print(on_terminal(line))
    print_parts(comparison_tables([one.facts for one in explained]))
    return file


def _what_if(request: Request) -> int:
    """``--what-if RUN_FOLDER KEY=VALUE ...``: prints the time and cost of the run as it is, and with these changes."""
    from kd.report.costs import outlook_table
    from kd.report.facts import Facts
    from kd.report.terminal import print_parts

    if len(request.rest) != 1 or not request.overrides:
        keys = ", ".join(f"{name}=" for name in names_of(WhatIf))
        raise UserError(f"--what-if takes one run's folder and changes: {keys}")
    change = take_options(WhatIf, request)
    facts = Facts(read_run(_seen_run(run_at(request.rest[0]))))
    print_parts([outlook_table(facts, change)])
    return 0


def _set(request: Request) -> int:
    """``--set RUN WORD ...``: changes what a run in training records; it reads the words within seconds.

    Whether it still trains is not checked: of a run that has ended they change nothing.

    Raises:
        UserError: no such run, no words, or words that a run does not take.
    """
    from kd.storage.control_file import WORDS, send

    if not request.rest:
        raise UserError(f"--set takes a run's folder, and words: {WORDS}")
    place, *switches = request.rest
    words = [*switches, *request.overrides]
    if not words:
        raise UserError(f"--set takes words for the run: {WORDS}")
    print(f"written to {send(place, words)}; the run follows within seconds")
    return 0


def _seen_run(folder: Path) -> Path:
    """The folder, if a run has written to it; a page is put nowhere else.

    Raises:
        UserError: no such folder, or one of something else; the message names runs below it.
    """
    if not folder.is_dir():
        raise UserError(f"run folder {folder} not found")
    if not is_run(folder):
        below = ", ".join(str(file.parent) for file in sorted(folder.glob("*/config.yaml"))[-3:])
        hint = latest_hint(folder)
        if below and not hint:
            hint = f"; did you mean {below}?"
        raise UserError(not_a_run(folder) + hint)
    return folder
