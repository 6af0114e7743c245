"""Pictures and labels: sources, transforms, the order of samples, batches."""

from kd.data.datamodule import DistillationDataModule

__all__ = ["DistillationDataModule"]
