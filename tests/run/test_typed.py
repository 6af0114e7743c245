"""Values that a setting can't have."""

from kd.run.typed import meant_by


def test_meant_by() -> None:
    assert meant_by("optim", "SGD") == "optim.name=sgd"
    assert meant_by("monitor", "val/acc1") == "checkpoint.monitor=val/acc1"
    assert meant_by("trainer.logger", "wandb") == "trainer.logger=WandbLogger"
