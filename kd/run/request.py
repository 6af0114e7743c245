"""A command line, sorted by kind. Imports nothing heavy: a wrong word is reported at once."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from kd.errors import UserError
from kd.launch.sagemaker import CHANNEL, folder_of
from kd.run import files, keys
from kd.run.annotations import foreign, members
from kd.run.files import flatten
from kd.run.listed import kind_at
from kd.run.paths import (
    SETTINGS,
    check_no_files,
    find,
    holds_settings,
    implied,
    is_file,
    pairs,
    part_of,
    source_items,
)
from kd.run.trust import check_file, check_names, vouched
from kd.run.typed import check_values
from kd.run.unread import check_read
from kd.storage.elsewhere import text_of, yaml_of

GROUPS = ("data", "data.augment", "data.probe", "model", "model.student", "model.teacher", "optim", "trainer",
          "checkpoint", "monitor")  # fmt: skip
FLAGS = (
    "-h", "--alarms", "--alerts", "--dashboard", "--delete", "--describe", "--dry-run", "--help", "--json", "--keys",
    "--list", "--live", "--open", "--print_config", "--traces", "--trust", "--tune", "--version", "--what-if",
)  # fmt: skip
ABOUT = ("-h", "--help", "--keys", "--list")  # these may be followed by what to say more of
ENTRIES = (
    "taps",
    "teachers",
)  # named entries whose fields the parser takes only once the entry is there
TRUSTED = "--trusted="  # before all other items for the parser: what the user stands for
KEY = re.compile(r"^(?:--)?([A-Za-z_][\w.]*\+?)=(.*)$", re.S)


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
    cluster: list[str] = field(default_factory=list)
    """Trainer settings of the launcher; overrides win over them."""
    trust: list[str] = field(default_factory=list)
    """Modules whose classes a file from elsewhere may name."""
    flags: set[str] = field(default_factory=set)
    """Flags without their dashes."""
    about: str = ""
    """The topic of a flag: ``--list losses``, ``--keys lr``, ``--help data.augment``."""
    rest: list[str] = field(default_factory=list)
    """All other words."""
    here: bool = True
    """Whether it runs on this machine, where ``channel:NAME`` has a folder."""
    vouched: list[str] = field(default_factory=list)
    """What the user trusts beside the list of classes, known once the files are read."""

    def parser_args(self) -> list[str]:
        """Arguments for the parser: trusted class paths, then recipe, overlays, overrides in rising priority.

        Raises:
            UserError: a file that is missing, is not YAML, or names code that the user does not trust.
        """
        contents, trees = self._checked()
        args = [TRUSTED + name for name in self.vouched]
        args += [
            f"--config={config_argument(f, content if self.here else {})}"
            for f, content in contents.items()
        ]
        if self.recipe and next(iter(contents.values())).get("recipe") is None:
            args.append(f"--recipe={next(iter(contents)).stem}")
        overrides = [
            _with_folders(item, t if self.here else {})
            for item, t in zip(self.overrides, trees, strict=True)
        ]
        return (
            args
            + self.cluster
            + [f"--{item}" for item in _entries_whole(overrides, contents.values())]
        )

    def recipe_lr(self) -> float | None:
        """The learning rate of the recipe's own file, without overlays and overrides; None where it has none."""
        optim = files.read(find("recipes", self.recipe)).get("optim") if self.recipe else None
        rate = optim.get("lr") if isinstance(optim, dict) else None
        try:
            return None if rate is None else float(rate)  # YAML 1.1 takes 1e-3 for text
        except (TypeError, ValueError):
            return None

    def over(self, file: Path | None) -> dict[str, Any]:
        """Resolved settings (a run folder's ``config.yaml``; None: none) with the overrides put in: plain values."""
        self.recipe = str(file) if file else None
        contents, trees = self._checked()
        whole: Any = keys.merged([{"data": {}, "model": {}}, *contents.values()], {})
        for tree in trees:
            for key, value in tree.items():
                _put(whole, key, self._of_file(key, value))
        if any("${" in str(value) for _, value in files.leaves(whole)):
            from omegaconf import OmegaConf

            whole = OmegaConf.to_container(OmegaConf.create(whole), resolve=True)
            if file and "trust" not in self.flags:
                check_file(file, whole, self.trust)
        return whole

    def _of_file(self, key: str, value: object) -> object:
        """What a setting is given: the content of a YAML file where it names one, else the value itself."""
        file = Path(str(value))
        takes_file = (
            holds_settings(keys.plain(key)) or kind_at(key) or key.partition(".")[0] == "students"
        )
        if not (takes_file and file.suffix in SETTINGS and is_file(str(value))):
            return value
        content = files.read(file)
        check_names(content, f"{file}: ")
        if "trust" not in self.flags:
            check_file(file, {key: content}, self.trust)
        return content

    def _checked(self) -> tuple[dict[Path, dict[Any, Any]], list[dict[str, Any]]]:
        contents = {file: files.read(file) for file in self._files()}
        for file, content in contents.items():
            files.check_text(content, f"{file}: ")
            check_names(content, f"{file}: ")
            for group in GROUPS:
                if not isinstance(content.get(group) or {}, dict):
                    raise UserError(
                        f"{file}: {group}: must be a group of settings, got '{content[group]}'"
                    )
        overrides: list[str] = []
        for item in self.overrides:
            overrides += source_items(item, contents.values())
        self.overrides = implied(overrides, contents.values()) + overrides
        check_no_files(pairs(contents.values(), self.overrides))
        trees = self._trees(contents.values())
        for tree in trees:
            files.check_text(tree)
            check_names(tree)
            _check_says_something(*next(iter(tree.items())))
        typed: dict[str, Any] = {}
        for tree in trees:
            typed |= tree
        self._check_keys(list(contents.values()), typed)
        if "trust" not in self.flags:
            for file, content in contents.items():
                check_file(file, content, self.trust)
            for tree in trees:
                for key, value in files.leaves(tree):
                    self._of_file(key, value)
        self.vouched = vouched(contents, trees, self.trust, "trust" in self.flags)
        return contents, trees

    def _trees(self, contents: Iterable[dict[Any, Any]]) -> list[dict[str, Any]]:
        """The overrides as ``{key: value}``, one each, with the types that their keys have."""
        texts: list[tuple[str, str]] = []
        values: dict[str, Any] = {}
        for item in self.overrides:
            key, _, text = item.partition("=")
            texts.append((key, text))
            values[key.rstrip("+")] = _read(text)
        settings = keys.merged([*contents], values)
        keys_of_classes, _ = keys.of_recipe(settings)
        known = {**keys.schema(), **keys_of_classes}
        return [{key: _typed(key, text, known)} for key, text in texts]

    def value_of(self, key: str) -> str | None:
        """The value that ``key=value`` items give a key, the last one; None without any."""
        for item in reversed(self.overrides):
            if item.startswith(f"{key}="):
                return item.split("=", 1)[1]
        return None

    @property
    def trusted(self) -> list[str]:
        """What the user trusts, as words of a command line, to pass on to another process."""
        return [
            *(f"trust={module}" for module in self.trust),
            *(["--trust"] if "trust" in self.flags else []),
        ]

    def check_read(self) -> dict[str, Any]:
        """Refuses settings that no part of a run would read, and returns all (:func:`kd.run.unread.check_read`)."""
        contents = [files.read(file) for file in self._files()]
        typed: dict[str, Any] = {}
        for tree in self._trees(contents):
            typed |= tree
        if self.resume:
            typed["resume"] = self.resume
        return check_read(contents, typed)

    def _files(self) -> list[Path]:
        """The recipe and the overlays, in rising priority."""
        paths = [find("recipes", self.recipe)] if self.recipe else []
        for overlay in self.overlays:
            paths.append(find("configs", overlay))
            paths += part_of(overlay, self.recipe or "")
        return paths

    def _check_keys(self, contents: list[dict[Any, Any]], given: dict[str, Any]) -> None:
        for number, content in enumerate(contents, 1):
            names = [key for key, _ in files.leaves(content)]
            settings_so_far = keys.merged(
                contents[:number], {}
            )  # a later file may name another class, with other keys
            _check(names, flatten(content), settings_so_far)
        values: dict[str, Any] = {}
        replaced: dict[str, Any] = {}
        for key, value in given.items():
            values |= flatten(value, key)
            replaced[key.rstrip("+")] = value
        _check([*given], values, keys.merged(contents, replaced))


def _check(names: list[str], values: dict[str, Any], whole: dict[str, Any]) -> None:
    model = whole.get("model")
    losses = model.get("distill_losses") if isinstance(model, dict) else None
    known = {**keys.schema(), **keys.of_recipe(whole)[0]}
    check_values(values.items(), known, losses if isinstance(losses, dict) else ())
    keys.check(names, whole)


def config_argument(file: Path, content: dict[Any, Any]) -> str:
    """What the parser reads in a file's place: its text, with folders in the place of ``channel:NAME``, or its path.

    The path is passed only where the file names other YAML files, which are found beside it: the parser changes the
    working folder of the whole process while it reads a path.

    Args:
        file: the recipe or overlay.
        content: its settings; empty where its text is taken as it is.
    """
    text = text_of(file)
    text_with_folders = _with_folders(text, content)
    names_files = any(str(value).endswith(SETTINGS) for _, value in files.leaves(content))
    if text_with_folders == text and (names_files or not content):
        return str(file)
    return text_with_folders


def _with_folders(text: str, content: dict[Any, Any]) -> str:
    found = {value for _, value in files.leaves(content) if str(value).startswith(CHANNEL)}
    for value in sorted(found, reverse=True):  # ``channel:ab`` before ``channel:a``
        text = text.replace(value, folder_of(value))
    return text


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    """Puts a value into resolved settings: of a class into its arguments; another class keeps those that it has too.

    >>> tree = {"data": {"source": {"class_path": "kd.data.sources.ImageFolder", "init_args": {"root": "a"}}}}
    >>> _put(tree, "data.source.root", "b")
    >>> tree["data"]["source"]["init_args"]
    {'root': 'b'}
    """
    name, _, rest = key.partition(".")
    if "class_path" in tree and name not in ("class_path", "init_args", "dict_kwargs"):
        tree = tree.setdefault("init_args", {})
    if rest:
        if not isinstance(tree.get(name), dict):
            tree[name] = {"class_path": tree[name]} if isinstance(tree.get(name), str) else {}
        _put(tree[name], rest, value)
    elif name.endswith("+"):
        tree[name[:-1]] = [
            *(tree.get(name[:-1]) or []),
            *(value if isinstance(value, list) else [value]),
        ]
    elif isinstance(value, str) and "class_path" in (tree.get(name) or {}):
        tree[name] = {**tree[name], "class_path": value}
    else:
        tree[name] = value


def _entries_whole(overrides: list[str], contents: Iterable[dict[Any, Any]]) -> list[str]:
    """``model.taps.NAME.student=X model.taps.NAME.teacher=Y`` makes one entry where no file has one of that name."""
    there = {item.split("=")[0] for item in overrides}
    for model, kind in ((c.get("model") or {}, kind) for c in contents for kind in ENTRIES):
        there |= {f"model.{kind}.{name}" for name in model.get(kind) or {}}
    made: dict[str, dict[str, Any]] = {}
    whole: list[str] = []
    for item in overrides:
        key, _, value = item.partition("=")
        entry, rest = ".".join(key.split(".")[:3]), key.split(".")[3:]
        if (
            not (rest and key.split(".")[:2] in [["model", kind] for kind in ENTRIES])
            or entry in there
        ):
            whole.append(item)
            continue
        if entry not in made:
            whole.append(entry)
        node = made.setdefault(entry, {})
        for part in rest[:-1]:
            node = node.setdefault(part, {})
        node[rest[-1]] = _read(value)
    return [f"{item}={json.dumps(made[item])}" if item in made else item for item in whole]


def _check_says_something(key: str, value: object) -> None:
    if value == {} and key in GROUPS:  # what is merged key by key takes nothing from it
        raise UserError(f"{key}: {{}} sets nothing")
    if key == "runs_dir" and not value:
        raise UserError("runs_dir: must name a folder, got nothing")


def _typed(key: str, text: str, known: Mapping[str, keys.Key]) -> object:
    """A word's value; text where the key takes text alone: a folder may be called 007 or [a, b]."""
    own = known.get(re.sub(r"^model\.teachers\.[^.]+", "model.teacher", keys.plain(key)))
    value = _read(text)
    if own is None or value is None:
        return value
    takes_text_alone = set(members(own.kind)) <= {str, foreign("Path"), NoneType}
    return text if takes_text_alone else value


def _read(text: str) -> object:
    try:
        return yaml_of(text)
    except ValueError:  # the parser says what is wrong
        return text


def translate(argv: Sequence[str]) -> Request:
    """Sorts a command line: ``key=value``, ``--key=value`` and ``--key value`` mean the same, in any order."""
    request, items = Request(), list(argv)
    while items:
        item = items.pop(0)
        if item in FLAGS:
            request.flags.add("help" if item == "-h" else item.lstrip("-"))
            if item in ABOUT and items and re.fullmatch(r"[\w.]+", items[0]):
                request.about = items.pop(0)
            continue
        match = KEY.match(item)
        if match:
            key, value = match.groups()
        elif (
            item.startswith("--")
            and items
            and not (KEY.match(items[0]) or items[0].startswith("--"))
        ):
            key, value = item[2:], items.pop(0)
        elif item.endswith((".yaml", ".yml")):
            key, value = "recipe", item
        elif item.startswith("-"):
            raise UserError(
                f"no option {item} (kd-train --help); a setting needs a value: {item.lstrip('-')}=..."
            )
        else:
            request.rest.append(item)
            continue
        _sort_in(request, key, value)
    return request


def merge(request: Request, settings: dict[str, str], where: str) -> None:
    """Adds settings that came another way to a command line.

    Args:
        request: the command line.
        settings: keys and values as on a command line; a list of overlays is JSON.
        where: they came from, for the message.

    Raises:
        UserError: one is on the command line as well, with another value.
    """
    given = dict(item.split("=", 1) for item in request.overrides)
    given |= {
        key: value
        for key, value in (("recipe", request.recipe), ("resume", request.resume))
        if value
    }
    for key, value in settings.items():
        if not re.fullmatch(r"[A-Za-z_][\w.]*\+?", key):
            raise UserError(f"{where}: no key '{key}'")
        if key == "config":
            found = _read(value)
            overlays = [str(name) for name in found] if isinstance(found, list) else [value]
            request.overlays += [name for name in overlays if name not in request.overlays]
        elif key not in given:
            _sort_in(request, key, value)
        elif _read(given[key]) != _read(value):
            raise UserError(f"{key}: {given[key]} on the command line, but {value} in {where}")


def _sort_in(request: Request, key: str, value: str) -> None:
    found = _read(value)
    files.check_text(
        {key: found if isinstance(found, (dict, list)) else value}
    )  # as text: YAML folds line breaks
    if key == "recipe":
        if request.recipe is not None:
            raise UserError(f"recipe is given twice: '{request.recipe}' and '{value}'")
        request.recipe = value
    elif key == "resume":
        request.resume = value
    elif key in ("config", "trust"):
        (request.overlays if key == "config" else request.trust).append(value)
    else:
        if value.startswith("~/"):  # a shell leaves it as it is behind "="
            value = str(Path(value).expanduser())
        request.overrides.append(f"{key}={value}")
