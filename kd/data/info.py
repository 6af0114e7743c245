"""What is known of the data before a batch is made; torch is not imported."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

LISTS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson")
"""Endings of files that list pictures."""
ONE_LABEL = "one label a picture"
"""What :class:`kd.data.targets.Targets` calls data whose pictures have one class id each."""
Target: TypeAlias = "int | list[int] | list[float] | Tensor"
"""Of one picture: a class id (-1 without a label), ids (several labels), numbers, or a mask (uint8, ``(1, H, W)``)."""


@dataclass
class DataInfo:
    """What a model needs to know of the data.

    Attributes:
        classes: names by class id.
        train: how many training pictures, with and without a label; 0 where it is not known.
        val: how many validation pictures; 0 where it is not known.
        unlabeled: how many of ``train`` have no label: those of ``data.unlabeled``, or all where there are no classes.
        labels: whether training sees any labels.
        soft_targets: labels are mixed (mixup, cutmix): training targets are probabilities ``(N, C)``.
        kind: what a picture is labelled with, as :class:`kd.data.targets.Targets` names it.
        ignore_index: the value of a mask's pixels that take no part.
        counts: labelled training pictures of each class, of one label each; None without classes, with another kind of
            target, and where balancing or a sampler of the user's decides how often a class is seen.
        scales: mean and standard deviation of each target, where targets are numbers; else None.
        facts: numbers that belong to classes (:mod:`kd.data.class_facts`).
        probed: there are labelled pictures to measure features on (``data.probe``).
        crop_ratio: validation uses the centre of a picture that is scaled to the model's size over this: its shorter
            side, or both of a view that is not square.
    """

    classes: list[str]
    train: int = 0
    val: int = 0
    unlabeled: int = 0
    labels: bool = True
    soft_targets: bool = False
    kind: str = ONE_LABEL
    ignore_index: int | None = None
    crop_ratio: float = 1.0
    probed: bool = False
    counts: list[int] | None = None
    scales: list[tuple[float, float]] | None = None
    facts: dict[str, list[float | None]] | None = None

    @property
    def lacks_labels(self) -> bool:
        """Whether training pictures, pixels or numbers may be without a label: then batches have unequal numbers of labels.

        True also where :attr:`counts` are not known. Losses over labels weigh batches by their labels then, also within an
        accumulation window (:mod:`kd.data.windows`).
        """
        one_label = self.kind == ONE_LABEL
        return not (one_label and self.counts and sum(self.counts) == self.train)
