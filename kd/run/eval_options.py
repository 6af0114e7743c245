"""The options of ``kd-eval``, and what its certificate, cascade and probe are asked for. Imports nothing heavy."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from kd.config.kinds import Like, Range
from kd.errors import UserError
from kd.proof.cascade import Goal
from kd.proof.certificate import ProofMargin
from kd.run.options import CommandOptions
from kd.storage.of_weights import evaluation

FRACTION = r"0*\.\d*[1-9]\d*"
"""A number > 0 and < 1, as text."""


def no_teacher(key: str, name: str, why: str = "") -> UserError:
    """The message where ``key`` (``margin``, ``cascade``) compares a model with its teacher, and the model ``name`` has none
    that answers here; ``why`` follows it.
    """
    remedy = ""
    if key == "margin":
        remedy = "; two models can be compared (kd-eval FIRST SECOND margin=POINTS)"
    return UserError(f"{key}: {name} has no teacher that can be asked here{why}{remedy}")


def needs_one_class(key: str) -> UserError:
    """The message where ``key`` (``cascade``, ``disputed``) is given for a task without one class a picture."""
    return UserError(
        f"{key}: needs one class a picture, of two or more (model.task=Classification)"
    )


@dataclass(frozen=True)
class Claim:
    """What ``margin=`` asks for."""

    wanted: ProofMargin
    """Margin (a fraction: ``margin=1`` is 0.01) and confidence."""
    groups: re.Pattern[str] | None = None
    """Its first brackets match what pictures that belong together share in their names; None: each is its own group."""


class EvalOptions(CommandOptions):
    """What ``kd-eval`` is given."""

    OTHERS = "data"
    NEEDS: ClassVar[Mapping[str, Sequence[str]]] = {
        "confidence": ("margin=POINTS", "cascade=true"),
        "groups": ("margin=POINTS",),
        "despite_choice": ("margin=POINTS", "cascade=true"),
        **dict.fromkeys(("accuracy", "share", "latency_ms"), ("cascade=true",)),
        **dict.fromkeys(("pretrained", "seeds"), ("pays=DIR",)),
    }
    EXCLUDES: ClassVar[Mapping[str, Sequence[str]]] = {
        "disputed": ("cascade", "margin"),
        "folder": ("split",),
        "groups": ("cascade",),
        "latency_ms": ("share", "accuracy"),
        "share": ("accuracy",),
        "margin": ("share", "latency_ms"),
        "pays": ("split", "folder", "disputed", "margin", "cascade"),
    }
    margin: Annotated[float, Range("> 0 and < 100")] | None = None
    """1: whether the student is not worse than its teacher by more than a point: shown, or not (of several models each
    against the first; of a regression: per cent of the teacher's error)."""
    # the exact test spends kd.proof.paired.NUISANCE, 0.0001, of the error: above 0.999 too little would be left
    confidence: Annotated[float, Range("> 0.5 and <= 0.999")] = 0.95
    """Of the certificate, one-sided."""
    split: str = ""
    """The data's split: val (default), train, or for an ImageFolder any folder below its root; of a certificate or cascade
    the test split where there is one, of disputed labels train."""
    folder: str | None = None
    """Other pictures: DIR/<class>/*.jpg, with class names of the model."""
    out: Path | None = None
    """FILE.csv: a line a picture, with its label and what each model says; FILE.json: the figures."""
    groups: str | None = None
    """A regular expression with brackets around what the names of pictures that belong together share."""
    cascade: bool = False
    """The student answers where it is sure, else the teacher: accuracy against milliseconds, and the threshold for a goal,
    chosen on half of the pictures. The goal is one of the next three."""
    accuracy: (
        Annotated[
            str,
            Like(
                rf"teacher|{FRACTION}(\*teacher)?",
                "must be teacher, a share of it such as 0.99*teacher, or a number > 0 and < 1",
            ),
        ]
        | None
    ) = None
    """teacher (default; less margin=1 point), 0.99*teacher, or 0.85."""
    share: Annotated[float, Range("> 0 and < 1")] | None = None
    """Of the pictures, for which the teacher is asked."""
    latency_ms: Annotated[float, Range("> 0")] | None = None
    """Of a picture, on average."""
    disputed: bool = False
    """Labels that the teacher disputes, worst first: of the training pictures, or of split=NAME or folder=DIR; also in
    RUN_FOLDER/disputed_labels.csv, and with pictures in the report."""
    pays: (
        Annotated[
            str,
            Like(
                r"(?!(true|false)$).+",
                "must be a folder of pictures with classes (DIR/train/<class>, DIR/val/<class>)",
            ),
        ]
        | None
    ) = None
    """DIR: whether a distilled backbone pays, beside a random start and pre-trained weights: a linear probe on frozen
    features (DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg); also in the report."""
    pretrained: Annotated[str, Like(r"(?!false$).+", "must be true or a weights file")] | None = (
        None
    )
    """With pays=: weights of the same architecture, or true: timm's (default: what the run began with)."""
    seeds: Annotated[int, Range(">= 2 and <= 20")] = 3
    """With pays=: how often each start is measured."""
    despite_choice: bool = False
    """Pictures that chose the student's epoch are taken for a certificate or a cascade all the same."""
    of_files: list[str] = field(default_factory=list, kw_only=True)
    """Words such as ``arch=NAME``, settings of ``model.teacher`` that say how a bare weights file is read."""
    cautions: dict[Path | None, list[str]] = field(default_factory=dict, kw_only=True)
    """By the run's folder, what :func:`kd.run.certify.cautions_about` has found before torch was imported."""

    def __post_init__(self) -> None:
        """Refuses options that have no effect, exclude each other, or a pattern without brackets."""
        super().__post_init__()
        if "margin" in self.given and self.accuracy not in (None, "teacher"):
            raise UserError(f"margin: has no effect on accuracy={self.accuracy}")
        if self.groups is None:
            return
        try:
            has_brackets = re.compile(self.groups).groups > 0
        except re.error as error:
            raise UserError(
                f"groups: '{self.groups}' is not a regular expression: {error}"
            ) from error
        if not has_brackets:
            raise UserError(
                f"groups: must have brackets around what pictures that belong together share, "
                f"such as groups='(.*)_\\d+\\.jpg', got '{self.groups}'"
            )

    @property
    def claim(self) -> Claim | None:
        """The claim of a certificate; None without ``margin``, and where that belongs to a cascade."""
        if self.margin is None or self.cascade:
            return None
        groups = re.compile(self.groups) if self.groups else None
        return Claim(ProofMargin(self.margin / 100, self.confidence), groups)

    @property
    def cascade_goal(self) -> tuple[Goal | None, str]:
        """What a cascade should reach, and that in words; None for ``latency_ms``, a share once both models are timed."""
        if self.latency_ms is not None:
            return None, f"latency_ms={self.latency_ms:g}"
        if self.share is not None:
            return Goal(share=self.share), f"share={self.share:g}"
        text = self.accuracy or "teacher"
        number, is_share, _ = text.partition("*")
        if text == "teacher":
            return Goal(of_teacher=(self.margin or 1) / 100), "accuracy=teacher"
        key = "share_of_teacher" if is_share else "accuracy"
        return Goal(**{key: float(number)}), f"accuracy={text}"

    @property
    def place(self) -> str:
        """Name of the pictures' loader: the split, or ``folder`` for other pictures."""
        if self.folder:
            return "folder"
        return self.split or "val"

    @property
    def pictures_of(self) -> str:
        """Where the pictures are from, in words."""
        return f"folder {self.folder}" if self.folder else f"split {self.split}"

    @property
    def proves(self) -> bool:
        """Whether it needs pictures that have not chosen the student."""
        return self.margin is not None or self.cascade

    @property
    def classifier_key(self) -> str:
        """The option that needs a classifier: ``disputed``, ``cascade`` or ``margin``; "" where none is given."""
        given = [name for name in ("disputed", "cascade", "margin") if getattr(self, name)]
        return given[0] if given else ""

    @property
    def file(self) -> str:
        """Name of the JSON file in the run's folder, once :attr:`split` is filled in.

        Of a folder called ``train``, ``val`` or ``test`` it has ``folder_`` in it, and is not the split's; a folder called
        as any other split shares that one's.
        """
        if self.pays:
            return evaluation("pays")
        if not self.folder:
            return evaluation(self.split)
        name = Path(self.folder).resolve().name
        if name in ("train", "val", "test"):
            name = f"folder_{name}"
        return evaluation(name)
