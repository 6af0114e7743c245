"""ConvNeXt (Liu et al., 2022), ConvNeXt V2 and DINOv3's: a student of other widths and depths of its stages.

A block adds to a stage's stream of channels::

    x <- x + gamma * W2 gelu(W1 norm(depthwise(x)))          (V2: a global response norm before W2)

A depthwise filter sees one channel, so channels can't be mixed as a transformer's can: the student keeps some of each
stage's (:mod:`kd.distill.inherit.channels`). Then, from the first layer to the last, on what the student's fitted
layers before give (:mod:`kd.distill.inherit.maps`): depthwise filters are fitted channel by channel to the teacher's;
W1 to what the teacher's gives for those hidden units that write most into the channels that are kept; W2 to what the
student's stream lacks of the teacher's, so that it also does the work of blocks that the student leaves out. Scales and
shifts of norms, and gamma, go into the layers after and before them.

In all functions ``ours`` and ``theirs`` are streams ``(N, C, H, W)`` of student and teacher, one tensor for each part
of the sample; ``kept`` are numbers of the teacher's channels that the student's stage has.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.layers import GlobalResponseNormMlp, Mlp, NormMlpClassifierHead
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part, reset_norm
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
    fit_depthwise,
    fit_layer,
    groups_by_change,
    rows_needed,
    under_kernel,
    windows,
)
from kd.distill.inherit.pair import must_be_equal, must_not_be_larger
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.inherit.stream import progress, shown
from kd.models.preprocess import Images, Preprocess


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


@torch.no_grad()
def inherit_convnext(
    student: CNN,
    teacher: CNN,
    pictures: Images,
    student_input: Preprocess,
    teacher_input: Preprocess,
    taps: SampleTaps,
) -> None:
    """Overwrites a student's weights with the teacher's layers, fitted to its size; both are in evaluation mode.

    The layers are fitted to as many of the first pictures as :func:`views_of_both` takes, with the teacher at the student's
    input size. The classifier is fitted, to all pictures, to the teacher's answers at the teacher's own size, and only
    where both have a linear classifier of as many classes.

    Args:
        student: a ConvNeXt that :func:`check_convnexts` accepts.
        teacher: a ConvNeXt.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are.
        taps: get what tapped layers of the models give on the sample, where the classifier is fitted.

    Raises:
        ValueError: the student is a copy of the teacher's size, and answers differently (:func:`fit_classifier`).
    """
    height, width = student_input.size
    stride, _ = teacher.stem[0].stride
    rows = height // stride
    columns = width // stride
    # numbers in a picture's largest stream: views_of_both takes as many pictures as memory has room for
    values = _width(teacher.stages[0]) * rows * columns
    ours, theirs = views_of_both(pictures, student_input, teacher_input, values)
    chosen, changes = _choose(student, teacher, theirs)
    _reset_scales(student)
    blocks = sum(len(stage.blocks) for stage in teacher.stages)
    with progress("the student's blocks", blocks) as passed:
        ours, theirs = _fit_stem(student, teacher, ours, theirs, chosen[0])
        stages = zip(student.stages, teacher.stages, strict=True)
        for (before, kept), (small, big) in zip(pairwise(chosen), stages, strict=True):
            if not isinstance(big.downsample, nn.Identity):
                ours, theirs = _fit_downsample(small, big, ours, theirs, before, kept)
            for block, followed in _followed_blocks(small, big, changes):
                ours, theirs = _fit_block(block, followed, ours, theirs, kept)
                passed.update(len(followed))

    if inherits_classifier(student, teacher):
        reads = teacher.head.fc.weight * head_norm(teacher).weight
        start = reads[:, chosen[-1]]
        fit_classifier(student, teacher, pictures, student_input, teacher_input, start, taps)


def _followed_blocks(
    small: Part, big: Part, changes: Mapping[nn.Module, float]
) -> Iterator[tuple[Any, list[Any]]]:
    """Each block of a student's stage with the teacher's blocks whose work it does.

    Args:
        small: the student's stage.
        big: the teacher's.
        changes: how much each block of the teacher changes its stream, by which :func:`groups_by_change` shares them out.

    Yields:
        The student's block, and its blocks of the teacher in order, at least one.
    """
    changes_of_blocks = []
    for big_block in big.blocks:
        changes_of_blocks.append(changes[big_block])
    groups = groups_by_change(changes_of_blocks, len(small.blocks))
    for block, numbers in zip(small.blocks, groups, strict=True):
        followed = []
        for number in numbers:
            followed.append(big.blocks[number])
        yield block, followed


def _reset_scales(student: CNN) -> None:
    """Sets norms to scale 1 and shift 0, layer scales to 1: they go into the layers that are fitted."""
    for module in student.modules():
        kind = type(module).__name__
        is_norm = isinstance(module, nn.LayerNorm) or kind.startswith(("RmsNorm", "SimpleNorm"))
        if is_norm:
            reset_norm(module)
        if isinstance(module, ConvNeXtBlock) and module.gamma is not None:
            nn.init.ones_(module.gamma)


def _choose(
    student: CNN, teacher: CNN, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[nn.Module, float]]:
    """Chooses the channels that are kept, by what reads them on the parts of the sample that decide.

    Args:
        student: how many channels it has.
        teacher: runs.
        inputs: the teacher's, part by part.

    Returns:
        The numbers of the channels of the stem's stream, then of each stage's, in rising order; and how much each block
        of the teacher changes its stream, as a share of its norm, summed over the parts. Where the first stage has no
        layer before its blocks, it goes on with the stem's stream: both entries are one tensor.
    """
    has_stem_stream = not isinstance(teacher.stages[0].downsample, nn.Identity)
    readers = _readers(teacher, has_stem_stream)
    rows: dict[nn.Module, list[Tensor]] = {}
    for layers in readers:
        for layer in layers:
            rows[layer] = []
    blocks = [block for stage in teacher.stages for block in stage.blocks]
    changes: dict[nn.Module, float] = dict.fromkeys(blocks, 0.0)
    for number, part in enumerate(shown(inputs[:GUIDE_PARTS], "choice of channels")):
        with caught([*rows, *blocks]) as read, caught(blocks, output=True) as written:
            teacher(part)
        for layer in rows:
            tensor = read[layer]
            if tensor.ndim == 4:
                tensor = at(tensor, positions_in(tensor, number))
            rows[layer].append(tensor)
        for block in blocks:
            before = read[block]
            change = (written[block] - before).norm()
            changes[block] += float(change / before.norm().clamp(min=1e-12))

    widths = [_width(stage) for stage in student.stages]
    if has_stem_stream:
        widths.insert(0, student.stem[0].out_channels)
    chosen = []
    for width, layers in zip(widths, readers, strict=True):
        readings = []
        for layer in layers:
            spread = covariance(torch.cat(rows[layer]))
            weight = layer.weight
            if weight.ndim == 4:
                weight = as_reader(weight)
            readings.append(Readout(spread, weight))
        chosen.append(chosen_channels(readings, width))
    if not has_stem_stream:
        chosen.insert(0, chosen[0])
    return chosen, changes


def _readers(teacher: CNN, has_stem_stream: bool) -> list[list[Any]]:
    """The teacher's layers that read each stream: the stem's, where it is not the first stage's, then each stage's.

    A stage's stream is read by the first layer of each block's MLP (through a norm and filters that leave channels apart)
    and by what comes after the stage: the next one's convolution, or the classifier.
    """
    readers: list[list[Any]] = [[]]  # the stem's stream first
    for number, stage in enumerate(teacher.stages):
        if number > 0 or has_stem_stream:
            _norm, convolution = stage.downsample
            readers[-1].append(convolution)
        layers = [block.mlp.fc1 for block in stage.blocks]
        readers.append(layers)
    if isinstance(teacher.head.fc, nn.Linear):
        readers[-1].append(teacher.head.fc)
    if not has_stem_stream:
        del readers[0]
    return readers


def _fit_stem(
    student: CNN, teacher: CNN, ours: Sequence[Tensor], theirs: Sequence[Tensor], kept: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Fits the patches, then scale and shift of the norm after them.

    A norm over the channels that are kept is not the norm over all: its scale and shift are fitted channel by channel.

    Args:
        student: changed in place.
        teacher: as it is.
        ours: the student's pictures, ``(N, 3, H, W)`` of each part of the sample.
        theirs: the teacher's, likewise.
        kept: the teacher's channels that the student's stem has.

    Returns:
        The streams after the stem, of student and teacher, ``(N, C, H, W)`` of each part.
    """
    layer, norm = student.stem
    teacher_layer, teacher_norm = teacher.stem
    rows = []
    targets = []
    count = rows_needed(layer) // len(ours)
    for number, (pictures, teacher_pictures) in enumerate(zip(ours, theirs, strict=True)):
        maps = teacher_layer(teacher_pictures)
        positions = positions_in(maps, number, count)
        patches = under_kernel(layer, pictures, positions)
        outputs = at(maps, positions)
        normed_outputs = at(teacher_norm(maps), positions)
        rows.append((patches, outputs[:, kept]))
        targets.append(normed_outputs[:, kept])
    fit_layer(layer, None, rows, teacher_layer.weight[kept])

    normed = []
    for number, pictures in enumerate(ours):
        maps = layer(pictures)
        positions = positions_in(maps, number, count)
        normed.append(at(norm(maps), positions))
    _fit_scale_and_shift(norm, torch.cat(normed), torch.cat(targets))
    return [student.stem(part) for part in ours], [teacher.stem(part) for part in theirs]


def _fit_scale_and_shift(norm: Part, x_RC: Tensor, y_RC: Tensor) -> None:
    """Sets a norm to the regression ``y = a x + b`` of each channel, or ``y = a x`` where it has no shift.

    Args:
        norm: of scale 1 and shift 0.
        x_RC: what it gives.
        y_RC: what it should give.
    """
    has_shift = getattr(norm, "bias", None) is not None
    mean_x = mean_y = torch.zeros_like(x_RC[0])
    if has_shift:
        mean_x = x_RC.mean(0)
        mean_y = y_RC.mean(0)
    x_RC = x_RC - mean_x
    y_RC = y_RC - mean_y
    variance = x_RC.square().mean(0).clamp(min=1e-12)
    slope = (x_RC * y_RC).mean(0) / variance
    norm.weight.copy_(slope)
    if has_shift:
        norm.bias.copy_(mean_y - slope * mean_x)


def _fit_downsample(
    small: Part,
    big: Part,
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    before: Tensor,
    after: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Fits the convolution between two stages.

    Args:
        small: the student's stage after it.
        big: the teacher's.
        ours: the student's stream before it, part by part.
        theirs: the teacher's.
        before: the teacher's channels that the student has before it.
        after: those that it has after it.

    Returns:
        The streams after it, of student and teacher, part by part.
    """
    layer, teacher_layer = small.downsample[1], big.downsample[1]
    weight = teacher_layer.weight * big.downsample[0].weight[:, None, None]
    fit_at_places(
        layer,
        None,
        small.downsample,
        ours,
        [big.downsample(stream)[:, after] for stream in theirs],
        weight[after][:, before],
    )
    return [small.downsample(part) for part in ours], [big.downsample(part) for part in theirs]


def _fit_block(
    block: Part,
    followed: Sequence[Any],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    kept: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Fits one of the student's blocks.

    Args:
        block: the student's.
        followed: the teacher's blocks whose work it does; its inside is fitted to the first one's, and what it adds to
            the stream to what all of them add.
        ours: the student's stream before it, part by part.
        theirs: the teacher's.
        kept: the teacher's channels that the student's stage has.

    Returns:
        The streams after it and after all of ``followed``, part by part.
    """
    first = followed[0]
    mlp = block.mlp
    teacher_mlp = first.mlp
    written_layers = [first.conv_dw, teacher_mlp.fc1]
    filtered = []
    hidden = []
    units = []
    after = []
    for number, stream in enumerate(shown(theirs, "the teacher's block")):
        with caught(written_layers, output=True) as outputs, caught([teacher_mlp.fc2]) as inputs:
            current = first(stream)
        for other in followed[1:]:
            current = other(current)
        after.append(current)
        maps = outputs[first.conv_dw]
        filtered.append(maps[:, kept])
        hidden.append(outputs[teacher_mlp.fc1])
        if number < GUIDE_PARTS:
            maps = inputs[teacher_mlp.fc2]
            positions = positions_in(maps, number)
            units.append(at(maps, positions))

    _fit_filters(block.conv_dw, ours, filtered, first.conv_dw.weight[kept])

    # The hidden units that write most: E |w u|^2 about its mean = |w|^2 Var(u), of each unit's column w.
    write = teacher_mlp.fc2.weight.flatten(1)[kept]
    if first.gamma is not None:
        write = first.gamma[kept][:, None] * write
    variances = torch.cat(units).var(0)
    powers = variances * write.square().sum(0)
    count = len(mlp.fc1.weight)
    places = powers.topk(count).indices.sort().values
    reads = teacher_mlp.fc1.weight.flatten(1) * first.norm.weight
    start = reads[places][:, kept]
    targets = [maps[:, places] for maps in hidden]
    fit_at_places(mlp.fc1, None, block, ours, targets, start)
    if isinstance(mlp, GlobalResponseNormMlp):
        mlp.grn.weight.copy_(teacher_mlp.grn.weight[places])
        mlp.grn.bias.copy_(teacher_mlp.grn.bias[places])

    # The second layer: what the student's stream lacks of the teacher's.
    missing = []
    for total, stream in zip(after, ours, strict=True):
        missing.append(total[:, kept] - stream)
    fit_at_places(mlp.fc2, None, block, ours, missing, write[:, places])
    return [block(stream) for stream in shown(ours, "the student's block")], after


def _fit_filters(
    layer: nn.Conv2d, streams: Sequence[Tensor], targets: Sequence[Tensor], start: Tensor
) -> None:
    """Fits depthwise filters, channel by channel, at drawn places.

    Args:
        layer: the student's.
        streams: what it reads, ``(N, C, H, W)`` of each part.
        targets: what it should give, likewise.
        start: of its weight, ``(C, 1, kh, kw)``.
    """
    count = rows_needed(layer) // len(streams)
    pairs = []
    for number, (stream, target) in enumerate(zip(streams, targets, strict=True)):
        positions = positions_in(target, number, count)
        windows_NChwkk = windows(layer, stream)
        windows_NhwCkk = windows_NChwkk.permute(0, 2, 3, 1, 4, 5)
        inputs_RCkk = windows_NhwCkk[positions]
        outputs_RC = at(target, positions)
        pairs.append((inputs_RCkk.flatten(2), outputs_RC))
    fit_depthwise(layer, pairs, start)
