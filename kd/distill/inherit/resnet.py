"""ResNets (He et al., 2016) of basic or bottleneck blocks with BatchNorm: a student of fewer channels and blocks.

A stage's blocks write into one stream of channels, ``x <- relu(shortcut(x) + conv(...))``
(:mod:`kd.distill.inherit.cnn`). A block's last layer is fitted to what the teacher's stream is before the ReLU, less the
student's own shortcut. The norms' statistics are measured on the student's own activations.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.cnn import (
    ChannelStream,
    CNNStart,
    LayerRow,
    Link,
    Reader,
    check_cnns,
    follow,
    links_of,
)
from kd.distill.inherit.maps import as_reader, covariance


def stages_of(model: ResNet) -> list[Any]:
    """A ResNet's stages (``layer1`` and so on), each a sequence of blocks."""
    stages: list[Any] = []
    for number in count(1):
        stage = getattr(model, f"layer{number}", None)
        if stage is None:
            break
        stages.append(stage)
    return stages


def stem_links(model: CNN) -> list[Link]:
    """The convolutions before the first stage, one, or three (a deep stem), each with the norm after it."""
    return links_of([*model.conv1.modules(), model.bn1])


def block_links(block: Part) -> list[Link]:
    """A block's convolutions in order, each with the norm after it: two (basic) or three (bottleneck).

    That of the shortcut is not among them (:func:`shortcut_links`).
    """
    layers = [part for name, part in block.named_children() if name[:-1] in ("conv", "bn")]
    return links_of(layers)


def shortcut_links(block: Part) -> list[Link]:
    """The convolution of a block's shortcut and the norm after it; [] where the shortcut is an identity."""
    return [] if block.downsample is None else links_of(block.downsample)


def check_resnets(student: CNN, teacher: CNN) -> None:
    """Checks that a ResNet can start from another; raises a ValueError, whose line says what differs."""
    check_cnns(student, teacher, _not_understood, _kinds, _sizes_of)


def _kinds(model: CNN, reads_end: bool) -> dict[str, object]:
    """What two models must have alike, by name; ``reads_end``: also before their classifiers."""
    stages = stages_of(model)
    kinds: dict[str, object] = {
        "kind of block": type(stages[0][0]).__name__,
        "number of stages": len(stages),
        "number of convolutions in the stem": len(stem_links(model)),
        "strides": _strides(model),
    }
    if reads_end:
        kinds["pooling"] = model.global_pool.pool_type
    return kinds


def _sizes_of(model: CNN) -> dict[str, int]:
    """What a student must not have more of than its teacher, by name: channels of the convolutions in the stem and in the
    first block of each stage, and blocks in each stage.
    """
    sizes = {}
    for number, width in enumerate(_widths(stem_links(model)), 1):
        sizes[f"width of convolution {number} of the stem"] = width
    for number, stage in enumerate(stages_of(model), 1):
        sizes[f"number of blocks in stage {number}"] = len(stage)
        for index, width in enumerate(_widths(block_links(stage[0])), 1):
            sizes[f"width of convolution {index} in stage {number}"] = width
    return sizes


def _widths(links: Sequence[Link]) -> list[int]:
    return [link.layer.out_channels for link in links]


def _strides(model: CNN) -> list[tuple[int, ...]]:
    """The strides ``(y, x)`` of all convolutions with a larger kernel than 1 x 1 that make maps smaller, in order."""
    strides: list[tuple[int, ...]] = []
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size == (1, 1):
            continue
        if module.stride != (1, 1):
            strides.append(module.stride)
    return strides


def _not_understood(model: CNN) -> str:
    """A part of a ResNet for which there is no formula here, in words for a message; "" where all parts have one."""
    if not isinstance(model.maxpool, nn.MaxPool2d):
        return "a stem without plain max pooling"
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return "convolutions in groups (ResNeXt)"
        if isinstance(module, nn.Conv2d) and module.dilation != (1, 1):
            return "dilated convolutions"
    for stage in stages_of(model):
        for block in stage:
            if type(block) not in (BasicBlock, Bottleneck):
                return f"blocks of the kind {type(block).__name__}"
            if block.se is not None:
                return f"channel attention ({type(block.se).__name__})"
            if not isinstance(block.bn1, nn.BatchNorm2d):
                return f"norms of the kind {type(block.bn1).__name__}"
    return ""


class ResNetStart(CNNStart):
    """The start of a ResNet, of a pair that :func:`check_resnets` accepts."""

    def __init__(self, student: CNN, teacher: CNN) -> None:
        """Stores the arguments, which are the base's."""
        super().__init__(student, teacher)
        small = stages_of(student)
        big = stages_of(teacher)
        self.stages = list(zip(small, big, strict=True))
        firsts = small[0][0], big[0][0]
        self.stem_is_first_stage = not any(block.downsample for block in firsts)

    def largest_maps(self, size: tuple[int, int]) -> int:
        """That of the stages' streams alone; the first stage has a quarter of each side."""
        widths = [_widths(block_links(big[0]))[-1] for _, big in self.stages]
        height, width = size
        return max(widths[0] * height * width // 16, *widths)

    def streams(self) -> list[ChannelStream]:
        """A block's output is read by the block after it, that of the last one by the classifier."""
        teacher = self.teacher
        if isinstance(teacher.fc, nn.Linear):
            reads = teacher.fc.weight
        else:  # each channel counts by itself
            reads = torch.eye(teacher.num_features)
        # what reads the stem's stream, then each stage's after its blocks
        ends = [_reader(big[0]) for _, big in self.stages]
        ends.append(Reader(teacher.global_pool, [reads]))
        streams = []
        if not self.stem_is_first_stage:
            *_, width = _widths(stem_links(self.student))
            streams.append(ChannelStream(width, ends[:1]))
        for (small, big), end in zip(self.stages, ends[1:], strict=True):
            *_, width = _widths(block_links(small[0]))
            readers = [_reader(block) for block in big[1:]]
            streams.append(ChannelStream(width, [*readers, end]))
        return streams

    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], after: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the convolutions before the first stage."""
        models = self.student, self.teacher
        links = [stem_links(model) for model in models]
        runs = [partial(_stem, model) for model in models]
        channels = ours[0].shape[1]
        colours = torch.arange(channels)
        kept = partial(_chosen_inside, after=after)
        return follow(links, runs, ours, theirs, colours, kept)

    def links(self, block: Part) -> list[Link]:
        """A block's convolutions, each with the norm after it."""
        return block_links(block)

    def channels_inside(
        self, row: LayerRow, block: Part, of_teacher: Part, after: Tensor
    ) -> list[Tensor]:
        """Chosen from the last layer to the first, by what reads them."""
        return _chosen_inside(row, after)

    def end_of(self, block: Part) -> nn.Module:
        """The ReLU after a block's sum."""
        return block.act3 if isinstance(block, Bottleneck) else block.act2

    def passed_on(
        self,
        block: Part,
        of_teacher: Part,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> Sequence[Tensor]:
        """What a block's shortcut gives for the stream, of each part of the sample: without layers the stream itself.

        A shortcut with a convolution and a norm is fitted to the teacher's shortcut first.
        """
        if block.downsample is None:
            return ours
        teacher_shortcut = of_teacher.downsample
        links = shortcut_links(of_teacher)
        if teacher_shortcut is None:  # the student's first block is not as wide as its stem
            teacher_shortcut = nn.Identity()
            same = torch.eye(of_teacher.conv1.in_channels)[..., None, None]
            links = [Link(teacher_shortcut, None, same)]
        both = shortcut_links(block), links
        runs = block.downsample, teacher_shortcut
        passed, _ = follow(both, runs, ours, theirs, before, lambda _: [after])
        return passed

    def reads_last(self) -> Tensor:
        """The classifier's weight."""
        return self.teacher.fc.weight


def _chosen_inside(row: LayerRow, after: Tensor) -> list[Tensor]:
    """The channels of each layer's output, chosen from the last layer, of which they are ``after``, to the first."""
    kept = [after]
    pairs = list(zip(row.ours, row.theirs[1:], strict=False))
    for link, reader in reversed(pairs):
        spread = covariance(torch.cat(row.read[reader.layer]))
        weight = reader.weight[kept[0]]
        reading = Readout(spread, as_reader(weight))
        kept.insert(0, chosen_channels([reading], link.layer.out_channels))
    return kept


def _reader(block: Part) -> Reader:
    """A block of the teacher as what reads the stream before it: its first convolution, and its shortcut."""
    first = block_links(block)[0]
    passed_on = torch.eye(first.layer.in_channels)
    for link in shortcut_links(block):
        passed_on = as_reader(link.weight)
    return Reader(first.layer, [as_reader(first.weight), passed_on])


def _stem(model: CNN, pictures: Tensor) -> Tensor:
    """The stream before the first stage, ``(N, C, H / 4, W / 4)`` of prepared pictures ``(N, 3, H, W)``."""
    return model.maxpool(model.act1(model.bn1(model.conv1(pictures))))
