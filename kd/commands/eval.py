"""``kd-eval``: accuracy of a run's student. Heavy imports wait until there is something to evaluate."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kd.errors import UserError
from kd.run.eval_options import EvalOptions
from kd.run.needs import check_models
from kd.run.options import take_options
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.objects import is_url
from kd.storage.run_urls import names_run, run_at

if TYPE_CHECKING:
    from kd.run.measure import Evaluation

HELP = """\
kd-eval: accuracy of a run's student (and of its teacher), as a table and as JSON.

  kd-eval MODEL [MODEL ...] [split=NAME] [folder=DIR] [out=FILE] [robust=true] [data.key=value ...]

  MODEL              a run's folder; or a weights file (safetensors, .pth), or timm's folder (config.json and weights)
                     several: side by side on the same pictures, with the differences in points
{options}
  arch=NAME          timm's name for the model of a weights file that lacks it; likewise img_size=N, kwargs.NAME=VALUE,
                     mean=[R,G,B], std=[R,G,B], classes=FILE, checkpoint_key=NAME (which of several models in the file),
                     builder=CLASS, as for model.teacher
  recipe=NAME        whose pictures a weights file is measured on, without a run beside it
  data.key=...       as for kd-train: data.source.root=DIR, data.batch_size=N, ...

A certificate takes split=test where the data has one. Pictures that chose the student's epoch are refused
(despite_choice=true). How often a run was measured on pictures is counted in RUN_FOLDER/looks.json.

Of a student without a classifier: the directions that its features use (RankMe) and, with data.probe.root=DIR, the
accuracy of k nearest neighbours and of a ridge probe, its teachers beside it.

The JSON of a run is also written to RUN_FOLDER/eval_<split>.json (eval_<folder's name>.json, or eval_folder_val.json
where it is called as a split), with how faithful the student is to its teacher: agreement, mean KL divergence,
calibration, classes, confusions. Computed in float32, as plain timm would; a run whose own validation was in half
precision may differ by a few pictures, which is said.
"""


OPTIONS = EvalOptions
FILE_KEYS = (
    "arch", "img_size", "kwargs", "mean", "std", "builder", "classes", "checkpoint_key",
)  # fmt: skip
"""Settings of ``model.teacher`` that say how a weights file is read."""


def run(request: Request) -> int | None:
    """Measures, prints and writes; returns the exit status, None to show the help.

    What is printed depends on what was measured: what a backbone pays, features of students without a classifier, one
    model, or several side by side.

    Raises:
        UserError: see :func:`evaluated`.
    """
    if "help" in request.flags or not request.rest:
        return None
    evaluation = evaluated(request)
    from kd.data.sources import said
    from kd.report.terminal import print_evaluations

    results = evaluation.results
    print_evaluations(results, evaluation.pairs, evaluation.parts)
    for note in evaluation.notes:
        print(note)
    if evaluation.files:
        files = ", ".join(str(file) for file in evaluation.files)
        print(f"written to {files}{said(results[0].get('left_out', {}))}")
    return 0


def evaluated(request: Request) -> "Evaluation":
    """Measures the models of a command line; prints no table.

    The figures are written into each run's folder (``eval_<split>.json`` or ``eval_<folder>.json``, and by what is
    measured ``fidelity.json``, ``cascade.json``, ``looks.json``, ``disputed_labels.csv`` and
    ``tables/*.json``; with ``pays=`` ``eval_pays.json``), and to the file of ``out=``.

    Args:
        request: its ``rest`` names the models; loses the command's own keys.

    Returns:
        The figures of each model, the files and what else is to be printed.

    Raises:
        UserError: no finished run or weights file, a key that an evaluation does not take, or pictures that can't be
            measured on or can't prove what is asked.
    """
    options = _options(request)
    from kd.run.measure import evaluate_models, evaluate_pays

    if options.pays:
        return evaluate_pays(request, options)
    return evaluate_models(request, options)


def _options(request: Request) -> EvalOptions:
    """Takes the command's own keys from the request and checks what they name, before torch is imported.

    Changes the request: the command's own keys and the settings of weights files are no longer among its ``overrides``
    (they are in the options), and but for ``pays=`` its ``rest`` has runs at URLs as the folders they were fetched to.

    Raises:
        UserError: a key that is unknown or excludes another, or models, pictures or an output that can't be used.
    """
    of_files = _take_file_settings(request)
    options = take_options(EvalOptions, request)
    options.of_files = of_files
    _check_out(options)
    if options.pays:
        for item in of_files:
            raise UserError(f"{_group_of(item)}: can't be given together with pays=")
        check_models(request.rest)
        if not (is_url(options.pays) or Path(options.pays).expanduser().is_dir()):
            raise UserError(f"pays: folder {options.pays} not found")
        from kd.run.pictures import list_to_compare

        list_to_compare(options.pays)
        return options
    words = request.rest
    request.rest = [str(run_at(word)) if is_url(word) else word for word in words]  # fetched once
    only_runs = all(names_run(word) for word in request.rest)
    if of_files and only_runs:
        raise UserError(
            f"{_group_of(of_files[0])}: is for a weights file; a run's folder has it in its config.yaml"
        )
    check_models(request.rest)
    if options.disputed:
        _check_classes(request.rest)
    folder = options.folder
    if folder and not (is_url(folder) or Path(folder).is_dir()):
        raise UserError(f"folder: {folder} not found (<class>/*.jpg are read in it)")
    split = options.split or ("train" if options.disputed else "val")
    _check_pictures(request, split, folder)
    return options


def _check_out(options: EvalOptions) -> None:
    """Refuses an ``out=`` that is neither CSV nor JSON, of ``pays=`` not JSON, or in no folder that exists."""
    out = options.out
    endings = [".csv", ".json"]
    if options.pays:
        endings = [".json"]
    if out is None:
        return
    in_folder = out.resolve().parent.is_dir()
    if out.suffix not in endings or not in_folder:
        files = " or ".join(f"FILE{ending}" for ending in endings)
        raise UserError(f"out: must be {files} in a folder that exists, got '{out}'")


def _check_classes(words: Sequence[str]) -> None:
    """Refuses ``disputed=`` for a run whose student does not name one class a picture.

    Weights files, and students of the user's own task, pass: torch is needed to tell.

    Args:
        words: models of the command line.

    Raises:
        UserError: as :func:`kd.run.disputes.check_disputes` does once torch is loaded.
    """
    from kd.ship.predict_words import answers_of

    for word in words:
        if names_run(word) and answers_of(run_at(word) / "student.safetensors") not in (
            None,
            "classification",
        ):
            raise UserError(
                "disputed: needs one class a picture, of two or more (model.task=Classification)"
            )


def _check_pictures(request: Request, split: str, folder: str | None) -> None:
    """Refuses pictures that can't be measured on, as far as a list of them shows it, before torch is loaded.

    Args:
        request: names the models; keeps the source of each run, or without a run that of the settings, in ``listed``, so
            that its pictures are not listed again.
        split: of the data.
        folder: of other pictures, which are measured on in its place.
    """
    from kd.run.pictures import list_folder, list_splits, source_key

    if folder:
        list_folder(folder)
        return
    runs = [run_at(word) for word in request.rest if names_run(word)]
    files: list[Path | None] = [run / "config.yaml" for run in runs]
    for file in files or [None]:
        config, _ = Run.settings(file, request)
        splits = list_splits(config, [split])
        if splits is not None:
            request.listed[source_key(config)] = splits.source


def _take_file_settings(request: Request) -> list[str]:
    """Removes the ``key=value`` items that say how a weights file is read from the request, and returns them."""
    items = [item for item in request.overrides if _group_of(item) in FILE_KEYS]
    request.overrides = [item for item in request.overrides if item not in items]
    return items


def _group_of(item: str) -> str:
    """``kwargs`` of the item ``kwargs.depth=2``."""
    return re.split(r"[.=]", item)[0]
