"""Terminals that are narrow: whole items go, no word is cut."""

import os
import re
from pathlib import Path

import pytest

from kd.callbacks.progress import shape_of_bar
from kd.progress import COUNTED, WholeItems, bar
from kd.report import terminal
from kd.report.terminal import print_summary
from tests._helpers import ROOT

SUMMARY = {
    "recipe": "food", "epochs": 5, "wall_s": 120.0, "images_per_s": 300.0, "device": "cpu", "precision": "32-true",
    "world_size": 1, "steps": 10,
    "teacher": {"arch": "vit_small_patch14_dinov2", "params": 22e6, "val": {"acc1": 0.86, "acc5": 0.97}},
    "student": {"arch": "vit_tiny_patch16_224", "params": 5e6, "val": {"acc1": 0.85, "acc5": 0.96, "agreement": 0.9},
                "best_val": {"epoch": 4, "acc1": 0.86, "acc5": 0.96, "agreement": 0.9}},
}  # fmt: skip


@pytest.mark.parametrize("columns", [20, 34, 50, 64, 80, 200])
def test_a_bar_ends_with_a_whole_item(columns: int) -> None:
    items = [
        "epoch 1/5",
        "50% of the run",
        "30.0 images/s",
        "00:10 left",
        "loss 0.300",
        "teacher-bound",
    ]
    shape = shape_of_bar(terminal=True, has_end=True)
    assert shape.startswith(
        "{desc}, {percentage:.0f}% of the run|"
    )  # not of the epoch, whose number is beside it
    shape = shape.replace("{rate_noinv_fmt}", "30.0 images/s").replace("{remaining}", "00:10")
    with WholeItems(
        total=100, initial=50, bar_format=shape, ncols=columns, file=Path(os.devnull).open("w")
    ) as bar:
        bar.set_description_str("epoch 1/5", refresh=False)
        bar.set_postfix_str("loss 0.300, teacher-bound", refresh=False)
        text = str(bar)
    assert len(text) <= columns
    last = text.split(", ")[-1].split("| ")[-1]
    assert any(item.endswith(last.strip()) for item in items), text
    assert columns < 80 or text.endswith("teacher-bound")


def test_a_bar_counts_columns_not_characters() -> None:
    """A wide character takes two."""
    with WholeItems(
        total=10, ncols=30, file=Path(os.devnull).open("w"), bar_format="{desc}"
    ) as bar:
        bar.set_description_str("写真を読む写真を読む, 写真を読む写真を読む", refresh=False)
        assert str(bar) == "写真を読む写真を読む"


def test_a_counted_bar_has_total_percentage_and_unit() -> None:
    with WholeItems(total=200, initial=50, unit=" images", desc="checking", bar_format=COUNTED,
                    file=Path(os.devnull).open("w")) as bar:  # fmt: skip
        text = str(bar)
    assert "25%" in text and "50 of 200 images" in text and "left" in text


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_the_closing_table(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_summary(SUMMARY, Path("runs/food/000"))
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.strip() and line.strip()[0] in "┏┃┡│└"]
    assert table and max(map(len, table)) <= columns
    assert columns < 80 or "86.0%" in shown
    assert "\\n" not in shown  # a line is a line


def test_no_bar_lacks_a_total() -> None:
    """kd.progress.bar refuses to be one; who draws another way is named here, with the reason."""
    with pytest.raises(TypeError):
        bar(iter([1, 2]), label="endless")
    with pytest.raises(TypeError):
        bar(label="nothing to count")
    assert [*bar([1, 2], label="two", disable=True)] == [1, 2]
    drawn = re.compile(r"\b(?:WholeItems|tqdm|trange|track|Progress)\(")
    others = {}
    for file in (ROOT / "kd").rglob("*.py"):
        lines = [line.strip() for line in file.read_text().splitlines() if drawn.search(line)]
        if lines:
            others[file.relative_to(ROOT).as_posix()] = lines
    assert others.pop("kd/progress.py") == ["class WholeItems(tqdm):", "return WholeItems("]
    assert others.pop("kd/callbacks/progress.py") == [
        "class Progress(Closing):",
        "self._bar = WholeItems(",  # a training without an end (trainer.max_time alone) has no total
    ]
    assert set(others) <= {"kd/run/trainer.py"}, others
