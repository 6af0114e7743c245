"""Labelled pictures that features are measured on; nothing is trained with them."""

import os

from kd.data.sources import ImageFolder, Split
from kd.errors import UserError
from kd.run.settings import Probe

KEY = "data.probe.root"


def load(probe: Probe, cache_bytes: int | None = None) -> list[Split]:
    """The pictures of ``train`` and those of ``val``."""
    source = ImageFolder(probe.root or "")
    source.key, source.cache_bytes = KEY, cache_bytes
    train = source.load("train")
    if len(source.classes) == 1:
        raise UserError(f"{KEY}: one class ('{source.classes[0]}') leaves nothing to tell apart; two are needed")
    val = source.load("val")
    first, both = ({os.path.realpath(s.name(i)) for i in range(len(s.targets))} for s in (train, val))
    both &= first
    if both:
        raise UserError(f"{KEY}: {len(both)} pictures of val are in train too ({min(both)}): they would be "
                        "their own nearest neighbours")  # fmt: skip
    return [train, val]
