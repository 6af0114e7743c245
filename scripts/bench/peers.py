"""The same distillation step in kd, in a plain loop around timm's LogitDistillationTask, and in torchdistill.

    OMP_NUM_THREADS=1 python scripts/bench/peers.py --rounds 9 --write
    python scripts/bench/peers.py --teacher vit_large_patch16_224 --student vit_small_patch16_224 --size 224 --batch 256

Same models, batch, precision (``--precision``: 32 or bf16), threads; batches are normalised floats in memory, so what is
compared is the step: both forwards, losses, backward, clipping, fused AdamW. A peer that is not installed is left out, and
said to be. ``--steps``: of an arm before the next one has its turn.
"""

import copy
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import kd
from kd.optim import OptimSpec, build_optimizer
from scripts.bench.harness import measure, options, spread, table, write

TEMPERATURE, CLASSES = 2.0, 20
Step = Callable[[Tensor, Tensor], Tensor]


def kd_step(
    teacher: nn.Module, dtype: torch.dtype, student: nn.Module, autocast: Callable[[], Any]
) -> Step:
    """``kd.Distillation`` itself, the teacher's weights in the precision of training, as in a run."""
    distillation = kd.Distillation(
        student, teacher, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(TEMPERATURE)}
    )
    distillation.teacher.to(next(student.parameters()).device, dtype)

    def step(images: Tensor, target: Tensor) -> Tensor:
        with autocast():
            return distillation(images, target).loss

    return step


def timm_step(
    teacher: nn.Module, student: nn.Module, autocast: Callable[[], Any], device: torch.device
) -> Step:
    """timm's task, as timm's own train.py calls it."""
    from timm.task import LogitDistillationTask

    peer = LogitDistillationTask(
        student, copy.deepcopy(teacher), criterion=nn.CrossEntropyLoss(), distill_loss_weight=1.0,
        task_loss_weight=1.0, temperature=TEMPERATURE, device=device, verbose=False,
    ).train()  # fmt: skip

    def step(images: Tensor, target: Tensor) -> Tensor:
        with autocast():
            return peer(images, target)["loss"]

    return step


def torchdistill_step(teacher: nn.Module, student: nn.Module, autocast: Callable[[], Any]) -> Step:
    """torchdistill's KDLoss over its own forward hooks."""
    from torchdistill.core.forward_hook import ForwardHookManager
    from torchdistill.losses.mid_level import KDLoss as PeerLoss

    loss = PeerLoss("head", "output", "head", "output", TEMPERATURE, alpha=1.0, beta=1.0)
    frozen, device = copy.deepcopy(teacher), next(student.parameters()).device
    hooks = [ForwardHookManager(device), ForwardHookManager(device)]
    for hook, model in zip(hooks, (student, frozen), strict=True):
        hook.add_hook(model, "head", requires_input=False, requires_output=True)

    def step(images: Tensor, target: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad():
                frozen(images)
            student(images)
            return loss(*(hook.pop_io_dict() for hook in hooks), target)

    return step


def main() -> None:
    """Runs all that are there, in turn."""
    asked = options(
        __doc__,
        teacher="vit_small_patch16_224",
        student="vit_tiny_patch16_224",
        size=112,
        batch=32,
        steps=4,
        rounds=7,
        precision="bf16",
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    new = {"num_classes": CLASSES, "img_size": asked.size}
    teacher = timm.create_model(asked.teacher, **new).to(device).eval().requires_grad_(False)
    images = torch.randn(asked.batch, 3, asked.size, asked.size, device=device)
    target = torch.randint(CLASSES, (asked.batch,), device=device)
    low = asked.precision == "bf16"

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()

    makers: dict[str, Callable[[nn.Module], Step]] = {
        "kd": lambda s: kd_step(teacher, torch.bfloat16 if low else torch.float32, s, autocast),
        "timm LogitDistillationTask": lambda s: timm_step(teacher, s, autocast, device),
        "torchdistill": lambda s: torchdistill_step(teacher, s, autocast),
    }
    arms: dict[str, Callable[[], None]] = {}
    missing = ["lightly-train (has no plain step: it is a command with its own loader)"]
    for name, make in makers.items():
        student = timm.create_model(asked.student, **new).to(device).train()
        try:
            arms[name] = run_steps(make(student), student, images, target, asked.steps)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    rates = {}
    for name, seconds in measure(arms, asked.rounds).items():
        rates[name] = [asked.steps * asked.batch / one for one in seconds]
    rows = []
    for name, values in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["kd"], values, strict=True)]
        rows.append([name, spread(values), f"{statistics.median(ratios):.2f}"])
    lines = [
        f"{asked.teacher} -> {asked.student} at {asked.size} px, batch {asked.batch}, precision {asked.precision}; "
        f"{asked.rounds} turns of {asked.steps} steps. Left out: {'; '.join(missing)}.",
        "",
        *table(
            ["", "images/s: median (least to most)", "kd is faster by, median of the turns"], rows
        ),
    ]
    write(asked, "peers", "One distillation step, kd and its peers", lines)


def run_steps(
    step: Step, student: nn.Module, images: Tensor, target: Tensor, count: int
) -> Callable[[], None]:
    """``count`` optimizer steps around a loss, the same for all arms."""
    optimizer = build_optimizer([student], OptimSpec(lr=1e-4))

    def run() -> None:
        for _ in range(count):
            step(images, target).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
