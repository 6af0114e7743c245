"""What the terminal shows of models side by side."""

from kd.report.terminal import _paired, without_common_folders


def test_paired() -> None:
    assert (
        _paired("a", "b", (2, 6), 100)
        == "a alone is right on 2 of 100 pictures, b alone on 6: +4.0 ± 2.8 points (standard error, paired by picture)"
    )


def test_short_of_terminal() -> None:
    assert without_common_folders(["runs/food/000", "runs/food/001"]) == ["000", "001"]
    assert without_common_folders(["a/best", "b/best"]) == ["a/best", "b/best"]
