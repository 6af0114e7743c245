"""A teacher's activations on sample pictures, computed once for all students that start from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kd.distill.inherit.pair import FIRST_LAYERS, ViT, centres, inherits_head, kept_tokens
from kd.distill.inherit.stream import (
    embedded_as,
    moment_of,
    projection_of,
    seen_by_norms,
    teacher_streams,
)
from kd.models.preprocess import Images, Preprocess

GUIDE = 512
"""Pictures of the sample's first part, which decides what is kept; other parts have no more."""


@dataclass(frozen=True)
class BlockActivations:
    """What one block of the teacher computes on a part of the sample, at the tokens that the student has too."""

    block: Any
    """The teacher's block."""
    qkv: Tensor
    """Queries, keys and values, ``(N, L, 3 * D)``."""
    heads: Tensor
    """Input of the attention's projection, ``(N, L, D)``; empty in all parts but the first."""
    units: Tensor
    """Input of the MLP's second layer, ``(N, L, hidden)``; empty in all parts but the first."""
    hidden: list[Tensor]
    """Outputs of the MLP's first layers, ``(N, L, hidden or twice that)`` each."""
    middle: Tensor
    """The stream between attention and MLP, as the norms see it, ``(N, L, D)``."""
    after: Tensor
    """The stream after the block, as the norms see it, ``(N, L, D)``."""
    moments: dict[object, Tensor] = field(default_factory=dict)
    """Second moments of ``heads`` and ``units``, kept for students of all widths."""

    @classmethod
    def measure(
        cls, block: Any, before: Tensor, kept: Tensor, guides: bool
    ) -> tuple["BlockActivations", Tensor]:
        """Runs a block of the teacher.

        Args:
            block: the teacher's.
            before: the stream before it, as the norms see it, ``(N, L_teacher, D)``.
            kept: places of the tokens that the student has too, ``(L,)``.
            guides: whether this is the part that decides which heads and units are kept.

        Returns:
            The activations, and the stream after the block at all tokens, ``(N, L_teacher, D)``.
        """
        first_layers = [getattr(block.mlp, name) for name, _ in FIRST_LAYERS[type(block.mlp)]]
        with _recorded([block.attn.qkv, block.attn.proj, block.mlp.fc2, *first_layers]) as records:
            attended = block.drop_path1(block.ls1(block.attn(block.norm1(before))))
            middle = seen_by_norms(before + attended, block.norm1)
            mixed = block.drop_path2(block.ls2(block.mlp(block.norm2(middle))))
            after = seen_by_norms(middle + mixed, block.norm2)

        qkv = records[block.attn.qkv].output[:, kept]
        heads = records[block.attn.proj].input[:, kept]
        units = records[block.mlp.fc2].input[:, kept]
        hidden = [records[layer].output[:, kept] for layer in first_layers]
        if not guides:  # the largest are halved; what decides on heads and units is dropped
            qkv = qkv.bfloat16()
            hidden = [outputs.bfloat16() for outputs in hidden]
            heads = torch.empty(0)
            units = torch.empty(0)
        activations = cls(block, qkv, heads, units, hidden, middle[:, kept], after[:, kept])
        return activations, after


@dataclass
class _Record:
    """One forward of a layer."""

    input: Tensor
    output: Tensor


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[dict[nn.Module, _Record]]:
    """Records the next forward of each layer."""
    records: dict[nn.Module, _Record] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        records[layer] = _Record(inputs[0], output)

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


class MeasuredTeacher:
    """What the fits read of a plain ViT on a sample; each thing is computed when it is first read.

    Args:
        model: the teacher, or the backbone of a dense one.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        prepare: resizes and normalises pictures as the teacher takes them.
    """

    moment: Tensor
    """Second moment of the teacher's streams on the first part, ``(D, D)``, of the present grid."""
    last: Tensor
    """Its stream after the last block on the first part, ``(N, L, D)``, likewise."""

    def __init__(self, model: ViT, pictures: Images, prepare: Preprocess) -> None:
        self.model = model
        self.pictures = pictures
        self.prepare = prepare
        self._grid: object = None
        self._projections: dict[object, Tensor] = {}
        self._next = 0  # the block that reads _streams
        self._streams: list[Tensor] = []  # of each part, before block _next
        self._after: list[Tensor] = []  # of each part, after block _next, where it has run
        self._measured_key: object = None
        self._measured: list[BlockActivations] = []

    @cached_property
    def logits(self) -> Tensor:
        """The teacher's logits of the sample at the teacher's own size and grid, ``(N, C)``."""
        return torch.cat([self.model(self.prepare(part)) for part in self.pictures.split(64)])

    def use_grid_of(self, student: ViT, size: tuple[int, int]) -> None:
        """Cuts pictures into the student's patches from now on; measures the streams if the grid is another.

        Args:
            student: whose patches.
            size: height and width of the student's pictures.
        """
        grid = grid_of(student, size)
        if grid == self._grid:
            return
        prepare = Preprocess(size, self.prepare.mean, self.prepare.std)
        embedded = []
        for part in self.pictures.split(GUIDE):
            embedded.append(embedded_as(student, self.model, prepare(part)))
        streams = teacher_streams(self.model, embedded[0])
        self.moment = moment_of(streams, int(self.model.cls_token is not None))
        self.last = streams[-1]

        first_norm = self.model.blocks[0].norm1
        self._grid = grid
        self._projections = {}
        self._next = 0
        self._streams = [seen_by_norms(stream, first_norm) for stream in embedded]
        self._after = []
        self._measured_key = None
        self._measured = []

    def projection(self, student: ViT) -> Tensor:
        """:func:`projection_of`, ``(D_student, D)``: one tensor for all students of a width."""
        reader = self.model if inherits_head(student, self.model) else None
        key = student.embed_dim, centres(student.blocks[0].norm1), reader is None
        if key not in self._projections:
            self._projections[key] = projection_of(self.moment, self.last, student, reader)
        return self._projections[key]

    def activations_of(self, number: int, student: ViT) -> list[BlockActivations]:
        """One block's activations, part by part, at the tokens that the student has too.

        Only the last block's are kept: students go through the blocks together, and ``number`` never falls.

        Args:
            number: of the teacher's block, from 0.
            student: which tokens are kept; its size does not matter.
        """
        kept = kept_tokens(student, self.model, self.last.shape[1])
        while self._next < number:
            if not self._after:
                _, self._after = self._run(self._next, kept)
            self._streams = self._after
            self._after = []
            self._next += 1
        key = number, kept.tolist()
        if self._measured_key != key:
            self._measured = []  # before the next are made: both at once may not fit into memory
            self._measured, self._after = self._run(number, kept)
            self._measured_key = key
        return self._measured

    def _run(self, number: int, kept: Tensor) -> tuple[list[BlockActivations], list[Tensor]]:
        """A block's activations, and the stream after it, in each part."""
        block = self.model.blocks[number]
        all_activations = []
        all_after = []
        for part, stream in enumerate(self._streams):
            activations, after = BlockActivations.measure(block, stream, kept, guides=part == 0)
            all_activations.append(activations)
            all_after.append(after)
        return all_activations, all_after


def grid_of(student: ViT, size: tuple[int, int]) -> object:
    """What a student sees of pictures of a size: students of equal grids read the same teacher's stream."""
    patches = student.patch_embed
    return tuple(patches.patch_size), tuple(patches.grid_size), tuple(size)
