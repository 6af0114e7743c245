"""Suggestions for an unknown key."""

import re

import pytest

from kd.errors import UserError
from kd.run import keys
from kd.run.request import translate, underscored
from tests._helpers import Command


def test_several_numbers_after_an_option_are_one_value() -> None:
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
    prints: Command,
) -> None:
    shown = prints("train", ["--keys", "data.source", "data.source=Manifest"])
    assert "data.source.image_dir" in shown and "data.source.label_column" in shown
    assert "data.source.train_per_class" not in prints(
        "train", ["--keys", "data.source", "recipe=foodtag_vit", "data.source=Manifest"]
    )


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
