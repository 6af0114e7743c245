"""Suggestions for an unknown key: up to three accepted keys, the likeliest first."""

import difflib
from collections.abc import Iterable, Mapping

MOST = 3
LEARNING_RATE, LOSS = ["optim.lr"], "model.distill_losses.{loss}"
SYNONYMS: Mapping[str, list[str]] = {  # words of the field -> our keys; {loss}: the recipe's first distillation loss
    "accum": ["trainer.accumulate_grad_batches"],
    "accumulation": ["trainer.accumulate_grad_batches"],
    "accumulation_steps": ["trainer.accumulate_grad_batches"],
    "alpha": [f"{LOSS}.weight", "model.task_loss_weight"],
    "amp": ["trainer.precision"],
    "architecture": ["model.student.arch", "model.teacher.arch"],
    "aug": ["data.augment.scale", "data.augment.rand_augment"],
    "augment": ["data.augment.scale", "data.augment.rand_augment"],
    "augmentation": ["data.augment.scale", "data.augment.rand_augment"],
    "autoaugment": ["data.augment.rand_augment"],
    "backbone": ["model.student.arch", "model.teacher.arch"],
    "batch": ["data.batch_size"],
    "bf16": ["trainer.precision"],
    "bs": ["data.batch_size"],
    "betas": ["optim.kwargs"],
    "ce_weight": ["model.task_loss_weight"],
    "checkpoint_every": ["checkpoint.every_n_steps", "checkpoint.every_n_minutes"],
    "ckpt": ["model.teacher.checkpoint", "model.student.checkpoint", "resume"],
    "clip": ["trainer.gradient_clip_val"],
    "ckpt_path": ["model.teacher.checkpoint", "model.student.checkpoint", "resume"],
    "nesterov": ["optim.kwargs"],
    "cls_weight": ["model.task_loss_weight"],
    "cpus": ["data.num_workers"],
    "criterion": ["model.distill_losses"],
    "cutout": ["data.augment.random_erasing"],
    "data_path": ["data.source.root"],
    "dataset": ["data.source"],
    "decay": ["optim.weight_decay", "model.ema_decay"],
    "device": ["trainer.accelerator", "trainer.devices"],
    "dir": ["data.source.root", "runs_dir"],
    "dry_run": ["trainer.fast_dev_run"],
    "distillation_weight": [f"{LOSS}.weight"],
    "dtype": ["trainer.precision"],
    "early_stopping": ["monitor.actions"],
    "ema": ["model.ema_decay"],
    "epoch": ["trainer.max_epochs"],
    "epochs": ["trainer.max_epochs"],
    "eta_min": ["optim.min_lr_ratio"],
    "exp_name": ["name", "recipe"],
    "experiment": ["recipe"],
    "flip": ["data.augment.hflip"],
    "fp16": ["trainer.precision"],
    "gamma": [f"{LOSS}.weight"],
    "gpu": ["trainer.devices", "trainer.accelerator"],
    "gpus": ["trainer.devices", "trainer.num_nodes"],
    "gradient_checkpointing": ["model.student.grad_checkpointing"],
    "hard_weight": ["model.task_loss_weight"],
    "imgsz": ["data.img_size", "model.student.img_size", "model.teacher.img_size"],
    "init_from": ["model.student.checkpoint"],
    "iterations": ["trainer.max_steps"],
    "jitter": ["data.augment.color_jitter"],
    "kd_weight": [f"{LOSS}.weight"],
    "lambda": [f"{LOSS}.weight", "model.task_loss_weight"],
    "layer": ["model.taps"],
    "layers": ["model.taps"],
    "load": ["model.teacher.checkpoint", "model.student.checkpoint", "resume"],
    "learning_rate": LEARNING_RATE,
    "log_dir": ["runs_dir"],
    "log_every": ["trainer.log_every_n_steps"],
    "log_interval": ["trainer.log_every_n_steps"],
    "loss": ["model.distill_losses"],
    "loss_weight": [f"{LOSS}.weight", "model.task_loss_weight"],
    "losses": ["model.distill_losses"],
    "lr_min": ["optim.min_lr_ratio"],
    "max_grad_norm": ["trainer.gradient_clip_val"],
    "metric": ["checkpoint.monitor"],
    "min_lr": ["optim.min_lr_ratio"],
    "mlflow": ["trainer.logger"],
    "name": ["model.student.arch", "model.teacher.arch"],
    "model": ["model.student.arch", "model.teacher.arch"],
    "model_path": ["model.teacher.checkpoint", "model.student.checkpoint"],
    "momentum": ["optim.kwargs"],
    "nodes": ["trainer.num_nodes"],
    "num_gpus": ["trainer.devices"],
    "n_gpus": ["trainer.devices"],
    "ngpus": ["trainer.devices"],
    "opt": ["optim.name"],
    "optimizer": ["optim.name"],
    "out": ["runs_dir"],
    "out_dir": ["runs_dir"],
    "output": ["runs_dir"],
    "output_dir": ["runs_dir"],
    "path": ["data.source.root", "model.teacher.checkpoint"],
    "patience": ["monitor.thresholds", "monitor.actions"],
    "randaugment": ["data.augment.rand_augment"],
    "reprob": ["data.augment.random_erasing"],
    "resolution": ["data.img_size", "model.student.img_size", "model.teacher.img_size"],
    "root": ["data.source.root"],
    "save_dir": ["runs_dir"],
    "save_every": ["checkpoint.every_n_steps", "checkpoint.every_n_minutes"],
    "scheduler": ["optim.warmup_epochs", "optim.min_lr_ratio"],
    "size": ["data.img_size", "model.student.img_size", "model.teacher.img_size"],
    "smoothing": ["model.task.label_smoothing"],
    "soft_weight": [f"{LOSS}.weight"],
    "step_size": ["optim.warmup_epochs", "optim.min_lr_ratio"],
    "steps": ["trainer.max_steps"],
    "t": [f"{LOSS}.temperature"],
    "tau": [f"{LOSS}.temperature"],
    "temp": [f"{LOSS}.temperature"],
    "threads": ["data.num_workers"],
    "train_dir": ["data.source.root"],
    "url": ["data.source.root"],
    "warmup": ["optim.warmup_epochs"],
    "warmup_steps": ["optim.warmup_epochs"],
    "cosine": ["optim.min_lr_ratio", "optim.warmup_epochs"],
    "crop": ["data.augment.scale", "data.crop_ratio"],
    "cutmix_alpha": ["data.augment.cutmix"],
    "distillation": ["model.distill_losses"],
    "early_stop": ["monitor.actions"],
    "fp32": ["trainer.precision"],
    "mixup_alpha": ["data.augment.mixup"],
    "num_classes": ["data.source"],
    "run_name": ["name"],
    "student": ["model.student.arch", "model.student.checkpoint"],
    "task_weight": ["model.task_loss_weight"],
    "teacher": ["model.teacher.checkpoint", "model.teacher.arch"],
    "tensorboard": ["trainer.logger"],
    "type": ["optim.name", "data.source", "model.student.arch", "model.teacher.arch"],
    "wandb": ["trainer.logger"],
    "wd": ["optim.weight_decay"],
    "weights": ["model.teacher.checkpoint", "model.student.checkpoint"],
    "backend": ["trainer.strategy", "trainer.accelerator"],
    "class_weight": ["model.task.class_weights"],
    "eval_every": ["trainer.check_val_every_n_epoch", "trainer.val_check_interval"],
    "eval_interval": ["trainer.check_val_every_n_epoch", "trainer.val_check_interval"],
    "freeze_backbone": ["model.student.freeze"],
    "hard_label_weight": ["model.task_loss_weight"],
    "layer_decay": ["optim.lr", "model.student.freeze"],
    "progress": ["trainer.enable_progress_bar"],
    "project": ["trainer.logger", "recipe"],
    "sampler": ["data.balance_classes"],
    "save_top_k": ["checkpoint.monitor", "checkpoint.every_n_steps"],
    "sync_bn": ["trainer.sync_batchnorm"],
    "val_every": ["trainer.check_val_every_n_epoch", "trainer.val_check_interval"],
    "val_interval": ["trainer.check_val_every_n_epoch", "trainer.val_check_interval"],
    "val_ratio": ["data.val_fraction"],
    "val_split": ["data.val_fraction"],
    "verbose": ["trainer.enable_progress_bar", "trainer.log_every_n_steps"],
    "world_size": ["trainer.devices", "trainer.num_nodes"],
}
ARCHITECTURE = frozenset(  # timm's arguments of an architecture: they go below .kwargs
    ["act_layer", "attn_drop_rate", "block_size", "class_token", "depth", "depths", "drop_block_rate",
     "drop_path", "drop_path_rate", "drop_rate", "dropout", "embed_dim", "embed_dims", "fc_norm",
     "features_only", "global_pool", "head_dim", "heads", "hidden_dim", "in_chans", "init_values", "layer_norm",
     "mlp_ratio", "no_embed_class", "norm_layer", "num_heads", "patch_drop_rate", "patch_size", "pos_drop_rate",
     "pos_embed", "proj_drop_rate", "qk_norm", "qkv_bias", "reg_tokens", "stem_width", "weight_init", "width",
     "window_size"]
)  # fmt: skip
MEANT = {"heads": "num_heads", "hidden_dim": "embed_dim", "drop_path": "drop_path_rate", "dropout": "drop_rate",
         "width": "embed_dim"}  # fmt: skip


def suggest(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> list[str]:
    """The accepted keys that ``key`` may mean.

    The last part decides, whole or by its words (``mixup_alpha``): an accepted key that ends in it, a synonym, or
    else one that is spelt alike. The words before it choose between those found (a student's key for a student's).

    >>> suggest("lr", ["optim.lr", "seed", "optim.lr_batch"])
    ['optim.lr']
    >>> suggest("model.student.drop_path_rate", [])
    ['model.student.kwargs.drop_path_rate']
    """
    known, loss = list(accepted), next(iter(losses), "kd")
    ends: dict[str, list[str]] = {}
    for name in known:
        ends.setdefault(name.split(".")[-1], []).append(name)
    synonyms = {word: [name.format(loss=loss) for name in names] for word, names in SYNONYMS.items()}
    given = key.lower().replace("-", "_").split(".")
    last = given[-1]
    if last in ARCHITECTURE and last not in ends:
        side = "teacher" if any("teacher" in part for part in given) else "student"
        return [f"model.{side}.kwargs.{MEANT.get(last, last)}"]
    found: list[str] = []
    for words in _runs(last):
        found = [*synonyms.get(words, []), *ends.get(words, [])]
        if found:
            break
    if not found:
        for name in difflib.get_close_matches(last, [*ends, *synonyms], MOST, 0.75):
            found += [*ends.get(name, []), *synonyms.get(name, [])]
    found = list(dict.fromkeys(found)) or difflib.get_close_matches(key, known, 1, 0.75)
    context = {*given[:-1], *last.split("_")}
    shared = {name: len(context & set(name.split(".")[:-1])) for name in found}
    return [name for name in found if shared[name] == max(shared.values()) and name != key][:MOST]


def _runs(name: str) -> list[str]:
    """Runs of a name's words, the longest first, the last ones before the first ones.

    >>> _runs("base_lr")
    ['base_lr', 'lr', 'base']
    """
    words = name.split("_")
    spans = [(i, i + size) for size in range(len(words), 0, -1) for i in range(len(words) - size, -1, -1)]
    return ["_".join(words[i:j]) for i, j in spans]


def hint(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> str:
    """The suggestion as the end of a message.

    >>> hint("data.source.root", ["data.source.root"])
    ': the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder'
    """
    if key == "data.source.root":
        return ": the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder"
    return did_you_mean(suggest(key, accepted, losses)) or " (kd-train --keys)"


def near(given: object, names: Iterable[str], most: int = 1) -> str:
    return did_you_mean(nearest(given, names, most))


def nearest(given: object, names: Iterable[str], most: int = 1) -> list[str]:
    """The names that begin with what was given, the shortest first, or else those that are spelt like it."""
    known, text = {name.lower(): name for name in names}, str(given).lower()
    begin = sorted((name for name in known if text and name.startswith(text)), key=lambda name: (len(name), name))
    return [known[name] for name in (begin or difflib.get_close_matches(text, known, most, 0.6))[:most]]


def did_you_mean(names: Iterable[str]) -> str:
    found = [f"'{name}'" for name in names]
    return f"; did you mean {' or '.join([', '.join(found[:-1]), found[-1]] if found[1:] else found)}?" if found else ""
