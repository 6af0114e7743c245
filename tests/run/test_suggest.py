"""Suggestions for an unknown key."""

import re

import pytest

from kd.cli import train_main
from kd.config.suggest import hint, suggest
from kd.errors import UserError
from kd.run import keys
from kd.run.request import translate, underscored


def test_suggest() -> None:
    assert suggest("lr", ["optim.lr", "seed", "optim.lr_batch"]) == ["optim.lr"]
    assert suggest("model.student.drop_path_rate", []) == ["model.student.kwargs.drop_path_rate"]


def test_hint() -> None:
    assert (
        hint("data.source.root", ["data.source.root"])
        == ": the data.source of this recipe has none; data.source=ImageFolder data.source.root=DIR reads a folder"
    )


FOREIGN = {  # as other programs spell it -> what the message suggests, in a recipe with several losses
    "--model.distill_losses.kd.T=2": "'model.distill_losses.kd.temperature'?",
    "model.distill_losses.kd.tau=2": "'model.distill_losses.kd.temperature'?",
    "model.distill_losses.kd.alpha=2": "'model.distill_losses.kd.weight'?",
    "T=2": "'model.distill_losses.kd.temperature'?",
    "model.distill_losses.patches.T=2": "(model.distill_losses.patches takes projection, standardize, weight)",
    "resume_from_checkpoint=x": "'resume'?",
    "grad_accum_steps=2": "'trainer.accumulate_grad_batches'?",
    "save_steps=2": "'checkpoint.every_n_steps'",
    "eval_steps=2": "'trainer.val_check_interval'?",
    "report_to=wandb": "'trainer.logger'?",
    "save_period=2": "'checkpoint.every_n_steps'",
    "--log-wandb": "'trainer.logger=...'?",
    "--model-ema": "'model.ema_decay=...'?",
    "metric_for_best_model=acc": "'checkpoint.monitor'?",
    "--kd-distill-type=soft": "'model.distill_losses'?",
    "--kd-model-name=resnet50": "'model.teacher.arch'?",
    "aa=rand": "'data.augment.rand_augment'?",
    "auto_augment=rand": "'data.augment.rand_augment'?",
    "--crop-pct=0.9": "'data.crop_ratio'?",
    "--drop=0.1": "'model.student.kwargs.drop_rate'?",
    "project=x": "'trainer.logger'",
    "interpolation=bicubic": "no setting changes",
    "--input-size=224": "'data.img_size'",
    "data.num_classes=3": "is that of the pictures",
    "optim.scheduler=cosine": "'optim.schedule'",
    "model.student.drop_path_rate=0.1": "'model.student.kwargs.drop_path_rate'?",
    "--batch-size=8": "'data.batch_size'?",
}


@pytest.mark.parametrize("word", FOREIGN)
def test_spellings_of_other_programs(word: str) -> None:
    with pytest.raises(UserError) as raised:
        translate(["recipe=grocery_vit", word]).resolved()
    assert FOREIGN[word] in str(raised.value)


def test_three_numbers_after_an_option_are_one_value() -> None:
    with pytest.raises(UserError, match="no key 'input_size'; did you mean 'data.img_size'"):
        translate(["recipe=grocery_vit", "--input-size", "3", "224", "224"]).resolved()
    request = translate(["--data.img-size", "32", "48", "recipe=grocery_vit"])
    assert request.resolved()["data"]["img_size"] == (32, 48)


def test_a_hyphen_is_an_underscore_but_in_names() -> None:
    assert underscored("model.distill_losses.my-kd.final-temperature").endswith(
        "my-kd.final_temperature"
    )
    settings = translate(["recipe=grocery_vit", "data.batch-size=9", "--optim.weight-decay", "0.1"])
    config = settings.resolved()
    assert config["data"]["batch_size"] == 9 and config["optim"]["weight_decay"] == 0.1


def test_keys_lists_the_arguments_of_the_class_that_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_main(["--keys", "data.source", "data.source=Manifest"]) == 0
    shown = capsys.readouterr().out
    assert "data.source.image_dir" in shown and "data.source.label_column" in shown
    assert train_main(["--keys", "data.source", "recipe=foodtag_vit", "data.source=Manifest"]) == 0
    assert "data.source.train_per_class" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["root", "dir", "folder"])
def test_a_manifests_folder(name: str) -> None:
    words = ["data.source=Manifest", "data.source.train=train.csv", f"data.source.{name}=pictures"]
    with pytest.raises(UserError, match=r"did you mean 'data.source.image_dir'\?"):
        translate(["recipe=grocery_vit", *words]).resolved()


WORDS = """
aa amp aug_repeats aug_splits auto_augment batch_size bce_loss bn_eps bn_momentum checkpoint_hist clip_grad clip_mode
color_jitter cooldown_epochs crop_pct cutmix cutmix_minmax data_dir dataset decay_epochs decay_rate dist_bn drop
drop_block drop_path epochs epoch_repeats eval_metric experiment fast_norm fuser gp grad_accum_steps
grad_checkpointing head_init_scale hflip img_size initial_checkpoint input_size interpolation jsd_loss kd_model_name
kd_distill_type layer_decay log_interval log_wandb lr lr_base lr_cycle_decay lr_noise mean min_lr mixup mixup_mode
mixup_off_epoch mixup_prob mixup_switch_prob model model_ema model_ema_decay momentum no_aug no_prefetcher num_classes
opt opt_betas opt_eps output patience_epochs pin_mem pretrained ratio recount recovery_interval remode reprob resplit
save_images scale sched seed smoothing split_bn std sync_bn synchronize_step teacher test_split torchcompile
train_interpolation train_split use_multi_epochs_loader val_split validation_batch_size vflip warmup_epochs warmup_lr
weight_decay worker_seeding workers agnostic_nms augment batch box cache classes close_mosaic copy_paste cos_lr data
degrees deterministic device dropout erasing exist_ok fliplr flipud fraction freeze hsv_h hsv_s hsv_v imgsz lr0 lrf
mosaic multi_scale name nbs optimizer overlap_mask patience perspective plots pose profile project rect save
save_period shear single_cls time translate val verbose warmup_bias_lr warmup_momentum adam_beta1 adam_epsilon bf16
dataloader_num_workers ddp_find_unused_parameters do_train do_eval eval_steps evaluation_strategy fp16 fsdp
gradient_accumulation_steps gradient_checkpointing greater_is_better hub_model_id label_smoothing_factor learning_rate
load_best_model_at_end logging_dir logging_steps lr_scheduler_type max_grad_norm max_steps metric_for_best_model
num_train_epochs optim output_dir overwrite_output_dir per_device_eval_batch_size per_device_train_batch_size
push_to_hub remove_unused_columns report_to resume_from_checkpoint run_name save_steps save_strategy save_total_limit
temperature alpha tf32 torch_compile warmup_ratio warmup_steps accelerator benchmark callbacks ckpt_path
data.init_args devices enable_checkpointing gradient_clip_val limit_train_batches log_every_n_steps max_epochs
num_nodes num_sanity_val_steps precision profiler strategy val_check_interval checkpoint embed_dim loader_args method
method_args num_workers optim_args out overwrite transform_args T tau beta gamma kd_weight hard_weight soft_weight
temp student_model teacher_model distill_type feature_layers hint_layer debugger_hook_config distribution
instance_count instance_type max_run max_wait profiler_config use_spot_instances volume_size
"""
"""Settings of timm, Ultralytics, Hugging Face, LightlyTrain, Lightning, other distillation code and SageMaker."""


def test_words_of_other_programs_are_answered() -> None:
    """By a setting that there is, or by why there is none; not by a list of all settings."""
    known, unanswered = {*keys.schema()}, []
    for word in WORDS.split():
        with pytest.raises(UserError) as raised:
            translate(["recipe=grocery_vit", f"{word}=1.5"]).resolved()
        line = str(raised.value)
        meant = re.findall(r"'([a-z_.]+)'", line.partition("; did you mean")[2])
        below = (
            "model.distill_losses.",
            "model.student.kwargs.",
            "model.task.",
            "data.source.",
            "optim.",
        )
        if not (re.search(r"': |: has settings|: must be", line) or meant) or not all(
            name in known or name.startswith(below) for name in meant
        ):
            unanswered.append(line)
    assert len(unanswered) <= 2 and len(WORDS.split()) > 205, unanswered


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("resume=true", "resume: must be a run's folder"),
        ("model.student.arch=vit-tiny", "did you mean 'vit_tiny_patch16_224'?"),
        ("strategy=horovod", "Horovod is not supported; ddp averages"),
        ("distribution=smdistributed", "config=smddp_4x8"),
    ],
)
def test_values_of_other_programs(word: str, answer: str) -> None:
    with pytest.raises(UserError) as raised:
        translate(["recipe=grocery_vit", word]).resolved()
    assert answer in str(raised.value)
