"""A command line, sorted by kind."""

from kd.run.request import translate


def test_translate() -> None:
    assert translate(["trainer.max_epochs=3", "--seed", "1", "recipe=foodtag_vit"]).overrides == [
        "trainer.max_epochs=3",
        "seed=1",
    ]


def test_commands_that_name_other_files_or_code_are_other_commands() -> None:
    """One job may run several: each must find its own run again."""
    lines = [
        ["recipe=a"],
        ["recipe=b"],
        ["recipe=a", "config=one"],
        ["recipe=a", "config=two"],
        ["recipe=a", "config=two", "config=one"],
        ["recipe=a", "seed=1"],
        ["recipe=a", "--trust"],
        ["recipe=a", "--trust=mine"],
    ]
    named = {tuple(translate(line).named()) for line in lines}
    assert len(named) == len(lines)
    assert translate(lines[3]).named() == translate(lines[3]).named()
