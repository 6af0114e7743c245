"""Runs killed at random moments, again and again, each compared with one that was left in peace.

``python -m scripts.bench.soak --kills 300`` deals the kills to five kinds of run (plain, with the teacher's answers
cached, two ranks, ``runs_dir`` in an object store, a search) and writes a dated file beside this one. A
kill is a SIGKILL to all processes of a run, or to a search's controller, its trial or both, at a moment drawn from the
time that an uninterrupted run takes: while it starts, trains, saves, uploads or ends. Then the same command goes on;
every second time of a run in the object store on a fresh machine: the run's folder and all caches are gone.
Where a run has ended, the samples and the loss of every step, every row of metrics and every student are compared, byte
by byte. ``--only KIND`` (several with commas), ``--seed N``. The exit status is 0 where all are equal.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kd.errors import UserError
from kd.storage.checkpoints import newest_whole
from kd.storage.objects import file_system
from kd.storage.run_urls import fetched_run, on_disk
from scripts.bench.harness import options, table, write
from tests._bucket import KEYS, s3_server
from tests._forks import ForkedRun, start, start_ranks, status_of, survivors
from tests._helpers import tiny_recipe
from tests._kills import known, rows_of

IN_A_ROW = 6  # kills of one run at most, then it may end
COMMON = ["config=audit", "trainer.max_epochs=4", "trainer.precision=32-true", "checkpoint.every_n_steps=2",
          "data.augment.mixup=0.4", "model.ema_decay=0.9", "trainer.enable_progress_bar=false"]  # fmt: skip
SEARCH = ["search.optim.lr=[0.0005, 0.002]", "sampler=grid", "pruner=none", "trials=2"]


@dataclass
class Kind:
    """One kind of run.

    Attributes:
        items: its settings.
        ranks: its processes.
        store: its folder is in an object store.
        search: it is a search.
        runs: compared.
        kills: done.
        unequal: what differed, a line each.
    """

    items: list[str]
    ranks: int = 1
    store: bool = False
    search: bool = False
    runs: int = 0
    kills: int = 0
    unequal: list[str] = field(default_factory=list)


def kinds() -> dict[str, Kind]:
    """All of them, by name."""
    return {
        "plain": Kind(["data.num_workers=2"]),
        "cache": Kind(["model.teacher.cache=on", "model.teacher.cache_views=2"]),
        "two ranks": Kind(["config=ddp_2cpu", "data.batch_size=4"], ranks=2),
        "object store": Kind([], store=True),
        "search": Kind([], search=True),
    }


class Soak:
    """Runs of one recipe in one folder, with one S3 server.

    Args:
        folder: for all of it.
        seed: of the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.recipe = tiny_recipe(folder)
        self.log = folder / "log"
        self.fresh = 0  # resumes with nothing on this disk

    def begin(self, kind: Kind, name: str) -> list[int]:
        """Starts the run of that name, or goes on with it; its processes."""
        place = self.place(kind, name)
        whole, _ = newest_whole(place / "checkpoints")
        go_on = whole is not None and not kind.search
        asked = [
            f"recipe={self.recipe}",
            *COMMON,
            *kind.items,
            *(SEARCH if kind.search else []),
            f"name={name}",
        ]
        if go_on:
            asked = [f"resume={f's3://food/runs/tiny/{name}' if kind.store else place}"]
            if self.fresh % 2:
                _forget_machine(place)
        elif not kind.search:  # nothing to go on from: a user would remove it, or take another name
            self.forget(kind, place, name)
        if kind.store and not go_on:
            asked.append("runs_dir=s3://food/runs")
        if kind.ranks > 1:
            return start_ranks(asked, self.log, kind.ranks)
        return [start(asked, self.log, program="tune" if kind.search else "train")]

    def place(self, kind: Kind, name: str) -> Path:
        """The folder of a run, or of a search, on this disk."""
        if kind.store:
            return on_disk(f"s3://food/runs/tiny/{name}", "runs_dir")
        return self.folder / "runs" / "tiny" / ("tune" if kind.search else "") / name

    def forget(self, kind: Kind, place: Path, name: str) -> None:
        """Removes a run that has no checkpoint yet."""
        shutil.rmtree(place, ignore_errors=True)
        if kind.store:
            files, path = file_system(f"s3://food/runs/tiny/{name}")
            files.invalidate_cache()
            with suppress(FileNotFoundError):
                files.rm(path, recursive=True)

    def whole(self, kind: Kind, name: str) -> float:
        """The run that is left in peace; its seconds."""
        began = time.monotonic()
        for status in [status_of(pid) for pid in self.begin(kind, name)]:
            if status:
                raise SystemExit(f"{name}: ended with {status}\n{self.logged(kind)}")
        return time.monotonic() - began

    def broken(self, kind: Kind, name: str, seconds: float, most: int) -> list[int]:
        """A run that is killed up to ``most`` times; the steps that it went on from."""
        resumed, place, kills = [], self.place(kind, name), 0
        while True:
            pids = self.begin(kind, name)
            end = time.monotonic() + (self.rng.uniform(0, seconds) if kills < most else 600)
            while time.monotonic() < end and (left := [pid for pid in pids if _lives(pid)]):
                time.sleep(0.005)
            if not left:
                break
            if kills == most:
                raise SystemExit(f"{name}: does not end\n{self.logged(kind)}")
            kills += 1
            kind.kills += 1
            self.kill(kind, place, pids)
            self.fresh += kind.store
            if (
                self.fresh % 2
            ):  # what the store has is fetched to be compared, and removed again by the resume
                _forget_machine(place)
                with suppress(UserError):
                    fetched_run(f"s3://food/runs/tiny/{name}", "resume", checkpoints=True)
            resumed.append(known(place))
        if any(alive for pid in pids for alive in survivors(pid)):
            kind.unequal.append(f"{name}: processes are left over")
        return resumed

    def kill(self, kind: Kind, place: Path, pids: list[int]) -> None:
        """SIGKILL to all, or to parts of a search; waits until nothing of them writes any more."""
        trials = _trials(place) if kind.search else []
        victims = [*pids, *trials] if self.rng.random() < 0.5 else pids
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                status_of(pid)
            survivors(pid, 60)
        while kind.search and _trials(place):  # a trial saves when its controller has gone
            time.sleep(0.05)

    def compare(self, kind: Kind, whole: Path, broken: Path, resumed: list[int], name: str) -> None:
        """Notes each file that differs."""
        kind.runs += 1
        folders = (
            [whole, *sorted((whole / "trials").glob("*/tiny/000"))] if kind.search else [whole]
        )
        for folder in folders[kind.search :]:
            other = broken / folder.relative_to(whole)
            files = [
                f
                for p in ("records/samples.rank*.jsonl", "**/student.safetensors")
                for f in folder.glob(p)
            ]
            for file in files:
                twin = other / file.relative_to(folder)
                if not twin.is_file() or twin.read_bytes() != file.read_bytes():
                    kind.unequal.append(f"{name}: {file.relative_to(whole)}")
            if not kind.search and not rows_of(other, folder, resumed):
                kind.unequal.append(f"{name}: metrics.csv")
        if not files:
            kind.unequal.append(f"{name}: nothing to compare")

    def logged(self, kind: Kind) -> str:
        """The end of what was said."""
        file = self.log.with_suffix(".0") if kind.ranks > 1 else self.log
        return file.read_text(errors="replace")[-3000:]


def _forget_machine(place: Path) -> None:
    """Removes a run's folder and all that this machine keeps but the folders of other runs."""
    shutil.rmtree(place, ignore_errors=True)
    for entry in Path(os.environ["KD_CACHE"]).iterdir():
        if entry.is_dir() and not place.is_relative_to(entry):
            shutil.rmtree(entry)


def _lives(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _trials(place: Path) -> list[int]:
    """Processes that hold the lock of a trial, but for this one."""
    owners, found = {str(file.resolve()) for file in place.glob("trials/*/owner")}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) != os.getpid() and any(
                str(f.readlink()) in owners for f in (folder / "fd").iterdir()
            ):
                found.append(int(folder.name))
    return found


@contextmanager
def bucket() -> Iterator[None]:
    """An S3 server of this machine with one bucket, named by the environment."""
    import s3fs

    with s3_server() as address:
        os.environ |= {"AWS_ENDPOINT_URL": address, **KEYS}
        s3fs.S3FileSystem().mkdir("food")
        s3fs.S3FileSystem.clear_instance_cache()  # its threads would be lost in forks
        yield


def soak(soak: Soak, chosen: dict[str, Kind], kills: int, say: Callable[[str], None]) -> None:
    """Kills until there were so many of each kind."""
    for label, kind in chosen.items():
        name = label.replace(" ", "-")
        seconds = soak.whole(kind, f"{name}-whole")
        say(f"{label}: {seconds:.1f} s in peace")
        while kind.kills < kills:
            own = f"{name}-{kind.runs}"
            before = kind.kills
            resumed = soak.broken(kind, own, seconds, min(IN_A_ROW, kills - kind.kills))
            soak.compare(
                kind, soak.place(kind, f"{name}-whole"), soak.place(kind, own), resumed, own
            )
            said = "; ".join(kind.unequal) or "equal so far"
            say(
                f"{label}: run {kind.runs}, {kind.kills - before} kills, went on from {resumed}: {said}"
            )


def main() -> int:
    """Parses the command line, soaks, writes the result."""
    asked = options(__doc__, kills=300, seed=0, only="")
    torch.set_num_threads(1)
    names = asked.only.split(",") if asked.only else list(kinds())
    chosen = {name: kinds()[name] for name in names}
    began, said = time.monotonic(), list[str]()

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder, bucket():
        os.environ["KD_CACHE"] = f"{folder}/machine"
        import kd.fleet.tuning.trials

        kd.fleet.tuning.trials.start_kd_train = ForkedRun  # type: ignore[assignment] # imports nothing anew
        soak(Soak(Path(folder), asked.seed), chosen, -(-asked.kills // len(chosen)), say)
    rows = []
    for name, kind in chosen.items():
        rows.append([name, kind.runs, kind.kills, "; ".join(kind.unequal) or "all equal"])
    minutes = (time.monotonic() - began) / 60
    head = [f"{__doc__}".split("\n\n")[1], "", f"{minutes:.0f} minutes.", ""]
    lines = table(["kind", "runs compared", "kills", "to the last bit"], rows)
    asked.write = True
    write(asked, "soak_kills", "Kills at random moments", [*head, *lines, "", "```", *said, "```"])
    return int(any(kind.unequal for kind in chosen.values()))


if __name__ == "__main__":
    sys.exit(main())
