"""What the report says of a data tier."""

import json
from pathlib import Path

import pytest

from kd.report.facts import Facts
from kd.report.limits import tier_bound
from kd.report.records import read_run
from kd.report.rules import Explained
from tests._pages import tier_run as run


def test_a_tier_that_works_all_the_time_is_too_small() -> None:
    """8 makers take 2 s a batch: 4 batches a second for 2 ranks that could train 10: 20 makers, 3 machines more."""
    found = Explained(run(busy_s=400)).limits[0]
    assert found.bound == "data" and "8 makers work 100% of the time" in found.text
    assert found.lever == "3 more data machines of 4 cores"
    assert found.gain == pytest.approx(500 / 200)
    assert not any("num_workers" in limit.lever for limit in Explained(run(busy_s=400)).limits)


def test_a_tier_that_does_not_work_is_held_up_by_the_queue_or_the_network() -> None:
    network = tier_bound(Facts(run(busy_s=100)))
    assert (
        network is not None
        and "send 40 MB/s" in network.text
        and network.lever.startswith("a faster network")
    )
    queue = tier_bound(Facts(run(busy_s=100, may_ask=3)))
    assert (
        queue is not None and queue.lever == "a larger data.tier.queue_mb (3 batches fit): at most"
    )


def test_a_tier_that_keeps_up_is_no_limit() -> None:
    assert tier_bound(Facts(run(busy_s=400, wait_ms=10))) is None
    without = run(busy_s=400)
    without.tier.clear()
    assert tier_bound(Facts(without)) is None


def test_a_resumed_run(tmp_path: Path) -> None:
    """Counts begin again with each start: what stands before the newest header is left aside."""
    file = tmp_path / "records" / "tier.rank0.jsonl"
    file.parent.mkdir()
    header = '{"kind": "header", "schema": 1, "of": "tier", "rank": 0}\n'
    counts = {"machines": [], "ready": 0, "may_ask": 1, "made_again": 0, "made_twice": 0}
    first, second = ({"kind": "tier", "t": t, **counts} for t in (1, 5))
    file.write_text(header + f"{json.dumps(first)}\n" * 2 + header + f"{json.dumps(second)}\n")
    assert read_run(tmp_path).tier == {0: [second]}
