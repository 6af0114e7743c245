"""The whole start: from the embedding to the head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kd.distill.inherit.layers import (
    GUIDE,
    Aim,
    fit,
    inherit_block,
    inherit_embedding,
    inherit_head,
)
from kd.distill.inherit.measured import MeasuredTeacher, grid_of
from kd.distill.inherit.pair import (
    ViT,
    check_copy,
    check_pair,
    copy_is_possible,
    inherits_head,
    kept_prefix,
)
from kd.distill.inherit.stream import chosen_blocks, reset_norms, shown
from kd.models.preprocess import Images, Preprocess, evaluating
from kd.models.segmenter import DenseModel


@torch.no_grad()
def inherit_together(
    students: Sequence[tuple[ViT, Preprocess]],
    teacher: ViT,
    pictures: Images,
    teacher_input: Preprocess,
) -> None:
    """Overwrites students' weights with the teacher's layers, fitted to each one's size; deterministic.

    What the teacher does is computed once for all students of one patch grid. The classifier is copied where both have
    as many classes. Of dense models: the backbone, then each level's 1x1 convolution, fitted; the rest of the head is
    copied.
    """
    dense = isinstance(teacher, DenseModel)
    measured = MeasuredTeacher(teacher.backbone if dense else teacher, pictures, teacher_input)
    with evaluating(teacher, *(student for student, _ in students)):
        grids: dict[object, list[tuple[ViT, Preprocess]]] = {}
        for student, prepare in students:
            vit = student.backbone if dense else student
            check_pair(vit, measured.model)
            grids.setdefault(grid_of(vit, prepare.size), []).append((vit, prepare))
        for same in grids.values():
            _fit_blocks([_Fit(vit, prepare, measured) for vit, prepare in same])
        if dense:
            _inherit_dense_heads(students, teacher, pictures, teacher_input)


class _Fit:
    """One student on its way through the teacher's blocks."""

    def __init__(self, student: ViT, prepare: Preprocess, measured: MeasuredTeacher) -> None:
        self.student, self.prepare, self.measured = student, prepare, measured
        self.blocks = dict(zip(chosen_blocks(student, measured.model), student.blocks, strict=True))
        measured.see_as(student, prepare.size)
        self.projection = measured.projection(student)
        reset_norms(student)
        inherit_embedding(student, measured.model, self.projection, prepare, measured.prepare)
        pictures = measured.pictures.split(GUIDE)
        self.streams = [student._pos_embed(student.patch_embed(prepare(part))) for part in pictures]
        others = (
            self.streams[0].shape[1] - 1
        )  # a class token that alone is classified counts as much as all of them
        of_class = isinstance(student.head, nn.Linear) and student.global_pool == "token"
        self.shares: Tensor | None = torch.tensor([others, *[1.0] * others]) if of_class else None

    def block(self, number: int, aim: Aim) -> None:
        """Fits a block; one like it that was fitted to the same stream is copied."""
        block = self.blocks[number]
        key = id(self.streams), repr(block), block.attn.num_heads
        first, self.streams = aim.once(
            key, lambda: (block, inherit_block(block, aim, self.streams))
        )
        block.load_state_dict(first.state_dict())

    def end(self) -> None:
        student, teacher = self.student, self.measured.model
        if inherits_head(student, teacher):
            inherit_head(student, teacher, self.streams, self.projection, self.measured.logits)
        if copy_is_possible(student, teacher) and self.prepare.size == self.measured.prepare.size:
            pictures = self.measured.pictures.split(64)
            check_copy(
                torch.cat([student(self.prepare(part)) for part in pictures]), self.measured.logits
            )


def _fit_blocks(starts: Sequence[_Fit]) -> None:
    """Students of one grid, block by block: a block of the teacher runs once for all."""
    alike: dict[object, list[_Fit]] = {}  # by what they aim at
    for one in starts:
        prefix = kept_prefix(one.student, one.measured.model)
        same = alike.setdefault((id(one.projection), one.shares is None, *prefix), [])
        if same and all(
            torch.equal(a, b) for a, b in zip(one.streams, same[0].streams, strict=True)
        ):
            one.streams = same[0].streams
        same.append(one)
    used = sorted({number for one in starts for number in one.blocks})
    for number in shown(
        used,
        "the student's blocks" if len(starts) == 1 else f"the blocks of {len(starts)} students",
    ):
        for same in alike.values():
            # a student of fewer blocks makes in one step what the teacher makes in several
            if fitted := [one for one in same if number in one.blocks]:
                found = same[0].measured.block(number, same[0].student)
                aim = Aim(found, same[0].projection, same[0].shares, len(fitted) > 1)
                for one in fitted:
                    one.block(number, aim)
    for one in starts:
        one.end()


def _inherit_dense_heads(
    students: Sequence[tuple[DenseModel, Preprocess]],
    teacher: DenseModel,
    pictures: Images,
    teacher_input: Preprocess,
) -> None:
    levels = [teacher.levels(teacher_input(part)) for part in pictures.split(64)]
    maps = [
        torch.cat([level(part[i]) for part in levels])
        for i, level in enumerate(teacher.head.levels)
    ]
    for student, prepare in students:
        own_levels = [student.levels(prepare(part)) for part in pictures.split(64)]
        for i, (own, found) in enumerate(zip(student.head.levels, maps, strict=True)):
            assert isinstance(own, nn.Conv2d)
            features = torch.cat([part[i] for part in own_levels])
            wanted = nn.functional.interpolate(found, features.shape[2:], mode="bilinear")
            linear = nn.Linear(own.in_channels, own.out_channels)
            fit(
                linear,
                [(features.movedim(1, -1), wanted.movedim(1, -1))],
                torch.zeros_like(linear.weight),
            )
            own.weight.copy_(linear.weight[:, :, None, None])
            own.bias.copy_(linear.bias)  # type: ignore[union-attr]
        for name in ("fuse", "classifier"):
            getattr(student.head, name).load_state_dict(getattr(teacher.head, name).state_dict())
