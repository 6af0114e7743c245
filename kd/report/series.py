"""The series that rules read, by name: attributes of a machine, of one of its GPUs, and of the run. None: not judged."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kd.report.charts import by_epoch
from kd.report.facts import Facts
from kd.report.metric import less_is_better
from kd.report.ratio import share
from kd.report.records import Sample, read_siblings
from kd.report.step_facts import gpus_of, known_utilisation, mean, phase_share


class OfMachine:
    """A machine's samples, as series of equal length.

    Args:
        samples: in order of time.
        free: whether neither host, input nor network limits the run: then a larger batch may be suggested.
    """

    def __init__(self, samples: Sequence[Sample], free: bool) -> None:
        """Samples that lack a GPU are left out."""
        counts = [len(sample.get("gpu", [])) for sample in samples]
        most = max(counts, default=0)
        self.samples = []
        for sample, count in zip(samples, counts, strict=True):
            if count == most:
                self.samples.append(sample)
        self.free = free
        self.readings = gpus_of(self.samples)

    @cached_property
    def cpu(self) -> list[float]:
        """Mean use of the cores, %."""
        return [mean(sample["cpu"]) for sample in self.samples]

    @cached_property
    def iowait(self) -> list[float]:
        """%."""
        return [sample.get("iowait", 0.0) for sample in self.samples]

    @cached_property
    def gpus(self) -> list[list[float]]:
        """Use of each GPU, %; [] of one whose use is not known: the place in the list is the GPU's number.

        NVML reports 0 % throughout where it can't measure (MIG slices, vGPUs).
        """
        use = [_complete(readings, "util") for readings in self.readings]
        return use if any(any(values) for values in use) else []

    @cached_property
    def gpu(self) -> list[float]:
        """Mean use of the GPUs, %; [] where none is known."""
        return [mean(values) for values in zip(*filter(None, self.gpus), strict=True)]

    @cached_property
    def gpu_or_idle(self) -> list[float]:
        """:attr:`gpu`; 0 % without any."""
        return self.gpu or [0.0] * len(self.samples)

    @cached_property
    def gpu_memory(self) -> list[float]:
        """Mean use of the GPUs' memory, %."""
        used = [_complete(readings, "mem") for readings in self.readings]
        return [mean(values) for values in zip(*filter(None, used), strict=True)]

    @cached_property
    def rss_mb(self) -> list[float]:
        """Memory of the training and its loader processes, MB."""
        return [sample["rss_mb"] for sample in self.samples if "rss_mb" in sample]

    @cached_property
    def swap_mb(self) -> list[float]:
        """Swap in use, MB."""
        return [sample["swap_mb"] for sample in self.samples if "swap_mb" in sample]


class OfGpu:
    """The readings of one GPU, one a sample."""

    def __init__(self, readings: Sequence[Mapping[str, Any]]) -> None:
        self.readings = readings

    @cached_property
    def used_memory(self) -> list[float]:
        """%; [] where a reading lacks it."""
        return _complete(self.readings, "mem")

    @cached_property
    def lowered(self) -> list[list[str]]:
        """Why its clocks were lowered, in each sample."""
        return [reading.get("throttle", []) for reading in self.readings]


def _complete(readings: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of ``key``; [] where a reading lacks one: unknown is not 0."""
    values = [reading.get(key) for reading in readings]
    return [] if None in values else values  # type: ignore[return-value]


class _Named:
    """Series by their names: ``attribute -> series``."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read(name)


class OfRun:
    """The steps, the start, the losses and the student of a run."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.run = facts.run
        self.done = self.run.summary.get("status") == "done"
        self.still_trains = "status" not in self.run.summary
        """Or was killed."""
        self.metric = f"val/{self.run.primary}"
        health = self.run.health or [{}]
        self.header = _Named(facts.header.get)
        """A value of the typical rank's header; None without it."""
        self.student = _Named(self.run.student.get)
        """A value of the student's part of the summary; None without it."""
        self.teacher = _Named(self.run.teacher.get)
        """Likewise, of the teacher's."""
        self.epoch = _Named(lambda name: list(by_epoch(self.run, name).values()))
        """A column of ``metrics.csv``: its newest value of each epoch."""
        self.recorded = _Named(lambda name: [r[name] for r in self.run.health if name in r])
        """A value of the health records, in order."""
        self.known = _Named(
            lambda name: [v for v in getattr(self.recorded, name) if v not in (None, {})]
        )
        """Likewise, without readings that were NaN, infinite or empty."""
        self.first = _Named(lambda name: health[0].get(name, {}))
        """A value by layer in the first health record."""
        self.newest = _Named(lambda name: health[-1].get(name, {}))
        """Likewise, in the newest."""

    # -- steps and the machine -----------------------------------------------------------------------------------------
    @cached_property
    def gpu_use(self) -> list[float]:
        """Of all GPUs and samples, %."""
        return known_utilisation(self.facts.samples)

    @cached_property
    def silent_s(self) -> float | None:
        """Seconds since the newest step of a run without a status."""
        if not self.still_trains or not self.facts.steps:
            return None
        return time.time() - self.facts.steps[-1]["t"]

    @cached_property
    def data_share(self) -> float | None:
        """Share of the step that waits for its batch; None where loader processes are not known, or a tier makes batches."""
        known = self.facts.header and self.facts.workers_known and not self.run.tier
        return phase_share(self.facts.phases, "data") if known else None

    # -- losses, classes, teacher --------------------------------------------------------------------------------------
    @cached_property
    def losses(self) -> list[float]:
        """The training loss, by logged step."""
        return [row["train/loss"] for row in self.run.metrics if "train/loss" in row]

    @cached_property
    def loss_by_step(self) -> dict[float, float]:
        """The training loss by step."""
        return _loss_by_step(self.run.metrics)

    @cached_property
    def siblings(self) -> dict[str, dict[float, float]]:
        """The same of other runs of the recipe, by name."""
        if len(self.loss_by_step) < 5:
            return {}
        others = read_siblings(self.run.folder)
        return {name: _loss_by_step(metrics) for name, metrics in others.items()}

    @cached_property
    def class_counts(self) -> list[int] | None:
        """Training pictures by class; None where classes are drawn equally often."""
        if (self.run.config.get("data") or {}).get("balance_classes") is True:
            return None
        return self.run.counts.get("train", [])

    @cached_property
    def teacher_acc1(self) -> float | None:
        """The teacher's accuracy; None where it was not measured on counted pictures."""
        return (self.run.teacher.get("val") or {}).get("acc1") if self.judged else None

    @cached_property
    def chance(self) -> float:
        """The share of the most frequent class of the validation pictures."""
        counts = self.run.counts.get("val", [])
        return share(max(counts, default=0), sum(counts))

    @cached_property
    def judged(self) -> int:
        """Validation pictures that the teacher has seen."""
        counted = sum(self.run.counts.get("val", []))
        return self.run.teacher.get("pictures", counted) if counted else 0

    # -- the student by epoch ------------------------------------------------------------------------------------------
    @cached_property
    def val(self) -> list[float]:
        """The main metric by epoch; [] of an error, as the rules read a metric that should rise."""
        return [] if less_is_better(self.run.primary) else getattr(self.epoch, self.metric)

    @cached_property
    def distill_losses(self) -> dict[str, list[float]]:
        """The training losses by epoch, without the loss on labels, by their columns of ``metrics.csv``."""
        columns = sorted({column for row in self.run.metrics for column in row})
        losses = {}
        for column in columns:
            if column.startswith("train/") and column.endswith("_loss"):
                losses[column] = getattr(self.epoch, column)
        losses.pop("train/task_loss", None)
        return losses

    @cached_property
    def pictures(self) -> int:
        """Validation pictures."""
        return int(next(iter(self.run.headers.values()), {}).get("val", 0))

    @cached_property
    def start_value(self) -> float | None:
        """The main metric before the first step."""
        return (self.run.student.get("start_val") or {}).get(self.run.primary)

    @cached_property
    def last_value(self) -> float | None:
        """The main metric after the last epoch."""
        return (self.run.student.get("val") or {}).get(self.run.primary)

    @cached_property
    def exported_epoch(self) -> int:
        """The epoch that is exported, from 1; 0: the start."""
        return int((self.run.student.get("best_val") or {}).get("epoch", 0))

    @cached_property
    def levers(self) -> list[str]:
        """What the settings suggest to try where training has made the student worse."""
        model = self.run.config.get("model") or {}
        levers = ["a lower optim.lr"]
        if "lr" in self.run.student:
            levers = [f"a lower optim.lr (it was {self.run.student['lr']:g})"]
        if self.run.teacher and not model.get("distill_losses"):
            levers.append("the recipe's model.distill_losses instead of labels alone")
        elif self.run.teacher and model.get("task_loss_weight"):
            levers.append("a smaller model.task_loss_weight")
        return levers

    # -- mistakes ------------------------------------------------------------------------------------------------------
    @cached_property
    def confusions(self) -> list[tuple[str, str, int]]:
        """Class, the class it is taken for, and how often, in the best validation; [] without one label a picture."""
        counted = self.run.fidelity
        if counted.get("kind") != "classification":
            return []
        return [(pair["is"], pair["called"], pair["student"]) for pair in counted["confusions"]]

    @cached_property
    def val_counts(self) -> dict[str, int]:
        """Validation pictures by class."""
        return {row["name"]: row["count"] for row in self.run.fidelity.get("per_class", [])}


def _loss_by_step(metrics: Sequence[Mapping[str, float]]) -> dict[float, float]:
    """The training loss by step, from the rows of ``metrics.csv`` that have both."""
    return {
        row["step"]: row["train/loss"] for row in metrics if "train/loss" in row and "step" in row
    }
