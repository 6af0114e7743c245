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
from kd.report.records import read_run
from kd.report.tables import Result, sentences
from kd.run.options import CommandOptions, names_of, take_options
from kd.run.request import Request
from kd.storage.run_urls import run_at

if TYPE_CHECKING:
    from kd.report.rules import Explained

HELP = """\
  kd-report RUN_FOLDER [--open]           writes RUN_FOLDER/report.html; also while the run trains, or after it failed
  kd-report RUN_FOLDER --what-if cache=on workers=4 gpus=8 epochs=100 price=32.8
                                          what a changed run would take and cost, from the records of this one; also
                                          machines=4 batch_size=128; instances=4*p4d.24xlarge prices=prices.yaml
  kd-report RUN_FOLDER --set kernels=5    changes what a run records while it trains, on its machine; words: on, off,
                                          interval=SECONDS, health=BATCHES, kernels=BATCHES, nvtx=on|off
  kd-report BEFORE AFTER [...] [--open]   compares runs: comparison.html in the last one's folder
  --json                                  prints verdict and findings, or the tables, as data

Needs neither torch nor a network.
"""


class WhatIf(Change, CommandOptions):
    """The words after ``--what-if``."""

    WORDS = (1, 1)
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


FLAGS = ("--open", "--what-if", "--set", "--json")
"""Options that take no value."""


def run(request: Request) -> Result | int | None:
    """Writes the page of a run, or of several to compare, with its findings; or does what a flag asks for.

    The page goes into the run's folder, of several into the last one's; ``--open`` shows it in a browser.

    Returns:
        What the page shows first; the exit status of ``--set``; None without a run.

    Raises:
        UserError: no run's folder, a wrong word, or a page that can't be written.
    """
    from kd.report.rules import Explained

    if not request.rest:
        return None
    if "set" in request.flags:
        return _set(request)
    if "what-if" in request.flags:
        return _what_if(request)
    if request.overrides or request.recipe or request.overlays:
        raise UserError(
            "takes a run's folder, or several to compare, and --open (kd-report RUN_FOLDER)"
        )
    explained = [Explained(read_run(run_at(name))) for name in request.rest]
    for one in explained:
        for note in one.run.notes:
            print(f"kd-report: {one.run.folder}: {note}", file=sys.stderr)
    result = _page(explained)
    if "open" in request.flags and not webbrowser.open(result.files[0].resolve().as_uri()):
        print("no browser was found to open it in", file=sys.stderr)
    return result


def _page(explained: "list[Explained]") -> Result:
    """Writes the page of one run, or of several to compare, into the folder of the last one."""
    from kd.report.comparison import comparison_tables, differences_in_words
    from kd.report.html import write_comparison, write_report
    from kd.report.terminal import diagnosis

    folder = explained[-1].run.folder
    if len(explained) > 1:
        lines = differences_in_words(explained)
        parts = [sentences("", lines), *comparison_tables([one.facts for one in explained])]
        file = write_comparison(explained, folder / "comparison.html")
        return Result([asdict(part) for part in parts], parts, files=[file])
    (of_one,) = explained
    content = {"verdict": of_one.verdict, "findings": [asdict(one) for one in of_one.findings]}
    lines = diagnosis(content)
    return Result(
        content, [sentences("", lines)], files=[write_report(of_one, folder / "report.html")]
    )


def _what_if(request: Request) -> Result:
    """``--what-if RUN_FOLDER KEY=VALUE ...``: the time and cost of the run as it is, and with these changes."""
    from kd.report.costs import outlook_table
    from kd.report.facts import Facts

    if len(request.rest) != 1 or not request.overrides:
        keys = ", ".join(f"{name}=" for name in names_of(WhatIf))
        raise UserError(f"--what-if takes one run's folder and changes: {keys}")
    change = take_options(WhatIf, request)
    table = outlook_table(Facts(read_run(run_at(request.rest[0]))), change)
    return Result(asdict(table), [table])


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
    print(f"written to {send(place, words)}; a run that still trains follows within seconds")
    return 0
