"""Weights that timm downloads: one attempt to reach the hub, and what to do where there is no internet."""

from functools import cache

import huggingface_hub
import timm
from huggingface_hub import constants, try_to_load_from_cache

from kd.errors import UserError

FILES = ("model.safetensors", "pytorch_model.bin")
"""A repository's files of which timm takes the first."""
WAIT_S = 10.0
"""Seconds for the one attempt."""


def check_weights(arch: str, key: str) -> None:
    """Checks that a timm model's weights are on this machine, or that the hub can be reached.

    Args:
        arch: a timm model with weights.
        key: the setting that takes the weights from a file, such as ``model.teacher.checkpoint``.

    Raises:
        UserError: neither; with the settings and variables that help.
    """
    config = timm.get_pretrained_cfg(arch)
    if config is None or not config.hf_hub_id:
        return
    repository = config.hf_hub_id
    for file in [config.hf_hub_filename] if config.hf_hub_filename else FILES:
        if isinstance(try_to_load_from_cache(repository, file), str):
            return
    if not _reachable(constants.ENDPOINT):
        why = f"no internet ({constants.ENDPOINT} does not answer)"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        raise UserError(
            f"{key}: {why}, and the weights of timm's {arch} are not on this "
            f"machine: {key}=FILE takes them from disk; behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT"
        )


@cache
def _reachable(address: str) -> bool:
    """Whether a web address answers, through the proxy of the environment; tried once."""
    try:
        huggingface_hub.get_session().head(address, timeout=WAIT_S)
    except Exception:  # the hub's client is httpx or requests, each with errors of its own
        return False
    return True
