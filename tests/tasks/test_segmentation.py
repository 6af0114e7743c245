"""Semantic segmentation: masks, joint views, metrics against NumPy, a run end to end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from kd.cli import train_main
from kd.data.datamodule import DistillationDataModule
from kd.data.pictures import decode
from kd.data.scan import scan
from kd.data.sources import SegmentationFolder
from kd.distill.inherit import inherit_together
from kd.models import ModelSpec, build_model, preprocess_for
from kd.models.segmenter import DenseModel
from kd.settings import Augment
from kd.ship.export import load_student
from kd.tasks import Segmentation
from kd.tasks.base import TargetCounts
from kd.teachers.answer_codec import TopK
from tests._helpers import ARCH, TINY, Command, refuses, save_teacher
from tests._runs import evaluated, losses, run, run_folders, summary_of
from tests._scenes import NAMES, draw, recipe_of


@pytest.fixture()
def root(tmp_path: Path) -> Path:
    return draw(tmp_path / "scenes")


def test_a_teacher_is_trained_and_teaches_a_convolutional_student(
    tmp_path: Path, root: Path, prints: Command
) -> None:
    """A dense ViT learns from masks, then teaches by CWD and per-pixel KD; then kd-eval, then pictures."""
    recipe = recipe_of(tmp_path, root)
    run(recipe)
    (first,) = run_folders(recipe)
    taught = summary_of(first)["student"]["best_val"]
    assert taught["miou"] > 0.7
    assert "iou_00" in taught
    assert "iou_02" not in taught  # the class that never occurs counts for nothing
    teacher = {
        "arch": ARCH,
        "img_size": [24, 32],
        "kwargs": {**TINY, "depth": 4},
        "checkpoint": str(first),
    }
    recipe = recipe_of(
        tmp_path, root, teacher=teacher, student={"arch": "resnet10t", "img_size": [24, 32]},
        distill_losses={"cwd": {"class_path": "CWDLoss"}, "pixel": {"class_path": "PixelKDLoss"}},
    )  # fmt: skip
    out = prints("train", [f"recipe={recipe}", "trainer.max_epochs=3"])
    assert "reaches miou" in out
    folder = run_folders(recipe)[-1]
    summary = summary_of(folder)
    assert summary["teacher"]["val"]["miou"] == pytest.approx(taught["miou"], abs=0.02)
    assert set(summary["student"]["val"]) >= {"miou", "pixel_acc", "agreement"}
    found = evaluated(folder)["student"]
    assert found["miou"] == pytest.approx(summary["student"]["best_val"]["miou"], abs=0.02)
    model, preprocess, classes = load_student(folder / "student.safetensors")
    assert model(torch.zeros(1, 3, *preprocess.size)).shape == (1, 3, 24, 32)
    assert classes == NAMES


def test_a_dense_student_as_large_as_its_teacher_starts_as_its_equal() -> None:
    """Nothing is cut, so what is fitted must be what the teacher computes."""
    torch.manual_seed(0)
    spec = ModelSpec(ARCH, (24, 32), kwargs={**TINY, "depth": 4})
    teacher, student = (build_model(spec, 3, "model.student", dense=True).eval() for _ in range(2))
    pictures = torch.randint(0, 256, (64, 3, 24, 32), dtype=torch.uint8)
    as_input = preprocess_for(student, (24, 32))

    def agreement() -> float:
        answers = [model(as_input(pictures)).argmax(1) for model in (student, teacher)]
        return torch.eq(*answers).float().mean().item()

    before = agreement()
    random_state = torch.get_rng_state()
    inherit_together([(student, as_input)], teacher, pictures, as_input)
    assert torch.equal(torch.get_rng_state(), random_state), "the fit draws random numbers"
    assert agreement() > max(0.9, before + 0.1)


def test_picture_and_mask_are_cropped_and_flipped_together(root: Path) -> None:
    source = SegmentationFolder(str(root), NAMES, 9)
    data = DistillationDataModule(
        source,
        img_size=(24, 32),
        batch_size=8,
        num_workers=0,
        augment=Augment(scale=0.3, hflip=0.5),
    )
    batch = next(iter(data.train_dataloader()))
    assert batch["target"].shape == (8, 24, 32)
    assert batch["target"].dtype == torch.uint8
    red = batch["image"][:, 0] > 115
    valid = batch["target"] != 9
    agree = (red == (batch["target"] == 0))[valid].float().mean()
    assert agree > 0.97
    assert len({tuple(t.flatten().tolist()) for t in batch["target"]}) == 8


@pytest.mark.parametrize("ignored", [255, 0], ids=["beyond the classes", "one of the classes"])
def test_metrics_against_numpy(ignored: int) -> None:
    rng = np.random.RandomState(0)
    task, counts = Segmentation(), TargetCounts(4, ignored)
    task.build(4, ignore_index=ignored)
    logits, target = rng.normal(size=(2, 3, 4, 5, 6)), rng.choice([0, 1, 3], (2, 3, 5, 6))
    target[rng.rand(*target.shape) < 0.2] = ignored
    logits[:, :, 2] = -99  # class 2 occurs nowhere
    for x, y in zip(logits, target, strict=True):
        task.update(torch.tensor(x), torch.tensor(y), torch.tensor(x).argmax(1).to(torch.uint8))
        counts.update(torch.tensor(y))
    found = task.compute()
    prediction, valid = logits.argmax(2), target != ignored
    assert counts.compute()[0].tolist() == [(target[valid] == c).sum() for c in range(4)]
    ious = []
    for c in {0, 1, 3} - {ignored}:
        a, b = (prediction == c) & valid, (target == c) & valid
        ious.append((a & b).sum() / (a | b).sum())
    assert found["miou"].item() == pytest.approx(np.mean(ious))
    assert found["iou_03"].item() == pytest.approx(ious[-1])
    assert found["pixel_acc"].item() == pytest.approx((prediction == target)[valid].mean())
    assert found["agreement"].item() == 1
    assert "iou_02" not in found
    assert "miou_of_targets" not in found  # both definitions agree
    assert ("iou_00" in found) == (ignored != 0)


def test_an_ignored_class_takes_no_part_in_fidelity_and_drawings() -> None:
    rng = np.random.RandomState(0)
    task = Segmentation()
    task.settle(3, 0)
    logits, taught = (torch.tensor(rng.normal(size=(2, 3, 4, 4))).float() for _ in range(2))
    target = torch.tensor(rng.randint(0, 3, (2, 4, 4)).astype(np.uint8))
    task.update(logits, target, task.decide(taught))
    fidelity = task.fidelity(3)
    fidelity.update(logits, taught, target, torch.arange(2))
    found = fidelity.result(["void", "a", "b"])
    assert found["agreement"] == pytest.approx(task.compute()["agreement"].item())
    assert [row["name"] for row in found["per_class"]] == ["a", "b"]
    (mistake, *_) = fidelity.mistakes["both_wrong"]
    truth = target[-mistake.negative_index]
    assert ((mistake.entry["truth"] < 0) == (truth == 0)).all()


def test_a_class_that_is_only_predicted_is_told_by_both_definitions() -> None:
    """0 in the mean over the classes of targets and predictions, no part of the mean over those of the targets."""
    rng = np.random.RandomState(0)
    task = Segmentation(4, 255)
    task.settle(4, 255)
    predicted, target = rng.randint(0, 4, (3, 8, 8)), rng.randint(0, 3, (3, 8, 8))
    target[:, :2] = 255
    task.update(torch.eye(4)[torch.tensor(predicted)].movedim(-1, 1), torch.tensor(target), None)
    valid = target != 255
    ious = [((predicted == c) & (target == c)).sum() / (((predicted == c) | (target == c)) & valid).sum()
            for c in range(3)]  # fmt: skip
    found = task.compute()
    assert found["miou_of_targets"].item() == pytest.approx(np.mean(ious))
    assert found["miou"].item() == pytest.approx(np.sum(ious) / 4)
    assert found["iou_03"] == 0


def test_the_loss_leaves_out_ignored_and_foreign_pixels() -> None:
    task = Segmentation()
    task.build(3, ignore_index=9)
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    target = torch.randint(0, 3, (2, 4, 4))
    target[0, :2] = 9
    target[1, 0] = 255
    known = target < 3
    wanted = torch.nn.functional.cross_entropy(logits.permute(0, 2, 3, 1)[known], target[known])
    torch.testing.assert_close(task.loss(logits, target.to(torch.uint8)), wanted)
    nothing = task.loss(logits, torch.full((2, 4, 4), 9, dtype=torch.uint8))
    nothing.backward()
    assert nothing.item() == 0
    assert logits.grad.abs().max() == 0
    task.build(3, ignore_index=0)  # one of the classes
    wanted = torch.nn.functional.cross_entropy(logits, target.where(target < 3, 0), ignore_index=0)
    torch.testing.assert_close(task.loss(logits, target.to(torch.uint8)), wanted)


@pytest.mark.parametrize(
    ("arch", "kwargs"),
    [(ARCH, TINY), ("resnet10t", {}), ("mobilenetv3_small_050", {}), ("convnext_atto", {}),
     ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)})],
)  # fmt: skip
def test_dense_models_of_many_kinds_use_all_their_parameters(arch: str, kwargs: dict) -> None:
    model = build_model(ModelSpec(arch, 64, kwargs=kwargs), 5, "model.student", dense=True)
    assert isinstance(model, DenseModel)
    logits = model(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, 5, 64, 64)
    logits.sum().backward()
    assert [
        name for name, p in model.named_parameters() if p.grad is None
    ] == []  # DDP would stop at one


def test_a_backbone_from_a_classifiers_checkpoint(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "classifier.safetensors")
    model = build_model(
        ModelSpec(ARCH, (24, 40), checkpoint=str(file), kwargs=TINY), 3, "model.student", dense=True
    )
    again = build_model(ModelSpec(ARCH, (24, 40), kwargs=TINY), 3, "model.student", dense=True)
    from safetensors.torch import load_file

    weights = load_file(file)
    assert torch.equal(model.backbone.blocks[1].mlp.fc1.weight, weights["blocks.1.mlp.fc1.weight"])
    assert not torch.equal(
        again.backbone.blocks[1].mlp.fc1.weight, weights["blocks.1.mlp.fc1.weight"]
    )
    assert model.backbone.pos_embed.shape[1] == 3 * 5 + 1
    with refuses("head.levels.0.weight is missing"):
        build_model(
            ModelSpec(ARCH, 32, checkpoint=str(file), kwargs=TINY),
            3,
            "model.teacher",
            head=True,
            dense=True,
        )


# -- damaged data ----------------------------------------------------------------------------------------------------


def save(path: Path, array: np.ndarray) -> None:
    Image.fromarray(array.astype(np.uint8)).save(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: save(p, np.zeros((30, 39))), "has 39x30 pixels, not 40x30"),
        (
            lambda p: save(p, np.full((30, 40), 7)),
            r"holds the value 7, not one of 0..2 and 9 \(ignored\)",
        ),
        (lambda p: save(p, np.zeros((30, 40, 3))), "must hold one byte a pixel, not colours"),
        (lambda p: p.write_bytes(p.read_bytes()[:40]), "can't be read"),
    ],
)
def test_damaged_masks_are_named_by_path(damage, message: str, root: Path) -> None:
    mask = root / "masks/train/3.png"
    damage(mask)
    data = DistillationDataModule(
        SegmentationFolder(str(root), NAMES, 9), img_size=(24, 32), batch_size=4
    )
    with refuses(rf"1 damaged picture: .*3.jpg \(its mask .*3.png.* ?{message}"):
        data.prepare_data()
    skipping = DistillationDataModule(
        SegmentationFolder(str(root), NAMES, 9),
        img_size=(24, 32),
        batch_size=4,
        on_bad_image="skip",
    )
    assert skipping.info.train == 7


def test_masks_are_checked_anew_once_other_values_are_allowed(root: Path) -> None:
    """A check is cached: the settings by which it has refused masks must have an effect when they are mended."""
    without_ignored = SegmentationFolder(str(root), NAMES).load("train")
    assert "holds the value 9, not one of 0..2" in scan(without_ignored, "train").damaged[0]
    split = SegmentationFolder(str(root), NAMES, 9).load("train")
    assert not scan(split, "train").damaged
    save(root / "masks/train/3.png", np.full((30, 40), 2))
    split = SegmentationFolder(str(root), NAMES, 9).load("train")
    assert not scan(split, "train").damaged
    two_classes = SegmentationFolder(str(root), NAMES[:2], 9).load("train")
    assert len(scan(two_classes, "train").damaged) == 1


def turn(file: Path, orientation: int) -> None:
    """Gives a picture's file an EXIF orientation; its pixels stay."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    with Image.open(file) as image:
        image.load()
        image.save(file, exif=exif)


@pytest.mark.parametrize(
    ("of_picture", "of_mask", "size_of_mask", "is_read"),
    [
        (3, None, None, False), (6, None, None, False), (2, 3, None, False), (3, 3, None, True),
        (6, 6, None, True), (6, None, (30, 40), True), (1, None, None, True), (0, None, None, True),
    ],
)  # fmt: skip
def test_a_mask_that_may_be_turned_or_not_is_refused_by_every_reader(
    of_picture: int, of_mask: int | None, size_of_mask: Any, is_read: bool, root: Path
) -> None:
    """The pictures have 40 x 30 pixels; a mask of 30 x 40 is of the picture as it is shown."""
    picture, mask = root / "images/train/3.jpg", root / "masks/train/3.png"
    turn(picture, of_picture)
    if size_of_mask:
        Image.new("L", size_of_mask).save(mask)
    if of_mask:
        turn(mask, of_mask)
    split = SegmentationFolder(str(root), NAMES, 9).load("train")
    for check in ("all", "headers"):
        damaged = scan(split, "train", check).damaged
        assert list(damaged) == ([] if is_read else [3])
        assert is_read or damaged[3].startswith(
            f"its EXIF orientation is {of_picture}, and that of its mask"
        )
    if is_read:
        assert decode(split.read(3)).shape[1:] == split.target(3).shape[1:]
    else:
        with pytest.raises(RuntimeError, match="whether the mask is turned too is not known"):
            split.read(3)


def test_a_mask_is_turned_as_its_picture_is(root: Path) -> None:
    """Both say by EXIF that they lie on their side."""
    split = SegmentationFolder(str(root), NAMES, 9).load("train")
    before = split.target(3)
    for file in (root / "images/train/3.jpg", root / "masks/train/3.png"):
        turn(file, 6)
    assert torch.equal(split.target(3), before.rot90(-1, (1, 2)))
    assert decode(split.read(3)).shape[1:] == split.target(3).shape[1:]
    split.check_mask(3, *split.target(3).shape[1:])


def test_pictures_without_a_mask_need_a_value_that_is_no_class(root: Path) -> None:
    """With 255 classes and 255 ignored none is left: all their pixels were class 254."""
    names = [f"c{i}" for i in range(255)]
    settings = {"img_size": 32, "batch_size": 2, "unlabeled": str(root / "images" / "train")}
    full = DistillationDataModule(
        SegmentationFolder(str(root), class_names=names, ignore_index=255), **settings
    )
    with refuses(r"data.unlabeled: 255 classes and ignore_index=255 take"):
        full.split("train")
    for source in (
        SegmentationFolder(str(root), class_names=names),
        SegmentationFolder(str(root), class_names=names[:254], ignore_index=255),
    ):
        assert len(DistillationDataModule(source, **settings).split("train").targets) > 2


def test_a_missing_mask_and_a_missing_folder(root: Path) -> None:
    (root / "masks/val/2.png").unlink()
    with refuses(r"data.source.root: mask .*masks/val/2.png not found"):
        SegmentationFolder(str(root), NAMES, 9).load("val")
    with refuses(r"data.source.root: folder .*images/test not found"):
        SegmentationFolder(str(root), NAMES, 9).load("test")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["data.augment.mixup=0.5"], "data.augment.mixup: is not defined for masks"),
        (["data.augment.rand_augment=9"], "data.augment.rand_augment: is not defined for masks"),
        (
            ["model.task=Classification"],
            "model.task: Classification needs one label a picture, data.source gives masks",
        ),
        (["model.student.arch=vgg11x"], "model.student.arch: must be one of timm's models"),
        *[([f"model.distill_losses.x={name}"], f"distill_losses.x: {name} is not defined for masks; PixelKDLoss")
          for name in ("KDLoss", "WSLDLoss")],
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(
    items: list[str], message: str, tmp_path: Path, root: Path, refusal: Command
) -> None:
    teacher = {"arch": ARCH, "img_size": [24, 32], "kwargs": TINY}
    recipe = recipe_of(tmp_path, root, teacher=teacher)
    assert message in refusal("train", [f"recipe={recipe}", "preflight=warn", *items])


def test_views_of_the_device_and_packs_have_no_masks(
    root: Path, tmp_path: Path, refusal: Command
) -> None:
    recipe = recipe_of(tmp_path, root)
    assert "data.engine: masks need data.engine=torch or ray, got device" in refusal(
        "train", [f"recipe={recipe}", "data.engine=device"]
    )
    assert "kd-pack packs pictures with one label each, not masks" in refusal(
        "pack", [f"recipe={recipe}", f"out={tmp_path / 'pack'}"]
    )


def test_answers_for_every_pixel_are_cached(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    """In half precision; of the largest alone: the next test."""
    recipe = recipe_of(tmp_path, root)
    run(recipe, "trainer.max_epochs=1")
    teacher = {"arch": ARCH, "img_size": [24, 32], "kwargs": {**TINY, "depth": 4},
               "checkpoint": str(run_folders(recipe)[0])}  # fmt: skip
    recipe = recipe_of(
        tmp_path, root, teacher=teacher, distill_losses={"pixel": {"class_path": "PixelKDLoss"}}
    )
    items = [
        f"recipe={recipe}",
        "trainer.max_epochs=2",
        "trainer.precision=32-true",
        "preflight=off",
    ]
    assert train_main(items) == 0
    live = losses(run_folders(recipe)[-1])
    cache = ["model.teacher.cache_views=2", f"model.teacher.cache_dir={tmp_path / 'answers'}"]
    capsys.readouterr()
    found = []
    for mode in ("on", "only"):
        assert train_main([*items, *cache, f"model.teacher.cache={mode}"]) == 0
        found.append(losses(run_folders(recipe)[-1]))
    assert "bytes an answer (format " in capsys.readouterr().out
    assert found[0] == found[1]
    for step, value in live.items():
        assert found[0][step] == pytest.approx(value, abs=1e-3, rel=1e-3)
    kept = summary_of(run_folders(recipe)[-1])["cache"]
    assert (kept["answers_read"], kept["answers_computed"]) == (16, 0)
    cwd = [
        "model.distill_losses.cwd=CWDLoss",
        "model.teacher.cache=on",
        "model.teacher.cache_topk=2",
    ]
    assert "model.teacher.cache_topk: CWDLoss needs all logits" in refusal("train", [*items, *cwd])


@pytest.mark.parametrize("k", [1, 5, 299])
def test_the_largest_at_each_pixel_are_exact_and_the_mass_of_the_others_too(k: int) -> None:
    z = 4 * torch.randn(2, 300, 3, 5, generator=torch.Generator().manual_seed(0))
    codec = TopK((300, 3, 5), k, ())
    back = codec.decode(codec.encode(z))
    values, places = z.topk(k, dim=1)
    assert (back.gather(1, places) - values).abs().max() < 0.02
    mass = torch.ones_like(z).scatter(1, places, 0) * z.softmax(1)
    there = torch.ones_like(z).scatter(1, places, 0) * back.softmax(1)
    torch.testing.assert_close(there.sum(1), mass.sum(1), rtol=2e-2, atol=1e-4)
