"""Files that settings and command lines name: what is missing is reported before torch is imported."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.run.needs import teachers_in
from kd.run.trust import check_modules
from kd.storage.objects import is_url
from kd.storage.run_urls import finished_at, names_run
from kd.storage.weights_files import weights_file

if TYPE_CHECKING:
    from kd.data.splits import Splits

TRAIN = "train"
"""As ``model.teacher.checkpoint``: the teacher is trained first, even where one ships with its recipe."""


def check_present(config: Mapping[str, Any]) -> "Splits | None":
    """Refuses settings that name a folder or a file that is not on this machine, and pictures that can't be trained on.

    Args:
        config: the resolved settings.

    Returns:
        The pictures, for :attr:`kd.run.run.Run.splits`; None where they are listed later
        (:func:`kd.run.pictures.list_to_train`).

    Raises:
        UserError: as of :func:`check_named` and :func:`kd.run.pictures.list_to_train`.
    """
    check_named(config)
    from kd.run.pictures import list_to_train

    return list_to_train(config)


def check_named(config: Mapping[str, Any], resumed: bool = False) -> None:
    """Refuses settings that name weights, answers or a class of the user's own that are not on this machine; URLs are left
    to their readers, and pictures to :func:`kd.run.pictures.list_to_train`.

    Args:
        config: the resolved settings.
        resumed: the run is resumed: its student's weights are in the checkpoint, so the file they began with may be gone.

    Raises:
        UserError: names the setting, and the missing path or class.
    """
    check_modules(config)
    for key, spec in teachers_in(config["model"]).items():
        builder = spec["builder"] or {}
        if str(builder.get("class_path")).endswith(".StoredAnswers"):
            folder = builder["init_args"]["folder"]
            if not (is_url(folder) or Path(folder).is_dir()):
                raise UserError(f"{key}.answers: folder {folder} not found")
    for key, place in _weights(config["model"], resumed):
        if not is_url(place):
            weights_file(Path(place), key)


def _weights(model: Mapping[str, Any], resumed: bool) -> Iterator[tuple[str, str]]:
    """Each setting of ``model`` that names weights, with the place that it names.

    These are a teacher's ``checkpoint``; its ``backbone``, with which its own training begins, where no checkpoint is given;
    and the student's ``checkpoint``, but for a ``resumed`` run.
    """
    for key, spec in teachers_in(model).items():
        if spec["checkpoint"] and spec["checkpoint"] != TRAIN:
            yield f"{key}.checkpoint", spec["checkpoint"]
        is_trained_first = spec["recipe"] and spec["checkpoint"] in (None, TRAIN)
        if spec["backbone"] and is_trained_first:
            yield f"{key}.backbone", spec["backbone"]
    if model["student"]["checkpoint"] and not resumed:
        yield "model.student.checkpoint", model["student"]["checkpoint"]


def check_models(words: Sequence[str]) -> None:
    """Refuses words of a command line that name neither a finished run nor a weights file; URLs pass.

    Raises:
        UserError: names the missing folder or file.
    """
    for word in words:
        if is_url(word):
            continue
        if names_run(word):
            finished_at(word, "config.yaml")
        else:
            weights_file(Path(word), "weights")


def check_pictures(words: Sequence[str]) -> None:
    """Refuses words that name no file, folder or pattern of files on this disk.

    Raises:
        UserError: names the word.
    """
    for word in words:
        if is_url(word):
            allowed = "files, folders, patterns or lists on this disk"
            raise UserError(f"pictures must be {allowed}, got {word}")
        if not Path(word).exists() and not glob.glob(word, recursive=True):  # noqa: PTH207 - any root
            raise UserError(f"no pictures: {word}")
