"""One teacher, several students: a step that asks the teacher once, against one that asks it for each student.

    python scripts/bench/students.py --out scripts/bench/students_cpu_DATE.md

Both do the same work on the same batches: the teacher's forward; every student's forward, backward and optimizer step.
They take turns; medians.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch

from kd.data.info import DataInfo
from kd.losses import KDLoss
from kd.models import StudentSpec, TeacherSpec
from kd.module.distillation import DistillationModule
from kd.optim import OptimSpec, build_optimizer
from kd.run.assemble import assemble
from kd.teachers import shared_teachers

CLASSES = [str(i) for i in range(81)]


def build(count: int) -> list[DistillationModule]:
    """Students of one teacher: ViT-Ti/16 below ViT-S/14, both at 112 px."""
    info = DataInfo(CLASSES, 2640, 296)
    teacher = TeacherSpec("vit_small_patch14_dinov2", 112, classes=CLASSES)
    with shared_teachers():
        return [
            assemble(
                info,
                StudentSpec("vit_tiny_patch16_224", 112),
                teacher,
                distill_losses={"kd": KDLoss(temperature=2.0)},
            )
            for _ in range(count)
        ]


def step(modules: list[DistillationModule], optimizers: list, batch: dict, shared: bool) -> float:
    """Seconds of one step of all students."""
    started = time.perf_counter()
    answer = modules[0].teacher.answer(batch, modules[0].wanted) if shared else None
    for module, optimizer in zip(modules, optimizers, strict=True):
        own = answer or module.teacher.answer(batch, module.students.wanted)
        module.student_of_one.learn(batch, own).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    """Times one to four students and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = {
        "image": torch.randint(0, 256, (options.batch, 3, 112, 112), dtype=torch.uint8),
        "target": torch.randint(0, 81, (options.batch,)),
        "index": torch.arange(options.batch),
    }
    lines = [
        "# One teacher, several students", "",
        "ViT-S/14 teaches ViT-Ti/16 at 112 px, batch "
        f"{options.batch}, float32, {options.threads} thread(s), {platform.machine()}, torch {torch.__version__}, "
        f"{options.rounds} rounds in turn after one of warm-up, medians (least to most).", "",
        "| students | teacher asked for each, s a step | asked once, s a step | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    for count in (1, 2, 4):
        modules = build(count)
        optimizers = [build_optimizer([module.student], OptimSpec()) for module in modules]
        times: dict[bool, list[float]] = {False: [], True: []}
        for i in range(options.rounds + 1):
            for shared in times:
                seconds = step(modules, optimizers, batch, shared)
                if i:
                    times[shared].append(seconds)
        cells = [
            f"{statistics.median(t):.2f} ({min(t):.2f} to {max(t):.2f})" for t in times.values()
        ]
        ratio = statistics.median(a / b for a, b in zip(times[False], times[True], strict=True))
        lines.append(f"| {count} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    table = "\n".join([*lines, ""])
    print(table)
    if options.out:
        options.out.write_text(table)


if __name__ == "__main__":
    main()
