"""``kd-predict``: a run's student on pictures. Heavy imports wait until there is something to predict."""

import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kd.config.kinds import Range
from kd.machine import choose_device
from kd.run.open import open_run
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.run_urls import finished_at
from kd.storage.shown import on_terminal

if TYPE_CHECKING:
    from kd.ship.predict import Predictions

HELP = """\
  kd-predict RUN_FOLDER PICTURES... [out=FILE_OR_FOLDER] [top=5] [device=cpu]

  PICTURES           files, folders (with all below), patterns such as 'photos/*.jpg', lists of pictures (test.csv; read
                     as the run's own list: data.source.path_column=id data.source.image_dir=DIR change that); on this
                     disk, not by URL
{options}

Damaged pictures, and those to which the student's answer is NaN, are listed and left out. Exit status: 0 done, 1 no
picture was answered, 2 wrong use.
"""


class PredictOptions(CommandOptions):
    """What ``kd-predict`` is given."""

    OTHERS = "data"
    WORDS = (2, sys.maxsize)
    out: Path | None = None
    """Labels: FILE.csv or FILE.jsonl (default: a line a picture on the terminal); masks: a folder, of class ids
    (PICTURE.ids.png) and colours (PICTURE.colours.png); of a student without a classifier: FILE.npz with its features and
    the pictures' names."""
    top: Annotated[int, Range(">= 1")] = 5
    """Number of labels for each picture."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps; default: the GPU where there is one."""


OPTIONS = PredictOptions


def run(request: Request, options: PredictOptions) -> int:
    """Writes, or prints, what a run's student says of pictures; those without an answer are listed on stderr.

    Returns:
        The exit status, 1 where no picture was answered.
    """
    predicted = predictions(request, options)
    files, bad = predicted.files, predicted.bad
    rows = predicted.rows(options.top)
    first = next(rows, None)  # nothing is written before there is an answer
    where = None
    if first:
        where = predicted.write(chain([first], rows), options.out)
    report_bad(bad)
    text = f"{len(files) - len(bad)} pictures"
    if bad:
        text += f", {len(bad)} left out"
    if where:
        print(f"{text}: written to {where}")
    else:  # the answers themselves are on the standard output
        print(text, file=sys.stderr)
    if len(bad) < len(files):
        return 0
    return 1


def report_bad(bad: Mapping[str, str]) -> None:
    """Lists pictures that have no answer, each with the reason, on stderr."""
    for name, problem in bad.items():
        print(on_terminal(f"kd-predict: left out {name}: {problem}"), file=sys.stderr)


def predictions(request: Request, options: PredictOptions) -> "Predictions":
    """What a run's student says of pictures, while it is read; nothing is written or printed.

    Raises:
        UserError: no finished run, no pictures, or a wrong key.
    """
    request.rest[0] = str(finished_at(request.rest[0], "config.yaml"))  # fetched once
    from kd.ship.predict_words import answers_of, check_out, find_pictures

    folder = Path(request.rest[0])
    config, _ = Run.settings(folder / "config.yaml", request)
    files = find_pictures(request.rest[1:], config["data"]["source"])
    known_answers = answers_of(folder / "student.safetensors")
    if known_answers is not None:
        check_out(known_answers, options.out)
    from kd.ship.predict import Predictions

    opened = open_run(request.rest[0], request)
    if known_answers is None:
        check_out(opened.kind, options.out)
    return Predictions(opened, files, choose_device(options.device))
