"""The parts of the page "Your own parts" train together, as its command names them."""

import importlib
import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.own_transform import OwnTransform, code_of, described
from kd.data.sampler import TrainBatches, draw_by
from kd.data.transforms import seeded, train_transform
from kd.losses import LogitLoss
from kd.run.gate import check_foreign
from kd.settings import Augment
from kd.teachers.open_cache import check_mixing
from tests._forks import as_installed, start, status_of
from tests._helpers import ROOT, Command, refuses
from tests._runs import run

PAGE = (ROOT / "recipes/OWN_PARTS.md").read_text()


def test_the_parts_of_the_page_train(recipe: Path, pictures: Path, teacher: Path) -> None:
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.S))
    (recipe.parent / "mine.py").write_text(code)
    command = re.findall(r"```bash\nkd-train (.*?)```", PAGE, flags=re.S)[0]
    words = shlex.split(command.replace("\\\n", " "))
    stands_for = {
        "recipe=distill": f"recipe={recipe}",
        "model.teacher.checkpoint=TEACHER": f"model.teacher.checkpoint={teacher}",
        "data.source.folder=DIR": f"data.source.folder={pictures}",
    }
    given = [stands_for.get(word, word) for word in words]
    log = recipe.parent / "log"
    pid = start([*given, "trainer.max_epochs=1"], log, as_installed, recipe.parent)
    assert status_of(pid) == 0, log.read_text()[-3000:]
    assert "epoch 0: " in log.read_text()
    header = (recipe.parent / "runs/tiny/000/metrics.csv").read_text().splitlines()[0]
    assert "gap" in header
    assert "kd_loss" not in header


class Pools:
    """Makes a model that timm does not know, without layers of the names that recipes compare."""

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> torch.nn.Module:
        layers = [
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(3, num_classes),
        ]
        model: Any = torch.nn.Sequential(*layers)
        model.mean, model.std, model.img_size = (0.5,) * 3, (0.5,) * 3, 32
        return model


@pytest.mark.parametrize("layer", ["maps", "maps@1/2", "blocks.1"])
def test_a_model_without_a_recipes_layers_can_do_without_them(
    layer: str, recipe: Path, refusal: Command
) -> None:
    words = [
        f"recipe={recipe}",
        "model.student.builder=tests.test_own_parts.Pools",
        "trainer.fast_dev_run=true",
    ]
    words += ["model.distill_losses.maps=MSELoss"]
    words += [f"model.taps.maps={{student: {layer!r}, teacher: maps}}", "model.student.kwargs={}"]
    message = refusal("train", words)
    assert message.startswith("kd-train: model.taps.maps.student: ")
    without = ["model.taps=null", "model.distill_losses={kd: KDLoss}"]
    assert train_main([*words[:3], *without]) == 0


class Gap(LogitLoss):
    """A loss with an argument of its own."""

    def __init__(self, power: float = 1.0, weight: float = 1.0) -> None:
        super().__init__(weight=weight)
        self.power = power


def test_a_misspelt_argument_of_ones_own_loss_leads_to_its_own(
    recipe: Path, refusal: Command
) -> None:
    words = [f"recipe={recipe}", "model.distill_losses.gap=tests.test_own_parts.Gap"]
    assert refusal("train", [*words, "model.distill_losses.gap.powr=2"]) == (
        "kd-train: model.distill_losses.gap.powr: Gap takes power, weight; did you mean 'power'?\n"
    )


OTHERS = "".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)[1:]).splitlines()


@pytest.mark.parametrize("command", OTHERS)
def test_the_other_commands_of_the_page_run(command: str, recipe: Path) -> None:
    if "albumentations" in command:
        pytest.importorskip("albumentations")
    _, _, *words = shlex.split(command)
    short = ["config=debug", "model.teacher.cache=off"]
    run(recipe, *short, *words)


def test_a_part_that_is_not_found_or_fails_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, refusal: Command
) -> None:
    monkeypatch.chdir(recipe.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("half_done.py").write_text("import a_package_that_is_missing\n\n\nclass Nets: ...\n")
    for name, why in (
        ("nowhere.Nets", "; nowhere.py was not found in this folder, nor on PYTHONPATH"),
        ("half_done.Nets", "half_done can't be imported: No module named 'a_package_that"),
    ):
        message = refusal("train", [f"recipe={recipe}", f"model.student.builder={name}"])
        assert message.startswith("kd-train: model.student.builder: ")
        assert why in message


def test_a_vit_teaches_a_resnet_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's function as it is, but for weights that are downloaded, and the progress bar."""
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)[-1]
    named: dict[str, Any] = {}
    exec(code, named)
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained=False, **more: create(name, **more)
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    named["Trainer"] = partial(Trainer, enable_model_summary=False, **quiet)
    module = named["vit_into_resnet"](torch.rand(16, 3, 32, 32), side=32)
    assert module.trainer.global_step == 1
    assert 0 < float(module.trainer.callback_metrics["train/maps_loss"]) < 2


# -- transforms --------------------------------------------------------------------------------------------------------
class Chance:
    """A callable of no library, whose chance is Python's and NumPy's; of a mask the same."""

    def __call__(self, picture: Tensor, *masks: Tensor) -> Any:
        by = random.randrange(100) + np.random.randint(100)  # noqa: NPY002
        changed = (picture.int() + by).clamp(max=255).to(torch.uint8)
        return (changed, *masks) if masks else changed


def albumentations_flip() -> Any:
    library = pytest.importorskip("albumentations")
    return library.Compose([library.HorizontalFlip(p=0.5), library.RandomBrightnessContrast(p=1.0)])


class Flip:
    """A transform as albumentations has it: arrays by name, and a generator that is seeded by a method."""

    __module__ = "albumentations.own"

    def set_random_seed(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def __call__(self, **arrays: Any) -> Any:
        step = self.chance.choice((1, -1))
        return {name: array[:, ::step] for name, array in arrays.items()}


@pytest.mark.parametrize(
    "make",
    [lambda: v2.RandomHorizontalFlip(0.5), Chance, albumentations_flip, Flip],
    ids=["torchvision", "own", "albumentations", "like albumentations"],
)
def test_a_view_follows_from_the_seed_alone_and_its_mask_goes_along(make: Any) -> None:
    augment = Augment(transform=make(), scale=1.0, hflip=0.0)
    transform = train_transform((24, 32), augment)
    picture = torch.randint(256, (3, 24, 32), dtype=torch.uint8)
    mask = tv_tensors.Mask((picture[:1] > 127).to(torch.uint8))
    views = []
    for view in [*range(12), *range(12)]:
        random.seed(view * 7 + len(views))  # what other code draws makes no difference
        with seeded(0, 5, view):
            views.append(transform(tv_tensors.Image(picture), mask))
    assert all(
        torch.equal(a, b) and torch.equal(c, d)
        for (a, c), (b, d) in zip(views[:12], views[12:], strict=True)
    )
    assert len({tuple(image.flatten().tolist()) for image, _ in views}) > 1
    if not isinstance(augment.transform, Chance):  # flipped together
        kinds = {torch.equal(seen, mask) for _, seen in views}
        assert kinds == {True, False}
        assert all(torch.equal(seen, mask) or torch.equal(seen, mask.flip(-1)) for _, seen in views)


@pytest.mark.parametrize(("transform", "said"), [
    (v2.Resize(8), "Resize gives uint8 (3, 8, 8), it must give uint8 (3, 16, 16)"),
    (v2.ToDtype(torch.float32, scale=True), "ToDtype gives float32 (3, 16, 16)"),
    (3, "int can't be called with a picture"),
    (dict.fromkeys("a").__getitem__, "failed on a picture: "),
])  # fmt: skip
def test_what_can_not_work_is_refused_before_the_first_batch(transform: Any, said: str) -> None:
    with refuses("data.augment.transform: ") as refused:
        OwnTransform(transform, (16, 16))
    assert said in str(refused.value)


def test_a_transform_in_place_leaves_the_picture_that_is_kept() -> None:
    picture = torch.ones(3, 8, 8, dtype=torch.uint8)
    OwnTransform(Tensor.zero_, (8, 8))(picture)
    assert picture.all()


def test_a_description_tells_settings_apart_and_is_the_same_in_each_process() -> None:
    assert (
        described(v2.GaussianBlur(3))
        == described(v2.GaussianBlur(3))
        != described(v2.GaussianBlur(5))
    )
    assert described(v2.AutoAugment()) == described(v2.AutoAugment())
    text = json.dumps(
        described(
            v2.Compose([v2.RandomApply([v2.ColorJitter(0.1)], p=0.2), v2.TrivialAugmentWide()])
        )
    )
    assert " at 0x" not in text


def brighter(picture: Tensor) -> Tensor:
    return picture + 1


def darker(picture: Tensor) -> Tensor:
    return picture - 1


def brightened(picture: Tensor, levels: int) -> Tensor:
    return picture + levels


def shifted_by(levels: int) -> Any:
    return lambda picture: picture + levels


class Table:
    def __init__(self, levels: np.ndarray) -> None:
        self.levels = levels

    def look_up(self, picture: Tensor) -> Tensor:
        return torch.from_numpy(self.levels)[picture.long()]


LEVELS = np.arange(5000)
OTHER_LEVELS = np.where(LEVELS == 2500, 0, LEVELS)  # NumPy's text of both is the same


@pytest.mark.parametrize(("one", "other"), [
    (brighter, darker),
    (v2.Lambda(brighter), v2.Lambda(darker)),
    (lambda picture: picture,
     lambda picture: picture.flip(-1)),
    (shifted_by(1), shifted_by(2)),
    (partial(brightened, levels=1), partial(brightened, levels=2)),
    (Table(LEVELS), Table(OTHER_LEVELS)),
    (Table(LEVELS).look_up, Table(OTHER_LEVELS).look_up),
])  # fmt: skip
def test_functions_and_tables_are_told_apart(one: Any, other: Any) -> None:
    """Equal descriptions would give one transform the teacher's outputs for the views of the other."""
    assert json.dumps(described(one)) != json.dumps(described(other))
    assert " at 0x" not in json.dumps(described(one))


MINE = {
    "helpers.py": "SIGMA = 2\n\ndef blur(x):\n    return x // SIGMA\n\ndef other(x):\n    return x\n",
    "mine.py": """
import helpers
from torch import nn

LEVELS = {"low": 1}

class Base:
    def lift(self, x):
        return x + LEVELS["low"]

class Mine(Base):
    def __call__(self, x):
        return self.lift(step(x))

    @property
    def unused(self):
        return 1

def step(x):
    return list(map(lambda y: helpers.blur(y), [x]))[0]

def beside():
    return 1
""",
}


PACKAGE = {
    "mine_of/__init__.py": "",
    "mine_of/inner.py": "def blur(x):\n    return x // 1\n",
    "mine.py": "import mine_of.inner\nclass Mine:\n    def __call__(self, x):\n        return mine_of.inner.blur(x)\n",
}


@pytest.mark.parametrize(("files", "file", "old", "new"), [
    (MINE, "mine.py", "self.lift(step(x))", "step(self.lift(x))"),
    (MINE, "mine.py", '"low": 1', '"low": 2'),
    (MINE, "helpers.py", "x // SIGMA", "x * SIGMA"),
    (PACKAGE, "mine_of/inner.py", "x // 1", "x // 2"),
])  # fmt: skip
def test_a_transform_whose_code_differs_is_another_one(
    files: dict[str, str],
    file: str,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache gave the old code's views their teacher's outputs where a method or a helper of it had changed."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert old in files[file]
    after = {**files, file: files[file].replace(old, new)}
    codes: list[str] = []
    for number, written in enumerate((files, after, after)):
        folder = tmp_path / str(number)
        for name, text in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        with monkeypatch.context() as here:
            here.syspath_prepend(folder)
            mine = importlib.import_module("mine").Mine()
            codes.append(code_of(v2.Compose([v2.Lambda(mine)])))
            for name in ("mine", "helpers", "mine_of", "mine_of.inner"):
                sys.modules.pop(name, None)
    assert codes[1] == codes[2]
    assert codes[0] != codes[1]


def test_code_of_libraries_is_left_out() -> None:
    """Their version is in the cache's description already, where it matters."""
    assert code_of(v2.GaussianBlur(3)) == code_of(v2.Compose([v2.GaussianBlur(5)])) == code_of(None)
    assert code_of(brighter) != code_of(None)


def test_a_set_is_described_alike_in_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").write_text(
        "from kd.data.own_transform import code_of, described\n"
        "within = lambda name: name in {'apple', 'pear', 'plum', 'fig', 'kiwi'}\n"
        "print(described([{'apple', 'pear', 'plum', 'fig', 'kiwi'}, within]), code_of(within))"
    )
    runpy.run_path(str(tmp_path / "x.py"), run_name="__main__")
    here = capsys.readouterr().out
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, tmp_path / "x.py"]
    there = subprocess.check_output(command, env=environment, cwd=ROOT, text=True)
    assert here == there


def test_a_listed_transform_trains_and_a_file_names_no_other(recipe: Path) -> None:
    run(
        recipe,
        "config=debug",
        "model.teacher.cache=off",
        "data.augment.transform=TrivialAugmentWide",
    )
    for name in (
        "os.system",
        "torchvision.transforms.v2.Lambda",
        "torchvision.datasets.ImageFolder",
        "albumentations.Lambda",
    ):
        setting = {"class_path": name, "init_args": {"p": 1}}
        for key, data in (
            ("transform", {"augment": {"transform": setting}}),
            ("sampler", {"sampler": setting}),
        ):
            with refuses(f"data.*{key} names {name}"):
                check_foreign(Path("x.yaml"), [{"data": data}], [])


# -- a sampler ---------------------------------------------------------------------------------------------------------
class Twice:
    """The first two pictures alone."""

    def draw(self, targets: list[int], epoch: int, rng: np.random.Generator) -> list[int]:
        return [1, 0] if epoch % 2 else [0, 1]


def test_a_sampler_fills_the_epoch_and_repeated_pictures_get_other_views() -> None:
    batches = TrainBatches(6, 2, seed=0, draw=draw_by(Twice(), [0, 0, 1, 1, 1, 1]))
    seen = [key for batch in batches for key in batch]
    assert sorted(index for index, _ in seen) == [0, 0, 0, 1, 1, 1]
    assert len(set(seen)) == 6
    ranks = [TrainBatches(6, 1, 0, rank, 2, draw=draw_by(Twice(), [0] * 6)) for rank in range(2)]
    assert [key for pair in zip(*ranks, strict=True) for batch in pair for key in batch] == seen


def test_a_sampler_shows_a_picture_in_mixtures_that_no_cache_keeps() -> None:
    data = DistillationDataModule(sampler=Twice(), augment=Augment(mixup=0.8))
    with refuses("data.sampler show a picture in several"):
        check_mixing(data)


def test_a_sampler_may_draw_more_than_an_epoch_in_any_order() -> None:
    """All 16 that it draws are cut to 8: sorted, these were the pictures of one class."""

    class Sorted:
        def draw(self, targets: list[int], *_: Any) -> np.ndarray:
            return np.sort(np.tile(np.arange(len(targets)), 2))

    batches = TrainBatches(8, 2, seed=0, draw=draw_by(Sorted(), [0] * 4 + [1] * 4))
    seen = {int(index) for epoch in range(8) for index in batches.order(epoch)}
    assert seen == set(range(8))


@pytest.mark.parametrize("drawn", [[], [6], [-1], [0.5], [[1]]])
def test_a_sampler_that_draws_something_else_is_refused(drawn: list[Any]) -> None:
    class Wrong:
        def draw(self, *_: Any) -> list[Any]:
            return drawn

    with refuses("data.sampler: Wrong.draw must return a list of whole numbers from 0 to 5"):
        TrainBatches(6, 2, seed=0, draw=draw_by(Wrong(), [0] * 6)).order(0)
    with refuses("data.sampler: int needs the method draw"):
        draw_by(3, [])


# -- a callback's state ------------------------------------------------------------------------------------------------
KEPT = {
    "numpy": np.float32(2),
    "nested": {"a": [np.arange(3)]},
    "path": Path("x"),
    "plain": {"a": (torch.ones(3), 1.0, None, "b", b"c")},
}


class Keeps(Callback):
    """Keeps a value of :data:`KEPT` in checkpoints, from the hook ``at`` on."""

    steps = 0

    def __init__(self, at: str, kept: str) -> None:
        self.at, self.value = at, KEPT[kept]
        self.kept: list[Any] = []
        Keeps.steps = 0

    def on_train_start(self, *_: Any) -> None:
        self.kept += [self.value] if self.at == "start" else []

    def on_train_epoch_end(self, *_: Any) -> None:
        self.kept += [self.value] if self.at == "end" else []

    def on_train_batch_end(self, *_: Any) -> None:
        Keeps.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.at == "save":
            checkpoint["mine"] = self.value


@pytest.mark.parametrize(
    ("at", "kept", "message", "steps"),
    [
        ("start", "numpy", "trainer.callbacks: the state of Keeps holds numpy.float32, which no resumed run can", 0),
        ("save", "nested", "checkpoint: its key 'mine' holds numpy.ndarray, which no resumed run can read", 0),
        ("end", "path", "trainer.callbacks: the state of Keeps holds pathlib", 6),
        ("start", "plain", "", 12),
    ],
)  # fmt: skip
def test_what_no_resumed_run_could_read_is_refused_before_it_is_written(
    at: str, kept: str, message: str, steps: int, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step; what only comes later, before the file that would hold it."""
    callback = {"class_path": f"{__name__}.Keeps", "init_args": {"at": at, "kept": kept}}
    words = [f"recipe={recipe}", f"trainer.callbacks={json.dumps([callback])}", "preflight=off"]
    assert train_main(words) == (2 if message else 0)
    assert message in capsys.readouterr().err
    assert Keeps.steps == steps
    last = recipe.parent / "runs/tiny/000/checkpoints/last.ckpt"
    assert last.exists() == (not message)
