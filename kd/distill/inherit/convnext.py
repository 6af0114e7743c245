"""ConvNeXt (Liu et al., 2022), ConvNeXt V2 and DINOv3's: a student of other widths and depths of its stages.

A block adds to a stage's stream of channels (:mod:`kd.distill.inherit.cnn`)::

    x <- x + gamma * W2 gelu(W1 norm(depthwise(x)))          (V2: a global response norm before W2)

Depthwise filters are fitted channel by channel to the teacher's; W1 to what the teacher's gives for those hidden units that
write most into the channels that are kept; W2 to what the student's stream lacks of the teacher's. Scales and shifts of
norms, and gamma, go into the layers after and before them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from timm.layers import GlobalResponseNormMlp, Mlp, NormMlpClassifierHead
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part, reset_norm
from kd.distill.inherit.cnn import (
    ChannelStream,
    CNNStart,
    LayerRow,
    Link,
    Reader,
    check_cnns,
    follow,
    is_channel_norm,
    links_of,
    positions_in,
)
from kd.distill.inherit.maps import as_reader, channels_at, rows_needed
from kd.distill.inherit.ridge import fit_scale_and_shift


def check_convnexts(student: CNN, teacher: CNN) -> None:
    """Checks that a ConvNeXt can start from another; raises a ValueError, whose line says what differs."""
    check_cnns(student, teacher, _not_understood, _kinds, _sizes)


def _kinds(model: CNN, reads_end: bool) -> dict[str, object]:
    """What two models must have alike, by name; ``reads_end``: also before their classifiers."""
    first = model.stages[0].blocks[0]
    kinds: dict[str, object] = {
        "kind of MLP": type(first.mlp).__name__,
        "size of patches": model.stem[0].kernel_size,
        "kernels of depthwise convolutions": [
            stage.blocks[0].conv_dw.kernel_size for stage in model.stages
        ],
        "norms": type(first.norm).__name__.removesuffix("2d"),
    }
    if reads_end:
        kinds["pooling"] = model.head.global_pool.pool_type
        kinds["kind of head"] = type(model.head).__name__
    return kinds


def _sizes(model: CNN) -> dict[str, int]:
    """What a student must not have more of than its teacher, by name."""
    sizes = {}
    for number, stage in enumerate(model.stages, 1):
        sizes[f"width in stage {number}"] = _width(stage)
        sizes[f"number of blocks in stage {number}"] = len(stage.blocks)
        sizes[f"hidden units in stage {number}"] = len(stage.blocks[0].mlp.fc1.weight)
    return sizes


def _width(stage: Part) -> int:
    return stage.blocks[0].conv_dw.out_channels


def _not_understood(model: CNN) -> str:
    """A part of a ConvNeXt for which there is no formula here, in words for a message; "" where all parts have one."""
    if len(model.stem) != 2:
        return "a stem of overlapping convolutions"
    for stage in model.stages:
        for block in stage.blocks:
            if type(block) is not ConvNeXtBlock or not isinstance(block.shortcut, nn.Identity):
                return f"blocks of the kind {type(block).__name__} with a shortcut of their own"
            if type(block.mlp) not in (Mlp, GlobalResponseNormMlp):
                return f"an MLP of the kind {type(block.mlp).__name__}"
            if block.conv_dw.dilation != (1, 1):
                return "dilated convolutions"
            if getattr(block.norm, "weight", None) is None:
                return f"norms of the kind {type(block.norm).__name__}"
    head = model.head
    if isinstance(head, NormMlpClassifierHead) and head.hidden_size:
        return "a hidden layer before its classifier"
    return ""


def head_norm(model: ConvNeXt) -> Part:
    """The norm before a model's classifier: ``norm_pre`` before pooling, or that of its head after pooling."""
    if isinstance(model.norm_pre, nn.Identity):
        return model.head.norm
    return model.norm_pre


class ConvNeXtStart(CNNStart):
    """The start of a ConvNeXt, of a pair that :func:`check_convnexts` accepts."""

    def __init__(self, student: CNN, teacher: CNN) -> None:
        """Stores the arguments, which are the base's; the student's scales are reset."""
        super().__init__(student, teacher)
        stages = []
        for small, big in zip(student.stages, teacher.stages, strict=True):
            stages.append((small.blocks, big.blocks))
        self.stages = stages
        self.stem_is_first_stage = isinstance(teacher.stages[0].downsample, nn.Identity)
        with torch.no_grad():
            _reset_scales(student)

    def largest_maps(self, size: tuple[int, int]) -> int:
        """That of the first stage."""
        stride, _ = self.teacher.stem[0].stride
        height, width = size
        return _width(self.teacher.stages[0]) * (height // stride) * (width // stride)

    def streams(self) -> list[ChannelStream]:
        """A stage's stream is read by the first layer of each block's MLP (through a norm and filters that leave channels
        apart) and by what comes after the stage: the next one's convolution, or the classifier.
        """
        teacher = self.teacher
        # what reads the stem's stream, then each stage's after its blocks
        ends: list[list[Part]] = []
        for stage in teacher.stages:
            norm_and_convolution = list(stage.downsample.children())
            ends.append(norm_and_convolution[1:])
        classifier = teacher.head.fc
        ends.append([classifier] if isinstance(classifier, nn.Linear) else [])
        streams = []
        if not self.stem_is_first_stage:
            width = self.student.stem[0].out_channels
            streams.append(ChannelStream(width, _readers(ends[0])))
        stages = zip(self.student.stages, teacher.stages, ends[1:], strict=True)
        for small, big, end in stages:
            width = _width(small)
            layers = [block.mlp.fc1 for block in big.blocks]
            readers = _readers([*layers, *end])
            streams.append(ChannelStream(width, readers))
        return streams

    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], after: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the patches, then scale and shift of the norm after them.

        A norm over the channels that are kept is not the norm over all: its scale and shift are fitted channel by channel.
        """
        layer, norm = self.student.stem
        of_teacher, teacher_norm = self.teacher.stem
        runs = layer, of_teacher
        links = [links_of([each]) for each in runs]
        colours = torch.arange(of_teacher.in_channels)
        patches, teacher_patches = follow(links, runs, ours, theirs, colours, lambda _: [after])
        after_stem = [norm(maps) for maps in patches]
        after_teachers = [teacher_norm(maps) for maps in teacher_patches]
        count = rows_needed(layer) // len(ours)
        given = []
        wanted = []
        for number, teacher_maps in enumerate(after_teachers):
            positions = positions_in(teacher_maps, number, count)
            rows = channels_at(after_stem[number], positions)
            teacher_rows = channels_at(teacher_maps, positions)
            given.append(rows)
            wanted.append(teacher_rows[:, after])
        fit_scale_and_shift(norm, torch.cat(given), torch.cat(wanted))
        after_stem = [norm(maps) for maps in patches]
        return after_stem, after_teachers

    def between_stages(
        self,
        number: int,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Fits the convolution between two stages, where there is one."""
        small = self.student.stages[number].downsample
        big = self.teacher.stages[number].downsample
        if isinstance(big, nn.Identity):
            return ours, theirs, after
        links = links_of(small), links_of(big)
        outputs = follow(links, (small, big), ours, theirs, before, lambda _: [after])
        return *outputs, after

    def links(self, block: Part) -> list[Link]:
        """The depthwise filters and the two layers of the MLP, the last one's weight times the block's layer scale."""
        *first, last = links_of(block.modules())
        writes = last.weight.flatten(1)
        if block.gamma is not None:
            writes = block.gamma[:, None] * writes
        return [*first, replace(last, weight=writes)]

    def channels_inside(
        self, row: LayerRow, block: Part, of_teacher: Part, after: Tensor
    ) -> list[Tensor]:
        """The kept channels of the depthwise filters (``after``), of the hidden units, and of what the block writes
        (``after``).

        Kept are the hidden units u that write most, each by its column w of the second layer: the variance of ``w u`` is
        ``|w|^2 Var(u)``. Their scales and shifts in a global response norm are copied to the student's.
        """
        second = row.theirs[-1]
        size_of_writes = second.weight[after].square().sum(0)
        values = torch.cat(row.read[second.layer])
        powers = values.var(0) * size_of_writes
        count = len(block.mlp.fc1.weight)
        units = powers.topk(count).indices.sort().values
        if isinstance(block.mlp, GlobalResponseNormMlp):
            ours = block.mlp.grn
            theirs = of_teacher.mlp.grn
            ours.weight.copy_(theirs.weight[units])
            ours.bias.copy_(theirs.bias[units])
        return [after, units, after]

    def reads_last(self) -> Tensor:
        """The classifier's weight, with the scale of the norm before it."""
        return self.teacher.head.fc.weight * head_norm(self.teacher).weight


def _readers(layers: Sequence[Part]) -> list[Reader]:
    """Layers, each with what it computes of the channels that it reads."""
    return [Reader(layer, [as_reader(layer.weight)]) for layer in layers]


def _reset_scales(student: CNN) -> None:
    """Sets norms to scale 1 and shift 0, layer scales to 1: they go into the layers that are fitted."""
    for module in student.modules():
        if is_channel_norm(module):
            reset_norm(module)
        if isinstance(module, ConvNeXtBlock) and module.gamma is not None:
            nn.init.ones_(module.gamma)
