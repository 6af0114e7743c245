"""``metrics.csv`` of a run, by Lightning's logger."""

import csv
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.lightning_internals import CSVWriter, LazyCSVLogger
from kd.storage.elsewhere import LARGEST_LOG, text_of
from kd.storage.writing import file_for, move, write_text


class MetricsCSV(LazyCSVLogger):
    """``metrics.csv`` in the run folder; a resumed run appends to it (Lightning's logger would overwrite it)."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(
            save_dir=run_dir, name="", version="", flush_logs_every_n_steps=1
        )  # a kill loses no row

    @property
    def _file(self) -> Path:
        return Path(self.log_dir, CSVWriter.NAME_METRICS_FILE)

    def make_writer(self, kind: type[CSVWriter] = CSVWriter) -> CSVWriter:
        """Lightning's writer, which continues the file of a resumed run with that file's columns; ``kind``: its
        class.
        """
        aside = file_for(self._file.with_name(f"{self._file.name}.part"))
        if file_for(self._file).is_file():
            move(self._file, aside)  # Lightning's writer removes a file of this name
        with warnings.catch_warnings():  # Lightning's, that it deletes files: none is here now
            warnings.filterwarnings("ignore", "Experiment logs directory")
            writer = kind(log_dir=self.log_dir)
        if aside.is_file():
            move(aside, self._file)
            writer.metrics_keys = text_of(self._file, LARGEST_LOG).splitlines()[0].split(",")
        return writer

    def drop_from(self, step: int) -> None:
        """Drops the rows of ``step`` and later: a resumed run makes these steps again. Damaged rows go too; a file
        without a header is put aside as ``metrics.csv.damaged``.
        """
        aside = self._file.with_name(f"{self._file.name}.part")
        for file in (self._file, aside):
            file_for(file)
        if aside.is_file() and not self._file.is_file():
            move(aside, self._file)
        if not self._file.is_file():
            return
        header, *rows = text_of(self._file, LARGEST_LOG, errors="replace").splitlines(
            keepends=True
        ) or [""]
        names = header.rstrip("\r\n").split(",")
        if "step" not in names or not header.endswith("\n"):
            move(self._file, self._file.with_name(f"{self._file.name}.damaged"))
            return
        cells = []
        for row in rows:
            if row.endswith("\n"):
                cells.append((row, row.rstrip("\r\n").split(",")))
        at = names.index("step")
        kept = []
        for row, values in cells:
            is_whole = len(values) == len(names) and values[at].isdecimal()
            if is_whole and int(values[at]) < step:
                kept.append(row)
        write_text(self._file, "".join([header, *kept]))

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The step and the metrics of each whole row; empty without a file."""
        if not self._file.is_file():
            return []
        rows = []
        lines = text_of(self._file, LARGEST_LOG, errors="replace").splitlines()
        for cells in csv.DictReader(lines):
            step = cells.pop("step", None) or ""
            metrics: dict[str, float] = {}
            for name, text in cells.items():
                with suppress(TypeError, ValueError):  # a damaged cell
                    metrics[name] = float(text)
            if step.isdecimal():
                rows.append((int(step), metrics))
        return rows

    def save(self) -> None:
        """Does nothing before the first row: Lightning saves before :meth:`drop_from` has cut a resumed run's file."""
        if self.has_writer:
            super().save()

    def log_hyperparams(self, params: object = None, *args: object, **kwargs: object) -> None:
        """Nothing: ``config.yaml`` holds the settings."""


class StudentCSV(MetricsCSV):
    """``metrics.csv`` of one of several students."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._student = f"{name}/"

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Writes the student's metrics under the names that a single student's have; rows without any are skipped.

        Args:
            metrics: of all students, by name.
            step: optimizer steps done.
        """
        own = {}
        for k, v in metrics.items():
            if k.startswith(self._student):
                own[k.removeprefix(self._student)] = v
        if own:
            super().log_metrics(
                own | ({"epoch": metrics["epoch"]} if "epoch" in metrics else {}), step
            )
