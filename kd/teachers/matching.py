"""Answers of files meet the pictures that a run trains and validates on."""

from kd.data.datamodule import DistillationDataModule
from kd.models.weights import say
from kd.teachers.answers_file import KEY, AnswersFile
from kd.teachers.base import OwnTeacher, RunTeacher


def match_answers(
    teacher: RunTeacher | None, data: DistillationDataModule, validated: str = "val"
) -> None:
    """Gives teachers of files the names of the pictures; any other teacher is left as it is.

    Args:
        teacher: of a run.
        data: of the run.
        validated: the split whose batches name no view.

    Raises:
        UserError: pictures without an answer.
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
