"""A command line, sorted by kind. Imports nothing heavy: a wrong word is reported at once.

A *recipe* is a YAML file of settings; an *overlay* (``config=NAME``) is another one on top of it; an *override* is a
word ``KEY=VALUE``; a *flag* takes no value (:data:`FLAGS`). ``rest`` holds all other words: runs, files, pictures.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kd.config.kinds import Key, read
from kd.config.suggest import as_question, suggest, why_needless
from kd.errors import UserError
from kd.launch.sagemaker import CHANNEL, channel_folder
from kd.run import files, keys
from kd.run.checks import check_read, note_on_losses, notes_on_patches
from kd.run.gate import check_foreign, vouched
from kd.run.keys import declared
from kd.run.paths import find, part_of
from kd.run.resolve import (
    Value,
    Word,
    check_meant,
    keys_of_classes,
    read_word,
    resolve,
    words_of,
)
from kd.run.shorthand import written_out
from kd.run.trust import Trust, is_own
from kd.settings import teachers_in

FLAGS = ("-h", "--help", "--trust")
"""Options of all commands, beside a command's own; they take no value, but those of :data:`ABOUT` may."""
ABOUT = ("-h", "--help", "--keys", "--list")  # these may be followed by what to say more of
KEY = re.compile(r"^(?:--)?([A-Za-z_][\w.-]*\+?)=(.*)$", re.S)
"""``key=value`` or ``--key=value``; a ``+`` after the key adds to a list."""
LINE = 10**9
"""Characters of the longest word."""
NAMED = ("teachers", "distill_losses", "taps", "channel")
"""Settings, and a key of ``kd-launch``, whose entries have names of the user's own, in which a hyphen is one."""


@dataclass
class Request:
    """A command line, sorted by kind."""

    recipe: str | None = None
    """Name or path."""
    overlays: list[str] = field(default_factory=list)
    """Names or paths, in order."""
    overrides: list[str] = field(default_factory=list)
    """``key=value`` items, in order."""
    resume: str | None = None
    """Folder of a run."""
    cluster: dict[str, int] = field(default_factory=dict)
    """Trainer settings of the launcher, by key (``trainer.num_nodes``); overrides win over them."""
    trust: list[str] = field(default_factory=list)
    """Modules whose classes a file from elsewhere may name."""
    flags: set[str] = field(default_factory=set)
    """Flags without their dashes."""
    about: str = ""
    """The topic of a flag: ``--list losses``, ``--keys lr``, ``--help data.augment``."""
    rest: list[str] = field(default_factory=list)
    """All other words."""
    here: bool = True
    """Whether it runs on this machine, where SageMaker's ``channel:NAME`` has a folder; False: a job is being sent."""
    vouched: Trust = field(default_factory=Trust)
    """What the user trusts in the settings (:func:`kd.run.gate.vouched`); set by :meth:`resolved`."""

    listed: dict[str, Any] = field(default_factory=dict)
    """Sources whose pictures were listed before torch was imported, by :func:`kd.run.pictures.source_key`."""
    notes: list[str] = field(default_factory=list)
    """Lines to print about settings that nobody has typed; :meth:`resolved` and :meth:`check_read` add to them."""

    def resolved(self, trains: bool = False) -> dict[str, Any]:
        """All settings of the run, merged, in their types.

        Sets :attr:`vouched`, and writes :attr:`overrides` out (:func:`kd.run.shorthand.written_out`).

        Args:
            trains: a run of these settings will train: a file from elsewhere names no other machine.

        Raises:
            UserError: a file that is missing, is not YAML, or names code that the user does not trust; a wrong key or
                value.
        """
        contents = self._contents(trains)
        words = self._words(contents.values())
        own = [content for file, content in contents.items() if self._is_own(file)]
        all_own = len(own) == len(contents)
        self.vouched = vouched([*own, *words], self.trusted, all_own)
        named = {}
        if self.recipe:
            named["recipe"] = Path(self.recipe).stem
        layers = [named, *contents.values(), self.cluster, *words]
        config = resolve(layers, self.vouched)
        return with_folders(config) if self.here else config

    def _is_own(self, file: Path) -> bool:
        """Whether a file of settings is one's own, or ``--trust`` makes all so."""
        return "trust" in self.flags or is_own(file)

    def class_keys(self) -> dict[str, Key]:
        """The keys of the arguments of the classes that the recipe, the overlays and the command line name, for
        ``--keys``.
        """
        contents = self._contents()
        return keys_of_classes([*contents.values(), *self._words(contents.values())])

    def _contents(self, trains: bool = False) -> dict[Path, dict[Any, Any]]:
        """The settings of each file, in rising priority; none names code that the user does not trust.

        ``trains``: as of :meth:`resolved`.

        Raises:
            UserError: a file that can't be read, has control characters or a plain value where a group of settings
                belongs, or names code that is not trusted.
        """
        typed = {item.partition("=")[0] for item in self.overrides}
        contents = {file: files.read_settings(file) for file in self._files()}
        for file, content in contents.items():
            files.check_text(content, f"{file}: ")
            if not self._is_own(file):
                check_foreign(file, [content], self.trust, typed if trains else None)
        return contents

    def _words(self, contents: Iterable[Mapping[Any, Any]]) -> list[dict[str, Word]]:
        """The words of the command line, each by its key, with all that they imply, those that name classes first:
        :attr:`overrides` becomes these words.

        Args:
            contents: of the recipe and the overlays, in rising priority.

        Raises:
            UserError: a word with control characters, or that sets nothing.
        """
        self.overrides, notes = written_out(self.overrides, [*contents])
        self.notes += notes
        words = words_of(self.overrides)
        for layer in words:
            files.check_text({key: word.value for key, word in layer.items()})
            for key, word in layer.items():
                _check_says_something(key, word)
        return words

    def named(self) -> list[str]:
        """The words of ``kd-train``'s command line for the same run: a restarted job finds its run by these.

        Two requests with the same words describe the same run. Paths are as they were typed.
        """
        recipe = [f"recipe={self.recipe}"] if self.recipe else []
        overlays = [f"config={overlay}" for overlay in self.overlays]
        return [*recipe, *overlays, *self.trusted, *self.overrides]

    def value_of(self, key: str) -> str | None:
        """The value that ``key=value`` items give a key, the last one; None without any."""
        for item in reversed(self.overrides):
            if item.startswith(f"{key}="):
                return item.split("=", 1)[1]
        return None

    @property
    def trusted(self) -> list[str]:
        """What the user trusts, as words (``trust=MODULE``, ``--trust``) of another process's command line."""
        return [
            *(f"trust={module}" for module in self.trust),
            *(["--trust"] if "trust" in self.flags else []),
        ]

    def check_read(self, config: Mapping[str, Any]) -> None:
        """Refuses settings that no part of a run with these settings would read (:func:`kd.run.checks.check_read`).

        Called once, by ``kd-train`` and ``kd.train``.

        Args:
            config: what :meth:`resolved` gave.

        Raises:
            UserError: the first one.
        """
        contents = [files.read_settings(file) for file in self._files()]
        typed = {
            key: word.value for layer in words_of(self.overrides) for key, word in layer.items()
        }
        if self.resume:
            typed["resume"] = self.resume
        check_read({**config, "resume": self.resume}, contents, typed)
        model = config["model"]
        models = {**teachers_in(model), "model.student": model["student"]}
        notes = [*notes_on_patches(models), *note_on_losses(model)]
        self.notes += [note for note in notes if note not in self.notes]

    def _files(self) -> list[Path]:
        """The recipe and the overlays, each followed by what it changes of this recipe alone (:func:`part_of`), in rising
        priority.
        """
        paths = []
        if self.recipe:
            paths = [find("recipes", self.recipe)]
        for overlay in self.overlays:
            paths.append(find("configs", overlay))
            paths += part_of(overlay, self.recipe or "")
        return paths


def with_folders(value: Value) -> Value:
    """Settings with SageMaker's folders in the place of ``channel:NAME``; a copy.

    Raises:
        UserError: a channel that this container does not have.
    """
    if isinstance(value, Mapping):
        return {name: with_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_folders(inner) for inner in value]
    return channel_folder(value) if str(value).startswith(CHANNEL) else value


def _check_says_something(key: str, word: Word) -> None:
    """Refuses a word that would change nothing, or would turn something off in silence (a shell's empty variable)."""
    # what is merged key by key takes nothing from it
    if word.value == {} and read(declared(key)).group:
        raise UserError(f"{key}: {{}} sets nothing")
    if word.text == "":
        raise UserError(f"{key}: must not be empty; null is none")


def translate(argv: Sequence[str], flags: Iterable[str] = (), command: str = "train") -> Request:
    """Sorts a command line: ``key=value``, ``--key=value`` and ``--key value`` mean the same, in any order.

    A word that ends in ``.yaml`` or ``.yml`` is the recipe; a flag of :data:`ABOUT` takes the word after it, where that has
    letters, digits, ``_`` and dots alone, as its topic; several numbers after ``--key`` are a list; all other words are the
    request's ``rest``. No file is read.

    Args:
        argv: the words.
        flags: the command's own, beside :data:`FLAGS`.
        command: its name.

    Raises:
        UserError: an unknown option, a setting without a value, two recipes, control characters, or ``resume``, which
            ``kd-train`` alone takes.
    """
    request = Request()
    items = list(argv)
    while items:
        item = items.pop(0)
        if item == "-c":  # as LightningCLI's
            item = "--config"
        match = KEY.match(item)
        if item.startswith("--") and item.endswith(".help"):
            request.flags.add("help")
            request.about = item[2:].removesuffix(".help")
        elif item in FLAGS or item in flags:
            request.flags.add("help" if item == "-h" else item.lstrip("-"))
            if item in ABOUT and items and re.fullmatch(r"[\w.]+", items[0]):
                request.about = items.pop(0)
        elif match and f"--{match[1]}" in flags:
            raise UserError(f"--{match[1]}: takes no value, got '{match[2]}'")
        elif match:
            _sort_in(request, underscored(match[1]), match[2])
        elif item.startswith("--") and items and not re.match(r"--|[A-Za-z_][\w.-]*\+?=", items[0]):
            values = [items.pop(0)]
            while items and all(re.fullmatch(r"\d+(\.\d+)?", one) for one in (*values, items[0])):
                values.append(items.pop(0))  # --input-size 3 224 224
            value = f"[{', '.join(values)}]" if values[1:] else values[0]
            _sort_in(request, underscored(item[2:]), value)
        elif item.endswith((".yaml", ".yml")):
            _sort_in(request, "recipe", item)
        elif item.startswith("-"):
            raise _no_option(item, command)
        else:
            request.rest.append(item)
    _check_resume(request.resume, command)
    return request


def _check_resume(run: str | None, command: str) -> None:
    """Refuses a run to resume for another command than ``kd-train``."""
    if run is not None and command != "train":
        raise UserError(f"resume: kd-{command} resumes no run, kd-train resume={run} does")


def underscored(key: str) -> str:
    """A key with underscores for hyphens, but for the names of teachers, losses and taps.

    >>> underscored("data.batch-size"), underscored("model.teachers.my-teacher.cache-views")
    ('data.batch_size', 'model.teachers.my-teacher.cache_views')
    """
    parts = key.split(".")
    for i, part in enumerate(parts):
        if i == 0 or parts[i - 1] not in NAMED:
            parts[i] = part.replace("-", "_")
    return ".".join(parts)


def _no_option(item: str, command: str) -> UserError:
    """The message for an option that is none: a setting without its value, or another program's."""
    key = underscored(item.lstrip("-"))
    if key in keys.schema():
        return UserError(f"{key}: a setting needs a value: {key}=...")
    may_be_key = len(key) > 1 and command == "train"
    question = as_question(f"{name}=..." for name in suggest(key, keys.schema()) if may_be_key)
    return UserError(
        f"no option {item}{why_needless(key) or question or f' (kd-{command} --help)'}"
    )


def merge(request: Request, settings: dict[str, str], where: str) -> None:
    """Adds settings that came another way (SageMaker's hyperparameters) to a command line.

    Args:
        request: the command line; is changed.
        settings: keys and values as on a command line; a list of overlays is JSON.
        where: they came from, for the message.

    Raises:
        UserError: one is on the command line as well, with another value; or one that is no key.
    """
    words = [item.split("=", 1) for item in request.named() if "=" in item]
    given = dict(words)
    for typed_key, value in settings.items():
        key = underscored(typed_key)
        content = read_word(value)
        if typed_key.startswith("-") or not KEY.match(f"{typed_key}="):
            raise UserError(f"{where}: no key '{typed_key}'")
        if key == "config":
            overlays = [value]
            if isinstance(content, list):
                overlays = [str(name) for name in content]
            request.overlays += [name for name in overlays if name not in request.overlays]
        elif key not in given:
            _sort_in(request, key, value)
        elif read_word(given[key]) != content:
            raise UserError(f"{key}: {given[key]} on the command line, but {value} in {where}")


def _sort_in(request: Request, key: str, value: str) -> None:
    """Puts one ``key=value`` of the command line where it belongs in the request; ``~/`` becomes the home folder.

    Raises:
        UserError: a second recipe, or control characters.
    """
    if value.startswith("~/"):  # a shell leaves it as it is behind "="
        value = str(Path(value).expanduser())
    content = read_word(value)
    if not isinstance(content, (dict, list)):
        content = value  # as text: YAML folds line breaks
    files.check_text({key: content})
    if key == "recipe":
        if request.recipe is not None:
            raise UserError(f"recipe is given twice: '{request.recipe}' and '{value}'")
        request.recipe = value
    elif key == "resume":
        check_meant(key, value)
        request.resume = value
    elif key in ("config", "trust"):
        (request.overlays if key == "config" else request.trust).append(value)
    else:
        request.overrides.append(f"{key}={value}")


def as_word(key: str, value: object) -> str:
    """The word ``key=value`` for ``kd-train``'s command line, which YAML reads as the same value.

    >>> as_word("optim.lr", 1e-5), as_word("data.size", [1, 2]), as_word("a", "B")
    ('optim.lr=1.0e-05', 'data.size=[1, 2]', 'a=B')

    Args:
        key: of a setting.
        value: a text, which is read as on a command line, or plain values.
    """
    if isinstance(value, str):
        return f"{key}={value}"
    text = yaml.dump(
        value, None, files.Dumper, default_flow_style=True, width=LINE, sort_keys=False
    )
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"
