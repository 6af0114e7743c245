"""Short ways of writing settings: pictures by their folder or list, an architecture without its arguments."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.config.parts import listed
from kd.data.info import LISTS
from kd.errors import UserError
from kd.run import files, resolve
from kd.run.paths import SETTINGS
from kd.run.task_words import at, words_of_task
from kd.storage.objects import is_url

SOURCE = "data.source"


def written_out(overrides: Sequence[str], contents: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Words of a command line with all that they imply, in the order in which they count.

    Args:
        overrides: ``key=value``, as typed.
        contents: the settings of the recipe and of overlays, in rising priority.

    Returns:
        The words, with those that say the same in full in the place of short ones, and more words before and after them;
        of two words for one key the later one counts.

    Raises:
        UserError: a folder that is missing, a file that is no list of pictures, or answers that are neither a folder nor
            a class.
    """
    files_say = resolve.merged(contents)
    data = files_say.get("data") or {}
    source = data.get("source") or {}
    source_path = str(source.get("class_path", ""))
    source_name = source_path.rpartition(".")[2]
    words: list[str] = []
    for word in overrides:
        words += _answers(word) or _source(word, source_path)
    given = dict(word.split("=", 1) for word in words if "=" in word)
    train = given.get(f"{SOURCE}.train", "")
    is_list = train.lower().endswith(LISTS)
    if is_list and SOURCE not in given and source_name in ("", "ImageFolder"):
        words.insert(0, f"{SOURCE}=Manifest")
    source_class = given.get(SOURCE, source_name).rpartition(".")[2]
    if is_list and source_class in ("", "ImageFolder"):
        source_class = "Manifest"
    words += words_of_task(given, files_say, source_class, is_list)
    return [*_without_arguments(given, files_say), *words]


def _answers(word: str) -> list[str]:
    """``model.teacher.answers=PLACE`` as the class that gives the answers, and its argument; empty for other words.

    Args:
        word: ``model.teacher.answers=PLACE`` or ``model.teachers.NAME.answers=PLACE``: a folder or URL that ``kd-cache
            from=`` has filled, or the class path of a teacher of one's own.

    Raises:
        UserError: none of these.
    """
    key, _, place = word.partition("=")
    if not re.fullmatch(r"model\.(teacher|teachers\.[^.]+)\.answers", key):
        return []
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
    key, _, path = word.partition("=")
    if key != SOURCE or path.startswith("{") or listed(path, "source"):
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
        *groups, name = key.split(".")
        model = files_say
        if groups:
            model = at(files_say, ".".join(groups))
        if name != "arch" or not isinstance(model, dict) or not model.get("kwargs"):
            continue
        if _family(arch) != _family(str(model.get("arch"))):
            words.append(f"{'.'.join(groups)}.kwargs={{}}")
    return words


def _family(arch: str) -> str:
    """The first letters of an architecture's name: ``vit`` of ``vit_tiny_patch16_224``."""
    letters = re.search("[a-z]+", arch.rpartition("/")[2])
    return letters[0] if letters else ""
