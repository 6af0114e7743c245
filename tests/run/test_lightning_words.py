"""What a user of LightningCLI types: ``fit``, ``--config FULL.yaml``."""

from pathlib import Path

import pytest

from kd.cli import train_main
from kd.commands import train
from kd.run.request import Request, translate
from tests._helpers import Command


@pytest.mark.parametrize("words", [["--config"], ["fit", "--config"], ["fit"]])
def test_a_whole_file_trains(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert train_main(["recipe=foodtag_vit", "optim.lr=0.5", "--print_config"]) == 0
    file = tmp_path / "full.yaml"
    file.write_text(capsys.readouterr().out)
    begun: list[Request] = []

    def begin(request: Request) -> None:
        begun.append(request)
        raise SystemExit(0)

    monkeypatch.setattr(train, "to_train", begin)
    with pytest.raises(SystemExit):
        train_main([*words, str(file)])
    assert begun[0].recipe == str(file) and not begun[0].overlays
    assert begun[0].resolved()["optim"]["lr"] == 0.5


def test_distill_is_another_name_of_the_recipe_for_your_pictures() -> None:
    config = translate(["recipe=distill"]).resolved()
    assert config.pop("recipe") == "distill"  # the name of its runs' folder
    other = translate(["recipe=grocery_vit"]).resolved()
    assert other.pop("recipe") == "grocery_vit"
    assert config == other


@pytest.mark.parametrize(
    ("words", "line"),
    [(["--optim.help"], "optim.lr_batch"), (["--help", "KDLoss"], "final_temperature")],
)
def test_its_words_of_help_are_taken(words: list[str], line: str, prints: Command) -> None:
    """recipes/LIGHTNING_CLI.md lists them; those that end in a line: ``tests/golden/refused.jsonl``."""
    assert line in prints("train", words)
