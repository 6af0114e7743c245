"""ResNets (He et al., 2016) of basic or bottleneck blocks with BatchNorm: a student of fewer channels and blocks.

A stage's blocks write into one stream of channels, ``x <- relu(shortcut(x) + conv(...))``. ReLU does not let channels
be mixed, so the student keeps some of them (:mod:`kd.distill.inherit.channels`), the same in all blocks of a stage, and
in each block some of the channels inside. Then, from the first layer to the last, each convolution is fitted by least
squares on what the student's fitted layers before it give (:mod:`kd.distill.inherit.maps`):

- inside a block to what the teacher's convolution and norm give, at the channels that are kept;
- a block's last one to what the teacher's stream is before the ReLU, less the student's own shortcut, so that it also
  does the work of the teacher's blocks that the student leaves out: those that change the stream least.

The norms' statistics are measured on the student's own activations. (He, Zhang, Sun, "Channel Pruning for
Accelerating Very Deep Neural Networks", and Luo, Wu, Lin, "ThiNet", both ICCV 2017, who prune layer by layer.)
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.cnn import (
    GUIDE,
    fit_at_places,
    fit_classifier,
    inherits_classifier,
    positions_in,
    views_of_both,
)
from kd.distill.inherit.maps import (
    as_reader,
    at,
    caught,
    covariance,
    folded_with_norm,
    groups_by_change,
)
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.inherit.stream import progress, shown
from kd.models.preprocess import Images, Preprocess

Layer: TypeAlias = tuple[nn.Conv2d, Any]
"""A convolution and the BatchNorm after it."""


def stages_of(model: ResNet) -> list[nn.Sequential]:
    """Its stages, each a sequence of blocks."""
    stages: list[Any] = []
    while hasattr(model, f"layer{len(stages) + 1}"):
        stages.append(getattr(model, f"layer{len(stages) + 1}"))
    return stages


def stem_layers(model: CNN) -> list[Layer]:
    """The convolutions before the first stage: one, or three (a deep stem)."""
    if isinstance(model.conv1, nn.Conv2d):
        return [(model.conv1, model.bn1)]
    convolutions = [layer for layer in model.conv1 if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in model.conv1 if isinstance(layer, nn.BatchNorm2d)]
    return list(zip(convolutions, [*norms, model.bn1], strict=True))


def block_layers(block: Part) -> list[Layer]:
    """A block's convolutions in order: two (basic) or three (bottleneck)."""
    layers = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        layers.append((block.conv3, block.bn3))
    return layers


def shortcut_layer(block: Part) -> Layer | None:
    """The convolution of a block's shortcut; None: an identity."""
    if block.downsample is None:
        return None
    convolution = next(layer for layer in block.downsample if isinstance(layer, nn.Conv2d))
    return convolution, block.downsample[-1]


def last_activation(block: Part) -> nn.Module:
    """The ReLU after a block's sum."""
    return block.act3 if isinstance(block, Bottleneck) else block.act2


def check_resnets(student: CNN, teacher: CNN) -> None:
    """Checks that a ResNet can start from another; raises a ValueError, whose line says what differs."""
    for role, model in (("student", student), ("teacher", teacher)):
        problem = _not_understood(model)
        if problem:
            raise ValueError(f"the {role} has {problem}, which can't be inherited")
    small, big = stages_of(student), stages_of(teacher)
    values = {
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
    for name, (of_student, of_teacher) in values.items():
        if of_student != of_teacher:
            raise ValueError(
                f"student and teacher must have the same {name}, got {of_student} and {of_teacher}"
            )
    for name, (ours, theirs) in _sizes(student, teacher).items():
        if ours > theirs:
            raise ValueError(
                f"the student must have no larger {name} than the teacher, got {ours} and {theirs}"
            )


def _sizes(student: CNN, teacher: CNN) -> dict[str, tuple[int, int]]:
    """What the student must not have more of, by name."""
    sizes = {}
    stems = zip(stem_layers(student), stem_layers(teacher), strict=True)
    for number, ((ours, _), (theirs, _)) in enumerate(stems, 1):
        sizes[f"width of convolution {number} of the stem"] = ours.out_channels, theirs.out_channels
    stages = zip(stages_of(student), stages_of(teacher), strict=True)
    for number, (small, big) in enumerate(stages, 1):
        sizes[f"number of blocks in stage {number}"] = len(small), len(big)
        layers = zip(block_layers(small[0]), block_layers(big[0]), strict=True)
        for index, ((ours, _), (theirs, _)) in enumerate(layers, 1):
            sizes[f"width of convolution {index} in stage {number}"] = (
                ours.out_channels,
                theirs.out_channels,
            )
    return sizes


def _strides(model: CNN) -> list[tuple[int, ...]]:
    """Of all layers that make maps smaller, in order."""
    strides: list[tuple[int, ...]] = []
    for module in model.modules():
        stride: Any = getattr(module, "stride", 1)
        if isinstance(module, nn.Conv2d) and stride != (1, 1) and module.kernel_size != (1, 1):
            strides.append(stride)
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


@torch.no_grad()
def inherit_resnet(
    student: CNN,
    teacher: CNN,
    pictures: Images,
    student_input: Preprocess,
    teacher_input: Preprocess,
    taps: SampleTaps,
) -> None:
    """Overwrites a student's weights with the teacher's layers, fitted to its size; both are in evaluation mode.

    Args:
        student: a ResNet that :func:`check_resnets` accepts.
        teacher: a ResNet.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are; it sees the student's size here.
        taps: get what tapped layers of the models give on the sample.
    """
    fit = _Fit(student, teacher)
    values = fit.largest_maps(student_input.size)
    ours, theirs = views_of_both(pictures, student_input, teacher_input, values)
    blocks = sum(len(stage) for stage in stages_of(teacher))
    with progress("the student's convolutions", blocks) as passed:
        chosen = fit.choose(theirs)
        ours, theirs = fit.stem(ours, theirs, chosen)
        for number in range(len(stages_of(student))):
            before = chosen[number]
            for group in fit.groups[number]:
                ours, theirs = fit.block(number, group, ours, theirs, before, chosen[number + 1])
                before = chosen[number + 1]
                passed.update(len(group))

    if inherits_classifier(student, teacher):
        start = teacher.fc.weight[:, chosen[-1]]
        fit_classifier(student, teacher, pictures, student_input, teacher_input, start, taps)


class _Fit:
    """A student on its way through the teacher's stages.

    Args:
        student: a ResNet.
        teacher: a larger one.
    """

    def __init__(self, student: CNN, teacher: CNN) -> None:
        self.student, self.teacher = student, teacher
        self.groups: list[list[list[int]]] = []
        """Of each stage, of each of the student's blocks: the numbers of the teacher's blocks whose work it does."""

    def largest_maps(self, size: tuple[int, int]) -> int:
        """Numbers in the teacher's largest maps of one picture.

        Args:
            size: height and width of the picture in pixels; the first stage has a quarter of each.
        """
        widths = []
        for stage in stages_of(self.teacher):
            last_convolution, *_ = block_layers(stage[0])[-1]
            widths.append(last_convolution.out_channels)
        height, width = size
        return max(widths[0] * height * width // 16, *widths)

    def choose(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The channels that are kept of the stem and of each stage's stream; sets :attr:`groups`.

        Args:
            inputs: the teacher's, part by part.
        """
        stages = stages_of(self.teacher)
        blocks = [block for stage in stages for block in stage]
        rows: dict[nn.Module, list[Tensor]] = {block: [] for block in blocks}
        stem_rows = []
        changes: dict[nn.Module, float] = dict.fromkeys(blocks, 0.0)
        for number, part in enumerate(shown(inputs[:GUIDE], "choice of channels")):
            stream = _stem(self.teacher, part)
            stem_rows.append(at(stream, positions_in(stream, number)))
            for block in blocks:
                after = block(stream.clone())
                if after.shape == stream.shape:
                    changes[block] += float(
                        (after - stream).norm() / stream.norm().clamp(min=1e-12)
                    )
                stream = after
                rows[block].append(at(stream, positions_in(stream, number)))

        chosen = [self._read(stem_rows, [stages[0][0]], stem_layers(self.student)[-1][0])]
        for number, (ours, theirs) in enumerate(zip(stages_of(self.student), stages, strict=True)):
            of_stage = [changes[block] for block in theirs]
            self.groups.append(groups_by_change(of_stage, len(ours)))
            following = [
                *theirs[1:],
                *([stages[number + 1][0]] if theirs is not stages[-1] else [None]),
            ]
            readings = []
            for block, reader in zip(theirs, following, strict=True):
                readings += self._readings(rows[block], reader)
            count = block_layers(ours[0])[-1][0].out_channels
            chosen.append(chosen_channels(readings, count))
        if (
            shortcut_layer(stages[0][0]) is None
            and shortcut_layer(stages_of(self.student)[0][0]) is None
        ):
            chosen[0] = chosen[1]  # one stream
        return chosen

    def _read(self, rows: Sequence[Tensor], readers: Sequence[Any], layer: nn.Conv2d) -> Tensor:
        readings = []
        for reader in readers:
            readings += self._readings(rows, reader)
        return chosen_channels(readings, layer.out_channels)

    def _readings(self, rows: Sequence[Tensor], reader: Part) -> list[Readout]:
        """What reads a stream: the block after it, or the classifier (None)."""
        spread = covariance(torch.cat(list(rows)))
        every_channel = torch.eye(len(spread))
        if reader is None:
            has_head = isinstance(self.teacher.fc, nn.Linear)
            return [Readout(spread, self.teacher.fc.weight if has_head else every_channel)]
        weights = [as_reader(folded_with_norm(*block_layers(reader)[0]))]
        shortcut = shortcut_layer(reader)
        if shortcut is None:  # it passes the stream on
            weights.append(every_channel)
        else:
            weights.append(as_reader(folded_with_norm(*shortcut)))
        return [Readout(spread, weight) for weight in weights]

    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], chosen: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the stem.

        Args:
            ours: the student's input, part by part.
            theirs: the teacher's.
            chosen: of :meth:`choose`.

        Returns:
            The streams of student and teacher after it, part by part.
        """
        layers = _Layers(stem_layers(self.student), stem_layers(self.teacher))
        layers.fit(
            lambda part: _stem(self.student, part),
            lambda part: _stem(self.teacher, part),
            ours,
            theirs,
            torch.arange(ours[0].shape[1]),
            chosen[0],
            None,
        )
        return (
            [_stem(self.student, part) for part in ours],
            [_stem(self.teacher, part) for part in theirs],
        )

    def block(
        self,
        stage: int,
        group: Sequence[int],
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits one of the student's blocks.

        Args:
            stage: its number.
            group: the teacher's blocks whose work it does; the first is the one that it follows.
            ours: the student's stream before it, part by part.
            theirs: the teacher's.
            before: the channels of the teacher's stream that the student has before the block.
            after: those that it has after it.

        Returns:
            The streams after it, part by part.
        """
        place = next(i for i, other in enumerate(self.groups[stage]) if other is group)
        block: Any = stages_of(self.student)[stage][place]
        teacher_blocks: list[Any] = [stages_of(self.teacher)[stage][number] for number in group]
        followed = teacher_blocks[0]
        sums, outputs = [], []
        for stream in shown(theirs, "the teacher's block"):
            current = stream
            for each in teacher_blocks:
                with caught([last_activation(each)]) as tensors:
                    current = each(current.clone())
                total = tensors[last_activation(each)]
            sums.append(total[:, after])
            outputs.append(current)

        # The shortcut, where it is a convolution: to the teacher's shortcut.
        shortcut = shortcut_layer(block)
        if shortcut is not None:
            self._fit_shortcut(block, shortcut, followed, ours, theirs, before, after)
        targets = []
        for total, stream in zip(sums, ours, strict=True):
            passed = stream if block.downsample is None else block.downsample(stream)
            targets.append(total - passed)
        layers = _Layers(block_layers(block), block_layers(followed))
        layers.fit(
            lambda part: block(part.clone()),
            lambda part: followed(part.clone()),
            ours,
            theirs,
            before,
            after,
            targets,
        )
        after_block = [block(stream.clone()) for stream in shown(ours, "the student's block")]
        return after_block, outputs

    def _fit_shortcut(
        self,
        block: Part,
        shortcut: Layer,
        followed: Part,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> None:
        """Fits the shortcut's convolution; arguments as of :meth:`block`."""
        layer, norm = shortcut
        teacher_layer = shortcut_layer(followed)
        if teacher_layer is None:  # the student's first block is narrower than its stem
            start = torch.eye(followed.conv1.in_channels)[after][:, before, None, None]
        else:
            start = folded_with_norm(*teacher_layer)[after][:, before]
        targets = []
        for stream in theirs:
            passed = stream
            if followed.downsample is not None:
                passed = followed.downsample(stream)
            targets.append(passed[:, after])
        fit_at_places(layer, norm, block.downsample, ours, targets, start)


class _Layers:
    """Convolutions in a row, each with a BatchNorm and an activation after it.

    Args:
        ours: the student's.
        theirs: the teacher's.
    """

    def __init__(self, ours: Sequence[Layer], theirs: Sequence[Layer]) -> None:
        self.ours, self.theirs = ours, theirs

    def fit(
        self,
        run_ours: Part,
        run_theirs: Part,
        our_inputs: Sequence[Tensor],
        their_inputs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
        targets: Sequence[Tensor] | None,
    ) -> None:
        """Chooses the channels between them, and fits them in their order.

        Args:
            run_ours: runs the student's part of which they are, given its input.
            run_theirs: runs the teacher's.
            our_inputs: what the student's part reads, part by part.
            their_inputs: what the teacher's reads.
            before: the channels of the teacher's input that the student has.
            after: those of its output.
            targets: what the last one should give, ``(N, C, h, w)`` of each part; None: what the teacher's gives.
        """
        kept = self._between(run_theirs, their_inputs, after)
        kept_before = [before, *kept[:-1]]
        for index, (layer, norm) in enumerate(self.ours):
            teacher_layer, teacher_norm = self.theirs[index]
            channels = kept[index]
            is_last = index == len(self.ours) - 1
            wanted: Iterable[Tensor] | None = targets
            if not is_last or wanted is None:
                wanted = self._outputs(run_theirs, teacher_norm, their_inputs, channels)
            start = folded_with_norm(teacher_layer, teacher_norm)[channels][:, kept_before[index]]
            fit_at_places(layer, norm, run_ours, our_inputs, wanted, start)

    @staticmethod
    def _outputs(
        run: Part, norm: nn.Module, inputs: Sequence[Tensor], channels: Tensor
    ) -> Iterator[Tensor]:
        """What one of the teacher's norms gives at some channels, part by part."""
        for part in inputs:
            with caught([norm], output=True) as outputs:
                run(part)
            yield outputs[norm][:, channels]

    def _between(self, run_theirs: Part, inputs: Sequence[Tensor], after: Tensor) -> list[Tensor]:
        """The channels of each layer's output that are kept, chosen from the last to the first by what reads them."""
        readers = [layer for layer, _ in self.theirs[1:]]
        rows: dict[nn.Module, list[Tensor]] = {layer: [] for layer in readers}
        for number, part in enumerate(inputs[:GUIDE]):
            with caught(readers) as tensors:
                run_theirs(part)
            for layer in readers:
                rows[layer].append(at(tensors[layer], positions_in(tensors[layer], number)))
        kept = [after]
        for index in range(len(self.ours) - 2, -1, -1):
            reader = self.theirs[index + 1]
            weight = as_reader(folded_with_norm(*reader)[kept[0]])
            reading = Readout(covariance(torch.cat(rows[reader[0]])), weight)
            kept.insert(0, chosen_channels([reading], self.ours[index][0].out_channels))
        return kept


def _stem(model: CNN, pictures: Tensor) -> Tensor:
    """The stream before the first stage."""
    return model.maxpool(model.act1(model.bn1(model.conv1(pictures))))
