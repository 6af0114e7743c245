"""Planted bottlenecks are named; following the advice gives what was predicted (all of it: scripts/bench/truth.py)."""

from pathlib import Path

import pytest

from kd.report.facts import Facts
from kd.report.records import RunRecords, read_run
from kd.report.rules import sentence
from scripts.bench import foreign
from scripts.bench.truth import callback, foreign_plants, own_limit, plants
from tests._clock import HandClock
from tests._helpers import ARCH, TINY, draw_folder, write_recipe
from tests._runs import run

LONG = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("slow disk", "slow optimizer", "slow checkpoints")
]
NAMED = ["sleeping transform", "huge teacher", "slow callback", *LONG]


def trained(recipe: Path, *items: str) -> RunRecords:
    run(recipe, *items)
    return read_run(sorted((recipe.parent / "runs" / "tiny").glob("[0-9]*"))[-1])


@pytest.mark.parametrize("name", NAMED)
def test_a_planted_bottleneck_is_named(
    recipe: Path, pictures: Path, name: str, hand_clock: HandClock
) -> None:
    plant = next(p for p in plants(pictures) if p.name == name)
    found = own_limit(trained(recipe, *plant.items))
    assert found.bound in plant.bound, found
    assert plant.mention in sentence(found)


@pytest.mark.parametrize(
    "name", ["sleeping loader", "slow optimizer", "slow callback", "slow checkpoints"]
)
def test_a_bottleneck_planted_into_a_training_that_is_not_kds_is_named(
    tmp_path: Path, name: str, hand_clock: HandClock
) -> None:
    plant = next(p for p in foreign_plants() if p.name == name)
    named = own_limit(read_run(foreign.train(tmp_path, plant.items)))
    assert named.bound in plant.bound, named
    assert plant.mention in sentence(named)
    assert "data." not in sentence(named)


@pytest.mark.parametrize("name", ["slow callback", "huge teacher"])
def test_the_advice_gives_what_it_promises(
    recipe: Path, pictures: Path, name: str, hand_clock: HandClock
) -> None:
    plant = next(p for p in plants(pictures) if p.name == name)
    before = trained(
        recipe, "trainer.max_epochs=3", callback("Slow", part="student", seconds=0.1), *plant.items
    )
    after = trained(
        recipe,
        "trainer.max_epochs=3",
        callback("Slow", part="student", seconds=0.1),
        *plant.follow(before),
    )
    reached = Facts(after).images_per_s / Facts(before).images_per_s  # type: ignore[operator]
    assert own_limit(before).gain == pytest.approx(reached, rel=0.02)


@pytest.mark.slow
def test_a_healthy_run_gets_no_alarm(tmp_path: Path) -> None:
    pictures = draw_folder(tmp_path / "pictures", train=24, val=8)
    model = {"arch": ARCH, "img_size": 32, "kwargs": TINY}
    alone = write_recipe(tmp_path / "teacher.yaml", pictures, None, model__student=model)
    teacher = (
        trained(alone, "trainer.max_epochs=4", "optim.lr=0.003").folder / "student.safetensors"
    )
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher)
    slow = callback("Slow", part="student", seconds=0.3)
    found = trained(recipe, slow, "trainer.max_epochs=2", "monitor.interval_s=0.05").summary
    limits = [found["verdict"]["text"], *(limit["text"] for limit in found["verdict"]["others"])]
    own = [
        text for text in limits if "other processes use" not in text
    ]  # the tests' machine may be shared
    assert len(own) == 1
    assert "the student's own training takes" in own[0]
    assert {f["rule"] for f in found["findings"]} <= {
        "SchedulerDelay"
    }  # others' processes take cores
