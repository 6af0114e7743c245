"""Weights that timm downloads: one attempt to reach the hub, and what to do where there is no internet."""

import threading
from contextlib import suppress
from functools import cache

import huggingface_hub
import timm
from huggingface_hub import constants, try_to_load_from_cache

from kd.errors import UserError

FILES = ("model.safetensors", "pytorch_model.bin")
"""A repository's files of which timm takes the first."""
WAIT_S = 10.0
"""Seconds for the one attempt: with the search for the name, and with all addresses that it has."""


def check_weights(arch: str, key: str) -> None:
    """Checks that a timm model's weights are on this machine, or that the hub can be reached.

    Args:
        arch: a timm model with weights.
        key: the setting that takes the weights from a file, such as ``model.teacher.checkpoint``.

    Raises:
        UserError: neither; with the settings and variables that help.
    """
    try:
        config = timm.get_pretrained_cfg(arch)
    except RuntimeError:  # timm has no such weights of the model: building it reports that
        return
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
    """Whether a web address answers within :data:`WAIT_S`, through the proxy of the environment; tried once.

    A client's own limit holds for each step alone: a name with eight addresses, of which none answers, takes eight
    times as long, and the search for the name has no limit. So the attempt has a thread of its own, which is left
    behind when the time is up.
    """
    answered = threading.Event()
    over = threading.Event()

    def attempt() -> None:
        # the hub's client is httpx or requests, each with errors of its own
        with suppress(Exception):
            huggingface_hub.get_session().head(address, timeout=WAIT_S)
            answered.set()
        over.set()

    threading.Thread(target=attempt, name="hub", daemon=True).start()
    over.wait(WAIT_S)
    return answered.is_set()
