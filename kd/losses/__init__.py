"""Distillation losses, each a module with its formula; :func:`kd_loss` also as a function."""

from kd.losses.base import DistillLoss, FeatureLoss, LogitLoss
from kd.losses.dense import CWDFeatureLoss, CWDLoss, PairwiseLoss, PixelKDLoss
from kd.losses.features import (
    ATLoss,
    HintLoss,
    MGDLoss,
    PKDLoss,
    ReviewKDLoss,
    SimKDLoss,
    ViTKDLoss,
)
from kd.losses.logits import (
    BinaryKDLoss,
    DISTLoss,
    DKDLoss,
    HardKDLoss,
    KDLoss,
    MLKDLoss,
    NKDLoss,
    StandardizedLoss,
    WSLDLoss,
    kd_loss,
)
from kd.losses.numbers import RegressionKDLoss
from kd.losses.projections import ConvProjection, MLPProjection, OrthogonalProjection, Projection
from kd.losses.regression import CosineLoss, FeatureRegression, MSELoss, RADIOLoss, SmoothL1Loss
from kd.losses.relations import CKALoss, CRDLoss, GramKLLoss, PseudoClassLoss, RKDLoss, SPLoss

__all__ = [
    "ATLoss", "BinaryKDLoss", "CKALoss", "CRDLoss", "CWDFeatureLoss", "CWDLoss", "ConvProjection", "CosineLoss",
    "DISTLoss", "DKDLoss", "DistillLoss", "FeatureLoss", "FeatureRegression", "GramKLLoss", "HardKDLoss",
    "HintLoss", "KDLoss", "LogitLoss", "MGDLoss", "MLKDLoss", "MLPProjection", "MSELoss", "NKDLoss",
    "OrthogonalProjection", "PKDLoss", "PairwiseLoss", "PixelKDLoss", "Projection", "PseudoClassLoss", "RADIOLoss",
    "RKDLoss", "RegressionKDLoss", "ReviewKDLoss", "SPLoss", "SimKDLoss", "SmoothL1Loss", "StandardizedLoss",
    "ViTKDLoss", "WSLDLoss", "kd_loss",
]  # fmt: skip
