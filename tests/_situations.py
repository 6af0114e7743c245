"""Every command and Python door where settings, weights, records, a search, a cache, answers or a library's folder are
mine, a stranger's or missing, under an audit hook; run as a program by its test.

    python -m tests._situations FOLDER [DOOR ...]

What is called is read from :mod:`kd.cli` and ``kd.__all__``: a new door is called with each of :data:`FORMS`, and one that
takes none of them fails the test. Prints a JSON object: how many cases, by door how they ended, and what should not have
happened: an unlisted class of a stranger's words, a process that the same words with files of one's own do not start, a
write outside the own folders, code of a stranger's folder, a letter that moves the cursor, a line that a record forges.
"""

import contextlib
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

import kd
from kd import cli
from kd.api import RunResult
from kd.commands import COMMANDS
from kd.errors import RunError, UserError
from kd.storage.weights_files import read_metadata
from tests._files import read_yaml, write_json, write_yaml
from tests._helpers import draw_folder, save_teacher, tiny_vit, write_recipe
from tests._stranger import ARGUMENTS, NAMED, forms, places

LIMIT_S, WARM_S, LONGEST_S = 0.5, 10.0, 60.0
"""Seconds of the processor after which a case counts as one that works, as its long work has begun; the same of the first
of a kind, which imports; and seconds of the clock."""
PAYLOAD = """
import sys
sys.audit("payload", "imported", __name__)
class Payload:
    num_classes = 4
    def __init__(self, *args, **kwargs): sys.audit("payload", "built", args, kwargs)
    def build(self, num_classes: int, img_size: object) -> object: sys.audit("payload", "build")
try:
    from kd.tasks import Classification
    class Task(Classification):
        def __init__(self, **kwargs): sys.audit("payload", "built", kwargs); super().__init__()
except ImportError: pass
"""
"""Code of a stranger; also an installed package that nobody trusts."""
OWN_PARTS = "from pytorch_lightning import Callback\nclass Quiet(Callback): pass\n"
WRITES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "shutil.rmtree", "shutil.move", "shutil.copyfile",
)  # fmt: skip
CODE = ("antigravity", "evil")
"""Modules that nothing of kd imports."""
PROGRAMS = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
FORMS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "recipe": (["recipe={r}"], ("settings", "teacher", "cache")),
    "overlay": (["recipe={home}/r.yaml", "config={o}"], ("settings",)),
    "library": (
        ["recipe={home}/bare.yaml", "model.teacher.builder=HuggingFaceBuilder",
         "model.teacher.builder.path={home}/hf"],
        ("library",),
    ),
    "timm": (
        ["recipe={home}/bare.yaml", "model.teacher.checkpoint={home}/timm"],
        ("library",),
    ),
    "data": (
        ["recipe={home}/bare.yaml", "data.source=HuggingFace", "data.source.path={home}/ds"],
        ("library",),
    ),
    "answers": (["recipe={home}/bare.yaml", "model.teacher.answers={home}/answers"], ("answers",)),
    "file of answers": (["recipe={home}/bare.yaml", "from={home}/answers.csv"], ("answers",)),
    "search": (
        ["recipe={r}", "search.optim.lr=[0.001, 0.002]", "trials=1", "sampler=random", "confirm=1"],
        ("settings", "search"),
    ),
    "resume": (["resume={run}", "trainer.max_epochs=2"], ("settings", "weights", "teacher", "cache")),
    "run": (["{run}"], ("settings", "weights", "teacher", "cache", "records")),
    "pictures": (["{run}", "{data}/val/apple"], ("settings", "weights")),
    "file": (["{run}/student.safetensors", "folder={data}/val"], ("weights",)),
    "file alone": (["{run}/student.safetensors"], ("weights",)),
    "file, recipe": (["{run}/student.safetensors", "recipe={r}"], ("settings", "weights")),
    "file, run": (["{run}/student.safetensors", "{run}"], ("settings", "weights")),
    "weights": (["{home}/teacher.pth", "{run}"], ("settings", "weights", "teacher")),
    "runs": (["{home}/runs"], ("settings", "weights", "records")),
    "cache": (["--describe", "{home}/kept", "recipe={r}"], ("settings", "cache")),
}  # fmt: skip
"""What a door may be called with, and whose files these words lead to."""
WORDS: dict[str, list[list[str]]] = {
    "export": [["to=hub"]],  # a case that is stopped in torch.export leaves torch's modes behind
    "latency": [["threads=1", "batch=1", "seconds=0.01"]],
    "serve": [["port=0", "threads=1"]],
    "pack": [["out=runs/pack"]],
    "launch": [["slurm", "instances=1xcpu:16", "--dry-run"], ["endpoint", "--dry-run"]],
    "size": [["candidates=2"]],
}
"""What a command needs beside a form, in several ways."""
OWN = ("KD_CACHE", "TMPDIR", "HF_HOME")
"""Variables that name places in which kd and its libraries may write."""
NO_DOORS = ("annotate", "save_student")
"""Functions of ``kd.__all__`` that read no file."""
RUN = "runs/tiny/000"
FILES: dict[str, tuple[str, ...]] = {
    "settings": (f"{RUN}/config.yaml",),
    "weights": (f"{RUN}/student.safetensors",),
    "records": (f"{RUN}/summary.json", f"{RUN}/fidelity.json", f"{RUN}/records"),
    "teacher": ("teacher.safetensors", "teacher.pth"),
    "cache": ("kept", os.environ.get("KD_CACHE", "cache")),
    "answers": ("answers.csv", "answers"),
    "library": ("hf", "timm", "ds"),
    "search": ("runs/tiny/tune/search",),
}
"""What is missing where a thing is missing; relative to the home."""
HOSTILE_TEXT = "a\x1b[2J\u202e\r\nFORGED \x07\x9b2J =HYPERLINK(1) <script>"
HOSTILE_VALUES: tuple[object, ...] = (
    HOSTILE_TEXT, {"class_path": "os.system", "init_args": ARGUMENTS}, 10**15, -1, [], None, 1e308, {}, True,
)  # fmt: skip
"""What a stranger's records hold in the place of each value."""


class Stop(BaseException):
    """The long work of a case would begin."""


class Shown(io.StringIO):
    """What a case prints, up to the address of a server that is ready."""

    def write(self, text: str) -> int:
        if "on http://" in text:
            raise Stop
        return super().write(text)


def entry(name: str, **arguments: object) -> dict[str, object]:
    return {"class_path": name, "init_args": arguments}


def replaced(tree: object, value: object, of_texts: bool) -> object:
    """A tree with all its values replaced; with ``of_texts`` each text made hostile, all else as it was."""
    if isinstance(tree, dict):
        return {key: replaced(inner, value, of_texts) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [replaced(inner, value, of_texts) for inner in tree]
    if of_texts:
        return f"{tree}{value}" if isinstance(tree, str) else tree
    return value


def spoil(file: Path, value: object, of_texts: bool) -> None:
    """Puts a hostile value into each place of a JSON, JSON-lines or CSV file."""
    lines = file.read_text().splitlines()
    if file.suffix == ".csv":
        spoilt = [f"{line}{value}" for line in lines]
    else:
        records = lines if file.suffix == ".jsonl" else ["\n".join(lines)]
        spoilt = [json.dumps(replaced(json.loads(line), value, of_texts)) for line in records]
    file.write_text("\n".join(spoilt) + "\n")


def restore(place: Path, kept: Path) -> None:
    """Makes a folder what its copy is; what is as it was stays."""
    place.mkdir(exist_ok=True)
    found, wanted = states(place), kept_states(kept)
    for name in sorted(found, reverse=True):
        if found[name] != wanted.get(name):
            path = place / name
            path.rmdir() if found[name] == FOLDER else path.unlink()
    for name in sorted(wanted):
        if found.get(name) != wanted[name]:
            if wanted[name] == FOLDER:
                (place / name).mkdir()
            else:
                shutil.copy2(kept / name, place / name, follow_symlinks=False)


FOLDER = (0, 0, 0)


def states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Of all below a folder, by their paths there: mode, size and time of writing; of a folder :data:`FOLDER`."""
    found = {}
    waiting = [""]
    while waiting:
        above = waiting.pop()
        for one in os.scandir(folder / above):
            name = f"{above}{one.name}"
            status = one.stat(follow_symlinks=False)
            found[name] = (status.st_mode, status.st_size, status.st_mtime_ns)
            if one.is_dir(follow_symlinks=False):
                found[name] = FOLDER
                waiting.append(f"{name}/")
    return found


kept_states = cache(states)
"""Of copies that stay as they are."""


class World:
    """The files of the cases: ``home`` is the present folder, ``there`` a stranger's, ``victim`` nobody's business."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.home, self.there, self.victim = (
            self.folder / name for name in ("home", "there", "victim")
        )
        self.run = self.home / "runs" / "tiny" / "000"
        self.search = self.home / "runs" / "tiny" / "tune" / "search"
        self.hacked = str(self.victim / "HACKED")
        touch = entry("subprocess.Popen", args=["touch", self.hacked])
        payload = entry("kd_payload.Payload", path=self.hacked)
        self.hostile_settings: list[tuple[str, object]] = [
            ("model.task", touch),
            ("model.task", entry("Classification", junk=touch)),
            ("data.source", payload),
            ("data.source", entry("ImageFolder", root=touch)),
            ("trainer.callbacks", [payload]),
            ("trainer.callbacks", [entry("ModelCheckpoint", dirpath=str(self.victim))]),
            ("trainer.logger", entry("CSVLogger", save_dir=str(self.victim))),
            ("trainer.strategy", entry("kd.strategies.ddp.DDP", module="kd_payload")),
            ("trainer.default_root_dir", str(self.victim)),
            ("model.student.builder", payload),
            ("model.teacher.builder", entry("kd_payload.Payload")),
            ("model.distill_losses", {"kd": payload}),
            ("optim.kwargs", {"a": payload}),
            ("model", f"{self.there}/r.yaml"),
            ("resume", f"{self.victim}/run"),
        ]  # fmt: skip
        for number, key in enumerate(
            places()[::2]
        ):  # listed and unlisted names at every other place
            written = forms(NAMED[number % len(NAMED)])
            self.hostile_settings.append((key.removesuffix("+"), written[number % len(written)]))
        self.hostile_students: list[dict[str, object]] = [
            {"builder": entry("kd_payload.Payload")},
            {"builder": touch},
            {"task": touch},
            {"task": entry("kd_payload.Task")},
            {"task": entry("kd.tasks.Classification", junk=touch)},
            {"task": entry("kd.tasks.Classification", label_smoothing=touch)},
            {"kwargs": {"num_classes": 4, "img_size": 32, "act_layer": payload}},
            {"kwargs": {"num_classes": 4, "checkpoint_path": f"{self.there}/evil.pth"}},
            {"builder": entry("own_parts.Quiet", junk=touch)},
        ]
        self.turn: dict[str, Iterator[int]] = {name: itertools.count() for name in FILES}

    def make(self) -> None:
        """All of one's own, by kd's commands, and what is the stranger's."""
        self.home.mkdir(parents=True)
        self.victim.mkdir()
        for place in (self.there, self.folder / "site"):
            place.mkdir()
            for name in ("kd_payload.py", "evil.py", "statistics.py"):
                (place / name).write_text(PAYLOAD)
        (self.folder / "site" / "statistics.py").unlink()
        (self.victim / "precious.txt").write_text("precious")
        shutil.copytree(self.victim, self.victim / "folder" / "000")
        data = draw_folder(self.folder / "data", train=4, val=2)
        (self.home / "own_parts.py").write_text(OWN_PARTS)
        teacher = save_teacher(self.home / "teacher.safetensors")
        import torch

        torch.save(tiny_vit().state_dict(), self.home / "teacher.pth")
        recipe = write_recipe(self.home / "r.yaml", data, teacher, trainer__max_epochs=1)
        settings = read_yaml(recipe)
        settings["model"]["teacher"] |= {
            "cache": "on",
            "cache_dir": str(self.home / "kept"),
            "cache_views": 1,
        }
        write_yaml(self.there / "plain.yaml", settings)
        settings["trainer"]["callbacks"] = [entry("own_parts.Quiet")]
        write_yaml(recipe, settings)
        settings["model"]["teacher"] = None
        settings["model"]["distill_losses"] = {}
        write_yaml(self.home / "bare.yaml", settings)
        (self.home / "o.yaml").write_text("optim.lr: 0.01\n")
        os.chdir(self.home)
        assert cli.main("train", ["recipe=r.yaml"]) == 0
        assert cli.main("eval", [str(self.run)]) == 0
        assert cli.main("export", [str(self.run), "to=onnx"]) == 0
        said = read_metadata(self.run / "student.safetensors")
        for number, name in enumerate((*said, "dense", "facts")):
            self.hostile_students.append({name: forms(NAMED[number % len(NAMED)])[number % 4]})
        shutil.copytree(self.run, self.victim / "run")
        self.make_library()
        rows = [f"{path}{',0.25' * 4}" for path in sorted(data.rglob("*.jpg"))]
        (self.home / "answers.csv").write_text(
            "\n".join(["picture,apple,bread,cake,dates", *rows]) + "\n"
        )
        assert cli.main("cache", ["recipe=bare.yaml", "from=answers.csv"]) == 0
        (stored,) = Path(os.environ["KD_CACHE"], "stored").iterdir()
        shutil.move(stored, self.home / "answers")

    def make_library(self) -> None:
        """Folders of transformers, timm and datasets."""
        import datasets
        import transformers

        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4)
        transformers.ViTForImageClassification(config).save_pretrained(self.home / "hf")
        (self.home / "timm").mkdir()
        shutil.copy(self.home / "teacher.safetensors", self.home / "timm" / "model.safetensors")
        write_json(
            self.home / "timm" / "config.json",
            {"architecture": "vit_tiny_patch16_224", "num_classes": 4},
        )
        pictures = datasets.load_dataset("imagefolder", data_dir=str(self.folder / "data"))
        pictures["train"].to_parquet(self.home / "ds" / "train-00000-of-00001.parquet")

    def keep(self) -> None:
        shutil.copytree(self.home, self.folder / "kept_home", symlinks=True)
        shutil.copytree(os.environ["KD_CACHE"], self.folder / "kept_cache", symlinks=True)
        self.untouched = self.others()

    def others(self) -> dict[str, tuple[int, int, int]]:
        """What is nobody's business, as it is."""
        return {
            f"{place}/{path}": state
            for place in ("there", "victim", "data", "site")
            for path, state in states(self.folder / place).items()
        }

    def lay(self, situation: Mapping[str, str]) -> dict[str, str]:
        """Lays a situation out; returns what the words of :data:`FORMS` stand for in it."""
        os.chdir("/")
        for kept, place in (("kept_home", self.home), ("kept_cache", Path(os.environ["KD_CACHE"]))):
            restore(place, self.folder / kept)
        os.chdir(self.home)
        values = {"home": self.home, "run": self.run, "data": self.folder / "data",
                  "r": self.home / "r.yaml", "o": self.home / "o.yaml"}  # fmt: skip
        for thing, state in situation.items():
            if state == "missing":
                self.remove(thing, values)
            else:
                getattr(self, f"{state}_{thing}")(values)
        return {name: str(value) for name, value in values.items()}

    def next(self, thing: str, variants: list[Any]) -> Any:
        return variants[next(self.turn[thing]) % len(variants)]

    def remove(self, thing: str, values: dict[str, Any]) -> None:
        """Takes a thing away."""
        for name in FILES[thing]:
            place = self.home / name
            if place.is_dir():
                shutil.rmtree(place)
            place.unlink(missing_ok=True)
        if thing == "settings":
            values |= {"r": self.there / "none.yaml", "o": self.there / "none.yaml"}

    def plain_settings(self, values: dict[str, Any]) -> None:
        """A stranger's settings that name nothing."""
        self.strangers_settings(values, ("plain", None))

    def strangers_settings(
        self, values: dict[str, Any], hostile: tuple[str, object] | None = None
    ) -> None:
        key, value = hostile or self.next("settings", self.hostile_settings)
        for file, origin in (
            (self.there / "r.yaml", self.there / "plain.yaml"),
            (self.run / "config.yaml",) * 2,
        ):
            tree = read_yaml(origin)
            node = tree
            *above, last = key.split(".")
            for part in above:
                if not isinstance(node.get(part), dict):
                    node[part] = {}
                node = node[part]
            if key != "plain":
                node[last] = value
            write_yaml(file, tree, explicit_start=True, explicit_end=True)
        overlay = {} if key == "plain" else {key: value}
        write_yaml(self.there / "o.yaml", {"optim.lr": 0.01, **overlay})
        values |= {"r": self.there / "r.yaml", "o": self.there / "o.yaml"}
        self.untouched = self.others()

    def strangers_weights(self, values: dict[str, Any]) -> None:
        file = self.run / "student.safetensors"
        hostile = self.next("weights", self.hostile_students)
        said = read_metadata(file) | {name: json.dumps(value) for name, value in hostile.items()}
        file.write_bytes(save(load_file(file), said))

    def strangers_records(self, values: dict[str, Any]) -> None:
        """A hostile value in each place of one file, or hostile text in all files."""
        turn, which = divmod(next(self.turn["records"]), len(HOSTILE_VALUES))
        value = HOSTILE_VALUES[which]
        recorded = [path for path in sorted(self.run.rglob("*")) if "student" not in path.parts]
        files = [path for path in recorded if path.suffix in (".json", ".jsonl")]
        if value == HOSTILE_TEXT and turn % 2:
            for file in [*files, *self.run.rglob("*.csv")]:
                spoil(file, value, of_texts=True)
        else:
            spoil(files[(turn + which) % len(files)], value, of_texts=False)

    def strangers_teacher(self, values: dict[str, Any]) -> None:
        file = self.home / "teacher.safetensors"
        hostile = self.next("teacher", self.hostile_students)
        said = {"arch": "vit_tiny_patch16_224", "kwargs": json.dumps({"num_classes": 4})}
        file.write_bytes(
            save(load_file(file), said | {k: json.dumps(v) for k, v in hostile.items()})
        )
        (self.home / "teacher.pth").write_bytes(pickle.dumps(Pickled(self.hacked)))

    def strangers_cache(self, values: dict[str, Any]) -> None:
        """Files of answers are links, pickles and hostile JSON in turn."""
        how = self.next("cache", ["link", "pickle", "json"])
        for file in [path for path in (self.home / "kept").rglob("*") if path.is_file()]:
            file.unlink()
            if how == "link":
                file.symlink_to(self.victim / "precious.txt")
            elif how == "pickle" or file.suffix != ".json":
                file.write_bytes(pickle.dumps(Pickled(self.hacked)))
            else:
                write_json(file, entry("kd_payload.Payload"))

    def strangers_answers(self, values: dict[str, Any]) -> None:
        file = self.home / "answers.csv"
        content = [
            pickle.dumps(Pickled(self.hacked)),
            b"picture,apple\n__import__('kd_payload'),1\n",
        ]
        hostile = self.next("answers", content)
        file.write_bytes(hostile)
        for stored in (self.home / "answers").glob("*/*.*"):
            stored.write_bytes(hostile)

    def strangers_library(self, values: dict[str, Any]) -> None:
        """Code beside the weights that the configuration names, and pickled weights."""
        config = {"model_type": "vit", "num_labels": 4, "image_size": 32, "patch_size": 8, "hidden_size": 32,
                  "auto_map": {"AutoConfig": "evil.Payload", "AutoModelForImageClassification": "evil.Payload",
                               "AutoModel": "evil.Payload"}}  # fmt: skip
        how = self.next("library", ["auto_map", "type", "pickle"])
        if how == "type":
            config |= {"model_type": "evil", "architecture": "evil.Payload", "custom_load": True}
        for name in ("hf", "timm", "ds"):
            place = self.home / name
            write_json(place / "config.json", config)
            shutil.copy(self.there / "evil.py", place / "evil.py")
            shutil.copy(self.there / "evil.py", place / f"{name}.py")
            if how == "pickle":
                for file in [*place.glob("*.safetensors"), *place.glob("*.parquet")]:
                    file.unlink()
                    file.with_name("pytorch_model.bin").write_bytes(
                        pickle.dumps(Pickled(self.hacked))
                    )

    def finish_search(self) -> None:
        """Of a search whose trial was begun: the trial's run is there, and the journal says that it is complete."""
        import optuna

        self.unfinished = (self.search / "journal.log").read_bytes()
        trial_run = self.search / "trials" / "0000" / "tiny" / "000"
        shutil.copytree(self.run, trial_run, dirs_exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(self.search / "journal.log"))
        study = optuna.load_study(
            study_name="kd-tune", storage=optuna.storages.JournalStorage(backend)
        )
        study._storage.set_trial_user_attr(study.trials[0]._trial_id, "folder", str(trial_run))
        study.tell(0, 0.5)

    def strangers_search(self, values: dict[str, Any]) -> None:
        how = self.next(
            "search", ["folder", "value", "best", "trial", "trials", "journal", "tune", "confirm"]
        )
        journal = self.search / "journal.log"
        trial = self.search / "trials" / "0000"
        evil = self.there / "run"
        if how == "folder":  # the journal points at a run of the stranger's
            if not evil.exists():
                evil.mkdir()
                tree = read_yaml(self.run / "config.yaml")
                tree["trainer"]["callbacks"] = [entry("kd_payload.Payload")]
                write_yaml(evil / "config.yaml", tree, explicit_end=True)
                self.untouched = self.others()
            journal.write_text(journal.read_text().replace(str(trial / "tiny" / "000"), str(evil)))
        elif how == "value":
            choices = r"\"choices\": [%s]"
            text = journal.read_text()
            assert choices % "0.001, 0.002" in text
            evil_choices = choices % r"\"kd_payload.Payload\", \"--trust\""
            journal.write_text(text.replace(choices % "0.001, 0.002", evil_choices))
        elif how == "trial":  # of a trial that was begun and has no checkpoint: it is begun anew
            journal.write_bytes(self.unfinished)
            self.link(trial / "tiny", self.victim / "folder")
        elif how == "trials":
            journal.write_bytes(self.unfinished)
            (self.victim / "folder" / "0000" / "tiny").mkdir(parents=True, exist_ok=True)
            self.untouched = self.others()
            self.link(self.search / "trials", self.victim / "folder")
        else:
            file = {"best": self.search / "best.yaml", "journal": journal, "tune": self.search,
                    "confirm": self.search / "confirm"}[how]  # fmt: skip
            self.link(file, self.victim / ("precious.txt" if file.suffix else "folder"))

    def link(self, place: Path, to: Path) -> None:
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(to)


class Pickled:
    """A pickle that starts a program."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


class Watch:
    """The audit hook: what a case must not do, and where its long work begins."""

    def __init__(self, world: World) -> None:
        self.world, self.on, self.is_mine = world, False, True
        self.trusts = False
        self.seen: list[str] = []
        self.started: set[str] = set()
        self.own = tuple(
            os.path.realpath(place)
            for place in (world.home, *(os.environ[name] for name in OWN), "/dev")
        )
        self.libraries = (
            str(world.there),
            str(world.home / "hf"),
            str(world.home / "timm"),
            str(world.home / "ds"),
        )
        sys.addaudithook(self.note)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by the interpreter for each event."""
        if not self.on:
            return
        if event == "payload":
            self.seen.append(f"a stranger's class: {arguments!r}")
        elif event == "subprocess.Popen":
            self.program([str(word) for word in arguments[1]])
        elif event in PROGRAMS:
            self.program([event, str(arguments)])
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(
            self.libraries
        ):
            self.seen.append(f"runs {arguments[0].co_filename}")
        elif event == "import" and str(arguments[0]) in CODE:
            self.seen.append(f"imports {arguments[0]}")
        elif event == "pickle.find_class" and str(arguments[0]) in ("os", "posix", "kd_payload"):
            self.seen.append(f"unpickles {arguments}")
        elif event == "open" and self.writes(arguments):
            self.write(event, arguments[:1])
            if Path(os.fsdecode(arguments[0])).name.startswith("config.yaml"):
                self.stop()
        elif event in WRITES:
            self.write(event, arguments[:2])

    @staticmethod
    def writes(arguments: tuple[Any, ...]) -> bool:
        path, mode, flags = arguments
        if isinstance(path, int):
            return False
        return bool({*(mode or "")} & {*"wax+"}) or bool(
            (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )

    def write(self, event: str, places: tuple[Any, ...]) -> None:
        for place in places:
            text = os.fsdecode(place) if isinstance(place, (str, bytes, os.PathLike)) else ""
            if "/" in text and not os.path.realpath(text).startswith(self.own):
                self.seen.append(f"writes: {event} {text}")

    def program(self, words: list[str]) -> None:
        """A process: one of kd's own has its parent's words of trust and none more, and is not run here."""
        if words[0] == sys.executable:
            if "--trust" in words and not self.trusts:
                self.seen.append(f"a child trusts everything: {words}")
            self.stop()
        name = " ".join(words[:3])[:80]
        if self.is_mine:
            self.started.add(name)
        elif name not in self.started:
            self.seen.append(f"starts {words}"[:200])
            self.stop()

    def stop(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            raise Stop


def python_doors() -> dict[str, Callable[[list[str]], int]]:
    """Each function that kd offers and :attr:`RunResult.student`, called with a command line's words."""
    functions = {name: getattr(kd, name) for name in kd.__all__ if name not in NO_DOORS}
    functions = {name: function for name, function in functions.items() if isfunction(function)}
    functions["export"] = lambda run, settings: kd.export(run or "", "hub", settings)
    functions["predict"] = lambda run, settings: kd.predict(
        run or "", "../data/val/apple", settings
    )
    functions["RunResult.student"] = lambda run: RunResult(Path(run), {}).student()

    def called(function: Callable[..., object], words: list[str]) -> int:
        settings = dict(word.split("=", 1) for word in words if "=" in word)
        first = [word for word in words if "=" not in word] or [settings.pop("recipe", None)]
        takes = len(signature(function).parameters)
        if len(first) > 1 or (takes == 1 and settings):
            return 2
        try:
            function(*[first[0], settings][:takes])
        except (UserError, RunError) as error:
            print(error)
            return 2
        except (OSError, TypeError) as error:  # of a word that is no file of this door's
            print(f"{type(error).__name__}: {error}")
            return 2
        return 0

    return {
        f"kd.{name}": lambda words, f=function: called(f, words)
        for name, function in functions.items()
    }


def doors() -> dict[str, Callable[[list[str]], int]]:
    """All commands, and all that Python offers."""
    commands: dict[str, Callable[[list[str]], int]] = {}
    for name in COMMANDS:
        for more in WORDS.get(name, [[]]):
            commands[" ".join([name, *more[:1]])] = lambda words, n=name, m=more: cli.main(
                n, [*m, *words]
            )
    return commands | python_doors()


class Cases:
    """Calls doors in situations."""

    def __init__(self, world: World, watch: Watch) -> None:
        self.world, self.watch = world, watch
        self.count, self.harm, self.crashes = 0, list[str](), list[str]()
        self.ends: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, float] = {}

    def call(
        self,
        name: str,
        door: Callable[[list[str]], int],
        form: str,
        situation: Mapping[str, str],
        *more: str,
    ) -> str:
        """How it ends: its status, or ``works`` where its long work begins."""
        values = self.world.lay(situation)
        words = [word.format(**values) for word in [*FORMS[form][0], *more]]
        self.watch.is_mine, self.watch.trusts = not situation, "--trust" in more
        self.watch.seen.clear()
        shown = Shown()
        modules = {name for name in sys.modules if name in ("own_parts", "kd_payload", "evil")}
        for module in modules:
            del sys.modules[module]
        self.watch.on = True
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S if situation else WARM_S, 5)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S, 5)
        began = time.process_time()
        try:
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                end = str(door(words))
        except Stop:
            end = "works"
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.watch.on = False
        self.count += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        text = shown.getvalue()
        what = f"{name} {form} {dict(situation)} {more or ''}"
        if end not in ("0", "1", "2", "works") or "KD_TRACEBACK" in text:
            self.crashes.append(f"{what}: {end} {text[-300:]}")
        others = self.world.others()
        if others != self.world.untouched:
            changed = {path for path, _ in others.items() ^ self.world.untouched.items()}
            self.watch.seen.append(f"changed {sorted(changed)[:4]}")
            self.world.untouched = others
        usual = (
            "\n\t\r" if name.startswith("kd.") else "\n\t"
        )  # in Python libraries draw their bars
        if bad := {letter for letter in text if letter not in usual and not letter.isprintable()}:
            self.watch.seen.append(f"prints {bad!r}")
        if any(line.startswith("FORGED") for line in text.splitlines()):
            self.watch.seen.append(f"prints a forged line: {text[-300:]}")
        if self.watch.seen:
            self.harm.append(f"{what}: {self.watch.seen[:3]} {words}"[:700])
        ends = self.ends.setdefault(name, {})
        ends[end] = ends.get(end, 0) + 1
        if os.environ.get("KD_SITUATIONS_SHOWN"):
            print(
                f"{time.process_time() - began:5.2f} {what}: {end} {text[-200:]!r} {self.watch.seen}",
                file=sys.__stderr__,
            )
        return end


TRIES = {"weights": 4, "search": 8, "records": 12}
"""How often a command tries a stranger's thing, each time in another variant; others are tried three times."""


def situations(things: tuple[str, ...], most: int) -> Iterator[dict[str, str]]:
    """In which one thing is not mine, and the settings beside it; a stranger's is tried ``most`` times at most."""
    for thing in things:
        yield {thing: "missing"}
        yield from [{thing: "strangers"}] * min(most, TRIES.get(thing, 3))
        if "settings" in things and thing != "settings":
            yield from ({thing: state, "settings": "plain"} for state in ("strangers", "missing"))
    if {"settings", "weights"} <= {*things}:
        yield {"weights": "strangers", "settings": "missing"}


def main() -> None:
    """Calls everything, and prints what happened."""
    world = World(Path(sys.argv[1]))
    sys.dont_write_bytecode = True
    sys.path.append(str(world.folder / "site"))
    world.make()
    watch = Watch(world)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, watch.stop)
    world.keep()
    cases = Cases(world, watch)
    known = doors()
    chosen = {
        name: door
        for name, door in known.items()
        if name.split()[0] in sys.argv[2:] or not sys.argv[2:]
    }
    cases.call("tune", known["tune"], "search", {})  # until its trial would begin
    world.finish_search()
    restore(world.folder / "kept_home", world.home)
    kept_states.cache_clear()
    cases.harm.clear()
    taken = {}
    for name, door in chosen.items():
        for form in FORMS:
            if cases.call(name, door, form, {}) != "2":
                taken.setdefault(name, []).append(form)
    warm = len(cases.harm), cases.count
    for name, of_door in taken.items():
        for form in of_door:
            most = 2 if name.startswith("kd.") else 99  # Python's doors lead to the commands' code
            for situation in situations(FORMS[form][1], most):
                cases.call(name, known[name], form, situation)
    cases.watch.seen.clear()
    found = len(cases.harm)
    world.turn["weights"] = itertools.count()
    cases.call("eval", known["eval"], "file", {"weights": "strangers"}, "--trust")
    result = {
        "count": cases.count, "warm": warm, "forms": taken, "ends": cases.ends, "harm": cases.harm[:found],
        "seen_with_trust": cases.harm[found:], "crashes": cases.crashes, "seconds": cases.seconds, "doors": sorted(known),
    }  # fmt: skip
    print(json.dumps(result), file=sys.__stdout__)


if __name__ == "__main__":
    main()
