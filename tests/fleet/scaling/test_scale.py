"""``kd-scale``: wrong use, and a whole run."""

import json
from pathlib import Path

import pytest

from kd.cli import main
from kd.commands.scale import _measure
from kd.fleet.scaling.measure import ScalingPlan
from kd.report.records import RunRecords
from tests._helpers import run_cli


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            "processes=1,two",
            "processes: each must be a valid integer, got 'two'",
        ),
        ("processes=1", "processes: must name more than one number"),
        ("strategies=ddp,zero4", "strategies: each must be 'ddp', 'zero' or 'fsdp', got 'zero4'"),
        ("steps=2", "steps: must be >= 5, got 2"),
        ("machines=8", "no key 'machines'"),
        ("network=25", "no key 'network': kd-scale measures what travels; gpus=N predicts from it"),
        ("gpus=many", "gpus: must be a whole number, got 'many'"),
        ("processes=1,3", "processes: 3 must divide data.batch_size=8"),
        ("data.batch_size=auto", "data.batch_size: kd-scale needs a number, got auto"),
    ],
)
def test_wrong_use_is_one_line_and_writes_nothing(
    recipe: Path, item: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("scale", [f"recipe={recipe}", item]) == 2
    assert capsys.readouterr().err.startswith(f"kd-scale: {told}")
    assert not (recipe.parent / "runs").exists()


def test_more_processes_than_gpus(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main("scale", [f"recipe={recipe}", "processes=1,4", "trainer.accelerator=gpu"]) == 2
    assert "kd-scale: processes: 4, but there are 2 GPUs" in capsys.readouterr().err


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
        program="scale",
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    folder = recipe.parent / "runs" / "tiny" / "scale" / "000"
    found = json.loads((folder / "scale.json").read_text())
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
