"""The keys of ``kd-eval RUN pays=DIR``. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass

from kd.errors import UserError
from kd.run.own_keys import whole_number

KEYS = ("pays", "pretrained", "seeds")
"""The command's own keys that :func:`pays_of` reads."""
MOST_SEEDS = 20


@dataclass(frozen=True)
class PaysWish:
    """What the distilled backbone is compared with, and on what."""

    folder: str
    """Labelled pictures, ``folder/train/<class>/*.jpg`` and ``folder/val/<class>/*.jpg``."""
    pretrained: str = ""
    """``true``: timm's pre-trained weights of the same architecture; else their file. "": the run's own start."""
    seeds: int = 3
    """How often each start is measured, 2..20: an interval needs two."""


def pays_of(options: Mapping[str, str]) -> PaysWish | None:
    """The wish of a command's own keys; None without ``pays``.

    Raises:
        UserError: a value out of range, or a key that has no effect without ``pays``.
    """
    if "pays" not in options:
        for key in KEYS[1:]:
            if key in options:
                raise UserError(f"{key}: has no effect without pays=DIR")
        return None
    folder = options["pays"]
    if folder.lower() in ("", "true", "false"):
        raise UserError(
            f"pays: must be a folder of pictures with classes (DIR/train/<class>, DIR/val/<class>), got '{folder}'"
        )
    pretrained = options.get("pretrained", "")
    if "pretrained" in options and pretrained.lower() in ("", "false"):
        raise UserError(f"pretrained: must be true or a weights file, got '{pretrained}'")
    seeds = whole_number(options, "seeds", default=3, low=2, high=MOST_SEEDS)
    return PaysWish(folder, pretrained, seeds)
