"""The teacher elsewhere than the student, or in shards: the result is the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from pytorch_lightning import Callback, Trainer
from safetensors.torch import load_file

from kd.cli import eval_main, train_main
from kd.models.sharding import repeated_blocks
from tests._forks import run_ranks
from tests._helpers import ARCH, TINY
from tests._runs import student_of, summary_of
from tests._scenes import draw, recipe_of

FEATURES = [
    'model.distill_losses={"kd": {"class_path": "KDLoss"}, "hint": {"class_path": "HintLoss"}}',
    'model.taps={"hint": {"student": "norm", "teacher": "blocks.1"}}',
]
BYTES = 'trainer.callbacks+={"class_path": "tests.test_placement.TeacherBytes"}'


class TeacherBytes(Callback):
    """Writes down how much of the teacher's weights this process holds."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        weights = [
            getattr(p, "to_local", lambda p=p: p)() for p in pl_module.teacher.model.parameters()
        ]
        held = sum(w.numel() * w.element_size() for w in weights)
        Path(trainer.default_root_dir, f"held.{trainer.global_rank}").write_text(str(held))


def train(recipe: Path, ranks: int, *items: str) -> Path:
    """A run of one epoch; its folder."""
    runs = recipe.parent / "runs" / "tiny"
    number = len(list(runs.glob("[0-9]*")))
    asked = [
        f"recipe={recipe}", "config=audit", "trainer.max_epochs=1", "trainer.precision=32-true", "data.batch_size=5",
        f"trainer.default_root_dir={recipe.parent}", BYTES, *items,
    ]  # fmt: skip
    if ranks == 1:
        assert train_main(asked) == 0
    else:
        log = recipe.parent / f"log{number}.txt"
        run_ranks([*asked, f"trainer.devices={ranks}", "trainer.strategy=ddp"], log, ranks)
    return runs / f"{number:03d}"


def result(folder: Path) -> dict[str, Any]:
    """What two runs that learn the same have in common, to the last bit."""
    summary = summary_of(folder)
    return {
        "losses": (folder / "records" / "samples.rank0.jsonl").read_text(),
        "weights": {
            (file.parent.name if file.parent != folder else "", name): tensor.tolist()
            for file in folder.rglob("student.safetensors")
            for name, tensor in load_file(file).items()
        },
        "teacher": summary["teacher"],
        "val": summary["student"]["val"],
    }


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [
        (3, "32-true"),
        *(
            pytest.param(2, precision, marks=pytest.mark.slow)
            for precision in ("32-true", "bf16-mixed")
        ),
    ],
)
def test_a_teacher_in_shards_teaches_the_same(recipe: Path, ranks: int, precision: str) -> None:
    """Logits and features; at three ranks the last validation batch of two of them is padding alone."""
    whole, shards = (
        train(
            recipe,
            ranks,
            *FEATURES,
            f"trainer.precision={precision}",
            f"model.teacher.placement={placement}",
        )
        for placement in ("same", "shard")
    )
    assert result(shards) == result(whole)
    held = sum(int((recipe.parent / f"held.{rank}").read_text()) for rank in range(ranks))
    width = 4 if precision == "32-true" else 2
    size = width * sum(
        p.numel() for p in timm.create_model(ARCH, num_classes=4, img_size=32, **TINY).parameters()
    )
    assert held == pytest.approx(size, rel=0.05)
    assert int((recipe.parent / "held.0").read_text()) == pytest.approx(
        size / ranks, rel=0.1
    )  # rows of 32 by 3
    assert eval_main([str(shards)]) == 0  # one process, the teacher whole


def test_one_of_two_teachers_in_shards(recipe: Path) -> None:
    """The other one is whole."""
    spec = {"arch": ARCH, "img_size": 32, "kwargs": TINY}
    folders = []
    for placement in ("same", "shard"):
        teachers = json.dumps(
            {"a": {**spec, "placement": placement}, "b": {**spec, "kwargs": {**TINY, "depth": 1}}}
        )
        folders.append(train(recipe, 2, "model.teacher=null", f"model.teachers={teachers}"))
    whole, shards = map(result, folders)
    assert shards == whole


def test_a_device_of_its_own(recipe: Path) -> None:
    plain, placed = (
        train(recipe, 1, *FEATURES, f"model.teacher.placement={where}") for where in ("same", "cpu")
    )
    assert result(placed) == result(plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("student", "teacher"), [("gpu", "cpu"), ("cpu", "cuda:0")])
def test_answers_come_back_from_another_device(recipe: Path, student: str, teacher: str) -> None:
    plain, placed = (
        train(
            recipe,
            1,
            *FEATURES,
            f"trainer.accelerator={student}",
            f"model.teacher.placement={where}",
        )
        for where in ("same", teacher)
    )
    a, b = (student_of(folder) for folder in (plain, placed))
    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("arch", "count"),
    [
        ("vit_tiny_patch16_224", 12),
        ("eva02_tiny_patch14_224", 12),
        ("convnext_atto", 4 + 2 + 2 + 6 + 2),
    ],
)
def test_every_block_is_a_shard_of_its_own(arch: str, count: int) -> None:
    """A plain transformer keeps its blocks in a sequence, others in a list, convolutional ones in nested stages."""
    found = list(repeated_blocks(timm.create_model(arch)))
    assert len(found) == count
    assert len(set(map(id, found))) == count


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_dense_teacher_in_shards_and_the_pictures_at_the_end(
    strategy: str, tmp_path: Path
) -> None:
    """Rank 0 alone writes the coloured predictions, but every rank must ask the shards for them."""
    teacher = {
        "arch": ARCH,
        "img_size": [24, 32],
        "kwargs": {**TINY, "depth": 4},
        "placement": "shard",
    }
    recipe = recipe_of(
        tmp_path, draw(tmp_path / "scenes"), teacher=teacher, distill_losses={"p": "PixelKDLoss"}
    )
    how = "trainer.strategy=ddp" if strategy == "ddp" else "config=fsdp"
    items = [
        f"recipe={recipe}",
        "trainer.devices=2",
        "data.batch_size=2",
        "trainer.max_epochs=1",
        "preflight=warn",
    ]
    log = tmp_path / "log.txt"
    run_ranks([*items, how], log)
    assert (tmp_path / "runs" / "tiny" / "000" / "fidelity.json").is_file()
