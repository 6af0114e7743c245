"""The whole start: from the embedding to the head."""

import torch
from torch import nn

from kd.distill.inherit.layers import fit, inherit_block, inherit_embedding, inherit_head
from kd.distill.inherit.pair import ViT, check_copy, check_pair, copy_is_possible, inherits_head, kept_tokens
from kd.distill.inherit.stream import chosen_blocks, embedded_as, projection_of, reset_norms, shown, teacher_streams
from kd.models.preprocess import Images, Preprocess
from kd.models.segmenter import DenseModel


@torch.no_grad()
def inherit(student: ViT, teacher: ViT, pictures: Images, student_input: Preprocess, teacher_input: Preprocess) -> None:
    """Overwrites the student's weights with the teacher's layers, fitted to the student's size; deterministic.

    The classifier is copied where both have as many classes. Of dense models: the backbone, then each level's 1x1
    convolution, fitted; the rest of the head is copied.
    """
    if isinstance(student, DenseModel):
        return _inherit_dense(student, teacher, pictures, student_input, teacher_input)
    check_pair(student, teacher)
    modes = student.training, teacher.training
    student.eval(), teacher.eval()
    as_student = Preprocess(student_input.size, teacher_input.mean, teacher_input.std)
    streams = teacher_streams(teacher, embedded_as(student, teacher, as_student(pictures)))
    classifier = teacher if inherits_head(student, teacher) else None
    projection = projection_of(streams, student, int(teacher.cls_token is not None), classifier)
    kept = kept_tokens(student, teacher, streams[0].shape[1])
    others = len(kept) - 1  # a class token that alone is classified counts as much as all of them together
    of_class = isinstance(student.head, nn.Linear) and student.global_pool == "token"
    shares = torch.tensor([others, *[1.0] * others]) if of_class else None
    reset_norms(student)
    inherit_embedding(student, teacher, projection, student_input, teacher_input)
    stream = student._pos_embed(student.patch_embed(student_input(pictures)))
    pairs = list(zip(student.blocks, chosen_blocks(student, teacher), strict=True))
    for block, number in shown(pairs, "the student's blocks"):
        # a student of fewer blocks makes in one step what the teacher makes in several
        stream = inherit_block(
            block, teacher.blocks[number], stream, streams[number], streams[number + 1], projection, kept, shares
        )
    if inherits_head(student, teacher):
        logits = torch.cat([teacher(teacher_input(part)) for part in pictures.split(64)])
        inherit_head(student, teacher, stream, projection, logits)
    if copy_is_possible(student, teacher) and student_input.size == teacher_input.size:
        check_copy(torch.cat([student(student_input(part)) for part in pictures.split(64)]), logits)
    student.train(modes[0]), teacher.train(modes[1])


def _inherit_dense(
    student: DenseModel, teacher: DenseModel, pictures: Images, student_input: Preprocess, teacher_input: Preprocess
) -> None:
    inherit(student.backbone, teacher.backbone, pictures, student_input, teacher_input)
    training = student.training
    student.eval(), teacher.eval()
    student_levels = [student.levels(student_input(part)) for part in pictures.split(64)]
    teacher_levels = [teacher.levels(teacher_input(part)) for part in pictures.split(64)]
    pairs = zip(student.head.levels, teacher.head.levels, strict=True)
    for i, (own, other) in enumerate(pairs):
        assert isinstance(own, nn.Conv2d)
        features = torch.cat([part[i] for part in student_levels])
        wanted = nn.functional.interpolate(
            torch.cat([other(part[i]) for part in teacher_levels]), features.shape[2:], mode="bilinear"
        )
        linear = nn.Linear(own.in_channels, own.out_channels)
        fit(linear, features.movedim(1, -1), wanted.movedim(1, -1), torch.zeros_like(linear.weight))
        own.weight.copy_(linear.weight[:, :, None, None])
        own.bias.copy_(linear.bias)  # type: ignore[union-attr]
    for name in ("fuse", "classifier"):
        getattr(student.head, name).load_state_dict(getattr(teacher.head, name).state_dict())
    student.train(training)
