"""A trial's process, without a run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import optuna
import pytest

from kd.errors import UserError
from kd.fleet.tuning.confirm import check_began_here
from kd.fleet.tuning.space import Space
from kd.fleet.tuning.study import Study
from kd.fleet.tuning.trials import WITH_SEARCH, Pool, TrialRun, deal, lock_trial


class Ended:
    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int, /) -> None:
        pass


class Place:
    """A place that keeps what was started on it."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(
        self, items: Sequence[str], log: Path, env: Mapping[str, str], owner: IO[str] | None = None
    ) -> Ended:
        self.started.append(items[0])
        return Ended(0)


def finish(job: TrialRun) -> None:
    """As if the run had trained to its end before."""
    job.run.mkdir(parents=True)
    (job.run / "summary.json").write_text(json.dumps({"status": "done"}))
    (job.run / "student.safetensors").touch()


def job_in(folder: Path) -> tuple[TrialRun, Place]:
    owner = lock_trial(folder)
    assert owner is not None
    place = Place()
    return TrialRun(folder, "tiny", place, owner), place


def test_a_trial_that_finishes_while_the_search_stops_is_timed_by_the_next(tmp_path: Path) -> None:
    """It was recorded as failed: the search that stops begins no timing."""
    pytest.importorskip("optuna")
    from kd.fleet.tuning.search import Search

    job, place = job_in(tmp_path / "trials" / "0000")
    finish(job)
    job.begin(["recipe=tiny"])
    told: list[str] = []
    search: Any = Search.__new__(Search)
    search.plan = SimpleNamespace(objectives=[None, None], wants_latency=True, trial_hours=None)
    search.study = SimpleNamespace(tell=lambda trial, state, **_: told.append(state))
    job.stop(WITH_SEARCH)
    pool = Pool([])
    pool.running.append(job)
    pool.run(lambda slot: None, search._has_ended)
    assert (told, pool.running, pool.free) == ([], [], [place])
    assert not job.has_latency and not place.started


def test_more_jobs_than_gpus_share_them_one_each() -> None:
    assert [slot.gpus for slot in deal(3, ["0", "1"])] == [("0",), ("1",), ("0",)]
    assert [slot.gpus for slot in deal(2, [])] == [(), ()]


@pytest.mark.parametrize(
    "place", ["trials", "trials/0000", "trials/0000/tiny", "trials/0000/tiny/000"]
)
def test_a_search_whose_trials_are_links_is_not_opened(place: str, tmp_path: Path) -> None:
    """A search's folder may be a stranger's: its trial would begin anew in another search's folder."""
    from kd.fleet.tuning.search import Search

    search = tmp_path / "runs" / "tiny" / "tune" / "search"
    link = search / place
    other = tmp_path / "other"
    other_run = other / Path("trials/0000/tiny/000").relative_to(place)
    other_run.mkdir(parents=True)
    (other_run / "metrics.csv").touch()
    link.parent.mkdir(parents=True)
    link.symlink_to(other)
    with pytest.raises(UserError, match="is a link"):
        Search(cast(Any, SimpleNamespace(folder=search)), [], print)
    assert (other_run / "metrics.csv").exists()


def test_a_journals_values_are_the_searchs_own() -> None:
    trial = optuna.trial.create_trial(
        value=1.0,
        params={"a": "os.system"},
        distributions={"a": optuna.distributions.CategoricalDistribution(["os.system"])},
    )
    with pytest.raises(UserError, match="that are not this search's"):
        Study.values_in(trial, [Space("a", ("SGD", "AdamW"))])


def test_a_confirmation_takes_no_run_that_was_not_begun_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "cache"))
    planted, own = tmp_path / "planted", tmp_path / "own"
    for folder in (planted, own):
        folder.mkdir()
        (folder / "owner").touch()
    (planted / "tiny" / "000").mkdir(parents=True)
    for mark in ("", "a word of theirs"):
        with pytest.raises(UserError, match="planted holds a run that this machine did not begin"):
            check_began_here(planted)
        (planted / "began").write_text(mark)
    check_began_here(own)
    (own / "tiny" / "000").mkdir(parents=True)
    check_began_here(own)  # it goes on
