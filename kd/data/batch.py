"""What a training step is given: one batch, as a dict."""

from collections.abc import Mapping, Sized
from typing import Any, TypedDict, cast

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from kd.errors import UserError

IMAGE = ("image", "images", "pixel_values")
"""Names under which a user's batch may have its pictures."""
TARGET = ("target", "targets", "label", "labels")
"""Names under which it may have its targets."""


HIGHEST = 20.0
"""Normalised float pictures stay below it, also with a small standard deviation; those in 0..255 do not."""


class Batch(TypedDict, total=False):
    """Pictures and what is known of each. A dict: loaders, Lightning and ``pin_memory`` know what to do with it.

    Attributes:
        image: uint8 ``(N, 3, H, W)``, prepared for each model by its own input; or float, which passes as it is.
        target: class ids ``(N,)`` (-1 without a label), probabilities, labels or numbers ``(N, C)``, or masks ``(N, H, W)``.
        index: ``(N,)`` the samples' numbers, -1 for padding.
        real: so many pictures are no padding, the first ones, where the loader counts them.
        view: of a training batch, which view of its pictures it shows; views come again where a teacher's answers are
            cached. A batch without it is of validation: no cache is read.
        decided: of a validation batch, the teacher's decisions, where an earlier pass has made them.
        records: by the teacher's name, the stored answers to all pictures, uint8 ``(N, bytes)`` of each kind of answer; an
            empty list where one is missing.
        window: the targets of all batches of its accumulation window, where labels are missing
            (:mod:`kd.data.windows`).
    """

    image: Tensor
    target: Tensor
    index: Tensor
    real: int
    view: int
    decided: Tensor
    records: dict[str, list[Tensor]]
    window: list[Tensor]


def as_batch(given: object) -> Batch:
    """A loader's batch as :class:`Batch`.

    Args:
        given: ``images``, ``(images, targets)``, ``(images, targets, index)``, or a dict with ``image`` (or ``images``,
            ``pixel_values``) and ``target`` (or ``targets``, ``label``, ``labels``). Without targets all are -1; integer
            targets become int64, but masks in uint8 stay. Other keys of a dict are kept. With "plan" it needs no
            pictures, which the device makes (:mod:`kd.data.engines`).

    Raises:
        UserError: none of these.

    >>> sorted(as_batch((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))))
    ['image', 'target']
    """
    if isinstance(given, Tensor):
        given = (given,)
    if (
        isinstance(given, (tuple, list))
        and 1 <= len(given) <= 3
        and all(isinstance(x, Tensor) for x in given)
    ):
        given = dict(zip(("image", "target", "index"), given, strict=False))
    if not isinstance(given, Mapping):
        raise UserError(
            f"a batch is (images, targets), (images, targets, index) or a dict, got {_kind(given)}"
        )
    image = next((given[name] for name in IMAGE if name in given), None)
    # A batch with a "plan" gets its pictures on the device (kd.data.engines).
    if image is None and "plan" not in given:
        raise UserError(
            f"a batch needs one of {', '.join(IMAGE)}, got {', '.join(map(str, given))}"
        )
    target = next((given[name] for name in TARGET if name in given), None)
    batch: dict[str, Any] = {}
    for k, v in given.items():
        if k not in (*IMAGE, *TARGET):
            batch[k] = v
    if image is not None:
        batch["image"] = image
        if target is None:
            target = torch.full((len(image),), -1)
    whole = (torch.int8, torch.int16, torch.int32)
    if isinstance(target, Tensor) and (
        target.dtype in whole or (target.dtype == torch.uint8 and target.ndim == 1)
    ):
        target = target.long()  # losses take class ids as int64, and masks also as uint8
    return cast(Batch, {**batch, "target": target})


def real_rows(batch: Batch) -> slice | Tensor:
    """Which pictures are no padding, as an index into the batch.

    Returns:
        A slice where the loader has counted them ("real"), or has no padding at all (no "index"): the host does not wait
        for a GPU. Else bool ``(N,)`` on the batch's device.
    """
    if "index" not in batch or "real" in batch:
        return slice(batch.get("real"))
    return batch["index"] >= 0


class RangeCheck:
    """Warns once of float pictures in 0..255: they pass as they are, and models want them normalised."""

    done = False  # whether a batch was looked at

    def look(self, images: object) -> None:
        """Warns of float pictures in 0..255. Only the first call reads pixels: on a GPU the host waits for it.

        Args:
            images: ``(N, 3, H, W)``; anything but float tensors passes.
        """
        if self.done or not isinstance(images, Tensor):
            return
        self.done = True
        if (
            images.is_floating_point()
            and images.numel()
            and (most := float(images.max())) > HIGHEST
        ):
            rank_zero_warn(
                f"pictures: floats up to {most:g} pass to the models as they are; give uint8, which is prepared for "
                "each model, or normalised floats",
                category=UserWarning,
            )


def _kind(given: object) -> str:
    """The type of a value, and its length where it has one, for a message."""
    name = type(given).__name__
    if isinstance(given, Sized):
        return f"{name} of {len(given)}"
    return name
