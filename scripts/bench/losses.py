"""Which loss? One small pair, the same budget, every loss; and what each loss costs.

    python scripts/bench/losses.py accuracy --data DIR --teacher FILE --seeds 0 1 2 --out scripts/bench/losses_DATE.md
    python scripts/bench/losses.py cost --out scripts/bench/loss_cost_DATE.md

`accuracy`: all students of a seed learn in one run from one teacher (`students=`), each with its own loss, from the
same start: a student cut out of the teacher (`model.student.inherit`), not trained yet. `cost`: forward and backward of
each loss on random logits and features, losses in turn, medians; memory is what autograd keeps for the backward.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ARCH = {"patch_size": 16, "embed_dim": 64, "depth": 6, "num_heads": 1}
KD: dict[str, Any] = {"class_path": "KDLoss", "init_args": {"temperature": 2.0, "weight": 0.9}}
BLOCKS = {"student": "blocks.[135]", "teacher": ["blocks.3", "blocks.7", "blocks.11"]}
LAST = {"student": "blocks.5", "teacher": "blocks.11"}


def single(name: str, weight: float = 0.9, **arguments: Any) -> dict[str, Any]:
    """A loss beside the labels."""
    return {"losses": {"x": {"class_path": name, "init_args": {"weight": weight, **arguments}}}}


def beside_kd(name: str, weight: float, tap: Any = None, **arguments: Any) -> dict[str, Any]:
    """A feature loss beside KD."""
    losses = {"kd": KD, "x": {"class_path": name, "init_args": {"weight": weight, **arguments}}}
    return {"losses": losses, "taps": {"x": tap} if tap else {}}


ARMS: dict[str, dict[str, Any]] = {
    "labels alone": {"losses": {}, "task": 1.0},
    "KD T=2": single("KDLoss", temperature=2.0),
    "KD T=4": single("KDLoss", temperature=4.0),
    "KD 4 to 1": single("KDLoss", temperature=4.0, final_temperature=1.0),
    "hard KD": single("HardKDLoss"),
    "DKD": single("DKDLoss", temperature=2.0, beta=2.0),
    "DIST": single("DISTLoss", weight=2.0),
    "NKD": single("NKDLoss"),
    "MLKD": single("MLKDLoss"),
    "WSLD": single("WSLDLoss"),
    "standardised KD": single(
        "StandardizedLoss", loss={"class_path": "KDLoss", "init_args": {"temperature": 2.0}}
    ),
    "KD + hint": beside_kd("HintLoss", 0.1, LAST),
    "KD + AT": beside_kd("ATLoss", 100.0, BLOCKS),
    "KD + RKD": beside_kd("RKDLoss", 0.05),
    "KD + SP": beside_kd("SPLoss", 30.0),
    "KD + CRD": beside_kd("CRDLoss", 0.05, negatives=1024),
}


def train(items: list[str], runs: Path) -> Path:
    """One run; reuses a finished one."""
    folder = runs / "grocery_vit" / "000"
    if not (folder / "summary.json").is_file():
        command = [
            sys.executable,
            "-m",
            "kd.cli",
            "recipe=grocery_vit",
            "optim.name=adamw",
            f"runs_dir={runs}",
            *items,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def accuracy(options: argparse.Namespace) -> str:
    """The table of accuracies: last epoch, mean and standard error over seeds."""
    common = [
        f"data.source.root={options.data}", f"model.teacher.checkpoint={options.teacher}",
        f"model.student.kwargs={json.dumps(ARCH)}",
    ]  # fmt: skip
    summaries = []
    for seed in options.seeds:
        own = [*common, f"seed={seed}"]
        start = train([*own, "optim.lr=0", "trainer.max_epochs=1", "trainer.limit_train_batches=1"],
                      options.runs / f"start{seed}")  # fmt: skip
        students = {
            name.replace(" ", "_").replace("=", "").replace("+", "and"): settings(arm)
            for name, arm in ARMS.items()
        }
        arms = [
            *own, "model.student.inherit=false", f"model.student.checkpoint={start / 'student.safetensors'}",
            f"optim.lr={options.lr}", f"trainer.max_epochs={options.epochs}", f"students={json.dumps(students)}",
        ]  # fmt: skip
        summaries.append(
            json.loads((train(arms, options.runs / f"losses{seed}") / "summary.json").read_text())
        )
    rows = [
        row(name, [list(s["students"].values())[i]["val"] for s in summaries])
        for i, name in enumerate(ARMS)
    ]
    first = summaries[0]
    return "\n".join([
        "# Which loss? Grocery photographs, one small student, every loss", "",
        f"{first['teacher']['arch']} at 112 px ({100 * first['teacher']['val']['acc1']:.1f} %) teaches a ViT of "
        f"{first['student']['params'] / 1e6:.2f} M parameters (width {ARCH['embed_dim']}, depth {ARCH['depth']}) "
        f"cut out of it, {options.epochs} epochs, lr {options.lr}, batch 64, task loss 0.1 beside each loss; "
        f"{first['data']['train']} training and {first['data']['val']} validation pictures. Last epoch, per cent, "
        f"mean ± standard error over seeds {', '.join(map(str, options.seeds))}.", "",
        f"{platform.machine()}, torch {torch.__version__}, {first['precision']}, one thread.", "",
        "| loss | acc1 | each seed | agreement |", "|---|---|---|---|", *rows, "",
        "One standard error is about 2 points on 296 pictures in any single run: rows closer than that are equal.", "",
    ])  # fmt: skip


def settings(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm as the settings of one of several students."""
    return {
        "model.distill_losses": arm["losses"],
        "model.taps": arm.get("taps", {}),
        "model.task_loss_weight": arm.get("task", 0.1),
    }


def row(name: str, vals: list[dict[str, float]]) -> str:
    """One line of the accuracy table."""
    values = [100 * val["acc1"] for val in vals]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    agreement = statistics.mean(100 * val["agreement"] for val in vals)
    each = ", ".join(f"{value:.1f}" for value in values)
    return f"| {name} | {statistics.mean(values):.1f} ± {error:.1f} | {each} | {agreement:.1f} |"


def cost(options: argparse.Namespace) -> str:
    """The table of costs."""
    import kd.losses as all_losses

    torch.set_num_threads(1)
    lines = ["# What each loss costs", "", f"Forward and backward, batch {options.batch}, float32, one thread, "
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
    return "\n".join([*lines, ""])


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
    """Runs one of the two and prints or writes its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["accuracy", "cost"])
    parser.add_argument("--data", type=Path, help="the grocery folder")
    parser.add_argument("--teacher", type=Path, help="its teacher's weights")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", default="5e-4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = accuracy(options) if options.what == "accuracy" else cost(options)
    print(table)
    if options.out:
        options.out.write_text(table)


if __name__ == "__main__":
    main()
