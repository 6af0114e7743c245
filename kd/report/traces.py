"""GPU time of every rank in the profiled window, by HolisticTraceAnalysis. Needs the extra ``traces``."""

import logging
import re
from pathlib import Path
from typing import Any

from kd.errors import UserError, needs_extra
from kd.report.records import RunRecords, Writer
from kd.report.tables import Table
from kd.storage.elsewhere import LARGEST_LOG, regular

COLUMNS = ["rank", "computing", "communication, copies", "idle", "communication behind computing"]


def write_rank_shares(run: RunRecords) -> None:
    """Analyses ``records/trace.rank<r>.json`` and appends the result to ``records/traces.jsonl``.

    Raises:
        UserError: the extra is not installed, there are no traces of GPUs, or one can't be analysed.
    """
    place = run.folder / "records"
    files = {}
    for file in sorted(place.glob("trace.rank*.json")):
        rank = int(re.findall(r"\d+", file.name)[0])
        files[rank] = str(regular(file, LARGEST_LOG))
    if not files:
        raise UserError(
            f"--traces: {place} has no trace.rank<r>.json (monitor.kernels_at=20 writes them)"
        )
    if not any(window.get("busy") is not None for window in run.kernels):
        raise UserError(f"--traces: the traces in {place} are of a CPU, only GPUs' can be compared")
    shares = rank_shares(files)
    writer = Writer(place / "traces.jsonl", {"of": "traces"})
    writer.write({"kind": "event", "name": "traces", "ranks": shares})
    writer.close()


def rank_shares(files: dict[int, str]) -> list[dict[str, float]]:
    """Each ``rank``'s GPU in % of the window: ``computing``, ``other`` (communication, copies), ``idle``.

    ``overlap`` is the part of the communication during which the GPU also computes, in % of the communication.

    Args:
        files: path of the Chrome trace, by rank.

    Raises:
        UserError: the extra is not installed, or a trace can't be analysed.
    """
    try:
        from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        raise UserError(f"--traces: {needs_extra('traces')}") from error
    logging.getLogger("hta").setLevel(logging.ERROR)
    try:
        analysis = TraceAnalysis(trace_files=files)
        breakdown = analysis.get_temporal_breakdown(visualize=False)
        parts: list[dict[str, Any]] = breakdown.to_dict("records")
        overlaps = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
        hidden = overlaps["comp_comm_overlap_pctg"]
    except Exception as error:  # a torn trace, or one without a kernel, ends anywhere in it
        names = ", ".join(Path(file).name for file in files.values())
        raise UserError(
            f"--traces: HolisticTraceAnalysis can't compare {names} "
            f"({type(error).__name__}: {str(error)[:120]}): torn, or without any GPU's work"
        ) from error
    return [
        {
            "rank": int(part["rank"]),
            "computing": float(part["compute_time_pctg"]),
            "other": float(part["non_compute_time_pctg"]),
            "idle": float(part["idle_time_pctg"]),
            "overlap": float(hidden[part["rank"]]),
        }
        for part in parts
    ]


def section(run: RunRecords) -> Table | None:
    """The page's table of each rank's GPU time, in %; None where no traces were analysed."""
    event = run.event("traces")
    if event is None:
        return None
    rows = []
    for shares in event["ranks"]:
        values = [shares[name] for name in ("computing", "other", "idle", "overlap")]
        rows.append([str(shares["rank"]), *values])
    return Table("GPU time of each rank in the profiled window (%)", COLUMNS, rows)
