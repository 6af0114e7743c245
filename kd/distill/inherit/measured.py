"""A teacher's activations on sample pictures, computed once for all students that start from it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kd.distill.inherit.anatomy import (
    Part,
    ViT,
    attend,
    caught,
    qkv_of,
    rotation_of,
    scaled,
)
from kd.distill.inherit.pair import (
    FIRST_LAYERS,
    inherits_head,
    kept_tokens,
    pools_by_attention,
)
from kd.distill.inherit.stream import (
    embedded_as,
    moment_of,
    projection_of,
    seen_by_norms,
    teacher_streams,
)
from kd.models.preprocess import Images, Preprocess

GUIDE = 512
"""The sample's first pictures, which decide what is kept."""
PART = 64
"""Pictures that are processed at once: what a layer makes of them is small beside a processor's caches and is freed
before it costs new pages of memory. In parts of 512 two thirds of the fit were copies."""


@dataclass(frozen=True)
class BlockActivations:
    """What one block of the teacher computes on a part of the sample, at the tokens that the student has too."""

    block: Any
    """The teacher's block."""
    qkv: Tensor
    """Queries, keys and values, ``(N, L, 3 * H * S)`` of H heads of S dimensions; of a block bfloat16 in parts
    after :data:`GUIDE`."""
    heads: Tensor
    """Input of the attention's projection, ``(N, L, H * S)``; empty in parts after :data:`GUIDE`."""
    units: Tensor
    """Input of the MLP's second layer, ``(N, L, hidden)``; empty in parts after :data:`GUIDE`."""
    hidden: list[Tensor]
    """Outputs of the MLP's first layers, ``(N, L, hidden or twice that)`` each; of a block bfloat16 in
    parts after :data:`GUIDE`."""
    gate: Tensor | None
    """What the attention's gate gives before its sigmoid, ``(N, L, H * S)``; None: it has none."""
    middle: Tensor
    """The stream between attention and MLP, as the norms see it, ``(N, L, D)``."""
    after: Tensor
    """The stream after the block, as the norms see it, ``(N, L, D)``."""

    @classmethod
    def measure(
        cls,
        block: Part,
        before: Tensor,
        rotation: Tensor | None,
        kept: Tensor | None,
        guides: bool,
    ) -> tuple["BlockActivations", Tensor]:
        """Runs a block of the teacher.

        Args:
            block: the teacher's.
            before: the stream before it, as the norms see it, ``(N, L_teacher, D)``.
            rotation: of :func:`kd.distill.inherit.anatomy.rotation_of`.
            kept: places of the tokens that the student has too, ``(L,)``; None: all of them.
            guides: whether this is the part that decides which heads and units are kept.

        Returns:
            The activations, and the stream after the block at all tokens, ``(N, L_teacher, D)``.
        """
        attention = block.attn
        mlp = block.mlp
        gate_layer = getattr(attention, "gate", None)
        first_layers = [getattr(mlp, name) for name, _ in FIRST_LAYERS[type(mlp)]]
        giving = [*first_layers, attention.qkv, gate_layer]
        writers = [attention.proj, mlp.fc2]
        with (
            caught(writers) as read,
            caught([layer for layer in giving if layer is not None], output=True) as given,
        ):
            normed = block.norm1(before)
            attended = scaled(block, 1, attend(attention, normed, rotation))
            middle = seen_by_norms(before + attended, block.norm1)
            mixed = scaled(block, 2, mlp(block.norm2(middle)))
            after = seen_by_norms(middle + mixed, block.norm2)

        if attention.qkv in given and getattr(attention, "q_bias", None) is None:
            qkv = given[attention.qkv]
        else:  # several layers, or weights that are read without running the layer
            qkv = qkv_of(attention, normed)

        def taken(tensor: Tensor) -> Tensor:
            """At the tokens that the student has too."""
            return tensor if kept is None else tensor[:, kept]

        qkv = taken(qkv)
        hidden = [taken(given[layer]) for layer in first_layers]
        heads = units = torch.empty(0)
        if guides:
            heads = taken(read[attention.proj])
            units = taken(read[mlp.fc2])
        else:  # the largest are halved; what decides on heads and units is dropped
            qkv = qkv.bfloat16()
            hidden = [outputs.bfloat16() for outputs in hidden]
        gate = None if gate_layer is None else taken(given[gate_layer])
        return cls(block, qkv, heads, units, hidden, gate, taken(middle), taken(after)), after


class MeasuredTeacher:
    """What the fits read of a plain ViT on a sample; each thing is computed when it is first read.

    Args:
        model: the teacher, or the backbone of a dense one.
        pictures: the sample, uint8 ``(N, 3, H, W)``.
        prepare: resizes and normalises pictures as the teacher takes them.
        passed: called after each part of the sample that has gone through a block.
    """

    moment: Tensor
    """Second moment of the teacher's streams on the first :data:`GUIDE` pictures, ``(D, D)``, of the present grid."""
    last: Tensor
    """Its stream after the last block on these pictures, ``(N, L, D)``, likewise."""
    rotation: Tensor | None
    """The rotary positions of all its blocks, likewise."""

    def __init__(
        self,
        model: ViT,
        pictures: Images,
        prepare: Preprocess,
        passed: Callable[[], object] = lambda: None,
    ) -> None:
        """Stores the arguments, which are the class's. Nothing is computed before the first student reads it."""
        self.model = model
        self.pictures = pictures
        self.prepare = prepare
        self.passed = passed
        self.spreads: dict[object, Tensor] = {}
        """Filled by the :class:`~kd.distill.inherit.layers.BlockTargets` of the block that ran last."""
        self._grid: object = None
        self._next = 0  # the block that reads _streams
        self._streams: list[Tensor] = []  # of each part, before block _next
        self._after: list[Tensor] = []  # of each part, after block _next, where it has run
        self._measured_key: object = None
        self._measured: list[BlockActivations] = []

    @property
    def guide_parts(self) -> int:
        """How many parts the first :data:`GUIDE` pictures are."""
        return -(-GUIDE // PART)

    @cached_property
    def logits(self) -> Tensor:
        """The teacher's logits of the sample at the teacher's own size and grid, ``(N, C)``.

        Where its blocks have just run on that grid, the stream after the last one is read.
        """
        model = self.model
        is_at_end = self._next == len(model.blocks) - 1 and self._after
        has_run = is_at_end and self._is_its_own_grid
        logits = []
        for number, part in enumerate(self.pictures.split(PART)):
            if has_run:
                logits.append(model.forward_head(model.norm(self._after[number])))
            else:
                logits.append(model(self.prepare(part)))
            self.passed()
        return torch.cat(logits)

    @property
    def _is_its_own_grid(self) -> bool:
        """Whether pictures are cut as the teacher itself cuts them."""
        return self._grid == grid_of(self.model, self.prepare.size)

    def use_grid_of(self, student: ViT, size: tuple[int, int]) -> None:
        """Cuts pictures into the student's patches from now on; nothing is done where the grid is the present one.

        Measures :attr:`moment`, :attr:`last` and :attr:`rotation` anew, and goes back to the first block.

        Args:
            student: whose patches.
            size: height and width of the student's pictures.
        """
        grid = grid_of(student, size)
        if grid == self._grid:
            return
        model = self.model
        prepare = Preprocess(size, self.prepare.mean, self.prepare.std)
        embedded = []
        for part in self.pictures.split(PART):
            embedded.append(model.norm_pre(embedded_as(student, model, prepare(part))))
        self.rotation = rotation_of(student)
        guides = torch.cat(embedded[: self.guide_parts])
        streams = teacher_streams(model, guides, self.rotation, self.passed)
        self.moment = moment_of(streams, int(model.cls_token is not None))
        self.last = streams[-1]

        self._grid = grid
        self._next = 0
        self._streams = [seen_by_norms(stream, model.blocks[0].norm1) for stream in embedded]
        self._after = []
        self._measured_key = None
        self._measured = []

    def projection(self, student: ViT) -> Tensor:
        """M of a student, ``(D_student, D_teacher)``, as :func:`projection_of` computes it."""
        reads_tokens = inherits_head(student, self.model) and not pools_by_attention(self.model)
        reader = self.model if reads_tokens else None  # whose classifier reads the tokens
        return projection_of(self.moment, self.last, student, reader)

    def before_blocks(self, student: ViT) -> Tensor:
        """The teacher's stream before its first block, as the norms see it, on the parts that guide.

        It must be read before any block has run on the grid.

        Args:
            student: which tokens are kept.

        Returns:
            ``(N, L, D_teacher)`` at the tokens that the student has too.
        """
        assert self._next == 0
        kept = kept_tokens(student, self.model, self.last.shape[1])
        return torch.cat(self._streams[: self.guide_parts])[:, kept]

    def after_blocks(self) -> list[Tensor]:
        """The teacher's stream after its last block at all its tokens, ``(N, L, D)`` of each part.

        The last block must be the one that :meth:`activations_of` was called for last.
        """
        assert self._next == len(self.model.blocks) - 1 and self._after
        return self._after

    def activations_of(self, number: int, student: ViT) -> list[BlockActivations]:
        """The activations of a teacher's block, part by part, at the tokens that the student has too.

        Only those of the latest call are kept: students go through the blocks together, and ``number`` must not become
        smaller while the grid stays.

        Args:
            number: of the teacher's block, from 0.
            student: which tokens are kept; its size does not matter.

        Returns:
            One for each part of the sample.
        """
        count = self.last.shape[1]
        places = kept_tokens(student, self.model, count)
        kept = None if len(places) == count else places
        # Blocks before it that no student follows are run for their streams alone.
        while self._next < number:
            if not self._after:
                self._run(kept)
            self._streams = self._after
            self._after = []
            self._next += 1
        key = number, places.tolist()
        if self._measured_key != key:
            self._run(kept)
            self._measured_key = key
        return self._measured

    def _run(self, kept: Tensor | None) -> None:
        """Runs the next block on the streams before it; ``kept``: as of :meth:`BlockActivations.measure`."""
        self._measured = []  # before the next are made: both at once may not fit into memory
        self._after = []
        self.spreads.clear()
        block = self.model.blocks[self._next]
        for part, stream in enumerate(self._streams):
            activations, after = BlockActivations.measure(
                block, stream, self.rotation, kept, guides=part < self.guide_parts
            )
            self.passed()
            self._measured.append(activations)
            self._after.append(after)


def grid_of(student: ViT, size: tuple[int, int]) -> object:
    """How a model cuts pictures: of two students with equal results the teacher is measured once.

    Args:
        student: a ViT, or the teacher itself.
        size: height and width of its pictures in pixels.

    Returns:
        Only to be compared: the size of a patch, the number of patches along each side, and ``size``.
    """
    patches = student.patch_embed
    return tuple(patches.patch_size), tuple(patches.grid_size), tuple(size)
