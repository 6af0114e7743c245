"""What of the machine this process may use: processors, and the folder for what is kept between runs."""

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


def cache_dir() -> Path:
    """Where data and teachers made by kd are kept: ``KD_CACHE``, else the user's cache folder."""
    if "KD_CACHE" in os.environ:
        return Path(os.environ["KD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kd"
