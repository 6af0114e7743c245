"""A command line, sorted by kind."""

from kd.run.request import translate


def test_translate() -> None:
    assert translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides == [
        "trainer.max_epochs=3",
        "seed=1",
    ]
