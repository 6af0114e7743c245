"""Classes that a file from elsewhere may name."""

from kd.run.trust import importable, refused


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
