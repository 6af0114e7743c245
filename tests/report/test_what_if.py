"""A changed run predicted from records: by hand, on the command line."""

from pathlib import Path
from typing import Any

import pytest

from kd.cli import report_main
from kd.errors import UserError
from kd.report.facts import Facts
from kd.report.records import Run
from kd.report.what_if import Change, read_change, what_if
from tests.report.test_html import write_run


def facts(phases: dict[str, float], **header: Any) -> Facts:
    """Ten epochs of a hundred steps, from start-up to end."""
    told = {"device": "cuda", "cores": 16, "threads": 1, "num_workers": 0, "batch_size": 64, "world_size": 1,
            "processes": 1, "batches_per_epoch": 100, "max_epochs": 10}  # fmt: skip
    total = {"steps": 999, "p": {name: 999 * ms for name, ms in phases.items()}}
    events = [{"name": "startup", "s": 36.0, "parts": {}}]
    return Facts(Run(Path("x"), headers={0: told | header}, totals={0: total}, events=events))


def test_the_run_as_it_is() -> None:
    now = what_if(facts({"teacher": 60.0, "student": 40.0, "validation": 8.0}), Change())
    assert now.step_ms == pytest.approx(100)
    assert now.images_per_s == pytest.approx(640)
    assert now.hours == pytest.approx((36 + 1000 * 0.108) / 3600)
    assert now.cost is None


def test_a_cache_pays_after_its_first_views() -> None:
    """Four epochs of ten compute at 100 ms, six read at 40."""
    cached = what_if(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True))
    assert cached.step_ms == pytest.approx((4 * 100 + 6 * 40) / 10)
    short = what_if(facts({"teacher": 60.0, "student": 40.0}), Change(cache=True, epochs=4))
    assert short.step_ms == pytest.approx(100)


def test_loader_processes_hide_what_they_can() -> None:
    slow = facts({"data": 60.0, "student": 40.0})
    steps = [what_if(slow, Change(workers=n)).step_ms for n in (0, 1, 2, 4)]
    assert steps == pytest.approx([100, 60, 40, 40])
    behind = facts({"data": 60.0, "student": 40.0}, num_workers=2)  # a batch takes one of them 200 ms
    assert [what_if(behind, Change(workers=n)).step_ms for n in (2, 4, 8)] == pytest.approx([100, 50, 40])


def test_more_processes_share_an_epoch_and_wait_for_a_longer_ring() -> None:
    """Exposed all-reduce of 10 ms on two becomes 10 * (7 / 8) / (1 / 2) = 17.5 ms on eight."""
    two = facts({"student": 90.0, "communication": 10.0}, world_size=2)
    two.run.config = {"monitor": {"price_per_hour": 8.0}}
    eight = what_if(two, Change(gpus=8))
    assert eight.step_ms == pytest.approx(107.5)
    assert eight.hours == pytest.approx((36 + 250 * 0.1075) / 3600)
    assert eight.cost == pytest.approx(4 * 8.0 * eight.hours)
    assert what_if(two, Change(gpus=8, price=20.0)).cost == pytest.approx(20 * eight.hours)


def test_the_command_says_how_far_it_can_be_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    assert report_main([str(folder), "--what-if", "cache=on", "gpus=8", "price=32.8"]) == 0
    out = capsys.readouterr().out
    assert "as it is" in out
    assert "give or take 23%" in out
    assert "says nothing of communication" in out
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("cache=maybe", "cache: must be on or off, got 'maybe'"),
        ("gpus=0", "gpus: must be a whole number >= 1, got '0'"),
        ("gpus=many", "gpus: must be a whole number >= 1, got 'many'"),
        ("workers=1.5", "workers: must be a whole number >= 0, got '1.5'"),
        ("price=-1", "price: must be a number >= 0, got '-1'"),
        ("batch=3", "--what-if: no key 'batch'; known: cache=on|off, workers=N"),
    ],
)
def test_wrong_changes_are_told(tmp_path: Path, item: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError):
        read_change([item])
    assert report_main([str(write_run(tmp_path / "run")), "--what-if", item]) == 2
    assert told in capsys.readouterr().err


def test_too_few_records_predict_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("recipe: demo\n")
    assert report_main([str(tmp_path), "--what-if", "cache=on"]) == 2
    assert "too few records to predict from" in capsys.readouterr().err
    assert report_main([str(tmp_path), "--what-if"]) == 2
