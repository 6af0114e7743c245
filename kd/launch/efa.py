"""EFA, AWS's network between machines: whether it is there, and whether NCCL sends over it."""

import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from kd.storage.elsewhere import text_of


def has_efa(devices: Path = Path("/sys/class/infiniband")) -> bool:
    return any(text_of(file).startswith("0xefa") for file in devices.glob("*/device/device"))


def log_nccl(env: MutableMapping[str, str] = os.environ) -> None:
    """NCCL's first lines, which name its network, go to a file of each process, unless ``NCCL_DEBUG`` is set."""
    if "NCCL_DEBUG" not in env and has_efa():
        file = str(Path(tempfile.gettempdir()) / "kd-nccl.%p")
        env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=file)


def nccl_network(env: MutableMapping[str, str] = os.environ) -> str:
    """``Libfabric`` (EFA), ``Socket`` (TCP), ... as NCCL's log says; empty where it says nothing."""
    file = Path(env.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid())))
    text = text_of(file) if file.is_file() else ""
    return (re.findall(r"Using network (?:AWS )?(\w+)", text) or [""])[-1]
