"""``kd-eval``: accuracy of a run's student. Heavy imports wait until there is something to evaluate."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.report.tables import Result
from kd.run.eval_options import EvalOptions, no_teacher
from kd.run.needs import check_models
from kd.run.options import take_options
from kd.run.request import Request
from kd.run.run import Run
from kd.settings import teachers_in
from kd.storage.objects import is_url
from kd.storage.run_urls import run_at

if TYPE_CHECKING:
    from kd.data.splits import Splits

HELP = """\
  kd-eval MODEL [MODEL ...] [split=NAME] [folder=DIR] [out=FILE] [data.key=value ...] [--json]

  MODEL              a run's folder; or a weights file (safetensors, .pth), or timm's folder (config.json and weights)
                     several: side by side on the same pictures, with the differences in points
{options}
  arch=NAME          timm's name for the model of a weights file that lacks it; likewise img_size=N, kwargs.NAME=VALUE,
                     mean=[R,G,B], std=[R,G,B], classes=FILE, checkpoint_key=NAME (which of several models in the file),
                     builder=CLASS, as for model.teacher
  recipe=NAME        whose pictures a weights file is measured on, without a run beside it
  data.key=...       as for kd-train: data.source.root=DIR, data.batch_size=N, ...

A certificate and a cascade take split=test where the data has one (DIR/test/<class>/*.jpg beside DIR/train). Pictures
that chose the student's epoch are refused (despite_choice=true). How often a run was measured on pictures is counted in
RUN_FOLDER/looks.json.

Of a student without a classifier: the directions that its features use (RankMe) and, with data.probe.root=DIR, the
accuracy of k nearest neighbours and of a ridge probe, its teachers beside it.

The JSON of a run is also written to RUN_FOLDER/eval_<split>.json (eval_<folder's name>.json, or eval_folder_val.json
where it is called as a split), with how faithful the student is to its teacher: agreement, mean KL divergence,
calibration, classes, confusions. Computed in float32, as plain timm would: the figures of a run whose own
validation was in half precision may differ by a few pictures.
"""


OPTIONS = EvalOptions
FILE_KEYS = (
    "arch", "img_size", "kwargs", "mean", "std", "builder", "classes", "checkpoint_key",
)  # fmt: skip
"""Settings of ``model.teacher`` that say how a weights file is read."""


FLAGS = ("--json",)
"""Options that take no value."""


def run(request: Request) -> Result | None:
    """Measures the models of a command line: what a backbone pays, features of students without a classifier, one model,
    or several side by side.

    The figures are written into each run's folder (``eval_<split>.json`` or ``eval_<folder>.json``, and by what is
    measured ``fidelity.json``, ``cascade.json``, ``looks.json``, ``disputed_labels.csv`` and
    ``tables/*.json``; with ``pays=`` ``eval_pays.json``), and to the file of ``out=``.

    Args:
        request: its ``rest`` names the models; loses the command's own keys.

    Returns:
        The figures of each model, the files and what else is to be printed; None without a model.

    Raises:
        UserError: no finished run or weights file, a key that an evaluation does not take, or pictures that can't be
            measured on or can't prove what is asked.
    """
    if not request.rest:
        return None
    options = _options(request)
    from kd.run.measure import evaluate_models, evaluate_pays

    if options.pays:
        return evaluate_pays(request, options)
    return evaluate_models(request, options)


def _options(request: Request) -> EvalOptions:
    """Takes the command's own keys from the request and checks what they name, before torch is imported.

    Changes the request: the command's own keys and the settings of weights files are no longer among its ``overrides``
    (they are in the options), and its ``rest`` has runs at URLs as the folders they were fetched to.

    Raises:
        UserError: a key that is unknown or excludes another, or models, pictures or an output that can't be used.
    """
    of_files = [item for item in request.overrides if _group_of(item) in FILE_KEYS]
    request.overrides = [item for item in request.overrides if item not in of_files]
    options = take_options(EvalOptions, request)
    options.of_files = of_files
    out = options.out
    endings = (".json",) if options.pays else (".csv", ".json")
    if out is not None and not (out.suffix in endings and out.resolve().parent.is_dir()):
        files = " or ".join(f"FILE{ending}" for ending in endings)
        raise UserError(f"out: must be {files} in a folder that exists, got '{out}'")
    words = request.rest
    request.rest = [str(run_at(word)) if is_url(word) else word for word in words]  # fetched once
    runs = check_models(request.rest)
    for item in of_files:
        if options.pays:
            raise UserError(f"{_group_of(item)}: can't be given together with pays=")
        if None not in runs:
            why = "is for a weights file; a run's folder has it in its config.yaml"
            raise UserError(f"{_group_of(item)}: {why}")
    key = options.classifier_key
    if len(runs) > 1 and key in ("disputed", "cascade"):
        raise UserError(f"{key}: takes one run, or one weights file, got {len(runs)}")
    _check_pictures(request, runs, options)
    return options


def _check_pictures(request: Request, runs: Sequence[Path | None], options: EvalOptions) -> None:
    """Refuses pictures that can't be measured on, or can't prove what is wanted, as far as a list of them shows it, before
    torch is loaded.

    Args:
        request: names the models; keeps the source of each run, or without a run that of the settings, in ``listed``, so
            that its pictures are not listed again.
        runs: of the models; None: a weights file.
        options: name the pictures; get the split that certifies where none is named, and the cautions.
    """
    from kd.run.pictures import list_folder, list_once, list_to_compare

    if options.pays:
        list_to_compare(options.pays)
        return
    if options.folder:
        list_folder(options.folder)
        if not options.proves or is_url(options.folder):
            return
    own_runs: list[Path | None] = [*filter(None, runs)]
    for run in own_runs or [None]:
        config, _ = Run.settings(run / "config.yaml" if run else None, request)
        if options.proves and len(runs) == 1:
            _check_teachers(config if run else {}, options.classifier_key, request.rest[0])
        split = options.split or ("train" if options.disputed else "val")
        splits = list_once(request, config, [split])
        if splits is not None and options.proves:
            _check_proof(splits, run, options)


def _check_proof(splits: "Splits", run: Path | None, options: EvalOptions) -> None:
    """Refuses pictures that can't certify a run's student (None: a weights file's model), and keeps what speaks against
    them in ``options``, with the split that certifies where none is named.
    """
    from kd.run.certify import cautions_about, usual_split

    if options.folder:
        splits.listed("train")  # the classes
        splits.list_folder(options.folder, splits.source.classes)
    elif not options.split:
        options.split = usual_split(splits)
    options.cautions[run] = cautions_about(splits, run, options)


def _check_teachers(config: Mapping[str, Any], key: str, name: str) -> None:
    """Refuses a comparison with a teacher that the settings do not have, or whose weights are gone.

    Args:
        config: the run's settings; {} of a weights file, which has no teacher.
        key: the option that needs it, ``margin`` or ``cascade``.
        name: of the model, as it was typed.

    Raises:
        UserError: as it is raised once the teacher can't be built.
    """
    teachers = teachers_in(config.get("model", {}))
    why = ""
    for teacher in teachers.values():
        file = teacher["checkpoint"]
        if file and not is_url(file) and not Path(file).exists():
            why = f" ({file} not found)"
    if why or not teachers:
        raise no_teacher(key, name, why)


def _group_of(item: str) -> str:
    """``kwargs`` of the item ``kwargs.depth=2``."""
    return re.split(r"[.=]", item)[0]
