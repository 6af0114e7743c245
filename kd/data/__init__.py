"""Pictures and labels: sources, transforms, the order of samples, batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kd.data.datamodule import DistillationDataModule

__all__ = ["DistillationDataModule"]


def __getattr__(name: str) -> object:
    """Imported on first use: a process that makes batches alone does without Lightning."""
    if name != "DistillationDataModule":
        raise AttributeError(f"module 'kd.data' has no attribute '{name}'")
    from kd.data.datamodule import DistillationDataModule

    return DistillationDataModule
