"""Class paths that have moved: run folders keep the old ones in their ``config.yaml`` and are read all the same."""

import re

MOVED = {  # the old path -> the new one, of a module or of a class
    "kd.data.masks.SegmentationFolder": "kd.data.sources.SegmentationFolder",
    "kd.data.shards.Shards": "kd.data.sources.Shards",
    "kd.callbacks.audit": "kd.monitor.audit",
    "kd.callbacks.headspace": "kd.monitor.headspace",
    "kd.callbacks.health": "kd.monitor.health",
    "kd.callbacks.kernels": "kd.monitor.kernels",
    "kd.callbacks.confusion": "kd.monitor.confusion",
    "kd.callbacks.ring": "kd.monitor.ring",
    "kd.export": "kd.ship.export",
    "kd.strategies.smddp.SMDDPStrategy": "kd.strategies.ddp.SMDDPStrategy",
}


def current(text: str) -> str:
    """YAML with today's class paths.

    >>> MOVED["kd.old.Name"] = "kd.fresh.Name"
    >>> current("class_path: kd.old.Name")
    'class_path: kd.fresh.Name'
    >>> del MOVED["kd.old.Name"]
    """
    for old, new in MOVED.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
    return text
