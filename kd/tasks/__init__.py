"""Tasks: what the labels mean, their loss and their metrics."""

from kd.tasks.classification import Classification

__all__ = ["Classification"]
