"""How training scales: measured at 1 and 2 processes here, predicted for many GPUs by an alpha-beta model.

``python scripts/bench/scaling.py measure`` runs the main job's pair (one thread a process, each pinned to a core of
its own) at 1 and 2 processes in turn, weakly (the batch a process stays) and strongly (the global batch stays), counts
the bytes on the loopback device, and fits gloo's alpha and beta. ``... model`` prints the table and draws the plot for
the production recipe; its constants are assumptions until they are measured, and are printed with it. Both write dated
files beside this one.
"""

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kd.report.records import read_run

HERE = Path(__file__).parent
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
BATCH = 64
RECIPE = [
    "recipe=foodtag_vit", "preflight=warn", "model.teacher.recipe=null", "model.student.inherit=false",
    "trainer.max_epochs=1", "trainer.limit_val_batches=0", "trainer.accelerator=cpu", "data.num_workers=0",
    "trainer.enable_progress_bar=false", "optim.warmup_epochs=0",
]  # fmt: skip


# -- measured here --------


def free_port() -> str:
    """A port for the processes to meet at."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return str(opened.getsockname()[1])


def run_ranks(command: list[str], world_size: int) -> int:
    """Runs a command as ``world_size`` ranks, each on its own core with one thread; bytes that crossed loopback."""
    before = int(LOOPBACK.read_text())
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
    finish([start(command, core=r, RANK=str(r), LOCAL_RANK=str(r), **job) for r in range(world_size)])
    return int(LOOPBACK.read_text()) - before


def start(command: list[str], core: int, **env: str) -> subprocess.Popen[str]:
    """Starts a command with one thread on one core."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    command = ["taskset", "-c", str(core), *command]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Waits for all; the first failure ends the script."""
    for process in processes:
        _, errors = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"a rank failed: {errors[-500:]}")


def command_of(world_size: int, batch: int, steps: int, runs: Path) -> list[str]:
    """One short run."""
    items = [f"runs_dir={runs}", f"data.batch_size={batch}", f"trainer.limit_train_batches={steps}",
             f"trainer.devices={world_size}", *(["trainer.strategy=ddp"] if world_size > 1 else [])]  # fmt: skip
    return [sys.executable, "-m", "kd.cli", *RECIPE, *items]


def step_ms(runs: Path) -> float:
    """Milliseconds a step (median) of the newest run."""
    newest = max(runs.glob("foodtag_vit/[0-9]*/summary.json"))
    return json.loads(newest.read_text())["step_ms_median"]


def train(world_size: int, batch: int, steps: int, runs: Path) -> tuple[float, int]:
    """One short run: milliseconds a step, bytes on loopback."""
    sent = run_ranks(command_of(world_size, batch, steps, runs), world_size)
    return step_ms(runs), sent


def side_by_side(steps: int, folder: Path) -> float:
    """Two runs at once that share nothing: the median over steps of the slower one's time.

    It is what two processes that wait for each other would take if talking cost nothing: a second busy core and the
    machine's unrest are in it.
    """
    places = [folder / f"beside{core}" for core in (0, 1)]
    finish([start(command_of(1, BATCH, steps, place), core) for core, place in enumerate(places)])
    runs = [read_run(max(place.glob("foodtag_vit/[0-9]*"))) for place in places]
    times = [[step["ms"] for step in run.steps[0] if not step.get("first")] for run in runs]
    return statistics.median(max(pair) for pair in zip(*times, strict=True))


def measure(steps: int, repeats: int) -> dict[str, object]:
    """Step times in turn (A B C A B C ...), efficiencies, bytes a step against the ring's bound."""
    cases = {"one": (1, BATCH), "weak": (2, BATCH), "strong": (2, BATCH // 2)}
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        times: dict[str, list[float]] = {name: [] for name in [*cases, "side_by_side"]}
        for _ in range(repeats):
            for name, (world_size, batch) in cases.items():
                times[name].append(train(world_size, batch, steps, runs)[0])
                print(f"{name}: {times[name][-1]:.1f} ms", flush=True)
            times["side_by_side"].append(side_by_side(steps, runs))
            print(f"side by side: {times['side_by_side'][-1]:.1f} ms", flush=True)
        short, long = (train(2, BATCH, n, runs)[1] for n in (steps, 2 * steps))
        summary = json.loads(max(runs.glob("foodtag_vit/[0-9]*/summary.json")).read_text())
    median = {name: statistics.median(values) for name, values in times.items()}
    gradient = 4 * summary["student"]["params"]
    return {
        "batch_a_process": {"one": BATCH, "weak": BATCH, "strong": BATCH // 2, "side_by_side": BATCH},
        "step_ms": times,
        "step_ms_median": median,
        "efficiency_weak": round(median["one"] / median["weak"], 4),
        "efficiency_weak_against_side_by_side": round(median["side_by_side"] / median["weak"], 4),
        "efficiency_strong": round(median["one"] / (2 * median["strong"]), 4),
        "bytes_a_step_both_ranks": round((long - short) / steps),
        "ring_bound_bytes_both_ranks": 2 * gradient,  # each of N ranks sends 2 (N - 1) / N gradients
        "gloo": fit_gloo(),
    }


REDUCE = """
import json, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
found = []
for size in (2**10, 2**14, 2**18, 2**20, 2**22, 2**24):
    data = torch.zeros(size // 4)
    times = []
    for _ in range(30):
        dist.barrier(); start = time.perf_counter(); dist.all_reduce(data); times.append(time.perf_counter() - start)
    found.append((size, sorted(times)[15]))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(found))
dist.barrier(); dist.destroy_process_group()
"""


def fit_gloo() -> dict[str, float]:
    """Alpha (s a message) and beta (s a byte) of ``t = 2 (N-1) alpha + 2 (N-1)/N bytes beta``, for two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        run_ranks([sys.executable, "-c", REDUCE, str(file)], 2)
        found = json.loads(file.read_text())
    alpha = found[0][1] / 2
    size, seconds = found[-1]
    return {"alpha_us": round(1e6 * alpha, 1), "gb_per_s": round(size / (seconds - 2 * alpha) / 1e9, 3)}


# -- predicted --------


@dataclass
class Machine:
    """What the model takes for granted; a measured constant replaces the assumed one.

    Attributes:
        teacher_gflop: a picture, forward (ViT-L/16 at 224 px, counted).
        student_gflop: a picture, forward and backward (ViT-S/16 at 224 px, counted).
        tflops: what a GPU reaches in bf16 (65 % of 790, itself measured for dense products on one H200).
        gradient_bytes: 22.05 M parameters of the student in float32.
        gpus_a_node: GPUs of a machine.
        alpha_intra_us: latency of a message inside a machine (assumed: NVLink, NCCL).
        alpha_inter_us: between machines (assumed: InfiniBand).
        intra_gb_per_s: what a ring reaches inside a machine (assumed).
        inter_gb_per_s: what one machine sends (assumed: 4 x 200 Gb/s at 80 %).
        overlap: share of the backward pass during which gradients travel unseen.
        fixed_ms: a step's work that no more GPUs shorten: launches, optimizer, logging (assumed).
    """

    teacher_gflop: float = 123.1
    student_gflop: float = 27.5
    tflops: float = 0.65 * 790
    gradient_bytes: float = 4 * 22.05e6
    gpus_a_node: int = 8
    alpha_intra_us: float = 5.0
    alpha_inter_us: float = 15.0
    intra_gb_per_s: float = 200.0
    inter_gb_per_s: float = 80.0
    overlap: float = 0.8
    fixed_ms: float = 3.0


def all_reduce_s(gpus: int, machine: Machine) -> float:
    """A ring inside each machine, then one over the machines: each ``2 (n-1) alpha + 2 (n-1)/n bytes beta``."""
    inside = min(gpus, machine.gpus_a_node)
    return sum(
        2 * (n - 1) * alpha * 1e-6 + 2 * (n - 1) / n * machine.gradient_bytes / (rate * 1e9)
        for n, alpha, rate in (
            (inside, machine.alpha_intra_us, machine.intra_gb_per_s),
            (gpus // inside, machine.alpha_inter_us, machine.inter_gb_per_s),
        )
    )


def step_s(gpus: int, batch: float, machine: Machine) -> tuple[float, float]:
    """Seconds a step at ``batch`` pictures a GPU, and how much of them is communication that shows."""
    student = batch * machine.student_gflop / (1000 * machine.tflops)
    compute = batch * machine.teacher_gflop / (1000 * machine.tflops) + student + machine.fixed_ms / 1000
    exposed = max(0.0, all_reduce_s(gpus, machine) - machine.overlap * student * 2 / 3)
    return compute + exposed, exposed


def predict(machine: Machine, batch: int, pictures: int) -> list[dict[str, float]]:
    """A row each for 1, 8, 32, 64 and 256 GPUs: weak at ``batch`` a GPU, strong at a global batch of ``32 * batch``."""
    rows = []
    for gpus in (1, 8, 32, 64, 256):
        weak, exposed = step_s(gpus, batch, machine)
        strong, _ = step_s(gpus, 32 * batch / gpus, machine)
        rows.append({
            "gpus": gpus,
            "weak_step_ms": round(1000 * weak, 2),
            "exposed_ms": round(1000 * exposed, 2),
            "weak_efficiency": round(step_s(1, batch, machine)[0] / weak, 4),
            "images_per_s": round(gpus * batch / weak),
            "epoch_s": round(pictures / (gpus * batch / weak), 1),
            "strong_step_ms": round(1000 * strong, 2),
            "strong_efficiency": round(step_s(1, 32 * batch, machine)[0] / (gpus * strong), 4),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, float]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(f"{v:g}" for v in row.values()) + " |" for row in rows)])


def draw(rows: list[dict[str, float]], file: Path) -> None:
    """Efficiency over GPUs. Needs matplotlib (the extra ``bench``)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in ("weak", "strong"):
        axes.plot([r["gpus"] for r in rows], [100 * r[f"{name}_efficiency"] for r in rows], "o-", label=name)
    axes.set(xscale="log", xlabel="GPUs", ylabel="efficiency, %", ylim=(0, 105), title="Predicted, not measured")
    axes.set_xticks([r["gpus"] for r in rows], [f"{r['gpus']:g}" for r in rows])
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["measure", "model"])
    parser.add_argument("--steps", type=int, default=20, help="measure: of a run; twice as many must be in an epoch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=36, help="model: pictures a GPU")
    parser.add_argument("--pictures", type=int, default=75_750, help="model: of an epoch (Food-101)")
    parser.add_argument("--out", type=Path, default=HERE)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    name = f"scaling_{asked.what}_{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    if asked.what == "measure":
        import torch

        started = time.time()
        result = {"torch": torch.__version__, "cpu": platform.processor() or platform.machine(),
                  "cores": os.cpu_count(), "load_before": os.getloadavg()[0], "steps": asked.steps,
                  **measure(asked.steps, asked.repeats), "wall_s": round(time.time() - started)}  # fmt: skip
        text = json.dumps(result, indent=2)
        (asked.out / f"{name}.json").write_text(text + "\n")
        print(text)
        return
    machine = Machine()
    rows = predict(machine, asked.batch, asked.pictures)
    constants = "\n".join(f"- {key}: {value:g}" for key, value in asdict(machine).items())
    text = f"Predicted, not measured. {asked.batch} pictures a GPU.\n\n{table(rows)}\n\n"
    text += f"Taken for granted:\n\n{constants}\n"
    (asked.out / f"{name}.md").write_text(text)
    draw(rows, asked.out / f"{name}.svg")
    print(text)


if __name__ == "__main__":
    main()
