"""to=backbone in the keys of torchvision's detectors, loaded by their own code."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torchvision.models import detection
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from kd.cli import main
from kd.ship.export.torchvision_keys import BODY, detector_body
from tests._detectors import distil
from tests._runs import summary_of

PICTURES = [torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(1))]
WHOLE = {"weights": None, "weights_backbone": None, "num_classes": 3}


def trained_like(arch: str) -> nn.Module:
    """A model whose norms have statistics as after training."""
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=0).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(5e-4, 2)
    return model


def faster_rcnn(arch: str) -> nn.Module:
    """FasterRCNN with torchvision's backbone of that name."""
    if arch.startswith("mobilenet"):
        return detection.fasterrcnn_mobilenet_v3_large_320_fpn(**WHOLE)
    norm = nn.BatchNorm2d
    fpn = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name=arch, weights=None, norm_layer=norm, trainable_layers=5
    )
    return detection.FasterRCNN(fpn, 3)


def retina_net(arch: str) -> nn.Module:
    """RetinaNet with torchvision's backbone of that name, whose norms are frozen."""
    fpn = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name=arch,
        weights=None,
        trainable_layers=5,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(256, 256),
    )
    return detection.RetinaNet(fpn, 3)


@pytest.mark.parametrize(
    ("arch", "make"),
    [("resnet18", faster_rcnn), ("resnet18", retina_net), ("mobilenetv3_large_100", faster_rcnn),
     pytest.param("resnet50", faster_rcnn, marks=pytest.mark.slow)],
)  # fmt: skip
def test_detectors_load_the_body_strictly(arch: str, make: object, tmp_path: Path) -> None:
    model = trained_like(arch)
    state = detector_body(model, arch)
    assert state is not None
    detector = make(arch).eval()  # type: ignore[operator]
    detector.backbone.body.load_state_dict(state, strict=True)
    with torch.no_grad():
        images = torch.rand(1, 3, 64, 64)
        last = list(detector.backbone.body(images).values())[-1]
        expected = model.forward_features(images)
        torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3 * expected.abs().max())
        assert set(detector(PICTURES)[0]) == {"boxes", "labels", "scores"}


@pytest.mark.parametrize("arch", ["resnet18d", "resnet26", "convnext_atto", "vit_tiny_patch16_224"])
def test_networks_that_torchvision_lacks(arch: str) -> None:
    assert detector_body(timm.create_model(arch, num_classes=0).eval(), arch) is None


def test_another_function_with_the_same_tensors_is_left_out() -> None:
    """The names and shapes of a ResNet with dilated convolutions are those of one without."""
    model = timm.create_model("resnet18", num_classes=0, output_stride=8).eval()
    assert detector_body(model, "resnet18") is None


def test_the_recipe_from_pictures_to_a_detector(tmp_path: Path) -> None:
    """kd-train recipe=detector_backbone, kd-export to=backbone, torchvision's FasterRCNN: with a small teacher."""
    assert distil(tmp_path) == 0
    run = tmp_path / "detector_backbone" / "latest"
    summary = summary_of(run)
    assert {"stride8_loss", "stride16_loss", "stride32_loss"} <= set(summary["student"]["val"])
    out = tmp_path / "backbone"
    assert main("export", [str(run), "to=backbone", f"out={out}"]) == 0
    detector = faster_rcnn("resnet18")
    detector.backbone.body.load_state_dict(load_file(out / BODY), strict=True)
    student = load_file(run / "student.safetensors")
    for name, value in detector.backbone.body.state_dict().items():
        assert torch.equal(value, student[name]), name
    with safe_open(out / BODY, "pt") as opened:
        assert json.loads(opened.metadata()["kd.mean"]) == [0.485, 0.456, 0.406]

    rt_detr = small_rt_detr("resnet18", (128, 256, 512))
    rt_detr.model.backbone.model._backbone.load_state_dict(load_file(out / "backbone.safetensors"))
    backbone = timm.create_model("resnet18", num_classes=0).eval()
    backbone.load_state_dict(load_file(out / "backbone.safetensors"))
    images = torch.stack(PICTURES)
    with torch.no_grad():
        maps = rt_detr.model.backbone(images, torch.ones(1, 64, 96, dtype=torch.bool))
        expected = backbone.forward_intermediates(
            images, indices=[2, 3, 4], intermediates_only=True
        )
        assert rt_detr(pixel_values=images).pred_boxes.shape == (1, 5, 4)
    for (of_detector, _), of_student in zip(maps, expected, strict=True):
        torch.testing.assert_close(of_detector, of_student)


def small_rt_detr(arch: str, channels: tuple[int, int, int]) -> Any:
    """RT-DETR of the package transformers with a timm backbone of that name, small behind it.

    Args:
        arch: with maps of strides 8, 16 and 32 at timm's indices 2 to 4.
        channels: of these maps.
    """
    transformers = pytest.importorskip("transformers")
    backbone = transformers.TimmBackboneConfig(
        backbone=arch, use_pretrained_backbone=False, features_only=True, out_indices=[2, 3, 4]
    )
    small = {"d_model": 32, "encoder_hidden_dim": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.RTDetrConfig(
        **small,
        backbone_config=backbone,
        encoder_in_channels=[*channels],
        decoder_in_channels=[32, 32, 32],
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=5,
        num_denoising=0,
        anchor_image_size=None,
    )
    return transformers.RTDetrForObjectDetection(config).eval()
