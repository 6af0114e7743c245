"""The command line: translation, one-line errors, and the spellings of LightningCLI (a contract)."""

import subprocess
import sys
from pathlib import Path

import pytest

from kd.cli import train_main
from kd.commands import COMMANDS
from kd.config.trees import flatten
from kd.errors import needs_extra
from kd.run.paths import find, names
from kd.run.request import Request, translate
from kd.run.run import Run
from tests._helpers import ROOT, Command, refuses, save_teacher, write_recipe


def resolved(recipe: Path | str, *items: str) -> dict:
    return flatten(Run.of(translate([f"recipe={recipe}", *items])).config)


# -- translation --------


def test_three_spellings_mean_the_same() -> None:
    for line in (
        ["seed=3", "optim.lr=1"],
        ["--seed=3", "--optim.lr=1"],
        ["--seed", "3", "--optim.lr", "1"],
    ):
        assert translate(line) == Request(overrides=["seed=3", "optim.lr=1"])


def test_order_between_kinds_does_not_matter(recipe: Path) -> None:
    line = [
        f"recipe={recipe}",
        "config=debug",
        "model.task_loss_weight=0.25",
        "trainer.max_epochs=7",
    ]
    forward, backward = (flatten(Run.of(translate(x)).config) for x in (line, line[::-1]))
    assert forward == backward
    assert forward["trainer.max_epochs"] == 7  # an override beats an overlay
    assert forward["data.batch_size"] == 16  # an overlay beats the recipe


# -- contracts of the one engine --------


def test_interpolation_is_resolved_after_overrides(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # in a file of one's own
    recipe = write_recipe(tmp_path / "r.yaml", pictures, None, data__batch_size="${data.img_size}")
    assert resolved(recipe, "data.img_size=16")["data.batch_size"] == 16


def test_short_and_long_keys(recipe: Path, tmp_path: Path) -> None:
    config = resolved(
        recipe, "data.source=ImageFolder", f"data.source.root={tmp_path}", "model.distill_losses.kd.temperature=9",
        "model.distill_losses.kd.init_args.weight=0.5", "data.augment.mixup=0.8", "model.task.label_smoothing=0.1",
    )  # fmt: skip
    assert config["data.source.init_args.root"] == str(tmp_path)
    assert config["model.distill_losses.kd.init_args.temperature"] == 9
    assert config["model.distill_losses.kd.init_args.weight"] == 0.5
    assert config["data.augment.mixup"] == 0.8
    assert config["model.task.init_args.label_smoothing"] == 0.1


KEYS_OF_THE_README = [
    "data.source=ImageFolder",
    "data.source.root=/tmp",
    "data.batch_size=2",
    "data.num_workers=0",
    "data.img_size=8",
    "data.on_bad_image=skip",
    "model.teacher.arch=resnet18",
    "model.teacher.checkpoint=x",
    "model.teacher.img_size=8",
    "model.teacher.pretrained=true",
    "model.student.arch=resnet18",
    "model.student.checkpoint=x",
    "model.student.img_size=8",
    "model.student.pretrained=true",
    "model.distill_losses.kd.temperature=3",
    "model.task_loss_weight=0.3",
    "optim.lr=0.1",
    "optim.zero=true",
    "trainer.precision=32-true",
    "trainer.devices=1",
    "seed=3",
    "runs_dir=/tmp",
]


def test_every_short_key_is_taken(recipe: Path) -> None:
    before, after = resolved(recipe), resolved(recipe, *KEYS_OF_THE_README)
    changed = {
        key.replace(".init_args", "") for key, value in after.items() if value != before.get(key)
    }
    same = {"data.source", "data.num_workers"}  # the recipe says the same of them
    assert {item.split("=")[0] for item in KEYS_OF_THE_README} - changed == same


def test_print_config_is_runnable(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main([f"recipe={recipe}", "seed=5", "--print_config"]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert resolved(again) == resolved(recipe, "seed=5")


def test_sys_argv_stays_as_it_is(recipe: Path) -> None:
    before = list(sys.argv)
    resolved(recipe)
    assert sys.argv == before


PAIRS = [
    pytest.param(recipe, overlay, marks=[] if (i + k) % 8 == 0 else pytest.mark.slow)
    for i, recipe in enumerate(names("recipes")) for k, overlay in enumerate([None, *names("configs")])
]  # fmt: skip
"""An eighth by default, in which each recipe and each overlay is; alone they are in tests/run/test_golden.py."""


@pytest.mark.parametrize(("recipe_name", "overlay"), PAIRS)
def test_every_recipe_with_every_overlay(recipe_name: str, overlay: str | None) -> None:
    config = resolved(recipe_name, *([f"config={overlay}"] if overlay else []))
    assert config["recipe"] == recipe_name


@pytest.mark.parametrize("name", ["foodtag_vit", "food101_vitl_vits"])
def test_the_case_studys_setting(name: str) -> None:
    config = resolved(name, "config=nodes_4x8")
    assert (
        config["data.batch_size"] * config["trainer.num_nodes"] * config["trainer.devices"] == 1152
    )
    assert config["optim.zero"] is True
    assert config["trainer.precision"] == "bf16-mixed"
    assert config["trainer.max_epochs"] == 210


@pytest.mark.parametrize("kind", ["recipes", "configs"])
def test_every_file_says_what_it_is(kind: str) -> None:
    assert all(names(kind).values())


# -- wrong use: one line, exit status 2, nothing written (most of it: tests/golden/refused.jsonl) --------


def test_a_missing_extra_is_installed_for_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip`` alone may belong to another Python: the README's environment need not be active."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python3"))
    assert needs_extra("tune").endswith(
        f": {tmp_path}/.venv/bin/python3 -m pip install 'kd-train[tune]'"
    )


def test_class_counts_that_differ(tmp_path: Path, pictures: Path, refusal: Command) -> None:
    other = save_teacher(tmp_path / "five.safetensors", num_classes=5)
    recipe = write_recipe(tmp_path / "r.yaml", pictures, other)
    assert f"{other} names 5 classes, the data has 4" in refusal("train", [f"recipe={recipe}"])


# -- help --------


def test_help_and_list(capsys: pytest.CaptureFixture[str], prints: Command) -> None:
    assert "recipe=foodtag_vit" in prints("train", ["--help"])
    out = prints("train", ["--list"])
    assert all(f"recipe={name}" in out for name in names("recipes"))
    assert all(f"config={name}" in out for name in names("configs"))
    assert train_main([]) == 2
    assert "recipe=foodtag_vit" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    """Of any command; it names the command, and ends well."""
    code = (
        "import sys; from kd.cli import main; from kd.commands import COMMANDS\n"
        "for name in COMMANDS: print('== kd-' + name, main(name, ['--help']))\n"
        "print([m for m in ('torch', 'timm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]" and not done.stderr
    for name in COMMANDS:
        shown, _, rest = done.stdout.partition(f"== kd-{name} 0\n")
        assert rest and f"kd-{name}" in shown.rpartition("\n== ")[2]


def test_find_takes_a_path(tmp_path: Path) -> None:
    with refuses(r"no file .*nothing\.yaml"):
        find("recipes", str(tmp_path / "nothing.yaml"))
