"""Which sizes a student may have: a grid below its teacher's size, and the recipe's own student."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from kd.distill.inherit.anatomy import ViT
from kd.distill.student import Student
from kd.errors import UserError
from kd.models import StudentSpec, build_model, count_parameters, preprocess_for
from kd.models.arguments import without_values
from kd.models.segmenter import DenseModel, backbone_of
from kd.run.assemble import Begun, choose_start, not_inheritable
from kd.teachers import FrozenTeacher, RunTeacher

SAME = ("arch", "img_size", "kwargs")
"""Settings that two students of one size have in common."""
SETTINGS = (*SAME, "checkpoint", "pretrained", "inherit")
"""Settings that distinguish candidates."""
DEPTHS = (1 / 3, 1 / 2, 2 / 3, 1)
"""Shares of the teacher's blocks."""
WIDTHS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)
"""Shares of the teacher's width."""


@dataclass(frozen=True)
class Candidate:
    """One size that a student may have."""

    name: str
    """w192d12h3 for width, depth and heads; the recipe's own student has its ``arch``."""
    run_spec: StudentSpec
    """The settings that a run gets."""
    spec: StudentSpec
    """The same as resolved: ``patch_size`` in place of ``auto``."""
    params: int
    """Parameters."""
    cost: int
    """Parameters times pixels of the input: only to order candidates by, a stand-in for computing time."""
    inherits: bool
    """Whether it starts from the teacher's layers."""
    of_recipe: bool = False
    """Whether it is the recipe's own student."""

    @classmethod
    def of(
        cls, name: str, run_spec: StudentSpec, begun: Begun, of_recipe: bool = False
    ) -> "Candidate":
        """The candidate of a model that was just built.

        Args:
            name: for people and files.
            run_spec: the settings that a run gets.
            begun: the model, with the settings as resolved and how it starts.
            of_recipe: it is the recipe's own student.
        """
        params = count_parameters(begun.model)
        height, width = preprocess_for(begun.model, run_spec.img_size).size
        return cls(
            name=re.sub(r"\W", "_", name),
            run_spec=run_spec,
            spec=begun.spec,
            params=params,
            cost=params * height * width,
            inherits=begun.start == "inherited",
            of_recipe=of_recipe,
        )

    def settings(self) -> dict[str, Any]:
        """The settings that distinguish it (:data:`SETTINGS`), by key below ``model.student``.

        As JSON has them, lists in place of tuples: they go into ``sizes.json`` and into the keys of ``results.json``.
        """
        values = {}
        for key in SETTINGS:
            value = getattr(self.run_spec, key)
            values[key] = list(value) if isinstance(value, tuple) else value
        return values


def model_drawer(spec: StudentSpec, student: Student) -> Callable[[], nn.Module]:
    """A function that builds a model with weights as drawn, for a student's task and classes.

    It is picklable: another process times the model.

    Args:
        spec: settings of the model.
        student: whose task and classes it has.
    """
    without_weights = replace(spec, checkpoint=None, pretrained=False)
    classes = student.classes
    dense = isinstance(student.model, DenseModel)
    return partial(
        build_model, without_weights, len(classes), "model.student", classes, dense=dense
    )


def candidates(student: Student, teacher: RunTeacher, count: int) -> list[Candidate]:
    """The sizes to choose from, the cheapest first.

    Args:
        student: the recipe's; it is one of them unless a builder makes it.
        teacher: whose layers the others start from.
        count: how many in all, at most.

    Raises:
        UserError: a teacher from whose layers no size can start.
    """
    spec = student.spec
    assert spec is not None
    chosen = []
    if spec.builder is None:
        begun = _begin_without_values(spec, student, teacher)
        chosen.append(Candidate.of(spec.arch, spec, begun, of_recipe=True))

    problems = {}
    for name, member in teacher.members.items():
        is_vit = hasattr(backbone_of(member.model), "blocks")  # of no other family is there a grid
        problem = "its sizes are drawn up for vision transformers alone"
        problems[name] = not_inheritable(member.model, member) if is_vit else problem
    parent = next((name for name, problem in problems.items() if not problem), None)
    if parent is None:
        raise UserError(
            f"model.teacher: no size can start from its layers: {next(iter(problems.values()))}; "
            "kd-tune 'search.model.student.arch=[...]' objective=val/acc1,latency_ms trains each"
        )
    for grid in _grids(student, teacher, teacher.members[parent]):
        if len(chosen) >= count:
            break  # before the next grid's models are built
        chosen += _evenly_spaced(grid, count - len(chosen))
    return sorted(chosen, key=_by_cost)


def _by_cost(candidate: Candidate) -> tuple[int, str]:
    return candidate.cost, candidate.name


def _grids(
    student: Student, teacher: RunTeacher, parent: FrozenTeacher
) -> Iterator[list[Candidate]]:
    """Sizes below the teacher's: the default ones, then those between them; each list with the cheapest first.

    Args:
        student: the recipe's.
        teacher: the run's.
        parent: its member whose layers the sizes start from: a ViT.
    """
    backbone = backbone_of(parent.model)
    depth = len(backbone.blocks)
    width = backbone.embed_dim
    head_dim = backbone.blocks[0].attn.head_dim

    # all have the recipe's student's other settings, or the teacher's architecture where its layers don't fit the student's
    spec = cast(StudentSpec, student.spec)
    base = replace(
        spec,
        img_size=spec.img_size or cast(Any, student.prepare).size,
        checkpoint=None,
        pretrained=False,
        inherit=True,
        builder=None,
    )
    if _of_shape(base, student, teacher, (width, depth, width // head_dim)) is None:
        base = replace(base, arch=parent.spec.arch, kwargs=dict(parent.spec.kwargs))

    def candidates_of(shapes: Sequence[tuple[int, int, int]]) -> list[Candidate]:
        made = [_of_shape(base, student, teacher, shape) for shape in shapes]
        return sorted((one for one in made if one is not None), key=_by_cost)

    # shares of the teacher's width and depth, heads as wide as the teacher's
    depths = sorted({max(1, round(depth * share)) for share in DEPTHS})
    widths = sorted({_rounded(width * share, width) for share in WIDTHS})
    default_shapes = [(w, d, _head_counts(w, head_dim)[0]) for w, d in product(widths, depths)]
    yield candidates_of(default_shapes)

    # between them: every width in steps of 32, every depth, all numbers of heads
    all_widths = sorted({*range(64, width + 1, 32), width})
    all_depths = range(depths[0], depth + 1)
    all_shapes = [
        (w, d, h) for w, d in product(all_widths, all_depths) for h in _head_counts(w, head_dim)
    ]
    yield candidates_of([shape for shape in all_shapes if shape not in default_shapes])


def _of_shape(
    base: StudentSpec,
    student: Student,
    teacher: RunTeacher,
    shape: tuple[int, int, int],
) -> Candidate | None:
    """The candidate of a width, depth and number of heads. None where it can't be built or can't start from the teacher, or
    where it is the recipe's own student, which is a candidate already unless a builder makes it.

    Args:
        base: its other settings.
        student: the recipe's.
        teacher: the run's.
        shape: width, depth and heads.
    """
    width, depth, heads = shape
    kwargs = {**base.kwargs, "embed_dim": width, "depth": depth, "num_heads": heads}
    run_spec = replace(base, kwargs=kwargs)
    try:
        begun = _begin_without_values(run_spec, student, teacher)
    except ValueError:  # a UserError is one too
        return None
    recipes_is_candidate = student.spec is not None and student.spec.builder is None
    if recipes_is_candidate and _shapes(begun.model) == _shapes(student.model):
        return None
    return Candidate.of(f"w{width}d{depth}h{heads}", run_spec, begun)


def _begin_without_values(spec: StudentSpec, student: Student, teacher: RunTeacher) -> Begun:
    """What a run by these settings trains, on the meta device: shapes without values.

    Args:
        spec: the candidate's settings.
        student: the recipe's, whose task and classes it has.
        teacher: from which it may inherit.

    Raises:
        UserError: settings by which no model can be built, or ``inherit=true`` where the teacher gives no layers.
    """

    def build(wanted: StudentSpec) -> nn.Module:
        with without_values():
            return model_drawer(wanted, student)()

    return choose_start(spec, teacher, build)


def _shapes(model: nn.Module) -> tuple[object, ...]:
    """The heads of a ViT (0 for any other model), then a pair for each parameter: name and shape.

    Two models with equal tuples have the same architecture; parameters alone do not show the number of heads.
    """
    backbone = backbone_of(model)
    heads = 0
    if isinstance(backbone, VisionTransformer):
        heads = cast(ViT, backbone).blocks[0].attn.num_heads
    parameters = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return (heads, *parameters)


def _rounded(width: float, most: int) -> int:
    """``width`` as a multiple of 32, from 256 on of 64, which kernels like: at least 32, and at most ``most``.

    ``most`` is the teacher's width, which is taken as it is.
    """
    step = 64 if width >= 256 else 32
    return min(most, max(32, step * round(width / step)))


def _head_counts(width: int, teachers_head_dim: int) -> list[int]:
    """The numbers of heads that a width may have: with heads as wide as the teacher's, which are inherited whole, then 64
    and 32 wide; ``[1]`` where none of these divides ``width``.
    """
    head_dims = dict.fromkeys((teachers_head_dim, 64, 32))
    return [width // head_dim for head_dim in head_dims if width % head_dim == 0] or [1]


def _evenly_spaced(ordered: Sequence[Candidate], count: int) -> list[Candidate]:
    """``count`` of the candidates ``ordered`` by size, evenly spaced, both ends among them (of one the first).

    All where there are fewer; [] for a ``count`` of 0 or less.
    """
    count = min(count, len(ordered))
    steps = max(1, count - 1)
    last = len(ordered) - 1
    chosen = []
    for i in range(count):
        place = round(i * last / steps)
        chosen.append(ordered[place])
    return chosen
