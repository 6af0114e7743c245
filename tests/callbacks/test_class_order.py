"""A teacher whose classes are in another order is recognised before the first step, and told how to be used."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kd.callbacks.class_order import MOST_CLASSES, ClassOrder, Confusions, better_order
from kd.cli import train_main
from kd.proof.luck import SIGMAS
from tests._files import read_json
from tests._good_teacher import recipe_of_a_good_teacher
from tests._helpers import Command
from tests._runs import run_folders, summary_of


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose teacher is a good one with its classes in the order d, c, a, b."""
    return recipe_of_a_good_teacher(tmp_path_factory.mktemp("order"), [3, 2, 0, 1])


def test_another_order_of_classes_is_found_named_and_written(
    shuffled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_folders(shuffled)
    with monkeypatch.context() as patched:
        patched.setattr(
            "kd.distill.first_weights.inherit_together",
            lambda *_: pytest.fail("inherits before the preflight"),
        )
        assert train_main([f"recipe={shuffled}", "model.student.inherit=true"]) == 2
    said = capsys.readouterr().err
    file = shuffled.parent / "runs" / "tiny" / "teacher_classes.json"
    assert "its classes are in another order, in the one found it reaches" in said
    assert f"%: model.teacher.classes={file}" in said
    assert read_json(file) == ["dates", "cake", "apple", "bread"]
    assert run_folders(shuffled) == before

    # With too many classes for a search the key is named all the same.
    with monkeypatch.context() as patched:
        patched.setattr("kd.callbacks.preflight.MOST_CLASSES", 3)
        assert train_main([f"recipe={shuffled}"]) == 2
    said = capsys.readouterr().err
    assert "the order of more than 3 classes is not searched" in said
    assert "goes to model.teacher.classes" in said

    # Who trains all the same finds the same key on the page.
    assert train_main([f"recipe={shuffled}", "preflight=warn", "trainer.max_epochs=1"]) == 0
    (warned,) = set(run_folders(shuffled)) - set(before)
    (finding,) = (
        finding
        for finding in summary_of(warned)["findings"]
        if finding["rule"] == "TeacherNearChance"
    )
    assert f"model.teacher.classes={file}" in finding["lever"]
    before = run_folders(shuffled)
    items = [
        f"model.teacher.classes={file}",
        "model.student.inherit=true",
        "model.student.kwargs.depth=2",
    ]
    items += ["trainer.max_epochs=1", "optim.lr=1e-9"]
    assert train_main([f"recipe={shuffled}", *items]) == 0
    (folder,) = set(run_folders(shuffled)) - set(before)
    summary = summary_of(folder)
    assert summary["teacher"]["val"]["acc1"] >= 0.9
    assert (
        summary["student"]["val"]["agreement"] >= 0.95
    )  # it inherited what the preflight has put into bfloat16


def test_a_permuted_teacher_is_found_and_a_poor_one_is_not_taken_for_one() -> None:
    order = torch.tensor([2, 0, 3, 1])
    counts = Confusions(4)
    target = torch.arange(4).repeat_interleave(10)
    counts.update(torch.argsort(order)[target], target, torch.arange(40))
    assert better_order(counts.compute()) == ClassOrder(order.tolist(), 1.0)
    chance = torch.full((2, 4, 4), 3)
    assert better_order(chance) is None
    assert SIGMAS > 3, "a wrong alarm is rare"


# -- only some classes are in another order --------


def confusions(
    names: list[str], order: list[int], accuracy: float, pictures: int, seed: int = 0
) -> torch.Tensor:
    """Of a teacher of an accuracy whose column ``j`` means class ``order[j]``; wrong answers go to random columns."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(pictures) % len(names)
    column = torch.empty(len(names), dtype=torch.long)
    column[torch.tensor(order)] = torch.arange(len(names))
    wrong = torch.rand(pictures, generator=generator) > accuracy
    columns = torch.where(
        wrong, torch.randint(len(names), (pictures,), generator=generator), column[target]
    )
    counts = Confusions(len(names))
    counts.update(columns, target, torch.arange(pictures) // len(names))
    return counts.compute()


NAMES = [f"class{i}" for i in sorted(map(str, range(81)))]


@pytest.mark.parametrize("key", [lambda name: int(name[5:]), lambda name: name[::-1]])
@pytest.mark.parametrize("accuracy", [0.5, 0.8])
def test_names_that_another_tool_has_sorted(key: Any, accuracy: float) -> None:
    """Numbers sorted as numbers, or by their last digit."""
    order = sorted(range(len(NAMES)), key=lambda i: key(NAMES[i]))
    found = better_order(confusions(NAMES, order, accuracy, 10 * len(NAMES)))
    assert found is not None
    assert found.classes == order
    assert abs(found.reached - accuracy) < 0.1


@pytest.mark.parametrize("swapped", [2, 5, 20])
def test_some_classes_in_another_order(swapped: int) -> None:
    order = list(range(81))
    order[3 : 3 + swapped] = [*order[4 : 3 + swapped], order[3]]
    found = better_order(confusions(NAMES, order, 0.8, 81 * 20))
    assert found is not None
    assert found.classes == order


@pytest.mark.parametrize("accuracy", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_a_teacher_in_the_datas_order_is_left_in_peace(accuracy: float) -> None:
    for seed in range(20):
        assert better_order(confusions(NAMES, list(range(81)), accuracy, 81 * 8, seed)) is None


def test_a_teacher_that_always_says_the_same_is_none_in_another_order() -> None:
    target = torch.tensor([0] * 10 + [1] * 80 + [2] * 10)
    counts = Confusions(3)
    counts.update(torch.zeros_like(target), target, torch.arange(100))
    assert better_order(counts.compute()) is None


def test_the_search_is_fast_with_as_many_classes_as_it_takes() -> None:
    counts = confusions(
        [f"{i:04}" for i in range(MOST_CLASSES)], list(range(MOST_CLASSES)), 0.7, 50_000
    )
    begun = time.perf_counter()
    assert better_order(counts) is None
    assert time.perf_counter() - begun < 5


@pytest.fixture(scope="module")
def sorted_otherwise(shuffled: Path) -> Path:
    """The recipe of :func:`shuffled`, its teacher with all classes in order but two."""
    state = load_file(shuffled.parent / "teacher.safetensors")
    for name in ("head.weight", "head.bias"):
        state[name] = state[name][[2, 3, 0, 1]]  # d, c, a, b -> a, b, d, c
    save_file(state, shuffled.parent / "partly.safetensors")
    return shuffled.parent / "partly.safetensors"


def test_a_teacher_that_is_good_in_part_of_its_classes_gets_a_line(
    shuffled: Path, sorted_otherwise: Path, prints: Command
) -> None:
    items = [
        f"recipe={shuffled}",
        f"model.teacher.checkpoint={sorted_otherwise}",
        "trainer.max_epochs=1",
    ]
    line = next(
        line
        for line in prints("train", items).splitlines()
        if line.startswith("preflight: teacher")
    )
    file = shuffled.parent / "runs" / "tiny" / "teacher_classes.json"
    assert "its classes are in another order, in the one found it reaches" in line
    assert line.endswith(f"model.teacher.classes={file}")
    mended = next(
        line
        for line in prints("train", [*items, f"model.teacher.classes={file}"]).splitlines()
        if line.startswith("preflight: teacher")
    )
    assert "another order" not in mended


def test_pictures_without_a_label_count_for_no_class() -> None:
    """A source of the user's own may have some among the validation pictures (target -1)."""
    target = torch.tensor([-1, 1, -1, 0])
    counts = Confusions(2)
    counts.update(torch.tensor([1, 1, 0, 0]), target, torch.arange(4))
    assert counts.compute().sum(0).tolist() == [[1, 0], [0, 1]]
