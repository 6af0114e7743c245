"""A teacher is two methods: a class of tests/_teacher.py trains, is refused in one line, and is cached."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

import kd
from kd.cli import main, train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.losses import HintLoss, KDLoss, SimKDLoss
from kd.models import TapSpec, TeacherSpec, preprocess_for
from kd.teachers import Answer, OwnTeacher, Teacher, build_teacher
from kd.teachers.answer import Wanted
from tests._files import read_json
from tests._forks import as_installed, start, status_of
from tests._helpers import CLASSES, ROOT, draw_folder, refuses, tiny_vit, write_recipe
from tests._runs import run as trained
from tests._runs import summary_of
from tests._teacher import Bright

IMAGES = torch.randint(
    0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


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
         "Bright is a teacher of your own, whose layers are unknown; hint reads layers: .*kd: KDLoss"),
        ({"simkd": SimKDLoss()}, {"task_loss_weight": 0.0, "taps": {"simkd": TapSpec("norm", "norm")}},
         "whose layers are unknown"),
    ],
)  # fmt: skip
def test_losses_over_features_are_refused_in_one_line(
    losses: dict, more: dict, reason: str
) -> None:
    with refuses(reason) as caught:
        module(Bright(), losses, **more)
    assert "\n" not in str(caught.value)


class Silent(Bright):
    def answer(self, batch: Any, wanted: Wanted) -> Any:
        return torch.zeros(2, 4)


def test_what_is_no_answer_is_refused_in_one_line() -> None:
    with refuses(r"Silent.answer must give kd.teachers.Answer") as caught:
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
    first, second = (summary_of(tmp_path / 'runs' / 'tiny' / name)["cache"]
                     for name in ("000", "001"))  # fmt: skip
    assert (first["answers_computed"], second["answers_computed"]) == (48, 0)
    assert second["answers_read"] == 2 * 48
    assert Answer().logits == {}


PAGE = (ROOT / "kd/teachers/README.md").read_text()


@pytest.fixture()
def page(pictures: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Writes the page's class, after a change of its text, beside a recipe; gives the words of the page's command."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    (command,) = re.findall(r"```bash\nkd-train (.*?)```", PAGE, flags=re.S)
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    write_recipe(tmp_path / "mine.yaml", pictures, None, model__distill_losses=losses)

    def words(before: str = "", after: str = "") -> list[str]:
        assert before in code
        (tmp_path / "mine.py").write_text(code.replace(before, after) if before else code)
        return [*shlex.split(command), "trainer.max_epochs=1"]

    return words


def test_the_class_of_the_page_teaches(page: Any, tmp_path: Path) -> None:
    """By a program, which does not look for modules in the working directory by itself."""
    log = tmp_path / "log"
    pid = start(page(), log, as_installed, tmp_path)
    assert status_of(pid) == 0, log.read_text()[-3000:]
    summary = read_json(tmp_path / "runs/tiny/000/summary.json")
    assert summary["teacher"]["arch"] == "Colours"
    assert summary["student"]["val"]["agreement"] >= 0
    assert "scale: 20" in (tmp_path / "runs/tiny/000/config.yaml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('batch["image"]', "batch[0]", "model.teacher: mine.Colours.answer: KeyError: 0 (mine.py, line 19)"),
        ("* colours @", "* pictures @", "model.teacher: mine.Colours.answer: RuntimeError: "),
        ('"scale": self.scale}', '"scale": self.sclae}', "model.teacher: mine.Colours.identity: AttributeError: "),
        ("torch.randn(3", "torch.rnadn(3", "model.teacher: mine.Colours.build: AttributeError: "),
        ("def answer", "def answers", "model.teacher.builder: Colours must build a torch module, got Colours (a class "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_class_of_the_page_is_one_line(
    before: str, after: str, message: str, page: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert status_of(start(page(before, after), log, os.chdir, tmp_path)) == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(f"kd-train: {message}"), log.read_text()[-3000:]
    assert "mine.py, line " in last or "answer(self, batch" in last


class WithoutBuild:
    """Two methods are enough."""

    def identity(self) -> dict[str, Any]:
        return {"name": "zeros"}

    def answer(self, batch: Any, wanted: Wanted) -> Answer:
        return Answer({"": torch.zeros(len(batch["image"]), 4)})


def test_a_teacher_needs_no_build() -> None:
    teacher = build_teacher(TeacherSpec(builder=WithoutBuild()), 4)  # type: ignore[arg-type]
    assert teacher(IMAGES).shape == (2, 4)


def test_a_class_answers_after_the_training_too(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kd-eval`` compares with it, certifies against it, and asks it in a cascade's place."""
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "own.yaml", pictures, None, model__distill_losses=losses)
    answers = "model.teacher.answers=tests._teacher.Named"
    trained(recipe, answers, "trainer.max_epochs=1")
    run = str(tmp_path / "runs" / "tiny" / "000")
    others = draw_folder(tmp_path / "others", train=1, val=60) / "val"
    assert main("eval", [run, f"folder={others}", "margin=5"]) == 0
    assert main("eval", [run, f"folder={others}", "cascade=true"]) == 0
    told = capsys.readouterr()
    assert "not found" not in told.err
    assert "not worse than the teacher by more than 5 points" in told.out
    assert "The student where it is sure, else the teacher" in told.out
