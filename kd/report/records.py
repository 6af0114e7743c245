"""The records of a run's folder, read from ``RUN/records/*.jsonl`` and the files beside it."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from kd.errors import UserError
from kd.report.lines import PHASES, SCHEMA, Writer, read_lines
from kd.storage.elsewhere import text_of, yaml_of

__all__ = [
    "PHASES",
    "SCHEMA",
    "Run",
    "Sample",
    "Step",
    "TensorSeries",
    "Writer",
    "is_run",
    "percentile",
    "read_lines",
    "read_run",
]

OF_STUDENTS = ("grad_norm", "update_ratio", "agreement", "teacher_entropy")
OF_LAYERS = ("spread", "zeros", "dead", "saturated")


class Step(TypedDict, total=False):
    """One training step of a process; ``records/phases.rank<r>.jsonl``."""

    step: int  # batches before it in the run
    epoch: int  # from 0
    first: bool  # of an epoch: it starts a loader
    t: float  # seconds since 1970 at its end
    ms: float  # its length, validation and profiling left out
    p: dict[str, float]  # ms by phase
    host_ms: float  # by the host's clock
    ready_ms: float  # the main thread stood ready without a core
    data_cpu_ms: float  # CPU time of the main thread within the wait for data
    launch_ms: float  # the host launched the device's work


class Sample(TypedDict, total=False):
    """One reading of a machine; ``records/system.<node>.jsonl``."""

    t: float  # seconds since 1970
    cpu: list[float]  # use of each core, %
    iowait: float  # %
    mem: float  # of the machine's memory, %
    swap_mb: float
    rss_mb: float  # of the training and its loader processes
    main: float  # CPU time of the training processes, % of a core
    workers: list[float]  # of each loader process, % of a core
    thread: str  # the training's most delayed thread
    thread_wait: list[float]  # ready without a core, % of the time, of each training process
    loader_wait: list[float]  # likewise, of each loader process
    disk_r: float  # MB/s
    disk_w: float
    net_r: float
    net_w: float
    gpu: list[dict[str, Any]]  # of each GPU: util, mem (%), w, throttle


@dataclass(frozen=True)
class TensorSeries:
    """One statistic of a tensor over a run.

    Attributes:
        student: of several; empty for the only one.
        layer: path of the module whose output was read; empty for the student as a whole.
        statistic: ``spread`` (standard deviation of the output), ``zeros``, ``dead``, ``saturated`` (shares of it);
            of the whole student ``grad_norm``, ``update_ratio``, ``agreement``, ``teacher_entropy``.
        steps: batches before each reading.
        values: the readings; None where one was NaN or infinite.
    """

    student: str
    layer: str
    statistic: str
    steps: list[int]
    values: list[float | None]


@dataclass
class Run:
    """The records of a run. Whatever is missing is empty, and ``notes`` says so."""

    folder: Path  # of the run
    summary: dict[str, Any] = field(default_factory=dict)  # ``summary.json``
    config: dict[str, Any] = field(default_factory=dict)  # ``config.yaml``
    job: dict[str, Any] = field(default_factory=dict)  # ``job.json``, where ``kd-launch`` has fetched the run
    steps: dict[int, list[Step]] = field(default_factory=dict)  # by rank, in order
    totals: dict[int, dict[str, Any]] = field(default_factory=dict)  # the newest exact totals by rank
    headers: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the step files, by rank
    events: list[dict[str, Any]] = field(default_factory=list)  # one-time records: start-up, a headspace run's result
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by machine, in order
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)  # headers of the system files by node
    # readings of the data tier by rank, since the run was last resumed
    tier: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    health: list[dict[str, Any]] = field(default_factory=list)  # training-health records, in order
    counts: dict[str, list[int]] = field(default_factory=dict)  # pictures by class of each split
    # how classes were mixed up, a record a validation and student
    confusion: list[dict[str, Any]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # names by id
    latency: list[dict[str, Any]] = field(default_factory=list)  # rows that ``kd-latency`` has measured
    kernels: list[dict[str, Any]] = field(default_factory=list)  # profiled windows
    metrics: list[dict[str, float]] = field(default_factory=list)  # rows of ``metrics.csv``, numbers as floats
    notes: list[str] = field(default_factory=list)  # what could not be read

    def event(self, name: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self.events) if e["name"] == name), None)

    @property
    def primary(self) -> str:
        known = [*(header.get("primary") for header in self.headers.values()), self.summary.get("primary")]
        return next((name for name in known if name), "acc1")

    @property
    def students(self) -> list[str]:
        return list(self.config.get("students") or [""])

    def model_of(self, student: str) -> dict[str, Any]:
        return ((self.summary.get("students") or {}).get(student) if student else self.summary.get("student")) or {}

    def health_of(self, student: str) -> list[dict[str, Any]]:
        """A student's health records; those without a name are the first's."""
        return [h for h in self.health if h.get("student", self.students[0]) == student]

    @property
    def tensors(self) -> list[TensorSeries]:
        """What training health has read of gradients, weights and activations (``monitor.health_every``)."""
        found: dict[tuple[str, str, str], TensorSeries] = {}
        for record in self.health:
            student = record.get("student", "")
            for (layer, name), value in _statistics(record).items():
                series = found.setdefault((student, layer, name), TensorSeries(student, layer, name, [], []))
                series.steps.append(record["step"])
                series.values.append(value)
        return list(found.values())

    def confusion_of(self, student: str) -> dict[str, Any] | None:
        own = [c for c in self.confusion if c.get("student", self.students[0]) == student]
        return own[-1] if own else None


def _statistics(record: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    whole = {("", name): record[name] for name in OF_STUDENTS if name in record}
    return whole | {(layer, name): value for name in OF_LAYERS for layer, value in record.get(name, {}).items()}


def is_run(folder: Path) -> bool:
    """Whether a folder holds anything that a run writes."""
    return any((folder / name).exists() for name in ("config.yaml", "summary.json", "metrics.csv", "records"))


def read_results(folder: Path) -> Run:
    """A run's settings and results, without its records."""
    run = Run(folder)
    run.summary = _mapping(folder / "summary.json", run.notes)
    run.config = _mapping(folder / "config.yaml", run.notes)
    run.metrics = _metrics(folder / "metrics.csv", run.notes)
    return run


def read_run(folder: str | Path) -> Run:
    """What a run has recorded: steps by phase, machines, metrics, tensors; also of one that still runs or has failed.

    Args:
        folder: of the run.

    Raises:
        UserError: it is no run's folder.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise UserError(f"{folder} is no run's folder: it has no config.yaml, summary.json or records")
    run = read_results(folder)
    if (folder / "job.json").is_file():
        run.job = _mapping(folder / "job.json", run.notes)
    if (folder / "export" / "latency.json").is_file():
        found = _mapping(folder / "export" / "latency.json", run.notes).get("rows")
        needed = {"model", "runtime", "threads", "batch", "median_ms"}
        run.latency = [row for row in found or [] if isinstance(row, dict) and needed <= set(row)]
    found = sorted((folder / "records").glob("*.jsonl"))
    files = [file for file in found if not file.name.startswith("samples.")]  # those are an audit's, not for a report
    if not files:
        run.notes.append("the run has no records (monitor.enabled=false, or it stopped before the first step)")
    for file in files:
        records, notes = read_lines(file)
        run.notes += notes
        whole = records[next((i for i, record in enumerate(records) if record["kind"] == "header"), len(records)) :]
        if len(whole) < len(records):
            run.notes.append(f"{file.name}: its header is torn: what stands before the next one is left out")
        _sort_in(run, whole)
    for rank, steps in run.steps.items():  # a resumed run repeats the steps behind its checkpoint: the newest counts
        run.steps[rank] = sorted({s["step"]: s for s in steps}.values(), key=lambda s: s["step"])
    run.health.sort(key=lambda record: record["step"])
    if _goes_on(run):
        run.summary = {key: value for key, value in run.summary.items() if key not in ("status", "error")}
    return run


def read_siblings(folder: Path, newest: int = 5) -> dict[str, list[dict[str, float]]]:
    """Rows of ``metrics.csv`` of the other runs of a recipe, the newest few."""
    found = [other for other in folder.resolve().parent.glob("[0-9]*") if other.name != folder.resolve().name]
    runs = sorted((other for other in found if (other / "metrics.csv").is_file()), key=lambda o: o.name)[-newest:]
    return {f"{other.parent.name}/{other.name}": _metrics(other / "metrics.csv", []) for other in runs}


def _goes_on(run: Run) -> bool:
    """Whether the run was resumed after its summary was written, which then describes its first part."""
    file = run.folder / "summary.json"
    return file.is_file() and any(h.get("t", 0.0) > file.stat().st_mtime for h in run.headers.values())


def _sort_in(run: Run, records: Iterable[Any]) -> None:
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
        elif kind == "tier":
            run.tier[header["rank"]].append(record)
        elif kind == "kernels":
            run.kernels.append({"rank": header.get("rank", 0), **record})
        else:
            {"event": run.events, "health": run.health, "confusion": run.confusion}.get(kind, []).append(record)


def _keep_header(run: Run, record: dict[str, Any]) -> None:
    if record["of"] == "steps":
        run.headers[record["rank"]] = record
    elif record["of"] == "system":
        run.nodes[record["node"]] = record
    elif record["of"] == "tier":
        run.tier[record["rank"]] = []
    elif record["of"] == "health":
        run.counts = record.get("counts", {})
    elif record["of"] == "confusion":
        run.classes = record["classes"]


def _mapping(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = yaml_of(text_of(file))  # JSON is YAML
        if isinstance(found, dict):
            return found
        notes.append(f"{file.name} is {'empty' if found is None else 'no mapping'}")
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
    except (OSError, ValueError):
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


def _number(text: str | float | None) -> float | None:
    try:
        return None if text is None else float(text)
    except (TypeError, ValueError):
        return None


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between neighbours; ``nan`` of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)
