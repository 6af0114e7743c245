"""Files and folders that settings and command lines name: what is missing is reported before torch is imported."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kd.errors import UserError
from kd.run.needs import teachers_in
from kd.run.trust import check_modules
from kd.storage.objects import is_url
from kd.storage.run_urls import finished_at, names_run
from kd.storage.weights_files import weights_file

if TYPE_CHECKING:
    from kd.data.splits import Splits

ROOTS = {
    "ImageFolder": "ImageFolder reads train/<class>/*.jpg and val/<class>/*.jpg in it",
    "SegmentationFolder": "SegmentationFolder reads images/train, images/val, masks/train and masks/val in it",
    "Pictures": "Pictures reads all pictures below it",
    "Shards": "Shards reads train.json and val.json in it, which kd-pack writes",
}
"""What the sources with a folder ``root`` read there."""
LISTS = ("train", "val", "test")
"""Arguments of Manifest that name lists of pictures."""
TRAIN = "train"
"""As ``model.teacher.checkpoint``: the teacher is trained first, even where one ships with its recipe."""


class Folder(NamedTuple):
    """A folder that a setting names."""

    key: str
    """The setting."""
    path: str
    """Its value."""
    reads: str = ""
    """What is read there."""


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
    """Refuses settings that name a folder, a file or a class of the user's own that is not on this machine; URLs are left
    to their readers.

    Args:
        config: the resolved settings.
        resumed: the run is resumed: its student's weights are in the checkpoint, so the file they began with may be gone.

    Raises:
        UserError: names the setting, the missing path or class, and what is read there.
    """
    check_modules(config)
    check_data(config["data"])
    for key, spec in teachers_in(config["model"]).items():
        builder = spec["builder"] or {}
        if str(builder.get("class_path")).endswith(".StoredAnswers"):
            folder = builder["init_args"]["folder"]
            if not (is_url(folder) or Path(folder).is_dir()):
                raise UserError(f"{key}.answers: folder {folder} not found")
    for key, place in _weights(config["model"], resumed):
        if not is_url(place):
            weights_file(Path(place), key)


def check_data(data: Mapping[str, Any]) -> None:
    """Refuses a missing folder, list of pictures, or data set of Hugging Face among the settings ``data``.

    Raises:
        UserError: as of :func:`check_named`.
    """
    for folder in _folders(data):
        if is_url(folder.path) or Path(folder.path).expanduser().is_dir():
            continue
        reads = f" ({folder.reads})" if folder.reads else ""
        raise UserError(f"{folder.key}: folder {folder.path} not found{reads}")
    name, arguments = _source(data["source"])
    if name == "HuggingFace":
        from kd.storage.hub import check_dataset

        check_dataset(str(arguments["path"]), "data.source.path")
    for key, file in _lists(data["source"]):
        if not (is_url(file) or Path(file).expanduser().is_file()):
            raise UserError(f"{key}: {file} not found")


def _folders(data: Mapping[str, Any]) -> Iterator[Folder]:
    """The folders of pictures that the settings ``data`` name."""
    name, arguments = _source(data["source"])
    root = arguments.get("root")
    if name in ROOTS and root:
        yield Folder("data.source.root", str(root), ROOTS[name])
    if data.get("unlabeled"):
        yield Folder("data.unlabeled", str(data["unlabeled"]))
    probe = data.get("probe") or {}
    if probe.get("root"):
        reads = "its labelled pictures are train/<class>/*.jpg and val/<class>/*.jpg in it"
        yield Folder("data.probe.root", str(probe["root"]), reads)


def _lists(source: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """The lists of pictures that a Manifest names, each with its setting."""
    name, arguments = _source(source)
    if name != "Manifest":
        return
    for split in LISTS:
        if arguments.get(split):
            yield f"data.source.{split}", str(arguments[split])


def _source(source: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """The short name of one of kd's sources, and its arguments; "" for another's."""
    path = str((source or {}).get("class_path", ""))
    if not path.startswith("kd.data.sources."):
        return "", {}
    return path.rpartition(".")[2], (source or {})["init_args"]


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
