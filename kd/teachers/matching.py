"""Answers of files meet the pictures that a run trains and validates on."""

from kd.data.datamodule import DistillationDataModule
from kd.models.weights import say
from kd.teachers.answers_file import KEY, AnswersFile
from kd.teachers.base import OwnTeacher, RunTeacher


def match_answers(
    teacher: RunTeacher | None, data: DistillationDataModule, validated: str = "val"
) -> None:
    """Gives teachers of files the names of the pictures, and prints a line for each; other teachers are left as they are.

    Each process of a run calls it when the run is built; ``kd-eval`` calls it for the split that it measures.

    Args:
        teacher: of a run, or several; None: nothing is done.
        data: of the run.
        validated: the split whose batches name no view. ``val``: the training pictures are matched as well; of any
            other split that split alone.

    Raises:
        UserError: see :meth:`kd.teachers.answers_file.AnswersFile.match`.
    """
    files = []
    for member in teacher.members.values() if teacher is not None else ():
        if isinstance(member, OwnTeacher) and isinstance(member.given, AnswersFile):
            files.append(member.given)
    if not files:
        return
    if validated == "val":
        splits = {"train": "train", "val": "val"}
    else:
        splits = {"val": validated}
    for file in files:
        for role, name in splits.items():
            split = data.split(name)
            names = [split.name(i) for i in range(len(split.targets))]
            file.match(role, names, data.source.classes)
        say(
            f"{KEY}: {file.file} answers for whole pictures: each view of a picture is taught the same answer, whatever "
            "its crop shows (data.augment.scale near 1 keeps views alike)"
        )
