"""Rows of ``kd-predict``."""

from kd.ship.predict import row_cells


def testcolumns() -> None:
    assert row_cells(
        {
            "file": "a.jpg",
            "labels": [{"label": "pie", "p": 0.9}],
            "facts": {"kcal": {"of_label": 300.0}},
        }
    ) == {"file": "a.jpg", "label_1": "pie", "p_1": 0.9, "kcal_of_label": 300.0}
