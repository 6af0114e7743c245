"""The series that rules read, by name: functions of a run, of a machine and of one of its GPUs. None: not judged."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kd.report.charts import by_epoch
from kd.report.facts import Facts
from kd.report.limits import Limit, data_bound, share_cores, who_takes_cores
from kd.report.metric import less_is_better
from kd.report.ratio import Number, share
from kd.report.records import Sample, read_siblings
from kd.report.step_facts import gpus_of, known_utilisation, mean, phase_share
from kd.storage.elsewhere import Json


def _values(rows: Sequence[Any], key: str) -> list[Any]:
    """The values of ``key`` in the rows that have one."""
    return [row[key] for row in rows if key in row]


def _values_of_all(readings: Sequence[Json], key: str) -> list[float]:
    """The values of ``key``; [] where a reading lacks one: unknown is not 0."""
    values = [reading.get(key) for reading in readings]
    return [] if None in values else values  # type: ignore[return-value]


# -- of a machine ------------------------------------------------------------------------------------------------------
def _gpus(samples: Sequence[Sample]) -> list[list[float]]:
    """Use of each GPU in each sample, %, by the GPU's number; [] in the place of a GPU whose use is not known.

    [] altogether where no reading is above 0: NVML reports 0 % throughout where it can't measure (MIG slices, vGPUs).
    """
    use = [_values_of_all(readings, "util") for readings in gpus_of(samples)]
    return use if any(any(values) for values in use) else []


def _means(gpus: Sequence[Sequence[float]]) -> list[float]:
    """The mean of the GPUs that have values, one a sample; [] without any."""
    return [mean(values) for values in zip(*filter(None, gpus), strict=True)]


OF_MACHINE: dict[str, Callable[[Sequence[Sample]], Any]] = {
    "cpu": lambda samples: [mean(sample["cpu"]) for sample in samples],
    "iowait": lambda samples: [sample.get("iowait", 0.0) for sample in samples],
    "gpus": _gpus,
    "gpu": lambda samples: _means(_gpus(samples)),
    "gpu_or_idle": lambda samples: _means(_gpus(samples)) or [0.0] * len(samples),
    "gpu_memory": lambda samples: _means([_values_of_all(gpu, "mem") for gpu in gpus_of(samples)]),
    "rss_mb": lambda samples: _values(samples, "rss_mb"),
    "swap_mb": lambda samples: _values(samples, "swap_mb"),
}
"""Use in %, means of the cores and of the GPUs; memory in MB, of the training with its loader processes."""
OF_GPU: dict[str, Callable[[Sequence[Json]], Any]] = {
    "used_memory": lambda readings: _values_of_all(readings, "mem"),
    "lowered": lambda readings: [reading.get("throttle", []) for reading in readings],
}
"""Used memory in %; why its clocks were lowered, in each sample."""


# -- of a run ----------------------------------------------------------------------------------------------------------
def _loss_by_step(metrics: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """The training loss by step, from the rows of ``metrics.csv`` that have both."""
    rows = [row for row in metrics if "train/loss" in row and "step" in row]
    return {row["step"]: row["train/loss"] for row in rows}


def _siblings(facts: Facts) -> dict[str, dict[float, float]]:
    """The training loss by step of other runs of the recipe, by name."""
    others = read_siblings(facts.run.folder)
    return {name: _loss_by_step(metrics) for name, metrics in others.items()}


def _pictures_of_teacher(facts: Facts) -> int:
    """Validation pictures that the teacher has seen."""
    counted = sum(facts.run.counts.get("val", []))
    return facts.run.teacher.get("pictures", counted) if counted else 0


def _chance(facts: Facts) -> float:
    """The share of the most frequent class of the validation pictures."""
    counts = facts.run.counts.get("val", [])
    return share(max(counts, default=0), sum(counts))


def _teacher_acc1(facts: Facts) -> Number:
    """The teacher's accuracy; None where it was not measured on counted pictures."""
    return (facts.run.teacher.get("val") or {}).get("acc1") if _pictures_of_teacher(facts) else None


def _known_values(facts: Facts, name: str) -> list[Any]:
    """A value of the health records, in order, without readings that were NaN, infinite or empty."""
    return [value for value in _values(facts.run.health, name) if value not in (None, {})]


def _val(facts: Facts) -> list[float]:
    """The main metric by epoch; [] of an error, as the rules read a metric that should rise."""
    metric = facts.run.primary
    return [] if less_is_better(metric) else [*by_epoch(facts.run, f"val/{metric}").values()]


def _distill_losses(facts: Facts) -> dict[str, list[float]]:
    """The training losses by epoch, without the loss on labels, by their columns of ``metrics.csv``."""
    columns = sorted({column for row in facts.run.metrics for column in row})
    losses = {}
    for column in columns:
        if column.startswith("train/") and column.endswith("_loss"):
            losses[column] = list(by_epoch(facts.run, column).values())
    losses.pop("train/task_loss", None)
    return losses


def _confusions(facts: Facts) -> list[tuple[str, str, int]]:
    """Class, the class it is taken for, and how often, in the best validation; [] without one label a picture."""
    counted = facts.run.fidelity
    pairs = counted["confusions"] if counted.get("kind") == "classification" else []
    return [(pair["is"], pair["called"], pair["student"]) for pair in pairs]


def _class_counts(facts: Facts) -> list[int] | None:
    """Training pictures by class; None where classes are drawn equally often."""
    balanced = (facts.run.config.get("data") or {}).get("balance_classes") is True
    return None if balanced else facts.run.counts.get("train", [])


def _silent_s(facts: Facts) -> Number:
    """Seconds since the newest step of a run without a status, or since it was resumed; it trains, or was killed."""
    if facts.has_ended or not facts.steps:
        return None
    return time.time() - max(facts.steps[-1]["t"], facts.header.get("t", 0.0))


def _data_share(facts: Facts) -> Number:
    """Share of the step that waits for its batch; None where loader processes are not known, or a tier makes batches."""
    known = facts.header and facts.workers_known and not facts.run.tier
    return phase_share(facts.phases, "data") if known else None


def _lever(limit: Limit | None) -> str:
    """What a limit would change; "" without one."""
    return limit.lever.removesuffix(": at most") if limit else ""


OF_RUN: dict[str, Callable[[Facts], Any]] = {
    "done": lambda facts: facts.run.summary.get("status") == "done",
    "metric": lambda facts: f"val/{facts.run.primary}",
    "gpu_use": lambda facts: known_utilisation(facts.samples),
    "silent_s": _silent_s,
    "data_share": _data_share,
    "sharers": share_cores,
    "data_lever": lambda facts: _lever(data_bound(facts)),
    "cores_lever": lambda facts: _lever(who_takes_cores(facts, "", facts.without_core_ms)),
    "losses": lambda facts: _values(facts.run.metrics, "train/loss"),
    "loss_by_step": lambda facts: _loss_by_step(facts.run.metrics),
    "siblings": _siblings,
    "class_counts": _class_counts,
    "teacher_acc1": _teacher_acc1,
    "chance": _chance,
    "judged": _pictures_of_teacher,
    "val": _val,
    "distill_losses": _distill_losses,
    "pictures": lambda facts: int(next(iter(facts.run.headers.values()), {}).get("val", 0)),
    "start_value": lambda facts: (facts.run.student.get("start_val") or {}).get(facts.run.primary),
    "last_value": lambda facts: (facts.run.student.get("val") or {}).get(facts.run.primary),
    "exported_epoch": lambda facts: (facts.run.student.get("best_val") or {}).get("epoch", 0),
    "confusions": _confusions,
    "val_counts": lambda facts: {
        row["name"]: row["count"] for row in facts.run.fidelity.get("per_class", [])
    },
}
"""What is no attribute of :class:`~kd.report.facts.Facts`; ``pictures`` are those of the validation."""
OF_PLACE: dict[str, Callable[[Facts, str], Any]] = {
    "header": lambda facts, name: facts.header.get(name),
    "student": lambda facts, name: facts.run.student.get(name),
    "teacher": lambda facts, name: facts.run.teacher.get(name),
    "epoch": lambda facts, name: [*by_epoch(facts.run, name).values()],
    "recorded": lambda facts, name: _values(facts.run.health, name),
    "known": _known_values,
    "first": lambda facts, name: (facts.run.health or [{}])[0].get(name, {}),
    "newest": lambda facts, name: (facts.run.health or [{}])[-1].get(name, {}),
}
"""``PLACE.NAME``: a value of the typical rank's header, or of the summary's parts, None without it; a column of
``metrics.csv``, by epoch; a value of all health records, of those where it is known, of the first, of the newest."""
TABLES: Json = {"machine": OF_MACHINE, "gpu": OF_GPU, "run": OF_RUN}


class Series:
    """The series of a run, a machine or a GPU, each worked out once.

    Args:
        of: a key of :data:`TABLES`.
        source: the run's facts, the machine's samples, or the GPU's readings.
        known: series that are known already.
    """

    def __init__(self, of: str, source: object, **known: object) -> None:
        self.of = of
        self.source = source
        self.known = known

    def __getitem__(self, name: str) -> Any:
        """A series by its name: of the table, of a place, or an attribute of the facts."""
        if name not in self.known:
            place, _, key = name.partition(".")
            table = TABLES[self.of]
            if name in table:
                self.known[name] = table[name](self.source)
            elif key:
                self.known[name] = OF_PLACE[place](self.source, key)  # type: ignore[arg-type]
            else:
                self.known[name] = getattr(self.source, name)
        return self.known[name]
