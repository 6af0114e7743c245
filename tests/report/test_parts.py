"""The report's parts one by one."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.report.limits import Finding
from kd.report.metric import in_tables, less_is_better
from kd.report.prices import by_kind, input_machines, price_of, read_prices
from kd.report.records import Writer, is_kept, read_lines


def test_a_file_of_records_stays_bounded_and_keeps_an_even_sample(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    writer = Writer(file, {"of": "steps"}, limit=100)
    for step in range(1000):
        writer.write({"kind": "step", "step": step})
        if step % 10 == 0:
            writer.write({"kind": "total", "steps": step})
    writer.close()
    records, notes = read_lines(file)
    steps = [r["step"] for r in records if r["kind"] == "step"]
    assert not notes
    assert len(records) <= 100
    assert [r["steps"] for r in records if r["kind"] == "total"][-1] == 990, (
        "the newest total is kept"
    )
    halves = [sum(step < 500 for step in steps), sum(step >= 500 for step in steps)]
    assert min(halves) > 0.35 * len(steps), f"not an even sample: {halves}"
    again = Writer(file, {"of": "steps"}, limit=100)
    assert again.share == writer.share < 1
    assert again.last_total == {"kind": "total", "steps": 990}
    again.close()


def test_torn_lines_and_newer_schemas_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"kind": "header", "schema": 1}\n{"kind": "step"}\n{"kind": "st')
    records, notes = read_lines(file)
    assert [r["kind"] for r in records] == ["header", "step"]
    assert notes == ["x.jsonl: 1 torn line left out"]
    file.write_text('{"kind": "header", "schema": 99}\n{"kind": "step"}\n')
    assert read_lines(file) == (
        [],
        ["x.jsonl: schema 99 is newer than this kd reads (1): left out"],
    )


def test_what_is_kept_at_a_share_is_kept_at_every_larger_one() -> None:
    assert all(is_kept(n, 0.5) for n in range(2000) if is_kept(n, 0.25))
    assert all(is_kept(n, 1.0) for n in range(2000))


@pytest.mark.parametrize(("metric", "less", "column"), [
    ("acc1", False, True), ("feature_loss", True, True), ("kd_loss", True, False), ("params", True, True),
    ("iou_sky", False, False), ("wall_s", True, True),
])  # fmt: skip
def test_metrics_have_a_direction_and_a_column_or_none(
    metric: str, less: bool, column: bool
) -> None:
    assert less_is_better(metric) is less
    assert in_tables(metric) is column


def test_prices_of_machines(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("big: 30\nsmall: {on_demand: 3, spot: 1, vcpus: 72}\n")
    prices = read_prices(table)
    assert price_of(["big", "2*small:spot"], prices) == 32
    assert input_machines(prices) == {
        "small": {"price": 3.0, "vcpus": 72.0, "gpus": 0},
        "small:spot": {"price": 1.0, "vcpus": 72.0, "gpus": 0},
    }
    assert by_kind(["big", "2*small:spot"], prices)["spot"] == 32
    assert by_kind(["big"], prices) == {}
    with pytest.raises(
        UserError, match=r"monitor.instances: no price of 'big:spot'; known: big, small, small:spot"
    ):
        price_of(["big:spot"], prices)


@pytest.mark.parametrize(
    "text", ["[1]", "big: -1", "big: {cheap: 1}", "big: {vcpus: 4}", "big: three"]
)
def test_tables_that_are_no_prices_are_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text(text)
    with pytest.raises(UserError, match=r"monitor.prices"):
        read_prices(table)


def test_findings_of_the_same_words_are_equal() -> None:
    assert (
        Finding("A", "because", "do")
        == Finding("A", "because", "do")
        != Finding("B", "because", "do")
    )
