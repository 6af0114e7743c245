"""Helpers that are pure functions, one call each."""

from kd.run.build import made
from kd.run.files import flatten, leaves
from kd.run.keys import arguments, merged
from kd.run.messages import one_line
from kd.run.paths import source_items
from kd.run.request import _entries_whole, translate
from kd.run.suggest import _runs, hint, suggest
from kd.run.trust import importable, refused
from kd.run.typed import meant_by


def test_made() -> None:
    assert made(int | tuple[int, int], [24, 32], "data.img_size") == (24, 32)
    assert made(float | None, 1, "data.source.cache_gb") == 1.0


def test_leaves() -> None:
    assert list(leaves({"a": {"b": 1, "c": [2, {"d": 3}]}})) == [
        ("a.b", 1),
        ("a.c", 2),
        ("a.c.d", 3),
    ]


def test_flatten() -> None:
    assert flatten({"a": {"b": 1}, "c": [2]}) == {"a.b": 1, "c": [2]}


def test_arguments() -> None:
    assert arguments("KDLoss")["temperature"].type == "float"


def test_merged() -> None:
    assert merged([{"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}], {"a.d": 4}) == {
        "a": {"b": 3, "c": 2, "d": 4}
    }


def test_one_line() -> None:
    assert (
        one_line("Parser key \"optim.lr\":\n  Expected a <class 'float'>. Got value: abc")
        == "optim.lr: must be a number, got 'abc'"
    )


def test_source_items() -> None:
    assert source_items("data.source=s3://food/train.csv", []) == [
        "data.source=Manifest",
        "data.source.train=s3://food/train.csv",
    ]


def test_entries_whole() -> None:
    assert _entries_whole(["model.taps.at.student=a", "seed=1", "model.taps.at.teacher=b"], []) == [
        'model.taps.at={"student": "a", "teacher": "b"}',
        "seed=1",
    ]


def test_translate() -> None:
    assert translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides == [
        "trainer.max_epochs=3",
        "seed=1",
    ]


def test_suggest() -> None:
    assert suggest("lr", ["optim.lr", "seed", "optim.lr_batch"]) == ["optim.lr"]
    assert suggest("model.student.drop_path_rate", []) == ["model.student.kwargs.drop_path_rate"]


def test_runs() -> None:
    assert _runs("base_lr") == ["base_lr", "lr", "base"]


def test_hint() -> None:
    assert (
        hint("data.source.root", ["data.source.root"])
        == ": the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder"
    )


def test_importable() -> None:
    paths = importable(["mine.nets.Tiny", "/data/food", "torch.nn.Identity"])
    assert {"mine", "kd.losses.KDLoss", "kd.losses.logits.KDLoss", "torch.nn.Identity"} < set(paths)
    assert not {"torch", "kd", "pytorch_lightning", "torch.nn"} & set(
        paths
    )  # no package as a whole


def test_refused() -> None:
    assert (
        refused("mine.nets.Tiny").partition("; ")[2]
        == "if you trust it: trust=mine.nets, or --trust"
    )


def test_meant_by() -> None:
    assert meant_by("optim", "SGD") == "optim.name=sgd"
    assert meant_by("monitor", "val/acc1") == "checkpoint.monitor=val/acc1"
    assert meant_by("trainer.logger", "wandb") == "trainer.logger=WandbLogger"
