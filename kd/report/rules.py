"""Rules over a run's records: what is unusual about the machine or the training, and what to do about it.

Every rule takes plain numbers and thresholds and returns a :class:`Finding` where it fires. The machine's rules take
over the names, thresholds and warm-up lengths of the SageMaker Debugger's built-in ones (samples every 500 ms); the
verdict (:mod:`kd.report.verdict`) says what limits the run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kd.report.records import PHASES, Run, percentile
from kd.report.verdict import mean_phases, slow_rank, typical_rank


@dataclass(frozen=True)
class Finding:
    """A rule that fired.

    Attributes:
        rule: its name.
        text: the evidence.
        lever: what to do.
    """

    rule: str
    text: str
    lever: str


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# -- the machine -------------------------------------------------------------------------------------------------------


def cpu_bottleneck(
    cpu: Sequence[float],
    gpu: Sequence[float],
    high: float = 90,
    low: float = 10,
    share: float = 0.5,
    skip: int = 100,
) -> Finding | None:
    """CPUs above ``high`` % while GPUs are below ``low`` %, for more than ``share`` of the samples."""
    pairs = list(zip(cpu, gpu, strict=False))[skip:]
    hits = sum(c > high and g < low for c, g in pairs)
    if not pairs or hits <= share * len(pairs):
        return None
    text = f"CPU above {high:.0f} % and GPU below {low:.0f} % in {hits / len(pairs):.0%} of the samples"
    return Finding("CPUBottleneck", text, "move work off the CPU, or give it more cores")


def io_bottleneck(
    io_wait: Sequence[float],
    gpu: Sequence[float],
    high: float = 50,
    low: float = 70,
    share: float = 0.5,
    skip: int = 1000,
) -> Finding | None:
    """I/O wait above ``high`` % while GPUs are below ``low`` %, for more than ``share`` of the samples.

    Without a GPU its share counts as 0.
    """
    used = gpu or [0.0] * len(io_wait)
    pairs = list(zip(io_wait, used, strict=False))[skip:]
    hits = sum(w > high and g < low for w, g in pairs)
    if not pairs or hits <= share * len(pairs):
        return None
    text = f"I/O wait above {high:.0f} % in {hits / len(pairs):.0%} of the samples"
    return Finding("IOBottleneck", text, "a faster disk, a local copy of the data, or fewer and larger files")


def low_gpu_utilization(
    gpu: Sequence[float], low: float = 70, floor: float = 10, window: int = 500, skip: int = 1000
) -> Finding | None:
    """The newest ``window``: p95 below ``low`` % (low), or p95 above it and p5 below ``floor`` % (fluctuating)."""
    recent = gpu[skip:][-window:]
    if not recent:
        return None
    p95, p5 = percentile(recent, 95), percentile(recent, 5)
    if p95 < low:
        return Finding("LowGPUUtilization", f"p95 of GPU utilisation is {p95:.0f} %", "a larger batch; see the verdict")
    if p5 < floor:
        text = f"GPU utilisation goes between {p5:.0f} and {p95:.0f} % (p5, p95)"
        return Finding("LowGPUUtilization", text, "something makes it wait now and then; see the verdict")
    return None


def batch_size(
    cpu: Sequence[float],
    gpu: Sequence[float],
    gpu_memory: Sequence[float],
    low: float = 70,
    window: int = 500,
    skip: int = 100,
) -> Finding | None:
    """p95 of CPU, GPU and GPU memory are all below ``low`` %: there is room for a larger batch."""
    recent = [values[skip:][-window:] for values in (cpu, gpu, gpu_memory)]
    if not all(recent):
        return None
    p95 = [percentile(values, 95) for values in recent]
    if max(p95) >= low:
        return None
    text = f"p95 of CPU {p95[0]:.0f} %, GPU {p95[1]:.0f} %, GPU memory {p95[2]:.0f} %"
    return Finding("BatchSize", text, "a larger data.batch_size (with a learning rate to match)")


def gpu_memory_increase(
    memory: Sequence[float], increase: float = 0.1, window: int = 500, skip: int = 100
) -> Finding | None:
    """GPU memory grew by ``increase`` from the first to the last tenth of the newest ``window``."""
    return _growth("GPUMemoryIncrease", "GPU memory", " %", memory[skip:][-window:], increase, 0)


def memory_leak(
    rss_mb: Sequence[float], increase: float = 0.1, least_mb: float = 100, skip: int = 20
) -> Finding | None:
    """Memory of the training process and its children keeps growing.

    The samples after the first third in ten blocks: nearly each is above the one before, and together they grow by
    ``increase`` and ``least_mb``. Caches that fill up level off and don't fire.
    """
    rest = rss_mb[skip:]
    return _growth("MemoryLeak", "memory", " MB", rest[len(rest) // 3 :], increase, least_mb)


def _growth(rule: str, what: str, unit: str, values: Sequence[float], increase: float, least: float) -> Finding | None:
    if len(values) < 20:
        return None
    edges = [round(i * len(values) / 10) for i in range(11)]
    blocks = [_mean(values[a:b]) for a, b in pairwise(edges)]
    rises = sum(b > a for a, b in pairwise(blocks))
    grown = blocks[-1] - blocks[0]
    if rises < 8 or grown < increase * blocks[0] or grown < least:
        return None
    text = f"{what} grew steadily from {blocks[0]:.0f} to {blocks[-1]:.0f}{unit}"
    return Finding(rule, text, "something keeps tensors or objects alive: lists of losses, logged tensors with a graph")


def load_balancing(gpus: Sequence[Sequence[float]], imbalance: float = 0.5, skip: int = 10) -> Finding | None:
    """Mean utilisation of the idlest GPU is ``imbalance`` below the busiest one's."""
    means = [_mean(values[skip:]) for values in gpus if len(values) > skip]
    if len(means) < 2 or max(means) <= 0 or (max(means) - min(means)) / max(means) < imbalance:
        return None
    text = f"GPU {means.index(max(means))} is used {max(means):.0f} %, GPU {means.index(min(means))} {min(means):.0f} %"
    return Finding("LoadBalancing", text, "give all devices the same share of work")


def straggler(compute_ms: Mapping[int, float], late: float = 1.15) -> Finding | None:
    """One rank computes ``late`` times as long as the median of the others: all wait for it."""
    slow = slow_rank(compute_ms, late)
    if slow is None:
        return None
    text = f"rank {slow[0]} computes {slow[1]:.0f} ms a step longer than the median of the others"
    return Finding("SlowRank", text, "look at its machine (throttling, other jobs, a slow disk)")


def step_outlier(step_ms: Sequence[float], sigma: float = 5, ignore: int = 10) -> Finding | None:
    """More than ``ignore`` steps lie ``sigma`` standard deviations above the mean."""
    if len(step_ms) < 2:
        return None
    mean = _mean(step_ms)
    deviation = math.sqrt(_mean([(ms - mean) ** 2 for ms in step_ms]))
    slow = [ms for ms in step_ms if deviation and ms > mean + sigma * deviation]
    if len(slow) <= ignore:
        return None
    text = f"{len(slow)} steps are {sigma:.0f} sigma above the mean of {mean:.0f} ms (slowest {max(slow):.0f} ms)"
    return Finding("StepOutlier", text, "see which phase is long in them")


def max_initialization_time(startup_s: float, limit_s: float = 20 * 60) -> Finding | None:
    """More than ``limit_s`` before the first step is done."""
    if startup_s <= limit_s:
        return None
    return Finding(
        "MaxInitializationTime", f"start-up took {startup_s / 60:.0f} min", "copy or prepare data beforehand"
    )


def dataloader(data_share: float, num_workers: int, threads: int, cores: int, low: float = 0.1) -> Finding | None:
    """More loader processes and threads than cores; or waits of ``low`` with cores to spare."""
    if num_workers > max(1, cores) or (num_workers > 1 and num_workers + threads > cores + 1):
        text = f"{num_workers} loader processes and {threads} compute threads on {cores} core{'s' * (cores > 1)}"
        return Finding("Dataloader", text, f"data.num_workers={max(0, cores - threads)}")
    if data_share > low and num_workers + threads < cores:
        text = f"{data_share:.0%} of the step waits for data while {cores - threads - num_workers} cores are not used"
        return Finding("Dataloader", text, f"data.num_workers={cores - threads}")
    return None


def throttling(reasons: Sequence[Sequence[str]], share: float = 0.05) -> Finding | None:
    """A GPU lowered its clocks (heat, power) in more than ``share`` of the samples."""
    hits = [r for r in reasons if r]
    if not reasons or len(hits) <= share * len(reasons):
        return None
    names = sorted({name for r in hits for name in r})
    text = f"the GPU lowered its clocks in {len(hits) / len(reasons):.0%} of the samples ({', '.join(names)})"
    return Finding("Throttling", text, "cooling, or a higher power limit")


def swapping(swap_mb: Sequence[float], grown_mb: float = 200) -> Finding | None:
    """Memory was moved to disk during the run."""
    if not swap_mb or max(swap_mb) - swap_mb[0] < grown_mb:
        return None
    return Finding(
        "Swap", f"swap grew by {max(swap_mb) - swap_mb[0]:.0f} MB", "fewer loader processes, smaller batches"
    )


# -- the training ------------------------------------------------------------------------------------------------------


def loss_not_decreasing(loss: Sequence[float], percent: float = 0.1, least: int = 20) -> Finding | None:
    """The mean of the last fifth is not ``percent`` % below the first fifth's."""
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first, last = _mean(loss[:fifth]), _mean(loss[-fifth:])
    if last < first * (1 - percent / 100):
        return None
    text = f"train/loss went from {first:.3f} to {last:.3f}"
    return Finding("LossNotDecreasing", text, "the learning rate (optim.lr), the labels, the loss weights")


def overfit(
    train_loss: Sequence[float], val: Sequence[float], drop: float = 0.03, patience: int = 3, metric: str = "val/acc1"
) -> Finding | None:
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss goes on falling."""
    if len(val) <= patience or len(train_loss) <= patience:
        return None
    best = max(val)
    if max(val[-patience:]) > best - drop or train_loss[-1] >= train_loss[-1 - patience]:
        return None
    text = f"{metric} fell from {best:.1%} to {val[-1]:.1%} while train/loss still falls"
    return Finding("Overfit", text, "stronger data.augment, fewer epochs; the best epoch is exported anyway")


def vanishing_gradient(norms: Sequence[float], least: float = 1e-7, share: float = 0.5) -> Finding | None:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings."""
    small = [n for n in norms if n < least]
    if not norms or len(small) <= share * len(norms):
        return None
    text = f"the gradient's norm is below {least:g} in {len(small) / len(norms):.0%} of the readings"
    return Finding("VanishingGradient", text, "activations that saturate, loss weights near 0, a frozen part")


def exploding_tensor(norms: Sequence[float | None], factor: float = 100) -> Finding | None:
    """A gradient norm that is no number, or ``factor`` times the median."""
    bad = [n for n in norms if n is None or not math.isfinite(n)]
    finite = [n for n in norms if n is not None and math.isfinite(n)]
    if bad:
        text = f"{len(bad)} of {len(norms)} gradient norms are not finite"
    elif len(finite) >= 5 and max(finite) > factor * percentile(finite, 50) > 0:
        text = f"the gradient's norm reached {max(finite):.3g} (median {percentile(finite, 50):.3g})"
    else:
        return None
    return Finding("ExplodingTensor", text, "a lower optim.lr, longer optim.warmup_epochs, trainer.gradient_clip_val")


def dead_relu(dead: Mapping[str, float], share: float = 0.5) -> Finding | None:
    """More than ``share`` of a layer's units never fire."""
    layers = {name: d for name, d in dead.items() if d > share}
    if not layers:
        return None
    worst = max(layers, key=lambda name: layers[name])
    text = f"{len(layers)} layer{'s' * (len(layers) > 1)} with dead units, {worst}: {layers[worst]:.0%} never fire"
    return Finding("DeadRelu", text, "a lower optim.lr or longer optim.warmup_epochs")


def poor_weight_initialization(spread: Mapping[str, float], factor: float = 1000) -> Finding | None:
    """At the first reading the activations' standard deviations differ by ``factor`` between layers."""
    values = {name: s for name, s in spread.items() if math.isfinite(s)}
    if len(values) < 2 or max(values.values()) <= factor * min(values.values()):
        return None
    low, high = min(values, key=lambda n: values[n]), max(values, key=lambda n: values[n])
    text = f"activations spread {values[low]:.2g} in {low} but {values[high]:.2g} in {high}"
    return Finding("PoorWeightInitialization", text, "the student's initial weights")


def class_imbalance(counts: Sequence[int], factor: float = 10) -> Finding | None:
    """The most frequent class has ``factor`` times the pictures of the rarest."""
    if len(counts) < 2 or max(counts) < factor * max(1, min(counts)):
        return None
    text = f"the most frequent class has {max(counts)} pictures, the rarest {min(counts)}"
    return Finding("ClassImbalance", text, "more pictures of the rare classes; read accuracy by class")


def teacher_near_chance(acc1: float, chance: float, val: int, sigma: float = 3) -> Finding | None:
    """The teacher is within ``sigma`` standard errors of always naming the most frequent class."""
    if acc1 > chance + sigma * math.sqrt(chance * (1 - chance) / max(1, val)):
        return None
    text = f"the teacher is right on {acc1:.1%} of the validation pictures, guessing gives {chance:.1%}"
    return Finding("TeacherNearChance", text, "its class order, its input size, its weights")


def student_ignores_teacher(
    agreement: Sequence[float],
    losses: Mapping[str, Sequence[float]],
    flat: float = 0.01,
    patience: int = 3,
    below: float = 0.8,
) -> Finding | None:
    """Over ``patience`` epochs agreement stayed within ``flat``, below ``below``, and no distillation loss has fallen.

    Args:
        agreement: by epoch.
        losses: each distillation loss by epoch, by name.
        flat: changes that count as none: of agreement, and of a loss in proportion.
        patience: epochs.
        below: a student that agrees more is fine.
    """
    known = {name: loss for name, loss in losses.items() if len(loss) > patience}
    if len(agreement) <= patience or not known:
        return None
    recent = agreement[-patience - 1 :]
    falling = any(loss[-1] < loss[-1 - patience] - flat * abs(loss[-1 - patience]) for loss in known.values())
    if falling or max(recent) - min(recent) > flat or recent[-1] >= below:
        return None
    text = (
        f"agreement with the teacher has stayed at {recent[-1]:.1%} for {patience} epochs and "
        f"{', '.join(known)} {'falls' if len(known) == 1 else 'fall'} no more"
    )
    return Finding("StudentIgnoresTeacher", text, "the weight of the distillation losses, the temperature")


def temperature(entropy: Sequence[float], high: float = 0.98, low: float = 0.02) -> Finding | None:
    """The softened teacher is near uniform, or near one-hot.

    Args:
        entropy: of the teacher's answers at the loss's temperature, over its maximum ``log(C)``: 0 to 1.
        high: fires above.
        low: fires below.
    """
    if not entropy:
        return None
    mean = _mean(entropy)
    if mean > high:
        text = f"at this temperature the teacher's answers are nearly uniform (entropy {mean:.1%} of its maximum)"
        return Finding("TemperatureTooHigh", text, "a lower temperature of the distillation loss")
    if mean < low:
        text = f"at this temperature the teacher's answers are nearly one-hot (entropy {mean:.1%} of its maximum)"
        return Finding("TemperatureTooLow", text, "a higher temperature of the distillation loss")
    return None


def loss_term_dominates(shares: Mapping[str, float], share: float = 0.95) -> Finding | None:
    """One of several weighted loss terms is more than ``share`` of the total."""
    if len(shares) < 2 or not sum(shares.values()) > 0:
        return None
    name = max(shares, key=lambda n: shares[n])
    part = shares[name] / sum(shares.values())
    if part <= share:
        return None
    return Finding("LossTermDominates", f"'{name}' is {part:.0%} of the loss", "the weights of the losses")


# -- all of them over a run --------------------------------------------------------------------------------------------


def findings(run: Run) -> list[Finding]:
    """All rules that fire on a run."""
    return [f for f in [*_machine(run), *_steps(run), *_training(run)] if f is not None]


def _machine(run: Run) -> list[Finding | None]:
    found: list[Finding | None] = []
    for samples in run.samples.values():
        gpu_count = max((len(s.get("gpu", [])) for s in samples), default=0)
        whole = [s for s in samples if len(s.get("gpu", [])) == gpu_count]
        cpu = [_mean(s["cpu"]) for s in whole]
        gpus = [[s["gpu"][i]["util"] for s in whole] for i in range(gpu_count)]
        memories = [[s["gpu"][i]["mem"] for s in whole] for i in range(gpu_count)]
        gpu = [_mean(values) for values in zip(*gpus, strict=True)]
        found += [
            cpu_bottleneck(cpu, gpu),
            io_bottleneck([s.get("iowait", 0.0) for s in whole], gpu),
            low_gpu_utilization(gpu),
            batch_size(cpu, gpu, [_mean(values) for values in zip(*memories, strict=True)]),
            *(gpu_memory_increase(memory) for memory in memories),
            load_balancing(gpus),
            *(throttling([s["gpu"][i].get("throttle", []) for s in whole]) for i in range(gpu_count)),
            memory_leak([s["rss_mb"] for s in whole if "rss_mb" in s]),
            swapping([s["swap_mb"] for s in whole if "swap_mb" in s]),
        ]
    return found


def _steps(run: Run) -> list[Finding | None]:
    rank = typical_rank(run)
    header, phases = run.headers.get(rank, {}), mean_phases(run, rank)
    by_rank = {r: mean_phases(run, r) for r in run.totals}
    compute = {
        r: sum(ms for name, ms in p.items() if name in PHASES and name != "communication") for r, p in by_rank.items()
    }
    step = sum(ms for name, ms in phases.items() if name in PHASES)
    data_share = phases.get("data", 0.0) / step if step else 0.0
    workers, threads, cores = (header.get(k, 0) for k in ("num_workers", "threads", "cores"))
    return [
        step_outlier([s["ms"] for s in run.steps.get(rank, []) if not s.get("first")]),
        max_initialization_time((run.event("startup") or {"s": 0.0})["s"]),
        dataloader(data_share, workers, threads if header.get("device") == "cpu" else 1, cores) if header else None,
        straggler(compute),
    ]


def _column(run: Run, name: str) -> list[float]:
    return [row[name] for row in run.metrics if name in row]


def _training(run: Run) -> list[Finding | None]:
    summary: dict[str, Any] = run.summary
    teacher = (summary.get("teacher") or {}).get("val") or {}
    val_counts = run.counts.get("val", [])
    return [
        loss_not_decreasing(_column(run, "train/loss")),
        class_imbalance(run.counts.get("train", [])),
        teacher_near_chance(teacher["acc1"], max(val_counts) / sum(val_counts), sum(val_counts))
        if "acc1" in teacher and val_counts
        else None,
        *(finding for student in run.students for finding in _of_student(run, student)),
    ]


def _of_student(run: Run, student: str) -> list[Finding | None]:
    """One student's; of several its name is in the text."""
    health = _health(run.health_of(student))
    named = [replace(f, text=f"{student}: {f.text}") if f and student else f for f in health]
    return [*_learning(run, f"{student}/" if student else ""), *named]


def _health(health: Sequence[Mapping[str, Any]]) -> list[Finding | None]:
    if not health:
        return []
    norms = [h["grad_norm"] for h in health if "grad_norm" in h]
    return [
        vanishing_gradient([n for n in norms if n is not None]),
        exploding_tensor(norms),
        dead_relu(health[-1].get("dead", {})),
        poor_weight_initialization({n: s for n, s in health[0].get("spread", {}).items() if s is not None}),
        temperature([h["teacher_entropy"] for h in health if h.get("teacher_entropy") is not None]),
        loss_term_dominates(health[-1].get("loss_shares", {})),
    ]


def _learning(run: Run, place: str) -> list[Finding | None]:
    """One student's; its metrics are logged below ``place``."""
    by_epoch, metric = _last_by_epoch(run), f"{place}val/{run.primary}"
    own = {column for row in run.metrics for column in row if column.startswith(f"{place}train/")}
    names = sorted(c for c in own if c.endswith("_loss") and c != f"{place}train/task_loss")
    return [
        overfit(by_epoch(f"{place}train/loss"), by_epoch(metric), metric=metric),
        student_ignores_teacher(by_epoch(f"{place}val/agreement"), {name: by_epoch(name) for name in names}),
    ]


def _last_by_epoch(run: Run) -> Any:
    def column(name: str) -> list[float]:
        last: dict[float, float] = {}
        for row in run.metrics:
            if name in row and "epoch" in row:
                last[row["epoch"]] = row[name]
        return [last[epoch] for epoch in sorted(last)]

    return column
