"""What the starts of ConvNeXts and of ResNets have in common: their sample, fits at drawn places, the classifier."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part
from kd.distill.inherit.maps import (
    Positions,
    at,
    caught,
    drawn_positions,
    fit_layer,
    rows_needed,
    under_kernel,
)
from kd.distill.inherit.pair import check_copy
from kd.distill.inherit.ridge import fit_linear
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.inherit.stream import shown
from kd.models.output_scale import set_in_units
from kd.models.preprocess import Images, Preprocess

PART = 32
"""Pictures that run at once."""
GUIDE_PARTS = 4
"""How many parts of the sample decide which channels, units and blocks are kept."""
MOST_BYTES = 1e9
"""Memory of one stream of maps of the whole sample; more pictures than fit in are left to the classifier alone."""


def views_of_both(
    pictures: Images, student_input: Preprocess, teacher_input: Preprocess, values: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The sample as each model sees it, in parts of at most :data:`PART` pictures, ``(N, 3, H, W)``, both in the student's
    size.

    Args:
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are.
        values: numbers in a picture's largest maps; as many pictures are taken as :data:`MOST_BYTES` has room for, one
            part at least.

    Returns:
        The pictures normalised for the student, and the same pictures normalised for the teacher.
    """
    as_student_sees = Preprocess(student_input.size, teacher_input.mean, teacher_input.std)
    few = pictures[: max(PART, int(MOST_BYTES / (4 * values)))]
    ours = []
    theirs = []
    for part in shown(few.split(PART), "pictures"):
        ours.append(student_input(part))
        theirs.append(as_student_sees(part))
    return ours, theirs


def positions_in(maps: Tensor, part: int, count: int = 4096) -> Positions:
    """Places in a part's maps ``(N, C, h, w)``, the same whenever they are drawn.

    Args:
        maps: of the part.
        part: its number, the seed of the draw.
        count: how many are drawn of the whole part, at most; the default is the number by which channels and hidden units
            are chosen.
    """
    return drawn_positions(len(maps), maps.shape[2], maps.shape[3], count, seed=part)


def fit_at_places(
    layer: Part,
    norm: Part | None,
    run: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    targets: Iterable[Tensor],
    start: Tensor,
) -> None:
    """Fits a layer to targets at drawn places.

    Args:
        layer: a convolution, or a linear layer.
        norm: the BatchNorm after it, whose statistics are measured; None without one.
        run: runs the module of the student that the layer is in (a block, a stem), given its input.
        inputs: what that module reads, ``(N, C_in, H, W)`` of each part of the sample.
        targets: what the layer and its norm should give, ``(N, C, h, w)`` of each part.
        start: the weight's start, of as many numbers as the weight; it is brought into the weight's shape.
    """
    count = rows_needed(layer) // len(inputs)
    rows = []
    pairs = shown(zip(inputs, targets, strict=True), "a layer", len(inputs))
    for number, (part, target) in enumerate(pairs):
        with caught([layer]) as read:
            run(part)
        positions = positions_in(target, number, count)
        layer_inputs = under_kernel(layer, read[layer], positions)
        layer_outputs = at(target, positions)
        rows.append((layer_inputs, layer_outputs))
    weight_start = start.reshape(layer.weight.shape)
    fit_layer(layer, norm, rows, weight_start)


def inherits_classifier(student: CNN, teacher: CNN) -> bool:
    """Whether both have a linear classifier, of equally many classes."""
    both_linear = all(isinstance(model.get_classifier(), nn.Linear) for model in (student, teacher))
    return both_linear and student.num_classes == teacher.num_classes


def fit_classifier(
    student: CNN,
    teacher: CNN,
    pictures: Images,
    student_input: Preprocess,
    teacher_input: Preprocess,
    start: Tensor,
    taps: SampleTaps,
) -> None:
    """Fits the student's classifier to the teacher's answers to all pictures, the rest of it fitted already.

    Args:
        student: its layers are fitted.
        teacher: in evaluation mode.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are.
        start: the weight's start, ``(classes, C)``.
        taps: get what tapped layers of the models give on the sample.

    Raises:
        ValueError: the student is a copy of the teacher's size, and answers differently.
    """
    features = []
    answers = []
    parts = pictures.split(PART)
    for number, part in enumerate(shown(parts, "the classifier")):
        with taps.of_part(student, number):
            last = student.forward_features(student_input(part))
            features.append(student.forward_head(last, pre_logits=True))
        with taps.of_part(teacher, number):
            answers.append(teacher(teacher_input(part)))
    teacher_logits = torch.cat(answers)
    classifier = student.get_classifier()
    fit_linear(classifier, [(torch.cat(features), teacher_logits)], start)
    # now in the logits' units; a classifier of scaled output (kd.models.output_scale) holds them in standard deviations
    set_in_units(classifier, classifier.weight.clone(), classifier.bias.clone())
    for number, pooled in enumerate(features):
        with taps.of_part(student, number):
            classifier(pooled)

    same_size = student_input.size == teacher_input.size
    if same_size and _same_shapes(student, teacher):
        batches = shown(parts, "check of the copy")
        logits = [student(student_input(part)) for part in batches]
        check_copy(torch.cat(logits), teacher_logits)


def _same_shapes(student: CNN, teacher: CNN) -> bool:
    """Whether the student is as large as the teacher; layer scales, which a model may lack, apart."""
    shapes = []
    for model in (student, teacher):
        shapes_of_model = {}
        for name, value in model.state_dict().items():
            if "gamma" not in name:
                shapes_of_model[name] = value.shape
        shapes.append(shapes_of_model)
    return shapes[0] == shapes[1]
