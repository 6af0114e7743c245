"""Every setting is read somewhere, and one that nothing reads beside the others ends a run before it begins."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import pytorch_lightning
import yaml

from kd.cli import train_main
from kd.config import parts as listed
from kd.config.suggest import words
from kd.errors import UserError
from kd.run import keys
from kd.run.request import translate
from kd.run.resolve import keys_of_classes
from scripts.house import tree_of
from tests._helpers import ARCH, ROOT, TINY, write_recipe

CLASSES = [one for kind in ("loss", "source", "task") for one in listed.of_kind(kind)]


@cache
def reads(file: Path) -> dict[str, int]:
    """The lines that read a name, as ``x.name``, as a variable, or by its text (``getattr``, a dict's key)."""
    found: dict[str, int] = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.attr if isinstance(node, ast.Attribute) else node.id] = node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.setdefault(node.value, node.lineno)
    return found


def readers(name: str) -> list[str]:
    """``file:line`` of each place in the package that reads a name."""
    files = sorted((ROOT / "kd").rglob("*.py"))
    return [
        f"{file.relative_to(ROOT)}:{reads(file)[name]}" for file in files if name in reads(file)
    ]


def test_every_setting_says_where_it_is_read() -> None:
    own = [name for one in CLASSES for name in one.arguments]
    whole = [name for name in keys.schema() if not name.startswith("trainer.")]
    places = {name: readers(name.rpartition(".")[2]) for name in [*whole, *own]}
    assert not [name for name, found in places.items() if not found]
    assert readers("read_by_nobody_at_all") == []
    trainer = {
        name.removeprefix("trainer.") for name in keys.schema() if name.startswith("trainer.")
    }
    assert not trainer - set(reads(Path(inspect.getfile(pytorch_lightning.Trainer))))


def test_what_decides_is_a_setting() -> None:
    known = set(keys.schema()) | {"model.teachers.a.cache"}
    for idle in words()["idle"]:
        pattern, switches = idle["settings"], idle["of"]
        named = [
            found
            for name in [*known, *keys_of_classes([])]
            if (found := re.fullmatch(pattern, name))
        ]
        assert named, pattern
        assert {named[0].expand(switch) for switch in switches} <= known


def check(items: list[str]) -> None:
    request = translate(items)
    request.check_read(request.resolved())


HEADLESS = {
    "model__task_loss_weight": 0.0,
    "model__distill_losses": {"f": {"class_path": "kd.losses.CosineLoss"}},
    "model__taps": {"f": {"student": "prelogits", "teacher": "prelogits"}},
    "model__student": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "head": False},
}
SMOOTH = ["model.task=Classification", "model.task.label_smoothing=0.1"]
IDLE = [
    ([*SMOOTH, "model.task_loss_weight=0"], "model.task.label_smoothing: 0.1 has no effect with "
     "model.student.head=true, model.task_loss_weight=0.0: the loss on the labels reads it"),
    (["model.task={class_path: Classification, init_args: {class_weights: [5, 1, 1, 1]}}", "model.task_loss_weight=0"],
     "model.task.class_weights: [5.0, 1.0, 1.0, 1.0] has no effect"),
    ([*SMOOTH, "model.student.head=false"], "model.task.label_smoothing: 0.1 has no effect"),
    (["model.teacher.weight=5"], "model.teacher.weight: 5.0 has no effect: it is a share among several"),
    (["model.teacher.cache_views=2"], "model.teacher.cache_views: 2 has no effect with model.teacher.cache=off"),
    (["model.student.inherit_pictures=8"], "model.student.inherit_pictures: 8 has no effect"),
    (["data.augment.mix_probability=0.5"], "data.augment.mix_probability: 0.5 has no effect with data"),
    (["data.augment.pad=4", "data.augment.scale=0.5"], "data.augment.scale: 0.5 has no effect with data.augment.pad=4"),
    (["optim.schedule=steps", "optim.milestones=[1]", "optim.min_lr_ratio=0.1"], "optim.min_lr_ratio: 0.1 has no eff"),
    (["optim.decay_norm_and_bias=true", "optim.weight_decay=0"], "optim.decay_norm_and_bias: True has no effect with"),
    (["monitor.enabled=false", "monitor.max_hours=1"], "monitor.max_hours: 1.0 has no effect with monitor.enabled=false"),
    (["monitor.prometheus_host=0.0.0.0"], "monitor.prometheus_host: 0.0.0.0 has no effect with monitor"),
    (["monitor.send_every_s=5"], "monitor.send_every_s: 5.0 has no effect"),
    (["trainer.gradient_clip_val=0", "trainer.gradient_clip_algorithm=value"], "clip_algorithm: value"),
    (["trainer.use_distributed_sampler=true"], "trainer.use_distributed_sampler: True has no effect: kd's own sampler"),
    (["trainer.limit_test_batches=2"], "trainer.limit_test_batches: 2 has no effect: training neither tests"),
    (["trainer.default_root_dir=x"], "trainer.default_root_dir: x has no effect"),
    (["resume=x", "name=mine"], "name: mine has no effect with resume=x: a resumed run keeps its folder"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "message"), IDLE, ids=[items[-1] for items, _ in IDLE])
def test_a_setting_that_nothing_reads_is_refused(
    items: list[str], message: str, recipe: Path
) -> None:
    with pytest.raises(UserError) as refused:
        check([f"recipe={recipe}", *items])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "items",
    [
        [*SMOOTH],
        [
            "model.task=Classification",
            "model.task.label_smoothing=0.0",
            "model.task_loss_weight=0",
        ],  # the default
        ["model.teacher.cache=on", "model.teacher.cache_views=2"],
        ["data.augment.cutmix=1", "data.augment.mix_probability=0.5"],
        ["monitor.enabled=false", "monitor.rules_every_s=0"],  # asks for nothing
        ["trainer.default_root_dir=x", "trainer.callbacks+=tests._stop.Slow"],
        ["config=debug"],  # inherit_pictures, for recipes whose student inherits
    ],
    ids=lambda items: items[-1],
)
def test_a_setting_that_is_read_passes(items: list[str], recipe: Path) -> None:
    check([f"recipe={recipe}", *items])


def test_a_recipes_setting_may_be_made_idle_but_not_be_idle(recipe: Path) -> None:
    config = yaml.safe_load(recipe.read_text())
    config["model"]["task"] = {
        "class_path": "kd.tasks.Classification",
        "init_args": {"label_smoothing": 0.1},
    }
    recipe.write_text(yaml.safe_dump(config))
    check([f"recipe={recipe}", "model.task_loss_weight=0"])
    config["model"]["task_loss_weight"] = 0.0
    recipe.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"label_smoothing: 0\.1 has no effect"):
        check([f"recipe={recipe}"])
    recipe.write_text(
        yaml.safe_dump({**config, "name": None, "resume": None, "rank_timeout_s": 600})
    )  # as a run saves it
    check([f"recipe={recipe}"])


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))])
@pytest.mark.parametrize("overlay", [[], ["config=debug"]])
def test_our_recipes_have_no_idle_setting(name: str, overlay: list[str]) -> None:
    check([f"recipe={name}", *overlay])


def refused(items: list[str], capsys: pytest.CaptureFixture[str], root: Path) -> str:
    assert train_main(items) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kd-train: ")]
    assert len(lines) == 1
    assert not list(root.glob("runs/*/*/config.yaml"))
    return lines[0]


def relations(name: str) -> dict[str, object]:
    return {"model__distill_losses": {"r": {"class_path": f"kd.losses.{name}"}}}


@pytest.mark.parametrize(
    ("changes", "items", "message"),
    [
        ({}, [*SMOOTH, "model.task_loss_weight=0"], "model.task.label_smoothing: 0.1 has no effect"),
        ({}, ["data.val_fraction=0.5"], "data.val_fraction: 0.5 has no effect: data.source has validation pictures"),
        ({}, ["checkpoint.mode=min"], "checkpoint.mode: min would keep the worst epoch by val/acc1; leave it out"),
        (HEADLESS, ["checkpoint.mode=max"], "checkpoint.mode: max would keep the worst epoch by val/feature_loss"),
        (relations("CKALoss"), ["data.batch_size=2"], "data.batch_size: must give CKALoss (model.distill_losses.r) "
         "3 pictures at least, got 2"),
        (relations("RKDLoss"), ["data.batch_size=1"], "data.batch_size: must give RKDLoss (model.distill_losses.r)"),
        (relations("SPLoss"), ["data.batch_size=1"], "2 pictures at least, got 1"),
        (HEADLESS, ["data.probe.root=SAME"], "data.probe.root: 48 pictures of"),
    ],
    ids=lambda x: str(x)[-40:],
)  # fmt: skip
def test_what_a_run_finds_out_is_told_before_the_first_step(
    changes: dict[str, object],
    items: list[str],
    message: str,
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher, **changes)
    same = tmp_path / "same"
    same.mkdir()
    for split in ("train", "val"):
        (same / split).symlink_to(pictures / "train")
    assert message in refused(
        [f"recipe={recipe}", *(item.replace("SAME", str(same)) for item in items)], capsys, tmp_path
    )
