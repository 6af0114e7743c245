"""Settings that follow from what pictures are labelled with: several labels, or numbers, where a recipe is for one label.

A recipe's losses and augmentations are exchanged for those that are defined for the task; what is typed stays, and is
refused where it does not fit (:mod:`kd.run.checks`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kd.run.checks import ALLOWED_LOSSES, class_of, loss_refused_by
from kd.storage.elsewhere import yaml_of

TASK = "model.task"
LOSSES = "model.distill_losses"
MIXING = ("data.augment.mixup", "data.augment.cutmix")
SEVERAL = "data.source.multi_label"
NUMBERS = "data.source.targets"
LABEL = "data.source.label_column"
OFF = ("", "null", "false", "[]")
"""Texts that switch an argument off."""
PICTURES_WITH = {"MultiLabel": "several labels", "Regression": "numbers"}
"""The tasks that exchange a recipe's settings: by the name of their class what pictures are labelled with, for messages."""


def words_of_task(
    given: Mapping[str, str], files_say: Mapping[str, Any], source_name: str, is_list: bool
) -> list[str]:
    """The words ``KEY=VALUE`` that follow from the task, or from several labels or numbers in a list.

    Args:
        given: words of the command line, by key.
        files_say: the settings of recipe and overlays, merged.
        source_name: the class of ``data.source``, without its package; "" without one.
        is_list: the pictures are in a list that the command line names.

    Returns:
        None of a key that the command line gives; [] where the task is the recipe's and no list needs more.
    """
    words: list[str] = []
    of_files = class_of(at(files_say, TASK)) or "Classification"
    task = _task_of(given)
    if not task and of_files == "Classification" and source_name == "Manifest":
        task = _task_of_list(given)
        if task:
            words.append(f"{TASK}={task}")
    reads_list = is_list or source_name == "Manifest"
    if (task or of_files) == "MultiLabel" and reads_list and SEVERAL not in given:
        words.append(f"{SEVERAL}=true")
    names_numbers = NUMBERS in given or at(files_say, "data.source.init_args.targets")
    if (task or of_files) == "Regression" and is_list and not names_numbers:
        column = given.get(LABEL, "label")
        if not column.isdecimal():  # of a table without a header, whose columns have no names
            words.append(f"{NUMBERS}=[{column}]")
    if task in PICTURES_WITH:
        for key in MIXING:
            if key not in given and at(files_say, key):
                words.append(f"{key}=0")
        words += _losses_of_task(task, given, files_say)
    return words


def note_on_task(typed: Sequence[str], written: Sequence[str]) -> list[str]:
    """A list of one line, which reports the words that follow from a task of several labels or numbers; [] without any.

    Args:
        typed: ``KEY=VALUE``, as on the command line.
        written: the same with all that they imply; a task that a recipe's file has is not among them, and not reported.
    """
    given = {}
    implied = []
    of_task = (f"{TASK}=", f"{NUMBERS}=", *MIXING, f"{LOSSES}.")
    for word in written:
        key, _, value = word.partition("=")
        given[key] = value
        if word not in typed and word.startswith(of_task):
            implied.append(word)
    task = _task_of(given)
    if not implied or task not in PICTURES_WITH:
        return []
    words = " ".join(implied)
    return [f"{words}, as the pictures have {PICTURES_WITH[task]}"]


def at(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested settings; None for a key that is not there."""
    value: Any = settings
    for name in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = None
    return value


def _task_of(given: Mapping[str, str]) -> str:
    """The short name of the task's class that the command line gives; "" without one.

    >>> _task_of({"model.task": "kd.tasks.MultiLabel"}), _task_of({"model.task": '{"class_path": "Regression"}'})
    ('MultiLabel', 'Regression')
    """
    text = given.get(TASK, given.get(f"{TASK}.class_path", ""))
    if text.startswith("{"):
        content = None
        with suppress(ValueError):  # no YAML: the types refuse the text later, by its key
            content = yaml_of(text)
        if isinstance(content, Mapping):
            text = str(content.get("class_path"))
    return text.rpartition(".")[2]


def _task_of_list(given: Mapping[str, str]) -> str:
    """The task that a list's typed arguments are for; "" where these are for one label a picture."""
    if given.get(NUMBERS, "") not in OFF:
        return "Regression"
    if given.get(SEVERAL, "").lower() not in (*OFF, "0", "no") or given.get(LABEL, "")[:1] == "[":
        return "MultiLabel"
    return ""


def _losses_of_task(task: str, given: Mapping[str, str], files_say: Mapping[str, Any]) -> list[str]:
    """Words that put the likeliest loss of the task in the place of each loss of the recipe that the task refuses.

    Typed losses stay; [] also where the command line gives all losses, the whole model, or no classifier.

    Args:
        task: a key of :data:`PICTURES_WITH`.
        given: words of the command line, by key.
        files_say: the settings of recipe and overlays, merged.
    """
    is_whole = {LOSSES, "model"} & given.keys()
    if is_whole or given.get("model.student.head", "").lower() == "false":
        return []
    words = []
    for name, loss in (at(files_say, LOSSES) or {}).items():
        key = f"{LOSSES}.{name}"
        is_typed = key in given or f"{key}.class_path" in given
        if is_typed or not loss_refused_by(task, class_of(loss)):
            continue
        words.append(f"{key}={ALLOWED_LOSSES[task][0]}")
    return words
