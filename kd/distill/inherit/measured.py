"""A teacher's activations on sample pictures, computed once for all students that start from it."""

from functools import cached_property

import torch
from torch import Tensor

from kd.distill.inherit.layers import BlockActivations
from kd.distill.inherit.pair import ViT, centres, inherits_head, kept_tokens
from kd.distill.inherit.stream import embedded_as, moment_of, projection_of, teacher_streams
from kd.models.preprocess import Images, Preprocess


class MeasuredTeacher:
    """What the fits read of a plain ViT on a sample, uint8 (N, 3, H, W), each computed when it is first read."""

    def __init__(self, model: ViT, pictures: Images, prepare: Preprocess) -> None:
        self.model, self.pictures, self.prepare = model, pictures, prepare
        self._grid: object = None
        self._block: tuple[object, BlockActivations] | None = None

    @cached_property
    def logits(self) -> Tensor:
        """Of the pictures as the teacher takes them."""
        return torch.cat([self.model(self.prepare(part)) for part in self.pictures.split(64)])

    def see_as(self, student: ViT, size: tuple[int, int]) -> None:
        """Measures the stream with the student's patches of pictures of a size; kept until another grid is read.

        :attr:`streams` is what the norms see before each block and after the last, each (N, L, D_teacher).
        """
        grid = grid_of(student, size)
        if grid == self._grid:
            return
        images = Preprocess(size, self.prepare.mean, self.prepare.std)(self.pictures)
        self.streams = teacher_streams(self.model, embedded_as(student, self.model, images))
        self.moment = moment_of(self.streams, int(self.model.cls_token is not None))
        self._grid, self._block, self._projections = grid, None, dict[object, Tensor]()

    def projection(self, student: ViT) -> Tensor:
        """How the stream maps onto a student's, :func:`projection_of`; one for all students of a width."""
        reader = self.model if inherits_head(student, self.model) else None
        key = student.embed_dim, centres(student.blocks[0].norm1), reader is None
        if key not in self._projections:
            self._projections[key] = projection_of(self.moment, self.streams[-1], student, reader)
        return self._projections[key]

    def block(self, number: int, student: ViT) -> BlockActivations:
        """One block's activations; the last one is kept, so students go through the blocks together."""
        kept = kept_tokens(student, self.model, self.streams[0].shape[1])
        key = number, kept.tolist()
        if self._block is None or self._block[0] != key:
            self._block = None  # before the next is made: both at once may not fit
            before, after = self.streams[number : number + 2]
            self._block = key, BlockActivations.of(self.model.blocks[number], before, after, kept)
        return self._block[1]


def grid_of(student: ViT, size: tuple[int, int]) -> object:
    """Students of equal grids read the same stream."""
    return tuple(student.patch_embed.patch_size), tuple(student.patch_embed.grid_size), tuple(size)
