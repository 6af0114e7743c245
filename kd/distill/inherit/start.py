"""The whole start: from the embedding to the head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kd.distill.inherit.anatomy import ViT, rotation_of, scale_stream, tokens_before_blocks
from kd.distill.inherit.layers import (
    BlockTargets,
    fit_norm_before_blocks,
    inherit_block,
    inherit_embedding,
    inherit_head,
)
from kd.distill.inherit.measured import GUIDE, PART, MeasuredTeacher, grid_of
from kd.distill.inherit.pair import (
    inherits_head,
    pools_by_attention,
)
from kd.distill.inherit.pooling import inherit_pool
from kd.distill.inherit.ridge import fit_pointwise
from kd.distill.inherit.stream import chosen_blocks, factor_to_one, reset_norms
from kd.models.preprocess import Images, Preprocess
from kd.models.segmenter import DenseModel, backbone_of


def passes_of_vits(students: Sequence[tuple[ViT, Preprocess]], teacher: ViT, pictures: int) -> int:
    """How many parts of a sample of so many pictures go through a block of a model in :func:`inherit_vits`.

    For each grid of patches the pictures that guide, then all, go through each of the teacher's blocks, and all twice
    through each of a student's: two layers write. The teacher's answers count as one block.
    """
    depth = len(backbone_of(teacher).blocks)
    parts = -(-pictures // PART)
    guides = -(-min(pictures, GUIDE) // 64)
    passes = parts
    grids = set()
    for student, prepare in students:
        vit: Any = backbone_of(student)
        grids.add(grid_of(vit, prepare.size))
        passes += 2 * parts * len(vit.blocks)
    return passes + len(grids) * depth * (guides + parts)


def inherit_vits(
    students: Sequence[tuple[ViT, Preprocess]],
    teacher: ViT,
    pictures: Images,
    teacher_input: Preprocess,
    passed: Callable[[], object],
) -> None:
    """:func:`kd.distill.inherit.inherit_together` of vision transformers, all models in eval mode.

    The teacher runs once for students of one patch grid and the same prefix tokens. The classifier is fitted where both
    have a linear one of as many classes. Of dense models: the backbone, then each level's 1x1 convolution, fitted; the
    rest of the head is copied.

    Args:
        students: each with how its pictures are resized and normalised.
        teacher: a plain timm ViT, or a dense model on one.
        pictures: the sample, uint8 ``(N, 3, H, W)``; labels are not needed.
        teacher_input: how the teacher's pictures are resized and normalised.
        passed: called for each of :func:`passes_of_vits`.

    Raises:
        ValueError: a pair that does not fit.
    """
    measured = MeasuredTeacher(backbone_of(teacher), pictures, teacher_input, passed)
    students_by_grid: dict[object, list[tuple[ViT, Preprocess]]] = {}
    for student, prepare in students:
        vit: Any = backbone_of(student)
        grid = grid_of(vit, prepare.size)
        students_by_grid.setdefault(grid, []).append((vit, prepare))
    for of_one_grid in students_by_grid.values():
        fits = [_StudentFit(vit, prepare, measured) for vit, prepare in of_one_grid]
        for number in range(len(measured.model.blocks)):
            for fit in fits:
                fit.fit_block(number)
        for fit in fits:
            fit.finish()
    for student, prepare in students:
        if isinstance(student, DenseModel):
            _inherit_dense_head(student, prepare, teacher, pictures, teacher_input)


class _StudentFit:
    """One student on its way through the teacher's blocks; all before them is inherited at once.

    Args:
        student: a plain ViT.
        prepare: how its pictures are resized and normalised.
        measured: the teacher.
    """

    def __init__(self, student: ViT, prepare: Preprocess, measured: MeasuredTeacher) -> None:
        """Resets all norms, maps the teacher's patch embedding and positions by the projection, and fits the norm before
        the blocks, where there is one.

        The arguments are the class's. ``student`` is changed in place; from here on ``measured`` has the teacher's positions
        at the student's size, which takes a pass of the teacher where they are new.
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
        for part in measured.pictures.split(PART):
            self.streams.append(tokens_before_blocks(student, prepare(part)))
        if not isinstance(student.norm_pre, nn.Identity):
            guides = torch.cat(self.streams[: measured.guide_parts])
            target = measured.before_blocks(student) @ self.projection.T
            fit_norm_before_blocks(student.norm_pre, guides, target)
            self.streams = [student.norm_pre(tokens) for tokens in self.streams]
        self.factor = factor_to_one(self.streams, student.blocks[0].norm1)
        """What the stream is multiplied by at the end (:func:`kd.distill.inherit.anatomy.scale_stream`)."""
        self.shares = self._token_shares()
        """How much each token counts in the fits, ``(L,)``; None: all alike."""

    def _token_shares(self) -> Tensor | None:
        """How much each token counts in the fits, ``(L,)``: where the class token alone is classified, it counts as much
        as all others together. Else None: all count alike.
        """
        student = self.student
        classifies_token = isinstance(student.head, nn.Linear) and student.global_pool == "token"
        if not classifies_token:
            return None
        tokens = self.streams[0].shape[1]
        shares = torch.ones(tokens)
        shares[0] = tokens - 1
        return shares

    def fit_block(self, number: int) -> None:
        """Fits the student's block that follows the teacher's ``number``, from 0, where there is one; calls come in rising
        order.
        """
        block = self.blocks.get(number)
        if block is None:
            return
        measured = self.measured
        parts = measured.activations_of(number, self.student)
        targets = BlockTargets(
            parts,
            measured.guide_parts,
            self.projection,
            self.shares,
            measured.passed,
            measured.spreads,
        )
        self.streams = inherit_block(block, targets, self.streams, rotation_of(self.student))

    def finish(self) -> None:
        """Fits the attention pooling, where the student has one, and the classifier, where it is inherited; then brings the
        stream to size 1.
        """
        student = self.student
        teacher = self.measured.model
        projection = self.projection
        if pools_by_attention(student):
            projection = inherit_pool(student, self.measured, self.streams, projection)
        if inherits_head(student, teacher):
            inherit_head(student, teacher, self.streams, projection, self.measured.logits)
        scale_stream(student, self.factor)


def _inherit_dense_head(
    student: DenseModel,
    prepare: Preprocess,
    teacher: DenseModel,
    pictures: Images,
    teacher_input: Preprocess,
) -> None:
    """Fits the head of a dense model to the teacher's: one least-squares fit a level, the rest copied.

    Args:
        student: its backbone is fitted already. Its ``fuse`` and ``classifier`` have the teacher's shapes.
        prepare: the student's input.
        teacher: in eval mode.
        pictures: the sample, uint8.
        teacher_input: the teacher's input.
    """
    batches = pictures.split(64)
    teacher_levels = [teacher.levels(teacher_input(batch)) for batch in batches]
    student_levels = [student.levels(prepare(batch)) for batch in batches]
    convolutions: Any = student.head.levels
    for level, (convolution, of_teacher) in enumerate(
        zip(convolutions, teacher.head.levels, strict=True)
    ):
        maps_NCHW = torch.cat([of_teacher(levels[level]) for levels in teacher_levels])
        features_NDhw = torch.cat([levels[level] for levels in student_levels])
        size = features_NDhw.shape[2:]
        maps_NChw = nn.functional.interpolate(maps_NCHW, size, mode="bilinear")

        fit_pointwise(convolution, features_NDhw.movedim(1, -1), maps_NChw.movedim(1, -1))
    for name in ("fuse", "classifier"):
        part_of_head = getattr(student.head, name)
        part_of_head.load_state_dict(getattr(teacher.head, name).state_dict())
