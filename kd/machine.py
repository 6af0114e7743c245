"""What of the machine's processors this process may use."""

import os
from pathlib import Path


def core_ids() -> list[int] | None:
    """Numbers of the cores that this process may run on, where the system tells."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores that this process was given: by affinity, or by its container's ``quota`` (cgroup v2)."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.is_file() and not quota.read_text().startswith("max"):
        allowed, period = quota.read_text().split()
        given = min(given, max(1, int(allowed) // int(period)))
    return given
