"""The page of ``kd-scale``: what was measured, and a forecast for twice as many processes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kd.fleet.scaling.model import Network, fit
from kd.fleet.scaling.page import content, sections
from tests._scaling import GRADIENT_MB, RING, made, readings


@pytest.mark.parametrize("counts", [(2,), (2, 4), (2, 8)])
def test_nothing_is_predicted_beyond_twice_what_was_measured(counts: tuple[int, ...]) -> None:
    several = [made("ddp", n, batch) for n in counts for batch in (64, 64 // n)]
    model = fit([made("ddp", 1, 64), *several], "ddp", RING, GRADIENT_MB)
    result = content("tiny", [made("ddp", 1, 64), *several], {"ddp": model}, Network(), 6000)
    assert {p["processes"] for p in result["predicted"]} == {2 * max(counts)}
    charts = [s for s in sections(result) if s["kind"] == "lines"]
    assert [max(chart["x"]) for chart in charts] == [2 * max(counts)] * 2
    assert "Amdahl" not in json.dumps(sections(result))


def test_the_error_of_a_model_is_unknown_with_two_readings() -> None:
    seen = [made("ddp", n, b) for n, b in ((1, 64), (2, 64), (2, 32))]
    model = fit(seen, "ddp", RING, GRADIENT_MB)
    result = content("tiny", seen, {"ddp": model}, Network(), 6000)
    assert result["fitted"]["ddp"]["error"] is None
    assert any("ddp unknown with two readings" in line for line in sections(result)[0]["others"])


def test_steps_that_vary_by_more_than_their_size_still_have_a_page() -> None:
    seen = [replace(made("ddp", n, b), spread=2.0) for n, b in ((1, 64), (2, 64), (2, 32))]
    model = fit(seen, "ddp", RING, GRADIENT_MB)
    result = content("tiny", seen, {"ddp": model}, Network(), 6000)
    for p in result["predicted"]:
        expected, best, worst = p["step_ms"]
        assert 0 < best < expected < worst
    assert sections(result)


def test_the_page_says_what_was_measured_and_what_follows() -> None:
    found = readings()
    models = {name: fit(found, name, RING, GRADIENT_MB) for name in ("ddp", "zero", "fsdp")}
    result = content("tiny", found, models, Network(), 6000)
    json.dumps(result)
    weak = [p for p in result["predicted"] if p["strategy"] == "ddp" and p["kind"] == "weak"]
    assert [p["processes"] for p in weak] == [8]
    for p in result["predicted"]:
        middle, low, high = p["efficiency"]
        assert low <= middle <= high
    assert weak[0]["epoch_s"][0] == pytest.approx(6000 / weak[0]["images_per_s"][0])
    lines = sections(result)[0]["others"]
    assert lines[0].startswith("the teacher takes 98.0 of 238.4 ms with ddp 4 x 64, weak: ")
    assert lines[1] == (
        "measured: up to 4 processes; predicted: 8 processes, on two such machines; nothing is predicted for more"
    )
    by_title: dict[str, Any] = {s.get("title", ""): s for s in sections(result)}
    assert len(by_title["Measured here"]["rows"]) == len(found)
    cost = {row[0]: row[1] for row in by_title["Traffic and memory of a process (MB)"]["rows"]}
    assert cost["ddp 4 x 64, weak"] == pytest.approx(2 * 3 / 4 * GRADIENT_MB)
    assert cost["fsdp 4 x 16, strong"] == pytest.approx(3 * 3 / 4 * GRADIENT_MB)
    assert cost["alone 1 x 64"] == 0
    time = {row[0]: row[1:] for row in by_title["Time of a step (ms)"]["rows"]}
    assert time["ddp 4 x 64, weak"][:2] == [98.0, 98.0]  # teacher and student
