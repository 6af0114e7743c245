"""Whole runs from Python: the same recipes, words, checks and messages as on the command line (PYTHON.md)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kd.commands import eval as eval_command
from kd.commands import export as export_command
from kd.commands import size as size_command
from kd.commands.predict import PredictOptions, predictions, report_bad
from kd.commands.train import end_again, to_train
from kd.errors import RunError, UserError
from kd.report.evaluated import run_table
from kd.report.tables import Part, Table
from kd.report.templates import html
from kd.run.as_function import as_function
from kd.run.fit import fit
from kd.run.open import open_run
from kd.run.options import refuse_words, take_options
from kd.run.request import Request, as_word, translate
from kd.run.streams import quiet_libraries
from kd.ship.predict import row_cells
from kd.storage.elsewhere import json_of


class Figures(dict[str, Any]):
    """Figures by name; a notebook shows them as the tables that the command prints.

    Args:
        content: the figures.
        parts: the tables.
    """

    def __init__(self, content: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """Stores both; arguments as of the class."""
        super().__init__(content)
        self.parts = parts

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html(self.parts)


@dataclass(frozen=True)
class RunResult:
    """A run that has ended; a notebook shows its table."""

    folder: Path
    """Where its student, metrics and report are."""
    summary: dict[str, Any]
    """The content of ``summary.json``, which the first process writes: {} in the other processes of a run that trained."""

    @property
    def page(self) -> Path:
        """Its ``report.html``: what held the run back, drawn."""
        return self.folder / "report.html"

    def _repr_html_(self) -> str:
        """What a notebook shows: the models' table, as the command prints it."""
        return html([run_table(self.summary)]) if self.summary else ""

    def student(self) -> nn.Module:
        """The student in eval mode, with the weights that ``student.safetensors`` holds (the best epoch's; the last ones of
        a run without validation), on the CPU.

        It takes float pictures ``(N, 3, H, W)``, resized and normalised already: ``kd.load_student(folder)`` also gives
        how, and the classes.

        Raises:
            UserError: the run has not trained a step.
        """
        return open_run(str(self.folder)).model


@as_function("train")
def train(
    recipe: str | Path | None = None, settings: Mapping[str, Any] | None = None, **words: object
) -> RunResult:
    """Trains as ``kd-train`` does. The process is as before afterwards: folder, seeds, signals, environment.

    Args:
        recipe: a recipe's name, or a YAML file; None to resume a run by its own settings (``resume``).
        settings: values by key, such as ``{"trainer.max_epochs": 3}``; in text, ``${KEY}`` is another key's value.
            ``config`` takes an overlay or a list of them, ``resume`` a run folder.
        words: likewise, of keys without a dot: ``seed=3``, ``resume=FOLDER``.

    Returns:
        The run. A resumed run that has no step left is returned as it was, and a line that says so is printed.

    Raises:
        UserError: a mistake in the recipe or the settings, found before anything is written wherever it shows before the
            training; or another thread runs one of these functions. Also where a teacher behind an address answers no
            more: the message says how to resume.
        RunError: the run failed, or a signal stopped it; its folder says why, before it has one a line on stderr. A run
            that a rule of ``monitor`` has stopped is returned like one that is done. Before there is a folder, an error
            that nobody foresaw is raised as it is.
        Stopped: a signal came while the recipe's teacher was trained first.

    >>> import kd, tempfile
    >>> settings = {"config": "debug", "runs_dir": tempfile.mkdtemp()}
    >>> settings |= {"data.source.train_per_class": 2, "data.source.val_per_class": 2}
    >>> result = kd.train("foodtag_vit", settings)  # doctest: +ELLIPSIS
    foodtag_vit: ...
    data: ...
    >>> result.summary["status"], result.student().training
    ('done', False)
    >>> kd.evaluate(result, {"split": "train"})["student"].keys() >= {"params", "acc1"}
    True
    >>> kd.train("foodtag_vit", {"lr": 1})
    Traceback (most recent call last):
    kd.errors.UserError: no key 'lr'; did you mean 'optim.lr'?
    """
    request = _request(settings, words, [] if recipe is None else [f"recipe={recipe}"])
    if request.recipe is None and request.resume is None:
        raise UserError("recipe: must be given, or resume=RUN_FOLDER")
    run = to_train(request)
    if run.finished:
        end_again(run)
        return RunResult(run.finished.folder, run.finished.summary)
    status = fit(run)
    folder = run.folder.path
    if status:
        raise RunError(f"the run ended with status {status}, see {folder or 'above'}")
    return RunResult(Path(folder or ""), run.summary.content)


@as_function("eval")
def evaluate(
    run: str | Path | RunResult, settings: Mapping[str, Any] | None = None, **words: object
) -> Figures:
    """Measures a run's student, and its teacher, as ``kd-eval`` does; see :func:`train` for an example.

    Writes ``eval_<split>.json`` into the run's folder, as the command does (with ``folder`` ``eval_<folder's name>.json``,
    or ``eval_folder_<name>.json`` where that is ``train``, ``val`` or ``test``), and what page and card show into
    ``tables/``. The process is as before afterwards (:func:`kd.run.as_function.as_function`).

    Args:
        run: what :func:`train` returned, a run's folder, or the folder's URL.
        settings: values by key: ``data.*``, ``model.teacher.*``, and all others that ``kd-eval --help`` lists.
        words: likewise, of keys without a dot: ``split="test"``, ``margin=1``.

    Returns:
        What was measured now, as that file has it: ``{"pictures": n, "student": {"params", "acc1", ...}, "teacher": ...,
        "fidelity": ...}`` with the task's metrics: shares in 0..1, errors of a regression in the targets' units.
        ``teacher`` is missing where the run has no teacher that can be run. Of a student without a classifier its features'
        ``rankme`` takes the metrics' place, and several teachers are under ``teacher NAME``. With ``pays`` the
        figures of each start, as ``summary.json`` has them.

    Raises:
        UserError: no finished run, a key that an evaluation does not take, pictures that can't be measured on, or another
            thread runs one of these functions.
    """
    result = eval_command.run(_request(settings, words, run=run, command="eval"))
    if result is None:
        raise UserError("run: must be a run's folder, its URL, or what kd.train returned")
    return Figures(result.content, result.parts)


@as_function("export")
def export(
    run: str | Path | RunResult, to: str, settings: Mapping[str, Any] | None = None, **words: object
) -> Figures:
    """Writes a run's student in another program's format as ``kd-export`` does, compared with the student in torch.

    Args:
        run: as of :func:`evaluate`.
        to: the format: ``onnx``, ``openvino``, ...; ``kd-export --help`` lists them.
        settings: values by key, of the data and of ``kd-export``.
        words: likewise, of keys without a dot: ``int8=True``, ``out=FOLDER``.

    Returns:
        The record of ``export/export.json``: ``agreement`` in 0..1, ``size_mb``, ...; its
        ``file`` is the path of the export.

    Raises:
        UserError: no finished run, a wrong key, or a package that is missing; or another thread runs one of these functions.
        RunError: the export differs too much from the student, and is not kept.
    """
    request = _request(settings, {**words, "to": to}, run=run, command="export")
    result = export_command.run(request, take_options(export_command.OPTIONS, request))
    if result.problem:
        raise RunError(result.problem)
    file = Path(request.rest[0]) / result.content["file"]
    return Figures({**result.content, "file": str(file)}, result.parts)


@as_function("predict")
def predict(
    run: str | Path | RunResult,
    pictures: str | Path | Sequence[str | Path],
    settings: Mapping[str, Any] | None = None,
    **words: object,
) -> Figures:
    """Answers of a run's student to pictures, the same as ``kd-predict`` gives; no file is written.

    Args:
        run: as of :func:`evaluate`.
        pictures: a file, folder, pattern or list of pictures, or several.
        settings: values by key, of the data and of ``kd-predict``.
        words: likewise, of keys without a dot: ``top=3``, ``device="cpu"``.

    Returns:
        By file, in their order: ``labels`` (each ``{"label", "p"}``, the likeliest first), or ``numbers`` by name; of a
        segmentation ``mask``, class ids ``(H, W)`` at the picture's own size; of a student without a classifier
        ``features`` ``(D,)``. Pictures that can't be read are left out, with a line on stderr.

    Raises:
        UserError: no finished run, no pictures, or a wrong key; or another thread runs one of these functions.
    """
    names = [pictures] if isinstance(pictures, (str, Path)) else pictures
    request = _request(settings, words, run=run, command="predict")
    request.rest += map(str, names)
    options = take_options(PredictOptions, request)
    if options.out is not None:
        raise UserError("out: kd.predict returns the answers; kd-predict writes them")
    predicted = predictions(request, options)
    rows = list(predicted.rows(options.top))
    report_bad(predicted.bad)
    cells = [row_cells(row) for row in rows]
    parts = [Table("", [*cells[0]], [[*row.values()] for row in cells])] if cells else []
    return Figures({row.pop("file"): row for row in rows}, parts)


@as_function("size")
def size(
    recipe: str | Path, settings: Mapping[str, Any] | None = None, **words: object
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Searches, before training, for the best student within a budget, as ``kd-size`` does; writes ``sizes.json`` likewise.
    Afterwards the process is as before (:func:`kd.run.as_function.as_function`).

    Args:
        recipe: a recipe's name, or a YAML file.
        settings: values by key, of the run and of ``kd-size`` (``latency_ms``, ``runtime``, ...).
        words: likewise, of keys without a dot.

    Returns:
        All candidates, and the chosen one of them; None in its place where no candidate within the budget could be scored
        (one that can't inherit is not). Each has ``name``, ``arch``, ``img_size`` and ``kwargs`` (of ``model.student``),
        ``params`` (how many), ``mb`` (megabytes: of its exported file where it was timed with another runtime than torch,
        else of its weights), ``within`` (it meets the budget) and
        ``front`` (it is scored, and no other scored one is at least as good in score and latency and better in one of
        them); ``latency_ms`` where it was timed; ``score``, the task's primary metric on held-out pictures, where it was
        scored. Files go to ``sizes/RECIPE/NUMBER/`` beside ``runs_dir``.

    Raises:
        UserError: a mistake in the recipe or the settings, or a budget that no candidate meets (no ``sizes.json`` is
            written); or another thread runs one of these functions.
        Stopped: a signal came while the recipe's teacher was trained first.
    """
    request = _request(settings, words, [f"recipe={recipe}"], command="size")
    options = take_options(size_command.OPTIONS, request)
    sizes = size_command.run(request, options).content
    candidates = sizes["candidates"]
    chosen = {one["name"]: one for one in candidates}
    return candidates, chosen.get(sizes["choice"])


def _request(
    settings: Mapping[str, Any] | None,
    words: Mapping[str, Any],
    first: Sequence[str] = (),
    run: str | Path | RunResult | None = None,
    command: str = "train",
) -> Request:
    """The request that a command line with the same settings would give. Also quiets libraries in this process.

    Text is read as on a command line (``"3"`` is a number); a value of another kind keeps its kind, as YAML writes it.

    Args:
        settings: values by key; ``config`` may be a list of overlays.
        words: likewise; of a key in both, the value here counts.
        first: words that the command line begins with (``recipe=NAME``).
        run: the run that the command is for, which becomes ``request.rest``; None: the command names no run.
        command: whose command line it is.

    Raises:
        UserError: a key that can be none (``1``, ``""``), or a word that the command line would refuse too.
    """
    quiet_libraries()
    line = list(first)
    for key, given in {**(settings or {}), **words}.items():
        several = key == "config" and isinstance(given, (list, tuple))
        line += [as_word(key, _plain(value)) for value in (given if several else [given])]
    request = translate(line, command=command)
    refuse_words(request)
    if run is not None:
        request.rest = [str(run.folder if isinstance(run, RunResult) else run)]
    return request


def _plain(value: object) -> object:
    """Converts a value, and all that its lists and dicts hold, to JSON's types.

    Numbers and arrays of NumPy and torch become numbers or lists; anything unknown becomes its text.
    """

    def without_type(other: Any) -> object:
        """A list or number from NumPy's and torch's types, else text; called for each value that JSON does not have."""
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json_of(json.dumps(value, default=without_type))
