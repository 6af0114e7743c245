"""Known warnings of libraries go to a run's file, others to the terminal."""

import warnings
from pathlib import Path

from kd.storage.warnings_file import NAME, keep_warnings_in, quiet_warnings

KNOWN = "The 'train_dataloader' does not have many workers"


def test_known_warnings_go_to_the_file_and_others_are_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        warnings.simplefilter("always")
        quiet_warnings()
        warnings.warn(f"{KNOWN}\nwhich may be slow", stacklevel=1)
        keep_warnings_in(tmp_path)
        quiet_warnings()  # a second time: the file stays
        warnings.warn(KNOWN + ".", stacklevel=1)
        warnings.warn("the disk is on fire", stacklevel=1)
    assert shown == ["the disk is on fire"]
    kept = (tmp_path / NAME).read_text().splitlines()
    assert [line.partition("UserWarning: ")[2] for line in kept] == [
        f"{KNOWN} which may be slow",
        f"{KNOWN}.",
    ]


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        quiet_warnings()
        keep_warnings_in(tmp_path / "missing")
        warnings.warn(KNOWN, stacklevel=1)
