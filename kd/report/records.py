"""Records: JSON lines that callbacks append to ``RUN/records/*.jsonl``, and the reader of a run's folder.

Every file begins with a header line that holds ``schema``; each line has a ``kind``. Times are in milliseconds (``ms``,
phases) or seconds (``s``; ``t`` is Unix time). A file's length is bounded, see :class:`Writer`.
"""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
PHASES = (
    "data", "h2d", "teacher", "student", "loss", "backward", "communication", "optimizer", "logging", "checkpoint",
)  # fmt: skip
"""The parts of a step, in order. ``validation`` and ``profiling`` stand beside them and are no part of a step."""
LIMIT = 20_000  # lines a file: a few MB
THINNED = ("step", "sample")
_SPREAD = 2_654_435_761  # Knuth's multiplicative hash: spreads consecutive numbers evenly over 32 bits


def kept(number: int, share: float) -> bool:
    """Whether line ``number`` is among the kept ``share``; who is kept at a share is kept at every larger one.

    >>> abs(sum(kept(n, 0.25) for n in range(10_000)) - 2_500) < 5
    True
    """
    return (number * _SPREAD) % 2**32 < share * 2**32


class Writer:
    """Appends records to a file of bounded length.

    When ``limit`` lines are reached, half of the steps and samples are dropped, chosen by a hash of their number, and
    as many of the later ones. What stays is an even sample of the whole run, so percentiles hold; what must be exact
    (sums, counts, maxima) is written as ``total`` lines by the callbacks, of which the newest is kept.

    Args:
        path: the file; an existing one is continued.
        header: facts that do not change (``of``, ``rank``, ...).
        limit: lines.
    """

    def __init__(self, path: Path, header: dict[str, Any], limit: int = LIMIT) -> None:
        self.path, self.limit, self.share = path, limit, 1.0
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier, _ = read_lines(path) if path.is_file() else ([], [])
        self.share = min([r.get("share", 1.0) for r in earlier if r["kind"] == "header"], default=1.0)
        self.last_total = next((r for r in reversed(earlier) if r["kind"] == "total"), None)
        self._header = {"kind": "header", "schema": SCHEMA, **header}
        self._lines = len(earlier)
        self._number = max((r.get("n", 0) for r in earlier), default=0)
        self._file = path.open("a", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a torn last line ends here
        self.write({**self._header, "share": self.share})

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record; a step or sample that falls to thinning is left out."""
        if record["kind"] in THINNED:
            self._number += 1
            if not kept(self._number, self.share):
                return
            record = {**record, "n": self._number}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()
        self._lines += 1
        if self._lines >= self.limit:
            self._thin()

    def _thin(self) -> None:
        records, _ = read_lines(self.path)
        self.share /= 2
        totals = [r for r in records if r["kind"] == "total"][-1:]
        rest = [r for r in records if r["kind"] not in ("total", *THINNED)]
        headers = [{**r, "share": self.share} if r["kind"] == "header" else r for r in rest]
        lines = headers + totals + [r for r in records if r["kind"] in THINNED and kept(r["n"], self.share)]
        self._file.close()
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in lines), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._lines = len(lines)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of one file, and notes: torn lines are left out, and all of a file of a newer schema."""
    records: list[dict[str, Any]] = []
    torn, notes = 0, []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            assert isinstance(record, dict) and isinstance(record["kind"], str)
        except (ValueError, AssertionError, KeyError):
            torn += bool(line.strip())
            continue
        if record["kind"] == "header" and record.get("schema", 0) > SCHEMA:
            notes.append(f"{path.name}: schema {record['schema']} is newer than this kd reads ({SCHEMA}): left out")
            return [], notes
        records.append(record)
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' * (torn > 1)} left out")
    return records, notes


@dataclass
class Run:
    """What a run's folder tells. Whatever is missing is empty, and ``notes`` says so.

    Attributes:
        folder: of the run.
        summary: ``summary.json``.
        config: ``config.yaml``.
        steps: step records by rank.
        totals: the newest exact totals by rank.
        headers: of the step files, by rank.
        events: one-time records: start-up, a headspace run's result.
        samples: system samples by node.
        nodes: headers of the system files by node.
        health: training-health records, in order.
        counts: pictures by class of each split.
        kernels: profiled windows.
        metrics: rows of ``metrics.csv``, numbers as floats.
        notes: what could not be read.
    """

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    totals: dict[int, dict[str, Any]] = field(default_factory=dict)
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    health: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def event(self, name: str) -> dict[str, Any] | None:
        """The newest event of a name."""
        return next((e for e in reversed(self.events) if e["name"] == name), None)

    @property
    def primary(self) -> str:
        """The task's main metric, ``acc1`` or ``miou``."""
        known = [*(header.get("primary") for header in self.headers.values()), self.summary.get("primary")]
        return next((name for name in known if name), "acc1")

    @property
    def students(self) -> list[str]:
        """Names of several students; of a single one ``[""]``."""
        return list(self.config.get("students") or [""])

    def health_of(self, student: str) -> list[dict[str, Any]]:
        """A student's health records; those without a name are the first's."""
        return [h for h in self.health if h.get("student", self.students[0]) == student]


def is_run(folder: Path) -> bool:
    """Whether a folder holds anything that a run writes."""
    return any((folder / name).exists() for name in ("config.yaml", "summary.json", "metrics.csv", "records"))


def read_run(folder: Path) -> Run:
    """Reads all there is, also of a run that still runs or has failed."""
    run = Run(folder)
    run.summary = _mapping(folder / "summary.json", run.notes)
    run.config = _mapping(folder / "config.yaml", run.notes)
    run.metrics = _metrics(folder / "metrics.csv", run.notes)
    files = sorted((folder / "records").glob("*.jsonl"))
    if not files:
        run.notes.append("the run has no records (monitor.enabled=false, or it stopped before the first step)")
    for file in files:
        records, notes = read_lines(file)
        run.notes += notes
        whole = _behind_header(records)
        if len(whole) < len(records):
            run.notes.append(f"{file.name}: its header is torn: what stands before the next one is left out")
        _sort_in(run, whole)
    for rank, steps in run.steps.items():  # a resumed run repeats the steps behind its checkpoint: the newest counts
        run.steps[rank] = sorted({s["step"]: s for s in steps}.values(), key=lambda s: s["step"])
    run.health.sort(key=lambda record: record["step"])
    if _goes_on(run):
        run.summary = {key: value for key, value in run.summary.items() if key not in ("status", "error")}
    return run


def _goes_on(run: Run) -> bool:
    """Whether the run was resumed since its summary was written: that tells of its first part."""
    file = run.folder / "summary.json"
    return file.is_file() and any(h.get("t", 0.0) > file.stat().st_mtime for h in run.headers.values())


def _behind_header(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records from the first header on; it says whose they are."""
    first = next((i for i, record in enumerate(records) if record["kind"] == "header"), len(records))
    return records[first:]


def _sort_in(run: Run, records: Iterable[dict[str, Any]]) -> None:
    header: dict[str, Any] = {}
    for record in records:
        kind = record["kind"]
        if kind == "header":
            header = record
            _keep_header(run, record)
        elif kind == "step":
            run.steps.setdefault(header["rank"], []).append(record)
        elif kind == "total":
            run.totals[header["rank"]] = record
        elif kind == "sample":
            run.samples.setdefault(header["node"], []).append(record)
        elif kind == "kernels":
            run.kernels.append({"rank": header.get("rank", 0), **record})
        else:
            {"event": run.events, "health": run.health}.get(kind, []).append(record)


def _keep_header(run: Run, record: dict[str, Any]) -> None:
    if record["of"] == "steps":
        run.headers[record["rank"]] = record
    elif record["of"] == "system":
        run.nodes[record["node"]] = record
    elif record["of"] == "health":
        run.counts = record.get("counts", {})


def _mapping(file: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
        if isinstance(found, dict):
            return found
        notes.append(f"{file.name} is {'empty' if found is None else 'no mapping'}")
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
    except (OSError, ValueError, yaml.YAMLError):
        notes.append(f"{file.name} can't be read")
    return {}


def _metrics(file: Path, notes: list[str]) -> list[dict[str, float]]:
    if not file.is_file():
        return []
    rows: list[dict[str, float]] = []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                numbers = {k: _number(v) for k, v in row.items() if k and v}
                rows.append({k: v for k, v in numbers.items() if v is not None})
    except (OSError, ValueError, csv.Error):
        notes.append(f"{file.name} can't be read behind row {len(rows)}")
    return rows


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between neighbours; ``nan`` of nothing.

    >>> percentile([1, 2, 3, 4], 50)
    2.5
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
