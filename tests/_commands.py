"""Every command on hostile files, in this process and under an audit hook; run as a program by its test.

    python -m tests._commands FOLDER

``FOLDER`` holds ``r.yaml`` and its finished run. Commands go as far as the work begins that takes its time (a
training, a search, a measurement, a server), and end there. Prints a JSON object as :mod:`tests._stranger` does.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save

from kd.cli import main as command
from kd.storage.weights_files import read_metadata
from tests._stranger import ARGUMENTS, NAMED, WRITES, Watch, dangerous, forms, nested, places

WORK = {
    "kd.run.fit.fit", "kd.run.fill.fill", "kd.run.fill_from.fill_from",
    "kd.run.measure.evaluate_models", "kd.ship.predict.Predictions.rows",
    "kd.ship.export.gate.export", "kd.ship.latency.measure_latency", "kd.ship.serving.run.serve",
    "kd.fleet.tuning.confirm.search_and_confirm", "kd.fleet.sizing.search.SizeSearch.measure",
}  # fmt: skip
"""Where a command's long work begins."""
RUN_COMMANDS = (
    "eval",
    "predict",
    "export",
    "latency",
    "serve",
    "card",
    "report",
    "runs",
    "launch",
    "compare",
    "resume",
)
"""Those that read a run's folder."""
SETTINGS_COMMANDS = ("train", "overlay", "cache", "tune", "search", "size", "launch")
"""Those that read a recipe, an overlay, or a search."""
ENDINGS = (".json", ".jsonl", ".csv", ".yaml")


class WorkBegins(Exception):
    """The command would now do its work."""


class WatchedCommand(Watch):
    """An audit hook that lets through what a command needs: writing below the places that are its own."""

    def __init__(self, own: tuple[str, ...]) -> None:
        self.own = own
        self.warm, self.libraries = True, set[str]()
        super().__init__()

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by the interpreter for each event."""
        if not self.on:
            return
        opens_to_write = event == "open" and (
            WRITES & set(arguments[1])
            if isinstance(arguments[1], str)
            else (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if opens_to_write or event.startswith(("os.", "shutil.")):
            texts = [
                os.fsdecode(a) for a in arguments[:2] if isinstance(a, (str, bytes, os.PathLike))
            ]
            if not opens_to_write:
                texts = texts if event in CHANGES else []
            if event in PROGRAMS or not all(map(self._is_own, texts)):
                self.seen.append(f"{event} {arguments!r}"[:160])
        elif event == "ctypes.dlopen" and self.warm:
            self.libraries.add(str(arguments[0]))
        elif event == "ctypes.dlopen" and str(arguments[0]) in self.libraries:
            return
        elif event not in ("open", "socket.bind"):
            super().note(event, arguments)

    def _is_own(self, text: str) -> bool:
        """Below a place of the command's; a bare name is one in an open folder (:mod:`kd.storage.writing`)."""
        bare = "/" not in text and text not in ("", "HACKED")
        return bare or os.path.realpath(text).startswith(self.own)


CHANGES = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree", "shutil.move", "shutil.copyfile",
}  # fmt: skip
PROGRAMS = {
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
}


def stop_where_work_begins() -> None:
    """Replaces the functions of :data:`WORK`; importing their modules loads what commands load."""

    def begin(*_: object, **__: object) -> None:
        raise WorkBegins

    for path in WORK:
        module, _, name = path.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        assert hasattr(owner, name), path
        setattr(owner, name, begin)


class Trials:
    """Commands on files that were changed, and what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.recipe, self.made = folder / "r.yaml", folder / "runs" / "tiny" / "000"
        self.place = folder / "hostile"
        self.run = self.place / "runs" / "tiny" / "000"
        self.pictures = str(folder / "data" / "val" / "apple")
        self.count, self.harm, self.status = 0, list[str](), dict[str, int]()
        own = (str(folder.resolve()), os.environ["KD_CACHE"], "/tmp/tmp", "/dev/null")
        self.watch = WatchedCommand(own)

    def fresh(self) -> Path:
        """A copy of the run to spoil."""
        shutil.rmtree(self.place, ignore_errors=True)
        return Path(shutil.copytree(self.made, self.run))

    def items(self, name: str, file: Path) -> tuple[str, list[str]]:
        """The command line of a command on a run, or on a file of settings."""
        recipe, run = f"recipe={self.recipe}", str(self.run)
        runs_dir = f"runs_dir={self.place / 'new'}"
        if name in RUN_COMMANDS and file == self.run:
            lines = {
                "eval": [run], "predict": [run, self.pictures], "export": [run, "to=onnx"], "compare": [run],
                "latency": [run, "threads=1"], "serve": [run, "port=0", "threads=1"], "card": [run],
                "report": [run], "runs": [str(self.run.parent)], "resume": [f"resume={run}"],
                "launch": ["endpoint", run, "--dry-run"],
            }  # fmt: skip
            return {"resume": "train", "compare": "size"}.get(name, name), lines[name]
        lines = {
            "train": [f"recipe={file}", runs_dir], "overlay": [recipe, f"config={file}", runs_dir],
            "cache": [recipe, f"config={file}"], "size": [recipe, f"config={file}", runs_dir],
            "tune": [recipe, f"config={file}", "search.optim.lr=1e-4..1e-3", runs_dir],
            "search": [recipe, f"tune={file}", runs_dir],
            "launch": ["slurm", recipe, f"config={file}", "--dry-run", "instances=2xml.p4d.24xlarge", runs_dir],
        }  # fmt: skip
        return {"overlay": "train", "search": "tune"}.get(name, name), lines[name]

    def call(self, name: str, file: Path, what: str) -> None:
        """Runs a command; anything but its end with status 0 to 2, or the begin of its work, is noted."""
        program, items = self.items(name, file)
        self.watch.seen.clear()
        self.count += 1
        shown = io.StringIO()
        self.watch.on = True
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                status = command(program, items)
            if "KD_TRACEBACK" in shown.getvalue():
                status = -1
        except BaseException as error:
            status = 0 if isinstance(error, WorkBegins) else -1
            shown.write(f"{type(error).__name__}: {error}")
        finally:
            self.watch.on = False
        text = shown.getvalue()
        begins = "WorkBegins" in text
        if begins:
            status = 0
        key = f"{name} {'works' if begins else status}"
        self.status[key] = self.status.get(key, 0) + 1
        if status not in (0, 1, 2):
            self.watch.seen.append(text[-300:])
        if bad := {letter for letter in text if letter not in "\n\t" and not letter.isprintable()}:
            self.watch.seen.append(f"prints {bad!r}")
        if any(line.startswith("FORGED") for line in text.splitlines()):
            self.watch.seen.append(f"prints a forged line: {text[-300:]}")
        if self.watch.seen:
            self.harm.append(f"{name}, {what:.150}: {self.watch.seen[-3:]}"[:800])


def hostile_settings(trials: Trials, names: Iterator[str], count: int) -> None:
    """Each class in the place of settings, in all ways of writing it; commands take turns."""
    commands, values = cycle(SETTINGS_COMMANDS), cycle(range(10))
    trials.fresh()
    file = trials.place / "x.yaml"
    for key, name, which, value in islice(
        zip(cycle(places()), commands, values, names, strict=False), count
    ):
        tree = nested(key, forms(value)[which])
        if name == "train":
            tree = {**yaml.safe_load(trials.recipe.read_text()), **tree}
        if name == "search":
            tree = {"search": {key: [forms(value)[which], 1]}}
        file.write_text(yaml.safe_dump(tree))
        trials.call(name, file, f"{key}={forms(value)[which]}")


def hostile_runs(trials: Trials, names: Iterator[str], count: int) -> None:
    """The same in a run's ``config.yaml``."""
    settings = (trials.made / "config.yaml").read_text()
    trials.fresh()
    for number, (key, value) in enumerate(islice(zip(cycle(places()), names, strict=False), count)):
        tree = yaml.safe_load(settings)
        node, parts = tree, key.removesuffix("+").split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {}) if isinstance(node.get(part), dict) else {}
        node[parts[-1]] = forms(value)[number % 10]
        (trials.run / "config.yaml").write_text("---\n" + yaml.safe_dump(tree) + "...\n")
        trials.call(
            RUN_COMMANDS[number % len(RUN_COMMANDS)],
            trials.run,
            f"{key}={forms(value)[number % 10]}",
        )


def hostile_students(trials: Trials, names: Iterator[str]) -> None:
    """The same in what a student's file says of its model."""
    run = trials.fresh()
    weights, said = (
        load_file(run / "student.safetensors"),
        read_metadata(run / "student.safetensors"),
    )
    commands = cycle(("eval", "export", "latency", "serve", "predict"))
    for key in (*said, "builder", "dense", "facts"):
        for number in range(4):
            value = forms(next(names))[number]
            if key == "kwargs":
                value = {**json.loads(said["kwargs"]), "act_layer": value}
            metadata = {**said, key: value if key == "arch" and number == 0 else json.dumps(value)}
            (run / "student.safetensors").write_bytes(save(weights, metadata))
            trials.call(next(commands), run, f"student {key}={value}")


HOSTILE_TEXT = "a\x1b[2J\u202e\r\nFORGED \x07\x9b2J =HYPERLINK(1) <script>"
HOSTILE_VALUES: tuple[object, ...] = (
    HOSTILE_TEXT, {"class_path": "os.system", "init_args": ARGUMENTS}, 10**15, -1, [], None, 1e308, {}, True,
)  # fmt: skip


def replaced(tree: object, value: object, strings_alone: bool) -> object:
    """A tree with all values replaced; of text alone with each text made hostile, its structure kept."""
    if isinstance(tree, dict):
        return {key: replaced(inner, value, strings_alone) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [replaced(inner, value, strings_alone) for inner in tree]
    if strings_alone:
        return f"{tree}{value}" if isinstance(tree, str) else tree
    return value


def changed_file(file: Path, change: Callable[[object], object]) -> str:
    """The text of a JSON, JSON-lines or CSV file with a change in each of its values."""
    text = file.read_text()
    if file.suffix == ".csv":
        return "".join(f"{line}{change('')}\n" for line in text.splitlines())
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    return "\n".join(json.dumps(change(json.loads(line))) for line in lines) + "\n"


def hostile_records(trials: Trials) -> None:
    """All that a run has recorded, each file in its turn and all at once, with hostile values in every place."""
    files = [
        str(path.relative_to(trials.made))
        for path in sorted(trials.made.rglob("*"))
        if path.suffix in (".json", ".jsonl") and "student" not in path.parts
    ]
    commands = ("report", "card", "runs", "latency", "compare")
    for number, value in enumerate(HOSTILE_VALUES):
        for turn, name in enumerate(files):
            run = trials.fresh()
            (run / name).write_text(
                changed_file(run / name, lambda tree, v=value: replaced(tree, v, False))
            )
            trials.call(commands[(number + turn) % len(commands)], run, f"{name}={value!r:.40}")
    tables = [str(path.relative_to(trials.made)) for path in trials.made.rglob("*.csv")]
    run = trials.fresh()
    for name in [*files, *tables]:
        (run / name).write_text(
            changed_file(run / name, lambda tree: replaced(tree, HOSTILE_TEXT, True))
        )
    for name in ("report", "card", "runs", "latency", "serve", "eval", "compare"):
        trials.call(name, run, "hostile text everywhere")


def main() -> None:
    """Tries everything, and prints what happened."""
    folder = Path(sys.argv[1])
    stop_where_work_begins()
    trials = Trials(folder)
    trials.watch.own = ("/",)  # once without files of a stranger: it imports what the commands need
    trials.fresh()
    (trials.place / "x.yaml").write_text("seed: 1\n")
    for name in SETTINGS_COMMANDS:
        overlay = trials.place / "x.yaml"
        if name == "search":
            overlay.write_text("search: {optim.lr: 1e-4..1e-3}\n")
        trials.call(name, trials.recipe if name == "train" else overlay, "warm")
        overlay.write_text("seed: 1\n")
    for name in RUN_COMMANDS:
        trials.call(name, trials.run, "warm")
    warm = dict(trials.status)
    trials.harm, trials.count, trials.status = [], 0, {}
    trials.watch.warm = False
    trials.watch.own = (str(folder.resolve()), os.environ["KD_CACHE"], "/tmp/tmp", "/dev/null")
    names = cycle([*NAMED, *islice(dangerous(), 0, None, 9)])
    hostile_settings(trials, names, 80)
    hostile_runs(trials, names, 60)
    hostile_students(trials, names)
    hostile_records(trials)
    left = [path.name for path in Path.cwd().iterdir()]
    result = {
        "count": trials.count,
        "warm_failed": [line for line in warm if line.endswith((" 2", " -1"))],
        "status": trials.status,
        "harm": trials.harm,
        "left": left,
    }
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main()
