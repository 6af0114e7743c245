"""What a search may vary: spaces as they are written, and those that ship with recipes."""

from pathlib import Path

import pytest

import kd.losses
from kd.errors import UserError
from kd.fleet.tuning import plan
from kd.fleet.tuning.space import Space, space_of
from kd.run.request import Request
from tests._files import read_yaml
from tests._helpers import ROOT


@pytest.mark.parametrize(
    "file", sorted((ROOT / "recipes/tune").glob("*.yaml")), ids=lambda file: file.stem
)
def test_no_search_of_ours_tries_a_loss_that_its_recipe_refuses(file: Path) -> None:
    """Half of the trials of `grocery_vit` once failed: DKDLoss needs class ids, and its pictures are mixed."""
    search = read_yaml(file)["search"]
    augment = read_yaml(ROOT / "recipes" / file.name)["data"].get("augment", {})
    mixes = {"mixup", "cutmix"} & augment.keys() or any(
        key.startswith("data.augment.mix") for key in search
    )
    tried = [
        name
        for key, value in search.items()
        if "losses" in key and isinstance(value, list)
        for name in value
    ]
    assert not (mixes and [name for name in tried if getattr(kd.losses, name).needs_class_ids])


def test_a_key_three_levels_down_is_tried_below_both_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[str, list[str]]] = []

    def resolved(_: Request, words: list[str], space: Space) -> list[int]:
        tried.append((space.key, words))
        if words == ["model.task=A"]:
            raise UserError("model.task.head: A has none")
        return [1]

    monkeypatch.setattr(plan, "_as_resolved", resolved)
    texts = {"model.task": "[A, B]", "model.task.head": "[X, Y]", "model.task.head.size": "1..2"}
    spaces = [space_of(key, text) for key, text in texts.items()]
    _, head, size = plan._search_space(spaces, Request())
    assert (head.above, head.under) == ("model.task", ("B",))
    assert (size.above, size.under) == ("model.task.head", ("X", "Y"))
    assert tried[-1] == ("model.task.head.size", ["model.task=B", "model.task.head=Y"])


def test_what_is_no_finite_number_is_a_word() -> None:
    assert space_of("a", "[inf, nan, 1e-5]").choices == ("inf", "nan", 1e-5)
