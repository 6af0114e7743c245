"""A student on pictures: answers in order, and the files that they are written to."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from kd.data.pictures import decode
from kd.data.sources import printable
from kd.data.transforms import EvalView
from kd.errors import first_line
from kd.machine import cores
from kd.progress import bar
from kd.ship.export.manifest import as_lines
from kd.ship.finished import FinishedRun
from kd.ship.serving.answers import answer, mask_type
from kd.storage.decoding import MAX_BYTES
from kd.storage.elsewhere import open_regular
from kd.storage.shown import csv_text, on_terminal
from kd.storage.writing import write_text, write_whole
from kd.tasks.segmentation import colours

BATCH = 32  # pictures
Row = dict[str, Any]
"""A picture's answer: ``file``, and what :meth:`Predictions.rows` says."""


@dataclass
class Predictions:
    """What a student says of pictures."""

    opened: FinishedRun
    """The run."""
    files: Sequence[str]
    """The pictures, each once."""
    device: torch.device
    """Runs the student."""
    bad: dict[str, str] = field(default_factory=dict)
    """Files that can't be read, or whose answer is NaN or infinite, each with the reason; filled while :meth:`rows` are
    read."""

    def rows(self, top: int) -> Iterator[Row]:
        """The answers in the files' order, as they come; a file without an answer gives no row, and :attr:`bad` gets it.

        Args:
            top: classes a picture.

        Yields:
            ``file``, and what :func:`kd.ship.serving.answers.answer` gives; in its place, for segmentation ``mask`` (class
            ids ``(H, W)`` at the picture's own size), for a student without a classifier ``features`` ``(D,)``.
        """
        opened = self.opened
        model = opened.model.to(self.device).eval()
        crop_ratio = None if opened.kind == "segmentation" else opened.crop_ratio
        view = EvalView(opened.size, crop_ratio)
        row_of = self._row_maker(top)
        shown = bar(label="predicting", total=len(self.files))
        with ThreadPoolExecutor(cores()) as pool, shown:
            for first in range(0, len(self.files), BATCH):
                names = self.files[first : first + BATCH]
                read = {}
                for name, picture in zip(names, pool.map(partial(_read, view), names), strict=True):
                    if isinstance(picture, str):
                        self.bad[name] = picture
                    else:
                        read[name] = picture
                if read:
                    views = torch.stack([picture for picture, _ in read.values()])
                    with torch.inference_mode():
                        logits = model(opened.preprocess(views.to(self.device))).float().cpu()
                    for (name, (_, shape)), numbers in zip(read.items(), logits, strict=True):
                        if numbers.isfinite().all():
                            yield {"file": name, **row_of(numbers, shape)}
                        else:
                            self.bad[name] = "the model's answer is NaN or infinite"
                shown.update(len(names))

    def _row_maker(self, top: int) -> Callable[[torch.Tensor, tuple[int, int]], Row]:
        """A function of the student's output for a picture and of the picture's height and width: gives the row, without
        ``file``. Of classes it lists the ``top`` likeliest.
        """
        if self.opened.kind == "segmentation":
            return lambda logits, shape: {"mask": ids_at(logits, shape)}
        if self.opened.kind == "features":
            return lambda features, shape: {"features": features.numpy()}
        manifest = self.opened.manifest("torch", int8=False)
        return lambda logits, shape: answer(logits.numpy(), manifest, top)

    def write(self, rows: Iterable[Row], out: Path | None) -> Path | None:
        """Writes the answers.

        Args:
            rows: of :meth:`rows`, one at least.
            out: see :func:`kd.ship.predict_words.check_out`; None: masks go to ``predict/`` in the run's folder, features to
                ``predict/features.npz`` there, others are printed as they come.

        Returns:
            The file or folder; None where rows were printed.
        """
        place = out or self.opened.folder / "predict"
        if self.opened.kind == "segmentation":
            _write_masks(rows, self.files, self.opened.classes, place)
        elif self.opened.kind == "features":
            place = out or place / "features.npz"
            table = list(rows)
            features_ND = np.stack([row["features"] for row in table])
            files = np.array([row["file"] for row in table])
            write_whole(place, lambda file: np.savez(file, features=features_ND, files=files))
        elif out is None:
            _print_rows(rows)
            return None
        else:
            # a name that is not UTF-8 is escaped
            write_text(out, printable(_table(out.suffix, rows)))
        return place


def _read(
    view: Callable[[Any], torch.Tensor], name: str
) -> tuple[torch.Tensor, tuple[int, int]] | str:
    """View and size (height, width) of a picture, or why it can't be read.

    Args:
        view: the picture, uint8 ``(3, H, W)`` -> the model's view of it; called by a thread of the pool.
        name: the file.
    """
    try:
        with open_regular(name, MAX_BYTES) as stream:
            picture = decode(stream.read())
        return view(picture), (picture.shape[1], picture.shape[2])
    except (RuntimeError, OSError, ValueError) as error:
        return first_line(error)


def row_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's cells by column: ``file``, the numbers, ``label_1``, ``p_1``, ..., ``FACT_of_label``, ``FACT_expected``.

    Args:
        row: ``file``, and what :func:`kd.ship.serving.answers.answer` gives; all rows of a run have the same keys.

    >>> row_cells({"file": "a.jpg", "labels": [{"label": "pie", "p": 0.9}], "facts": {"kcal": {"of_label": 300.0}}})
    {'file': 'a.jpg', 'label_1': 'pie', 'p_1': 0.9, 'kcal_of_label': 300.0}
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


def _table(suffix: str, rows: Iterable[Row]) -> str:
    """Answers as a table (``.csv``) or a JSON object a line (``.jsonl``).

    A table's columns are the first row's (:func:`row_cells`); JSON has the rows as they are, nested.
    """
    if suffix == ".csv":
        cells = [row_cells(row) for row in rows]
        # the first row's dict, whose keys csv_text writes as the header
        columns = cells[:1]
        values = [of_row.values() for of_row in cells]
        return csv_text([*columns, *values])
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _print_rows(rows: Iterable[Row]) -> None:
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
    rows: Iterable[Row], files: Sequence[str], classes: Sequence[str], folder: Path
) -> None:
    """Writes class ids and colours at each picture's own size, in the pictures' tree below their common folder.

    Args:
        rows: each with its ``mask``.
        files: all pictures.
        classes: listed in ``classes.txt``, one a line, whose number (from 0) is the class id.
        folder: gets the masks, ``PATH.ids.png`` and ``PATH.colours.png`` with each picture's path below the common folder.
    """
    parents = [Path(file).resolve().parent for file in files]
    root = Path(os.path.commonpath(parents))
    palette = colours(len(classes))
    for row in rows:
        picture_file = Path(row["file"]).resolve()
        place = folder / picture_file.relative_to(root)
        ids_HW = row["mask"]
        masks = {"ids": ids_HW, "colours": palette[ids_HW]}
        for name, pixels in masks.items():
            picture = Image.fromarray(pixels)
            file = place.with_name(f"{place.name}.{name}.png")
            write_whole(file, partial(picture.save, format="PNG"))
    write_text(folder / "classes.txt", as_lines(classes))


def ids_at(logits: torch.Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Class ids ``(H, W)`` at a picture's height and width (``shape``) from logits ``(C, H', W')``."""
    logits_1CHW = F.interpolate(logits[None], shape, mode="bilinear")
    class_ids_HW = logits_1CHW[0].argmax(0).numpy()
    small_enough = mask_type(len(logits))
    return class_ids_HW.astype(small_enough)
