"""``kd-eval``: accuracy of a run's student. Heavy imports wait until there is something to evaluate."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kd.errors import UserError
from kd.run.cascade_wish import KEYS as CASCADE
from kd.run.cascade_wish import wish_of
from kd.run.claim import KEYS as CERTIFICATE
from kd.run.claim import claim_of
from kd.run.own_keys import out_path, take_all, truth
from kd.run.pays_wish import KEYS as PAYS
from kd.run.pays_wish import PaysWish, pays_of
from kd.run.present import check_models
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.objects import is_url
from kd.storage.run_urls import names_run, run_at

if TYPE_CHECKING:
    from kd.run.measure import Evaluation, Options

HELP = """\
kd-eval: accuracy of a run's student (and of its teacher), as a table and as JSON.

  kd-eval MODEL [MODEL ...] [split=NAME] [folder=DIR] [out=FILE] [robust=true] [data.key=value ...]

  MODEL          a run's folder; or a weights file (safetensors, .pth), or timm's folder (config.json and weights)
                 several: side by side on the same pictures, with the differences in points
  split=NAME     the data's split: val (default), train, or for an ImageFolder any folder below its root
  folder=DIR     other pictures: DIR/<class>/*.jpg, with class names of the model
  out=FILE       FILE.csv: a line a picture, with its label and what each model says; FILE.json: the figures
  margin=1       whether the student is not worse than its teacher by more than a point: shown, or not (of several
                 models each against the first; of a regression: per cent of the teacher's error)
  confidence=0.95, groups=REGEX (brackets around what the names of pictures that belong together share)
  cascade=true   the student answers where it is sure, else the teacher: accuracy against milliseconds, and the threshold
                 for a goal, chosen on half of the pictures: accuracy=teacher (default; less margin=1 point),
                 accuracy=0.99*teacher, accuracy=0.85, share=0.1 (asked for), or latency_ms=9 (mean of a picture)
  score=         of sureness: probability (default), margin, entropy or head
  disputed=true  labels that the teacher disputes, worst first: of the training pictures, or of split=NAME or
                 folder=DIR; also in RUN_FOLDER/disputed_labels.csv, and with pictures in the report
  pays=DIR       whether a distilled backbone pays, beside a random start and pre-trained weights: a linear probe on frozen
                 features (DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg); also in the report
  pretrained=FILE  with pays=: weights of the same architecture, or pretrained=true: timm's (default: what the run
                 began with); seeds=3: how often each start is measured
  robust=true    also on damaged pictures: blur, noise, JPEG, brightness, three strengths each
  arch=NAME      timm's name for the model of a weights file that lacks it; likewise img_size=N, kwargs.NAME=VALUE,
                 mean=[R,G,B], std=[R,G,B], classes=FILE, checkpoint_key=NAME (which of several models in the file),
                 builder=CLASS, as for model.teacher
  recipe=NAME    whose pictures a weights file is measured on, without a run beside it
  data.key=...   as for kd-train: data.source.root=DIR, data.batch_size=N, ...

A certificate takes split=test where the data has one. Pictures that chose the student's epoch are refused
(despite_choice=true). How often a run was measured on pictures is counted in RUN_FOLDER/looks.json.

Of a student without a classifier: the directions that its features use (RankMe) and, with data.probe.root=DIR, the
accuracy of k nearest neighbours and of a ridge probe, its teachers beside it.

The JSON of a run is also written to RUN_FOLDER/eval_<split>.json (eval_<folder's name>.json, or eval_folder_val.json
where it is called as a split), with how faithful the student is to its teacher: agreement, mean KL divergence,
calibration, classes, confusions. Computed in float32, as plain timm would; a run whose own validation was in half
precision may differ by a few pictures, which is said.
"""


KEYS = (
    "split", "folder", "out", "robust", "disputed", *CERTIFICATE, *CASCADE, *PAYS, "despite_choice",
)  # fmt: skip
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
    from kd.report.terminal import (
        print_evaluation,
        print_features,
        print_pays,
        print_side_by_side,
    )

    results = evaluation.results
    if "rankme" in results[0].get("student", {}):
        print_features(results)
    elif "probe" in results[0]:
        print_pays(results[0])
    elif len(results) == 1:
        print_evaluation(results[0])
    else:
        print_side_by_side(results, evaluation.pairs)
    for note in evaluation.notes:
        print(note)
    if evaluation.files:
        files = ", ".join(str(file) for file in evaluation.files)
        print(f"written to {files}{said(results[0].get('left_out', {}))}")
    return 0


def evaluated(request: Request) -> "Evaluation":
    """Measures the models of a command line; prints no table.

    The figures are written into each run's folder (``eval_<split>.json`` or ``eval_<folder>.json``, and by what is
    measured ``fidelity.json``, ``cascade.json``, ``looks.json``, ``disputed_labels.csv`` with ``disputed.json`` and an
    entry in ``summary.json``; with ``pays=`` ``pays.json`` and ``summary.json`` alone), and to the file of ``out=``.

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

    if options.pays is not None:
        return evaluate_pays(request, options.pays, options)
    return evaluate_models(request, options)


def _options(request: Request) -> "Options":
    """Takes the command's own keys from the request and checks what they name, before torch is imported.

    Changes the request: the command's own keys and the settings of weights files are no longer among its ``overrides``
    (they are in the options), and but for ``pays=`` its ``rest`` has runs at URLs as the folders they were fetched to.

    Raises:
        UserError: a key that is unknown or excludes another, or models, pictures or an output that can't be used.
    """
    of_files = _take_file_settings(request)
    options = take_all(request, *KEYS)
    pays = pays_of(options)
    if pays is not None:
        return _pays_options(options, of_files, pays, request.rest)
    robust = truth(options, "robust")
    wish = wish_of(options)
    claim = None if wish else claim_of(options, has_cascade=True)
    disputed = truth(options, "disputed")
    if disputed and (claim or wish):
        other = "cascade" if wish else "margin"
        raise UserError(f"disputed: can't be given together with {other}=")
    despite_choice = truth(options, "despite_choice")
    if despite_choice and not (claim or wish):
        raise UserError("despite_choice: has no effect without margin=POINTS or cascade=true")
    out = _out(options)
    for key in ("split", "folder"):
        if options.get(key) == "":  # it would measure ``val``, which was not asked for
            raise UserError(f"{key}: must name pictures, got nothing")
    if "split" in options and "folder" in options:
        raise UserError("folder: can't be given together with split=: the folder is the split")
    words = request.rest
    request.rest = [str(run_at(word)) if is_url(word) else word for word in words]  # fetched once
    only_runs = all(names_run(word) for word in request.rest)
    if of_files and only_runs:
        raise UserError(
            f"{_group_of(of_files[0])}: is for a weights file; a run's folder has it in its config.yaml"
        )
    check_models(request.rest)
    if disputed:
        _check_classes(request.rest)
    folder = options.get("folder")
    if folder and not (is_url(folder) or Path(folder).is_dir()):
        raise UserError(f"folder: {folder} not found (<class>/*.jpg are read in it)")
    split = options.get("split") or ("train" if disputed else "val")
    _check_pictures(request, split, folder)
    from kd.run.measure import Options

    return Options(
        options.get("split", ""),
        folder,
        robust,
        of_files,
        out,
        claim,
        wish,
        despite_choice,
        disputed,
    )


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


def _out(options: Mapping[str, str]) -> Path | None:
    """The file that ``out=`` names; None where it is not given. A user's error unless it is CSV or JSON in a folder that
    exists.
    """
    out = out_path(options)
    if out is None:
        return None
    if out.suffix not in (".csv", ".json") or not out.resolve().parent.is_dir():
        raise UserError(f"out: must be FILE.csv or FILE.json in a folder that exists, got '{out}'")
    return out


def _pays_options(
    options: Mapping[str, str], of_files: Sequence[str], pays: PaysWish, models: Sequence[str]
) -> "Options":
    """Options of ``pays=``, which measures no split and no logits, and no bare weights file.

    Args:
        options: the command's own keys and values.
        of_files: items such as ``arch=NAME``, which are for a weights file.
        pays: what the options ask for.
        models: words of the command line that name models.

    Raises:
        UserError: another key of the command, an item of ``of_files``, or models, pictures or an output that can't be used.
    """
    others = [key for key in options if key not in (*PAYS, "out")]
    others += [_group_of(item) for item in of_files]
    if others:
        raise UserError(f"{others[0]}: can't be given together with pays=")
    out = _out(options)
    if out is not None and out.suffix == ".csv":
        raise UserError(f"out: must be FILE.json with pays=, got '{out}'")
    check_models(models)
    if not (is_url(pays.folder) or Path(pays.folder).expanduser().is_dir()):
        raise UserError(f"pays: folder {pays.folder} not found")
    from kd.run.pictures import list_to_compare

    list_to_compare(pays)
    from kd.run.measure import Options

    return Options(out=out, pays=pays)


def _take_file_settings(request: Request) -> list[str]:
    """Removes the ``key=value`` items that say how a weights file is read from the request, and returns them."""
    items = [item for item in request.overrides if _group_of(item) in FILE_KEYS]
    request.overrides = [item for item in request.overrides if item not in items]
    return items


def _group_of(item: str) -> str:
    """``kwargs`` of the item ``kwargs.depth=2``."""
    return re.split(r"[.=]", item)[0]
