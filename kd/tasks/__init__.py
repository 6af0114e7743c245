"""Tasks: what the labels mean, their loss and their metrics."""

from kd.tasks.base import Task
from kd.tasks.classification import Classification
from kd.tasks.label_free import Features
from kd.tasks.multilabel import MultiLabel
from kd.tasks.regression import Regression
from kd.tasks.segmentation import Segmentation

__all__ = ["Classification", "Features", "MultiLabel", "Regression", "Segmentation", "Task"]
