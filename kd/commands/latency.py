"""``kd-latency``: how fast a student is, beside its teacher. Heavy imports wait until there is a run."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.report.tables import Result, write_parts
from kd.run.open import open_run
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.run.trust import made_here
from kd.ship.timed_exports import runtimes_of
from kd.storage.of_weights import LATENCY, write_of_weights
from kd.storage.run_urls import finished_at

HELP = """\
  kd-latency RUN_FOLDER [runtime=torch,onnx,onnx_int8] [batch=1,8,64] [threads=1,2] [seconds=1] [--json]

{options}

Each model runs in a process of its own; all take turns, so that what else the machine does hits them alike. The table
goes to RUN_FOLDER/export/latency.json and into the report.
"""

UNSTEADY = 1.1
"""The slowest round's median as a multiple of the fastest's, above which figures are not steady."""


class LatencyOptions(CommandOptions):
    """What ``kd-latency`` is given."""

    OTHERS = "data"
    WORDS = (1, 1)
    runtime: str | None = None
    """torch, and exports by their names below RUN_FOLDER/export (onnx, openvino_int8, ...), with commas; default: torch and
    every export that runs here (of Triton's repository to=onnx is the same file)."""
    batch: Annotated[list[int], Range("> 0")] = field(default_factory=lambda: [1, 8, 64])
    """Pictures at a time."""
    threads: Annotated[list[int], Range("> 0")] = field(default_factory=list)
    """Of each model; default: 1 and all cores."""
    seconds: Annotated[float, Range("> 0 and < 3600")] = 1.0
    """So long each model is timed at each batch and number of threads."""


OPTIONS = LatencyOptions


FLAGS = ("--json",)
"""Options that take no value."""


def run(request: Request, options: LatencyOptions) -> Result:
    """Times a student, its exports and its teacher, and writes ``export/latency.json`` in the run.

    The run's ``report.html`` is written anew where there is one.

    Raises:
        UserError: no finished run, a wrong key, or a ``runtime`` that the run has no export for.
    """
    from kd.machine import cores
    from kd.report.evaluated import latency_table
    from kd.report.html import write_report
    from kd.report.records import read_run
    from kd.report.rules import Explained

    # ascending: the peak of memory is that of the batches so far
    batches = sorted({*options.batch})
    threads = sorted({*(options.threads or (1, cores()))})
    folder = finished_at(request.rest[0], "config.yaml")
    trusted = "trust" in request.flags
    runtimes = runtimes_of(folder, options.runtime, lambda file: trusted or made_here(file))
    opened = open_run(str(folder), request)
    from kd.ship.latency import measure_latency

    open_again = partial(open_run, str(folder), request)  # in each model's process
    latencies = measure_latency(opened, open_again, runtimes, batches, threads, options.seconds)
    file = write_of_weights(folder, LATENCY, latencies)
    table = replace(latency_table(latencies), note=unsteady(latencies["rows"]))
    write_parts(folder, "latency", [table])
    result = Result(latencies, [table], files=[file])
    page = folder / "report.html"
    if page.is_file():
        write_report(Explained(read_run(folder)), page)
        result.files.append(page)
    return result


def unsteady(rows: Sequence[Mapping[str, Any]]) -> str:
    """A warning of the row whose rounds differ most, by their ratio; "" where that is at most :data:`UNSTEADY`.

    Args:
        rows: of ``latency.json``, one at least; ``fastest_round_ms`` and ``slowest_round_ms`` are medians of a round.
    """
    worst = max(rows, key=lambda row: row["slowest_round_ms"] / row["fastest_round_ms"])
    least = worst["fastest_round_ms"]
    most = worst["slowest_round_ms"]
    if most <= UNSTEADY * least:
        return ""
    return (
        f"not steady: the medians of {worst['model']} in {worst['runtime']} (batch {worst['batch']}, "
        f"{worst['threads']} threads) by round lie between {least:g} and {most:g} ms, so other work or a changing "
        "clock disturbs the figures; more seconds= makes them steadier"
    )
