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

In all functions ``ours`` and ``theirs`` are maps ``(N, C, H, W)`` of student and teacher, one tensor for each part of
the sample; ``before`` and ``after`` are numbers of the teacher's channels that the student keeps there.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.cnn import (
    GUIDE_PARTS,
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
from kd.distill.inherit.pair import must_be_equal, must_not_be_larger
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.inherit.stream import progress, shown
from kd.models.preprocess import Images, Preprocess

ConvNorm: TypeAlias = tuple[nn.Conv2d, Any]
"""A convolution and the BatchNorm after it."""


def stages_of(model: ResNet) -> list[nn.Sequential]:
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

    The layers are fitted with the teacher at the student's input size. The classifier is fitted to the teacher's answers at
    the teacher's own size, and only where both have a linear classifier of as many classes.

    Args:
        student: a ResNet that :func:`check_resnets` accepts.
        teacher: a ResNet.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are.
        taps: get what tapped layers of the models give on the sample, where the classifier is fitted.

    Raises:
        ValueError: the student is a copy of the teacher's size, and answers differently (:func:`fit_classifier`).
    """
    fit = _Fit(student, teacher)
    values = fit.largest_maps(student_input.size)
    ours, theirs = views_of_both(pictures, student_input, teacher_input, values)
    blocks = sum(len(stage) for stage in stages_of(teacher))
    with progress("the student's convolutions", blocks) as passed:
        chosen = fit.choose(theirs)
        ours, theirs = fit.stem(ours, theirs, chosen)
        for number, (before, after) in enumerate(pairwise(chosen)):
            for group in fit.groups[number]:
                ours, theirs = fit.block(number, group, ours, theirs, before, after)
                before = after  # a stage's first block alone reads the stream before the stage
                passed.update(len(group))

    if inherits_classifier(student, teacher):
        start = teacher.fc.weight[:, chosen[-1]]
        fit_classifier(student, teacher, pictures, student_input, teacher_input, start, taps)


class _Guide(NamedTuple):
    """What a teacher does on the parts of the sample that decide what is kept."""

    stem_rows: list[Tensor]
    """The stream after the stem at drawn places, ``(R, C)`` of each part."""
    rows: dict[nn.Module, list[Tensor]]
    """The stream after each block, likewise."""
    changes: dict[nn.Module, float]
    """How much each block changes the stream, as a share of its norm, summed over the parts; 0 where its shape changes."""


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
        """Numbers in the teacher's largest stream after a stage, of one picture; maps inside stem and blocks don't count.

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

        Returns:
            The numbers of the teacher's channels in rising order: of the stem's stream, then of each stage's.
        """
        student_stages = stages_of(self.student)
        stages = stages_of(self.teacher)
        stem_rows, rows, changes = self._run_guide(inputs)

        *_, stem_width = _widths(stem_layers(self.student))
        first_block = stages[0][0]
        readings = self._readings(stem_rows, first_block)
        chosen = [chosen_channels(readings, stem_width)]
        next_stages: list[Any] = [*stages[1:], [None]]
        for ours, theirs, next_stage in zip(student_stages, stages, next_stages, strict=True):
            of_stage = [changes[block] for block in theirs]
            groups = groups_by_change(of_stage, len(ours))
            self.groups.append(groups)

            # Each block's output is read by the block after it, that of the last one by the classifier (None).
            readers = [*theirs[1:], next_stage[0]]
            readings = []
            for block, reader in zip(theirs, readers, strict=True):
                readings += self._readings(rows[block], reader)
            *_, last_width = _widths(block_layers(ours[0]))
            chosen.append(chosen_channels(readings, last_width))

        first_blocks = first_block, student_stages[0][0]
        if all(shortcut_layer(block) is None for block in first_blocks):
            chosen[0] = chosen[1]  # one stream
        return chosen

    def _run_guide(self, inputs: Sequence[Tensor]) -> "_Guide":
        """Runs the teacher's stem and blocks on the parts of the sample that decide; ``inputs`` as of :meth:`choose`."""
        stages = stages_of(self.teacher)
        blocks: list[nn.Module] = [block for stage in stages for block in stage]
        guide = _Guide([], {block: [] for block in blocks}, dict.fromkeys(blocks, 0.0))
        for number, part in enumerate(shown(inputs[:GUIDE_PARTS], "choice of channels")):
            stream = _stem(self.teacher, part)
            positions = positions_in(stream, number)
            guide.stem_rows.append(at(stream, positions))
            for block in blocks:
                after = block(stream.clone())
                if after.shape == stream.shape:
                    change = (after - stream).norm()
                    size = stream.norm().clamp(min=1e-12)
                    guide.changes[block] += float(change / size)
                stream = after
                positions = positions_in(stream, number)
                guide.rows[block].append(at(stream, positions))
        return guide

    def _readings(self, rows: Sequence[Tensor], reader: Part) -> list[Readout]:
        """Where what follows a stream reads its channels, by which those that are kept are chosen.

        Args:
            rows: the stream at some positions, ``(R, C)`` of each part of the sample.
            reader: the teacher's block after it; None: the classifier.

        Returns:
            Of a block two: its first convolution, and its shortcut; of the classifier one, in which each channel counts by
            itself where the teacher has none.
        """
        spread = covariance(torch.cat(list(rows)))
        every_channel = torch.eye(len(spread))
        if reader is None:
            has_head = isinstance(self.teacher.fc, nn.Linear)
            return [Readout(spread, self.teacher.fc.weight if has_head else every_channel)]
        first_layer = block_layers(reader)[0]
        first_weight = as_reader(folded_with_norm(*first_layer))
        shortcut = shortcut_layer(reader)
        passed_on = every_channel
        if shortcut is not None:
            passed_on = as_reader(folded_with_norm(*shortcut))
        return [Readout(spread, first_weight), Readout(spread, passed_on)]

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
        run_ours = partial(_stem, self.student)
        run_theirs = partial(_stem, self.teacher)
        colours = torch.arange(ours[0].shape[1])
        our_layers = stem_layers(self.student)
        their_layers = stem_layers(self.teacher)
        layers = _ConvolutionRow(our_layers, their_layers)
        layers.fit(run_ours, run_theirs, ours, theirs, before=colours, after=chosen[0])
        our_streams = []
        for part in ours:
            our_streams.append(run_ours(part))
        their_streams = []
        for part in theirs:
            their_streams.append(run_theirs(part))
        return our_streams, their_streams

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
            stage: its number, from 0.
            group: numbers in the stage of the teacher's blocks whose work it does; the first is the one that it follows.
                One of the lists of :attr:`groups`, by which the student's block is found.
            ours: the student's stream before it, part by part.
            theirs: the teacher's.
            before: the channels of the teacher's stream that the student has before the block.
            after: those that it has after it.

        Returns:
            The streams after it and after all of ``group``, part by part.
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
        layers = _ConvolutionRow(block_layers(block), block_layers(followed))
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
        shortcut: ConvNorm,
        followed: Part,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> None:
        """Fits the convolution of a block's shortcut, and its norm.

        Args:
            block: the student's; its ``downsample`` is the shortcut.
            shortcut: its convolution and norm.
            followed: the teacher's block.
            ours: the student's maps before the block, ``(N, C_student, H, W)`` of each part of the sample.
            theirs: the teacher's, likewise.
            before: the teacher's channels that the student has before the block.
            after: those after it.
        """
        layer, norm = shortcut
        teacher_layer = shortcut_layer(followed)
        if teacher_layer is None:  # the student's first block is not as wide as its stem
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


class _ConvolutionRow:
    """Convolutions in a row, each with a BatchNorm and an activation after it.

    Args:
        ours: the student's.
        theirs: the teacher's.
    """

    def __init__(self, ours: Sequence[ConvNorm], theirs: Sequence[ConvNorm]) -> None:
        self.ours, self.theirs = ours, theirs

    def fit(
        self,
        run_ours: Part,
        run_theirs: Part,
        our_inputs: Sequence[Tensor],
        their_inputs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
        targets: Sequence[Tensor] | None = None,
    ) -> None:
        """Chooses the channels between them, and fits them in their order.

        Args:
            run_ours: runs the student's module that they are in (the stem, a block), given its input.
            run_theirs: runs the teacher's.
            our_inputs: what the student's module reads, ``(N, C, H, W)`` of each part of the sample.
            their_inputs: what the teacher's reads, likewise.
            before: numbers of the channels of the teacher's input that the student has.
            after: those of its output.
            targets: what the last one should give, ``(N, C, h, w)`` of each part; None: what the teacher's gives.
        """
        kept = self._between(run_theirs, their_inputs, after)
        kept_before = [before, *kept[:-1]]
        last_layer, _ = self.ours[-1]
        for index, (layer, norm) in enumerate(self.ours):
            teacher_layer, teacher_norm = self.theirs[index]
            inputs = kept_before[index]
            outputs = kept[index]
            wanted: Iterable[Tensor] | None = targets
            if layer is not last_layer or wanted is None:
                wanted = self._outputs(run_theirs, teacher_norm, their_inputs, outputs)
            weight = folded_with_norm(teacher_layer, teacher_norm)
            start = weight[outputs][:, inputs]
            fit_at_places(layer, norm, run_ours, our_inputs, wanted, start)

    @staticmethod
    def _outputs(
        run: Part, norm: nn.Module, inputs: Sequence[Tensor], channels: Tensor
    ) -> Iterator[Tensor]:
        """What one of the teacher's norms gives at some channels, ``(N, len(channels), H, W)``, part by part.

        Args:
            run: runs the teacher's layers.
            norm: one of them.
            inputs: ``(N, C, H, W)`` of each part of the sample.
            channels: that are kept.
        """
        for part in inputs:
            with caught([norm], output=True) as outputs:
                run(part)
            yield outputs[norm][:, channels]

    def _between(self, run_theirs: Part, inputs: Sequence[Tensor], after: Tensor) -> list[Tensor]:
        """The channels of each layer's output that are kept, chosen from the last to the first by what reads them.

        Args:
            run_theirs: runs the teacher's layers.
            inputs: their inputs, ``(N, C, H, W)`` of each part of the sample.
            after: the channels kept after the last layer.

        Returns:
            Of each layer the numbers of the teacher's channels, in rising order; the last is ``after``.
        """
        readers = [layer for layer, _ in self.theirs[1:]]
        rows: dict[nn.Module, list[Tensor]] = {layer: [] for layer in readers}
        for number, part in enumerate(inputs[:GUIDE_PARTS]):
            with caught(readers) as tensors:
                run_theirs(part)
            for layer in readers:
                maps = tensors[layer]
                positions = positions_in(maps, number)
                rows[layer].append(at(maps, positions))

        kept = [after]
        widths = _widths(self.ours[:-1])
        layers_after = self.theirs[1:]
        for width, (layer, norm) in zip(reversed(widths), reversed(layers_after), strict=True):
            weight = folded_with_norm(layer, norm)[kept[0]]
            spread = covariance(torch.cat(rows[layer]))
            reading = Readout(spread, as_reader(weight))
            kept.insert(0, chosen_channels([reading], width))
        return kept


def _stem(model: CNN, pictures: Tensor) -> Tensor:
    """The stream before the first stage, ``(N, C, H / 4, W / 4)`` of prepared pictures ``(N, 3, H, W)``."""
    return model.maxpool(model.act1(model.bn1(model.conv1(pictures))))
