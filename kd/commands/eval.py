"""``kd-eval``: accuracy of a run's student. Heavy imports wait until there is something to evaluate."""

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from kd.checkpoints import run_folder
from kd.config.request import Request
from kd.errors import UserError

HELP = """\
kd-eval: accuracy of a run's student (and of its teacher), as a table and as JSON.

  kd-eval RUN_FOLDER [split=NAME] [folder=DIR] [robust=true] [data.key=value ...]

  split=NAME     the data's split: val (default), train, or for an ImageFolder any folder below its root
  folder=DIR     other pictures: DIR/<class>/*.jpg, with class names the student knows
  robust=true    also on damaged pictures: blur, noise, JPEG, brightness, three strengths each
  data.key=...   as for kd-train: data.source.root=DIR, data.batch_size=N, ...

The JSON is written to RUN_FOLDER/eval_<split>.json (eval_<folder's name>.json, or eval_folder_val.json where it is
called as a split), with how faithful the student is to its teacher: agreement, mean KL
divergence, calibration, classes, confusions. Computed in float32, as plain timm would.
"""


OWN = ("split=", "folder=", "robust=")


def run(request: Request) -> int:
    """Evaluates a run, writes ``eval_<split>.json``."""
    if "help" in request.flags or not request.rest:
        print(HELP, end="")
        return 0 if "help" in request.flags else 2
    result, file = evaluated(request)
    from kd.data.sources import said

    _print_evaluation(result)
    print(f"written to {file}{said(result.get('left_out', {}))}")
    return 0


def evaluated(request: Request) -> tuple[dict[str, Any], Path]:
    """The evaluation that a command line asks for, and the file that it was written to.

    Raises:
        UserError: no finished run, or a key that an evaluation does not take.
    """
    run = run_folder(Path(request.rest[0]))
    own = dict(item.split("=", 1) for item in request.overrides if item.startswith(OWN))
    several = sorted(str(file.parent) for file in run.glob("students/*/student.safetensors"))
    if several and not (run / "student.safetensors").is_file():
        raise UserError(f"{run} has several students, name one: {', '.join(several)}")
    for name in ("config.yaml", "student.safetensors"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no finished run: it has no {name}")
    request.recipe = str(run / "config.yaml")
    request.overrides = [item for item in request.overrides if item.split("=", 1)[0] not in own]
    foreign = next((o for o in request.overrides if not o.startswith(("data.", "model.teacher"))), None)
    if foreign:
        near = difflib.get_close_matches(foreign.split("=")[0], ["split", "folder", "robust"], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"it takes split=, folder=, robust=, data.* and model.teacher.*, not '{foreign}'{hint}")
    robust = own.get("robust", "false")
    if robust not in ("true", "false"):
        raise UserError(f"robust: must be true or false, got '{robust}'")
    other_data = any(item.startswith("data.source") for item in request.overrides)
    result = _evaluate(
        run, request.parser_args(), own.get("split", "val"), own.get("folder"), robust == "true", not other_data
    )
    file = run / f"eval_{_name(own['folder']) if 'folder' in own else own.get('split', 'val')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    return result, file


def _name(folder: str) -> str:
    """What a folder's file is called: never as that of the run's own splits."""
    name = Path(folder).resolve().name
    return f"folder_{name}" if name in ("train", "val") else name


def _evaluate(
    run: Path, args: list[str], split: str, folder: str | None, robust: bool, own_data: bool
) -> dict[str, Any]:
    """The evaluation; on the run's own validation pictures ``fidelity.json`` too, which the report shows."""
    import torch

    from kd.callbacks.fidelity import start, write
    from kd.commands._finished import teacher_of_run
    from kd.config.parser import KDCLI, build_data, build_task
    from kd.config.quiet import quiet_libraries
    from kd.evaluation import evaluate
    from kd.export.student import load_student, read_metadata
    from kd.models import count_parameters

    quiet_libraries()
    config = KDCLI(args, instantiate=False).as_dict()
    if read_metadata(run / "student.safetensors").get("classifies") == "false":
        raise UserError(f"{run}: nothing has trained the student's classifier (kd-predict writes its features)")
    student, student_input, classes = load_student(run / "student.safetensors")
    data = build_data(config["data"])
    if folder:
        data.use_folder(folder, classes)
        split = "folder"
    pictures = data.split(split)
    if list(data.source.classes) != classes:
        raise UserError(f"data.source: its {len(data.source.classes)} classes are not the student's {len(classes)}")
    task = build_task(config["model"]["task"])
    task.build(len(classes), data.source.ignore_index)
    teacher = teacher_of_run(config["model"], classes, task.dense)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fidelity = start(task, len(classes))
    found = evaluate(student, student_input, data.eval_dataloader(split), task, teacher, device, fidelity)
    if split == "val" and own_data:
        write(run, fidelity, data, split, classes)
    damaged = _robust(student, student_input, data, split, task, teacher, device) if robust else {}
    models = {"student": student} | ({"teacher": teacher.model} if teacher else {})
    rows = {name: {"params": count_parameters(model), **found[name]} for name, model in models.items()}
    return {
        "run": str(run),
        "data": folder or f"{data.source.describe()} ({split})",
        "pictures": len(pictures.targets),
        **({"left_out": data.left_out} if data.left_out else {}),
        **rows,
        "fidelity": fidelity.result(classes),
        **({"robust": damaged} if robust else {}),
    }


def _robust(
    student: Any, student_input: Any, data: Any, split: str, task: Any, teacher: Any, device: Any
) -> dict[str, dict[str, list[float]]]:
    """The task's main metric on damaged pictures: by damage and model, at each strength."""
    from kd.data.corruptions import CORRUPTIONS, STRENGTHS, corrupted
    from kd.evaluation import evaluate

    found: dict[str, dict[str, list[float]]] = {}
    for name in CORRUPTIONS:
        for strength in STRENGTHS:
            task.reset()
            batches = corrupted(data.eval_dataloader(split), name, strength)
            for model, metrics in evaluate(student, student_input, batches, task, teacher, device).items():
                found.setdefault(name, {}).setdefault(model, []).append(metrics[task.primary])
    return found


def _print_evaluation(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['pictures']} pictures: {result['data']}")
    shown = [name for name in result["student"] if name != "params" and not name.startswith("iou_")]
    for column in ("", "parameters", *shown):
        table.add_column(column, justify="right" if column else "left")
    for name in ("teacher", "student"):
        if name in result:
            row = result[name]
            numbers = [f"{row[k]:.1%}" if k in row else "" for k in shown]
            table.add_row(name, f"{row['params'] / 1e6:.2f} M", *numbers)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for line in faithful(result["fidelity"]):
        print(line)
    if "robust" in result:
        console.print(_robust_table(result["robust"]))


def faithful(found: dict[str, Any]) -> list[str]:
    """How faithful the student is, in a few lines."""
    lines = []
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


def _robust_table(found: dict[str, dict[str, list[float]]]) -> Any:
    from rich.table import Table

    table = Table(title="on damaged pictures, by strength")
    for column in ("", "", "1", "2", "3"):
        table.add_column(column, justify="right" if column else "left")
    for damage, models in found.items():
        for model, values in models.items():
            table.add_row(damage, model, *(f"{value:.1%}" for value in values))
    return table
