"""What each lever of the computation gains: the same step with and without it, in turn, in one process.

    OMP_NUM_THREADS=1 python scripts/bench/levers.py --write

A step is the teacher's forward, the student's forward and backward, and the optimizer's step, on the same batch. The
last column says what the recipes' defaults are.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.data.info import DataInfo
from kd.losses import KDLoss
from kd.models import StudentSpec, TeacherSpec
from kd.optim import OptimSpec, build_optimizer
from kd.run.assemble import assemble
from scripts.bench.harness import measure, options, spread, write

CLASSES = [str(i) for i in range(81)]
CNN = "resnet18"


@dataclass
class Lever:
    """One change against plain execution.

    Attributes:
        base: the arm that it is compared with; empty for a base itself.
        teacher: changed fields of the teacher's spec.
        student: of the student's.
        optim: of the optimizer's arguments.
        dtype: the teacher's weights and the autocast; float32: none.
        default: what a recipe does that says nothing.
    """

    base: str = ""
    teacher: dict[str, Any] = field(default_factory=dict)
    student: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    default: str = ""


LEVERS = {
    "plain": Lever(),
    "optimizer not fused": Lever("plain", optim={"fused": False}, default="fused"),
    "teacher compiled": Lever("plain", teacher={"compile": True}, default="off"),
    "student compiled": Lever("plain", student={"compile": True}, default="off"),
    "both compiled": Lever("plain", teacher={"compile": True}, student={"compile": True}, default="off"),
    "bfloat16 (teacher's weights, student's autocast)": Lever("plain", dtype=torch.bfloat16,
                                                              default="on where the device computes it"),
    "plain, CNN": Lever(student={"arch": CNN}),
    "channels_last, CNN": Lever("plain, CNN", student={"arch": CNN, "channels_last": True}, default="off"),
}  # fmt: skip


def stepper(
    lever: Lever, device: torch.device, size: int, batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    """A function that makes one step of the pair with this lever pulled."""
    teacher = replace(
        TeacherSpec("vit_small_patch14_dinov2", size, classes=CLASSES), **lever.teacher
    )
    student = replace(StudentSpec("vit_tiny_patch16_224", size), **lever.student)
    module = assemble(
        DataInfo(CLASSES, 2640, 296),
        student,
        teacher,
        distill_losses={"kd": KDLoss(temperature=2.0)},
    ).to(device)
    module.teacher.to(device, lever.dtype)
    student.compile_in_place(module.student)
    optimizer = build_optimizer([module.student], OptimSpec(kwargs=lever.optim))

    def step() -> None:
        answer = module.teacher.answer(batch, module.students.wanted)
        with torch.autocast(device.type, lever.dtype, enabled=lever.dtype is not torch.float32):
            loss = module.student_of_one.learn(batch, answer).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def main() -> None:
    """Times all in turn; prints or keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(LEVERS))
    asked = options(parser)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = {
        "image": torch.randint(
            0, 256, (asked.batch, 3, asked.size, asked.size), dtype=torch.uint8, device=device
        ),
        "target": torch.randint(0, len(CLASSES), (asked.batch,), device=device),
        "index": torch.arange(asked.batch),
    }
    arms, first = {}, {}
    for name in asked.only:
        arms[name] = stepper(LEVERS[name], device, asked.size, batch)
        start = time.perf_counter()
        arms[name]()
        first[name] = time.perf_counter() - start
    seconds = measure(arms, asked.rounds)
    lines = [
        f"ViT-S/14 teaches ViT-Ti/16 (CNN: {CNN}) at {asked.size} px, batch {asked.batch}; {asked.rounds} steps of "
        "each in turn. The first step compiles.",
        "",
        "| | first step, s | ms a step: median (least to most) | times as fast as without | default |",
        "|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        base = seconds.get(LEVERS[name].base)
        gain = (
            f"{statistics.median(a / b for a, b in zip(base, values, strict=True)):.2f}"
            if base
            else ""
        )
        ms = spread([1000 * s for s in values])
        lines.append(f"| {name} | {first[name]:.1f} | {ms} | {gain} | {LEVERS[name].default} |")
    write("levers", asked.hardware, asked.date, "Levers of the computation", lines, asked.write)


if __name__ == "__main__":
    main()
