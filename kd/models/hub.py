"""Weights that timm downloads: one attempt to reach the hub, and what to do where there is no internet."""

import timm
from huggingface_hub import try_to_load_from_cache

from kd.errors import UserError
from kd.storage.hub import REMEDIES, why_unreachable
from kd.storage.weights_files import TIMM_FILES


def check_downloadable(arch: str, key: str) -> None:
    """Checks that a timm model's weights are in this machine's cache, or that the hub can be reached.

    Weights that timm lacks, or has from elsewhere than the hub, pass: building the model reports what is wrong.

    Args:
        arch: timm's name of the model, with or without a tag of weights.
        key: the setting that takes the weights from a file, such as ``model.teacher.checkpoint``.

    Raises:
        UserError: neither; the message has the settings and variables that help.
    """
    try:
        config = timm.get_pretrained_cfg(arch)
    except RuntimeError:  # timm has no such weights of the model: building it reports that
        return
    if config is None or not config.hf_hub_id:
        return
    repository = config.hf_hub_id
    for file in [config.hf_hub_filename] if config.hf_hub_filename else TIMM_FILES:
        if isinstance(try_to_load_from_cache(repository, file), str):
            return
    why = why_unreachable()
    if why:
        raise UserError(
            f"{key}: {why}, and the weights of timm's {arch} are not on this "
            f"machine: {key}=FILE takes them from disk; {REMEDIES}"
        )


def is_downloadable(arch: str) -> bool:
    """Whether a timm model's weights can be had, as of :func:`check_downloadable`."""
    try:
        check_downloadable(arch, "")
    except UserError:
        return False
    return True
