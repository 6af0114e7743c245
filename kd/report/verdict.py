"""What limits a run: one sentence with evidence, a lever, and the gain that Amdahl's law predicts.

Every function takes plain numbers and returns a :class:`Limit` or ``None``. ``phases`` are mean ms a step by phase
(:data:`kd.report.records.PHASES`); a gain is the step's time now over its time without the limit: with a share ``p``
removed, ``1 / (1 - p)`` (Amdahl, "Validity of the single processor approach", AFIPS 1967).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kd.report.records import PHASES, Run, percentile

WORTH = 1.1  # a lever below this gain limits nothing
CACHE_VIEWS = 4  # of each picture, that a teacher's cache keeps unless told otherwise
FUSED_OPTIMIZER_SHARE = 0.05  # what a fused optimizer is expected to take, over the rest of the step
NAMES = {
    "data": "data-bound",
    "teacher": "teacher-bound",
    "student": "student-bound",
    "communication": "communication-bound",
    "host": "host-bound",
    "startup": "start-up-bound",
    "checkpoint": "checkpoint-bound",
    "none": "balanced",
}


@dataclass(frozen=True)
class Limit:
    """One thing that limits a run.

    Attributes:
        bound: a key of :data:`NAMES`.
        text: the evidence, a sentence.
        lever: what to change.
        gain: predicted speed-up of the lever; ``None`` where it can't be told.
    """

    bound: str
    text: str
    lever: str
    gain: float | None


def _step(phases: Mapping[str, float]) -> float:
    return sum(ms for name, ms in phases.items() if name in PHASES)


def _share(phases: Mapping[str, float], name: str) -> float:
    step = _step(phases)
    return phases.get(name, 0.0) / step if step else 0.0


def data_bound(
    phases: Mapping[str, float],
    num_workers: int,
    cores: int,
    threads: int,
    busy: float,
    batches_per_epoch: float = math.inf,
    at: float = 0.1,
) -> Limit | None:
    """The step stands still for its batch. Primary signal: the exposed wait, not a low GPU utilisation.

    A batch costs one process ``wait`` ms (no workers) or about ``num_workers * step`` (workers that can't keep up).
    With ``k`` workers a step takes the longest of: the rest of the step; ``cost / k``; and the CPU time of both over
    the cores, ``(busy * cost + threads * rest) / cores``. The first batch of an epoch is waited for in any case.

    Args:
        phases: mean ms a step.
        num_workers: loader processes now.
        cores: that the process and its workers may use.
        threads: that compute beside the loaders.
        busy: share of a core that making batches takes while it goes on (1 computes, 0 waits for disk or network).
        batches_per_epoch: of one process.
        at: fires from this share of the step.
    """
    step, wait = _step(phases), phases.get("data", 0.0)
    if not step or wait / step < at:
        return None
    rest = max(step - wait, 0.01 * step)
    cost = wait if num_workers == 0 else num_workers * step
    floor = max(rest, (busy * cost + threads * rest) / max(1, cores))
    spare = floor == rest  # cores are left: one worker more, as batches do not take equally long
    wanted = math.ceil(cost / floor) + spare
    gain = step / (max(floor, cost / wanted) + cost / batches_per_epoch)
    text = f"the step waits {wait:.0f} of its {step:.0f} ms ({wait / step:.0%}) for the next batch"
    if wanted > num_workers and gain >= WORTH:
        return Limit("data", text, f"data.num_workers={wanted} instead of {num_workers}", gain)
    if num_workers + threads > cores:
        text += f", though {num_workers} loader processes share {cores} core{'s' * (cores > 1)} with training"
    lever = "cheaper pictures (resized once, ahead of training) or more cores: at most"
    return Limit("data", text, lever, step / rest)


def teacher_bound(
    phases: Mapping[str, float],
    cache_bytes: float | None = None,
    cacheable: bool = True,
    cached: bool = False,
    at: float = 0.3,
) -> Limit | None:
    """The frozen teacher's forward pass dominates; its answers can be computed once and kept.

    Args:
        phases: mean ms a step.
        cache_bytes: what the answers take on disk, where that is known.
        cacheable: the losses need no more than answers that a cache keeps.
        cached: there is a cache; as reading it costs next to nothing, it was being filled.
        at: fires from this share of the step.
    """
    step, share = _step(phases), _share(phases, "teacher")
    if share < at:
        return None
    text = f"the teacher takes {phases['teacher']:.0f} of the step's {step:.0f} ms ({share:.0%})"
    gain = 1 / (1 - share) if share < 1 else None
    if cached:
        text += " to compute the answers that its cache keeps"
        return Limit("teacher", text, "later epochs, and runs like this one, read them: at most", gain)
    if not cacheable:
        return Limit("teacher", text, "a smaller teacher, or smaller pictures for it: at most", gain)
    needs = f" (needs {readable_bytes(cache_bytes)})" if cache_bytes else ""
    return Limit("teacher", text, f"model.teacher.cache=on{needs}, once filled,", gain)


def communication_bound(
    phases: Mapping[str, float], compute_ms: Mapping[int, float] | None = None, at: float = 0.15, late: float = 1.15
) -> Limit | None:
    """Gradients are waited for after the last one is computed; or one rank makes all others wait.

    Args:
        phases: mean ms a step of a typical rank.
        compute_ms: each rank's step without communication.
        at: fires from this share of the step.
        late: a rank counts as slow from this multiple of the median.
    """
    step, share = _step(phases), _share(phases, "communication")
    if share < at:
        return None
    text = f"gradients are waited for {phases['communication']:.0f} of {step:.0f} ms ({share:.0%})"
    slow = slow_rank(compute_ms or {}, late)
    if slow is not None:
        rank, extra = slow
        text += f" because rank {rank} computes {extra:.0f} ms longer than the others"
        extra = min(extra, phases["communication"])
        return Limit("communication", text, f"look at rank {rank}'s machine, or take it out", step / (step - extra))
    lever = "larger batches or gradient accumulation (trainer.accumulate_grad_batches), a faster network: at most"
    return Limit("communication", text, lever, 1 / (1 - share))


def slow_rank(compute_ms: Mapping[int, float], late: float = 1.15) -> tuple[int, float] | None:
    """The rank that computes ``late`` times as long as the median of the others, and by how many ms."""
    if len(compute_ms) < 2:
        return None
    rank = max(compute_ms, key=lambda r: compute_ms[r])
    others = percentile([ms for r, ms in compute_ms.items() if r != rank], 50)
    return (rank, compute_ms[rank] - others) if compute_ms[rank] > late * others else None


def starved(
    phases: Mapping[str, float],
    ready_ms: float,
    num_workers: int,
    cores: int,
    threads: int,
    loading: float = 0.0,
    others: float = 0.0,
    processes: int = 1,
    at: float = 0.2,
) -> Limit | None:
    """The training process is ready to run but gets no core: too many processes of its own, or other jobs.

    Fewer loader processes do not make their work smaller: the step still takes the CPU time of both over the cores.
    Where that leaves no gain, the pictures themselves cost too much.

    Args:
        phases: mean ms a step.
        ready_ms: ms a step that the training thread spent on the kernel's run queue.
        num_workers: loader processes.
        cores: that the job may use.
        threads: compute threads.
        loading: cores that the loader processes use.
        others: of these cores, what processes other than the job's use.
        processes: training processes on the machine.
        at: fires when this share of the step is lost.
    """
    step = _step(phases)
    if not step or ready_ms / step < at:
        return None
    free = max(0.01 * step, step - ready_ms)
    missing = f"training stood ready but got no core for {ready_ms:.0f} of {step:.0f} ms a step ({ready_ms / step:.0%})"
    beside = loading + (processes - 1) * threads
    if processes * (num_workers + threads) <= cores or others > max(beside, 0.5):
        text = f"other processes use {others:.1f} cores: {missing}"
        return Limit("host", text, "run alone on the machine", step / free)
    counted = {"training processes": processes * (processes > 1), "loader processes": processes * num_workers,
               "compute threads": processes * threads}  # fmt: skip
    shared = " and ".join(f"{count} {what}" for what, count in counted.items() if count)
    shared += f" share {cores} core{'s' * (cores > 1)}"
    text = f"{shared}: {missing}"
    if processes * threads > cores:
        return Limit("host", text, "fewer processes (trainer.devices) or threads, or more cores: at most", step / free)
    fewer = f"data.num_workers={max(1, cores // processes - threads)} instead of {num_workers}"
    gain = step / max(free, (loading * step + processes * threads * free) / cores)
    if gain >= WORTH:
        return Limit("host", text, fewer, gain)
    return Limit("host", text, f"{fewer}, and cheaper pictures (resized once, ahead of training): at most", step / free)


def launch_bound(
    phases: Mapping[str, float], launch_ms: float, gpu_busy: float | None, at: float = 0.9, busy_below: float = 0.8
) -> Limit | None:
    """The GPU idles between kernels because the host launches them too slowly.

    Args:
        phases: mean device ms a step.
        launch_ms: host ms a step outside the data wait.
        gpu_busy: share of the time that the GPU computes (kernel profile, else NVML); unknown on a CPU.
        at: the host works this share of the step or more.
        busy_below: and the GPU computes less than this.
    """
    step = _step(phases)
    if gpu_busy is None or not step or launch_ms / step < at or gpu_busy >= busy_below:
        return None
    text = f"the GPU computes {gpu_busy:.0%} of the time, while the host launches for {launch_ms:.0f} of {step:.0f} ms"
    return Limit("host", text, "a larger data.batch_size (kernels grow, their number does not): at most", 1 / gpu_busy)


def bookkeeping_bound(
    phases: Mapping[str, float], callbacks_ms: Mapping[str, float] | None = None, at: float = 0.15
) -> Limit | None:
    """Callbacks, loggers and the loop around them take a notable part of the step.

    Args:
        phases: mean ms a step.
        callbacks_ms: ms a step by callback hook.
        at: fires from this share of the step.
    """
    step, share = _step(phases), _share(phases, "logging")
    if share < at:
        return None
    text = f"callbacks and logging take {phases['logging']:.0f} of {step:.0f} ms ({share:.0%})"
    lever = "trainer.log_every_n_steps, fewer callbacks: at most"
    if callbacks_ms:
        name, ms = max(callbacks_ms.items(), key=lambda item: item[1])
        if ms > 0.3 * phases["logging"]:
            text += f", {name} alone {ms:.0f} ms"
            lever = f"do less in {name}, or less often: at most"
    return Limit("host", text, lever, 1 / (1 - share))


def optimizer_bound(phases: Mapping[str, float], at: float = 0.25) -> Limit | None:
    """The optimizer's step is usually a few percent."""
    step, share = _step(phases), _share(phases, "optimizer")
    if share < at:
        return None
    text = f"the optimizer takes {phases['optimizer']:.0f} of {step:.0f} ms ({share:.0%})"
    gain = 1 / ((1 - share) * (1 + FUSED_OPTIMIZER_SHARE)) if share < 1 else None
    return Limit("student", text, "a fused optimizer (optim.name=adamw)", gain)


def checkpoint_bound(phases: Mapping[str, float], at: float = 0.05) -> Limit | None:
    """Saving takes a notable part of the training time."""
    share = _share(phases, "checkpoint")
    if share < at:
        return None
    text = f"saving checkpoints takes {share:.0%} of the training time ({phases['checkpoint']:.0f} ms a step)"
    return Limit("checkpoint", text, "save less often, or to a faster disk: at most", 1 / (1 - share))


def startup_bound(
    startup_s: float, parts: Mapping[str, float], wall_s: float, at: float = 0.3, least_s: float = 60.0
) -> Limit | None:
    """The run spends its time before the first step."""
    if startup_s < least_s or wall_s <= startup_s or startup_s / wall_s < at:
        return None
    longest = max(parts, key=lambda name: parts[name]) if parts else "start-up"
    text = f"start-up takes {startup_s:.0f} of {wall_s:.0f} s ({startup_s / wall_s:.0%}), most of it {longest}"
    return Limit(
        "startup", text, f"shorten '{longest}', or train longer in one run: at most", wall_s / (wall_s - startup_s)
    )


def student_bound(phases: Mapping[str, float], at: float = 0.5) -> Limit | None:
    """What is left is the student's own work: the healthy case."""
    own = sum(_share(phases, name) for name in ("student", "loss", "backward", "optimizer"))
    if own < at:
        return None
    text = f"the student's own training takes {own:.0%} of the step; nothing around it holds it up"
    return Limit("student", text, "a faster device, more of them, or a smaller student", None)


def limits(run: Run) -> list[Limit]:
    """Everything that limits a run, largest gain first; the student's own work last."""
    rank = typical_rank(run)
    phases = mean_phases(run, rank)
    if not phases:
        return []
    header, total = run.headers.get(rank, {}), run.totals.get(rank, {})
    steps = max(1, total.get("steps", 1))
    cpu = header.get("device", "cpu") == "cpu"
    cores, threads = header.get("cores", 1), header.get("threads", 1)
    workers, batches = header.get("num_workers", 0), header.get("batches_per_epoch") or math.inf
    launch = total.get("launch_ms", 0.0) / steps
    hidden = not cpu and launch < 0.9 * _step(phases)  # the GPU is the slower one: it has work while the host waits
    ready = 0.0 if hidden else total.get("ready_ms", 0.0) / steps
    startup = run.event("startup") or {"s": 0.0, "parts": {}}
    per_step = {name: ms / steps for name, ms in total.get("callbacks", {}).items()}
    found = [
        starved(phases, ready, workers, cores, threads, loading_load(run), other_load(run), header.get("processes", 1)),
        data_bound(phases, workers, cores, threads if cpu else 1, _loading_busy(run, total, workers), batches),
        teacher_bound(phases, _cache_bytes(run, header), header.get("cacheable", True), _is_cached(run, header)),
        communication_bound(phases, {r: _compute_ms(run, r) for r in run.totals}),
        launch_bound(phases, launch, None if cpu else gpu_busy(run)),
        bookkeeping_bound(phases, per_step),
        optimizer_bound(phases),
        checkpoint_bound(phases),
        startup_bound(startup["s"], startup["parts"], run.summary.get("wall_s") or 0.0),
    ]
    worth = [limit for limit in found if limit is not None and (limit.gain or 0) >= WORTH / 1.05]
    own = student_bound(phases)
    return sorted(worth, key=lambda limit: -(limit.gain or 0)) + ([own] if own else [])


def verdict(run: Run) -> dict[str, Any]:
    """The first limit as ``summary.json`` holds it: bound, text, lever, predicted_speedup, phases_ms."""
    found = limits(run)
    phases = {name: round(ms, 3) for name, ms in mean_phases(run, typical_rank(run)).items() if name in PHASES}
    if not found:
        text = "balanced: no part of the step stands out" if phases else "too few steps were recorded to tell"
        return {"bound": "none", "text": text, "lever": "", "predicted_speedup": None, "phases_ms": phases}
    first = found[0]
    return {
        "bound": first.bound,
        "text": sentence(first),
        "lever": first.lever,
        "predicted_speedup": round(first.gain, 2) if first.gain else None,
        "phases_ms": phases,
        "others": [asdict(limit) for limit in found[1:]],
    }


def sentence(limit: Limit) -> str:
    """``data-bound: <evidence>; <lever> <gain>x``."""
    head = f"{NAMES[limit.bound]}: {limit.text}"
    return (
        f"{head}; {limit.lever} {'' if 'at most' in limit.lever else 'would give '}{limit.gain:.1f}x"
        if limit.gain
        else head
    )


def mean_phases(run: Run, rank: int) -> dict[str, float]:
    """Mean ms a step by phase, validation too; the first step of the process left out."""
    total = run.totals.get(rank)
    if total and total["steps"]:
        return {name: ms / total["steps"] for name, ms in total["p"].items()}
    steps = run.steps.get(rank, [])[1:]
    names = {name for step in steps for name in step["p"]}
    return {name: sum(step["p"].get(name, 0.0) for step in steps) / len(steps) for name in names}


def _compute_ms(run: Run, rank: int) -> float:
    phases = mean_phases(run, rank)
    return _step(phases) - phases.get("communication", 0.0)


def typical_rank(run: Run) -> int:
    """The rank with the median computing time: it is neither the straggler nor the one that waits most."""
    ranks = sorted(run.totals or run.steps, key=lambda r: _compute_ms(run, r))
    return ranks[(len(ranks) - 1) // 2] if ranks else 0


def _loading_busy(run: Run, total: Mapping[str, Any], num_workers: int) -> float:
    """Share of a core that making batches takes while it goes on."""
    if num_workers == 0:
        wait = total.get("p", {}).get("data", 0.0)
        return min(1.0, total.get("data_cpu_ms", 0.0) / wait) if wait else 1.0
    worker = [w / 100 for samples in run.samples.values() for s in samples for w in s.get("workers", [])]
    return min(1.0, sum(worker) / len(worker)) if worker else 1.0


def kernels_of(run: Run, rank: int) -> list[dict[str, Any]]:
    """The profiled windows of a rank; of all where it has none."""
    return [k for k in run.kernels if k.get("rank") == rank] or run.kernels


def gpu_busy(run: Run) -> float | None:
    """Share of the time that the GPUs compute: of the kernel profile where there is one, else NVML's."""
    profiled = [k["busy"] for k in kernels_of(run, typical_rank(run)) if k.get("busy") is not None]
    if profiled:
        return profiled[-1]
    used: Sequence[float] = [g["util"] for samples in run.samples.values() for s in samples for g in s.get("gpu", [])]
    return sum(used) / len(used) / 100 if used else None


def loading_load(run: Run) -> float:
    """Cores that the loader processes use, on average."""
    used = [sum(s["workers"]) / 100 for samples in run.samples.values() for s in samples if "workers" in s]
    return sum(used) / len(used) if used else 0.0


def other_load(run: Run) -> float:
    """What processes other than the run's use of the cores that it may use, on average."""
    used = []
    for node, samples in run.samples.items():
        ids = run.nodes.get(node, {}).get("core_ids")
        for s in samples:
            if "main" in s:
                cpu = s["cpu"] if ids is None else [s["cpu"][i] for i in ids if i < len(s["cpu"])]
                used.append((sum(cpu) - s["main"] - sum(s["workers"])) / 100)
    return max(0.0, sum(used) / len(used)) if used else 0.0


def _teacher(run: Run) -> dict[str, Any]:
    """``model.teacher`` of the configuration."""
    return (run.config.get("model") or {}).get("teacher") or {}


def _is_cached(run: Run, header: Mapping[str, Any]) -> bool:
    """Whether the run has a cache of the teacher's answers: as it found (``auto``), else as it was told."""
    told = _teacher(run).get("cache") in (True, "on", "only")  # YAML 1.1 reads a bare on as a truth value
    return header.get("cached", told)


def _cache_bytes(run: Run, header: dict[str, Any]) -> float | None:
    """A checksum, the largest logit, all logits and features in half precision, for each view of each picture."""
    data, teacher = run.summary.get("data"), _teacher(run)
    if not data:
        return None
    epochs = (run.config.get("trainer") or {}).get("max_epochs") or math.inf
    views = min(teacher.get("cache_views") or CACHE_VIEWS, epochs if epochs > 0 else math.inf)
    kept = teacher.get("cache_topk")
    answer = 8 + (4 * kept if kept else 2 * data["classes"]) + header.get("feature_bytes", 0)
    return data["train"] * views * answer


def readable_bytes(size: float) -> str:
    """``1234567`` -> ``1.2 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
