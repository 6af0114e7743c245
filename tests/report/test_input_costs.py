"""What another input would cost: GPUs that wait for batches, on a machine with too few cores for them."""

from pathlib import Path
from typing import Any

from kd.cli import report_main
from kd.report.costs import input_costs
from kd.report.facts import Facts
from kd.report.rules import Explained
from tests._files import json_lines, write_lines
from tests._pages import made, run_of, sections_of

STEP, REST = 192.0, 86.0


def starving(**header: Any) -> Facts:
    """8 GPUs of 12 cores each, whose 12 loaders a GPU are busy 70 % of the time: 20 cores a GPU would keep up."""
    cpu = {
        "cores": 96,
        "processes": 8,
        "world_size": 8,
        "threads": 1,
        "num_workers": 12,
        "price_per_hour": 37.688,
    }
    run = run_of(
        {"data": STEP - REST, "student": 30.0, "backward": REST - 30}, "cuda", **{**cpu, **header}
    )
    run.samples["0"] = [
        {"t": n / 2, "cpu": [95.0] * 96, "workers": [70.0] * 96, "main": 800.0} for n in range(50)
    ]
    return Facts(run)


def ways(facts: Facts) -> dict[str, list[Any]]:
    """The rows of the page's table by their names."""
    table = input_costs(facts)
    assert table is not None
    return {str(name): row for name, *row in table.rows}


def test_cores_a_gpu_are_counted_and_other_machines_priced() -> None:
    machines = {
        "c5.18xlarge": {"price": 3.672, "vcpus": 72},
        "c5.9xlarge:spot": {"price": 0.6, "vcpus": 36},
    }
    facts = starving(input_machines=machines)
    assert "20 cores a GPU would be enough, there are 12" in Explained(facts.run).verdict["text"]
    found = ways(facts)
    beside = found[
        "data.engine=ray on 3 c5.18xlarge beside"
    ]  # 8 x 19 cores: a tier makes all batches
    assert beside[:2] == [REST, f"{37.688 + 3 * 3.672:.4g}"]
    assert found["data.engine=ray on 5 c5.9xlarge:spot beside"][1] == f"{37.688 + 5 * 0.6:.4g}"
    assert found["as it is"][2] == f"{37.688 * STEP / 3600:.4g}"
    assert found["data.engine=device, or dali"][3] == f"{100 * (1 - REST / STEP):.0f}"


def test_nothing_to_move_nothing_said() -> None:
    fed = run_of({"data": 2.0, "student": 190.0}, "cuda", cores=96, processes=8, num_workers=12)
    assert input_costs(Facts(fed)) is None
    on_cpu = run_of({"data": STEP - REST, "student": REST}, cores=2, num_workers=1)
    assert input_costs(Facts(on_cpu)) is None  # no device to move the views to
    enough = starving()
    enough.run.headers[0]["cores"] = 8 * 32
    assert input_costs(Facts(enough.run)) is None  # more loader processes will do


def test_the_page_has_the_table(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 8, 10, 4, "GPU", price_per_hour=37.688)
    steps = folder / "records" / "phases.rank0.jsonl"
    lines = json_lines(steps)
    lines[0] |= {
        "cores": 96,
        "num_workers": 12,
        "input_machines": {"c5.18xlarge": {"price": 3.672, "vcpus": 72}},
    }
    count = lines[-1]["steps"]
    lines[-1]["p"] = {"data": count * (STEP - REST), "student": count * REST}
    write_lines(steps, lines)
    assert report_main([str(folder)]) == 0
    table = next(
        s
        for s in sections_of(folder / "report.html")
        if s.get("title") == "What another input would cost"
    )
    assert table["rows"][0][0] == "as it is"
    assert table["columns"][-1] == "saves (cost, %)"
    saved = {row[0]: row[4] for row in table["rows"]}
    whole = 37.688 + 2 * 3.672  # 8 x 14 cores: the loaders are busy half of the time
    assert (
        saved["data.engine=ray on 2 c5.18xlarge beside"]
        == f"{100 * (1 - whole * REST / (37.688 * STEP)):.0f}"
    )
