"""A teacher is two methods: a class of tests/_teacher.py trains, is refused in one line, and is cached."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

import kd
from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.errors import UserError
from kd.losses import HintLoss, KDLoss, SimKDLoss
from kd.models import TapSpec, preprocess_for
from kd.teachers import Answer, OwnTeacher, Teacher
from kd.teachers.answer import Wanted
from tests._helpers import CLASSES, draw_folder, tiny_vit, write_recipe
from tests._teacher import Bright

IMAGES = torch.randint(
    0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("pictures"))


def module(teacher: object, losses: dict[str, Any], **more: Any) -> kd.DistillationModule:
    student = tiny_vit()
    own = {"task": kd.Classification(len(CLASSES)), "prepare": preprocess_for(student, 32), **more}
    return kd.DistillationModule(student, teacher, losses=losses, **own)  # type: ignore[arg-type]


def test_two_methods_make_a_teacher() -> None:
    assert isinstance(Bright(), Teacher)
    held = OwnTeacher(Bright())
    torch.testing.assert_close(held(IMAGES), 10 * Bright().colour(IMAGES))
    assert list(held.answer({"image": IMAGES}, Wanted(), "a").logits) == ["a"]
    assert held.identity() == {"arch": "Bright", "scale": 10.0}


def test_it_trains_under_our_data_module(pictures: Path, tmp_path: Path) -> None:
    teacher = Bright()
    data = DistillationDataModule(
        ImageFolder(str(pictures)), img_size=32, batch_size=8, num_workers=0
    )
    trainer = Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, accelerator="cpu", logger=False,
                      default_root_dir=tmp_path,
                      enable_checkpointing=False, enable_progress_bar=False, use_distributed_sampler=False,
                      enable_model_summary=False)  # fmt: skip
    trainer.fit(module(teacher, {"kd": KDLoss()}), datamodule=data)
    assert trainer.global_step == 2
    assert teacher.asked >= 3  # two steps and a validation
    assert "val/agreement" in trainer.callback_metrics


@pytest.mark.parametrize(
    ("losses", "more", "reason"),
    [
        ({"hint": HintLoss()}, {"taps": {"hint": TapSpec("blocks.0", "blocks.0")}},
         "Bright is a teacher of your own, whose layers are unknown: a feature loss needs a module"),
        ({"simkd": SimKDLoss()}, {"task_loss_weight": 0.0, "taps": {"simkd": TapSpec("norm", "norm")}},
         "whose layers are unknown"),
    ],
)  # fmt: skip
def test_losses_over_features_are_refused_in_one_line(
    losses: dict, more: dict, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        module(Bright(), losses, **more)
    assert "\n" not in str(caught.value)


class Silent(Bright):
    def answer(self, batch: Any, wanted: Wanted) -> Any:
        return torch.zeros(2, 4)


def test_what_is_no_answer_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"Silent.answer must give kd.teachers.Answer") as caught:
        OwnTeacher(Silent())(IMAGES)
    assert "\n" not in str(caught.value)


def test_its_answers_are_cached(pictures: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "own.yaml", pictures, None, model__distill_losses={
        "kd": {"class_path": "kd.losses.KDLoss"}})  # fmt: skip
    items = [f"recipe={recipe}", "trust=tests._teacher", "model.teacher.builder=tests._teacher.Named",
             "model.teacher.cache=on", f"model.teacher.cache_dir={tmp_path / 'answers'}",
             "model.teacher.cache_views=1"]  # fmt: skip
    assert train_main(items) == 0
    assert train_main([*items, "model.teacher.cache=only"]) == 0
    first, second = (json.loads((tmp_path / "runs" / "tiny" / name / "summary.json").read_text())["cache"]
                     for name in ("000", "001"))  # fmt: skip
    assert (first["answers_computed"], second["answers_computed"]) == (48, 0)
    assert second["answers_read"] == 2 * 48
    assert Answer().logits == {}
