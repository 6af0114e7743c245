"""Distillation losses as pure functions of tensors.

What each number means, its range and the papers' values are explained at the loss's class in :mod:`kd.losses`.
"""

from kd.losses.functional.dense import cwd_loss, pairwise_loss, pixel_kd_loss
from kd.losses.functional.features import (
    at_loss,
    cosine_loss,
    gram_kl_loss,
    hcl_loss,
    hint_loss,
    masked_hint_loss,
    pkd_loss,
    pseudo_class_loss,
    smooth_l1_loss,
)
from kd.losses.functional.logits import (
    binary_kd_loss,
    dist_loss,
    dkd_loss,
    hard_kd_loss,
    kd_loss,
    mlkd_loss,
    nkd_loss,
    standardize_logits,
    topk_kd_loss,
    wsld_loss,
)
from kd.losses.functional.relations import (
    cka_loss,
    crd_loss,
    rkd_angle_loss,
    rkd_distance_loss,
    rkd_loss,
    sp_loss,
)
from kd.losses.functional.targets import hadamard, phi_s

__all__ = [
    "at_loss", "binary_kd_loss", "cka_loss", "cosine_loss", "crd_loss", "cwd_loss", "dist_loss", "dkd_loss",
    "gram_kl_loss", "hadamard", "hard_kd_loss", "hcl_loss", "hint_loss", "kd_loss", "masked_hint_loss", "mlkd_loss",
    "nkd_loss", "pairwise_loss", "phi_s", "pixel_kd_loss", "pkd_loss", "pseudo_class_loss", "rkd_angle_loss",
    "rkd_distance_loss", "rkd_loss", "smooth_l1_loss", "sp_loss", "standardize_logits",
    "topk_kd_loss", "wsld_loss",
]  # fmt: skip
