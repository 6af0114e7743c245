"""ConvNeXts and ResNets that start from a larger one's channels."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from kd.distill.inherit import check_pair, inherit_together, relative_of
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.cnn import MOST_BYTES, views_of_both
from kd.distill.inherit.convnext import ConvNeXtStart, _reset_scales
from kd.distill.inherit.maps import (
    RIDGE,
    RIDGE_OF_FEW,
    channels_at,
    drawn_positions,
    fit_depthwise,
    fit_layer,
    under_kernel,
    windows,
)
from kd.distill.inherit.ridge import fit_linear
from kd.module.fits import why_trial
from tests.distill.inherit._cnns import INPUT, convnext, pictures, resnet
from tests.distill.inherit._vits import THEIRS, correlation


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolutions_fit_is_the_ridge_regression_of_what_it_reads(bias: bool) -> None:
    """Which is itself compared with the formula: :mod:`tests.distill.inherit.test_ridge`."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=bias)
    maps, start = torch.randn(6, 3, 9, 9), torch.randn(4, 3, 3, 3)
    positions = drawn_positions(6, 5, 5, 10**6, seed=0)
    x, y = under_kernel(layer, maps, positions), channels_at(torch.randn(6, 4, 5, 5), positions)
    patches = nn.functional.unfold(maps, 3, padding=1, stride=2)
    torch.testing.assert_close(x, patches.transpose(1, 2).flatten(0, 1))

    rows = [(x[:70], y[:70]), (x[70:], y[70:])]
    fit_layer(layer, None, rows, start)
    linear = nn.Linear(27, 4, bias=bias)
    fit_linear(linear, rows, start.flatten(1), ridge=max(RIDGE, RIDGE_OF_FEW * 27 / len(x)))
    torch.testing.assert_close(layer.weight.flatten(1), linear.weight)
    torch.testing.assert_close(layer.bias, linear.bias)


@torch.no_grad()
def test_a_norm_after_a_convolution_adds_its_bias_with_statistics_of_its_own() -> None:
    torch.manual_seed(0)
    layer, norm = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
    maps = torch.randn(8, 3, 4, 4) + 1
    target = nn.Conv2d(3, 4, 1)(maps)
    positions = drawn_positions(8, 4, 4, 10**6, seed=0)
    rows = [(under_kernel(layer, maps, positions), channels_at(target, positions))]
    fit_layer(layer, norm, rows, torch.zeros(4, 3, 1, 1))
    for mode in (
        norm.eval,
        norm.train,
    ):  # in training it sees the batch's statistics, which are these
        mode()
        torch.testing.assert_close(norm(layer(maps)), target, atol=2e-2, rtol=0)


@torch.no_grad()
def test_depthwise_filters_are_fitted_channel_by_channel() -> None:
    torch.manual_seed(0)
    layer, true = (nn.Conv2d(5, 5, 3, padding=1, groups=5) for _ in range(2))
    maps = torch.randn(16, 5, 8, 8)
    positions = drawn_positions(16, 8, 8, 900, seed=0)
    inputs = windows(layer, maps).permute(0, 2, 3, 1, 4, 5)[positions].flatten(2)
    fit_depthwise(layer, [(inputs, channels_at(true(maps), positions))], torch.zeros(5, 1, 3, 3))
    torch.testing.assert_close(layer.weight, true.weight, atol=3e-3, rtol=0)
    torch.testing.assert_close(layer.bias, true.bias, atol=3e-3, rtol=0)


def test_channels_are_chosen_by_what_they_explain() -> None:
    """Two channels alike are worth one; a loud channel that nobody reads is worth nothing."""
    torch.manual_seed(0)
    x = torch.randn(1000, 5)
    x[:, 1] = x[:, 0] + 0.01 * torch.randn(1000)
    x[:, 4] *= 100
    weight = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 0.7, 0, 0], [0, 0, 0, 0.5, 0]])
    covariance = x.T @ x / len(x)
    assert chosen_channels([Readout(covariance, weight)], 5).tolist() == [0, 1, 2, 3, 4]
    three = chosen_channels([Readout(covariance, weight)], 3).tolist()
    assert three in ([0, 2, 3], [1, 2, 3])
    more_rows = Readout(covariance, weight.repeat(2, 1))
    assert chosen_channels([more_rows], 3).tolist() == three
    assert chosen_channels([Readout(covariance, weight)], 2).tolist() in ([0, 2], [1, 2])


@pytest.mark.parametrize(
    "make",
    [
        resnet,
        partial(resnet, arch="resnet26"),
        convnext,
        partial(convnext, use_grn=True, ls_init_value=None),
    ],
)
def test_a_copy_becomes_its_teacher(make: Callable[[int], nn.Module]) -> None:
    teacher, student = make(0), make(1)
    inherit_together([(student, INPUT)], teacher, pictures(), INPUT)
    assert correlation(student, teacher, pictures(seed=5), INPUT) > 0.98


@pytest.mark.parametrize("norm_layer", ["layernorm2d", "rmsnorm2d", "simplenorm2d"])
def test_every_kind_of_norm_is_reset(norm_layer: str) -> None:
    """Scales go into the layers that are fitted: a student that was trained before has others than 1."""
    student = convnext(0, norm_layer=norm_layer)
    norms = [
        module
        for module in student.modules()
        if "Norm" in type(module).__name__ and hasattr(module, "weight")
    ]
    for norm in norms:
        nn.init.constant_(norm.weight, 3.0)
    _reset_scales(student)
    assert len(norms) > 4
    assert all(torch.equal(norm.weight, torch.ones_like(norm.weight)) for norm in norms)


def test_a_smaller_convnext_comes_near() -> None:
    teacher = convnext(0)
    student = convnext(1, (8, 8, 12, 16), depths=(1, 1, 2, 1))
    unseen = pictures(seed=5)
    before = correlation(student, teacher, unseen)
    inherit_together([(student, INPUT)], teacher, pictures(256), THEIRS)
    assert correlation(student, teacher, unseen) > max(0.4, before + 0.3)


def test_a_sample_is_as_large_as_memory_allows() -> None:
    start = ConvNeXtStart(convnext(1), convnext(0))
    assert start.largest_maps((32, 64)) == 16 * 16 * 32
    ours, _ = views_of_both(pictures(256), INPUT, THEIRS, int(MOST_BYTES / 4 / 100))
    assert sum(map(len, ours)) == 100


def test_a_resnet_without_its_least_blocks_comes_near() -> None:
    """Blocks that add next to nothing: a student without them, at full width, gives the same answers."""
    teacher = resnet(0)
    for stage in (teacher.layer1, teacher.layer2, teacher.layer3, teacher.layer4):
        stage[1].bn2.weight.data *= 0.1
        stage[1].bn2.bias.data.zero_()
    torch.manual_seed(1)
    student = timm.create_model(
        "resnet10t", num_classes=5, channels=(16, 16, 24, 32), stem_type="", avg_down=False
    )
    inherit_together([(student, INPUT)], teacher, pictures(256), INPUT)
    assert correlation(student, teacher, pictures(seed=5), INPUT) > 0.8


def test_what_can_not_be_inherited_is_named() -> None:
    def named(arch: str) -> nn.Module:
        return timm.create_model(arch)

    small, bottlenecks, plain = resnet(0), resnet(0, arch="resnet26"), convnext(0)
    wide = (32, 32, 32, 32)
    for student, teacher, message in (
        (small, plain, "one family, got ResNet and ConvNeXt"),
        (named("mobilenetv3_small_050"), small, "the student must be a plain vision"),
        (resnet(0, wide), small, "no larger width of convolution 1 in stage 1 than"),
        (small, bottlenecks, "same kind of block, got BasicBlock and Bottleneck"),
        (named("seresnet18"), named("seresnet18"), "channel attention"),
        (named("resnext26ts"), small, "the student must be"),
        (convnext(0, wide), plain, "no larger width in stage 1 than the teacher, got 32 and 16"),
        (convnext(0, kernel_sizes=5), plain, "same kernels of depthwise convolutions"),
        (convnext(0, stem_type="overlap"), plain, "a stem of overlapping convolutions"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pair(student, teacher)


@pytest.mark.parametrize(
    ("arch", "share"),
    [
        ("vit_small_patch16_dinov3", 0.25),
        ("eva02_tiny_patch14_224", 4 / 9),  # two of three heads
        ("vit_pe_core_tiny_patch16_384", 4 / 9),
        ("vit_base_patch16_siglip_224", 0.25),
        ("convnext_tiny.dinov3_lvd1689m", 0.25),
        ("convnextv2_atto", 0.25),
        ("resnet18", 0.25),
        ("resnet50", 0.25),
        ("wide_resnet50_2", 0.25),
    ],
)
def test_a_relative_of_a_quarter_of_the_size_fits(arch: str, share: float) -> None:
    with torch.device("meta"):
        teacher = timm.create_model(arch, num_classes=10)
        student = timm.create_model(arch, num_classes=10, **relative_of(teacher))
    check_pair(student, teacher)
    parameters = [sum(p.numel() for p in model.parameters()) for model in (student, teacher)]
    assert parameters[0] / parameters[1] == pytest.approx(share, rel=0.08)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("mobilenetv3_large_100", "must be a plain vision transformer or a ConvNeXt or a ResNet"),
        ("mobilenetv4_conv_small", "must be a plain vision transformer or a ConvNeXt or a ResNet"),
        ("resnext50_32x4d", r"convolutions in groups \(ResNeXt\), which can't be inherited"),
        ("seresnet50", r"channel attention \(SEModule\), which can't be inherited"),
    ],
)
def test_no_relative_of_what_is_refused(arch: str, message: str) -> None:
    """A hint names no student that would be refused in turn."""
    with torch.device("meta"):
        teacher = timm.create_model(arch)
    with pytest.raises(ValueError, match=message):
        relative_of(teacher)


def test_a_run_of_few_steps_is_a_trial() -> None:
    whole = {"fast_dev_run": False, "limit_train_batches": 1.0, "max_steps": -1}
    assert why_trial(SimpleNamespace(**whole)) == ""
    assert why_trial(SimpleNamespace(**{**whole, "max_steps": 5000})) == ""
    assert why_trial(SimpleNamespace(**{**whole, "max_steps": 1})) == "trainer.max_steps=1"
    limited = SimpleNamespace(**{**whole, "limit_train_batches": 4})
    assert why_trial(limited) == "trainer.limit_train_batches=4"
    one_batch = SimpleNamespace(**{**whole, "limit_train_batches": 1})
    assert why_trial(one_batch) == "trainer.limit_train_batches=1"
