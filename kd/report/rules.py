"""All rules over a run: what is unusual about the machine or the training, and what to do about it.

The verdict (:mod:`kd.report.verdict`) says what limits the run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kd.report.facts import Facts
from kd.report.finding import Finding
from kd.report.machine_rules import (
    batch_size,
    cpu_bottleneck,
    dataloader,
    gpu_memory_increase,
    hot_cores,
    io_bottleneck,
    load_balancing,
    low_gpu_utilization,
    max_initialization_time,
    memory_leak,
    phase_variation,
    scheduler_delay,
    step_outlier,
    straggler,
    swapping,
    throttling,
)
from kd.report.records import Run
from kd.report.step_facts import mean, part
from kd.report.training_rules import (
    class_imbalance,
    dead_relu,
    exploding_tensor,
    loss_not_decreasing,
    loss_term_dominates,
    overfit,
    poor_weight_initialization,
    student_ignores_teacher,
    teacher_near_chance,
    temperature,
    vanishing_gradient,
)
from kd.report.verdict import limits_of, swing


def findings(run: Run) -> list[Finding]:
    """All rules that fire on a run."""
    return findings_of(Facts(run))


def findings_of(facts: Facts) -> list[Finding]:
    """See :func:`findings`."""
    return [f for f in [*_machine(facts), *_steps(facts), *_training(facts.run)] if f is not None]


def _machine(facts: Facts) -> list[Finding | None]:
    found: list[Finding | None] = []
    held_up = any(limit.bound in ("host", "data", "communication") for limit in limits_of(facts)[:1])
    for samples in facts.run.samples.values():
        gpu_count = max((len(s.get("gpu", [])) for s in samples), default=0)
        whole = [s for s in samples if len(s.get("gpu", [])) == gpu_count]
        cpu = [mean(s["cpu"]) for s in whole]
        gpus = [[s["gpu"][i]["util"] for s in whole] for i in range(gpu_count)]
        memories = [[s["gpu"][i]["mem"] for s in whole] for i in range(gpu_count)]
        gpu = [mean(values) for values in zip(*gpus, strict=True)]
        found += [
            cpu_bottleneck(cpu, gpu),
            io_bottleneck([s.get("iowait", 0.0) for s in whole], gpu),
            low_gpu_utilization(gpu),
            # what holds the step up also holds up a larger batch
            None if held_up else batch_size(cpu, gpu, [mean(values) for values in zip(*memories, strict=True)]),
            *(gpu_memory_increase(memory) for memory in memories),
            load_balancing(gpus),
            *(throttling([s["gpu"][i].get("throttle", []) for s in whole]) for i in range(gpu_count)),
            memory_leak([s["rss_mb"] for s in whole if "rss_mb" in s]),
            swapping([s["swap_mb"] for s in whole if "swap_mb" in s]),
        ]
    gpu_use = [g["util"] for s in facts.samples for g in s.get("gpu", [])]
    return [*found, hot_cores(facts.core_use, gpu_use)]


def _steps(facts: Facts) -> list[Finding | None]:
    data_share = part(facts.phases, "data")
    return [
        step_outlier(facts.steps_ms),
        max_initialization_time(facts.startup["s"]),
        dataloader(data_share, facts.workers, facts.threads, facts.cores, processes=facts.processes)
        if facts.header
        else None,
        straggler(facts.compute_ms),
        phase_variation(swing(facts)),
        scheduler_delay(facts.thread_wait, facts.loader_wait, facts.delayed_thread),
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


def _last_by_epoch(run: Run) -> Callable[[str], list[float]]:
    def column(name: str) -> list[float]:
        last: dict[float, float] = {}
        for row in run.metrics:
            if name in row and "epoch" in row:
                last[row["epoch"]] = row[name]
        return [last[epoch] for epoch in sorted(last)]

    return column
