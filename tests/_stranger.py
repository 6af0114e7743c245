"""Hostile settings, generated from the settings' own schema, under an audit hook; run as a program by its test.

    python -m tests._stranger FOLDER

``FOLDER`` holds ``r.yaml``, a recipe. Prints a JSON object: how many values were tried, and
what happened that should not have happened.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from kd.config import parts as listed
from kd.config.kinds import read
from kd.errors import UserError
from kd.run import keys
from kd.run.build import arguments_of, built, data_of, task_of, teacher_specs
from kd.run.gate import check_foreign
from kd.run.resolve import resolve
from kd.run.trust import Trust
from kd.settings import LearningSettings, TrainerSettings
from tests._files import read_yaml

ROOT = Path(__file__).parent.parent


def result_of(program: str, *words: Path, cwd: Path, **variables: str) -> dict[str, Any]:
    """What a program of ``tests/`` prints last, in a process of its own: an audit hook can't be taken away again."""
    child = subprocess.run(
        [sys.executable, "-m", f"tests.{program}", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        cwd=cwd, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


NAMED = [
    "os.system", "subprocess.Popen", "importlib.import_module", "functools.partial", "pathlib.Path", "torch.load",
    "runpy.run_path", "builtins.exec", "shutil.rmtree", "antigravity.Callback", "webbrowser.open", "pickle.loads",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler", "torch.hub.load", "ctypes.CDLL",
    "kd.run.build.built", "kd.models.weights.Path", "pytorch_lightning.callbacks.LambdaCallback",
    "pytorch_lightning.Trainer", "timm.create_model", "torch.utils.tensorboard.SummaryWriter",
]  # fmt: skip
"""Programs, importers, readers and writers, by their paths."""
ARGUMENTS = {
    "command": "touch HACKED",
    "args": ["touch", "HACKED"],
    "path": "HACKED",
    "log_dir": "HACKED",
}
HARMFUL = {
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.remove",
    "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "subprocess.Popen",
    "ctypes.dlopen", "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "pickle.find_class",
    "shutil.rmtree", "shutil.move", "shutil.copyfile", "webbrowser.open", "code.__new__",
}  # fmt: skip
"""Audit events that no check of settings needs."""
WRITES = set("wax+")
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(ROOT / "kd"))
"""Where installed code is."""


class Watch:
    """An audit hook that notes what a value made happen."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        self.allowed = {module for one in listed.classes() for module in _modules(one)}
        sys.addaudithook(self.note)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by the interpreter for each event."""
        if not self.on:
            return
        if event == "import" and self._is_foreign(str(arguments[0])):
            self.seen.append(f"import {arguments[0]}")
        elif event in ("exec", "compile") and self._is_text(event, arguments):
            self.seen.append(f"{event} {arguments!r}"[:120])
        elif event == "open" and isinstance(arguments[1], str) and WRITES & set(arguments[1]):
            self.seen.append(f"open {arguments[:2]}")
        elif event in HARMFUL:
            self.seen.append(f"{event} {arguments!r}"[:120])

    def _is_foreign(self, module: str) -> bool:
        """A module that is new in this process and belongs to none of the listed classes."""
        return module not in sys.modules and module not in self.allowed

    @staticmethod
    def _is_text(event: str, arguments: tuple[Any, ...]) -> bool:
        """Code that is made of text, or read from a file, by something else than a library's own machinery."""
        code = arguments[0] if event == "exec" else None
        file = str(code.co_filename if code is not None else arguments[1])
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename.startswith(str(ROOT / "tests")):
            frame = frame.f_back  # our own hook's frames
        caller = frame.f_code.co_filename
        is_library = caller.startswith((*LIBRARIES, "<frozen importlib")) and not caller.endswith(
            "runpy.py"
        )
        return not (is_library and file.startswith((*LIBRARIES, "<")))


def _modules(one: listed.Listed) -> Iterator[str]:
    for path in one.paths:
        parts = path.split(".")[:-1]
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def dangerous() -> list[str]:
    """All public classes of torch, Lightning and timm that are loaded and not listed, by their paths."""
    known = {path for one in listed.classes() for path in one.paths}
    found = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "pytorch_lightning", "lightning_fabric", "timm"):
            for kind in list(vars(module).values()):
                if (
                    isinstance(kind, type)
                    and kind.__module__ == name
                    and not kind.__name__.startswith("_")
                ):
                    found.add(f"{name}.{kind.__qualname__}")
    return sorted(
        path for path in found - known if all(part.isidentifier() for part in path.split("."))
    )


def forms(name: str) -> list[object]:
    """One class in all ways of writing it."""
    entry = {"class_path": name, "init_args": ARGUMENTS}
    return [
        name, entry, [entry], [name], json.dumps(entry), [json.dumps([entry])], {"a": entry},
        {"class_path": name, "dict_kwargs": ARGUMENTS}, {"class_path": name, **ARGUMENTS},
        {"class_path": "kd.losses.StandardizedLoss", "init_args": {"loss": entry}},
    ]  # fmt: skip


def places() -> list[str]:
    """Each setting that there is, those of named entries too, and one below each class."""
    own = [*keys.schema()]
    own += [
        "model.distill_losses.kd",
        "model.teachers.a.builder",
        "model.taps.kd",
        "trainer.callbacks+",
    ]
    return own


def below_classes(names: Iterator[str]) -> Iterator[tuple[str, object]]:
    """At each place of a class, each listed class of its kind with a hostile value in each of its fields and others."""
    at = {"source": "data.source", "task": "model.task", "loss": "model.distill_losses.kd", "logger": "trainer.logger",
          "strategy": "trainer.strategy", "callback": "trainer.callbacks+", "profiler": "trainer.profiler",
          "builder": "model.teacher.builder"}  # fmt: skip
    for one in listed.classes():
        for field in [*one.fields, "ddp_comm_state", "experiment", "kwargs", "class_path"]:
            name = next(names)
            inner = {"class_path": name, "init_args": ARGUMENTS}
            if one.kind in at:
                for way in ("init_args", "dict_kwargs"):
                    for value in (inner, [inner], json.dumps(inner), {"a": inner}):
                        yield at[one.kind], {"class_path": one.name, way: {field: value}}
        for kind, place in at.items():
            if kind != one.kind:  # a class of the list at another one's place
                yield place, {"class_path": one.name}


def nested(key: str, value: object) -> dict[str, Any]:
    """``{"a": {"b": value}}`` of ``a.b``."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value) if rest else value}


class Trial:
    """Tries values and keeps what went wrong."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self.folder, self.watch = folder, watch
        self.count, self.harm = 0, list[str]()
        self.passed: list[tuple[str, object]] = []

    def does(self, what: str, work: Callable[[], object]) -> bool:
        """Whether the work ends without a user's error; anything else than these two is noted."""
        self.count += 1
        self.watch.seen.clear()
        self.watch.on = True
        try:
            work()
            return True
        except UserError:
            return False
        except Exception as error:
            self.watch.seen.append(f"{type(error).__name__}: {error}"[:160])
            return False
        finally:
            self.watch.on = False
            if self.watch.seen:
                self.harm.append(f"{what}: {self.watch.seen[:3]}"[:400])

    def gate(self, key: str, value: object) -> bool:
        """The check of a file alone; what passes is kept for :meth:`parsed`."""
        passes = self.does(
            f"gate {key}={value}",
            lambda: check_foreign(self.folder / "x.yaml", [nested(key, value)], []),
        )
        if passes:
            self.passed.append((key, value))
        return passes

    def parsed(self, key: str, value: object) -> None:
        """The same where the first check is missing: what resolves settings, and what builds."""
        recipe = read_yaml(self.folder / "r.yaml")

        def parse() -> None:
            config = resolve([recipe, nested(key, value)])
            self.build(config)

        self.does(f"parse {key}={value}", parse)

    def build(self, config: dict[str, Any]) -> None:
        """The builders of a run on settings, trusting nothing."""
        arguments_of(TrainerSettings, {**config["trainer"], "logger": False}, "trainer", Trust())
        arguments_of(LearningSettings, config["model"], "model", Trust())
        built(listed.part("logger"), config["trainer"]["logger"], "trainer.logger", Trust())
        for what in (data_of, task_of, teacher_specs):
            what(config, Trust())


def try_files(trial: Trial, classes: list[str]) -> None:
    """Recipes and overlays: the check of files for all values; whole commands: :mod:`tests._situations`."""
    names = cycle(NAMED)
    for key in places():
        for value in forms(next(names)):
            trial.gate(key, value)
    for key, value in below_classes(names):
        trial.gate(key, value)
    for place in ("data.source", "trainer.callbacks", "trainer.strategy", "model.task"):
        for name in [*NAMED, *classes]:
            if trial.gate(place, {"class_path": name}):
                trial.harm.append(f"{place} takes {name}")


def try_parser(trial: Trial) -> None:
    """What the parser, and what builds, do where the check of files lets something through."""
    of_classes = [key for key in places() if read(keys.declared(key)).part]
    for number, key in enumerate(of_classes):
        for value in forms(NAMED[number % len(NAMED)]):
            trial.parsed(key, value)
    for key, value in trial.passed[
        :: len(trial.passed) // 40 + 1
    ]:  # plain texts at settings of text
        trial.parsed(key, value)


def main() -> None:
    """Tries everything, and prints what happened."""
    folder = Path(sys.argv[1])
    import kd.run.trainer  # noqa: F401 (imports what every command needs)

    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}}
    built(
        listed.part("logger"), logger, "trainer.logger", Trust()
    )  # fsspec imports its parts where a first path is looked at
    classes = dangerous()
    trial = Trial(folder, Watch())
    try_files(trial, classes)
    try_parser(trial)
    print(
        json.dumps(
            {
                "count": trial.count,
                "passed": len(trial.passed),
                "classes": len(classes),
                "harm": trial.harm,
            }
        )
    )


if __name__ == "__main__":
    main()
