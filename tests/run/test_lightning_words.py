"""What a user of LightningCLI types: ``fit``, ``--config FULL.yaml``."""

from pathlib import Path

import pytest

from kd.cli import train_main
from kd.commands import train
from kd.run.request import Request, translate


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


def test_an_overlay_alone_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main(["config=zero"]) == 2
    assert "config=zero: an overlay needs a recipe" in capsys.readouterr().err


def test_distill_is_another_name_of_the_recipe_for_your_pictures() -> None:
    config = translate(["recipe=distill"]).resolved()
    assert config.pop("recipe") == "distill"  # the name of its runs' folder
    other = translate(["recipe=grocery_vit"]).resolved()
    assert other.pop("recipe") == "grocery_vit"
    assert config == other


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["fit"], 2, "kd-train: trains a small"),
        (["-c", "zero"], 2, "config=zero: an overlay needs a recipe"),
        (["validate", "runs/tiny/000"], 2, "did you mean 'kd-eval RUN_FOLDER'?"),
        (
            ["recipe=foodtag_vit", "--ckpt_path", "x"],
            2,
            "no key 'ckpt_path'; did you mean 'resume'",
        ),
        (["recipe=foodtag_vit", "trainer.plugins=x"], 2, "trainer.plugins: must be a class path"),
        (
            ["recipe=foodtag_vit", "model=resnet18"],
            2,
            "did you mean 'model.student.arch=resnet18'?",
        ),
        (["--optim.help"], 0, "optim.lr_batch"),
        (["--help", "KDLoss"], 0, "final_temperature"),
    ],
)
def test_its_other_words_are_taken_or_answered(
    words: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """recipes/LIGHTNING_CLI.md lists them."""
    assert train_main(words) == status
    said = capsys.readouterr()
    assert line in said.out + said.err
