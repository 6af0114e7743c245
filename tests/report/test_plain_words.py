"""The words of limits and rules in a training that is not kd's."""

import ast
import re
from pathlib import Path

import pytest

from kd.report import judges, limits, rules, step_facts
from kd.report.plain_words import in_plain_words

OF_KD = re.compile(
    r"\b(data|model|optim|trainer|monitor|checkpoint|config)[.=]\w|kd-|\bkd/|student"
)
OF_KD_ALONE = ("teacher", "distillation", "inherit", "cache", "under-trained", "queue_mb", "rankme", "more fit",
               "distill_losses",
               "gives it a start",
               "stored answers",
               "by config=")  # fmt: skip
"""Words of sentences that need a teacher, a data tier or counted memory, which such a training does not have."""


def sentences(file: Path) -> set[str]:
    """The texts of a module, f-strings with ``1`` in their places; docstrings and names are left out."""
    texts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                if not isinstance(node, ast.Expr | ast.JoinedStr):
                    texts.add(part.value)
            elif isinstance(part, ast.JoinedStr):
                texts.add(
                    "".join(v.value if isinstance(v, ast.Constant) else "1" for v in part.values)
                )
    names_of_series = {"student.start", "student.lr", "teacher.remedy"}
    return {text for text in texts - names_of_series if {*" .="} & {*text}}


@pytest.mark.parametrize("module", [limits, judges, rules, step_facts])
def test_no_sentence_of_a_foreign_training_names_a_key_of_kd(module: object) -> None:
    """A new lever that names a setting of kd fails here, until it has its plain words."""
    texts = sentences(Path(module.__file__))  # type: ignore[attr-defined]
    assert len(texts) >= 3
    for text in texts:
        if any(word in text for word in OF_KD_ALONE):
            continue
        assert not OF_KD.search(in_plain_words(text)), text


def test_a_larger_batch_and_more_loaders_are_named_plainly() -> None:
    assert in_plain_words("data.engine=device (or dali), cheaper pictures (resized once, ahead of training: "
                          "kd-pack short_side=) or more cores") == (
        "decoding and augmentation on the GPU (NVIDIA DALI), cheaper pictures (resized once, ahead of training) "
        "or more cores"
    )  # fmt: skip
