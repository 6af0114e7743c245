"""A changed run predicted from records: by hand, on the command line."""

from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main
from kd.errors import UserError
from kd.report.costs import Change, outlook_table, predict, present
from kd.report.facts import Facts
from kd.report.records import RunRecords, read_run
from tests._pages import tier_run, write_run


def facts(phases: dict[str, float], **header: Any) -> Facts:
    """Ten epochs of a hundred steps, from start-up to end."""
    told = {"device": "cuda", "cores": 16, "threads": 1, "num_workers": 0, "batch_size": 64, "world_size": 1,
            "processes": 1, "batches_per_epoch": 100, "max_epochs": 10}  # fmt: skip
    total = {"steps": 999, "p": {name: 999 * ms for name, ms in phases.items()}}
    events = [{"name": "startup", "s": 36.0, "parts": {}}]
    return Facts(
        RunRecords(Path("x"), headers={0: told | header}, totals={0: total}, events=events)
    )


def test_the_run_as_it_is() -> None:
    now = predict(facts({"teacher": 60.0, "student": 40.0, "validation": 8.0}), Change())
    assert now.step_ms == pytest.approx(100)
    assert now.images_per_s == pytest.approx(640)
    assert now.hours == pytest.approx((36 + 1000 * 0.108) / 3600)
    assert now.cost is None


def test_a_cache_pays_after_its_first_views() -> None:
    """Four epochs of ten compute at 100 ms, six read at 40."""
    cached = predict(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True))
    assert cached.step_ms == pytest.approx((4 * 100 + 6 * 40) / 10)
    short = predict(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True, epochs=4))
    assert short.step_ms == pytest.approx(100)


def test_loader_processes_hide_what_they_can() -> None:
    slow = facts({"data": 60.0, "student": 40.0})
    steps = [predict(slow, Change(workers=n)).step_ms for n in (0, 1, 2, 4)]
    assert steps == pytest.approx([100, 60, 40, 40])
    behind = facts(
        {"data": 60.0, "student": 40.0}, num_workers=2
    )  # a batch takes one of them 200 ms
    assert [predict(behind, Change(workers=n)).step_ms for n in (2, 4, 8)] == pytest.approx(
        [100, 50, 40]
    )


def test_more_processes_share_an_epoch_and_wait_for_a_longer_ring() -> None:
    """Exposed all-reduce of 10 ms on two becomes 10 * (7 / 8) / (1 / 2) = 17.5 ms on eight."""
    two = facts({"student": 90.0, "communication": 10.0}, world_size=2)
    two.run.config = {"monitor": {"price_per_hour": 8.0}}
    eight = predict(two, Change(gpus=8))
    assert eight.step_ms == pytest.approx(107.5)
    assert eight.hours == pytest.approx((36 + 250 * 0.1075) / 3600)
    assert eight.cost == pytest.approx(4 * 8.0 * eight.hours)
    assert predict(two, Change(gpus=8, price=20.0)).cost == pytest.approx(20 * eight.hours)


def test_the_command_says_how_far_it_can_be_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert report_main([str(folder), "--what-if", "cache=on", "gpus=8", "price=32.8"]) == 0
    out = capsys.readouterr().out
    assert "as it is" in out
    assert "give or take" not in out  # how far it is from the truth is not known
    assert "A run of one process measures no communication" in out
    assert report_main([str(folder), "--what-if", "cache=on"]) == 0
    assert "give or take 23%" in capsys.readouterr().out
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("cache=maybe", "cache: must be true or false, got 'maybe'"),
        ("gpus=0", "gpus: must be >= 1, got 0"),
        ("gpus=many", "gpus: must be a whole number, got 'many'"),
        ("workers=1.5", "workers: must be a whole number, got '1.5'"),
        ("price=-1", "price: must be >= 0, got -1"),
        ("data_machines=-1", "data_machines: must be >= 0, got -1"),
        ("data_machines=two", "data_machines: must be a whole number, got 'two'"),
        ("data_machines=2", "data_machines: needs data_cores=N, or data_instance=NAME"),
        ("data_cores=0", "data_cores: must be >= 1, got 0"),
        (
            "data_cores=8",
            "data_machines: must be given (data_machines=N): the run had no data tier",
        ),
        (
            "data_machines=0 data_cores=8",
            "data_machines: must be >= 1 with data_cores or data_instance, got 0",
        ),
        ("machines=2 gpus=4", "machines: can't be given together with gpus="),
        (
            "data_cores=8 data_instance=cpu",
            "data_cores: can't be given together with data_instance=",
        ),
        ("data_machines=1 data_instance=cpu", "data_instance: needs a run with a table of prices"),
        ("data_machines=1 data_cores=8 workers=0", "workers: must be >= 1 with a data tier, got 0"),
        ("batch=3", "no key 'batch' (it takes cache=, pixels=, workers="),
    ],
)
def test_wrong_changes_are_told(
    tmp_path: Path, item: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert report_main([str(folder), "--what-if", *item.split()]) == 2
    said = capsys.readouterr()
    assert told in said.err and len(said.err.strip().splitlines()) == 1 and not said.out


def test_too_few_records_predict_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("recipe: demo\n")
    assert report_main([str(tmp_path), "--what-if", "cache=on"]) == 2
    assert "too few records to predict from" in capsys.readouterr().err
    assert report_main([str(tmp_path), "--what-if"]) == 2


# -- a data tier -----------------------------------------------------------------------------------------------------

MACHINES = {"small": {"price": 0.5, "vcpus": 4}, "big:spot": {"price": 6.0, "vcpus": 16}}


def starving(**header: Any) -> Facts:
    """Four GPUs that could train a step in 80 ms and wait 160 more: a loader process takes 480 ms for a batch."""
    told = {
        "num_workers": 2,
        "world_size": 4,
        "processes": 4,
        "input_machines": MACHINES,
        "price_per_hour": 8.0,
    }
    found = facts({"data": 160.0, "student": 80.0}, **{**told, **header})
    found.run.config = {"data": {"img_size": 100}}
    return found


def test_data_machines_make_all_batches() -> None:
    """480 ms for each of four processes: 480, 240, ... ms with 1, 2, ... makers for each, and never below the 80."""
    cores = [
        predict(starving(), Change(data_machines=n, data_cores=4)).step_ms
        for n in (1, 2, 3, 6, 100)
    ]
    assert cores == pytest.approx([480, 240, 160, 80, 80])
    uneven = predict(
        starving(), Change(data_machines=1, data_cores=11)
    )  # 3, 3, 3 and 2: all wait for the last
    assert uneven.step_ms == pytest.approx(240)
    few = predict(starving(), Change(data_machines=1, data_cores=2))  # half a maker each
    assert few.step_ms == pytest.approx(960)
    bound = predict(
        starving(), Change(data_machines=100, data_cores=4, workers=3)
    )  # data.num_workers of the tier
    assert bound.step_ms == pytest.approx(160)
    crowded = (
        starving()
    )  # a third of a loader's time was a wait for a core, which a machine of its own does not have
    crowded.run.samples["0"] = [
        {"t": 0, "cpu": [99.0] * 16, "workers": [60.0] * 8, "loader_wait": [100 / 3] * 8}
    ]
    assert predict(crowded, Change(data_machines=1, data_cores=16)).step_ms == pytest.approx(80)
    shared = predict(starving(), Change(data_machines=6, data_cores=4, gpus=8))
    assert (shared.step_ms, shared.images_per_s) == (
        pytest.approx(160),
        pytest.approx(1000 * 64 * 8 / 160),
    )


def test_what_data_machines_cost() -> None:
    """A run of (36 + 240) s at 8 an hour; six small machines make it (36 + 80) s at 8 + 3."""
    six = Change(data_machines=6, data_instance="small")
    assert predict(starving(), Change()).cost == pytest.approx(8 * 276 / 3600)
    assert predict(starving(), six).cost == pytest.approx(11 * 116 / 3600)
    assert "6 data machines would do" in outlook_table(starving(), six).note
    few = Change(data_machines=9, data_instance="big:spot")
    assert "2 data machines would do" in outlook_table(starving(), few).note
    with pytest.raises(UserError, match="no price and vcpus of 'tiny'; known: small, big:spot"):
        predict(starving(), Change(data_machines=1, data_instance="tiny"))


def test_machines_and_a_larger_batch() -> None:
    """Two machines more share an epoch; twice the batch computes twice as long and takes half as many steps."""
    two = facts({"student": 90.0, "optimizer": 10.0}, world_size=2, processes=2)
    assert predict(two, Change(machines=2)) == predict(two, Change(gpus=4))
    larger = predict(two, Change(batch_size=128))
    assert larger.step_ms == pytest.approx(190)
    assert larger.images_per_s == pytest.approx(2 * 128 / 0.19)
    assert larger.hours == pytest.approx((36 + 500 * 0.19) / 3600)
    assert "grow with the batch" in outlook_table(two, Change(batch_size=128)).note


def test_a_run_that_is_fed_gains_nothing() -> None:
    fed = facts({"data": 1.0, "student": 99.0}, num_workers=4)
    fed.run.samples["0"] = [
        {"t": 0, "cpu": [50.0] * 16, "workers": [20.0] * 4}
    ]  # 80 ms of computing a batch
    assert predict(fed, Change(data_machines=1, data_cores=1)).step_ms == pytest.approx(100)


def with_tier(step_ms: float, wait_ms: float, busy_s: float, **more: Any) -> Facts:
    """Two ranks and two machines of four cores; see ``test_tier.run``."""
    found = Facts(tier_run(busy_s=busy_s, step_ms=step_ms, wait_ms=wait_ms, **more))
    found.run.headers[0] |= {"world_size": 2, "processes": 2, "batch_size": 64, "batches_per_epoch": 100,
                             "max_epochs": 10, "price_per_hour": 8.0, "input_machines": MACHINES}  # fmt: skip
    return found


def test_more_fewer_and_no_machines_of_a_tier() -> None:
    """A maker says 1.8 s a batch and delivers one in 2: a tenth is overhead, which loaders here do not have."""
    run = with_tier(500, 300, busy_s=360)
    assert predict(run, Change()).step_ms == pytest.approx(500)
    steps = [predict(run, Change(data_machines=n)).step_ms for n in (1, 2, 4, 5, 6)]
    assert steps == pytest.approx([1000, 500, 250, 200, 200])
    assert predict(run, Change(data_machines=0)).step_ms == pytest.approx(
        1800 / 3
    )  # 4 cores a GPU, one for itself
    assert predict(run, Change(gpus=4)).step_ms == pytest.approx(
        1000
    )  # the same tier for twice as many
    run.run.config = {"monitor": {"instances": ["gpu", "2*small"]}}
    assert predict(run, Change(data_machines=5)).cost == pytest.approx(
        (8 + 1.5) * 1000 * 0.2 / 3600
    )
    assert predict(run, Change(data_machines=0)).cost == pytest.approx(7 * 1000 * 0.6 / 3600)
    assert predict(run, Change(gpus=4)).cost == pytest.approx((2 * 7 + 1) * 500 * 1.0 / 3600)
    run.run.config = {"data": {"num_workers": 2}}  # as many makers on however many machines
    assert predict(run, Change(data_machines=5)).step_ms == pytest.approx(500)
    slow = with_tier(500, 300, busy_s=100)  # makers have time: the way is what a batch takes
    assert predict(slow, Change(data_machines=9)).step_ms == pytest.approx(500)
    fed = with_tier(500, 10, busy_s=360)
    assert (
        predict(fed, Change()).step_ms
        == predict(fed, Change(data_machines=9)).step_ms
        == pytest.approx(500)
    )
    unread = with_tier(500, 300, busy_s=360)
    unread.run.tier = {0: unread.run.tier[0][:1]}
    assert predict(unread, Change()).step_ms == pytest.approx(500)
    with pytest.raises(UserError, match="too few records of its data tier"):
        predict(unread, Change(data_machines=3))


@pytest.mark.parametrize("known_by", ["instances", "job"])
def test_a_lost_machine_is_paid_no_more(known_by: str) -> None:
    """Of three data machines at 0.5 an hour two were left: the job's 8.5 were 7 for training and 1.5 for the tier."""
    run = with_tier(500, 300, busy_s=360)
    trainer = {"price": 7.0, "vcpus": 96, "gpus": 2}
    run.run.headers[0] |= {"price_per_hour": 8.5, "input_machines": {**MACHINES, "gpu": trainer}}
    if known_by == "job":
        group = {"name": "data", "machines": "3 x small", "price_per_hour": 1.5}
        run.run.job = {"groups": [group]}
    else:
        run.run.config = {"monitor": {"instances": ["gpu", "3*small"]}}

    def price(change: Change) -> float:
        outlook = predict(run, change)
        assert outlook.cost is not None
        return outlook.cost / outlook.hours

    tier = present(run)
    assert tier is not None and (tier.count, tier.price) == (2, pytest.approx(0.5))
    assert price(Change()) == pytest.approx(7 + 2 * 0.5)
    assert price(Change(data_machines=3)) == pytest.approx(7 + 3 * 0.5)
    assert price(Change(data_machines=0)) == pytest.approx(7)
    assert price(Change(gpus=4)) == pytest.approx(2 * 7 + 2 * 0.5)


# -- a run that had a cache ----------------------------------------------------------------------------------------


def reading(before: float = 0.0) -> Facts:
    """Ten epochs with a cache of four views, ``before`` of which it held: a computed step 100 ms, another 40."""
    computed = (4 - before) / 10
    found = facts({"teacher": 60.0 * computed, "student": 40.0}, cached=True)
    found.run.steps[0] = [{"step": 999, "t": 0.0, "ms": 40.0, "p": {}}]
    counts = {
        "answers_read": round(1000 * (1 - computed)),
        "answers_computed": round(1000 * computed),
    }
    found.run.summary = {"status": "done", "cache": counts}
    return found


def test_a_cached_run_is_the_mean_of_computed_and_read_steps() -> None:
    cached = reading()
    assert predict(cached, Change()).step_ms == pytest.approx(64)
    assert predict(cached, Change(cache=False)).step_ms == pytest.approx(100)
    for cache in (None, True):
        lengths = {e: predict(cached, Change(cache=cache, epochs=e)).step_ms for e in (4, 10, 100)}
        assert lengths == pytest.approx({4: 100, 10: 64, 100: 42.4})


def test_a_cache_that_held_views_before_still_holds_them() -> None:
    assert predict(reading(1), Change(epochs=100)).step_ms == pytest.approx(
        (3 * 100 + 97 * 40) / 100
    )
    assert predict(reading(1), Change(cache=False)).step_ms == pytest.approx(100)
    full = reading(4)
    assert predict(full, Change(epochs=100)).step_ms == pytest.approx(40)
    with pytest.raises(
        UserError, match="its cache was full, so that no step shows the teacher's time"
    ):
        predict(full, Change(cache=False))


def test_several_teachers_caches_count_together() -> None:
    cached = reading()
    cached.run.summary["cache"] = {name: cached.run.summary["cache"] for name in ("a", "b")}
    assert predict(cached, Change(cache=False)).step_ms == pytest.approx(100)


def test_a_run_has_one_length(tmp_path: Path) -> None:
    found = Facts(read_run(write_run(tmp_path / "run")))
    assert found.hours is not None
    assert predict(found, Change()).hours == pytest.approx(found.hours)
