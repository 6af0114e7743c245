"""A trial's process, without a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest

from kd.fleet.tuning.confirm import check_began_here
from kd.fleet.tuning.space import Space
from kd.fleet.tuning.study import Study
from kd.fleet.tuning.trials import WITH_SEARCH, Pool, Slot, TrialRun, lock_trial
from tests._files import write_json
from tests._helpers import refuses


def test_a_trial_that_finishes_while_the_search_stops_is_timed_by_the_next(tmp_path: Path) -> None:
    """It was recorded as failed: the search that stops begins no timing."""
    from kd.fleet.tuning.search import Search

    owner = lock_trial(tmp_path / "trials" / "0000")
    assert owner is not None
    slot = Slot((), ())
    job = TrialRun(tmp_path / "trials" / "0000", "tiny", slot, owner)
    job.run.mkdir(parents=True)  # as if the run had trained to its end
    write_json(job.run / "summary.json", {"status": "done"})
    (job.run / "student.safetensors").touch()
    told: list[str] = []
    search: Any = Search.__new__(Search)
    search.plan = SimpleNamespace(items=[], wants_latency=True, is_known_by_epoch=False)
    search.study = SimpleNamespace(tell=lambda trial, state, *_: told.append(state))
    search.extra = []
    begun = [(job, search._trial(job, None, {}))]

    def begin(slot: Slot) -> Any:
        if begun:
            job.stop(WITH_SEARCH)
            return begun.pop()
        return None

    Pool([slot]).run(begin)
    assert told == []
    assert not job.has_latency and job.process is None


def test_a_trial_without_its_objective_has_failed_and_ends_no_search(tmp_path: Path) -> None:
    from kd.fleet.tuning.plan import SearchObjective
    from kd.fleet.tuning.search import Search

    write_json(tmp_path / "summary.json", {"student": {"best_val": {"acc1": 0.5}}})
    search: Any = Search.__new__(Search)
    search.plan = SimpleNamespace(
        wants_latency=False, objectives=[SearchObjective("val/kl", maximize=False)]
    )
    search.study = Study(tmp_path, ["minimize"], "random", "none", 3, 0)
    trial, _ = search.study.ask([Space("optim.lr", None, 0.1, 0.2)])
    job: Any = SimpleNamespace(poll=lambda: 0, run=tmp_path, is_done=True, has_latency=False)
    assert search._record(job, trial)
    (failed,) = search.study.trials("failed")
    assert failed.user_attrs["reason"] == "an objective is not known, or NaN"


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
    with refuses("is a link"):
        Search(cast(Any, SimpleNamespace(folder=search)), [])
    assert (other_run / "metrics.csv").exists()


def test_a_journals_values_are_the_searchs_own() -> None:
    trial = optuna.trial.create_trial(
        value=1.0,
        params={"a": "os.system"},
        distributions={"a": optuna.distributions.CategoricalDistribution(["os.system"])},
    )
    with refuses("that are not this search's"):
        Study.values_in(trial, [Space("a", ("SGD", "AdamW"))])


def test_a_confirmation_takes_no_run_that_was_not_begun_here(
    tmp_path: Path, own_cache: Path
) -> None:
    planted, own = tmp_path / "planted", tmp_path / "own"
    for folder in (planted, own):
        folder.mkdir()
        (folder / "owner").touch()
    (planted / "tiny" / "000").mkdir(parents=True)
    for mark in ("", "a word of theirs"):
        with refuses("planted holds a run that this machine did not begin"):
            check_began_here(planted)
        (planted / "began").write_text(mark)
    check_began_here(own)
    (own / "tiny" / "000").mkdir(parents=True)
    check_began_here(own)  # it goes on
