"""The whole start: from the embedding to the head, for several students at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import ViT, embedded, rotation_of
from kd.distill.inherit.layers import (
    BlockTargets,
    fit_norm_before_blocks,
    inherit_block,
    inherit_embedding,
    inherit_head,
)
from kd.distill.inherit.measured import PART, MeasuredTeacher, grid_of
from kd.distill.inherit.pair import (
    check_copy,
    check_vits,
    copy_is_possible,
    inherits_head,
    kept_prefix,
    pools_by_attention,
)
from kd.distill.inherit.pooling import inherit_pool
from kd.distill.inherit.ridge import fit_linear, layer_for
from kd.distill.inherit.sample_taps import SampleTaps
from kd.distill.inherit.stream import chosen_blocks, progress, reset_norms, shown
from kd.models.preprocess import Images, Preprocess, evaluating
from kd.models.segmenter import DenseModel


@torch.no_grad()
def inherit_vits(
    students: Sequence[tuple[ViT, Preprocess]],
    teacher: ViT,
    pictures: Images,
    teacher_input: Preprocess,
    taps: SampleTaps,
) -> None:
    """Overwrites students' weights with the teacher's layers, fitted to each one's size; deterministic.

    What the teacher does is computed once for students of one patch grid and the same prefix tokens. The classifier is
    fitted where both have a linear one of as many classes. Of dense models: the backbone, then each level's 1x1
    convolution, fitted; the rest of the head is copied.

    Args:
        students: each with how its pictures are resized and normalised.
        teacher: a plain timm ViT, or a dense model on one.
        pictures: the sample, uint8 ``(N, 3, H, W)``; labels are not needed.
        teacher_input: how the teacher's pictures are resized and normalised.
        taps: get what tapped layers of the models give on the sample.

    Raises:
        ValueError: a pair that does not fit, or a copy at full size that answers otherwise than its teacher.
    """
    is_dense = isinstance(teacher, DenseModel)
    measured_model = teacher.backbone if is_dense else teacher
    measured = MeasuredTeacher(measured_model, pictures, teacher_input, taps)
    with evaluating(teacher, *(student for student, _ in students)):
        students_by_grid: dict[object, list[tuple[ViT, Preprocess]]] = {}
        for student, prepare in students:
            vit = student.backbone if is_dense else student
            check_vits(vit, measured.model)
            grid = grid_of(vit, prepare.size)
            students_by_grid.setdefault(grid, []).append((vit, prepare))
        for of_one_grid in students_by_grid.values():
            _fit_students([_StudentFit(vit, prepare, measured) for vit, prepare in of_one_grid])
        if is_dense:
            _inherit_dense_heads(students, teacher, pictures, teacher_input)


class _StudentFit:
    """One student on its way through the teacher's blocks; its embedding is fitted at once.

    Args:
        student: a plain ViT.
        prepare: how its pictures are resized and normalised.
        measured: the teacher.
    """

    def __init__(self, student: ViT, prepare: Preprocess, measured: MeasuredTeacher) -> None:
        """Fits all of a student before its blocks: patch embedding, positions, and a norm before the blocks.

        The arguments are the class's. ``student`` is changed in place; ``measured`` reads the teacher's positions at the
        student's size from here on.
        """
        self.student, self.prepare, self.measured = student, prepare, measured
        numbers = chosen_blocks(student, measured.model)
        self.blocks = dict(zip(numbers, student.blocks, strict=True))
        """The student's blocks by the number of the teacher's block that each follows."""
        measured.use_grid_of(student, prepare.size)
        self.projection = measured.projection(student)
        reset_norms(student)
        inherit_embedding(student, measured.model, self.projection, prepare, measured.prepare)
        self.streams: list[Tensor] = []
        """The student's stream before the next block, ``(N, L, D)`` of each part of the sample."""
        for part in shown(measured.pictures.split(PART), "the student's patches"):
            self.streams.append(embedded(student, prepare(part)))
        if not isinstance(student.norm_pre, nn.Identity):
            guides = torch.cat(self.streams[: measured.guide_parts])
            target = measured.before_blocks(student) @ self.projection.T
            fit_norm_before_blocks(student.norm_pre, guides, target)
            self.streams = [student.norm_pre(tokens) for tokens in self.streams]
        self.shares = self._token_shares()
        """How much each token counts in the fits, ``(L,)``; None: all alike."""

    def _token_shares(self) -> Tensor | None:
        """A class token that alone is classified counts as much as all other tokens together."""
        student = self.student
        classifies_token = isinstance(student.head, nn.Linear) and student.global_pool == "token"
        if not classifies_token:
            return None
        tokens = self.streams[0].shape[1]
        shares = torch.ones(tokens)
        shares[0] = tokens - 1
        return shares

    def fit_block(self, number: int, targets: BlockTargets) -> None:
        """Fits the student's block that follows the teacher's ``number``.

        A block that was fitted already, of the same shape and to the same stream (of a student that is alike up to
        here), is copied.

        Args:
            number: of the teacher's block, from 0; calls come in rising order.
            targets: of that block, shared by the students of one group. Afterwards :attr:`streams` are those after the
                block, the same list for students that were given one block.
        """
        block = self.blocks[number]
        rotation = rotation_of(self.student)
        heads = block.attn.num_heads
        stream_and_shape = id(self.streams), repr(block), heads
        # Losses may read what this norm gives. It is plain (reset_norms), so it gives already what it will in training.
        taps = self.measured.taps
        if taps.reads(self.student):
            for part, stream in enumerate(self.streams):
                with taps.of_part(self.student, part):
                    block.norm1(stream)

        def fit() -> tuple[nn.Module, list[Tensor]]:
            return block, inherit_block(block, targets, self.streams, rotation)

        fitted_block, self.streams = targets.once(stream_and_shape, fit)
        block.load_state_dict(fitted_block.state_dict())

    def finish(self) -> None:
        """Fits an attention pooling and the classifier, and checks a student that is a copy of its teacher.

        Raises:
            ValueError: such a copy answers otherwise than its teacher.
        """
        student = self.student
        measured = self.measured
        teacher = measured.model
        projection = self.projection
        if pools_by_attention(student):
            projection = inherit_pool(student, measured, self.streams, projection)
        if inherits_head(student, teacher):
            inherit_head(student, teacher, self.streams, projection, measured.logits)
        same_size = self.prepare.size == measured.prepare.size
        if same_size and copy_is_possible(student, teacher):
            batches = shown(measured.pictures.split(64), "check of the copy")
            logits = [student(self.prepare(batch)) for batch in batches]
            check_copy(torch.cat(logits), measured.logits)
        self._read_end()

    def _read_end(self) -> None:
        """Runs what comes after the last block, of both models, so that the taps of losses catch what they read there."""
        taps = self.measured.taps
        if not taps.reads(self.student):
            return
        for part, stream in enumerate(self.streams):
            with taps.of_part(self.student, part):
                self.student.forward_head(self.student.norm(stream))
        self.measured.logits  # noqa: B018  # computed here at the latest


def _fit_students(fits: Sequence[_StudentFit]) -> None:
    """Fits students of one grid, block by block and in place: a block of the teacher runs once for groups in a row that
    keep the same prefix tokens.
    """
    groups = _groups_of_equal_targets(fits)
    numbers = sorted({number for each in fits for number in each.blocks})
    label = "the student's blocks"
    if len(fits) > 1:
        label = f"the blocks of {len(fits)} students"
    measured = fits[0].measured
    # A part passes once through each of the teacher's blocks, and twice through each of a student's: two layers write.
    passes = len(measured.model.blocks)
    for each in fits:
        passes += 2 * len(each.blocks)
    with progress(label, passes * len(fits[0].streams)) as passed:
        measured.passed = passed.update
        for number in numbers:
            for group in groups:
                # A student of fewer blocks than its teacher makes in one step what the teacher makes in several.
                with_this_block = [each for each in group if number in each.blocks]
                if not with_this_block:
                    continue
                first = group[0]
                parts = measured.activations_of(number, first.student)
                several = len(with_this_block) > 1
                guides = measured.guide_parts
                targets = BlockTargets(parts, guides, first.projection, first.shares, several)
                targets.passed = passed.update
                for each in with_this_block:
                    each.fit_block(number, targets)
    measured.passed = lambda: None
    for each in fits:
        each.finish()


def _groups_of_equal_targets(fits: Sequence[_StudentFit]) -> list[list[_StudentFit]]:
    """Students whose fits aim at the same: one projection, one weighing of tokens (:attr:`_StudentFit.shares` set or
    not), the same prefix tokens.

    In a group, students whose stream equals the first one's share that one list of tensors, so that
    :meth:`_StudentFit.fit_block` can tell by its identity.
    """
    groups: dict[object, list[_StudentFit]] = {}
    for each in fits:
        prefix = kept_prefix(each.student, each.measured.model)
        all_alike = each.shares is None
        key = id(each.projection), all_alike, *prefix
        group = groups.setdefault(key, [])
        if group:
            first_streams = group[0].streams
            pairs = zip(each.streams, first_streams, strict=True)
            if all(torch.equal(stream, first) for stream, first in pairs):
                each.streams = first_streams
        group.append(each)
    return list(groups.values())


def _inherit_dense_heads(
    students: Sequence[tuple[DenseModel, Preprocess]],
    teacher: DenseModel,
    pictures: Images,
    teacher_input: Preprocess,
) -> None:
    """Fits the heads of dense models to the teacher's: one least-squares fit a level, the rest copied.

    Args:
        students: each with its input; changed in place. Their ``fuse`` and ``classifier`` have the teacher's shapes.
        teacher: in eval mode.
        pictures: the sample, uint8.
        teacher_input: the teacher's input.
    """
    batches = pictures.split(64)
    teacher_levels = []
    for batch in shown(batches, "the teacher's levels of features"):
        teacher_levels.append(teacher.levels(teacher_input(batch)))
    teacher_maps = []  # of each level, (N, width, H, W)
    for level, convolution in enumerate(teacher.head.levels):
        teacher_maps.append(torch.cat([convolution(levels[level]) for levels in teacher_levels]))
    for student, prepare in students:
        student_levels = []
        for batch in shown(batches, "the student's levels of features"):
            student_levels.append(student.levels(prepare(batch)))
        _fit_level_convolutions(student, student_levels, teacher_maps)
        for name in ("fuse", "classifier"):
            part_of_head = getattr(student.head, name)
            part_of_head.load_state_dict(getattr(teacher.head, name).state_dict())


def _fit_level_convolutions(
    student: DenseModel, student_levels: list[list[Tensor]], teacher_maps: list[Tensor]
) -> None:
    """Fits the 1x1 convolution of each level of features.

    Args:
        student: its backbone is fitted already; the convolutions of its head's levels are overwritten.
        student_levels: its features: of each batch, of each level, ``(N, D, h, w)``.
        teacher_maps: what the teacher's convolutions give: of each level, ``(all N, width, H, W)``.
    """
    convolutions: Any = student.head.levels
    for level, maps_NCHW in enumerate(teacher_maps):
        convolution = convolutions[level]
        features_NDhw = torch.cat([levels[level] for levels in student_levels])
        size = features_NDhw.shape[2:]
        maps_NChw = nn.functional.interpolate(maps_NCHW, size, mode="bilinear")

        # A 1x1 convolution is a linear layer at every position.
        start = torch.zeros_like(convolution.weight[:, :, 0, 0])
        linear = layer_for(start, has_bias=True)
        inputs = features_NDhw.movedim(1, -1)
        outputs = maps_NChw.movedim(1, -1)
        fit_linear(linear, [(inputs, outputs)], start)
        convolution.weight.copy_(linear.weight[:, :, None, None])
        convolution.bias.copy_(linear.bias)
