"""Suggestions for an unknown key."""

import pytest

from kd.cli import train_main
from kd.config.suggest import _runs, hint, suggest
from kd.errors import UserError
from kd.run.request import translate, underscored


def test_suggest() -> None:
    assert suggest("lr", ["optim.lr", "seed", "optim.lr_batch"]) == ["optim.lr"]
    assert suggest("model.student.drop_path_rate", []) == ["model.student.kwargs.drop_path_rate"]


def test_runs() -> None:
    assert _runs("base_lr") == ["base_lr", "lr", "base"]


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
    "data.source.labels=x": "data.source=Manifest takes data.source.label_column",
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
