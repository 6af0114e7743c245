"""Classes that a file from elsewhere may name."""

from pathlib import Path

import pytest

from kd.errors import UserError
from kd.run.request import translate
from kd.run.trust import refused


def test_refused() -> None:
    assert (
        refused("mine.nets.Tiny").partition("; ")[2]
        == "if you trust it: trust=mine.nets, or --trust"
    )


STRATEGY = """\
trainer:
  strategy:
    class_path: kd.strategies.ddp.DDP
    init_args: {backend: elsewhere, module: antigravity}
"""


def test_what_is_imported_is_the_users_word_and_no_files(tmp_path: Path) -> None:
    """A strategy's module is imported: a file from elsewhere may name smddp's alone, the command line any."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(STRATEGY)
    with pytest.raises(UserError, match="trainer.strategy.module: must be one of smdistributed"):
        translate([f"recipe={recipe}"]).resolved()
    config = translate([f"recipe={recipe}", "--trust"]).resolved()
    assert config["trainer"]["strategy"]["init_args"]["module"] == "antigravity"
    recipe.write_text(STRATEGY.replace(", module: antigravity", ""))
    typed = translate([f"recipe={recipe}", "trainer.strategy.module=elsewhere_backend"]).resolved()
    assert typed["trainer"]["strategy"]["init_args"]["module"] == "elsewhere_backend"
