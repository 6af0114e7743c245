"""ConvNeXt (Liu et al., 2022), ConvNeXt V2 and DINOv3's: a student of other widths and depths of its stages.

A block adds to a stage's stream of channels::

    x <- x + gamma * W2 gelu(W1 norm(depthwise(x)))          (V2: a global response norm before W2)

A depthwise filter sees one channel, so channels can't be mixed as a transformer's can: the student keeps some of each
stage's (:mod:`kd.distill.inherit.channels`). Then, from the first layer to the last, on what the student's fitted
layers before give (:mod:`kd.distill.inherit.maps`): depthwise filters are fitted channel by channel to the teacher's;
W1 to what the teacher's gives for those hidden units that write most into the channels that are kept; W2 to what the
student's stream lacks of the teacher's, so that it also does the work of blocks that the student leaves out. Scales and
shifts of norms, and gamma, go into the layers after and before them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import GlobalResponseNormMlp, Mlp, NormMlpClassifierHead
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
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
    fit_depthwise,
    fit_layer,
    groups_by_change,
    rows_needed,
    under_kernel,
    windows,
)
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
    values = {
        "kind of MLP": (type(small[0].blocks[0].mlp).__name__, type(big[0].blocks[0].mlp).__name__),
        "size of patches": (student.stem[0].kernel_size, teacher.stem[0].kernel_size),
        "kernels of depthwise convolutions": (_kernels(student), _kernels(teacher)),
        "norms": (type(small[0].blocks[0].norm).__name__, type(big[0].blocks[0].norm).__name__),
    }
    values["norms"] = tuple(name.removesuffix("2d") for name in values["norms"])
    if inherits_classifier(student, teacher):
        pools = student.head.global_pool.pool_type, teacher.head.global_pool.pool_type
        heads = type(student.head).__name__, type(teacher.head).__name__
        values |= {"pooling": pools, "kind of head": heads}
    for name, (of_student, of_teacher) in values.items():
        if of_student != of_teacher:
            raise ValueError(
                f"student and teacher must have the same {name}, got {of_student} and {of_teacher}"
            )
    for number, (ours, theirs) in enumerate(zip(small, big, strict=True), 1):
        sizes = {
            "width": (_width(ours), _width(theirs)),
            "number of blocks": (len(ours.blocks), len(theirs.blocks)),
            "hidden units": (_hidden(ours), _hidden(theirs)),
        }
        for name, (of_student, of_teacher) in sizes.items():
            if of_student > of_teacher:
                raise ValueError(
                    f"the student must have no larger {name} in stage {number} than the teacher, "
                    f"got {of_student} and {of_teacher}"
                )


def _kernels(model: CNN) -> list[tuple[int, ...]]:
    return [stage.blocks[0].conv_dw.kernel_size for stage in model.stages]


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
    has_layer = isinstance(head, NormMlpClassifierHead) and head.hidden_size
    return "a hidden layer before its classifier" if has_layer else ""


def head_norm(model: ConvNeXt) -> Part:
    """The norm before the classifier: before or after pooling."""
    return model.norm_pre if isinstance(model.norm_pre, nn.LayerNorm) else model.head.norm


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

    Args:
        student: a ConvNeXt that :func:`check_convnexts` accepts.
        teacher: a ConvNeXt.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are; it sees the student's size here.
        taps: get what tapped layers of the models give on the sample.
    """
    height, width = student_input.size
    stride = teacher.stem[0].stride[0]
    values = _width(teacher.stages[0]) * (height // stride) * (width // stride)
    ours, theirs = views_of_both(pictures, student_input, teacher_input, values)
    chosen, changes = _choose(student, teacher, theirs)

    # Scales and shifts of norms, and layer scales, go into the layers that are fitted.
    for module in student.modules():
        if isinstance(module, nn.LayerNorm) or type(module).__name__.startswith("RmsNorm"):
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, ConvNeXtBlock) and module.gamma is not None:
            nn.init.ones_(module.gamma)

    blocks = sum(len(stage.blocks) for stage in teacher.stages)
    with progress("the student's blocks", blocks) as passed:
        ours, theirs = _fit_stem(student, teacher, ours, theirs, chosen[0])
        before = chosen[0]
        for number, (small, big) in enumerate(zip(student.stages, teacher.stages, strict=True)):
            kept = chosen[number + 1]
            if not isinstance(big.downsample, nn.Identity):
                ours, theirs = _fit_downsample(small, big, ours, theirs, before, kept)
            before = kept
            groups = groups_by_change(changes[number], len(small.blocks))
            for block, group in zip(small.blocks, groups, strict=True):
                followed = [big.blocks[place] for place in group]
                ours, theirs = _fit_block(block, followed, ours, theirs, kept)
                passed.update(len(group))

    if inherits_classifier(student, teacher):
        start = (teacher.head.fc.weight * head_norm(teacher).weight)[:, chosen[-1]]
        fit_classifier(student, teacher, pictures, student_input, teacher_input, start, taps)


def _choose(
    student: CNN, teacher: CNN, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[float]]]:
    """The channels of the stem and of each stage that are kept, and how much each block of the teacher changes its stream.

    Args:
        student: how many channels it has.
        teacher: runs.
        inputs: the teacher's, part by part.
    """
    # What reads the stem, if it is not the first stage's stream, and each stage.
    begins_anew = not isinstance(teacher.stages[0].downsample, nn.Identity)
    readers: list[list[Any]] = [[teacher.stages[0].downsample[1]]] if begins_anew else []
    for number, stage in enumerate(teacher.stages):
        layers = [block.mlp.fc1 for block in stage.blocks]
        is_last = number + 1 == len(teacher.stages)
        layers += [] if is_last else [teacher.stages[number + 1].downsample[1]]
        readers.append(layers)
    if isinstance(teacher.head.fc, nn.Linear):
        readers[-1].append(teacher.head.fc)
    rows: dict[nn.Module, list[Tensor]] = {layer: [] for layers in readers for layer in layers}
    changes = [[0.0] * len(stage.blocks) for stage in teacher.stages]
    blocks = [block for stage in teacher.stages for block in stage.blocks]
    for number, part in enumerate(shown(inputs[:GUIDE], "choice of channels")):
        with caught([*rows, *blocks]) as read, caught(blocks, output=True) as written:
            teacher(part)
        for layer in rows:
            tensor = read[layer]
            is_map = tensor.ndim == 4
            rows[layer].append(at(tensor, positions_in(tensor, number)) if is_map else tensor)
        for stage, of_stage in zip(teacher.stages, changes, strict=True):
            for place, block in enumerate(stage.blocks):
                difference = (written[block] - read[block]).norm()
                of_stage[place] += float(difference / read[block].norm().clamp(min=1e-12))

    chosen = []
    widths = [_width(stage) for stage in student.stages]
    if begins_anew:
        widths.insert(0, student.stem[0].out_channels)
    for width, layers in zip(widths, readers, strict=True):
        readings = []
        for layer in layers:
            weight = layer.weight
            reads = as_reader(weight) if weight.ndim == 4 else weight
            readings.append(Readout(covariance(torch.cat(rows[layer])), reads))
        chosen.append(chosen_channels(readings, width))
    return chosen if begins_anew else [chosen[0], *chosen], changes


def _fit_stem(
    student: CNN, teacher: CNN, ours: Sequence[Tensor], theirs: Sequence[Tensor], kept: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Fits the patches, then scale and shift of the norm after them; returns the streams of both.

    A norm over the channels that are kept is not the norm over all: its scale and shift are fitted channel by channel.
    """
    layer, norm = student.stem
    teacher_layer, teacher_norm = teacher.stem
    rows, normed = [], []
    count = rows_needed(layer) // len(ours)
    for number, (pictures, teacher_pictures) in enumerate(zip(ours, theirs, strict=True)):
        maps = teacher_layer(teacher_pictures)
        positions = positions_in(maps, number, count)
        read = under_kernel(layer, pictures, positions)
        rows.append((read, at(maps, positions)[:, kept]))
        normed.append(at(teacher_norm(maps), positions)[:, kept])
    fit_layer(layer, None, rows, teacher_layer.weight[kept])

    x = torch.cat(
        [
            at(norm(layer(pictures)), positions_in(layer(pictures), number, count))
            for number, pictures in enumerate(ours)
        ]
    )
    y = torch.cat(normed)
    mean_x, mean_y = x.mean(0), y.mean(0)
    has_shift = getattr(norm, "bias", None) is not None
    if not has_shift:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    variance = (x - mean_x).square().mean(0).clamp(min=1e-12)
    slope = ((x - mean_x) * (y - mean_y)).mean(0) / variance
    norm.weight.copy_(slope)
    if has_shift:
        norm.bias.copy_(mean_y - slope * mean_x)
    return [student.stem(part) for part in ours], [teacher.stem(part) for part in theirs]


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
        before: the channels that the student has before it.
        after: those that it has after it.

    Returns:
        The streams after it.
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
        followed: the teacher's blocks whose work it does; its inside is fitted to the first one's.
        ours: the student's stream before it, part by part.
        theirs: the teacher's.
        kept: the channels that the student has.

    Returns:
        The streams after it.
    """
    first = followed[0]
    mlp, teacher_mlp = block.mlp, first.mlp
    filtered, first_outputs, units, after = [], [], [], []
    for number, stream in enumerate(shown(theirs, "the teacher's block")):
        read_layers = [teacher_mlp.fc2]
        with (
            caught([first.conv_dw, teacher_mlp.fc1], output=True) as given,
            caught(read_layers) as read,
        ):
            current = first(stream)
        for other in followed[1:]:
            current = other(current)
        after.append(current)
        filtered.append(given[first.conv_dw][:, kept])
        first_outputs.append(given[teacher_mlp.fc1])
        if number < GUIDE:
            maps = read[teacher_mlp.fc2]
            units.append(at(maps, positions_in(maps, number)))

    # Depthwise filters, channel by channel.
    count = max(4096, rows_needed(block.conv_dw)) // len(ours)
    pairs = []
    for number, (stream, target) in enumerate(zip(ours, filtered, strict=True)):
        positions = positions_in(target, number, count)
        inputs_RCkk = windows(block.conv_dw, stream).permute(0, 2, 3, 1, 4, 5)[positions]
        pairs.append((inputs_RCkk.flatten(2), at(target, positions)))
    fit_depthwise(block.conv_dw, pairs, first.conv_dw.weight[kept])

    # The hidden units that write most: E |w u|^2 about its mean = |w|^2 Var(u), of each unit's column w.
    write = teacher_mlp.fc2.weight.flatten(1)[kept]
    if first.gamma is not None:
        write = first.gamma[kept][:, None] * write
    powers = torch.cat(units).var(0) * write.square().sum(0)
    places = powers.topk(len(mlp.fc1.weight)).indices.sort().values
    start = (teacher_mlp.fc1.weight.flatten(1) * first.norm.weight)[places][:, kept]
    targets = [maps[:, places] for maps in first_outputs]
    fit_at_places(mlp.fc1, None, block, ours, targets, start)
    if isinstance(mlp, GlobalResponseNormMlp):
        mlp.grn.weight.copy_(teacher_mlp.grn.weight[places])
        mlp.grn.bias.copy_(teacher_mlp.grn.bias[places])

    # The second layer: what the student's stream lacks of the teacher's.
    missing = [total[:, kept] - stream for total, stream in zip(after, ours, strict=True)]
    fit_at_places(mlp.fc2, None, block, ours, missing, write[:, places])
    return [block(stream) for stream in shown(ours, "the student's block")], after
