"""``kd-card``: a model card of a finished run. Needs no torch."""

from pathlib import Path

from kd.errors import UserError, plain
from kd.report.tables import Result
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.storage.of_weights import export_at, on_stderr
from kd.storage.run_urls import finished_at
from kd.storage.writing import write_text

HELP = """\
  kd-card RUN_FOLDER [license=NAME] [teacher_license=NAME] [data_license=NAME] [out=FILE]

{options}

The card leaves out what the run does not have: kd-eval, kd-latency and kd-export add it.
"""


class CardOptions(CommandOptions):
    """What ``kd-card`` is given."""

    WORDS = (1, 1)
    license: str | None = None
    """Of the student's weights, as the Hugging Face hub names it (apache-2.0)."""
    teacher_license: str | None = None
    """Of the teacher's weights."""
    data_license: str | None = None
    """Of the training pictures."""
    out: Path | None = None
    """Default: RUN_FOLDER/README.md, and README.md beside RUN_FOLDER/export/hub where that is."""


OPTIONS = CardOptions


def run(request: Request, options: CardOptions) -> Result:
    """Writes the model card of a finished run; the result names the files.

    Licences that were not given are named on stderr; the card says that they are not stated.

    Raises:
        UserError: no finished run, a key that a card does not take, a folder of ``out=`` that does not exist, or files of
            the run that hold other values than a run records.
    """
    from kd.report.card import card
    from kd.report.records import read_run

    names = ("license", "teacher_license", "data_license")
    licences = {name: getattr(options, name) for name in names}
    folder = finished_at(request.rest[0], "summary.json")
    files = [options.out or folder / "README.md"]
    hub = export_at(folder, "hub", on_stderr)
    if options.out is None and hub is not None:
        files.append(hub / "README.md")
    parent = files[0].resolve().parent
    if not parent.is_dir():
        raise UserError(f"out: folder {parent} not found")
    missing = [f"{name}=" for name, given in licences.items() if given is None]
    if missing:
        on_stderr(
            f"kd-card: {', '.join(missing)} not given: the card says that the licence is not stated"
        )
    try:
        run = read_run(folder)
        known = len(run.notes)
        text = card(run, *licences.values())
    except (AttributeError, LookupError, TypeError) as error:
        # a run from elsewhere may hold a text in the place of a number
        problem = f"its files hold values that no run has recorded: {plain(error)}"
        raise UserError(f"{folder}: {problem}") from error
    for note in dict.fromkeys(run.notes[known:]):
        on_stderr(f"kd-card: {note}")
    for file in files:
        write_text(file, text)
    return Result(licences, files=files)
