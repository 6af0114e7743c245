"""Names of runs and of students."""

import pytest

from kd.errors import UserError
from kd.run import keys
from kd.run.resolve import check_student
from kd.run.typed import checked


def test_names_of_runs_and_of_students() -> None:
    kind = keys.schema()["name"].kind
    checked("name", "first-try", kind)
    check_student("low", {"optim.lr": 0.1, "model.student": {"arch": "resnet18"}})
    for call, message in (
        (lambda: checked("name", "../x", kind), "name: begins with a letter"),
        (
            lambda: check_student("a", {"model.teacher.arch": "b"}),
            "students.a: may differ in model.student",
        ),
        (lambda: check_student("a/b", {}), "students: a name is made of letters"),
    ):
        with pytest.raises(UserError, match=message):
            call()
