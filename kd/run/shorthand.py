"""Words of a command line in full: pictures by their folder or list, an architecture without another's arguments, and what
follows from pictures with several labels, or numbers, where a recipe is for one label.

A recipe's losses and augmentations are exchanged for those that are defined for the task; what is typed stays, and is
refused where it does not fit (:class:`kd.settings.Settings`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config.parts import class_of, listed
from kd.data.info import LISTS
from kd.errors import UserError
from kd.run import files
from kd.run.paths import SETTINGS
from kd.run.resolve import Value, merged, words_of
from kd.settings import ALLOWED_LOSSES, loss_refused_by
from kd.storage.objects import is_url
from kd.storage.weights_files import FILES

SOURCE = "data.source"
LOSSES = "model.distill_losses"
TEACHER = r"model\.(teacher|teachers\.[^.]+)"
"""The keys of teachers."""
PICTURES_WITH = {"MultiLabel": "several labels", "Regression": "numbers"}
"""The tasks that exchange a recipe's settings: by the name of their class what pictures are labelled with, for messages."""


def written_out(
    overrides: Sequence[str], contents: Sequence[Mapping[Any, Any]]
) -> tuple[list[str], list[str]]:
    """Words of a command line with all that they imply, in the order in which they count.

    Args:
        overrides: ``key=value``, as typed.
        contents: the settings of the recipe and of overlays, in rising priority.

    Returns:
        The words, with those that say the same in full in the place of short ones, and more words before and after them;
        of two words for one key the later one counts. And lines that report what follows from the task.

    Raises:
        UserError: a folder that is missing, a file that is no list of pictures, or answers that are neither a folder nor
            a class.
    """
    files_say = merged(contents)
    source_path = str(at(files_say, f"{SOURCE}.class_path") or "")
    words: list[str] = []
    notes: list[str] = []
    for word in overrides:
        key = word.partition("=")[0]
        if key == SOURCE:
            words += _source(word, source_path)
        elif key.endswith(".answers"):
            words += _answers(word)
        elif re.fullmatch(rf"{TEACHER}|model\.student", key):
            of_model = _model(word)
            words += of_model
            notes += [f"{word}: {' '.join(of_model)}"] if of_model != [word] else []
        else:
            words.append(word)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names_list = given.get(f"{SOURCE}.train", "").lower().endswith(LISTS)
    if (
        names_list
        and SOURCE not in given
        and class_of(at(files_say, SOURCE)) in ("", "ImageFolder")
    ):
        words.insert(0, f"{SOURCE}=Manifest")
    tree = merged([*contents, *words_of(words)])
    task, implied = _words_of_task(given, files_say, tree, names_list)
    reported = [word for word in implied if not word.startswith("data.source.multi_label")]
    if reported and task in PICTURES_WITH:
        notes += [f"{' '.join(reported)}, as the pictures have {PICTURES_WITH[task]}"]
    return [*_without_arguments(given, files_say), *words, *implied], notes


def at(settings: Mapping[str, Any], key: str) -> Value:
    """The value at a dotted key of nested settings; None for a key that is not there."""
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _words_of_task(
    given: Mapping[str, str],
    files_say: Mapping[str, Any],
    tree: Mapping[str, Any],
    names_list: bool,
) -> tuple[str, list[str]]:
    """The task, and the words ``KEY=VALUE`` that follow from the task, or from several labels or numbers in a list.

    Args:
        given: words of the command line, by key.
        files_say: the settings of recipe and overlays, merged.
        tree: the same with the command line's.
        names_list: the command line names the list of pictures.

    Returns:
        The short name of its class; no word of a key that the command line gives, none where the task is the recipe's and
        no list needs more.
    """
    words: list[str] = []
    of_files = class_of(at(files_say, "model.task")) or "Classification"
    task = class_of(at(tree, "model.task")) or of_files
    is_manifest = class_of(at(tree, SOURCE)) == "Manifest"
    arguments = at(tree, f"{SOURCE}.init_args") or {}
    label = arguments.get("label_column") or "label"
    if (
        is_manifest
        and task == "Classification"
        and not given.keys() & {"model.task", "model.task.class_path"}
    ):
        if arguments.get("targets"):
            task = "Regression"
        elif arguments.get("multi_label") or isinstance(label, list):
            task = "MultiLabel"
        words += [f"model.task={task}"] if task != "Classification" else []
    if task == "MultiLabel" and is_manifest and f"{SOURCE}.multi_label" not in given:
        words.append(f"{SOURCE}.multi_label=true")
    if task == "Regression" and names_list and not arguments.get("targets"):
        # a table without a header has columns without names
        words += [] if str(label).isdecimal() else [f"{SOURCE}.targets=[{label}]"]
    if task == of_files or task not in PICTURES_WITH:
        return task, words
    for key in ("data.augment.mixup", "data.augment.cutmix"):
        if key not in given and at(files_say, key):
            words.append(f"{key}=0")
    if at(tree, "model.student.head") is False or given.keys() & {LOSSES, "model"}:
        return task, words
    for name, loss in (at(files_say, LOSSES) or {}).items():
        key = f"{LOSSES}.{name}"
        is_typed = given.keys() & {key, f"{key}.class_path"}
        if not is_typed and loss_refused_by(task, class_of(loss)):
            words.append(f"{key}={ALLOWED_LOSSES[task][0]}")
    return task, words


def _answers(word: str) -> list[str]:
    """``model.teacher.answers=PLACE`` as the class that gives the answers, and its argument; any other word as it is.

    Args:
        word: ``model.teacher.answers=PLACE`` or ``model.teachers.NAME.answers=PLACE``: a folder or URL that ``kd-cache
            from=`` has filled, or the class path of a teacher of one's own.

    Raises:
        UserError: none of these.
    """
    key, _, place = word.partition("=")
    if not re.fullmatch(rf"{TEACHER}\.answers", key):
        return [word]
    teacher = key.removesuffix(".answers")
    builder = f"{teacher}.builder"
    # the recipe's own teacher is not used
    words = [f"{teacher}.checkpoint=null", f"{teacher}.recipe=null"]
    if re.match(r"https?://", place) or place.endswith((".csv", ".parquet", ".safetensors")):
        raise UserError(
            f"{key}: training asks no address and reads no file; kd-cache recipe=NAME from={place} stores the answers, "
            "and prints the folder to name here"
        )
    if is_url(place) or Path(place).is_dir():
        return [*words, f"{builder}=StoredAnswers", f"{builder}.folder={place}"]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", place):
        return [*words, f"{builder}={place}"]
    raise UserError(
        f"{key}: must be a folder that kd-cache from=PLACE has filled, or a class path, got '{place}'"
    )


def _model(word: str) -> list[str]:
    """``model.teacher=PLACE``, or a student's, as the settings that load it; any other word as it is.

    Args:
        word: ``key=value``: a file or folder of weights, ``timm/NAME`` (timm's pre-trained weights), or the name of a
            model of transformers on the hub, ``OWNER/NAME``; both may begin with ``hf-hub:``.
    """
    key, _, place = word.partition("=")
    if place.startswith("{"):
        return [word]
    hub = re.fullmatch(r"(?:hf[-_]hub:)?([\w-]+)/([\w.-]+)", place)
    if is_url(place) or place.endswith(FILES) or Path(place).exists():
        return [f"{key}.checkpoint={place}"]
    if hub is None:
        return [word]
    words = [f"{key}.checkpoint=null"]  # the recipe's own is not used
    if key != "model.student":
        words.append(f"{key}.recipe=null")
    if hub[1] == "timm":
        return [*words, f"{key}.arch={hub[2]}", f"{key}.kwargs={{}}", f"{key}.pretrained=true"]
    builder = f"{key}.builder"
    return [*words, f"{builder}=HuggingFaceBuilder", f"{builder}.path={hub[1]}/{hub[2]}"]


def as_typed(message: str, words: Sequence[str]) -> str:
    """A message with ``model.teacher.answers`` in the place of the ``builder`` that it has become, where that was typed.

    Args:
        message: of a user's error; it begins with its key.
        words: of the command line, as they were typed.

    >>> as_typed("model.teacher.builder: no class 'a.B'", ["model.teacher.answers=a.B"])
    "model.teacher.answers: no class 'a.B'"
    """
    for word in words:
        typed = re.match(r"(?:--)?(model\.(?:teacher|teachers\.[^.=]+))\.answers=", word)
        if typed is None:
            continue
        builder = f"{typed[1]}.builder"
        if message.startswith((f"{builder}: ", f"{builder} ")):
            return f"{typed[1]}.answers{message.removeprefix(builder)}"
    return message


def _source(word: str, source_path: str) -> list[str]:
    """``data.source=FILE.csv`` and ``data.source=DIR`` as a class and its argument; any other word as it is.

    A recipe's source that :attr:`~kd.data.sources.Source.takes_folder` gets the folder as its argument alone.

    Args:
        word: ``key=value``.
        source_path: the class of the files' ``data.source``; "" without one.

    Raises:
        UserError: a YAML file that names no source, or a folder that is not there.
    """
    path = word.partition("=")[2]
    if path.startswith("{") or listed(path, "source"):
        return [word]
    if path.endswith(SETTINGS):
        if Path(path).is_file() and "class_path" not in files.read(Path(path)):
            raise UserError(
                f"{SOURCE}: {path} names no source (class_path); give the pictures' folder, or a list of "
                f"them ({', '.join(LISTS)})"
            )
        return [word]
    if path.lower().endswith(LISTS):
        return [f"{SOURCE}=Manifest", f"{SOURCE}.train={path}"]
    if not (is_url(path) or Path(path).is_dir()):
        if "/" in path and not Path(path).exists():
            raise UserError(f"{SOURCE}: folder {path} not found")
        return [word]
    from kd.data.sources import class_at

    kind = class_at(source_path)
    if kind is not None and kind.takes_folder:
        return [f"{SOURCE}.root={path}"]
    name = "ImageFolder"
    if Path(path, "train.json").is_file():
        name = "Shards"
    return [f"{SOURCE}={name}", f"{SOURCE}.root={path}"]


def _without_arguments(given: Mapping[str, str], files_say: Mapping[str, Any]) -> list[str]:
    """A word ``GROUP.kwargs={}`` for each model whose typed ``arch`` is of another family than the files': their
    ``kwargs`` are for that one. It comes before the typed words, so typed ``kwargs`` count.

    Args:
        given: words of the command line, by key.
        files_say: the files' settings.
    """
    words: list[str] = []
    for key, arch in given.items():
        place, _, name = key.rpartition(".")
        model = at(files_say, place)
        if name != "arch" or not isinstance(model, dict) or not model.get("kwargs"):
            continue
        if _family(arch) != _family(str(model.get("arch"))):
            words.append(f"{place}.kwargs={{}}")
    return words


def _family(arch: str) -> str:
    """The first letters of an architecture's name: ``vit`` of ``vit_tiny_patch16_224``."""
    letters = re.search("[a-z]+", arch.rpartition("/")[2])
    return letters[0] if letters else ""
