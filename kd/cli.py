"""``kd-train`` and ``kd-eval``: the front door. Heavy imports wait until there is something to train."""

import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kd._find import find, names, run_folder
from kd.checkpoints import LAST, newest_whole
from kd.errors import UserError, reason
from kd.launch.cluster import Cluster, recognise
from kd.launch.cluster import marker as job_marker

KEY = re.compile(r"^(?:--)?([A-Za-z_][\w.]*\+?)=(.*)$", re.S)

HELP = """\
kd-train: trains a small, fast student from a big vision model.

  kd-train recipe=NAME [config=OVERLAY ...] [key=value ...]
  kd-train resume=RUN_FOLDER [key=value ...]

  recipe=NAME       a recipe (below), or a YAML file; a run folder's config.yaml repeats that run
  config=OVERLAY    where and how it runs (kd-train --list); may be given several times
  key=value         any setting; --key=value and --key value mean the same
  --list            all recipes and overlays
  --print_config    the resolved settings; saved to a file they can be run again

Often used keys:
  data.source=ImageFolder data.source.root=DIR      your own pictures: DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg
  model.teacher.arch, .checkpoint, .img_size, .pretrained    any timm model; safetensors, .pth or a run folder
  model.student.arch, .checkpoint, .img_size, .pretrained    likewise
  model.distill_losses.kd.temperature, .weight      model.task_loss_weight
  data.batch_size  data.num_workers  data.img_size  data.augment.mixup  optim.lr  optim.zero
  trainer.max_epochs  trainer.devices  trainer.precision  (all of Lightning's Trainer)
  seed  runs_dir  resume

Recipes:
{recipes}
Exit status: 0 done, 1 failed (the run folder says why), 2 wrong use, 130 Ctrl-C, 143 SIGTERM (both leave a checkpoint).
"""

EVAL_HELP = """\
kd-eval: accuracy of a run's student (and of its teacher), as a table and as JSON.

  kd-eval RUN_FOLDER [split=NAME] [folder=DIR] [data.key=value ...]

  split=NAME     the data's split: val (default), train, or for an ImageFolder any folder below its root
  folder=DIR     other pictures: DIR/<class>/*.jpg, with class names the student knows
  data.key=...   as for kd-train: data.source.root=DIR, data.batch_size=N, ...

The JSON is written to RUN_FOLDER/eval_<split>.json. Computed in float32, as plain timm would.
"""

REPORT_HELP = """\
kd-report: what limits a run, as one page.

  kd-report RUN_FOLDER [--open]           writes RUN_FOLDER/report.html; also while the run goes on, or after it failed
  kd-report RUN_FOLDER --traces           also compares the GPUs in the profiled window (extra traces)
  kd-report BEFORE AFTER [--open]         compares two runs: AFTER/comparison.html

Needs neither torch nor a network.
"""

CACHE_HELP = """\
kd-cache: computes the teacher's answers to a recipe's training pictures ahead, for model.teacher.cache=on or only.

  kd-cache recipe=NAME [config=OVERLAY ...] [key=value ...]

  The same line as for kd-train: data, augmentation, seed, teacher and precision must be those of the run to come.
  model.teacher.cache_views=N   views of a picture (default 4)
  model.teacher.cache_topk=K    keep the K largest logits and the mass of the rest, instead of all
  model.teacher.cache_dir=DIR   where; default: a folder of its own in the user's cache folder

What is there already is kept: a filling that was stopped goes on. config=ddp_8gpu shares the work.
"""

PACK_HELP = """\
kd-pack: writes a recipe's pictures as tar shards (WebDataset's layout), for data.source=Shards.

  kd-pack recipe=NAME out=FOLDER_OR_URL [short_side=PIXELS] [data.source.key=value ...]

  out=           a folder, or a URL that fsspec knows (s3://bucket/name; extra stream)
  short_side=    pictures with a larger shorter side are resized once, here, instead of in every epoch
"""


@dataclass
class Request:
    """A command line, sorted by kind.

    Attributes:
        recipe: name or path.
        overlays: names or paths, in order.
        overrides: ``key=value`` items, in order.
        resume: a run folder.
        cluster: what the launcher's environment says of the trainer; beaten by overrides.
        flags: ``help``, ``list``, ``print_config``, ``version``.
        rest: what is none of these.
    """

    recipe: str | None = None
    overlays: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    resume: str | None = None
    cluster: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    rest: list[str] = field(default_factory=list)

    def parser_args(self) -> list[str]:
        """For the parser, in order of rising priority: recipe, overlays, overrides."""
        files = [find("recipes", self.recipe)] if self.recipe else []
        files += [find("configs", overlay) for overlay in self.overlays]
        for file in files:
            _check_yaml(file)
        args = [f"--config={file}" for file in files]
        if self.recipe and not re.search(r"^recipe:", files[0].read_text(encoding="utf-8"), re.M):
            args.append(f"--recipe={files[0].stem}")
        return args + self.cluster + [f"--{item}" for item in self.overrides]


def _check_yaml(file: Path) -> None:
    """Raises a UserError that names the file and the place where it is no YAML mapping."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold settings (key: value), not {type(content).__name__}")


def translate(argv: Sequence[str]) -> Request:
    """Sorts a command line: ``key=value``, ``--key=value`` and ``--key value`` mean the same, in any order.

    Raises:
        UserError: an item that is none of these.

    >>> translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides
    ['trainer.max_epochs=3', 'seed=1']
    """
    request, items = Request(), list(argv)
    while items:
        item = items.pop(0)
        if item in ("-h", "--help", "--list", "--print_config", "--version", "--open", "--traces"):
            request.flags.add("help" if item == "-h" else item.lstrip("-"))
            continue
        match = KEY.match(item)
        if match:
            key, value = match.groups()
        elif item.startswith("--") and items:
            key, value = item[2:], items.pop(0)
        elif item.endswith((".yaml", ".yml")):
            key, value = "recipe", item
        elif item.startswith("-"):
            raise UserError(f"{item} needs a value: {item.lstrip('-')}=...")
        else:
            request.rest.append(item)
            continue
        _sort_in(request, key, value)
    return request


def _sort_in(request: Request, key: str, value: str) -> None:
    if key == "recipe":
        if request.recipe is not None:
            raise UserError(f"recipe is given twice: '{request.recipe}' and '{value}'")
        request.recipe = value
    elif key == "config":
        request.overlays.append(value)
    elif key == "resume":
        request.resume = value
    else:
        request.overrides.append(f"{key}={value}")


# -- kd-train --------


def train_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kd-train``; returns the exit status."""
    return _guarded("kd-train", _train, sys.argv[1:] if argv is None else argv)


def _guarded(program: str, command: Callable[[Request], int], argv: Sequence[str]) -> int:
    """Runs a command; the user's mistakes end in one line and status 2."""
    try:
        return command(translate(argv))
    except UserError as error:
        if _is_rank_zero():
            print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def _is_rank_zero() -> bool:
    return all(int(os.environ.get(name, "0")) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))


def _train(request: Request) -> int:
    if request.rest:
        known = ", ".join(names("recipes"))
        raise UserError(f"what is '{request.rest[0]}'? Settings are key=value, recipes recipe=NAME ({known})")
    if "version" in request.flags:
        import kd

        print(f"kd {kd.__version__}")
        return 0
    if "list" in request.flags:
        print(listing("recipes", "recipe=") + listing("configs", "config="), end="")
        return 0
    if "help" in request.flags or not (request.recipe or request.resume):
        print(HELP.format(recipes=listing("recipes", "recipe=")), end="")
        return 0 if "help" in request.flags else 2
    cluster = _join_cluster(request)
    resume_from = _check_resume(request)
    args = request.parser_args()  # a wrong recipe's name is told before anything heavy is imported
    from kd._parser import KDCLI

    _quiet_libraries()

    if resume_from:
        args.append(f"--resume={request.resume}")
    parsed = KDCLI(args, instantiate=False)
    if "print_config" in request.flags:
        print(parsed.as_yaml(), end="")
        return 0
    runs = Path(parsed.config.runs_dir) / parsed.config.recipe
    marker = job_marker(cluster, runs, request.overrides) if cluster else None
    if marker and resume_from is None and _was_here_before(marker, request):
        resume_from = _check_resume(request)
        args.append(f"--resume={request.resume}")
    teacher = _teacher_checkpoint(parsed.as_dict())
    if teacher:
        args.append(f"--model.teacher.checkpoint={teacher}")
    return _fit(KDCLI(args, launcher=cluster.launcher if cluster else None, marker=marker), resume_from)


def _join_cluster(request: Request) -> Cluster | None:
    """The launcher's job, unless the command line says itself how many machines there are."""
    cluster = recognise()
    if cluster is None or any(item.startswith("trainer.num_nodes=") for item in request.overrides):
        return None
    request.cluster = cluster.arguments()
    for name, value in cluster.variables.items():
        os.environ.setdefault(name, value)
    return cluster


def _was_here_before(marker: Path, request: Request) -> bool:
    """Whether the launcher has started this command again, with something to go on from; then it is a resume."""
    if not marker.is_file():
        return False
    run = marker.parent / marker.read_text(encoding="utf-8").strip()
    if newest_whole(run / "checkpoints")[0] is None:
        return False
    request.resume = str(run)
    if _is_rank_zero():
        print(f"kd-train: this job was here before: going on with {run}", flush=True)
    return True


def listing(kind: str, prefix: str) -> str:
    """Recipes or overlays, a line each."""
    return "".join(f"  {prefix}{name:<22} {first}\n" for name, first in names(kind).items())


def _check_resume(request: Request) -> Path | None:
    """The checkpoint to go on from; the run's own settings are the recipe unless one is given."""
    if request.resume is None:
        return None
    run = run_folder(Path(request.resume))
    request.resume = str(run)
    if not run.is_dir():
        raise UserError(f"resume: there is no {run}")
    checkpoint, damaged = newest_whole(run / "checkpoints")
    told = "; ".join(f"{file} can't be loaded: {problem}" for file, problem in damaged.items())
    if checkpoint is None:
        raise UserError(f"resume: {told or f'{run} has no checkpoints/last.ckpt'}")
    if _is_rank_zero() and (damaged or checkpoint.name != LAST):
        print(f"kd-train: warning: {told or 'last.ckpt is gone'}; going on from {checkpoint}", file=sys.stderr)
    if request.recipe is None:
        request.recipe = str(run / "config.yaml")
    return checkpoint.resolve()


def _quiet_libraries() -> None:
    """Leaves the terminal to the run: Lightning's hardware lines and tips, and warnings that call for nothing."""
    import logging
    import warnings

    for name in ("pytorch_lightning", "lightning_fabric", "timm", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*exists and is not empty.*",
        ".*`_scheduled_optimizer_step`.*",
        ".*number of training batches.*smaller than the logging interval.*",
        ".*dataloader is not resumable.*",
        ".*your dataloader is not resumable.*",
        ".*lr_scheduler.step.*before.*optimizer.step.*",
        ".*in eval mode at the start of training.*",
        ".*It is recommended to use `self.log.*sync_dist=True.*",
        ".*Total length of `DataLoader` across ranks is zero.*",
        ".*You have overridden `on_before_batch_transfer`.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _teacher_checkpoint(config: dict[str, Any]) -> Path | None:
    """Trains the teacher that the recipe names, where the run has none."""
    teacher = config["model"]["teacher"]
    if not teacher or teacher["checkpoint"] or teacher["pretrained"] or not teacher.get("recipe"):
        return None
    from kd._parser import KDCLI, build_data
    from kd._teachers import arguments, key_of, trained_teacher

    items = arguments(config)
    own = KDCLI(translate(items).parser_args(), instantiate=False)
    key = key_of(own.as_dict(), build_data(config["data"]).source)
    return trained_teacher(items, key, teacher["recipe"], _is_rank_zero())


def _fit(cli: Any, resume_from: Path | None) -> int:
    from kd.callbacks.preemption import Preempted

    say = print if _is_rank_zero() else lambda *_, **__: None
    info = cli.datamodule.info
    say(f"data: {cli.datamodule.source.describe()}", flush=True)
    left_out = f", {len(cli.datamodule.skipped)} damaged left out" if cli.datamodule.skipped else ""
    without = f" ({info.unlabeled} without a label)" if info.unlabeled else ""
    say(
        f"      {info.train} training{without} and {info.val} validation pictures, "
        f"{len(info.classes)} classes{left_out}"
    )
    if not info.labels:
        say(
            "      training on the unlabelled pictures alone: no task loss (beside labelled ones: data.unlabeled_ratio)"
        )
    if cli.precision_note:
        say(cli.precision_note)
    for module in cli.model.named_students().values():
        module.resumed = resume_from is not None
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=resume_from, weights_only=True)
    except Preempted as stop:
        say(f"\nkd-train: {stop} at step {cli.trainer.global_step}; checkpoint: {stop.checkpoint}")
        say(f"kd-train: go on with: kd-train resume={cli.folder.path}")
        return _status_of_stop(stop.signal_number)
    except SystemExit as stop:  # Lightning's answer to a signal outside our own training steps
        say("kd-train: interrupted", file=sys.stderr)
        return 143 if type(stop).__name__ == "SIGTERMException" else 130
    except UserError:
        raise
    except Exception as error:
        if cli.folder.path is None and resume_from:
            reason = str(error).strip().splitlines() or [""]
            raise UserError(
                f"resume: {resume_from} can't be loaded: {type(error).__name__}: {reason[0][:200]}"
            ) from error
        if cli.folder.path is None:
            raise
        _tell_failure(cli, error)
        return 1
    if cli.trainer.is_global_zero:
        _finish(cli)
    return 0


def _tell_failure(cli: Any, error: Exception) -> None:
    """Each rank tells its own: rank 0 may be the one that is gone."""
    rank = cli.trainer.global_rank
    who = f"kd-train: rank {rank}" if rank else "kd-train"
    folder, file = cli.folder.path, f"error.rank{rank}.txt" if rank else "error.txt"
    print(f"{who}: failed: {reason(error)}", file=sys.stderr)
    print(f"{who}: the traceback is in {folder / file}", file=sys.stderr)
    if rank == 0 and (folder / "checkpoints" / LAST).is_file():
        print(f"{who}: go on from the last checkpoint with: kd-train resume={folder}", file=sys.stderr, flush=True)


def _status_of_stop(signal_number: int) -> int:
    """128 + signal; but 0 on Lightning's child processes, whose parent takes any other for a crash."""
    child = not _is_rank_zero() and "TORCHELASTIC_RUN_ID" not in os.environ and "SLURM_PROCID" not in os.environ
    return 0 if child else 128 + signal_number


def _finish(cli: Any) -> None:
    """Exports the best student and prints the closing table."""
    from kd.callbacks.summary import best_checkpoint
    from kd.export import save_student

    best = best_checkpoint(cli.trainer)
    path = best.best_model_path if best else ""
    for name, module in cli.model.named_students().items():
        file = cli.folder.student_path(name) / "student.safetensors"
        if not name or not file.is_file():  # of several students each wrote its best epoch already
            save_student(module, file, Path(path) if path else None)
    _print_table(cli.summary.content, cli.folder.path)


def _print_table(summary: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['recipe']}: {summary['epochs']} epochs in {_duration(summary['wall_s'])}")
    shown = [name for name in summary["student"]["val"] if not name.startswith("iou_")]
    for column in ("", "model", "parameters", *(f"val {name}" if name != "agreement" else name for name in shown)):
        table.add_column(column, justify="left" if column in ("", "model") else "right")
    teacher = summary["teacher"]
    rows: list[tuple[str, Any, Any]] = [("teacher", teacher, teacher["val"])] if teacher else []
    for name, student in (summary.get("students") or {"student": summary["student"]}).items():
        best = student["best_val"]
        rows += [(f"{name}, last epoch", student, student["val"])]
        rows += [(f"{name}, best epoch ({best['epoch']})", student, best)] if best else []
    for name, model, val in rows:
        numbers = [f"{val[k]:.1%}" if k in val else "" for k in shown]
        table.add_row(name, model["arch"], f"{model['params'] / 1e6:.2f} M", *numbers)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    speed = f"{summary['images_per_s']:,.0f} images/s, " if summary["images_per_s"] else ""
    print(f"{speed}{summary['device']}, {summary['precision']}, {summary['world_size']} process(es)")
    for finding in summary.get("findings", []):
        print(f"{finding['rule']}: {finding['text']}; {finding['lever']}")
    if "verdict" in summary:
        print(f"{summary['verdict']['text']} (report.html)")
    where = "students/NAME/student.safetensors" if summary.get("students") else "student.safetensors"
    print(f"run folder: {folder} ({where} holds the best epoch)", flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


# -- kd-eval --------


def eval_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kd-eval``; returns the exit status."""
    return _guarded("kd-eval", _eval, sys.argv[1:] if argv is None else argv)


def _eval(request: Request) -> int:
    if "help" in request.flags or not request.rest:
        print(EVAL_HELP, end="")
        return 0 if "help" in request.flags else 2
    run = run_folder(Path(request.rest[0]))
    own = dict(item.split("=", 1) for item in request.overrides if item.startswith(("split=", "folder=")))
    for name in ("config.yaml", "student.safetensors"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no finished run: it has no {name}")
    request.recipe = str(run / "config.yaml")
    request.overrides = [item for item in request.overrides if item.split("=", 1)[0] not in own]
    foreign = next((o for o in request.overrides if not o.startswith(("data.", "model.teacher"))), None)
    if foreign:
        near = difflib.get_close_matches(foreign.split("=")[0], ["split", "folder"], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"it takes split=, folder=, data.* and model.teacher.*, not '{foreign}'{hint}")
    result = _evaluate(run, request.parser_args(), own.get("split", "val"), own.get("folder"))
    file = run / f"eval_{Path(own['folder']).name if 'folder' in own else own.get('split', 'val')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    _print_evaluation(result)
    print(f"written to {file}")
    return 0


def _evaluate(run: Path, args: list[str], split: str, folder: str | None) -> dict[str, Any]:
    import torch

    from kd._parser import KDCLI, build_data, build_task
    from kd.evaluate import evaluate
    from kd.export import load_student
    from kd.models import count_parameters

    _quiet_libraries()
    config = KDCLI(args, instantiate=False).as_dict()
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
    teacher = _teacher_of_run(config["model"], classes, task.dense)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = evaluate(student, student_input, data.eval_dataloader(split), task, teacher, device)
    models = {"student": student} | ({"teacher": teacher.model} if teacher else {})
    rows = {name: {"params": count_parameters(model), **found[name]} for name, model in models.items()}
    return {
        "run": str(run),
        "data": folder or f"{data.source.describe()} ({split})",
        "pictures": len(pictures.targets),
        **rows,
    }


def _teacher_of_run(model: dict[str, Any], classes: list[str], dense: bool) -> Any:
    """The run's teacher or teachers, if their checkpoints are still there."""
    from kd.models import TeacherSpec
    from kd.teacher import build_teachers

    specs = {"": model["teacher"]} if model["teacher"] else model["teachers"] or {}
    gone = [s["checkpoint"] for s in specs.values() if not (s["checkpoint"] and Path(s["checkpoint"]).exists())]
    if gone:
        print(f"the teacher's checkpoint {gone[0]} is gone: the student alone", file=sys.stderr)
    if gone or not specs or not all(s["head"] for s in specs.values()):
        return None
    built = {name: TeacherSpec(**{**spec, "placement": "same"}) for name, spec in specs.items()}
    return build_teachers(built.get(""), {name: s for name, s in built.items() if name}, classes, dense)


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
    Console(width=None if sys.stdout.isatty() else 120).print(table)


# -- kd-report --------


def report_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kd-report``; returns the exit status."""
    return _guarded("kd-report", _report, sys.argv[1:] if argv is None else argv)


def _report(request: Request) -> int:
    from kd.report.html import write_comparison, write_report
    from kd.report.records import read_run

    if "help" in request.flags or not request.rest:
        print(REPORT_HELP, end="")
        return 0 if "help" in request.flags else 2
    if len(request.rest) > 2 or request.overrides:
        raise UserError("it takes one run's folder, or two to compare, and --open")
    folders = [_seen_run(run_folder(Path(name))) for name in request.rest]
    if "traces" in request.flags:
        from kd.report.traces import write_rank_shares

        for folder in folders:
            write_rank_shares(read_run(folder))
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        for note in run.notes:
            print(f"kd-report: {run.folder}: {note}", file=sys.stderr)
    try:
        if len(runs) == 1:
            file = write_report(runs[0], folders[0] / "report.html")
        else:
            file = write_comparison(runs[0], runs[1], folders[1] / "comparison.html")
    except OSError as error:
        raise UserError(f"{folders[-1]}: the page can't be written: {error.strerror}") from error
    print(f"written to {file}")
    if "open" in request.flags:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    return 0


def _seen_run(folder: Path) -> Path:
    """The folder, if a run has written to it; a page is put nowhere else."""
    from kd.report.records import is_run

    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    if not is_run(folder):
        below = ", ".join(str(file.parent) for file in sorted(folder.glob("[0-9]*/config.yaml"))[-3:])
        hint = f"; did you mean {below}?" if below else ""
        raise UserError(f"{folder} is no run's folder: it has no config.yaml, summary.json or records{hint}")
    return folder


# -- kd-cache --------


def cache_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kd-cache``; returns the exit status."""
    return _guarded("kd-cache", _cache, sys.argv[1:] if argv is None else argv)


def _cache(request: Request) -> int:
    if "help" in request.flags or not request.recipe:
        print(CACHE_HELP, end="")
        return 0 if "help" in request.flags else 2
    if request.rest:
        raise UserError(f"what is '{request.rest[0]}'? Settings are key=value, recipes recipe=NAME")
    args = request.parser_args()
    from kd._parser import KDCLI
    from kd.fill import fill

    _quiet_libraries()
    teacher = _teacher_checkpoint(KDCLI(args, instantiate=False).as_dict())
    if teacher:
        args.append(f"--model.teacher.checkpoint={teacher}")
    return fill(KDCLI(args))


# -- kd-pack --------


def pack_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``kd-pack``; returns the exit status."""
    return _guarded("kd-pack", _pack, sys.argv[1:] if argv is None else argv)


def _pack(request: Request) -> int:
    own = dict(item.split("=", 1) for item in request.overrides if item.startswith(("out=", "short_side=")))
    if "help" in request.flags or not request.recipe or "out" not in own:
        print(PACK_HELP, end="")
        return 0 if "help" in request.flags else 2
    side = own.get("short_side")
    if side is not None and not (side.isdigit() and int(side) > 0):
        raise UserError(f"short_side: must be a number of pixels, got '{side}'")
    request.overrides = [item for item in request.overrides if item.split("=", 1)[0] not in own]
    args = request.parser_args()
    from kd._parser import KDCLI, build_data
    from kd.data.shards import pack

    _quiet_libraries()
    source = build_data(KDCLI(args, instantiate=False).as_dict()["data"]).source
    if source.masks:
        raise UserError("data.source: kd-pack packs pictures with labels, not with masks")
    for name in ("train", "val"):
        split = source.load(name)
        size = pack(split, source.classes, own["out"].rstrip("/"), name, int(side) if side else None)
        print(f"{name}: {len(split.targets)} pictures, {size / 1e6:,.1f} MB in {own['out']}", flush=True)
    print(f"train with data.source=Shards data.source.root={own['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(train_main())
