"""A trial's process, without a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from kd.fleet.tuning.trials import LOST, MOST_LOST, TrialRun, deal, lock_trial


class Ended:
    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int, /) -> None:
        pass


class Lossy:
    """A place whose machines are lost, again and again; it keeps what was started."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(
        self, items: Sequence[str], log: Path, env: Mapping[str, str], owner: IO[str] | None = None
    ) -> Ended:
        self.started.append(items[0])
        return Ended(LOST)


def finish(job: TrialRun) -> None:
    """As if the run had trained to its end before."""
    job.run.mkdir(parents=True)
    (job.run / "summary.json").write_text(json.dumps({"status": "done"}))
    (job.run / "student.safetensors").touch()


def job_in(folder: Path) -> tuple[TrialRun, Lossy]:
    owner = lock_trial(folder)
    assert owner is not None
    place = Lossy()
    return TrialRun(folder, "tiny", place, owner), place


def test_a_machine_lost_while_a_student_is_timed_does_not_fail_its_trial(tmp_path: Path) -> None:
    job, place = job_in(tmp_path / "trials" / "0000")
    finish(job)
    job.begin(["recipe=tiny"])
    assert job.status == 0 and job.time_student()
    assert job.status is None  # lost: the run itself has ended well
    assert job.status == 0 and job.lost == 1
    assert job.time_student() and place.started == ["latency", "latency"]


def test_a_trial_that_finishes_while_the_search_stops_is_timed_by_the_next(tmp_path: Path) -> None:
    """It was recorded as failed: the search that stops begins no timing."""
    pytest.importorskip("optuna")
    from kd.fleet.tuning.search import Running, Search

    job, place = job_in(tmp_path / "trials" / "0000")
    finish(job)
    job.begin(["recipe=tiny"])
    told: list[str] = []
    search: Any = Search.__new__(Search)
    search.plan = SimpleNamespace(objectives=[None, None], wants_latency=True, trial_hours=None)
    search.study = SimpleNamespace(tell=lambda trial, state, **_: told.append(state))
    search.running, search.free = [Running(None, {}, job)], []
    search._end_all("SIGTERM")
    assert (told, search.running, search.free) == ([], [], [place])
    assert not job.has_latency and not place.started


def test_a_trial_that_loses_its_machines_fails_with_their_number(tmp_path: Path) -> None:
    job, place = job_in(tmp_path / "trials" / "0000")
    job.begin(["recipe=tiny"])
    assert [job.status for _ in range(MOST_LOST + 2)] == [None] * MOST_LOST + [1, 1]
    assert job.reason() == "it lost its machine 4 times"
    assert len(place.started) == 4


def test_more_jobs_than_gpus_share_them_one_each() -> None:
    assert [slot.gpus for slot in deal(3, ["0", "1"])] == [("0",), ("1",), ("0",)]
    assert [slot.gpus for slot in deal(2, [])] == [(), ()]
