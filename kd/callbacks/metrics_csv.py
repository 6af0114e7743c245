"""``metrics.csv`` of a run, by Lightning's logger."""

import csv
import warnings
from contextlib import suppress
from pathlib import Path

from kd.lightning_internals import CSVWriter, LazyCSVLogger
from kd.storage.elsewhere import LARGEST_LOG, text_of
from kd.storage.writing import file_for, move, write_text


class MetricsCSV(LazyCSVLogger):
    """``metrics.csv`` in the run folder; a resumed run appends to it (Lightning's logger would overwrite it)."""

    def __init__(self, run_dir: Path) -> None:
        """Nothing is opened before the first row; ``run_dir``: the folder of the file."""
        # each row is written at once: a kill loses none
        super().__init__(save_dir=run_dir, name="", version="", flush_logs_every_n_steps=1)

    @property
    def _file(self) -> Path:
        return Path(self.log_dir, CSVWriter.NAME_METRICS_FILE)

    def make_writer(self, kind: type[CSVWriter] = CSVWriter) -> CSVWriter:
        """Lightning's writer, which continues the file of a resumed run with that file's columns.

        Called for the first row. Lightning's writer would remove the file, so it is put aside meanwhile, and back; one that
        a kill has left aside is put back too.

        Args:
            kind: class of the writer; that of a user's CSVLogger also writes the hyper-parameters.
        """
        aside = file_for(self._file.with_name(f"{self._file.name}.part"))
        if file_for(self._file).is_file():
            move(self._file, aside)
        with warnings.catch_warnings():  # Lightning's, that it deletes files: none is here now
            warnings.filterwarnings("ignore", "Experiment logs directory")
            writer = kind(log_dir=self.log_dir)
        if aside.is_file():
            move(aside, self._file)
            header, *_ = text_of(self._file, LARGEST_LOG).splitlines()
            writer.metrics_keys = _cells(header)
        return writer

    def drop_from(self, step: int) -> None:
        """Drops the rows of ``step`` (optimizer steps from 0) and later, which a resumed run makes again.

        Damaged rows go too; a file without a whole header is put aside as ``metrics.csv.damaged``. Without a file nothing
        happens. Must come before the first row of this process.
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
        names = _cells(header)
        if "step" not in names or not header.endswith("\n"):
            move(self._file, self._file.with_name(f"{self._file.name}.damaged"))
            return
        cells = []
        for row in rows:
            if row.endswith("\n"):
                cells.append((row, _cells(row)))
        at = names.index("step")
        kept = []
        for row, values in cells:
            is_whole = len(values) == len(names) and values[at].isdecimal()
            if is_whole and int(values[at]) < step:
                kept.append(row)
        write_text(self._file, "".join([header, *kept]))

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Step and metrics of each row that has a step; empty without a file.

        A row has the metrics, ``epoch`` among them, whose cells are numbers: most cells of the file are empty.
        """
        if not self._file.is_file():
            return []
        rows = []
        lines = text_of(self._file, LARGEST_LOG, errors="replace").splitlines()
        for cells in csv.DictReader(lines):
            step = cells.pop("step", None) or ""
            metrics: dict[str, float] = {}
            for name, text in cells.items():
                with suppress(TypeError, ValueError):  # an empty or damaged cell
                    metrics[name] = float(text)
            if step.isdecimal():
                rows.append((int(step), metrics))
        return rows

    def save(self) -> None:
        """Writes the rows; nothing before the first one, as Lightning saves before :meth:`drop_from` has cut a resumed
        run's file.
        """
        if self.has_writer:
            super().save()

    def log_hyperparams(self, params: object = None, *args: object, **kwargs: object) -> None:
        """Nothing: ``config.yaml`` holds the settings."""


def _cells(line: str) -> list[str]:
    """The cells of a line of a CSV file, with or without its end; [] of one that is damaged.

    >>> _cells('step,"val/mae_height, cm"\\r\\n')
    ['step', 'val/mae_height, cm']
    """
    with suppress(csv.Error):
        return next(csv.reader([line]), [])
    return []
