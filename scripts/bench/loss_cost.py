"""What each loss costs: forward and backward on random logits and features, losses in turn, medians.

    python scripts/bench/loss_cost.py --write

Memory is what autograd keeps for the backward. What each loss is worth: ``arms.py losses``.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import options as harness_options
from harness import write


def cost(options: argparse.Namespace) -> list[str]:
    """The table of costs."""
    import kd.losses as all_losses

    torch.set_num_threads(1)
    lines = [f"Forward and backward, batch {options.batch}, float32, one thread, "
             f"torch {torch.__version__}, {platform.machine()}, {options.rounds} rounds in turn, medians. Memory: what "
             "autograd keeps for the backward.", "",
             "| loss | ms at 1,000 classes | MB | ms at 21,841 classes | MB |", "|---|---|---|---|---|"]  # fmt: skip
    logit = ["KDLoss", "HardKDLoss", "DKDLoss", "DISTLoss", "NKDLoss", "WSLDLoss", "BinaryKDLoss", "StandardizedLoss",
             "MLKDLoss"]  # fmt: skip
    columns = []
    for classes in (1000, 21841):
        student, teacher = torch.randn(2, options.batch, classes)
        target = torch.randint(0, classes, (options.batch,))
        made = {n: make(getattr(all_losses, n)) for n in logit}
        steps = {
            n: lambda s, loss=loss, t=teacher, y=target: loss(s, t, y) for n, loss in made.items()
        }
        columns.append(timed(steps, student, options.rounds))
    for name in logit:
        cells = [f"{c[name][0]:.2f} | {c[name][1]:.1f}" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "| feature loss, (N, 192, 14, 14) to (N, 384, 16, 16), or (N, 192) to (N, 384) | ms | MB |",
        "|---|---|---|",
    ]
    maps = (options.batch, 192, 14, 14), (options.batch, 384, 16, 16)
    vectors = (options.batch, 192), (options.batch, 384)
    for names, (own, theirs) in ((["HintLoss", "ATLoss", "PKDLoss", "MGDLoss", "CWDFeatureLoss", "PairwiseLoss"], maps),
                                 (["RKDLoss", "SPLoss", "CKALoss", "CRDLoss", "SimKDLoss"], vectors)):  # fmt: skip
        student, teacher = torch.randn(own), torch.randn(theirs)
        steps = {}
        for name in names:
            loss = getattr(all_losses, name)()
            loss.bind(1000, 50_000)
            loss.build(own, theirs)
            extra = {"index": torch.arange(options.batch)} if loss.needs_index else {}
            steps[name] = lambda s, loss=loss, t=teacher, e=extra: loss(s, t, torch.zeros(1), **e)
        found = timed(steps, student, options.rounds)
        lines += [f"| {name} | {ms:.2f} | {mb:.1f} |" for name, (ms, mb) in found.items()]
    return lines


def make(kind: type) -> Any:
    """A loss with its defaults; the wrapper around KD."""
    from kd.losses import KDLoss, StandardizedLoss

    return StandardizedLoss(KDLoss()) if kind is StandardizedLoss else kind()


def timed(
    steps: dict[str, Callable[[torch.Tensor], torch.Tensor]], student: torch.Tensor, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median milliseconds and megabytes kept, by name; the losses take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    kept = {name: saved_mb(step, student) for name, step in steps.items()}
    for _ in range(rounds):
        for name, step in steps.items():
            x = student.clone().requires_grad_()
            started = time.perf_counter()
            step(x).backward()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: (statistics.median(values), kept[name]) for name, values in times.items()}


def saved_mb(step: Callable[[torch.Tensor], torch.Tensor], student: torch.Tensor) -> float:
    """What autograd keeps between forward and backward, each storage counted once, the input left out."""
    x = student.clone().requires_grad_()
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(x).backward()
    seen.pop(x.untyped_storage().data_ptr(), None)
    return sum(seen.values()) / 2**20


def main() -> None:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    asked = harness_options(parser)
    lines = cost(asked)
    write("loss_cost", asked.hardware, asked.date, "What each loss costs", lines, asked.write)


if __name__ == "__main__":
    main()
