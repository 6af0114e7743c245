"""Searches: their folders, trials and processes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from kd.fleet.tuning.study import Study
from tests._forks import processes


def trials(folder: Path) -> list[Any]:
    return Study(folder, ["maximize"], "tpe", "none", 1, 0).trials()


def of(recipe: Path, name: str = "search") -> Path:
    return recipe.parent / "runs" / "tiny" / "tune" / name


def trial_processes(folder: Path) -> set[int]:
    """Processes that hold a trial's lock: the search and its runs."""
    owners = {
        str(file.resolve())
        for name in ("owner", "runner")
        for file in folder.glob(f"trials/*/{name}")
    }
    found = set()
    for pid, _, state in processes():
        for handle in Path(f"/proc/{pid}/fd").glob("*") if state != "Z" else ():
            with suppress(OSError):
                if str(handle.readlink()) in owners:
                    found.add(pid)
    return found
