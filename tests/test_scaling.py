"""What grows with a run's size grows as promised; in counts and bytes, never in seconds."""

import pytest

from scripts.bench.scaling import table

MOST_BYTES = 60
"""Of a picture's name, target and place, in all processes of a machine together."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows(words: list[str]) -> list[list[str]]:
    _, _, *lines = table(words)
    return [cells(line) for line in lines]


def test_the_list_of_pictures_is_held_once_and_in_few_bytes() -> None:
    found = rows(["pictures", "400000", "1000", "2"])
    held = {(name, int(ranks)): float(size) for name, ranks, _, size in found}
    assert held["list of files", 1] < MOST_BYTES
    assert held["list of files", 2] < MOST_BYTES
    assert held["index of a pack", 1] < 10  # its pages are the file's
    assert held["order of an epoch", 1] < 20


def test_a_question_to_all_takes_a_logarithm_of_messages() -> None:
    sent = {int(ranks): int(messages) for ranks, messages, _ in rows(["processes", "5"])}
    assert sent == {5: 3}


def test_what_a_rank_sends_and_a_step_writes_is_bounded() -> None:
    kilobytes = [float(row[3]) for row in rows(["classes", "128", "1000"])]
    assert kilobytes[0] < 1000
    _, _, megabytes, _, _ = rows(["steps", "2000"])[0]
    assert float(megabytes) < 1


def test_too_few_numbers_are_said() -> None:
    with pytest.raises(SystemExit, match="pictures: not so many numbers"):
        table(["pictures", "5"])
