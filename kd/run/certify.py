"""Which pictures may certify a run, how often they were measured, and the certificates of ``kd-eval margin=``.

Torch is not imported: pictures are refused before it is.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kd.data.sources import FileSplit, Split, identity
from kd.data.sources.base import whole_of
from kd.data.splits import Splits
from kd.data.targets import Targets
from kd.errors import UserError
from kd.proof.certificate import certify
from kd.proof.resample import FEWEST, group_numbers
from kd.report.evaluated import without_common_folders
from kd.run.eval_options import Claim, EvalOptions
from kd.storage.elsewhere import Json, mapping_of
from kd.storage.student_metadata import weights_digest
from kd.storage.writing import appended, write_json

if TYPE_CHECKING:
    from kd.module.outcomes import PictureOutcomes
    from kd.run.subject import Subject

LOOKS = "looks.json"
"""File of a run's folder: when its student was measured on pictures that it is judged by."""
LOOKS_LOCK = ".looks.lock"
"""File of a run's folder that is locked while a look is added: two commands may measure at once."""


def groups_in(split: Split, numbers: np.ndarray, pattern: re.Pattern[str]) -> np.ndarray:
    """The group of each picture, ``(N,)`` numbers from 0 on.

    Pictures are in one group where the first brackets of a pattern match the same text in their names.

    Args:
        split: has the pictures' names.
        numbers: of the pictures in it, ``(N,)``.
        pattern: with brackets; searched for in each name.

    Raises:
        UserError: a name in which the pattern is not found, or fewer groups than :data:`kd.proof.resample.FEWEST`.
    """
    names = []
    for number in numbers.tolist():
        match = pattern.search(split.name(number))
        if match is None:
            raise UserError(f"groups: '{pattern.pattern}' is not in {split.name(number)}")
        names.append(match[1] or "")
    if len(set(names)) < FEWEST:
        raise UserError(
            f"groups: a certificate needs {FEWEST} groups of pictures or more, '{pattern.pattern}' gives {len(set(names))}"
        )
    return group_numbers(names)


# -- which pictures --------------------------------------------------------------------------------------------------
def usual_split(splits: Splits) -> str:
    """The split that best measures on new pictures: ``test`` where the source has one with other pictures than ``val``, else
    ``val``; also where listing them fails.
    """
    with suppress(UserError, OSError):
        if not splits.source.has("test"):
            return "val"
        if identity(splits.listed("test")[0]) != identity(splits.listed("val")[0]):
            return "test"
    return "val"


def cautions_about(splits: Splits, run: Path | None, options: EvalOptions) -> list[str]:
    """Refuses pictures that can't certify a run's student; of others says what speaks against them.

    Args:
        splits: the run's, with the pictures of a folder listed.
        run: the run's folder; None for a bare weights file, of which nobody knows how it was chosen.
        options: name the pictures, their groups, and whether those that chose the student's epoch are taken all the same.

    Returns:
        Lines for the certificate, on what speaks against it; [] where nothing does.

    Raises:
        UserError: the student was trained on some of these pictures, or some chose its epoch and ``despite_choice`` is
            not given; or as of :func:`groups_in`.
    """
    place = options.place
    if options.claim is not None and options.claim.groups is not None:
        split = splits.listed(place)[0]
        groups_in(split, np.arange(len(split.targets)), options.claim.groups)
    if run is None:
        return ["how the weights were chosen is not known: no run is beside them"]
    if place == "train":
        raise UserError("split: train can't certify: the student was trained on these pictures")
    judged = splits.listed(place)[0]
    count = len(judged.targets)
    key = "folder" if place == "folder" else "split"
    both = _shared([judged], splits.listed("train"))
    if both:
        raise UserError(
            f"{key}: can't certify: {both:,} of its {count:,} pictures are training pictures"
        )
    validated = splits.listed("val")[0]
    same = place == "val" or identity(judged) == identity(validated)
    shared = count if same else _shared([judged], [validated])
    student = mapping_of(run / "summary.json").get("student")
    chose_epoch = not student or student.get("best_val")  # also where the summary lacks the student
    if not shared or not chose_epoch:
        return []
    what = "chose" if shared == count else f"({shared:,} of them) chose"
    if not options.despite_choice:
        raise UserError(
            f"{key}: these pictures {what} the best epoch of {run}, so they can't certify it: "
            f"{_how_to_get_others(splits)}, or despite_choice=true for a certificate that says so"
        )
    return [f"no guarantee for new pictures: these {what} the student's epoch, which favours it"]


def _how_to_get_others(splits: Splits) -> str:
    """What to type for pictures that did not choose the student, for a message."""
    source = splits.source
    has_others = usual_split(splits) == "test"
    if source.kind.name != Targets.name:  # no folder of classes has them
        given = (
            "give the data a split test (of lists data.source.test=FILE) and type the same again"
        )
        return "type split=test" if has_others else given
    others = "folder=DIR (DIR/<class>/*.jpg; of lists data.source.test=FILE)"
    if has_others:
        return f"type split=test, or {others}"
    if source.has("test"):  # it has validated
        return f"type {others}"
    root = getattr(source, "root", None) or "DIR"
    return f"put others into {root}/test/<class> and type the same again, or type {others}"


def _shared(splits: Iterable[Split], others: Iterable[Split]) -> int:
    """How many of the files of some splits are among those of others."""
    of_others = set(_paths(others))
    return sum(path in of_others for path in _paths(splits))


def _paths(splits: Iterable[Split]) -> list[str]:
    """The files of splits, or of parts of splits, links resolved; pictures that are no files are left out."""
    paths = []
    for split in splits:
        for i in range(len(split.targets)):
            whole, number = whole_of(split, i)
            if isinstance(whole, FileSplit):
                paths.append(os.path.realpath(whole.name(number)))
    return paths


# -- how often they were looked at -----------------------------------------------------------------------------------
def count_look(subject: "Subject", place: str, what: str) -> dict[str, int] | None:
    """Adds a look at pictures to a run's ``looks.json``. Certificates state the counts.

    Args:
        subject: that was measured.
        place: the pictures' split, or ``folder``.
        what: the command that looks, for the reader of the file.

    Returns:
        ``looks``: how often these pictures (by their ``identity``) were looked at so far, this time included;
        ``students``: how many different ones (by their weights) were. None, and nothing is counted, without a run, and of
        ``train`` and ``val``, which were seen while it trained.
    """
    if subject.run is None or place in ("train", "val"):
        return None
    judged = subject.data.splits.listed(place)[0]
    file = subject.run / LOOKS
    look = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "what": what,
        "pictures": len(judged.targets),
        "identity": identity(judged),
        "student": weights_digest(subject.run),
    }
    with appended(file.with_name(LOOKS_LOCK)) as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        looks = mapping_of(file).get("looks")
        if not isinstance(looks, list):
            looks = []
        looks = [*looks, look]
        write_json(file, {"looks": looks})
    same = [each for each in looks if each.get("identity") == look["identity"]]
    return {"looks": len(same), "students": len({each.get("student") for each in same})}


def add_looks(certificate: Json, look: dict[str, int] | None, whose: str) -> None:
    """Adds to a certificate how often a run was measured on these pictures.

    Args:
        certificate: with ``pictures_of``; its ``looks`` are those of the run that was added last.
        look: of :func:`count_look`; None: nothing is added.
        whose: the run, as the end of a sentence.
    """
    if look is None:
        return
    certificate |= look
    times = "once" if look["looks"] == 1 else f"{look['looks']} times"
    several = f", {look['students']} different students" if look["students"] > 1 else ""
    place = certificate["pictures_of"]
    certificate["text"].append(f"{place}: measured {times} {whose}{several} (looks.json)")


# -- certificates ----------------------------------------------------------------------------------------------------
def certificates(
    measured: Sequence["Subject"],
    outcomes: Sequence["PictureOutcomes"],
    claim: Claim,
    place: str,
) -> dict[int, Json]:
    """The certificate of a single model against its teacher, of several each against the first.

    Args:
        measured: the models, whose task has a certificate.
        outcomes: what each has made of the pictures.
        claim: margin, confidence and groups.
        place: the pictures' split, or ``folder``.

    Returns:
        By the model's number, as :func:`kd.proof.certificate.certify` gives them; of several models the first has none.

    Raises:
        UserError: too few groups or pictures, or answers that are NaN (of numbers also infinite).
    """
    first = outcomes[0]
    names = without_common_folders([subject.name for subject in measured])
    pairs = {}
    for number, other in enumerate(outcomes[1:], start=1):
        pairs[number] = first.of("student"), other.of("student"), (names[0], names[number])
    if not pairs:
        pairs[0] = first.of("teacher"), first.of("student"), ("the teacher", "the student")
    group = None
    if claim.groups is not None:
        group = groups_in(measured[0].data.split(place), first.picture_numbers(), claim.groups)
    found = {}
    for number, (reference, candidate, names_of_pair) in pairs.items():
        assert reference is not None and candidate is not None
        try:
            found[number] = certify(
                reference, candidate, claim.wanted, names_of_pair, group, measured[number].classes
            )
        except ValueError as error:
            raise UserError(f"margin: {error}") from error
    return found
