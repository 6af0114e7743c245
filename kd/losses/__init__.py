"""Distillation losses: thin modules over :mod:`kd.losses.functional`."""

from kd.losses.base import DistillLoss, EachLayer, FeatureLoss, LayersLoss, LogitLoss
from kd.losses.dense import CWDFeatureLoss, CWDLoss, PairwiseLoss, PixelKDLoss
from kd.losses.features import ATLoss, HintLoss, MGDLoss, PKDLoss, ReviewKDLoss, SimKDLoss, ViTKDLoss
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
)
from kd.losses.projections import ConvProjection, MLPProjection, Projection
from kd.losses.relations import CKALoss, CRDLoss, RKDLoss, SPLoss

__all__ = [
    "ATLoss", "BinaryKDLoss", "CKALoss", "CRDLoss", "CWDFeatureLoss", "CWDLoss", "ConvProjection", "DISTLoss",
    "DKDLoss", "DistillLoss", "EachLayer", "FeatureLoss", "HardKDLoss", "HintLoss", "KDLoss", "LayersLoss",
    "LogitLoss", "MGDLoss", "MLKDLoss", "MLPProjection", "NKDLoss", "PKDLoss", "PairwiseLoss", "PixelKDLoss",
    "Projection", "RKDLoss", "ReviewKDLoss", "SPLoss", "SimKDLoss", "StandardizedLoss", "ViTKDLoss", "WSLDLoss",
]  # fmt: skip
