"""The keys of ``kd-eval RUN pays=DIR``. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kd.data.box_layouts import has_boxes
from kd.data.sources.places import expanded
from kd.errors import UserError
from kd.run.own_keys import whole_number
from kd.storage.objects import is_url

KEYS = ("pays", "pretrained", "seeds", "steps")
"""The command's own keys that :func:`pays_of` reads."""
MOST_SEEDS = 20
STEPS = 300
"""Optimizer steps of a detector, 4 pictures each."""
MOST_STEPS = 1_000_000
"""The largest ``steps=`` that is taken."""


@dataclass(frozen=True)
class PaysWish:
    """What the distilled backbone is compared with, and on what."""

    folder: str
    """Labelled pictures, ``folder/train/<class>/*.jpg`` and ``folder/val/<class>/*.jpg``, or pictures with boxes."""
    pretrained: str = ""
    """``true``: timm's pre-trained weights of the same architecture; else their file. "": the run's own start."""
    seeds: int = 3
    """How often each start is measured, 2..20: an interval needs two."""
    steps: int | None = None
    """Optimizer steps of each detector, where the folder has boxes; None: not given (:data:`STEPS`)."""

    @property
    def has_boxes(self) -> bool:
        """Whether its pictures come with boxes; those in a store do not."""
        return not is_url(self.folder) and has_boxes(Path(expanded(self.folder)))


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
            f"pays: must be a folder of pictures with classes (DIR/train/<class>, DIR/val/<class>) or boxes, got '{folder}'"
        )
    pretrained = options.get("pretrained", "")
    if "pretrained" in options and pretrained.lower() in ("", "false"):
        raise UserError(f"pretrained: must be true or a weights file, got '{pretrained}'")
    seeds = whole_number(options, "seeds", default=3, low=2, high=MOST_SEEDS)
    steps = None
    if "steps" in options:
        steps = whole_number(options, "steps", default=STEPS, high=MOST_STEPS)
    return PaysWish(folder, pretrained, seeds, steps)
