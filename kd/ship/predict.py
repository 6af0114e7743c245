"""A student on pictures: answers in order, and the files that they are written to."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from tqdm import tqdm

from kd.data.pictures import decode
from kd.data.transforms import EvalView
from kd.errors import UserError, first_line
from kd.machine import cores
from kd.models import Prepare
from kd.progress import bar
from kd.ship.export.manifest import as_lines
from kd.ship.finished import FinishedRun
from kd.ship.serving.answers import answer, mask_type
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import open_regular
from kd.storage.shown import CsvTable, on_terminal
from kd.storage.writing import write_text, write_whole
from kd.tasks.segmentation import colours

BATCH = {
    "cpu": 32,
    "cuda": 512,
}  # pictures, to begin with: halved until it fits; 64 on other devices
Predicted = tuple[str, torch.Tensor, tuple[int, int]]
"""A picture's name, the student's answer, the picture's height and width."""


def choose_device(name: str | None) -> torch.device:
    """The device of that name; None: the GPU where there is one, else the CPU.

    Raises:
        UserError: it can't be used.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device: '{name}' can't be used: {first_line(error)}") from error
    return device


def predict(
    opened: FinishedRun, files: Sequence[str], device: torch.device, bad: dict[str, str]
) -> Iterator[Predicted]:
    """The student's answers in the files' order.

    Args:
        opened: the run; its model is brought to the device.
        files: of the pictures.
        device: runs the student.
        bad: gets the files that can't be read, each with the reason in words; they have no answer.

    Yields:
        Name, answer (float32 on the CPU, ``(C,)``, of masks ``(C, H', W')``) and height and width of each picture.
    """
    model = opened.model.to(device).eval()
    # masks: nothing cut
    crop_ratio = None
    if opened.kind != "segmentation":
        crop_ratio = opened.crop_ratio
    view = EvalView(opened.size, crop_ratio)
    batch_size = BATCH.get(device.type, 64)
    remaining = iter(files)
    shown = bar(label="predicting", total=len(files))
    with ThreadPoolExecutor(cores()) as pool, shown:
        while names := list(islice(remaining, batch_size)):
            readable = []
            pictures = []
            shapes = []
            results = pool.map(lambda name: _read(name, view), names)
            for name, result in zip(names, results, strict=True):
                if isinstance(result, str):
                    bad[name] = result
                    continue
                picture, shape = result
                readable.append(name)
                pictures.append(picture)
                shapes.append(shape)
            if readable:
                logits, batch_size = _forward(
                    model, opened.preprocess, torch.stack(pictures), device, batch_size
                )
                yield from zip(readable, logits, shapes, strict=True)
            shown.update(len(names))


@dataclass
class Predictions:
    """What a student says of pictures, while it is read."""

    opened: FinishedRun
    """The run."""
    files: Sequence[str]
    """The pictures."""
    answers: Iterator[Predicted]
    """In the order of :attr:`files`."""
    bad: dict[str, str]
    """Files that can't be read, each with the reason; filled while :attr:`answers` are read."""

    @classmethod
    def of(cls, opened: FinishedRun, files: Sequence[str], device: str | None) -> "Predictions":
        """The predictions of a run on files.

        Raises:
            UserError: the device can't be used.
        """
        bad: dict[str, str] = {}
        return cls(opened, files, predict(opened, files, choose_device(device), bad), bad)

    def rows(self, top: int) -> dict[str, dict[str, Any]]:
        """All answers by file: as :func:`kd.ship.serving.answers.answer` gives them; of masks ``mask`` (class ids
        ``(H, W)`` at the picture's own size), of a student without a classifier ``features`` ``(D,)``.
        """
        manifest = self.opened.manifest("torch", "nhwc", int8=False)
        found: dict[str, dict[str, Any]] = {}
        for name, logits, shape in self.answers:
            if self.opened.kind == "segmentation":
                found[name] = {"mask": _ids_at(logits, shape)}
            elif self.opened.kind == "features":
                found[name] = {"features": logits.numpy()}
            else:
                found[name] = answer(logits.numpy(), manifest, top)
        return found


def _read(name: str, view: Callable[[Any], Any]) -> tuple[torch.Tensor, tuple[int, int]] | str:
    """View and size (height, width) of a picture, or why it can't be read.

    Args:
        name: the file.
        view: the picture, uint8 ``(3, H, W)`` -> the model's view of it; called by a thread of the pool.
    """
    try:
        with open_regular(name, MAX_BYTES) as stream:
            picture = decode(stream.read())
        return view(picture), (picture.shape[1], picture.shape[2])
    except (RuntimeError, OSError, ValueError) as error:
        return first_line(error)


def _forward(
    model: nn.Module, preprocess: Prepare, pictures: torch.Tensor, device: torch.device, size: int
) -> tuple[torch.Tensor, int]:
    """Logits ``(N, C, ...)``, float32 on the CPU, of pictures ``(N, 3, H, W)``, and the batch size that fitted the
    device's memory: ``size``, halved as often as it did not fit.

    Raises:
        torch.OutOfMemoryError: a single picture does not fit.
    """
    while True:
        answers = []
        try:
            with torch.inference_mode():
                for part in pictures.split(size):
                    answers.append(model(preprocess(part.to(device))).float().cpu())
            return torch.cat(answers), size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
            torch.cuda.empty_cache()


def write_answers(
    opened: FinishedRun,
    answers: Iterator[Predicted],
    files: Sequence[str],
    top: int,
    out: Path | None,
) -> Path | None:
    """Writes the answers as they come.

    Args:
        opened: the run.
        answers: in the order of ``files``.
        files: the pictures.
        top: classes a picture, in a table or in a printed row.
        out: see :func:`kd.ship.predict_words.check_out`; None: masks go to ``predict/`` in the run's folder, features to
            ``predict/features.npz`` there, rows are printed.

    Returns:
        The file or folder; None where rows were printed.
    """
    if opened.kind == "segmentation":
        folder = out or opened.folder / "predict"
        root = Path(os.path.commonpath([Path(f).resolve().parent for f in files]))
        _write_masks(answers, root, opened, folder)
        return folder
    if opened.kind == "features":
        file = out or opened.folder / "predict" / "features.npz"
        _write_features(answers, file)
        return file
    manifest = opened.manifest("torch", "nhwc", int8=False)
    rows = ({"file": name} | answer(logits.numpy(), manifest, top) for name, logits, _ in answers)
    if out is None:
        _print_rows(rows)
        return None
    write_whole(out, lambda file: _write_rows(file, out.suffix, rows))
    return out


Rows = Iterator[dict[str, Any]]


def row_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's cells by column: ``file``, the numbers, ``label_1``, ``p_1``, ..., ``FACT_of_label``, ``FACT_expected``.

    Args:
        row: ``file``, and what :func:`kd.ship.serving.answers.answer` gives; all rows of a run have the same keys.
    """
    cells = {"file": row["file"], **row.get("numbers", {})}
    labels = row.get("labels", [])
    facts = row.get("facts", {})
    for rank, label in enumerate(labels, 1):
        cells[f"label_{rank}"] = label["label"]
        cells[f"p_{rank}"] = label["p"]
    for fact, values in facts.items():
        for what, value in values.items():
            cells[f"{fact}_{what}"] = value
    return cells


def _write_rows(opened: IO[bytes], suffix: str, rows: Rows) -> None:
    """Writes answers to an open binary file, which stays open; ``suffix`` decides their form."""
    file = io.TextIOWrapper(opened, encoding="utf-8", newline="")
    _write_lines(file, suffix, rows)
    file.flush()
    file.detach()  # whose end would close the other


def _write_lines(file: TextIO, suffix: str, rows: Rows) -> None:
    """Writes answers as a table (``.csv``), one JSON array (``.json``) or a JSON object a line (``.jsonl``).

    A table's columns are those of the first row; JSON has the rows as they are (:func:`row_cells`).
    """
    if suffix == ".csv":
        table = CsvTable(file)
        for number, cells in enumerate(map(row_cells, rows)):
            if number == 0:
                table.add(cells)
            table.add(cells.values())
        return
    begin, between, end = ("[\n", ",\n", "\n]\n") if suffix == ".json" else ("", "\n", "\n")
    file.write(begin)
    for number, row in enumerate(rows):
        file.write((between if number else "") + json.dumps(row, ensure_ascii=False))
    file.write(end)


def _print_rows(rows: Rows) -> None:
    """Prints each picture's answer as a line on the terminal, above the progress bar: ``FILE: apple 97.1%, ...``."""
    for row in rows:
        parts = []
        for label in row.get("labels", []):
            parts.append(f"{label['label']} {label['p']:.1%}")
        for name, value in row.get("numbers", {}).items():
            parts.append(f"{name} {value:.6g}")
        facts = row.get("facts", {})
        for what, words in (("of_label", ""), ("expected", "expected ")):
            for name, fact in facts.items():
                value = fact[what]
                if value is not None:
                    parts.append(f"{name} {words}{value:.6g}")
        text = ", ".join(parts)
        line = f"{row['file']}: {text}"
        tqdm.write(on_terminal(line), file=sys.stdout)


def _write_masks(
    answers: Iterator[Predicted], root: Path, opened: FinishedRun, folder: Path
) -> None:
    """Class ids and colours at each picture's own size, in the pictures' tree below their common folder.

    Args:
        answers: logits ``(C, H', W')`` of each picture.
        root: the pictures' common folder.
        opened: the run; its classes are listed in ``classes.txt``, one a line, whose number (from 0) is the class id.
        folder: gets the masks, ``PATH.ids.png`` and ``PATH.colours.png`` with each picture's path below ``root``.
    """
    palette = colours(len(opened.classes))
    for name, logits, shape in answers:
        place = Path(name).resolve().relative_to(root)
        _write_mask(folder / place, logits, shape, palette)
    write_text(folder / "classes.txt", as_lines(opened.classes))


def _write_mask(
    stem: Path, logits: torch.Tensor, shape: tuple[int, int], palette: np.ndarray
) -> None:
    """``STEM.ids.png`` and ``STEM.colours.png`` from logits ``(C, H', W')``, at the picture's height and width.

    Args:
        stem: path without its ending.
        logits: of the model.
        shape: height and width of the picture in pixels.
        palette: colours by class id, :func:`kd.tasks.segmentation.colours`.
    """
    ids_HW = _ids_at(logits, shape)
    masks = {"ids": ids_HW, "colours": palette[ids_HW]}
    for name, pixels in masks.items():
        file = stem.with_name(f"{stem.name}.{name}.png")
        picture = Image.fromarray(pixels)
        write_whole(file, partial(picture.save, format="PNG"))


def _ids_at(logits: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Class ids ``(H, W)`` at a picture's height and width (``shape``) from logits ``(C, H', W')``."""
    logits_1CHW = F.interpolate(logits[None], shape, mode="bilinear")
    class_ids_HW = logits_1CHW[0].argmax(0).numpy()
    small_enough = mask_type(len(logits))
    return class_ids_HW.astype(small_enough)


def _write_features(answers: Iterator[Predicted], file: Path) -> None:
    """Writes an ``.npz``: ``features`` ``(N, D)`` and ``files``, the pictures' names in the same order."""
    names = []
    rows = []
    for name, features, _ in answers:
        names.append(name)
        rows.append(features.numpy())
    features_ND = np.stack(rows)
    files = np.array(names)
    write_whole(file, lambda opened: np.savez(opened, features=features_ND, files=files))
