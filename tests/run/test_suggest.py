"""Suggestions for an unknown key."""

from kd.run.suggest import _runs, hint, suggest


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
