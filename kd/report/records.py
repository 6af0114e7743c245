"""The records of a run's folder, ``RUN/records/*.jsonl``: their writer, and their reader with the files beside them.

Every file begins with a header line that holds ``schema``; each line has a ``kind``. Times are in milliseconds (``ms``,
phases) or seconds (``s``; ``t`` is Unix time).
"""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Required

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from kd.errors import UserError
from kd.report.metric import counted
from kd.storage.elsewhere import (
    LARGEST,
    LARGEST_LOG,
    Json,
    bytes_of,
    json_of,
    lines_of,
    text_of,
    yaml_of,
)
from kd.storage.objects import TIMES
from kd.storage.shown import masked
from kd.storage.writing import appended, file_for, write_text

SCHEMA = 1
PHASES = (
    "data", "h2d", "teacher", "student", "forward", "loss", "backward", "communication", "optimizer", "logging",
    "checkpoint", "rest",
)  # fmt: skip
"""The parts of a step, in order. ``validation`` and ``profiling`` are no part of a step.

``forward`` is the forward pass and loss of a training that is not kd's; ``rest`` what a plain loop gives no name.
"""
FIT_OF_THE_START = "fit of the inherited start"
"""The part of a run's start-up in which a student gets its teacher's layers."""
LIMIT = 20_000  # lines a file: a few MB
MOST_ROWS = 200_000  # of metrics.csv that are kept in memory
THINNED = ("step", "sample", "tier", "health")
"""Kinds of records that are written all through a run: of a file at its limit half of them are dropped."""
_SPREAD = (
    2_654_435_761  # Knuth's multiplicative hash: spreads consecutive numbers evenly over 32 bits
)


class Record(TypedDict, total=False):
    """What a record of any kind may hold; numbers are finite."""

    kind: Required[str]
    """One of :data:`KINDS`, or another, which nobody reads."""
    share: FiniteFloat
    """Of a header: how many of the file's records were kept, 0 to 1."""
    n: int
    """The record's number, from 1."""
    counts: Json
    """Of a header: pictures by class and split."""
    teacher: Json
    """Of a header: what is known of the model."""
    student: Json
    """Likewise."""


class Header(Record, total=False):
    """Begins a file; what follows is of the same process or machine."""

    t: FiniteFloat
    """Unix time."""
    of: Required[str]
    """``steps``, ``system``, ``tier`` or ``health``."""


class HeaderOfRank(Header):
    """Of ``steps`` and ``tier``."""

    rank: Required[int]


class HeaderOfMachine(Header):
    """Of ``system``."""

    node: Required[str]


class Step(Record, total=False):
    """One training step of a process; ``records/phases.rank<r>.jsonl``."""

    step: Required[int]
    """Number of batches before it in the run."""
    epoch: Required[int]
    """From 0."""
    first: bool
    """First of an epoch: it starts a loader."""
    t: Required[FiniteFloat]
    """Unix time of its end."""
    ms: Required[FiniteFloat]
    """Milliseconds, validation and profiling left out."""
    p: Required[dict[str, FiniteFloat]]
    """Milliseconds by phase."""
    host_ms: float
    """Milliseconds by the host's clock."""
    ready_ms: float
    """Milliseconds that the main thread was ready to run but had no core."""
    data_ready_ms: float
    """The part of ``ready_ms`` that fell into the wait for the batch."""
    data_cpu_ms: float
    """CPU time of the main thread during the wait for data."""
    launch_ms: float
    """Milliseconds in which the host launched the device's work."""


class Sample(Record, total=False):
    """One reading of a machine; ``records/system.<node>.jsonl``."""

    t: Required[FiniteFloat]
    """Unix time."""
    cpu: Required[list[FiniteFloat]]
    """Use of each core, %."""
    iowait: float
    """%."""
    mem: Required[FiniteFloat]
    """Use of the machine's memory, %."""
    swap_mb: float
    """Swap in use, MB; here and in all samples an MB is 2**20 bytes."""
    rss_mb: float
    """Memory of the training and its loader processes, MB."""
    main: float
    """CPU time of the training processes, % of a core."""
    workers: list[float]
    """CPU time of each loader process, % of a core."""
    thread: str
    """The training's most delayed thread."""
    thread_wait: list[float]
    """% of the time that threads of each training process were ready without a core."""
    loader_wait: list[float]
    """Likewise, of each loader process."""
    disk_r: float
    """MB/s read from disks."""
    disk_w: float
    """MB/s written to disks."""
    net_r: float
    """MB/s received."""
    net_w: float
    """MB/s sent."""
    gpu: list[Json]
    """Of each GPU what NVML can measure: ``util`` and ``mem`` (%), ``mem_mb``, ``w`` (watt), ``mhz``, ``throttle`` (why
    its clocks are lowered)."""


class TotalRecord(Record, total=False):
    """Exact sums over the steps so far, without each process's first."""

    t: FiniteFloat
    steps: Required[int]
    p: Required[dict[str, FiniteFloat]]
    """Milliseconds by phase."""


class TierReading(Record):
    """One reading of the data tier."""

    t: Required[FiniteFloat]
    machines: Required[list[Any]]
    may_ask: Required[int]
    """Batches that a training process may have requested and not used."""


class EventRecord(Record):
    """What happens once, such as the start."""

    name: Required[str]


class HealthRecord(Record):
    """One reading of gradients, weights and activations."""

    step: Required[int]


class KernelsRecord(Record):
    """A profiled window."""

    first: Required[int]
    last: Required[int]
    top: Required[list[Any]]


KINDS: dict[str, TypeAdapter[Any]] = {
    "header": TypeAdapter(Header),
    "header of steps": TypeAdapter(HeaderOfRank),
    "header of tier": TypeAdapter(HeaderOfRank),
    "header of system": TypeAdapter(HeaderOfMachine),
    "step": TypeAdapter(Step),
    "total": TypeAdapter(TotalRecord),
    "sample": TypeAdapter(Sample),
    "tier": TypeAdapter(TierReading),
    "event": TypeAdapter(EventRecord),
    "health": TypeAdapter(HealthRecord),
    "kernels": TypeAdapter(KernelsRecord),
}
"""What each kind of record holds; headers also by what they are of."""
ANY_KIND: TypeAdapter[Any] = TypeAdapter(Record)


@dataclass
class RunRecords:
    """The records of a run. Whatever is missing is empty; ``notes`` says what is wrong with its files."""

    folder: Path
    """Folder of the run."""
    summary: Json = field(default_factory=dict)
    """``summary.json``."""
    config: Json = field(default_factory=dict)
    """``config.yaml``."""
    job: Json = field(default_factory=dict)
    """``job.json``, where ``kd-launch`` has fetched the run."""
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """Recorded steps by rank, in order."""
    totals: dict[int, Json] = field(default_factory=dict)
    """The newest exact totals by rank."""
    headers: dict[int, Json] = field(default_factory=dict)
    """Headers of the step files by rank."""
    events: list[Json] = field(default_factory=list)
    """One-time records, such as start-up."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples of each machine, in order."""
    nodes: dict[str, Json] = field(default_factory=dict)
    """Headers of the system files by node."""
    tier: dict[int, list[Json]] = field(default_factory=dict)
    """Readings of the data tier by rank, since the run was last resumed."""
    health: list[Json] = field(default_factory=list)
    """Training-health records, in order."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Pictures by class of each split."""
    fidelity: Json = field(default_factory=dict)
    """``fidelity.json``: how the student compares with its teacher and which classes it confuses, in its best validation."""
    kernels: list[Json] = field(default_factory=list)
    """Profiled windows."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Rows of ``metrics.csv``, numbers as floats."""
    notes: list[str] = field(default_factory=list)
    """What could not be read."""

    def event(self, name: str) -> Json | None:
        """The newest event of a name; None without any."""
        return next((e for e in reversed(self.events) if e["name"] == name), None)

    @property
    def primary(self) -> str:
        """The task's main metric; ``acc1`` where the records do not name it."""
        for header in self.headers.values():
            if header.get("primary"):
                return header["primary"]
        return self.summary.get("primary") or "acc1"

    @property
    def student(self) -> Json:
        """The student's part of ``summary.json``; before that is written its architecture and size; {} without both."""
        return self.summary.get("student") or self._from_header("student")

    @property
    def teacher(self) -> Json:
        """The teacher's part of ``summary.json``; before that is written what was found of it before the first step.

        ``arch``, ``params``, ``val`` (its metrics), ``remedy`` (the key that the preflight has found); {} without one.
        """
        return self.summary.get("teacher") or self._from_header("teacher")

    def _from_header(self, name: str) -> Json:
        """A mapping in the newest header of a rank's step file, of the first rank that has it; {} without it."""
        for header in self.headers.values():
            if header.get(name):
                return header[name]
        return {}


def is_kept(number: int, share: float) -> bool:
    """Whether a record survives thinning; one that survives at a share does at every larger one.

    By Knuth's multiplicative hash of the records before it, below ``share`` of its range. The first one always survives.

    Args:
        number: of the record, from 1.
        share: of the records that are kept, above 0 and up to 1.

    >>> kept = {share: {number for number in range(10_000) if is_kept(number, share)} for share in (0.25, 0.5, 1.0)}
    >>> kept[0.25] < kept[0.5] < kept[1.0], len(kept[0.25]), len(kept[1.0])
    (True, 2502, 10000)
    """
    return ((number - 1) * _SPREAD) % 2**32 < share * 2**32


class Writer:
    """Appends records to a file of bounded length; one thread of one process writes a file.

    When ``limit`` lines are reached, half of the records of :data:`THINNED` are dropped, chosen by a hash of their
    number, and as many of the later ones. What stays is an even sample of the whole run, so percentiles hold; what must
    be exact (sums, counts, maxima) is written as ``total`` lines by the callbacks, of which the newest is kept.

    Args:
        path: the file; an existing one is continued.
        header: facts that do not change (``of``, ``rank``, ...).
        limit: lines.
    """

    def __init__(self, path: Path, header: Json, limit: int = LIMIT) -> None:
        """Opens the file, and writes a header; an existing file is continued.

        Args:
            path: of the records.
            header: of this process's records.
            limit: lines; from there on the file is thinned.
        """
        self.path = path
        self.limit = limit
        self.share = 1.0
        self.last_total: Json | None = None
        self._number = 0  # of the newest record of a kind that is thinned, also of those left out

        # Continue an existing file: as thin as it is, from its newest total and line.
        continues = file_for(path).is_file()
        earlier = read_lines(path, LARGEST_LOG)[0] if continues else []
        for record in earlier:
            self._number = max(self._number, record.get("n", 0))
            if record["kind"] == "header":
                self.share = min(self.share, record.get("share", 1.0))
            elif record["kind"] == "total":
                self.last_total = record
        self._lines = len(earlier)
        self._file = appended(path)
        if continues:
            self._file.write("\n")  # its last line may be torn
        self.write({"kind": "header", "schema": SCHEMA, **header, "share": self.share})

    def write(self, record: Json) -> None:
        """Appends one record, which readers see at once; one that falls to thinning is left out.

        Where the file then has ``limit`` lines, it is thinned.

        Args:
            record: with its ``kind`` (:data:`KINDS`), as plain values; one of :data:`THINNED` gets its number as ``n``.
        """
        if record["kind"] in THINNED:
            self._number += 1
            if not is_kept(self._number, self.share):
                return
            record = {**record, "n": self._number}
        self._file.write(json.dumps(masked(record), separators=(",", ":")) + "\n")
        self._file.flush()
        self._lines += 1
        if self._lines >= self.limit:
            self._thin()

    def _thin(self) -> None:
        """Halves the share of the records of :data:`THINNED` that are kept, and writes the file anew.

        Of the totals it keeps the newest.
        """
        records, _ = read_lines(self.path, LARGEST_LOG)
        self.share /= 2
        totals = [record for record in records if record["kind"] == "total"]
        lines = []
        for record in records:
            is_newest = record["kind"] != "total" or record is totals[-1]
            if is_newest and (record["kind"] not in THINNED or is_kept(record["n"], self.share)):
                shared = {"share": self.share} if record["kind"] == "header" else {}
                lines.append(json.dumps({**record, **shared}, separators=(",", ":")) + "\n")
        self._file.close()
        write_text(self.path, "".join(lines))
        self._file = appended(self.path)
        self._lines = len(lines)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_lines(path: Path, largest: int = LARGEST) -> tuple[list[Json], list[str]]:
    """The records of one file from its first header on, and notes for the page on what is left out: torn lines, and records
    that lack what their readers rely on.

    Args:
        path: the file.
        largest: bytes that it may have.

    Raises:
        RefusedFile: it is no regular file, or has more than ``largest`` bytes.
    """
    records = []
    torn = broken = 0
    for line in bytes_of(path, largest).splitlines():
        try:
            record = json_of(line)
            assert isinstance(record["kind"], str)
        except (ValueError, AssertionError, KeyError, TypeError):
            torn += bool(line.strip())
            continue
        if is_whole(record):
            records.append(record)
        else:
            broken += 1
    notes = []
    if torn:
        notes.append(f"{path.name}: {counted(torn, 'torn line')} left out")
    if broken:
        why = "a field is missing, or a number is NaN or infinite"
        notes.append(f"{path.name}: {counted(broken, 'record')} left out: {why}")
    kinds = [record["kind"] for record in records]
    first = kinds.index("header") if "header" in kinds else len(records)
    if first:
        notes.append(f"{path.name}: its header is torn: records before the next one are left out")
    return records[first:], notes


def is_whole(record: Json) -> bool:
    """Whether a record holds what its kind needs, so that its readers can rely on it."""
    kind = record["kind"]
    checked = KINDS.get(f"{kind} of {record.get('of')}", KINDS.get(kind, ANY_KIND))
    try:
        checked.validate_python(record, strict=True)
    except ValidationError:
        return False
    return True


WRITTEN = ("config.yaml", "summary.json", "metrics.csv", "records")
"""What a run writes into its folder: any one of them makes a folder a run's."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds anything of :data:`WRITTEN`; ``kd-runs`` and ``kd-report`` find runs by it."""
    return any((folder / name).exists() for name in WRITTEN)


def read_results(folder: Path) -> RunRecords:
    """A run's settings, summary and metrics, without its records, which are large.

    Its ``notes`` name a missing ``summary.json`` or ``config.yaml``, and each of the three that is damaged.
    """
    run = RunRecords(folder)
    summary = _mapping(folder / "summary.json", run.notes)
    config = _mapping(folder / "config.yaml", run.notes)
    run.summary = masked(summary)
    run.config = masked(config)
    run.metrics = rows_of_metrics(folder / "metrics.csv", run.notes)
    return run


def read_run(folder: str | Path) -> RunRecords:
    """What a run has recorded: steps by phase, machines, metrics, tensors; also of one that still runs or has failed.

    Args:
        folder: of the run.

    Raises:
        UserError: it is no run's folder; the message names runs below it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"run folder {folder} not found")
    if not is_run(folder):
        below = [
            file.parent for level in ("*", "*/*") for file in folder.glob(f"{level}/config.yaml")
        ]
        hint = f"; did you mean {', '.join(map(str, sorted(below)[-3:]))}?" if below else ""
        lacks = "it has no config.yaml, summary.json, metrics.csv or records"
        raise UserError(f"{folder} is no run's folder: {lacks}{hint}")
    run = read_results(folder)
    if (folder / "job.json").exists():
        run.job = _mapping(folder / "job.json", run.notes)
    if (folder / "fidelity.json").exists():
        run.fidelity = _mapping(folder / "fidelity.json", run.notes)

    # The files samples.*.jsonl are an audit's, not for a report.
    files = sorted((folder / "records").glob("*.jsonl"))
    files = [file for file in files if not file.name.startswith("samples.")]
    if not files:
        run.notes.append(
            "the run has no records (monitor.enabled=false, or it stopped before the first step)"
        )
    for file in files:
        try:
            records, notes_of_file = read_lines(file, LARGEST_LOG)
        except OSError as error:
            run.notes.append(f"{file.name} is left out: {error.strerror}")
            continue
        run.notes += notes_of_file
        _sort_in(run, records)

    for rank, steps in run.steps.items():
        run.steps[rank] = _that_count(steps)
    run.health = _that_count(run.health)

    # The summary of a run that has been resumed since describes its first part: that run has not ended.
    summary_file = folder / "summary.json"
    begun_t = max((header.get("t", 0.0) for header in run.headers.values()), default=0.0)
    # a file from a store has a time of its own, which says nothing of this
    if summary_file.is_file() and TIMES <= summary_file.stat().st_mtime < begun_t:
        ended = ("status", "error")
        run.summary = {key: value for key, value in run.summary.items() if key not in ended}
    return run


def _that_count(records: Sequence[Any]) -> list[Any]:
    """Records of steps, as they were written, without those that a resumed run has begun to make again: from its first step
    on only its own stay.
    """
    kept = []
    least = math.inf
    for record in reversed(records):
        if record["step"] < least:
            least = record["step"]
            kept.append(record)
    return kept[::-1]


def read_siblings(folder: Path, newest: int = 5) -> dict[str, list[dict[str, float]]]:
    """Rows of ``metrics.csv`` of the other runs of a recipe, by ``RECIPE/RUN``.

    Args:
        folder: of the run; the others are beside it.
        newest: how many, by the time of their last change.
    """
    here = folder.resolve()
    files = []
    for file in here.parent.glob("*/metrics.csv"):
        if file.parent != here and not file.parent.is_symlink():
            files.append(file)
    files.sort(key=lambda file: file.stat().st_mtime_ns)
    recipe = here.parent.name
    return {f"{recipe}/{file.parent.name}": rows_of_metrics(file, []) for file in files[-newest:]}


def _sort_in(run: RunRecords, records: Iterable[Any]) -> None:
    """Adds the records of one file to the run; the header before a record says whose it is (rank, node).

    A file has several headers where a run was resumed.
    """
    header: Json = {}
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
        elif kind == "event":
            run.events.append(record)
        elif kind == "health":
            run.health.append(record)


def _keep_header(run: RunRecords, record: Json) -> None:
    """Puts a file's header where its records go in ``run``; each kind of records has its own place."""
    if record["of"] == "steps":
        run.headers[record["rank"]] = record
    elif record["of"] == "system":
        run.nodes[record["node"]] = record
    elif record["of"] == "tier":
        run.tier[record["rank"]] = []
    elif record["of"] == "health":
        run.counts = record.get("counts", {})


def _mapping(file: Path, notes: list[str]) -> Json:
    """The mapping in a JSON or YAML file; {} where that can't be read, and ``notes`` gets the reason."""
    content = None
    try:
        text = text_of(file)
        content = json_of(text) if file.suffix == ".json" else yaml_of(text)
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return {}
    except (OSError, ValueError):
        pass
    if not isinstance(content, dict):
        notes.append(f"{file.name} can't be read")
        return {}
    return content


def rows_of_metrics(file: Path, notes: list[str]) -> list[dict[str, float]]:
    """The rows of ``metrics.csv``, numbers alone; [] without the file; a damaged one gives the rows before, and a note.

    Of more than :data:`MOST_ROWS` every second, fourth, ... row stays, and each row of a validation.
    """
    if not file.exists():
        return []
    rows: dict[int, dict[str, float]] = {}  # by their number
    every = 1
    most = MOST_ROWS
    number = 0
    try:
        with lines_of(file, LARGEST_LOG) as lines:
            for number, texts in enumerate(csv.DictReader(lines), start=1):
                row = {}
                for name, text in texts.items():
                    with suppress(TypeError, ValueError):
                        row[str(name)] = float(text)
                if number % every == 0 or _is_validation(row):
                    rows[number] = row
                if len(rows) >= most:
                    every *= 2
                    rows = {i: r for i, r in rows.items() if i % every == 0 or _is_validation(r)}
                    most = max(MOST_ROWS, 2 * len(rows))  # rows of validations stay, however many
    except (OSError, ValueError, csv.Error):
        notes.append(f"{file.name} can't be read after row {number}")
    return list(rows.values())


def _is_validation(row: dict[str, float]) -> bool:
    return any(name.startswith("val/") for name in row)


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between neighbours; NaN of no values.

    ``x[i] + (x[i + 1] - x[i]) * f`` of the sorted values, where ``i + f = (n - 1) q / 100``: numpy's default method
    (type 7 of Hyndman and Fan, "Sample quantiles in statistical packages", 1996).

    >>> percentile([1, 2, 3, 4], 50)
    2.5
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    last = len(ordered) - 1
    position = last * q / 100
    below = math.floor(position)
    above = min(below + 1, last)
    step = ordered[above] - ordered[below]
    return ordered[below] + step * (position - below)
