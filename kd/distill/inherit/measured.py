"""A teacher's activations on sample pictures, computed once for all students that start from it."""

from functools import cached_property

import torch
from torch import Tensor

from kd.distill.inherit.layers import GUIDE, BlockActivations
from kd.distill.inherit.pair import ViT, centres, inherits_head, kept_tokens
from kd.distill.inherit.stream import (
    embedded_as,
    moment_of,
    projection_of,
    seen_by_norms,
    teacher_streams,
)
from kd.models.preprocess import Images, Preprocess


class MeasuredTeacher:
    """What the fits read of a plain ViT on a sample, uint8 (N, 3, H, W), each computed when it is first read."""

    def __init__(self, model: ViT, pictures: Images, prepare: Preprocess) -> None:
        self.model, self.pictures, self.prepare = model, pictures, prepare
        self._grid: object = None
        self._block: tuple[object, list[BlockActivations]] | None = None

    @cached_property
    def logits(self) -> Tensor:
        """Of the pictures as the teacher takes them."""
        return torch.cat([self.model(self.prepare(part)) for part in self.pictures.split(64)])

    def see_as(self, student: ViT, size: tuple[int, int]) -> None:
        """Measures the stream with the student's patches of pictures of a size; kept until another grid is read."""
        grid = grid_of(student, size)
        if grid == self._grid:
            return
        prepare = Preprocess(size, self.prepare.mean, self.prepare.std)
        raw = [
            embedded_as(student, self.model, prepare(part)) for part in self.pictures.split(GUIDE)
        ]
        streams = teacher_streams(self.model, raw[0])
        self.moment, self.last = (
            moment_of(streams, int(self.model.cls_token is not None)),
            streams[-1],
        )
        self._streams: list[Tensor] = [seen_by_norms(x, self.model.blocks[0].norm1) for x in raw]
        self._after: list[Tensor] = []
        self._next, self._grid, self._block, self._projections = (
            0,
            grid,
            None,
            dict[object, Tensor](),
        )

    def projection(self, student: ViT) -> Tensor:
        """How the stream maps onto a student's, :func:`projection_of`; one for all students of a width."""
        reader = self.model if inherits_head(student, self.model) else None
        key = student.embed_dim, centres(student.blocks[0].norm1), reader is None
        if key not in self._projections:
            self._projections[key] = projection_of(self.moment, self.last, student, reader)
        return self._projections[key]

    def block(self, number: int, student: ViT) -> list[BlockActivations]:
        """One block's activations in each part; the last ones are kept, so students go through the blocks together."""
        kept = kept_tokens(student, self.model, self.last.shape[1])
        while self._next < number:
            self._streams, self._after = self._after or self._run(self._next, kept)[1], []
            self._next += 1
        key = number, kept.tolist()
        if self._block is None or self._block[0] != key:
            self._block = None  # before the next is made: both at once may not fit
            found, self._after = self._run(number, kept)
            self._block = key, found
        return self._block[1]

    def _run(self, number: int, kept: Tensor) -> tuple[list[BlockActivations], list[Tensor]]:
        """A block's activations, and the stream after it, in each part."""
        block = self.model.blocks[number]
        runs = [
            BlockActivations.of(block, x, kept, guides=i == 0) for i, x in enumerate(self._streams)
        ]
        return [found for found, _ in runs], [after for _, after in runs]


def grid_of(student: ViT, size: tuple[int, int]) -> object:
    """Students of equal grids read the same stream."""
    return tuple(student.patch_embed.patch_size), tuple(student.patch_embed.grid_size), tuple(size)
