"""What the command line says of its keys, and what it makes of those that are none."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from kd.config.kinds import read
from kd.config.suggest import suggest, words
from kd.config.trees import flatten
from kd.run import keys
from kd.run.request import translate
from kd.run.resolve import keys_of_classes, resolve
from tests._helpers import ROOT, Command, refuses

GUESSES = {  # what an engineer would type, and what was meant
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "optim.learning_rate": "optim.lr",
    "optimizer.lr": "optim.lr",
    "model.lr": "optim.lr",
    "base_lr": "optim.lr",
    "optimizer": "optim.name",
    "opt": "optim.name",
    "optim.optimizer": "optim.name",
    "optim.type": "optim.name",
    "weight_decay": "optim.weight_decay",
    "wd": "optim.weight_decay",
    "optim.wd": "optim.weight_decay",
    "warmup": "optim.warmup_epochs",
    "warmup_epochs": "optim.warmup_epochs",
    "optim.warmup_steps": "optim.warmup_epochs",
    "scheduler": "optim.warmup_epochs",
    "min_lr": "optim.min_lr_ratio",
    "betas": "optim.kwargs",
    "momentum": "optim.kwargs",
    "epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "n_epochs": "trainer.max_epochs",
    "trainer.epochs": "trainer.max_epochs",
    "max_steps": "trainer.max_steps",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "devices": "trainer.devices",
    "trainer.gpus": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "accelerator": "trainer.accelerator",
    "device": "trainer.accelerator",
    "precision": "trainer.precision",
    "amp": "trainer.precision",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "mixed_precision": "trainer.precision",
    "grad_clip": "trainer.gradient_clip_val",
    "gradient_clip": "trainer.gradient_clip_val",
    "clip_grad_norm": "trainer.gradient_clip_val",
    "accumulate_grad_batches": "trainer.accumulate_grad_batches",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "log_every": "trainer.log_every_n_steps",
    "batch_size": "data.batch_size",
    "bs": "data.batch_size",
    "train.batch_size": "data.batch_size",
    "data.batchsize": "data.batch_size",
    "workers": "data.num_workers",
    "num_workers": "data.num_workers",
    "data.workers": "data.num_workers",
    "data.root": "data.source.root",
    "root": "data.source.root",
    "data_dir": "data.source.root",
    "data.path": "data.source.root",
    "dataset": "data.source",
    "data.dataset": "data.source",
    "img_size": "data.img_size",
    "image_size": "data.img_size",
    "data.resolution": "data.img_size",
    "data.mixup": "data.augment.mixup",
    "mixup": "data.augment.mixup",
    "cutmix_alpha": "data.augment.cutmix",
    "data.augment.random_erase": "data.augment.random_erasing",
    "data.randaugment": "data.augment.rand_augment",
    "data.hflip": "data.augment.hflip",
    "student": "model.student.arch",
    "teacher": "model.teacher.arch",
    "student.arch": "model.student.arch",
    "student.name": "model.student.arch",
    "model.student.model": "model.student.arch",
    "model.student.architecture": "model.student.arch",
    "teacher.checkpoint": "model.teacher.checkpoint",
    "teacher.ckpt": "model.teacher.checkpoint",
    "model.teacher.weights": "model.teacher.checkpoint",
    "teacher_checkpoint": "model.teacher.checkpoint",
    "student.pretrained": "model.student.pretrained",
    "model.teacher.path": "model.teacher.checkpoint",
    "model.student.drop_path_rate": "model.student.kwargs.drop_path_rate",
    "model.student.depth": "model.student.kwargs.depth",
    "student.patch_size": "model.student.kwargs.patch_size",
    "model.teacher.num_heads": "model.teacher.kwargs.num_heads",
    "temperature": "model.distill_losses.kd.temperature",
    "T": "model.distill_losses.kd.temperature",
    "tau": "model.distill_losses.kd.temperature",
    "kd.temperature": "model.distill_losses.kd.temperature",
    "model.temperature": "model.distill_losses.kd.temperature",
    "loss.temperature": "model.distill_losses.kd.temperature",
    "alpha": "model.distill_losses.kd.weight",
    "kd_weight": "model.distill_losses.kd.weight",
    "model.alpha": "model.distill_losses.kd.weight",
    "ce_weight": "model.task_loss_weight",
    "task_weight": "model.task_loss_weight",
    "label_smoothing": "model.task.label_smoothing",
    "ema": "model.ema_decay",
    "model.ema": "model.ema_decay",
    "cache": "model.teacher.cache",
    "losses": "model.distill_losses",
    "output_dir": "runs_dir",
    "save_dir": "runs_dir",
    "random_seed": "seed",
    "early_stopping": "monitor.actions",
    "save_every": "checkpoint.every_n_steps",
    "resume_from": "resume",
    "weighted_sampler": "data.balance_classes",
    "class_weight": "model.task.class_weights",
    "save_top_k": "checkpoint.monitor",
    "verbose": "trainer.enable_progress_bar",
    "progress": "trainer.enable_progress_bar",
    "backend": "trainer.strategy",
    "sync_bn": "trainer.sync_batchnorm",
    "project": "trainer.logger",
    "val_split": "data.val_fraction",
    "val_ratio": "data.val_fraction",
    "test_size": "data.val_fraction",
    "eval_every": "trainer.check_val_every_n_epoch",
    "val_interval": "trainer.val_check_interval",
    "freeze_backbone": "model.student.freeze",
    "hard_label_weight": "model.task_loss_weight",
    "layer_decay": "optim.layer_decay",
    "llrd": "optim.layer_decay",
    "criterion": "model.distill_losses",
    "grad_accum": "trainer.accumulate_grad_batches",
    "gradient_accumulation": "trainer.accumulate_grad_batches",
    "mlflow": "trainer.logger",
    "load_from": "resume",
    "exp_name": "name",
    "heads": "model.student.kwargs.num_heads",
    "hint_layer": "model.taps",
    "metric": "checkpoint.monitor",
    "step_size": "optim.warmup_epochs",
}
RECIPE = {"data": {"source": "ImageFolder"}, "model": {"distill_losses": {"kd": "KDLoss"}}}


@pytest.fixture(scope="module")
def accepted() -> list[str]:
    """The keys that a plain recipe of pictures in folders takes."""
    return [*keys.schema(), *keys_of_classes([RECIPE])]


def test_guessed_keys_lead_to_those_meant(accepted: list[str]) -> None:
    found = {guess: suggest(guess, accepted) for guess in GUESSES}
    missed = {guess: found[guess] for guess, meant in GUESSES.items() if meant not in found[guess]}
    assert len(missed) <= len(GUESSES) // 10, missed
    open_ended = ("model.student.kwargs.", "model.teacher.kwargs.", "optim.kwargs.")
    for guess, names in found.items():
        assert len(names) <= 3
        for name in names:
            assert name != guess
            assert name in accepted or name.startswith(open_ended), f"{guess}: {name} is no key"


def test_synonyms_lead_to_keys(accepted: list[str]) -> None:
    named = {
        name.format(loss="kd", side="student")
        for names in words()["keys"].values()
        for name in names
    }
    named = {name for name in named if ".kwargs." not in name}
    of_lists = keys_of_classes([{"data": {"source": "Manifest"}}])
    assert named <= {*accepted, *of_lists}


def test_the_keys_are_those_of_the_resolved_settings() -> None:
    data = {"engine": "ray", "augment": {}, "probe": {}, "tier": {}}
    settings = resolve([{"model": {"teacher": {}}, "data": data}])
    resolved_keys = {keys.plain_key(key) for key in flatten(settings)}
    declared = {*keys.schema()} - {"model.task"}
    assert {key for key in resolved_keys if not key.startswith("model.task.")} == declared


@pytest.mark.parametrize(
    ("items", "lines"),
    [
        (["--keys", "gradient_clip"], ["trainer.gradient_clip_val", "= 1.0"]),
        (
            ["--keys", "kd.temperature", "recipe=foodtag_vit"],
            ["model.distill_losses.kd.temperature", "= 4.0"],
        ),
        (
            ["--keys"],
            ["optim.lr", "Peak learning rate", "data.augment.mixup", "trainer.max_epochs"],
        ),
        (["--help", "data.augment"], ["data.augment.cutmix"]),
        (["--list", "losses"], ["KDLoss", "ReviewKDLoss", "CWDLoss"]),
        (
            ["--list", "sources"],
            ["ImageFolder", "Manifest", "Shards", "HuggingFace", "FoodTagMini"],
        ),
        (["--list", "tasks"], ["Segmentation"]),
        (["--list", "models"], ["vit_tiny_patch16_224"]),
    ],
)
def test_what_there_is(items: list[str], lines: list[str], prints: Command) -> None:
    out = prints("train", items)
    assert all(line in out for line in lines)
    assert "EachLayer" not in out


@pytest.mark.parametrize(
    "item",
    ["optim.lr=1e-3", "trainer.max_epochs=2.0", "data.batch_size=auto", "model.teacher.cache=yes",
     "seed=${oc.env:SEED}",
     "data.img_size=[32, 48]", "model.ema_decay=null", "trainer.logger=WandbLogger",
     "trainer.limit_val_batches=0.5", "trainer.limit_train_batches=1.0", "trainer.limit_val_batches=0",
     "trainer.val_check_interval=0.25", "trainer.devices=[0]", "trainer.devices=-1", "trainer.max_epochs=-1",
     "trainer.strategy=kd.strategies.ddp.DDP", "trainer.strategy=ddp_find_unused_parameters_true",
     "data.source=ImageFolder", "data.source=kd.data.sources.ImageFolder", "model.task=MultiLabel",
     "model.distill_losses.kd=DKDLoss", "model.distill_losses.own=mine.Loss",
     "trainer.callbacks+=EarlyStopping", "trainer.logger=[CSVLogger, TensorBoardLogger]", "trainer.logger=true",
     "trainer.devices=1", "optim.kwargs.momentum=0.9", "trainer.devices=0,1"],
)  # fmt: skip
def test_a_value_that_may_be_right_is_taken(
    item: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "3")
    assert translate([f"recipe={recipe}", item]).resolved()


@pytest.mark.parametrize(
    "item",
    ["--list=nothing", "--keys=nothing"],
)
def test_a_question_without_an_answer(item: str, refusal: Command) -> None:
    assert "nothing" in refusal("train", item.split("="))


def test_the_completion_of_the_guide_completes() -> None:
    line = re.search(r"`(complete -o nospace .*?)`", (ROOT / "recipes/KEYS.md").read_text())
    assert line is not None
    script = f"""
        kd-train() {{ {sys.executable} -m kd.cli "$@"; }}
        {line[1]}
        options=$(complete -p kd-train | sed 's/^complete -o nospace//; s/ kd-train$//')
        eval "words() {{ compgen $options -- \\"\\$1\\"; }}"
        words optim.wei; words data.augment.mi
    """
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [
        "optim.weight_decay=",
        "data.augment.mixup=",
        "data.augment.mix_probability=",
    ], done


def test_a_class_of_ones_own_has_keys_of_its_own() -> None:
    overrides = {
        "model.distill_losses.kd": "elsewhere.KDLoss",
        "model.distill_losses.kd.strength": 3,
    }
    loss = resolve([overrides])["model"]["distill_losses"]["kd"]
    assert loss == {"class_path": "elsewhere.KDLoss", "init_args": {"strength": 3}}
    overrides["model.distill_losses.kd"] = "kd.losses.KDLoss"
    with refuses("no key 'model.distill_losses.kd.strength'"):
        resolve([overrides])


def test_the_page_of_all_settings_is_what_the_settings_say() -> None:
    """``python scripts/site/keys.py`` writes it anew."""
    from scripts.site import keys as writer

    assert writer.PAGE.read_text() == writer.page()
    cut = [row for row in writer.page().splitlines() if row.count("(") > row.count(")")]
    assert not cut


def test_the_words_of_values_by_name_are_none_of_the_types() -> None:
    """``monitor.actions=stop`` was asked whether it means 'stop'."""
    assert read(dict[str, Literal["log", "stop"]]).allowed == []
    assert read(Literal["log", "stop"]).allowed == ["log", "stop"]
