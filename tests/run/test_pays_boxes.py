"""Detectors that are fine-tuned from several starts of one backbone (``kd-eval RUN pays=DIR`` with boxes)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from kd.cli import main
from kd.data.boxes import BoxFolder, boxes_below
from kd.errors import UserError
from kd.models import Preprocess
from kd.models.own import OwnModel
from kd.report.pays import pays
from kd.report.records import read_run
from kd.run.pays_boxes import STRIDES, Budget, Pyramid, box_scores, detector_of, train_detector
from tests._helpers import ARCH, TINY, save_teacher, write_recipe

CNN = "resnet10t"
KINDS = ("bright", "dark")
BUDGET = Budget(steps=2, batch=2, proposals=8)
CPU = torch.device("cpu")
INPUT = Preprocess(64, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey pictures with a bright and a dark square, in YOLO's layout: 4 to train with, 3 to judge."""
    root = tmp_path_factory.mktemp("squares")
    rng = np.random.RandomState(0)
    for split, count in (("train", 4), ("val", 3)):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((96, 96, 3), 128, np.uint8)
            lines = []
            for kind, light in enumerate((250, 10)):
                left, top = rng.randint(0, 56, 2)
                pixels[top : top + 40, left : left + 40] = light
                lines.append(f"{kind} {(left + 20) / 96} {(top + 20) / 96} {40 / 96} {40 / 96}")
            Image.fromarray(pixels).save(root / "images" / split / f"{number}.png")
            (root / "labels" / split / f"{number}.txt").write_text("\n".join(lines))
    (root / "data.yaml").write_text(f"names: [{', '.join(KINDS)}]")
    return root


@pytest.fixture(scope="module")
def boxed(squares: Path) -> BoxFolder:
    return boxes_below(squares, "pays")


def backbone(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(CNN, num_classes=0).eval()


def weights(detector: nn.Module, backbones: bool) -> dict[str, Tensor]:
    """The tensors of the backbone, or of all above it."""
    chosen = {}
    for name, value in detector.state_dict().items():
        if name.startswith("backbone.model.") == backbones:
            chosen[name] = value.clone()
    return chosen


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_heads_are_the_same_whatever_the_backbone() -> None:
    """By their seed; the state of torch's generator is left as it was."""
    state = torch.random.get_rng_state()
    first, second, other = backbone(0), backbone(0), backbone(1)
    torch.random.set_rng_state(state)
    detectors = [
        detector_of(model, INPUT, len(KINDS), BUDGET, seed, "pays")
        for model, seed in ((first, 5), (other, 5), (second, 6))
    ]
    assert torch.equal(state, torch.random.get_rng_state())
    heads = [weights(detector, backbones=False) for detector in detectors]
    assert len(heads[0]) > 20
    assert equal(heads[0], heads[1])
    assert not equal(heads[0], heads[2])
    assert not equal(weights(detectors[0], True), weights(detectors[1], True))
    assert detectors[0].transform.image_mean == [0.5, 0.4, 0.3]


def test_the_pyramid_stands_on_the_three_maps() -> None:
    """Those that timm itself gives for these strides."""
    model = backbone(0)
    pyramid = Pyramid(model, "pays").eval()
    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        levels = pyramid(images)
        plain = timm.create_model(CNN, features_only=True, out_indices=(2, 3, 4)).eval()
        plain.load_state_dict(model.state_dict(), strict=False)
        of_timm = plain(images)
        maps = pyramid.maps(images)
    for stride, level, by_timm, ours in zip(STRIDES, levels.values(), of_timm, maps, strict=True):
        assert level.shape[2:] == (64 // stride, 96 // stride)
        assert torch.allclose(by_timm, ours, atol=1e-5)


@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "resnetv2_50x1_bit"])
def test_other_models_are_refused_or_have_the_maps(arch: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(arch, num_classes=0)
    if arch.startswith("vit"):
        with pytest.raises(UserError, match="pays: a detector needs a CNN with maps of strides"):
            Pyramid(model, "pays")
    else:
        assert isinstance(Pyramid(model, "pays"), nn.Module)


def own(width: int = 8, last: int = 2) -> OwnModel:
    """A builder's backbone that timm does not know: its maps in a tuple."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
            self.p3 = nn.Conv2d(4, width, 3, 2, 1)
            self.p4 = nn.Conv2d(width, width + 2, 3, 2, 1)
            self.p5 = nn.Conv2d(width + 2, width + 4, 3, last, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            p3 = self.p3(self.stem(x))
            p4 = self.p4(p3)
            return p3, p4, self.p5(p4)

    torch.manual_seed(0)
    return OwnModel(Net(), 0, (64, 64), INPUT.mean, INPUT.std)


def test_the_pyramid_stands_on_the_maps_of_a_builders_backbone(boxed: BoxFolder) -> None:
    model = own()
    pyramid = Pyramid(model, "pays").eval()
    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        levels = pyramid.maps(images)
        for level, expected in zip(levels, model.model(images), strict=True):
            assert torch.equal(level, expected)
    detector = detector_of(own(), INPUT, len(KINDS), BUDGET, 3, "pays")
    before = weights(detector, backbones=True)
    train_detector(detector, boxed.train, BUDGET, 3, CPU)
    after = weights(detector, backbones=True)
    assert all(
        not torch.equal(before[name], after[name]) for name in before if name.endswith("weight")
    )


def test_a_builders_backbone_without_the_maps_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^pays: Net has no map of 10x10 positions, one for 32 pixels"
    ):
        Pyramid(own(last=1), "pays")
    model = own()
    model.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
    with pytest.raises(
        UserError, match="^pays: a detector shows its backbone pictures of 320 px, which Sequential"
    ):
        Pyramid(model, "pays")


def test_steps_train_all_layers_and_repeat(boxed: BoxFolder) -> None:
    losses = []
    trained = []
    for _ in range(2):
        detector = detector_of(backbone(0), INPUT, len(KINDS), BUDGET, 3, "pays")
        before = weights(detector, backbones=True)
        losses.append(train_detector(detector, boxed.train, BUDGET, 3, CPU))
        trained.append(weights(detector, backbones=True))
        changed = [name for name in before if not torch.equal(before[name], trained[-1][name])]
        assert "backbone.model.layer1.0.conv1.weight" in changed
        assert "backbone.model.layer1.0.bn1.running_mean" in changed
    assert losses[0] == losses[1]
    assert equal(*trained)


def test_frozen_parts_keep_their_norms(boxed: BoxFolder) -> None:
    detector = detector_of(backbone(0), INPUT, len(KINDS), BUDGET, 3, "pays")
    detector.backbone.model.requires_grad_(False)
    before = weights(detector, backbones=True)
    heads = weights(detector, backbones=False)
    train_detector(detector, boxed.train, BUDGET, 3, CPU)
    assert equal(before, weights(detector, backbones=True))
    assert not equal(heads, weights(detector, backbones=False))


class Knows(nn.Module):
    """A detector that answers with the boxes of a list, ``shift`` pixels too far right."""

    def __init__(self, boxed: BoxFolder, shift: float, leave_out: int = 0) -> None:
        super().__init__()
        self.targets = [boxed.judged[number][1] for number in range(len(boxed.judged))]
        self.shift = shift
        self.leave_out = leave_out

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        answers = []
        for target in self.targets[: len(images)]:
            keep = target["labels"] != self.leave_out
            boxes = target["boxes"][keep] + torch.tensor([self.shift, 0, self.shift, 0])
            answers.append(
                {"boxes": boxes, "labels": target["labels"][keep], "scores": torch.ones(len(boxes))}
            )
        return answers


def test_scores_of_known_answers(boxed: BoxFolder) -> None:
    """Shifted by 8 of 40 pixels the overlap is 32 / 48: counted at 0.50 to 0.65, at four of ten thresholds."""
    pytest.importorskip("pycocotools")
    exact = box_scores(Knows(boxed, 0), boxed.judged, CPU)
    assert exact == pytest.approx({"map50": 1, "map": 1, "map50_bright": 1, "map50_dark": 1})
    shifted = box_scores(Knows(boxed, 8), boxed.judged, CPU)
    assert (shifted["map50"], shifted["map"]) == pytest.approx((1, 0.4))
    half = box_scores(Knows(boxed, 0, leave_out=2), boxed.judged, CPU)
    assert (half["map50_bright"], half["map50_dark"]) == pytest.approx((1, 0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A finished run of a CNN without a classifier."""
    root = tmp_path_factory.mktemp("pays_boxes")
    teacher = save_teacher(root / "dino.safetensors", seed=1, img_size=64)
    recipe = write_recipe(
        root / "tiny.yaml",
        pictures,
        None,
        data__img_size=64,
        data__source={"class_path": "kd.data.sources.Pictures", "init_args": {"root": str(pictures)}},
        model__teachers={"dino": {"arch": ARCH, "img_size": 64, "kwargs": TINY, "checkpoint": str(teacher)}},
        model__student={"arch": CNN, "img_size": 64, "head": False},
        model__task_loss_weight=0.0,
        model__distill_losses={"maps": {"class_path": "kd.losses.RADIOLoss", "init_args": {"standardize": "phi_s"}}},
        model__taps={"maps": {"student": "maps@stride16", "teacher": "maps"}},
        model__teacher_of={"maps": "dino"},
    )  # fmt: skip
    assert main("train", [f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    return root / "runs" / "tiny" / "000"


def test_a_missing_package_is_named_before_anything_is_trained(
    run: Path, squares: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert main("eval", [str(run), f"pays={squares}"]) == 2
    err = capsys.readouterr().err
    assert "kd-eval: pays: needs the extra boxes: " in err
    assert "pip install 'kd-train[boxes]'" in err
    assert main("eval", [str(run), f"pays={run.parent}", "steps=3"]) == 2
    assert "steps: has no effect: " in capsys.readouterr().err


def test_both_parts_are_on_the_page(
    run: Path, squares: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Boxes after labels: each call adds its part; the student as its own pre-trained start gains nothing."""
    pytest.importorskip("pycocotools")
    assert main("eval", [str(run), f"pays={pictures}", "seeds=2"]) == 0
    student = run / "student.safetensors"
    items = [f"pays={squares}", "seeds=2", "steps=2", f"pretrained={student}"]
    assert main("eval", [str(run), *items]) == 0
    out = capsys.readouterr().out
    content = json.loads((run / "pays.json").read_text())
    detector = content["detector"]
    assert list(detector["starts"]) == ["random", "pretrained", "distilled"]
    assert detector["starts"]["pretrained"] == detector["starts"]["distilled"]
    assert [(gain["points"], gain["high"]) for gain in detector["gains"][2:]] == [(0, 0)] * 2
    assert detector["metrics"] == ["mAP50", "mAP50-95"]
    assert [len(values) for values in detector["starts"]["random"].values()] == [2, 2]
    assert len(content["answers"]) == 1 + 4
    assert json.loads((run / "summary.json").read_text())["pays"] == content
    assert "points of mAP50" in out
    assert max(value for start in detector["starts"].values() for value in start["mAP50"]) < 0.02
    assert "no detector has found boxes yet (the best score is" in detector["notes"][0]
    assert detector["notes"][0] in out
    titles = [section["title"] for section in pays(read_run(run))]
    assert titles == ["Does it pay? Frozen features", "Does it pay? A detector"]
