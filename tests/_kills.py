"""Kills a run again and again, and compares it with one that was left in peace.

``python -m tests._kills RECIPE KILLS SEED [key=value ...]`` prints a line a kill; the exit status is 0 where records,
metrics and student are the same to the last bit and no process is left over. One process imports everything and forks
the runs, so that a kill costs a second and not ten.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests._forks import start, status_of, survivors

RECORD, STUDENT = "records/samples.rank0.jsonl", "student.safetensors"


def lines(folder: Path) -> int:
    record = folder / RECORD
    return record.read_bytes().count(b"\n") if record.exists() else 0


def kill_after(pid: int, folder: Path, already: int, steps: int, jitter_s: float) -> bool:
    """SIGKILL once ``steps`` more lines are on the disk, and a moment later; False where the run ended before."""
    deadline = time.monotonic() + 60
    while lines(folder) != already + steps:
        if os.waitpid(pid, os.WNOHANG)[0] or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    time.sleep(jitter_s)
    os.kill(pid, signal.SIGKILL)
    status_of(pid)
    return True


def main(recipe: Path, kills: int, seed: int, items: list[str]) -> int:
    runs, log = recipe.parent / "runs" / "tiny", recipe.parent / "kills.log"
    asked = [f"recipe={recipe}", "config=audit", "trainer.enable_progress_bar=false", *items]
    assert status_of(start(asked, log)) == 0, log.read_text()
    whole, broken = runs / "000", runs / "001"
    rng, sessions, resumed = random.Random(seed), [], []
    pid = start(asked, log)
    for kill in range(kills):
        sessions.append(pid)
        kept = known(broken)
        if not kill_after(pid, broken, kept, rng.randint(3, 4), rng.random() * 0.05):
            print(f"the run ended before kill {kill + 1}\n{log.read_text()[-2000:]}")
            return 1
        resumed.append(known(broken))
        print(
            f"kill {kill + 1:>2}: went on at step {kept:>3}, killed after {lines(broken):>3} of {lines(whole)}",
            flush=True,
        )
        pid = start([f"resume={broken}"], log)
    sessions.append(pid)
    if status_of(pid) != 0:
        print(log.read_text()[-2000:])
        return 1
    left = [alive for session in sessions for alive in survivors(session)]
    same = {
        name: (whole / name).read_bytes() == (broken / name).read_bytes()
        for name in (RECORD, STUDENT)
    }
    same["metrics.csv"] = rows_of(broken, whole, resumed)
    print(
        f"{kills} kills, the same to the last bit: {json.dumps(same)}; processes left over: {len(left)}"
    )
    return 0 if all(same.values()) and not left else 1


def rows_of(broken: Path, whole: Path, resumed: list[int]) -> bool:
    """Whether metrics.csv has the rows of the other, in order. A kill between a checkpoint and the row of its step,
    which Lightning writes a moment later, loses that row: the last one before a step in ``resumed`` may be missing."""
    part, full = ((folder / "metrics.csv").read_text().splitlines() for folder in (broken, whole))
    column = full[0].split(",").index("step")
    remaining = iter(full)
    missing = [row for row in full if row not in part]
    return all(row in remaining for row in part) and all(
        int(m.split(",")[column]) + 1 in resumed for m in missing
    )


def known(folder: Path) -> int:
    """The step that the next run goes on from: what its record is cut back to."""
    from kd.storage.checkpoints import newest_whole

    checkpoint, _ = newest_whole(folder / "checkpoints")
    return torch.load(checkpoint, weights_only=True)["global_step"] if checkpoint else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
