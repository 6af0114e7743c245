"""Which sizes a student may have: a grid below its teacher's size, timm's models by name, the recipe's own student."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, prod
from typing import Any, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from kd.distill.inherit.pair import ViT
from kd.distill.student import Student
from kd.errors import UserError
from kd.models import StudentSpec, build_model, count_parameters, preprocess_for
from kd.models.build import AUTO, PATCHES, hidden_pixels
from kd.models.segmenter import DenseModel, backbone_of
from kd.report.sized import SETTINGS
from kd.run.assemble import Begun, begin, not_inheritable, own_patches
from kd.teachers import FrozenTeacher, RunTeacher

DEPTHS = (1 / 3, 1 / 2, 2 / 3, 1)  # of the teacher's blocks
WIDTHS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)  # of the teacher's width


@dataclass(frozen=True)
class Candidate:
    """One size that a student may have."""

    name: str
    """w192d12h3 for width, depth and heads, or timm's name; with the input's side where there are several."""
    asked: StudentSpec
    """The settings that a run gets."""
    spec: StudentSpec
    """The same as resolved: ``patch_size`` in place of ``auto``."""
    params: int
    """Parameters."""
    cost: int
    """Parameters times pixels, to order candidates by."""
    inherits: bool
    """Whether it starts from the teacher's layers."""
    own: bool = False
    """Whether it is the recipe's own student."""

    @classmethod
    def of(cls, name: str, asked: StudentSpec, begun: Begun, own: bool = False) -> "Candidate":
        """The candidate of a model that was just built.

        Args:
            name: for people and files.
            asked: the settings that a run gets.
            begun: the model, with the settings as resolved and how it starts.
            own: it is the recipe's own student.
        """
        params, pixels = (
            count_parameters(begun.model),
            prod(preprocess_for(begun.model, asked.img_size).size),
        )
        name, inherits = re.sub(r"\W", "_", name), begun.start == "inherited"
        return cls(name, asked, begun.spec, params, params * pixels, inherits, own)

    def settings(self) -> dict[str, Any]:
        """What distinguishes it, by key below ``model.student``."""
        found = {key: getattr(self.asked, key) for key in SETTINGS}
        return {
            key: [*value] if isinstance(value, tuple) else value for key, value in found.items()
        }


def drawing(
    spec: StudentSpec, student: Student, key: str = "model.student"
) -> Callable[[], nn.Module]:
    """Builds a model of these settings with weights as drawn, for a student's task and classes; picklable."""
    blank, dense = (
        replace(spec, checkpoint=None, pretrained=False),
        isinstance(student.model, DenseModel),
    )
    return partial(build_model, blank, len(student.classes), key, student.classes, dense=dense)


def candidates(
    student: Student, teacher: RunTeacher, archs: Sequence[str], sizes: Sequence[int], count: int
) -> list[Candidate]:
    """The recipe's student, models by name, and as many of the grid as ``count`` leaves, the cheapest first."""
    spec, size = student.spec, cast(Any, student.prepare).size
    assert spec is not None
    all_sizes: list[Any] = [*sizes] or [spec.img_size or size]
    chosen, kept = [], {PATCHES: AUTO} if spec.kwargs.get(PATCHES) == AUTO else {}
    if spec.builder is None:
        for side in sizes:
            begun = _begun(replace(spec, img_size=side), student, teacher, "img_sizes")
            if unseen := hidden_pixels(begun.model):
                raise UserError(f"img_sizes: {unseen}")
        own = f"{spec.arch}_own" if spec.arch in archs else spec.arch
        chosen.append(
            Candidate.of(own, spec, _begun(spec, student, teacher, "model.student"), own=True)
        )
    for arch, side in product(archs, all_sizes):
        named = replace(
            spec,
            arch=arch,
            kwargs=kept,
            img_size=side,
            checkpoint=None,
            inherit="auto",
            builder=None,
        )
        begun = _begun(named, student, teacher, "archs")
        chosen.append(Candidate.of(f"{arch}_{side}" if sizes else arch, named, begun))
    problems = {
        name: not_inheritable(member.model, member) for name, member in teacher.members.items()
    }
    parent = next((name for name, problem in problems.items() if not problem), None)
    if parent is None and not archs:
        raise UserError(
            f"model.teacher: no size can start from its layers: {next(iter(problems.values()))}; "
            "archs=NAME,... are scored by a short distillation"
        )
    for part in (
        [] if parent is None else _grid(student, teacher, teacher.members[parent], all_sizes, count)
    ):
        chosen += _spread(part, count - len(chosen))
    return sorted(chosen, key=lambda one: (one.cost, one.name))


def smallest(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one of their architecture undercuts: a budget that is too small for them is so for all."""
    sizes = [(one.spec.arch, one.spec.kwargs.get("depth", inf), one.cost) for one in found]
    less = [
        [b[0] == a[0] and b[1] <= a[1] and b[2] <= a[2] and a != b for b in sizes] for a in sizes
    ]
    return [one for one, under in zip(found, less, strict=True) if not any(under)]


def _grid(
    student: Student, teacher: RunTeacher, parent: FrozenTeacher, sizes: Sequence[Any], count: int
) -> list[list[Candidate]]:
    """The default sizes; for a larger ``count`` also those between them, and with heads of another size."""
    big = backbone_of(parent.model)
    depth, width, head = len(big.blocks), big.embed_dim, big.blocks[0].attn.head_dim
    base = replace(
        cast(StudentSpec, student.spec),
        checkpoint=None,
        pretrained=False,
        inherit=True,
        builder=None,
    )
    if _sized(base, student, teacher, (width, depth, width // head), sizes[0]) is None:
        base = replace(
            base, arch=parent.spec.arch, kwargs=dict(parent.spec.kwargs)
        )  # in the teacher's image
    depths = sorted({max(1, round(depth * part)) for part in DEPTHS})
    widths = sorted({_rounded(width * part, width) for part in WIDTHS})
    shapes = [[(w, d, _heads(w, head)[0]) for w in widths for d in depths]]
    if count > len(shapes[0]) * len(sizes):
        between = sorted({*range(64, width + 1, 32), width})
        more = [
            (w, d, h) for w in between for d in range(depths[0], depth + 1) for h in _heads(w, head)
        ]
        shapes.append([shape for shape in more if shape not in shapes[0]])
    parts = []
    for part in shapes:
        made = [
            _sized(base, student, teacher, shape, side, len(sizes) > 1)
            for shape, side in product(part, sizes)
        ]
        parts.append(
            sorted((one for one in made if one is not None), key=lambda one: (one.cost, one.name))
        )
    return parts


def _sized(
    base: StudentSpec,
    student: Student,
    teacher: RunTeacher,
    shape: tuple[int, int, int],
    side: object,
    several: bool = False,
) -> Candidate | None:
    """One of the grid; None where it can't start from the teacher, or is the recipe's own."""
    width, depth, heads = shape
    kwargs = {**base.kwargs, "embed_dim": width, "depth": depth, "num_heads": heads}
    spec = replace(base, kwargs=kwargs, img_size=cast(Any, side))
    try:
        begun = _begun(spec, student, teacher, "model.student")
    except ValueError:  # a UserError is one too
        return None
    if (
        student.spec
        and student.spec.builder is None
        and _shape(begun.model) == _shape(student.model)
    ):
        return None
    return Candidate.of(f"w{width}d{depth}h{heads}" + f"_{side}" * several, spec, begun)


def _begun(spec: StudentSpec, student: Student, teacher: RunTeacher, key: str) -> Begun:
    """What a run by these settings trains, without values."""

    def blank(wanted: StudentSpec) -> nn.Module:
        with torch.device("meta"):
            return drawing(wanted, student, key)()

    return begin(spec, blank(own_patches(spec)), teacher, blank)


def _shape(model: nn.Module) -> tuple[object, ...]:
    vit = backbone_of(model)
    is_vit = isinstance(vit, VisionTransformer)
    heads = cast(ViT, vit).blocks[0].attn.num_heads if is_vit else 0
    return (heads, *((name, tuple(p.shape)) for name, p in model.named_parameters()))


def _rounded(width: float, most: int) -> int:
    """A multiple of 32, from 256 on of 64, which kernels like; a teacher narrower than that has none below it."""
    step = 64 if width >= 256 else 32
    return min(most, max(32, step * round(width / step)))


def _heads(width: int, own: int) -> list[int]:
    """Numbers of heads: of the teacher's size first, whose heads are taken as they are, then of 64 and of 32."""
    return [width // size for size in dict.fromkeys((own, 64, 32)) if width % size == 0] or [1]


def _spread(found: Sequence[Candidate], count: int) -> Iterable[Candidate]:
    """Of candidates in order so many, evenly spaced, both ends among them."""
    steps, last = max(1, min(count, len(found)) - 1), len(found) - 1
    return [found[round(i * last / steps)] for i in range(min(count, len(found)))]
