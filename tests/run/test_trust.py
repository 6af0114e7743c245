"""Classes that a file from elsewhere may name."""

import ast
import os
import pickle
import stat
from pathlib import Path

import pytest

from kd.run.build import student_in
from kd.run.gate import vouched
from kd.run.request import translate
from kd.run.trust import (
    ALL,
    Trust,
    class_named,
    made_here,
    remember_made,
    trusted_class,
    why_refused,
)
from tests._helpers import ROOT, refuses


def test_refused() -> None:
    assert (
        why_refused("mine.nets.Tiny").partition("; ")[2]
        == "if you trust it: trust=mine.nets, or --trust"
    )


STRATEGY = """\
trainer:
  strategy:
    class_path: kd.strategies.ddp.DDP
    init_args: {backend: elsewhere, module: antigravity}
"""


def test_what_is_imported_is_in_no_file_from_elsewhere(tmp_path: Path) -> None:
    """A strategy's module is imported."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(STRATEGY)
    with refuses("trainer.strategy.module: DDP of a file from elsewhere"):
        translate([f"recipe={recipe}"]).resolved()
    config = translate([f"recipe={recipe}", "--trust"]).resolved()
    assert config["trainer"]["strategy"]["init_args"]["module"] == "antigravity"


def test_a_trusted_module_stands_for_its_own_classes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for what it has imported from other packages, which would run any program; the user may name that himself."""
    package = tmp_path / "of_a_user"
    package.mkdir()
    (package / "nets.py").write_text("class Net:\n    def build(self):\n        return None\n")
    (package / "__init__.py").write_text(
        "from subprocess import Popen\nfrom types import SimpleNamespace as Tools\nfrom of_a_user.nets import Net\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for trusted in (Trust(["of_a_user"]), Trust(["of_a_user.nets", "of_a_user"])):
        assert class_named("of_a_user.Net", "", "key", trusted).__name__ == "Net"
        assert trusted_class("of_a_user.Net", trusted) is not None
        for name, home in (("Popen", "subprocess.Popen"), ("Tools", "types.SimpleNamespace")):
            message = f"of_a_user.{name} is {home}, of another package than the one that you trust"
            with refuses(message):
                class_named(f"of_a_user.{name}", "", "key", trusted)
            with refuses(message):
                trusted_class(f"of_a_user.{name}", trusted)
    assert class_named("of_a_user.Popen", "", "key", Trust(["of_a_user.Popen"])).__name__ == "Popen"
    assert class_named("of_a_user.Popen", "", "key", Trust([ALL])).__name__ == "Popen"


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.logger=CSVLogger", "trainer.logger.init_args.save_dir=logs"],
        ["trainer.logger={class_path: CSVLogger, init_args: {save_dir: logs}}"],
        ["trainer.callbacks+={class_path: ModelCheckpoint, init_args: {dirpath: kept}}"],
    ],
)
def test_a_folder_of_the_command_line_counts_however_its_key_is_written(
    words: list[str], tmp_path: Path
) -> None:
    """A file from elsewhere may not name it; the user may, with ``init_args`` in the key or in a class's mapping too."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("seed: 1\n")
    assert translate([f"recipe={recipe}", *words]).resolved()["seed"] == 1


def test_trust_in_the_settings_is_not_trust_in_a_file(tmp_path: Path) -> None:
    """Of another file than the settings the names count that were typed, and all only with ``--trust``."""
    file = tmp_path / "student.safetensors"
    typed, all_ = ([{"model.student.builder": "mine.Net"}], []), ([], ["--trust"])
    for (overrides, words), expected in ((typed, ["mine.Net"]), (all_, [ALL])):
        settings = vouched(overrides, words, all_own=True)
        assert ALL in settings.names and settings.file is None
        of_file = pickle.loads(pickle.dumps(settings.of(file)))
        assert (of_file.file, of_file.names, of_file.words) == (file, expected, words)
    with pytest.raises(AssertionError):
        student_in(settings)


def test_what_builds_takes_a_trust_and_only_the_gate_makes_one() -> None:
    """No default stands for it, nowhere else is one made, and no command is given ``--trust`` by kd itself."""
    makes, says = set(), set()
    for file in (ROOT / "kd").rglob("*.py"):
        tree = ast.parse(file.read_text())
        name = str(file.relative_to(ROOT / "kd"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and name != "run/resolve.py":
                arguments = node.args.args
                without_default = arguments[: len(arguments) - len(node.args.defaults)]
                assert all(a in without_default for a in arguments if a.arg == "trusted"), node.name
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Trust":
                makes.add(name)
            if isinstance(node, ast.Constant) and node.value == "--trust":
                says.add(name)
    assert makes == {"run/trust.py", "run/gate.py"}
    assert says == {
        "run/trust.py",
        "run/gate.py",
        "run/request.py",
        "fleet/jobs/places/sagemaker.py",
    }


def test_a_strangers_cache_of_answers_has_the_folder_that_is_typed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    given = [f"recipe={recipe}", "model.teacher.cache_dir=/srv/y"]
    recipe.write_text("model: {teacher: {cache: 'on'}}\n")
    assert translate(given).resolved()["model"]["teacher"]["cache_dir"] == "/srv/y"


def test_a_note_of_an_own_run_counts_where_nobody_else_can_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "shared"))
    file = tmp_path / "config.yaml"
    file.write_text("recipe: x\n")
    assert not made_here(file)
    before = os.umask(0)  # a group's or the world's
    try:
        remember_made(file.read_bytes())
    finally:
        os.umask(before)
    assert made_here(file)
    (folder,) = (tmp_path / "shared").iterdir()
    (note,) = folder.iterdir()
    for place, mode in ((note, 0o600), (folder, 0o700)):
        assert stat.S_IMODE(place.stat().st_mode) == mode
        place.chmod(mode | 0o020)
        assert not made_here(file)
        place.chmod(mode)
    assert made_here(file)
    note.rename(tmp_path / "note")
    note.symlink_to(tmp_path / "note")
    assert not made_here(file)
    note.unlink()
    (tmp_path / "note").rename(note)
    other_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other_user)
    folder.rename(folder.with_name(f"own_runs-{os.geteuid()}"))
    assert not made_here(file)
