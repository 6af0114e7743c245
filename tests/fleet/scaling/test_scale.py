"""``kd-scale``: wrong use, and a whole run."""

from pathlib import Path

import pytest

from kd.commands.scale import _measure
from kd.fleet.scaling.measure import ScalingPlan
from kd.report.records import RunRecords
from tests._files import read_json
from tests._helpers import Command, run_cli


def test_more_processes_than_gpus(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, refusal: Command
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "kd-scale: processes: 4, but there are 2 GPUs" in refusal(
        "scale", [f"recipe={recipe}", "processes=1,4", "trainer.accelerator=gpu"]
    )


def test_no_teacher_of_several_reads_a_cache_in_short_runs(tmp_path: Path) -> None:
    """A cache would leave the teachers' time out of a step."""

    class Begun(Exception):
        """The first short run would begin."""

    class Plan(ScalingPlan):
        def run(self, case: object) -> RunRecords:
            raise Begun

    plan = Plan([], "tiny", tmp_path, [1, 2], ["ddp"], 8, 5, 1)
    model = {"teacher": None, "teachers": {"a": {"cache": "on"}, "b": {"cache": "auto"}}}
    config = {"model": model, "trainer": {"precision": "32-true", "accelerator": "cpu"}}
    with pytest.raises(Begun):
        _measure(config, plan, 4)
    assert plan.items == ["model.teachers.a.cache=off", "model.teachers.b.cache=off"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_is_measured_with_every_strategy(recipe: Path) -> None:
    done = run_cli(
        f"recipe={recipe}",
        "processes=1,2",
        "strategies=zero,fsdp",
        "steps=12",
        "labels_alone=true",
        program="scale",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    folder = recipe.parent / "runs" / "tiny" / "scale" / "000"
    found = read_json(folder / "scale.json")
    assert [(m["strategy"], m["processes"], m["batch"]) for m in found["measured"]] == [
        ("ddp", 1, 8), *((s, 2, b) for s in ("ddp", "zero", "fsdp") for b in (8, 4)),
    ]  # fmt: skip
    by_case = {(m["strategy"], m["batch"]): m for m in found["measured"][1:]}
    assert all(
        m["parts_ms"]["teacher"] > 0 and m["parts_ms"]["backward"] > 0 for m in found["measured"]
    )
    assert by_case["zero", 8]["state_mb"] < by_case["ddp", 8]["state_mb"]
    assert by_case["fsdp", 8]["state_mb"] < by_case["zero", 8]["state_mb"]
    assert {time["processes"] for time in found["all_reduce"]} == {2}
    assert found["predicted"]["processes"] == 4 and found["predicted"]["images_per_s"] > 0
    assert "4 processes would train" in done.stdout
    assert (folder / "tiny" / "fsdp-2x8" / "student.safetensors").is_file()
