"""``metrics.csv`` of a run: a row for each step that is logged, a column for each metric, in alphabetical order."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor

from kd.storage.elsewhere import LARGEST_LOG, text_of
from kd.storage.writing import appended, file_for, move, write_text


class MetricsCSV(Logger):
    """``metrics.csv`` in a run's folder; a resumed run appends to it. Each row is written at once: a kill loses none."""

    def __init__(self, run_dir: Path) -> None:
        """Nothing is opened before the first row; ``run_dir``: the folder of the file."""
        super().__init__()
        self._file = run_dir / "metrics.csv"
        self._columns: list[str] = []  # of the file, from the first row on

    @property
    def name(self) -> str:
        """None of its own."""
        return ""

    @property
    def version(self) -> str:
        """None of its own."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._file.parent)

    def log_hyperparams(self, params: object = None, *args: object, **kwargs: object) -> None:
        """Nothing: ``config.yaml`` holds the settings."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Writes a row on rank 0; where a metric is new, the file is written anew with a column more.

        Args:
            metrics: numbers by name, ``epoch`` among them.
            step: number of the optimizer step, from 0.
        """
        row: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            row[name] = value.item() if isinstance(value, Tensor) else value
        if not self._columns:
            first, *_ = self._lines() or [""]
            self._columns = _cells(first)
        new = row.keys() - {*self._columns}
        if not new:
            line = _written(self._columns, [row])
            with appended(self._file) as file:
                file.write(line)
            return
        earlier = list(csv.DictReader(self._lines()))
        self._columns = sorted({*self._columns, *new})
        header = {name: name for name in self._columns}
        text = _written(self._columns, [header, *earlier, row])
        write_text(self._file, text)

    def drop_from(self, step: int) -> None:
        """Drops the rows of ``step`` (optimizer steps from 0) and later from the file: a resumed run makes them again.

        Damaged rows go too. A file without a whole header is renamed to ``metrics.csv.damaged``. Without a file nothing
        happens. Must be called before the first row of this process is logged.
        """
        header, *rows = self._lines(keepends=True) or [""]
        names = _cells(header)
        if "step" not in names or not header.endswith("\n"):
            if header:
                move(self._file, self._file.with_name(f"{self._file.name}.damaged"))
            return
        at = names.index("step")
        kept = [header]
        for row in rows:
            cells = _cells(row)
            is_whole = row.endswith("\n") and len(cells) == len(names)
            if not is_whole or not cells[at].isdecimal():
                continue
            if int(cells[at]) < step:
                kept.append(row)
        write_text(self._file, "".join(kept))

    def _lines(self, keepends: bool = False) -> list[str]:
        """The file's lines; [] without a file. Anything but a regular file is refused (:func:`file_for`)."""
        if not file_for(self._file).is_file():
            return []
        return text_of(self._file, LARGEST_LOG, errors="replace").splitlines(keepends)


def _written(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows, by column, as lines of a CSV file; what a row lacks is empty."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, extrasaction="ignore").writerows(rows)
    return text.getvalue()


def _cells(line: str) -> list[str]:
    """The cells of a line of a CSV file, with or without its end; [] of one that is damaged.

    >>> _cells('step,"val/mae_height, cm"\\r\\n')
    ['step', 'val/mae_height, cm']
    """
    with suppress(csv.Error):
        return next(csv.reader([line]), [])
    return []
