"""ResNets (He et al., 2016) of basic or bottleneck blocks with BatchNorm: a student of fewer channels and blocks.

A stage's blocks write into one stream of channels, ``x <- relu(shortcut(x) + conv(...))``
(:mod:`kd.distill.inherit.cnn`). A block's last layer is fitted to what the teacher's stream is before the ReLU, less the
student's own shortcut. The norms' statistics are measured on the student's own activations.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.cnn import (
    ChannelStream,
    CNNStart,
    LayerRow,
    Reader,
    RowLayer,
    fit_to_maps,
    inherits_classifier,
)
from kd.distill.inherit.maps import as_reader, covariance, folded_with_norm
from kd.distill.inherit.pair import must_be_equal, must_not_be_larger
from kd.distill.inherit.stream import shown

ConvNorm: TypeAlias = tuple[nn.Conv2d, Any]
"""A convolution and the BatchNorm after it."""


def stages_of(model: ResNet) -> list[Any]:
    """A ResNet's stages (``layer1`` and so on), each a sequence of blocks."""
    stages: list[Any] = []
    for number in count(1):
        stage = getattr(model, f"layer{number}", None)
        if stage is None:
            break
        stages.append(stage)
    return stages


def stem_layers(model: CNN) -> list[ConvNorm]:
    """The convolutions before the first stage: one, or three (a deep stem)."""
    stem = model.conv1
    if isinstance(stem, nn.Conv2d):
        return [(stem, model.bn1)]
    convolutions = []
    norms = []
    for layer in stem:
        if isinstance(layer, nn.Conv2d):
            convolutions.append(layer)
        elif isinstance(layer, nn.BatchNorm2d):
            norms.append(layer)
    norms.append(model.bn1)
    return list(zip(convolutions, norms, strict=True))


def block_layers(block: Part) -> list[ConvNorm]:
    """A block's convolutions in order, each with the norm after it: two (basic) or three (bottleneck).

    That of the shortcut is not among them (:func:`shortcut_layer`).
    """
    layers = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        layers.append((block.conv3, block.bn3))
    return layers


def shortcut_layer(block: Part) -> ConvNorm | None:
    """The convolution of a block's shortcut and the norm after it; None: the shortcut is an identity."""
    if block.downsample is None:
        return None
    convolution = next(layer for layer in block.downsample if isinstance(layer, nn.Conv2d))
    return convolution, block.downsample[-1]


def check_resnets(student: CNN, teacher: CNN) -> None:
    """Checks that a ResNet can start from another; raises a ValueError, whose line says what differs."""
    for role, model in (("student", student), ("teacher", teacher)):
        problem = _not_understood(model)
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    small, big = stages_of(student), stages_of(teacher)
    values: dict[str, tuple[object, object]] = {
        "kind of block": (type(small[0][0]).__name__, type(big[0][0]).__name__),
        "number of stages": (len(small), len(big)),
        "number of convolutions in the stem": (
            len(stem_layers(student)),
            len(stem_layers(teacher)),
        ),
        "strides": (_strides(student), _strides(teacher)),
    }
    if inherits_classifier(student, teacher):
        pools = student.global_pool.pool_type, teacher.global_pool.pool_type
        values["pooling"] = pools
    must_be_equal(values)
    sizes = _sizes_of(student), _sizes_of(teacher)
    must_not_be_larger({name: (size, sizes[1][name]) for name, size in sizes[0].items()})


def _sizes_of(model: CNN) -> dict[str, int]:
    """What a student must not have more of than its teacher, by name: channels of the convolutions in the stem and in the
    first block of each stage, and blocks in each stage.
    """
    sizes = {}
    for number, width in enumerate(_widths(stem_layers(model)), 1):
        sizes[f"width of convolution {number} of the stem"] = width
    for number, stage in enumerate(stages_of(model), 1):
        sizes[f"number of blocks in stage {number}"] = len(stage)
        for index, width in enumerate(_widths(block_layers(stage[0])), 1):
            sizes[f"width of convolution {index} in stage {number}"] = width
    return sizes


def _widths(layers: Sequence[ConvNorm]) -> list[int]:
    return [convolution.out_channels for convolution, _ in layers]


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
    """What of a ResNet has no formula here; "" where all has one."""
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
        shortcuts = [
            shortcut_layer(small[0][0]),
            shortcut_layer(big[0][0]),
        ]
        self.stem_is_first_stage = shortcuts == [None, None]

    def largest_maps(self, size: tuple[int, int]) -> int:
        """That of the stages' streams alone; the first stage has a quarter of each side."""
        widths = [_widths(block_layers(big[0]))[-1] for _, big in self.stages]
        height, width = size
        return max(widths[0] * height * width // 16, *widths)

    def streams(self) -> list[ChannelStream]:
        """A block's output is read by the block after it, that of the last one by the classifier."""
        teacher = self.teacher
        has_head = isinstance(teacher.fc, nn.Linear)
        if has_head:
            reads = teacher.fc.weight
        else:  # each channel counts by itself
            reads = torch.eye(teacher.num_features)
        streams = []
        if not self.stem_is_first_stage:
            *_, width = _widths(stem_layers(self.student))
            _, big = self.stages[0]
            streams.append(ChannelStream(width, [_reader(big[0])]))

        # what reads each stage's stream after its blocks
        ends = []
        for _, big in self.stages[1:]:
            ends.append(_reader(big[0]))
        ends.append(Reader(teacher.global_pool, [reads]))
        for (small, big), end in zip(self.stages, ends, strict=True):
            *_, width = _widths(block_layers(small[0]))
            readers = [_reader(block) for block in big[1:]]
            streams.append(ChannelStream(width, [*readers, end]))
        return streams

    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], after: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the convolutions before the first stage."""
        layers = _row(stem_layers(self.student), stem_layers(self.teacher))
        row = LayerRow(layers, len(theirs))
        outputs = []
        for number, part in enumerate(theirs):
            with row.of_part(number):
                outputs.append(_stem(self.teacher, part))
        colours = torch.arange(ours[0].shape[1])
        kept = _chosen_inside(row, after)
        run = partial(_stem, self.student)
        row.fit(run, ours, colours, kept)
        after_stem = [run(part) for part in ours]
        return after_stem, outputs

    def layers_of(self, block: Part, of_teacher: Part) -> list[RowLayer]:
        """A block's convolutions, each with the norm after it."""
        return _row(block_layers(block), block_layers(of_teacher))

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
        """Fits the convolution of a block's shortcut, where it has one, and its norm, to the teacher's shortcut."""
        shortcut = shortcut_layer(block)
        if shortcut is None:
            return ours
        teacher_layer = shortcut_layer(of_teacher)
        if teacher_layer is None:  # the student's first block is not as wide as its stem
            start = torch.eye(of_teacher.conv1.in_channels)[after][:, before, None, None]
        else:
            start = folded_with_norm(*teacher_layer)[after][:, before]
        through = of_teacher.downsample or nn.Identity()
        targets = [through(stream)[:, after] for stream in theirs]
        fit_to_maps(*shortcut, block.downsample, ours, targets, start)
        return [block.downsample(stream) for stream in shown(ours, "the shortcut")]

    def reads_last(self) -> Tensor:
        """The classifier's weight."""
        return self.teacher.fc.weight


def _row(ours: Sequence[ConvNorm], theirs: Sequence[ConvNorm]) -> list[RowLayer]:
    """Convolutions in a row, of student and teacher."""
    layers = []
    for (layer, norm), (teacher_layer, teacher_norm) in zip(ours, theirs, strict=True):
        weight = folded_with_norm(teacher_layer, teacher_norm)
        layers.append(RowLayer(layer, norm, teacher_layer, teacher_norm, weight))
    return layers


def _chosen_inside(row: LayerRow, after: Tensor) -> list[Tensor]:
    """The channels of each layer's output, chosen from the last layer, of which they are ``after``, to the first."""
    kept = [after]
    for number in reversed(range(1, len(row.layers))):
        reader = row.layers[number]
        rows = torch.cat(row.read[reader.of_teacher])
        spread = covariance(rows)
        weight = reader.weight[kept[0]]
        reading = Readout(spread, as_reader(weight))
        before = row.layers[number - 1]
        chosen = chosen_channels([reading], before.layer.out_channels)
        kept.insert(0, chosen)
    return kept


def _reader(block: Part) -> Reader:
    """A block of the teacher as what reads the stream before it: its first convolution, and its shortcut."""
    first, norm = block_layers(block)[0]
    shortcut = shortcut_layer(block)
    passed_on = torch.eye(first.in_channels)
    if shortcut is not None:
        passed_on = as_reader(folded_with_norm(*shortcut))
    return Reader(first, [as_reader(folded_with_norm(first, norm)), passed_on])


def _stem(model: CNN, pictures: Tensor) -> Tensor:
    """The stream before the first stage, ``(N, C, H / 4, W / 4)`` of prepared pictures ``(N, 3, H, W)``."""
    return model.maxpool(model.act1(model.bn1(model.conv1(pictures))))
