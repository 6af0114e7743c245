"""One small finished run that the tests of what ships share."""

from pathlib import Path

import pytest

from kd.cli import main
from tests._helpers import draw_folder, save_teacher, write_recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the tiny pair; its views (40 px) are larger than its models' input (32 px)."""
    root = tmp_path_factory.mktemp("ship")
    data = draw_folder(root / "data")
    recipe = write_recipe(root / "tiny.yaml", data, save_teacher(root / "teacher.safetensors"), data__img_size=40)
    assert main("train", [f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    return root / "runs" / "tiny" / "000"
