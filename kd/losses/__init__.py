"""Distillation losses: thin modules over :mod:`kd.losses.functional`."""

from kd.losses.base import DistillLoss, FeatureLoss, LogitLoss
from kd.losses.features import HintLoss
from kd.losses.logits import KDLoss

__all__ = ["DistillLoss", "FeatureLoss", "HintLoss", "KDLoss", "LogitLoss"]
