"""Loggers by key, beside metrics.csv."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from kd.cli import train_main

LOGGERS = {"CSVLogger": "metrics.csv", "TensorBoardLogger": "events.out.*"}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_by_its_name(recipe: Path, tmp_path: Path, name: str) -> None:
    if name == "TensorBoardLogger" and not (find_spec("tensorboard") or find_spec("tensorboardX")):
        pytest.skip("tensorboard is not installed")
    logger = json.dumps(
        {"class_path": f"pytorch_lightning.loggers.{name}", "init_args": {"save_dir": str(tmp_path / "logs")}}
    )
    assert train_main([f"recipe={recipe}", f"trainer.logger={logger}", "trainer.max_epochs=1"]) == 0
    (file,) = (tmp_path / "logs").rglob(LOGGERS[name])
    assert file.stat().st_size > 100
    assert "train/kd_loss" in (tmp_path / "runs" / "tiny" / "000" / "metrics.csv").read_text()


def test_a_short_name_will_do(recipe: Path, tmp_path: Path) -> None:
    items = ["trainer.logger=CSVLogger", f"trainer.logger.save_dir={tmp_path / 'logs'}", "trainer.max_epochs=1"]
    assert train_main([f"recipe={recipe}", *items]) == 0
    assert list((tmp_path / "logs").rglob("metrics.csv"))
