"""A command line, sorted by kind."""

from kd.run.request import _entries_whole, translate


def test_entries_whole() -> None:
    assert _entries_whole(["model.taps.at.student=a", "seed=1", "model.taps.at.teacher=b"], []) == [
        'model.taps.at={"student": "a", "teacher": "b"}',
        "seed=1",
    ]


def test_translate() -> None:
    assert translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides == [
        "trainer.max_epochs=3",
        "seed=1",
    ]
