"""Words of a command line in full: pictures by their folder or list, an architecture without another's arguments, and what
follows from pictures with several labels, or numbers, where a recipe is for one label.

A recipe's losses and augmentations are exchanged for those that are defined for the task; what is typed stays, and is
refused where it does not fit (:class:`kd.settings.Settings`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config.parts import class_of, listed_class
from kd.data.info import LISTS
from kd.errors import UserError
from kd.run.resolve import Value, merged, words_of
from kd.settings import ALLOWED_LOSSES, loss_refused_by
from kd.storage.objects import is_url
from kd.storage.weights_files import FILES

SOURCE = "data.source"
LOSSES = "model.distill_losses"
MIXING = ("data.augment.mixup", "data.augment.cutmix")
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
        UserError: a folder that is missing, or answers that are neither a folder nor a class.
    """
    files_say = merged(contents)
    of_files = class_of(_at(files_say, SOURCE))
    words: list[str] = []
    notes: list[str] = []
    for word in overrides:
        key, _, place = word.partition("=")
        full = [word]
        if key == SOURCE:
            full = _source(place, of_files)
        elif re.fullmatch(rf"{TEACHER}\.answers", key):
            full = _answers(key, place)
        elif re.fullmatch(rf"{TEACHER}|model\.student", key):
            full = _model(key, place)
            notes += [f"{word}: {' '.join(full)}"] if full != [word] else []
        words += full
    given = dict(word.split("=", 1) for word in words)
    names_list = given.get(f"{SOURCE}.train", "").lower().endswith(LISTS)
    if names_list and SOURCE not in given and of_files in ("", "ImageFolder"):
        words.insert(0, f"{SOURCE}=Manifest")
    tree = merged([*contents, *words_of(words)])
    task, implied = _of_task(given, files_say, tree, names_list)
    reported = [word for word in implied if not word.startswith("data.source.multi_label")]
    if reported:
        notes.append(f"{' '.join(reported)}, as the pictures have {PICTURES_WITH[task]}")
    first = _without_arguments(given, files_say)
    return [*first, *words, *implied], notes


def _at(settings: Mapping[str, Any], key: str) -> Value:
    """The value at a dotted key of nested settings; None for a key that is not there."""
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _of_task(
    given: Mapping[str, str],
    files_say: Mapping[str, Any],
    tree: Mapping[str, Any],
    names_list: bool,
) -> tuple[str, list[str]]:
    """The task, and the words ``KEY=VALUE`` that follow from it, or from several labels or numbers in a list.

    Args:
        given: words of the command line, by key.
        files_say: the settings of recipe and overlays, merged.
        tree: the same with the command line's.
        names_list: the command line names the list of pictures.

    Returns:
        The short name of its class; no word of a key that the command line gives, none where the task is the recipe's and
        no list needs more. In the places of settings of the recipe that the task does not take are those that it does.
    """
    words: list[str] = []

    def add(key: str, value: object) -> None:
        if not given.keys() & {key, f"{key}.class_path"}:
            words.append(f"{key}={value}")

    of_files = class_of(_at(files_say, "model.task")) or "Classification"
    task = class_of(_at(tree, "model.task")) or of_files
    arguments = _at(tree, f"{SOURCE}.init_args") or {}
    label = arguments.get("label_column") or "label"
    is_manifest = class_of(_at(tree, SOURCE)) == "Manifest"
    is_typed = given.keys() & {"model.task", "model.task.class_path"}
    if is_manifest and task == "Classification" and not is_typed:
        if arguments.get("targets"):
            task = "Regression"
        elif arguments.get("multi_label") or isinstance(label, list):
            task = "MultiLabel"
    if task not in PICTURES_WITH:
        return task, []
    if not is_typed and task != of_files:
        add("model.task", task)
    if is_manifest and task == "MultiLabel":
        add(f"{SOURCE}.multi_label", "true")
    # a table without a header has columns without names
    has_columns = names_list and not str(label).isdecimal()
    if task == "Regression" and has_columns and not arguments.get("targets"):
        add(f"{SOURCE}.targets", f"[{label}]")
    keeps_losses = _at(tree, "model.student.head") is False or given.keys() & {LOSSES, "model"}
    for key, value in _exchanged(task, files_say).items():
        if task != of_files and not (keeps_losses and key.startswith(LOSSES)):
            add(key, value)
    return task, words


def _exchanged(task: str, files_say: Mapping[str, Any]) -> dict[str, object]:
    """The settings of files that a task does not take, and in their places those that it does."""
    exchanged: dict[str, object] = {}
    for key in MIXING:
        if _at(files_say, key):
            exchanged[key] = 0
    losses = _at(files_say, LOSSES) or {}
    for name, loss in losses.items():
        if loss_refused_by(task, class_of(loss)):
            exchanged[f"{LOSSES}.{name}"] = ALLOWED_LOSSES[task][0]
    return exchanged


def _answers(key: str, place: str) -> list[str]:
    """``model.teacher.answers=PLACE`` as the class that gives the answers, and its argument.

    Args:
        key: ``model.teacher.answers`` or ``model.teachers.NAME.answers``.
        place: a folder or URL that ``kd-cache from=`` has filled, or the class path of a teacher of one's own.

    Raises:
        UserError: none of these.
    """
    teacher = key.removesuffix(".answers")
    # the recipe's own teacher is not used
    words = [f"{teacher}.checkpoint=null", f"{teacher}.recipe=null"]
    if re.match(r"https?://", place) or place.endswith((".csv", ".parquet", ".safetensors")):
        raise UserError(
            f"{key}: training asks no address and reads no file; kd-cache recipe=NAME from={place} stores the answers, "
            "and prints the folder to name here"
        )
    if is_url(place) or Path(place).is_dir():
        return [*words, f"{teacher}.builder=StoredAnswers", f"{teacher}.builder.folder={place}"]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", place):
        return [*words, f"{teacher}.builder={place}"]
    raise UserError(
        f"{key}: must be a folder that kd-cache from=PLACE has filled, or a class path, got '{place}'"
    )


def _model(key: str, place: str) -> list[str]:
    """``model.teacher=PLACE``, or a student's, as the settings that load it; any other word as it is.

    Args:
        key: of the model.
        place: a file or folder of weights, ``timm/NAME`` (timm's pre-trained weights), or the name of a model of
            transformers on the hub, ``OWNER/NAME``; both may begin with ``hf-hub:``.
    """
    hub = re.fullmatch(r"(?:hf[-_]hub:)?([\w-]+)/([\w.-]+)", place)
    is_plain = not place.startswith("{")
    if is_plain and (is_url(place) or place.endswith(FILES) or Path(place).exists()):
        return [f"{key}.checkpoint={place}"]
    if hub is None:
        return [f"{key}={place}"]
    # the recipe's own is not used
    words = [f"{key}.checkpoint=null"]
    if key != "model.student":
        words.append(f"{key}.recipe=null")
    if hub[1] == "timm":
        return [*words, f"{key}.arch={hub[2]}", f"{key}.kwargs={{}}", f"{key}.pretrained=true"]
    builder = f"{key}.builder"
    return [*words, f"{builder}=HuggingFaceBuilder", f"{builder}.path={hub[1]}/{hub[2]}"]


def _source(place: str, of_files: str) -> list[str]:
    """``data.source=FILE.csv`` and ``data.source=DIR`` as a class and its argument; any other word as it is.

    Args:
        place: a list, a folder, a URL, or a class.
        of_files: the files' source, by its class; one that :attr:`~kd.data.sources.Source.takes_folder` gets the folder as
            its argument alone.

    Raises:
        UserError: a folder that is not there.
    """
    if place.startswith("{") or listed_class(place, "source"):
        return [f"{SOURCE}={place}"]
    if place.lower().endswith(LISTS):
        return [f"{SOURCE}=Manifest", f"{SOURCE}.train={place}"]
    if not (is_url(place) or Path(place).is_dir()):
        if "/" in place and not Path(place).exists():
            raise UserError(f"{SOURCE}: folder {place} not found")
        return [f"{SOURCE}={place}"]
    from kd.data.sources import class_at

    root = f"{SOURCE}.root={place}"
    source = class_at(f"kd.data.sources.{of_files}") if of_files else None
    if source is not None and source.takes_folder:
        return [root]
    name = "Shards" if Path(place, "train.json").is_file() else "ImageFolder"
    return [f"{SOURCE}={name}", root]


def _without_arguments(given: Mapping[str, str], files_say: Mapping[str, Any]) -> list[str]:
    """A word ``GROUP.kwargs={}`` for each model whose typed ``arch`` is of another family (``vit``) than the files': their
    ``kwargs`` are for that one. It comes before the typed words, so typed ``kwargs`` count.

    Args:
        given: words of the command line, by key.
        files_say: the files' settings.
    """
    words: list[str] = []
    for key, arch in given.items():
        place = key.removesuffix(".arch")
        model = _at(files_say, place)
        has_arguments = place != key and isinstance(model, dict) and model.get("kwargs")
        if has_arguments and _family(arch) != _family(str(model.get("arch"))):
            words.append(f"{place}.kwargs={{}}")
    return words


def _family(arch: str) -> str:
    """The first letters of an architecture's name.

    >>> _family("timm/vit_tiny_patch16_224"), _family("resnet18")
    ('vit', 'resnet')
    """
    letters = re.search("[a-z]+", arch.rpartition("/")[2])
    return letters[0] if letters else ""
