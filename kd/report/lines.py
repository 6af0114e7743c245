"""Records as lines of JSON: a writer that keeps a file bounded, and its reader.

Every file begins with a header line that holds ``schema``; each line has a ``kind``. Times are in milliseconds (``ms``,
phases) or seconds (``s``; ``t`` is Unix time).
"""

import json
from pathlib import Path
from typing import Any

from kd.storage.elsewhere import appended, fresh, json_of

SCHEMA = 1
PHASES = (
    "data", "h2d", "teacher", "student", "loss", "backward", "communication", "optimizer", "logging", "checkpoint",
)  # fmt: skip
"""The parts of a step, in order. ``validation`` and ``profiling`` stand beside them and are no part of a step."""
LIMIT = 20_000  # lines a file: a few MB
THINNED = ("step", "sample", "tier")
_SPREAD = 2_654_435_761  # Knuth's multiplicative hash: spreads consecutive numbers evenly over 32 bits


def kept(number: int, share: float) -> bool:
    """Whether line ``number`` is among the kept ``share``; who is kept at a share is kept at every larger one."""
    return (number * _SPREAD) % 2**32 < share * 2**32


class Writer:
    """Appends records to a file of bounded length.

    When ``limit`` lines are reached, half of the steps and samples are dropped, chosen by a hash of their number, and
    as many of the later ones. What stays is an even sample of the whole run, so percentiles hold; what must be exact
    (sums, counts, maxima) is written as ``total`` lines by the callbacks, of which the newest is kept.
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
        self._file = appended(path)
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
        part = self.path.with_suffix(".tmp")
        with fresh(part) as file:
            file.write("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in lines).encode())
        part.replace(self.path)
        self._file = appended(self.path)
        self._lines = len(lines)

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of one file, and notes: torn lines are left out, and all of a file of a newer schema."""
    records: list[dict[str, Any]] = []
    torn, notes = 0, []
    for line in path.read_bytes().splitlines():
        try:
            record = json_of(line)
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
