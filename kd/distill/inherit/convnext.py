"""ConvNeXt (Liu et al., 2022), ConvNeXt V2 and DINOv3's: a student of other widths and depths of its stages.

A block adds to a stage's stream of channels (:mod:`kd.distill.inherit.cnn`)::

    x <- x + gamma * W2 gelu(W1 norm(depthwise(x)))          (V2: a global response norm before W2)

Depthwise filters are fitted channel by channel to the teacher's; W1 to what the teacher's gives for those hidden units that
write most into the channels that are kept; W2 to what the student's stream lacks of the teacher's. Scales and shifts of
norms, and gamma, go into the layers after and before them.
"""

from collections.abc import Sequence

import torch
from timm.layers import GlobalResponseNormMlp, Mlp, NormMlpClassifierHead
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part, reset_norm
from kd.distill.inherit.cnn import (
    ChannelStream,
    CNNStart,
    LayerRow,
    Reader,
    RowLayer,
    fit_to_maps,
    inherits_classifier,
    positions_in,
)
from kd.distill.inherit.maps import as_reader, at, rows_needed
from kd.distill.inherit.pair import must_be_equal, must_not_be_larger
from kd.distill.inherit.ridge import fit_scale_and_shift


def check_convnexts(student: CNN, teacher: CNN) -> None:
    """Checks that a ConvNeXt can start from another; raises a ValueError, whose line says what differs."""
    for role, model in (("student", student), ("teacher", teacher)):
        problem = _not_understood(model)
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    small, big = student.stages, teacher.stages
    values: dict[str, tuple[object, object]] = {
        "kind of MLP": (type(small[0].blocks[0].mlp).__name__, type(big[0].blocks[0].mlp).__name__),
        "size of patches": (student.stem[0].kernel_size, teacher.stem[0].kernel_size),
        "kernels of depthwise convolutions": (_kernels(student), _kernels(teacher)),
        "norms": (_norms(student), _norms(teacher)),
    }
    if inherits_classifier(student, teacher):
        pools = student.head.global_pool.pool_type, teacher.head.global_pool.pool_type
        heads = type(student.head).__name__, type(teacher.head).__name__
        values |= {"pooling": pools, "kind of head": heads}
    must_be_equal(values)
    for number, (ours, theirs) in enumerate(zip(small, big, strict=True), 1):
        must_not_be_larger(
            {
                f"width in stage {number}": (_width(ours), _width(theirs)),
                f"number of blocks in stage {number}": (len(ours.blocks), len(theirs.blocks)),
                f"hidden units in stage {number}": (_hidden(ours), _hidden(theirs)),
            }
        )


def _kernels(model: CNN) -> list[tuple[int, ...]]:
    return [stage.blocks[0].conv_dw.kernel_size for stage in model.stages]


def _norms(model: CNN) -> str:
    return type(model.stages[0].blocks[0].norm).__name__.removesuffix("2d")


def _width(stage: Part) -> int:
    return stage.blocks[0].conv_dw.out_channels


def _hidden(stage: Part) -> int:
    return len(stage.blocks[0].mlp.fc1.weight)


def _not_understood(model: CNN) -> str:
    """What of a ConvNeXt has no formula here; "" where all has one."""
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
        streams = []
        if not self.stem_is_first_stage:
            first = teacher.stages[0].downsample[1]
            width = self.student.stem[0].out_channels
            streams.append(ChannelStream(width, _readers([first])))

        # what reads each stage's stream after its blocks
        ends = [[stage.downsample[1]] for stage in teacher.stages[1:]]
        classifier = teacher.head.fc
        if isinstance(classifier, nn.Linear):
            ends.append([classifier])
        else:
            ends.append([])
        stages = zip(self.student.stages, teacher.stages, ends, strict=True)
        for small, big, end in stages:
            layers = [block.mlp.fc1 for block in big.blocks]
            readers = _readers([*layers, *end])
            streams.append(ChannelStream(_width(small), readers))
        return streams

    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], after: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the patches, then scale and shift of the norm after them.

        A norm over the channels that are kept is not the norm over all: its scale and shift are fitted channel by channel.
        """
        layer, norm = self.student.stem
        teacher_layer, teacher_norm = self.teacher.stem
        patches = [teacher_layer(part) for part in theirs]
        targets = [maps[:, after] for maps in patches]
        start = teacher_layer.weight[after]
        fit_to_maps(layer, None, layer, ours, targets, start)

        count = rows_needed(layer) // len(ours)
        normed = []
        wanted = []
        for number, (part, teacher_maps) in enumerate(zip(ours, patches, strict=True)):
            positions = positions_in(teacher_maps, number, count)
            given = norm(layer(part))
            normed.append(at(given, positions))
            wished = teacher_norm(teacher_maps)
            rows = at(wished, positions)
            wanted.append(rows[:, after])
        fit_scale_and_shift(norm, torch.cat(normed), torch.cat(wanted))
        after_stem = [norm(layer(part)) for part in ours]
        after_teachers = [teacher_norm(maps) for maps in patches]
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
        outputs = [big(stream) for stream in theirs]
        norm, convolution = big
        weight = convolution.weight * norm.weight[:, None, None]
        start = weight[after][:, before]
        targets = [maps[:, after] for maps in outputs]
        layer = small[1]
        fit_to_maps(layer, None, small, ours, targets, start)
        after_layer = [small(part) for part in ours]
        return after_layer, outputs, after

    def layers_of(self, block: Part, of_teacher: Part) -> list[RowLayer]:
        """The depthwise filters, and the two layers of the MLP."""
        mlp, teacher_mlp = block.mlp, of_teacher.mlp
        reads = teacher_mlp.fc1.weight.flatten(1) * of_teacher.norm.weight
        writes = teacher_mlp.fc2.weight.flatten(1)
        if of_teacher.gamma is not None:
            writes = of_teacher.gamma[:, None] * writes
        return [
            _layer(block.conv_dw, of_teacher.conv_dw, of_teacher.conv_dw.weight),
            _layer(mlp.fc1, teacher_mlp.fc1, reads),
            _layer(mlp.fc2, teacher_mlp.fc2, writes),
        ]

    def channels_inside(
        self, row: LayerRow, block: Part, of_teacher: Part, after: Tensor
    ) -> list[Tensor]:
        """Those of the stream, and the hidden units that write most: ``E |w u|^2`` about its mean is ``|w|^2 Var(u)``, of
        each unit's column w. What a global response norm has of them is copied.
        """
        _, first, second = row.layers
        writes = second.weight[after]
        size_of_writes = writes.square().sum(0)
        values = torch.cat(row.read[second.of_teacher])
        powers = values.var(0) * size_of_writes
        count = len(first.layer.weight)
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


def _layer(layer: Part, of_teacher: Part, weight: Tensor) -> RowLayer:
    """A layer without a BatchNorm after it."""
    return RowLayer(layer, None, of_teacher, of_teacher, weight)


def _readers(layers: Sequence[Part]) -> list[Reader]:
    """Layers, each with what it computes of the channels that it reads."""
    readers = []
    for layer in layers:
        weight = as_reader(layer.weight) if layer.weight.ndim == 4 else layer.weight
        readers.append(Reader(layer, [weight]))
    return readers


def _reset_scales(student: CNN) -> None:
    """Sets norms to scale 1 and shift 0, layer scales to 1: they go into the layers that are fitted."""
    for module in student.modules():
        kind = type(module).__name__
        is_norm = isinstance(module, nn.LayerNorm) or kind.startswith(("RmsNorm", "SimpleNorm"))
        if is_norm:
            reset_norm(module)
        if isinstance(module, ConvNeXtBlock) and module.gamma is not None:
            nn.init.ones_(module.gamma)
