"""Which file holds the weights at a place: a file, a run's folder, a folder of timm's, or a URL."""

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kd.errors import UserError, first_line
from kd.storage.checkpoints import run_folder
from kd.storage.elsewhere import LARGEST_STUDENT, LARGEST_WEIGHTS, open_regular, regular
from kd.storage.objects import fetched, url_of_run

FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz", ".pkl")
"""Endings of weights files that are read."""
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights in a folder of timm's, the first that is there."""


def weights_file(path: Path, key: str) -> Path:
    """The weights file at a place; one at a URL is fetched to the cache folder.

    Args:
        path: a file, a run's folder, a folder of timm's, or the URL of a file or of a run (any URL without one of the
            :data:`FILES` endings: its ``student.safetensors``); of runs a recipe's ``latest`` too.
        key: the configuration key that named it, for messages; "" where the caller ignores errors.

    Raises:
        UserError: no such file, or one at a URL that can't be fetched, or with more after the file's name.
    """
    url = re.match(r"([a-z][a-z0-9+]+):/+(.+)", str(path))  # a Path has one slash of the two
    if url and not path.exists():
        root = "/" if url[1] in ("file", "local") else ""  # these have three
        place = f"{url[1]}://{root}{url[2]}"
        if path.suffix not in FILES:
            if "?" in place:
                raise UserError(
                    f"{key}: {place}: a weights file's URL ends with its name, as of {', '.join(FILES)}; leave out "
                    "what follows '?', or download the file and give its path"
                )
            place = f"{url_of_run(place, key)}/student.safetensors"
        return fetched(place, key)
    if path.is_symlink() or path.name == "latest":
        path = run_folder(path)
    candidates = [path]
    if path.is_dir():
        candidates = [path / name for name in ("student.safetensors", *TIMM_FILES)]
    for file in candidates:
        if file.is_file():
            return file
    hint = ""
    is_name = re.fullmatch(r"(?:hf[-_]hub:)?[\w-]+/[\w.-]+", str(path))
    if is_name and key.endswith(".checkpoint") and not Path(path.parts[0]).exists():
        hint = f"; a model of the hub: {key.removesuffix('.checkpoint')}={path}"
    raise UserError(f"{key}: {candidates[0]} not found{hint}")


def refuse_text(file: Path, key: str) -> None:
    """Refuses text in the place of weights, for which torch need not be imported.

    Args:
        file: the file.
        key: the configuration key that named it, for the message.

    Raises:
        UserError: the file's beginning has no byte 0, as that of each format of weights has.
    """
    with open_regular(file, LARGEST_WEIGHTS) as opened:
        if b"\0" not in opened.read(4096):
            raise UserError(f"{key}: {file} is not a readable checkpoint: torch has not saved it")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, {} where it has none; the tensors are not read, torch is not imported.

    Raises:
        UserError: a damaged file, one of another format, or one that :func:`kd.storage.elsewhere.regular` refuses;
            names it.
        OSError: the file does not exist, or can't be opened.
    """
    try:
        with safe_open(regular(path, LARGEST_STUDENT), framework="numpy") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a readable safetensors file: {first_line(error)}"
        ) from error
