"""What the command line says of its keys, and what it makes of those that are none."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from kd.cli import train_main
from kd.config.kinds import read
from kd.config.suggest import suggest, words
from kd.config.trees import flatten
from kd.errors import UserError
from kd.run import keys
from kd.run.request import translate
from kd.run.resolve import keys_of_classes, resolve
from tests._helpers import ROOT

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
def test_what_there_is(
    items: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_main(items) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in lines)
    assert "EachLayer" not in out


WRONG_KEYS = [
    ("lr=1", "no key 'lr'; did you mean 'optim.lr'?"),
    (
        "data.root=photos",
        "no key 'data.root'; did you mean 'data.source.root' or 'data.probe.root'?",
    ),
    ("dry_run=true", "no key 'dry_run': trainer.fast_dev_run=true trains a few batches; "),
    ("model.distill_losses.kd.temprature=1", "did you mean 'model.distill_losses.kd.temperature'?"),
    (
        "model.distill_losses.kd.temperature=0",
        "model.distill_losses.kd.temperature: must be > 0, got 0",
    ),
    ("model.distill_losses.kd.weight=-1", "model.distill_losses.kd.weight: must be >= 0, got -1"),
    ("model.student.drop_path_rate=0.1", "did you mean 'model.student.kwargs.drop_path_rate'?"),
    ("data.source.path=x", "no key 'data.source.path'"),
    ("optim=SGD", "optim: got 'SGD'; did you mean 'optim.name=sgd'?"),
    ("trainer.max_epochs=ten", "trainer.max_epochs: must be a whole number, got 'ten'"),
]


def test_wrong_keys_are_told_without_torch(recipe: Path) -> None:
    code = (
        "import sys; from kd.cli import train_main\n"
        f"for item in {[item for item, _ in WRONG_KEYS]!r}: print(train_main(['recipe={recipe}', item]))\n"
        "print([m for m in ('torch', 'timm', 'numpy', 'pytorch_lightning') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["2"] * len(WRONG_KEYS) + ["[]"]
    told = [line for line in done.stderr.splitlines() if line.startswith("kd-train: ")]
    assert len(told) == len(WRONG_KEYS)
    for (_, message), line in zip(WRONG_KEYS, told, strict=True):
        assert message in line


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            "monitor=val/acc1",
            "monitor: got 'val/acc1'; did you mean 'checkpoint.monitor=val/acc1'?",
        ),
        ("model.distill_losses=DKDLoss", "did you mean 'model.distill_losses.kd=DKDLoss'?"),
        (
            "model.distill_losses.kd=null",
            "got 'null'; did you mean 'model.distill_losses.kd.weight=0'?",
        ),
        ("trainer.logger=wandb", "did you mean 'trainer.logger=WandbLogger'?"),
        ("class_weights=balanced", "did you mean 'model.task.class_weights=auto'?"),
        ("model.task.class_weights=balanced", "did you mean 'model.task.class_weights=auto'?"),
        ("optim.lr=abc", "optim.lr: must be a number, got 'abc'"),
        ("trainer.max_epochs=2.5", "trainer.max_epochs: must be a whole number, got '2.5'"),
        (
            "data.batch_size=many",
            "data.batch_size: must be a whole number or one of auto, got 'many'",
        ),
        (
            "model.teacher.cache=maybe",
            "must be true or false or one of off, on, auto, only, got 'maybe'",
        ),
        ("data.augment={mixup: much}", "data.augment.mixup: must be a number, got 'much'"),
        ("trainer.precision=bf61", "got 'bf61'; did you mean 'bf16'?"),
        (
            "optim.name=adamv",
            "optim.name: must be one of timm's optimizers, got 'adamv'; did you mean 'adam'",
        ),
        ("optim.momentum=0.9", "no key 'optim.momentum'; did you mean 'optim.kwargs.momentum'?"),
        ("early_stopping=true", "monitor.actions.Overtraining=stop ends a run that gets worse"),
        ("monitor.actions=stop", "monitor.actions: must be settings (NAME: VALUE), got 'stop'"),
        ("optim.name=momentums", "optim.name: must be one of timm's optimizers, got 'momentums'"),
        ("optim.name=lr", "optim.name: must be one of timm's optimizers, got 'lr'"),
        ("optim=adamv", "optim: got 'adamv'; did you mean 'optim.name=adam'?"),
        (
            "model.student.arch=vit_tiny",
            "got 'vit_tiny'; did you mean 'vit_tiny_patch16_224'?",
        ),
        (
            "model.student.arch=vit_smal_patch16_224.augreg_in21k",
            "got 'vit_smal_patch16_224.augreg_in21k'; did you mean 'vit_small_patch16_224'",
        ),
        (
            "model.student.arch=mine.Nets",
            "timm's models (builder=CLASS takes one of your own), got 'mine.Nets'",
        ),
        ("model=resnet18", "model: got 'resnet18'; did you mean 'model.student.arch=resnet18'?"),
        ("checkpoint=mine", "got 'mine'; did you mean 'model.teacher.checkpoint=mine'?"),
        ("model=3", "model: has settings of its own (model.NAME=VALUE), got '3'"),
        (
            "data.augment=strong",
            "data.augment: has settings of its own (data.augment.NAME=VALUE), got 'strong'",
        ),
        ("trainer.max_epochs=-5", "trainer.max_epochs: must be >= -1, got -5"),
        ("optim.milestones=[1]", "optim.milestones: must go with schedule=steps alone, got [1.0]"),
        ("optim.milestones=[3,x]", "optim.milestones: each must be a valid number, got 'x'"),
        ("data.unlabeled_ratio=2", "data.unlabeled_ratio: must come with data.unlabeled, got 2.0"),
        ("data.tier.queue_mb=5", "data.tier: needs data.engine=ray, got torch"),
        ("model.student.mean=[1,2]", "model.student.mean: must be a list of 3, got '[1, 2]'"),
        ("data.img_size=[1,2,3]", "data.img_size: must be a whole number or a list of 2, got"),
        (
            "monitor.actions.Overtraining=halt",
            "monitor.actions.Overtraining: must be 'log', 'webhook' or 'stop'",
        ),
        (
            "model.distill_losses+=KDLoss",
            "model.distill_losses: has names: model.distill_losses.NAME=KDLoss",
        ),
        ("students.a.optim.lr=1", "no key 'students.a.optim.lr': a run trains one student"),
        ("model.teacher_drop=0.1", "no key 'model.teacher_drop': the teacher answers without it"),
        ("model.teacher.cache_precision=int8", "cache_precision': a cache keeps features in half"),
        ("monitor.cloudwatch_topic=a", "scripts/monitor/cloudwatch_alarm.json"),
        ("config=headspace", "no overlay 'headspace': kd-report RUN --what-if"),
        ("--live", "no option --live: report.html reloads itself"),
        ("name=007", "name: must be letters, digits, . + - _ alone, the first a letter, got '007'"),
        ("trainer.max_steps=-5", "trainer.max_steps: must be >= -1, got -5"),
        (
            "trainer.strategy=dpp",
            "trainer.strategy: must be auto, ddp or a class path (config=fsdp, config=zero and",
        ),
        (
            "trainer.strategy=smddp",
            "trainer.strategy: smddp is a backend of DDP; config=smddp_4x8 sets it",
        ),
        (
            "trainer.strategy=ModelParallelStrategy",
            "tensor and pipeline parallel training is not supported",
        ),
        (
            "trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy",
            "config=fsdp shards one that",
        ),
        ("trainer.strategy=dpp", "got 'dpp'; did you mean 'ddp'?"),
        (
            "trainer.accelerator=GPU",
            "must be auto, cpu, gpu, cuda, mps or tpu, got 'GPU'; did you mean 'gpu'?",
        ),
        (
            "trainer.devices=-3",
            "trainer.devices: must be auto, -1 (all), a number >= 1 or a list ([0, 1]), got -3",
        ),
        (
            "trainer.limit_val_batches=1.5",
            "trainer.limit_val_batches: must be a share up to 1 or a number of batches",
        ),
        (
            "trainer.overfit_batches=-1",
            "trainer.overfit_batches: must be a share up to 1 or a number of batches",
        ),
        ("trainer.val_check_interval=0", "trainer.val_check_interval: must be > 0"),
        ("trainer.profiler=simpl", "got 'simpl'; did you mean 'simple'?"),
        (
            "trainer.enable_checkpointing=false",
            "trainer.enable_checkpointing: must be true: a run is resumed from",
        ),
        (
            "model.distill_losses.kd.temperature=hot",
            "model.distill_losses.kd.temperature: must be a number, got 'hot'",
        ),
        (
            "data.source=ImageFoldr",
            "data.source: no class or folder 'ImageFoldr'; did you mean 'ImageFolder'?",
        ),
        (
            "data.source=kd.data.sources.Manifst",
            "no class 'kd.data.sources.Manifst'; did you mean 'Manifest'?",
        ),
        (
            "model.task=Clasification",
            "model.task: no class 'Clasification'; did you mean 'Classification'?",
        ),
        (
            "model.distill_losses.kd=KDLos",
            "model.distill_losses.kd: no class 'KDLos'; did you mean 'KDLoss'?",
        ),
        (
            "model.distill_losses={kd: {class_path: KDLos}}",
            "model.distill_losses.kd: no class 'KDLos'; did you",
        ),
        (
            "trainer.callbacks+=EarlyStoping",
            "trainer.callbacks: no class 'EarlyStoping'; did you mean 'EarlyStopping'",
        ),
        (
            "trainer.callbacks=[{class_path: Timr}]",
            "trainer.callbacks: no class 'Timr'; did you mean 'Timer'?",
        ),
        (
            "trainer.logger=CSVLoger",
            "trainer.logger: no class 'CSVLoger'; did you mean 'CSVLogger'?",
        ),
        (
            "trainer.strategy.class_path=kd.strategies.ddp.DPP",
            "trainer.strategy: no class 'kd.strategies.ddp.DPP'",
        ),
    ],
)
def test_a_wrong_value_is_reported_before_torch_is_imported(
    item: str, message: str, recipe: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        translate([f"recipe={recipe}", item]).resolved()


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
def test_a_question_without_an_answer(item: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_main(item.split("=")) == 2
    assert "nothing" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="no key 'model.distill_losses.kd.strength'"):
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
