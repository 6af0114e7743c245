"""The start of convolutional networks whose stages each write into one stream of channels: ConvNeXts and ResNets.

Channels can't be mixed there as a transformer's can, before a depthwise convolution or after a ReLU. So a student keeps some
of each stream's (:mod:`kd.distill.inherit.channels`), the same in all blocks of a stage, and in each block some of the
channels inside. Then, from the first layer to the last, each layer is fitted by least squares on what the student's fitted
layers before it give (:mod:`kd.distill.inherit.maps`):

- inside a block to what the teacher's layer gives, at the channels that are kept;
- a block's last one to what the student's stream lacks of the teacher's, so that it also does the work of the teacher's
  blocks that the student leaves out: those that change the stream least.

(He, Zhang, Sun, "Channel Pruning for Accelerating Very Deep Neural Networks", and Luo, Wu, Lin, "ThiNet", both ICCV 2017,
who prune layer by layer.) A family says what its streams, layers and readers are, as a class of :class:`CNNStart`.

In all functions ``ours`` and ``theirs`` are maps ``(N, C, H, W)`` of student and teacher, one tensor for each part of
the sample; ``before`` and ``after`` are numbers of the teacher's channels that the student keeps there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import CNN, Part, caught
from kd.distill.inherit.channels import Readout, chosen_channels
from kd.distill.inherit.maps import (
    Positions,
    channels_at,
    covariance,
    drawn_positions,
    fit_layer,
    folded_with_norm,
    groups_by_change,
    is_depthwise,
    maps_of,
    rows_needed,
    under_kernel,
)
from kd.distill.inherit.pair import (
    must_be_equal,
    must_be_understood,
    must_not_be_larger,
)
from kd.distill.inherit.ridge import fit_first_classifier
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
    for part in few.split(PART):
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


class DrawnRows(NamedTuple):
    """What a layer should give at some places of a part of the sample."""

    positions: Positions
    rows: Tensor
    """``(R, C)``."""


@dataclass(frozen=True)
class Reader:
    """A layer that reads a stream of channels."""

    layer: nn.Module
    """The teacher's; what it reads is measured."""
    weights: Sequence[Tensor]
    """What it, and each layer that reads the same beside it, computes of the channels, ``(outputs, C)``."""


@dataclass(frozen=True)
class ChannelStream:
    """A stream of channels of which a student keeps some."""

    width: int
    """How many the student has."""
    readers: Sequence[Reader]
    """The teacher's layers that read it, by which they are chosen."""


@dataclass(frozen=True)
class Link:
    """One of the layers in a row: of a stem, or of a block between its input and what it adds to the stream."""

    layer: Part
    """A convolution or linear layer."""
    norm: Part | None
    """The BatchNorm after it."""
    weight: Tensor
    """Its weight, ``(C_out, C_in, ...)``, with the scales of norms before or after it: where the fit of a student's layer
    starts."""

    @property
    def written(self) -> Part:
        """The module whose output a student's layer is fitted to: the norm, or the layer."""
        return self.norm or self.layer


def links_of(modules: Iterable[nn.Module]) -> list[Link]:
    """The layers among modules in the order in which they run, each with the norm before or after it."""
    links: list[Link] = []
    scale: Any = None  # of a norm before the next layer
    for module in modules:
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight
            if scale is not None:
                weight = weight * scale.view(-1, *[1] * (weight.ndim - 2))
            links.append(Link(module, None, weight))
            scale = None
        elif isinstance(module, nn.BatchNorm2d):
            layer = links[-1].layer
            links[-1] = Link(layer, module, folded_with_norm(layer, module))
        elif is_channel_norm(module):
            scale = module.weight
    return links


def is_channel_norm(module: Part) -> bool:
    """Whether a module normalises the channels of each place: a LayerNorm, RmsNorm or SimpleNorm."""
    kind = type(module).__name__
    return isinstance(module, nn.LayerNorm) or kind.startswith(("RmsNorm", "SimpleNorm"))


class LayerRow:
    """Layers in a row, and what the teacher's read and give on the sample.

    Args:
        ours: the student's, in their order.
        theirs: the teacher's, one for each.
        parts: of the sample, how many there are.
    """

    def __init__(self, ours: Sequence[Link], theirs: Sequence[Link], parts: int) -> None:
        """Nothing is measured yet (:meth:`of_part`); the arguments are the class's."""
        self.ours = ours
        self.theirs = theirs
        self.parts = parts
        self.outputs: dict[Part, list[DrawnRows]] = {each.written: [] for each in theirs}
        """What each of the teacher's layers gives (:attr:`Link.written`), part by part."""
        self.read: dict[Part, list[Tensor]] = {each.layer: [] for each in theirs[1:]}
        """Of the teacher's layers after the first what each reads at drawn places, ``(R, C)`` of the parts that decide."""

    @contextmanager
    def of_part(self, number: int) -> Iterator[None]:
        """Inside, the caller runs the teacher on part ``number`` (from 0) of the sample. What its layers give is then added
        to :attr:`outputs`; what they read, in the first :data:`GUIDE_PARTS` parts, to :attr:`read`.
        """
        readers = []
        if number < GUIDE_PARTS:
            readers = list(self.read)
        with (
            caught(self.outputs, True, maps_of) as outputs,
            caught(readers, taken=maps_of) as inputs,
        ):
            yield
        for link, of_teacher in zip(self.ours, self.theirs, strict=True):
            rows = self._drawn(link.layer, outputs[of_teacher.written], number)
            self.outputs[of_teacher.written].append(rows)
        for reader in readers:
            maps = inputs[reader]
            self.read[reader].append(channels_at(maps, positions_in(maps, number)))

    def _drawn(self, layer: Part, maps: Tensor, number: int) -> DrawnRows:
        """A part's maps ``(N, C, h, w)`` at as many places as the fit of a layer reads."""
        positions = positions_in(maps, number, rows_needed(layer) // self.parts)
        return DrawnRows(positions, channels_at(maps, positions))

    def fit(
        self,
        run: Callable[[Tensor], Tensor],
        ours: Sequence[Tensor],
        before: Tensor,
        kept: Sequence[Tensor],
        targets: Sequence[Tensor] | None = None,
    ) -> None:
        """Fits the student's layers in their order; their weights are overwritten.

        Args:
            run: runs the student's module that they are in, given its input.
            ours: what that module reads.
            before: the channels of the teacher's input that the student has.
            kept: of each layer's output the teacher's channels that the student has.
            targets: what the last layer should give, ``(N, C, h, w)`` of each part; None: what the teacher's gives.
        """
        inputs = before
        for link, of_teacher, outputs in zip(self.ours, self.theirs, kept, strict=True):
            layer = link.layer
            start = of_teacher.weight[outputs]
            if not is_depthwise(layer):
                start = start[:, inputs]
            inputs = outputs
            if link is self.ours[-1] and targets is not None:
                wanted = [self._drawn(layer, maps, i) for i, maps in enumerate(targets)]
            else:
                taken = self.outputs[of_teacher.written]
                wanted = [DrawnRows(places, rows[:, outputs]) for places, rows in taken]
            pairs = []
            for part, (positions, rows) in zip(ours, wanted, strict=True):
                with caught([layer], taken=maps_of) as read:
                    run(part)
                pairs.append((under_kernel(layer, read[layer], positions), rows))
            fit_layer(layer, link.norm, pairs, start.reshape(layer.weight.shape))


def follow(
    links: Sequence[Sequence[Link]],
    runs: Sequence[Callable[[Tensor], Tensor]],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    before: Tensor,
    kept: Callable[[LayerRow], Sequence[Tensor]],
) -> tuple[list[Tensor], list[Tensor]]:
    """Fits layers in a row to what the teacher's give.

    Args:
        links: the layers in their order, of student and teacher.
        runs: two functions, of student and teacher, that run the module with these layers on its input.
        ours: what the student's module reads.
        theirs: what the teacher's reads.
        before: the channels of the teacher's input that the student has.
        kept: chooses, from the measured row, the teacher's channels that the student has of each layer's output.

    Returns:
        What the modules give, of student and teacher.
    """
    run_student, run_teacher = runs
    links_of_student, links_of_teacher = links
    row = LayerRow(links_of_student, links_of_teacher, len(theirs))
    outputs = []
    for number, part in enumerate(theirs):
        with row.of_part(number):
            outputs.append(run_teacher(part))
    row.fit(run_student, ours, before, kept(row))
    return [run_student(part) for part in ours], outputs


class CNNStart(ABC):
    """A student on its way through its teacher's stages.

    Args:
        student: its weights are overwritten.
        teacher: a larger model of the same family.
    """

    stages: Sequence[tuple[Sequence[Part], Sequence[Part]]]
    """The blocks of each stage, of student and teacher."""
    stem_is_first_stage: bool
    """Whether the first stage has no layer before its blocks: it goes on with the stem's stream."""

    def __init__(self, student: CNN, teacher: CNN) -> None:
        """Stores the arguments, which are the class's."""
        self.student, self.teacher = student, teacher

    @abstractmethod
    def largest_maps(self, size: tuple[int, int]) -> int:
        """Numbers in the teacher's largest stream, of one picture of that height and width in pixels."""

    @abstractmethod
    def streams(self) -> list[ChannelStream]:
        """The stem's stream, unless :attr:`stem_is_first_stage`, then that of each stage."""

    @abstractmethod
    def stem(
        self, ours: Sequence[Tensor], theirs: Sequence[Tensor], after: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits the stem, of which ``ours`` and ``theirs`` are the prepared pictures; returns the streams after it."""

    def between_stages(
        self,
        number: int,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """Fits the layers before the blocks of stage ``number``; this base, of families without such layers, fits nothing.

        Returns:
            The streams before the blocks, and the channels that the student has there.
        """
        return ours, theirs, before

    @abstractmethod
    def links(self, block: Part) -> list[Link]:
        """The layers of a block of either model between its input and what it adds to the stream."""

    @abstractmethod
    def channels_inside(
        self, row: LayerRow, block: Part, of_teacher: Part, after: Tensor
    ) -> list[Tensor]:
        """The channels of each layer's output in a block that are kept, those of the last one ``after``."""

    def end_of(self, block: Part) -> nn.Module | None:
        """The activation after what a block has added to the stream, of a family that has one there."""
        return None

    def passed_on(
        self,
        block: Part,
        of_teacher: Part,
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> Sequence[Tensor]:
        """What a block of the student adds its output to, of each part of the sample: here the stream itself.

        A family whose shortcuts have layers fits the block's shortcut first, and returns what it gives for the stream.
        """
        return ours

    @abstractmethod
    def reads_last(self) -> Tensor:
        """What the teacher's classifier computes of the last stage's channels, ``(classes, C)``."""

    def inherit(
        self,
        pictures: Images,
        student_input: Preprocess,
        teacher_input: Preprocess,
        passed: Callable[[], object],
    ) -> None:
        """Overwrites the student's weights with the teacher's layers, fitted to its size; both are in evaluation mode.

        The layers are fitted to as many of the first pictures as :func:`views_of_both` takes, with the teacher at the
        student's input size. The classifier is fitted, to all pictures, to the teacher's answers at the teacher's own size,
        and only where both have a linear classifier of as many classes.

        Args:
            pictures: the sample, uint8 ``(N, 3, H, W)``.
            student_input: how the student's pictures are resized and normalised.
            teacher_input: how the teacher's are.
            passed: called for each of the student's blocks.
        """
        values = self.largest_maps(student_input.size)
        all_ours, all_theirs = views_of_both(pictures, student_input, teacher_input, values)
        chosen, groups = self._choose(all_theirs)
        ours: Sequence[Tensor]
        theirs: Sequence[Tensor]
        ours, theirs = self.stem(all_ours, all_theirs, chosen[0])
        for number, (before, after) in enumerate(pairwise(chosen)):
            ours, theirs, before = self.between_stages(number, ours, theirs, before, after)
            for block, followed in groups[number]:
                ours, theirs = self._fit_block(block, followed, ours, theirs, before, after)
                before = after  # a stage's first block alone may read the stream before the stage
                passed()

        if inherits_classifier(self.student, self.teacher):
            start = self.reads_last()[:, chosen[-1]]
            inputs = student_input, teacher_input
            fit_classifier_of_cnn(self.student, self.teacher, pictures, *inputs, start)

    def _choose(
        self, theirs: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[list[tuple[Part, list[Part]]]]]:
        """Chooses the teacher's channels that the student keeps, and the teacher's blocks that each of its blocks follows.

        The first :data:`GUIDE_PARTS` parts of the sample decide. Where the teacher has more blocks, those that change the
        stream least, as a share of its norm, have no follower: the follower of the block before does their work too.

        Args:
            theirs: the teacher's input.

        Returns:
            The numbers of the channels of the stem's stream, then of each stage's, in rising order; and of each stage the
            student's blocks, each with the teacher's blocks whose work it does.
        """
        streams = self.streams()
        rows: dict[nn.Module, list[Tensor]] = {}
        for stream in streams:
            rows |= {reader.layer: [] for reader in stream.readers}
        blocks = [block for _, of_stage in self.stages for block in of_stage]
        changes: dict[nn.Module, float] = dict.fromkeys(blocks, 0.0)
        for number, part in enumerate(theirs[:GUIDE_PARTS]):
            with (
                caught([*rows, *blocks], taken=maps_of) as read,
                caught(blocks, True, maps_of) as written,
            ):
                self.teacher(part)
            for layer in rows:
                tensor = read[layer]
                if tensor.ndim == 4:
                    tensor = channels_at(tensor, positions_in(tensor, number))
                rows[layer].append(tensor)
            for block in blocks:
                before = read[block]
                after = written[block]
                if before.shape != after.shape:
                    continue  # a stage's first block, which begins a group whatever its change
                change = (after - before).norm()
                size = before.norm().clamp(min=1e-12)
                changes[block] += float(change / size)

        chosen = []
        for stream in streams:
            readings = []
            for reader in stream.readers:
                spread = covariance(torch.cat(rows[reader.layer]))
                readings += [Readout(spread, weight) for weight in reader.weights]
            chosen.append(chosen_channels(readings, stream.width))
        if self.stem_is_first_stage:
            chosen.insert(0, chosen[0])

        groups = []
        for small, big in self.stages:
            of_stage = [changes[block] for block in big]
            numbers = groups_by_change(of_stage, len(small))
            followed = []
            for group in numbers:
                blocks_of_group = [big[number] for number in group]
                followed.append(blocks_of_group)
            pairs = zip(small, followed, strict=True)
            groups.append(list(pairs))
        return chosen, groups

    def _fit_block(
        self,
        block: Part,
        followed: Sequence[Part],
        ours: Sequence[Tensor],
        theirs: Sequence[Tensor],
        before: Tensor,
        after: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Fits one of the student's blocks.

        Args:
            block: the student's.
            followed: the teacher's blocks whose work it does; its inside is fitted to the first one's, and what it adds to
                the stream to what all of them add.
            ours: the student's stream before it.
            theirs: the teacher's.
            before: the channels that the student has before the block.
            after: those that it has after it.

        Returns:
            The streams after it and after all of ``followed``.
        """
        row = LayerRow(self.links(block), self.links(followed[0]), len(theirs))
        end = self.end_of(followed[-1])
        ends = [] if end is None else [end]
        totals = []  # what the teacher's blocks have added up, before an activation
        outputs = []
        for number, stream in enumerate(theirs):
            with row.of_part(number), caught(ends, taken=maps_of) as at_end:
                current = stream
                for each in followed:
                    current = each(current.clone())
            outputs.append(current)
            total = current
            if end is not None:
                total = at_end[end]
            totals.append(total[:, after])

        first = followed[0]
        passed = self.passed_on(block, first, ours, theirs, before, after)
        missing = []
        for total, stream in zip(totals, passed, strict=True):
            missing.append(total - stream)
        kept = self.channels_inside(row, block, first, after)

        def run(part: Tensor) -> Tensor:
            """The student's block, which may change what it reads."""
            return block(part.clone())

        row.fit(run, ours, before, kept, missing)
        return [run(part) for part in ours], outputs


def inherits_classifier(student: CNN, teacher: CNN) -> bool:
    """Whether both have a linear classifier, of equally many classes."""
    both_linear = all(isinstance(model.get_classifier(), nn.Linear) for model in (student, teacher))
    return both_linear and student.num_classes == teacher.num_classes


def check_cnns(
    student: CNN,
    teacher: CNN,
    not_understood: Callable[[CNN], str],
    kinds: Callable[[CNN, bool], Mapping[str, object]],
    sizes: Callable[[CNN], Mapping[str, int]],
) -> None:
    """Checks that a model can start from another of its family; raises a ValueError, whose line says what differs.

    Args:
        student: of the family.
        teacher: likewise.
        not_understood: names a part of a model that has no formula; "" without one.
        kinds: what two models must have alike, by name; with True also before their classifiers.
        sizes: what may not be larger in the student, by name.
    """
    must_be_understood("student", not_understood(student))
    must_be_understood("teacher", not_understood(teacher))
    reads_end = inherits_classifier(student, teacher)
    must_be_equal(kinds(student, reads_end), kinds(teacher, reads_end))
    must_not_be_larger(sizes(student), sizes(teacher))


def fit_classifier_of_cnn(
    student: CNN,
    teacher: CNN,
    pictures: Images,
    student_input: Preprocess,
    teacher_input: Preprocess,
    start: Tensor,
) -> None:
    """Fits the student's classifier to the teacher's answers to all pictures, the rest of it fitted already.

    Args:
        student: its layers are fitted.
        teacher: in evaluation mode.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        student_input: how the student's pictures are resized and normalised.
        teacher_input: how the teacher's are.
        start: the weight's start, ``(classes, C)``.
    """
    features = []
    answers = []
    for part in pictures.split(PART):
        last = student.forward_features(student_input(part))
        features.append(student.forward_head(last, pre_logits=True))
        answers.append(teacher(teacher_input(part)))
    teacher_logits = torch.cat(answers)
    classifier = student.get_classifier()
    fit_first_classifier(classifier, features, teacher_logits, start)
