"""A changed run predicted from records: by hand, on the command line."""

from pathlib import Path
from typing import Any

import pytest

from kd.commands.report import WhatIf
from kd.report.costs import Change, outlook_of, outlook_table
from kd.report.facts import Facts
from kd.report.records import RunRecords, read_run
from kd.run.options import options_of
from tests._helpers import Command, refuses
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
    now = outlook_of(facts({"teacher": 60.0, "student": 40.0, "validation": 8.0}), Change())
    assert now.step_ms == pytest.approx(100)
    assert now.images_per_s == pytest.approx(640)
    assert now.hours == pytest.approx((36 + 1000 * 0.108) / 3600)
    assert now.cost is None


def test_a_cache_pays_after_its_first_views() -> None:
    """Four epochs of ten compute at 100 ms, six read at 40."""
    cached = outlook_of(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True))
    assert cached.step_ms == pytest.approx((4 * 100 + 6 * 40) / 10)
    short = outlook_of(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True, epochs=4))
    assert short.step_ms == pytest.approx(100)


def test_loader_processes_hide_what_they_can() -> None:
    slow = facts({"data": 60.0, "student": 40.0})
    steps = [outlook_of(slow, Change(workers=n)).step_ms for n in (0, 1, 2, 4)]
    assert steps == pytest.approx([100, 60, 40, 40])
    behind = facts(
        {"data": 60.0, "student": 40.0}, num_workers=2
    )  # a batch takes one of them 200 ms
    assert [outlook_of(behind, Change(workers=n)).step_ms for n in (2, 4, 8)] == pytest.approx(
        [100, 50, 40]
    )


def test_more_processes_share_an_epoch_and_wait_for_a_longer_ring() -> None:
    """Exposed all-reduce of 10 ms on two becomes 10 * (7 / 8) / (1 / 2) = 17.5 ms on eight."""
    two = facts({"student": 90.0, "communication": 10.0}, world_size=2)
    two.run.config = {"monitor": {"price_per_hour": 8.0}}
    eight = outlook_of(two, Change(gpus=8))
    assert eight.step_ms == pytest.approx(107.5)
    assert eight.hours == pytest.approx((36 + 250 * 0.1075) / 3600)
    assert eight.cost == pytest.approx(4 * 8.0 * eight.hours)
    assert outlook_of(two, Change(gpus=8, price=20.0)).cost == pytest.approx(20 * eight.hours)


def test_the_command_says_how_far_it_can_be_wrong(tmp_path: Path, prints: Command) -> None:
    folder = write_run(tmp_path / "run")
    out = prints("report", [str(folder), "--what-if", "cache=on", "gpus=8", "price=32.8"])
    assert "as it is" in out
    assert "give or take" not in out  # how far it is from the truth is not known
    assert "A run of one process measures no communication" in out
    assert "give or take 23%" in prints("report", [str(folder), "--what-if", "cache=on"])
    assert not (folder / "report.html").exists()


def test_too_few_records_predict_nothing(tmp_path: Path, refusal: Command) -> None:
    (tmp_path / "config.yaml").write_text("recipe: demo\n")
    assert "too few records to predict from" in refusal(
        "report", [str(tmp_path), "--what-if", "cache=on"]
    )


# -- a data tier -----------------------------------------------------------------------------------------------------

MACHINES = {"small": {"price": 0.5, "vcpus": 4}, "big:spot": {"price": 6.0, "vcpus": 16}}


def test_machines_and_a_larger_batch() -> None:
    """Two machines more share an epoch; twice the batch computes twice as long and takes half as many steps."""
    two = facts({"student": 90.0, "optimizer": 10.0}, world_size=2, processes=2)
    assert outlook_of(two, Change(machines=2)) == outlook_of(two, Change(gpus=4))
    larger = outlook_of(two, Change(batch_size=128))
    assert larger.step_ms == pytest.approx(190)
    assert larger.images_per_s == pytest.approx(2 * 128 / 0.19)
    assert larger.hours == pytest.approx((36 + 500 * 0.19) / 3600)
    validated = facts({"student": 90.0, "validation": 90.0})
    for batch in (64, 128):
        found = outlook_of(validated, Change(batch_size=batch))
        assert found.hours == pytest.approx((36 + 180) / 3600)
    assert "grow with the batch" in outlook_table(two, Change(batch_size=128)).note


def test_instances_are_counted_and_priced_by_a_table(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("big: 30\nsmall: {on_demand: 3, spot: 1}\n")
    change = options_of(WhatIf, {"instances": "2*big,small:spot", "prices": str(table)})
    assert (change.machines, change.price) == (3, 61)
    for wrong, told in (
        ({"instances": "2*big"}, "instances: has no effect without prices=FILE"),
        ({"instances": "huge", "prices": str(table)}, "instances: no price of 'huge'"),
        ({"instances": "big", "prices": str(table), "gpus": "4"}, "instances: can't be given"),
    ):
        with refuses(told):
            options_of(WhatIf, wrong)


def test_a_data_tier_stays_as_it_is() -> None:
    """A step that waits for it waits longer where twice as many processes share it; else it does not matter."""
    run = with_tier(500, 300, busy_s=360)
    assert outlook_of(run, Change()).step_ms == pytest.approx(500)
    assert outlook_of(run, Change(gpus=4)).step_ms == pytest.approx(1000)
    assert outlook_of(run, Change(gpus=4)).cost == pytest.approx(2 * 8 * 500 * 1.0 / 3600)
    fed = with_tier(500, 10, busy_s=360)
    assert outlook_of(fed, Change(gpus=4)).step_ms == pytest.approx(500)
    with refuses("workers: .* had a data tier"):
        outlook_of(run, Change(workers=2))


def with_tier(step_ms: float, wait_ms: float, busy_s: float, **more: Any) -> Facts:
    """Two ranks and two machines of four cores; see ``test_tier.run``."""
    found = Facts(tier_run(busy_s=busy_s, step_ms=step_ms, wait_ms=wait_ms, **more))
    found.run.headers[0] |= {"world_size": 2, "processes": 2, "batch_size": 64, "batches_per_epoch": 100,
                             "max_epochs": 10, "price_per_hour": 8.0, "input_machines": MACHINES}  # fmt: skip
    return found


# -- a run that had a cache ----------------------------------------------------------------------------------------


def reading(before: float = 0.0) -> Facts:
    """Ten epochs with a cache of four views, ``before`` of which it held: a computed step 100 ms, another 40."""
    computed = (4 - before) / 10
    found = facts({"teacher": 60.0 * computed, "student": 40.0}, cached=True)
    found.run.steps[0] = [{"step": 999, "epoch": 9, "t": 0.0, "ms": 40.0, "p": {}}]
    counts = {
        "answers_read": round(1000 * (1 - computed)),
        "answers_computed": round(1000 * computed),
    }
    found.run.summary = {"status": "done", "cache": counts}
    return found


def test_a_cached_run_is_the_mean_of_computed_and_read_steps() -> None:
    cached = reading()
    assert outlook_of(cached, Change()).step_ms == pytest.approx(64)
    assert outlook_of(cached, Change(cache=False)).step_ms == pytest.approx(100)
    for cache in (None, True):
        lengths = {
            e: outlook_of(cached, Change(cache=cache, epochs=e)).step_ms for e in (4, 10, 100)
        }
        assert lengths == pytest.approx({4: 100, 10: 64, 100: 42.4})


def test_a_cache_that_held_views_before_still_holds_them() -> None:
    assert outlook_of(reading(1), Change(epochs=100)).step_ms == pytest.approx(
        (3 * 100 + 97 * 40) / 100
    )
    assert outlook_of(reading(1), Change(cache=False)).step_ms == pytest.approx(100)
    full = reading(4)
    assert outlook_of(full, Change(epochs=100)).step_ms == pytest.approx(40)
    with refuses("its cache was full, so that no step shows the teacher's time"):
        outlook_of(full, Change(cache=False))


def test_several_teachers_caches_count_together_and_those_of_a_part_do_not() -> None:
    cached = reading()
    resumed = reading()
    resumed.run.events *= 2
    resumed.run.summary["cache"] = {"answers_read": 400, "answers_computed": 0}  # of four epochs
    assert outlook_of(resumed, Change(cache=False)).step_ms == pytest.approx(100)
    cached.run.summary["cache"] = {name: cached.run.summary["cache"] for name in ("a", "b")}
    assert outlook_of(cached, Change(cache=False)).step_ms == pytest.approx(100)


def test_a_run_has_one_length(tmp_path: Path) -> None:
    found = Facts(read_run(write_run(tmp_path / "run")))
    assert found.hours is not None
    assert outlook_of(found, Change()).hours == pytest.approx(found.hours)
