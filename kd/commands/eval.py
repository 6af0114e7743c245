"""``kd-eval``: accuracy of a run's student. Heavy imports wait until there is something to evaluate."""

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.report.metric import told
from kd.run.own_keys import take, truth, whole_number
from kd.run.request import Request

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kd.commands._measure import Answers, Asked, Subject

HELP = """\
kd-eval: accuracy of a run's student (and of its teacher), as a table and as JSON.

  kd-eval MODEL [MODEL ...] [split=NAME] [folder=DIR] [out=FILE] [robust=true] [data.key=value ...]

  MODEL          a run's folder; or a weights file (safetensors, .pth), or timm's folder (config.json and weights)
                 several: side by side on the same pictures, with the differences in points
  split=NAME     the data's split: val (default), train, or for an ImageFolder any folder below its root
  folder=DIR     other pictures: DIR/<class>/*.jpg, with class names the model knows
  out=FILE       FILE.csv: a line a picture, with its label and what each model says; FILE.json: the figures
  robust=true    also on damaged pictures: blur, noise, JPEG, brightness, three strengths each
  arch=NAME      which of timm's models a weights file holds, where it does not say; img_size=N: its input's side
  recipe=NAME    whose pictures a weights file is measured on, without a run beside it
  data.key=...   as for kd-train: data.source.root=DIR, data.batch_size=N, ...

Of a student without a classifier: the directions that its features use (RankMe) and, with data.probe.root=DIR, the
accuracy of k nearest neighbours and of a ridge probe, its teachers beside it.

The JSON of a run is also written to RUN_FOLDER/eval_<split>.json (eval_<folder's name>.json, or eval_folder_val.json
where it is called as a split), with how faithful the student is to its teacher: agreement, mean KL divergence,
calibration, classes, confusions. Computed in float32, as plain timm would.
"""


OWN = ("split", "folder", "out", "robust", "arch", "img_size")


def run(request: Request) -> int:
    """Evaluates, prints, writes."""
    if "help" in request.flags or not request.rest:
        print(HELP, end="")
        return 0 if "help" in request.flags else 2
    results, files, pairs = _evaluated(request)
    from kd.data.sources import said

    if "rankme" in results[0]["student"]:
        _print_features(results)
        print(f"written to {', '.join(map(str, files))}")
        return 0

    if len(results) == 1:
        _print_evaluation(results[0])
    else:
        _print_side_by_side(results, pairs)
    left_out = said(results[0].get("left_out", {}))
    if files:
        print(f"written to {', '.join(map(str, files))}{left_out}")
    return 0


def evaluated(request: Request) -> tuple[dict[str, Any], Path | None]:
    """The evaluation of one model that a command line asks for, and the first file that it was written to.

    Raises:
        UserError: no finished run, or a key that an evaluation does not take.
    """
    results, files, _ = _evaluated(request)
    return results[0], files[0] if files else None


def _evaluated(request: Request) -> tuple[list[dict[str, Any]], list[Path], list[tuple[int, int]]]:
    """What was found of each model, the files written, and how often the first alone is right, and another alone."""
    asked, out = _asked(request)
    from kd.commands import _measure
    from kd.run.quiet import quiet_libraries

    quiet_libraries()
    from kd.commands import _features

    if any(_features.gives_features(word) for word in request.rest):
        results = _features.measured(request, asked, out)
        return results, _write_results(results, asked, out), []
    measured = _measure.subjects(request, asked)
    _measure.check_same_pictures(measured, asked)
    task = measured[0].task
    if not task.in_rows and out is not None and out.suffix == ".csv":
        raise UserError("out: of scenes there is no table a picture; kd-predict writes their masks")
    kept = [_measure.Answers(task, s.classes) if task.in_rows else None for s in measured]
    own_data = not any(item.startswith("data.source") for item in request.overrides)
    results = [_measure.measure(s, asked, a, own_data) for s, a in zip(measured, kept, strict=True)]
    answers = [a for a in kept if a is not None]
    files = _write(results, measured, answers, asked, out)
    return results, files, [_measure.only_right(answers[0], other) for other in answers[1:]]


def _asked(request: Request) -> "tuple[Asked, Path | None]":
    """The command's own keys, taken from the request, and the file that ``out`` names."""
    own = take(request, *OWN)
    foreign = next((o for o in request.overrides if not o.startswith(("data.", "model.teacher"))), None)
    if foreign:
        near = difflib.get_close_matches(foreign.split("=")[0], OWN, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        keys = ", ".join(f"{key}=" for key in OWN)
        raise UserError(f"it takes {keys}, data.* and model.teacher.*, not '{foreign}'{hint}")
    robust, out = truth(own, "robust"), Path(own["out"]) if "out" in own else None
    size = whole_number(own, "img_size", 1) if "img_size" in own else None
    if out is not None and (out.suffix not in (".csv", ".json") or not out.resolve().parent.is_dir()):
        raise UserError(f"out: must be FILE.csv or FILE.json in a folder that is there, got '{out}'")
    if "split" in own and "folder" in own:
        raise UserError("folder: is a split of its own; give split= or folder=")
    from kd.commands._measure import Asked, is_run

    given = next((key for key in ("arch", "img_size") if key in own), None)
    if given and all(is_run(word) for word in request.rest):
        raise UserError(f"{given}: a run knows its own; it is for a weights file")
    return Asked(own.get("split", "val"), own.get("folder"), robust, own.get("arch", ""), size), out


def _write(
    results: list[dict[str, Any]], measured: "Sequence[Subject]", answers: "Sequence[Answers]", asked: "Asked",
    out: Path | None,
) -> list[Path]:  # fmt: skip
    """The figures of each run in its folder, and what ``out`` asks for."""
    from kd.commands._measure import write_answers

    files = []
    name = f"eval_{_name(asked.folder) if asked.folder else asked.split}.json"
    for result, subject in zip(results, measured, strict=True):
        if subject.run is not None:
            (subject.run / name).write_text(json.dumps(result, indent=2) + "\n")
            files.append(subject.run / name)
    if out is not None and out.suffix == ".csv":
        write_answers(out, measured, answers, asked)
    elif out is not None:
        out.write_text(json.dumps(results[0] if len(results) == 1 else results, indent=2) + "\n")
    return [*files, *([out] if out is not None else [])]


def _write_results(results: list[dict[str, Any]], asked: "Asked", out: Path | None) -> list[Path]:
    """The figures of runs whose students have no classifier."""
    files = [Path(result["run"]) / f"eval_{asked.split}.json" for result in results]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result, indent=2) + "\n")
    if out is not None:
        out.write_text(json.dumps(results[0] if len(results) == 1 else results, indent=2) + "\n")
    return [*files, *([out] if out is not None else [])]


def _print_features(results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from kd.commands._features import columns, rows

    shown = columns(results)
    table = Table(title=f"{results[0]['pictures']} pictures: {results[0]['data']}")
    for column in ("", "parameters", *shown):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for name, figures in rows(results, _short([result["run"] for result in results])):
        cells = [told(metric, figures[metric]) if metric in figures else "" for metric in shown]
        table.add_row(name, f"{figures['params'] / 1e6:.2f} M", *cells)
    _console().print(table)
    if "probe" not in results[0]:
        print("k-NN and ridge probe need labelled pictures: data.probe.root=DIR (DIR/train/<class>, DIR/val/<class>)")


def _name(folder: str) -> str:
    """What a folder's file is called: never as that of the run's own splits."""
    name = Path(folder).resolve().name
    return f"folder_{name}" if name in ("train", "val") else name


def _print_evaluation(result: dict[str, Any]) -> None:
    console = _console()
    table, shown = _table(result)
    for name in ("teacher", "student"):
        if name in result:
            table.add_row(name, *_cells(result[name], shown))
    console.print(table)
    for line in faithful(result.get("fidelity")):
        print(line)
    if "robust" in result:
        console.print(_robust_table(result["robust"]))


def _print_side_by_side(results: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> None:
    """Each model, each teacher once, and the differences to the first in points."""
    console = _console()
    table, shown = _table(results[0])
    first, names = results[0], _short([result["run"] for result in results])
    teachers: list[dict[str, Any]] = []
    for name, result in zip(names, results, strict=True):
        if "teacher" in result and result["teacher"] not in teachers:
            teachers.append(result["teacher"])
            table.add_row(f"teacher of {name}", *_cells(result["teacher"], shown))
    for name, result in zip(names, results, strict=True):
        table.add_row(name, *_cells(result["student"], shown))
    for name, result in zip(names[1:], results[1:], strict=True):
        table.add_row(f"{name} - {names[0]}, points", *_gaps(first["student"], result["student"], shown))
    console.print(table)
    for name, pair in zip(names[1:], pairs, strict=False):
        print(_paired(names[0], name, pair, first["pictures"]))
    for name, result in zip(names, results, strict=True):
        for line in faithful(result.get("fidelity")):
            print(f"{name}: {line}")
        if "robust" in result:
            console.print(_robust_table(result["robust"], name))


def _paired(first: str, other: str, pair: tuple[int, int], pictures: int) -> str:
    """How sure the difference is.

    >>> _paired("a", "b", (2, 6), 100)
    'a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)'
    """
    mine, theirs = pair
    gap = (theirs - mine) / pictures
    error = (((mine + theirs) / pictures - gap**2) / pictures) ** 0.5
    told = f"{first} alone is right on {mine} of {pictures} pictures, {other} alone on {theirs}: {100 * gap:+.1f}"
    return f"{told} ± {100 * error:.1f} points (standard error, paired by picture)"


def _short(names: list[str]) -> list[str]:
    """Names without the folders that all of them share.

    >>> _short(["runs/food/000", "runs/food/001"]), _short(["a/best", "b/best"])
    (['000', '001'], ['a/best', 'b/best'])
    """
    parts = [Path(name).parts for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    return [str(Path(*part)) for part in parts]


def _gaps(first: dict[str, float], other: dict[str, float], shown: Sequence[str]) -> list[str]:
    share = f"x {other['params'] / first['params']:.2f}"
    return [share, *(f"{100 * (other[k] - first[k]):+.1f}" if k in first and k in other else "" for k in shown)]


def _table(result: dict[str, Any]) -> "tuple[Table, list[str]]":
    """A table of the figures in ``result``, without rows yet, and the names of its figures."""
    from rich.table import Table

    table = Table(title=f"{result['pictures']} pictures: {result['data']}")
    shown = [name for name in result["student"] if name != "params" and not name.startswith("iou_")]
    for column in ("", "parameters", *shown):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    return table, shown


def _cells(row: dict[str, float], shown: Sequence[str]) -> list[str]:
    return [f"{row['params'] / 1e6:.2f} M", *(f"{row[k]:.1%}" if k in row else "" for k in shown)]


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def faithful(found: dict[str, Any] | None) -> list[str]:
    """How faithful the student is, in a few lines; none where a task compares nothing."""
    lines: list[str] = []
    if found is None:
        return lines
    if "agreement" in found:
        shares = found["outcomes"]
        lines += [
            f"agrees with the teacher: {found['agreement']:.1%}; mean KL divergence {found['kl']:.3f} nats",
            f"both right {shares['both_right']:.1%}, both wrong {shares['both_wrong']:.1%}, "
            f"only the teacher right {shares['only_teacher']:.1%}, only the student {shares['only_student']:.1%}",
        ]
    lines += ["expected calibration error: " + ", ".join(f"{name} {v:.3f}" for name, v in found["ece"].items())]
    lost = sorted(
        (row for row in found["per_class"] if "teacher" in row), key=lambda row: row["student"] - row["teacher"]
    )
    told = [
        f"{row['name']} {row['teacher']:.0%} -> {row['student']:.0%}"
        for row in lost[:5]
        if row["student"] < row["teacher"]
    ]
    return lines + ([f"classes that lost most ({found['score']}): " + ", ".join(told)] if told else [])


def _robust_table(found: dict[str, dict[str, list[float]]], whose: str = "") -> "Table":
    from rich.table import Table

    table = Table(title=f"{whose}{': ' if whose else ''}on damaged pictures, by strength")
    for column in ("", "", "1", "2", "3"):
        table.add_column(column, justify="right" if column else "left")
    for damage, models in found.items():
        for model, values in models.items():
            table.add_row(damage, model, *(f"{value:.1%}" for value in values))
    return table
