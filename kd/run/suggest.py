"""Suggestions for an unknown key: up to three accepted keys, the likeliest first."""

import difflib
from collections.abc import Container, Iterable, Sequence

MOST = 3
"""Suggestions in a message."""
LOSS = "model.distill_losses.{loss}"  # each of the recipe's distillation losses
WORDS = (  # words of other programs, with blanks between -> our keys that may be meant, the likeliest first
    (
        "checkpoint_every save_every save_steps save_interval",
        ["checkpoint.every_n_steps", "checkpoint.every_n_minutes"],
    ),
    ("save_period save_freq", ["checkpoint.every_n_steps", "checkpoint.every_n_minutes"]),
    ("resume_from_checkpoint resume_from resume_path", ["resume"]),
    ("metric metric_for_best_model eval_metric", ["checkpoint.monitor"]),
    ("jitter", ["data.augment.color_jitter"]),
    ("cutmix_alpha", ["data.augment.cutmix"]),
    ("flip", ["data.augment.hflip"]),
    ("mixup_alpha", ["data.augment.mixup"]),
    ("aa auto_augment autoaugment randaugment", ["data.augment.rand_augment"]),
    ("cutout reprob", ["data.augment.random_erasing"]),
    ("aug augment augmentation", ["data.augment.scale", "data.augment.rand_augment"]),
    ("padding", ["data.augment.pad"]),
    ("crop_pct crop_percent", ["data.crop_ratio"]),
    ("crop", ["data.augment.scale", "data.augment.pad", "data.crop_ratio"]),
    ("sampler", ["data.balance_classes", "data.sampler"]),
    ("batch bs", ["data.batch_size"]),
    (
        "imgsz resolution size input_size",
        ["data.img_size", "model.student.img_size", "model.teacher.img_size"],
    ),
    ("cpus threads", ["data.num_workers"]),
    ("dataset num_classes nc class_names", ["data.source"]),
    ("images image_root image_folder folder dir root", ["data.source.image_dir"]),
    ("labels label target target_column class_column", ["data.source.label_column"]),
    ("file filename file_name image image_id", ["data.source.path_column"]),
    ("path", ["data.source.root", "model.teacher.checkpoint"]),
    ("dir folder", ["data.source.root", "runs_dir"]),
    ("data_path root train_dir url images image_root image_folder", ["data.source.root"]),
    ("val_ratio val_split test_size", ["data.val_fraction"]),
    ("criterion loss losses distillation distill_type distillation_type", ["model.distill_losses"]),
    ("ema model_ema", ["model.ema_decay"]),
    ("student", ["model.student.arch", "model.student.checkpoint"]),
    ("architecture backbone name model model_name", ["model.student.arch", "model.teacher.arch"]),
    ("kd_model_name teacher_model teacher_name", ["model.teacher.arch"]),
    ("init_from", ["model.student.checkpoint"]),
    ("freeze_backbone", ["model.student.freeze"]),
    ("gradient_checkpointing", ["model.student.grad_checkpointing"]),
    ("layer layers", ["model.taps"]),
    ("class_weight", ["model.task.class_weights"]),
    ("smoothing", ["model.task.label_smoothing"]),
    (
        "ce_weight cls_weight hard_weight task_weight hard_label_weight",
        ["model.task_loss_weight"],
    ),
    (
        "checkpoint ckpt ckpt_path load",
        ["model.teacher.checkpoint", "model.student.checkpoint", "resume"],
    ),
    ("model_path weights", ["model.teacher.checkpoint", "model.student.checkpoint"]),
    ("teacher", ["model.teacher.checkpoint", "model.teacher.arch"]),
    ("patience", ["monitor.thresholds", "monitor.actions"]),
    ("exp_name", ["name", "recipe"]),
    ("run_name", ["name"]),
    ("llrd layerwise_lr_decay lr_decay", ["optim.layer_decay"]),
    ("learning_rate", ["optim.lr"]),
    ("cosine", ["optim.min_lr_ratio", "optim.warmup_epochs"]),
    ("eta_min lr_min min_lr", ["optim.min_lr_ratio"]),
    ("type", ["optim.name", "data.source", "model.student.arch", "model.teacher.arch"]),
    ("opt optimizer", ["optim.name"]),
    ("scheduler lr_scheduler step_size", ["optim.schedule", "optim.milestones"]),
    ("warmup warmup_steps", ["optim.warmup_epochs"]),
    ("decay", ["optim.weight_decay", "model.ema_decay"]),
    ("wd", ["optim.weight_decay"]),
    ("experiment", ["recipe"]),
    ("log_dir out out_dir output output_dir save_dir", ["runs_dir"]),
    ("device", ["trainer.accelerator", "trainer.devices"]),
    (
        "accum accumulation accumulation_steps accum_steps",
        ["trainer.accumulate_grad_batches"],
    ),
    (
        "eval_every eval_interval val_every val_interval eval_steps val_steps",
        ["trainer.check_val_every_n_epoch", "trainer.val_check_interval"],
    ),
    ("gpu", ["trainer.devices", "trainer.accelerator"]),
    ("gpus world_size", ["trainer.devices", "trainer.num_nodes"]),
    ("num_gpus n_gpus ngpus", ["trainer.devices"]),
    ("verbose", ["trainer.enable_progress_bar", "trainer.log_every_n_steps"]),
    ("progress", ["trainer.enable_progress_bar"]),
    ("dry_run", ["trainer.fast_dev_run"]),
    ("clip max_grad_norm", ["trainer.gradient_clip_val"]),
    ("log_every log_interval", ["trainer.log_every_n_steps"]),
    ("project", ["trainer.logger", "recipe"]),
    ("mlflow tensorboard wandb report_to log_wandb", ["trainer.logger"]),
    ("epoch epochs", ["trainer.max_epochs"]),
    ("iterations steps", ["trainer.max_steps"]),
    ("nodes", ["trainer.num_nodes"]),
    ("amp bf16 dtype fp16 fp32", ["trainer.precision"]),
    ("backend", ["trainer.strategy", "trainer.accelerator"]),
    ("sync_bn", ["trainer.sync_batchnorm"]),
    ("t tau temp", [f"{LOSS}.temperature"]),
    ("alpha lambda loss_weight", [f"{LOSS}.weight", "model.task_loss_weight"]),
    ("distillation_weight gamma kd_weight soft_weight", [f"{LOSS}.weight"]),
)
SYNONYMS: dict[str, list[str]] = {}
"""The keys of each word of :data:`WORDS`; ``{loss}`` in a key stands for each distillation loss of the recipe."""
for _words, _keys in WORDS:
    for _word in _words.split():
        SYNONYMS.setdefault(_word, []).extend(_keys)
NEEDLESS = {
    "num_classes": "the number of classes is that of the pictures (data.source)",
    "nc": "the number of classes is that of the pictures (data.source)",
    "overwrite": "each run has a folder of its own; name=NAME names it, runs_dir=DIR has others",
    "exist_ok": "each run has a folder of its own; name=NAME names it, runs_dir=DIR has others",
    "save_top_k": "a run keeps its best and its newest state; checkpoint.monitor=val/METRIC says which is best",
    "early_stopping": "monitor.actions.Overtraining=stop ends a run that gets worse",
    "early_stop": "monitor.actions.Overtraining=stop ends a run that gets worse",
    "interpolation": "pictures are resized as the models were trained, which no setting changes",
}
"""Keys of other programs that no setting replaces, and why."""
ARCHITECTURE = frozenset(  # timm's arguments of an architecture: they go below .kwargs
    [
        "act_layer",
        "attn_drop_rate",
        "block_size",
        "class_token",
        "depth",
        "depths",
        "drop",
        "drop_block_rate",
        "drop_path",
        "drop_path_rate",
        "drop_rate",
        "dropout",
        "embed_dim",
        "embed_dims",
        "fc_norm",
        "features_only",
        "global_pool",
        "head_dim",
        "heads",
        "hidden_dim",
        "in_chans",
        "init_values",
        "layer_norm",
        "mlp_ratio",
        "no_embed_class",
        "norm_layer",
        "num_heads",
        "patch_drop_rate",
        "patch_size",
        "pos_drop_rate",
        "pos_embed",
        "proj_drop_rate",
        "qk_norm",
        "qkv_bias",
        "reg_tokens",
        "stem_width",
        "weight_init",
        "width",
        "window_size",
    ]
)
OPTIMIZER = frozenset(["betas", "momentum", "nesterov", "eps"])
"""Arguments of optimizers, which go below ``optim.kwargs``."""
MEANT = {"heads": "num_heads", "hidden_dim": "embed_dim", "drop_path": "drop_path_rate", "dropout": "drop_rate",
         "drop": "drop_rate", "width": "embed_dim"}  # fmt: skip
"""Words for arguments of an architecture -> timm's name."""


def suggest(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> list[str]:
    """The accepted keys that ``key`` may mean.

    The last part decides, whole or by its words (``mixup_alpha``): an accepted key that ends in it, a synonym, or
    else one that is spelt alike. The words before it choose between those found (a student's key for a student's).
    An argument of optimizers or of timm's architectures that no accepted key ends in is suggested below ``kwargs``.

    Args:
        key: what was given.
        accepted: all keys that would be taken.
        losses: names of the recipe's distillation losses; empty: ``kd``.

    Returns:
        At most :data:`MOST`, the likeliest first; no accepted key is suggested for itself.

    >>> suggest("lr", ["optim.lr", "seed", "optim.lr_batch"])
    ['optim.lr']
    >>> suggest("model.student.drop_path_rate", [])
    ['model.student.kwargs.drop_path_rate']
    """
    known = list(accepted)
    by_last_part: dict[str, list[str]] = {}
    for name in known:
        _, _, last_part = name.rpartition(".")
        by_last_part.setdefault(last_part, []).append(name)
    synonyms = _synonyms(known, list(losses) or ["kd"])

    *above, last = key.lower().replace("-", "_").split(".")
    if last in OPTIMIZER and last not in by_last_part:
        return [f"optim.kwargs.{last}"]
    if last in ARCHITECTURE and last not in by_last_part:
        of_teacher = any("teacher" in part for part in [*above, last])
        side = "teacher" if of_teacher else "student"
        return [f"model.{side}.kwargs.{MEANT.get(last, last)}"]

    candidates: list[str] = []
    for words in _runs(last):
        candidates = synonyms.get(words, []) + by_last_part.get(words, [])
        if candidates:
            break
    if not candidates:
        words_known = [*by_last_part, *synonyms]
        for words in difflib.get_close_matches(last, words_known, MOST, 0.75):
            candidates += by_last_part.get(words, [])
            candidates += synonyms.get(words, [])
    if not candidates:
        candidates = difflib.get_close_matches(key, known, 1, 0.75)

    # of several the ones whose groups the key names too: a student's key for a student's
    context = {*above, *last.split("_")}
    shared = {}
    for name in candidates:
        *groups, _ = name.split(".")
        shared[name] = len(context.intersection(groups))
    most_shared = max(shared.values(), default=0)
    nearest = []
    for name, count in shared.items():
        if count == most_shared and name != key:
            nearest.append(name)
    return nearest[:MOST]


def _synonyms(known: Container[str], losses: Sequence[str]) -> dict[str, list[str]]:
    """The known keys that each word of :data:`SYNONYMS` means; ``{loss}`` in a key is each of ``losses``."""
    synonyms: dict[str, list[str]] = {}
    for word, names in SYNONYMS.items():
        of_word = []
        for name in names:
            of_losses = [name.format(loss=loss) for loss in losses]
            of_word += [key for key in of_losses if key in known]
        synonyms[word] = of_word
    return synonyms


def _runs(name: str) -> list[str]:
    """Runs of a name's words, the longest first, the last ones before the first ones.

    >>> _runs("mixup_alpha")
    ['mixup_alpha', 'alpha', 'mixup']
    """
    words = name.split("_")
    runs: list[str] = []
    count = len(words)
    for size in range(count, 0, -1):
        for first in range(count - size, -1, -1):
            run = words[first : first + size]
            runs.append("_".join(run))
    return runs


def hint(key: str, accepted: Iterable[str], losses: Iterable[str] = ()) -> str:
    """What follows an unknown key in a message: why there is no such setting, suggestions, which keys its group takes, or
    where all keys are listed.

    Args:
        key: as given.
        accepted: all keys that would be taken.
        losses: names of the recipe's distillation losses.
    """
    known = list(accepted)
    place, _, last = key.rpartition(".")
    why = NEEDLESS.get(last.lower())
    if why:
        return f": {why}"
    names = suggest(key, known, losses)
    siblings = [name for name in known if place.count(".") and name.startswith(f"{place}.")]
    if any(name.startswith(f"{place}.") and name != key for name in names):
        return as_question(names)
    if key == "data.source.root":
        return ": the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder"
    if siblings:  # what was right is kept
        return f" ({place} takes {', '.join(name.rpartition('.')[2] for name in siblings)})"
    return as_question(names) or " (kd-train --keys)"


def near(given: object, names: Iterable[str], most: int = 1) -> str:
    """The names that are spelt alike, as the end of a message; "" where none is.

    Args:
        given: the unknown name.
        names: the known ones.
        most: how many to suggest.
    """
    return as_question(nearest(given, names, most))


def nearest(given: object, names: Iterable[str], most: int = 1) -> list[str]:
    """The names that begin with what was given, the shortest first, or else those that are spelt like it; at most
    ``most``.
    """
    known = {name.lower(): name for name in names}
    text = str(given).lower()
    begin = sorted(
        (name for name in known if text and name.startswith(text)),
        key=lambda name: (len(name), name),
    )
    return [
        known[name] for name in (begin or difflib.get_close_matches(text, known, most, 0.6))[:most]
    ]


def as_question(names: Iterable[str]) -> str:
    """Names as a question at the end of a message; "" for no names.

    >>> as_question(["a", "b", "c"])
    "; did you mean 'a', 'b' or 'c'?"
    """
    quoted = [f"'{name}'" for name in names]
    if not quoted:
        return ""
    *others, last = quoted
    if not others:
        return f"; did you mean {last}?"
    return f"; did you mean {', '.join(others)} or {last}?"
