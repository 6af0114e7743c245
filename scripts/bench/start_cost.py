"""What the start costs beside its arithmetic: the teacher's pass, the student's passes and the solves, on one thread.

    python scripts/bench/start_cost.py                                   # a ViT-S to a ViT-Ti, 256 pictures of 112 px
    python scripts/bench/start_cost.py convnext_atto '{"dims": [20, 40, 80, 160]}' --pictures 512

The arithmetic is measured alone: a forward of each model over all pictures, the teacher's first blocks once more over the
pictures that guide, and the time that the start spends in its moments and Cholesky factors. It prints each part and how
many times their sum the start takes. A quiet machine is needed; weights and pictures are random.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import timm
import torch

from kd.distill.inherit import inherit_together, relative_of, ridge
from kd.distill.inherit.measured import GUIDE, PART
from kd.models import Preprocess


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@torch.no_grad()
def forward(model: Any, prepare: Preprocess, pictures: torch.Tensor) -> None:
    """Runs a model over pictures, in parts of the start's size."""
    for part in pictures.split(PART):
        model(prepare(part))


def timed(name: str, spent: list[float]) -> Callable[..., Any]:
    """A function of :mod:`kd.distill.inherit.ridge` that adds its seconds to ``spent``."""
    function = getattr(ridge, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = function(*args, **kwargs)
        spent.append(time.perf_counter() - begun)
        return result

    return call


def drawn_pair(
    arch: str, of_student: dict[str, Any] | None, side: int, count: int
) -> tuple[Any, Any, Preprocess, torch.Tensor]:
    """Teacher and student with random weights, their input, and pictures; the same for the same arguments.

    Args:
        arch: timm's name.
        of_student: its arguments; None: half as wide as the teacher.
        side: of the pictures in pixels.
        count: of the pictures.
    """
    torch.manual_seed(0)
    size = {"img_size": side} if arch.startswith("vit") else {}
    teacher = timm.create_model(arch, num_classes=100, **size).eval()
    shape = of_student or relative_of(teacher)
    student = timm.create_model(arch, num_classes=100, **size, **shape).eval()
    pictures = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    return teacher, student, Preprocess(side, (0.5,) * 3, (0.25,) * 3), pictures


def main() -> None:
    """Times a start and its arithmetic."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", nargs="?", default="vit_small_patch16_224")
    parser.add_argument("student", nargs="?", type=json.loads, help="default: half as wide")
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--side", type=int, default=112)
    args = parser.parse_args()
    torch.set_num_threads(1)
    teacher, student, prepare, pictures = drawn_pair(
        args.arch, args.student, args.side, args.pictures
    )

    forward(student, prepare, pictures[:PART])  # warms up
    guides = pictures[:GUIDE] if args.arch.startswith("vit") else pictures[:0]
    of_teacher = seconds_of(lambda: forward(teacher, prepare, torch.cat([pictures, guides])))
    of_student = seconds_of(lambda: forward(student, prepare, pictures))
    solves: list[float] = []
    ridge._moments = timed("_moments", solves)
    ridge.change_from = timed("change_from", solves)
    with redirect_stderr(StringIO()):
        start = seconds_of(
            lambda: inherit_together([(student, prepare)], teacher, pictures, prepare)
        )
    arithmetic = of_teacher + of_student + sum(solves)
    print(
        f"{args.arch} -> {args.student or 'half as wide'}, {args.pictures} pictures of {args.side} px, one thread: teacher "
        f"{of_teacher:.1f} s, student {of_student:.1f} s, {len(solves)} moments and solves {sum(solves):.1f} s, together "
        f"{arithmetic:.1f} s; the start {start:.1f} s, {start / arithmetic:.2f} times that"
    )


if __name__ == "__main__":
    main()
