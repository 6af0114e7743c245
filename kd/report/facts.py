"""Numbers of a run, each worked out once from its records. Limits, rules and pages read them; none reads records."""

import math
from functools import cached_property
from typing import Any

from kd.report.machine_facts import MachineFacts
from kd.report.metric import less_is_better
from kd.report.tier_facts import TierFacts, tier_of

CACHE_VIEWS = 4  # of each picture, that a teacher's cache keeps by default
OWN = ("student", "loss", "backward", "optimizer")  # phases of the student's own training


class Facts(MachineFacts):
    """What a run's records say of its steps, its machines, its length and what it learnt."""

    @cached_property
    def tier(self) -> TierFacts | None:
        """The machines that made the batches; None where this machine did, or too little of them is recorded."""
        return tier_of(self.run)

    # -- the run's length ----------------------------------------------------------------------------------------------
    @cached_property
    def batches_per_epoch(self) -> float:
        """Of one process; infinite where the data set has no end."""
        return self.header.get("batches_per_epoch") or math.inf

    @cached_property
    def epochs(self) -> float:
        setting = (self.run.config.get("trainer") or {}).get("max_epochs")
        limits = [self.header.get("max_epochs", setting), self._max_steps / self.batches_per_epoch]
        return min([n for n in limits if n is not None and n > 0], default=math.inf)

    @property
    def _max_steps(self) -> float:
        steps = self.header.get("max_steps") or -1
        return steps * self.header.get("accumulate", 1) if steps > 0 else math.inf

    @cached_property
    def epochs_done(self) -> float | None:
        """Of a run that was stopped inside an epoch, its part too."""
        if self.steps and math.isfinite(self.batches_per_epoch):
            return (self.steps[-1]["step"] + 1) / self.batches_per_epoch
        return self.run.summary.get("epochs")

    @cached_property
    def startup(self) -> dict[str, Any]:
        """The newest start: seconds until the first step was done, and its parts."""
        return self.run.event("startup") or {"s": 0.0, "parts": {}}

    @cached_property
    def wall_s(self) -> float | None:
        """Seconds from the process's start to its newest record: the clock that start-up is measured by."""
        began = self.header.get("t")
        if began is None or not self.startup["s"]:
            return None
        first = self.startup["parts"].get("first step", 0.0)  # the header is written before it
        newest = max([s["t"] for s in self.steps[-1:]] + [self.total.get("t", began)])
        return self.startup["s"] + max(0.0, newest - began - first)

    @cached_property
    def epoch_s(self) -> float | None:
        whole = self.step_ms + self.phases.get("validation", 0.0)
        return whole * self.batches_per_epoch / 1000 if whole and math.isfinite(self.batches_per_epoch) else None

    @cached_property
    def planned_s(self) -> float | None:
        """Seconds of the whole run from the process's start: so far, or as planned where it still trains."""
        if "status" in self.run.summary or self.epoch_s is None or not math.isfinite(self.epochs):
            return self.wall_s
        return max(self.wall_s or 0.0, self.startup["s"] + self.epoch_s * self.epochs)

    @cached_property
    def left_s(self) -> float | None:
        if "status" in self.run.summary or self.epoch_s is None or not math.isfinite(self.epochs):
            return None
        return max(0.0, self.epoch_s * (self.epochs - (self.epochs_done or 0.0)))

    @cached_property
    def images_per_s(self) -> float | None:
        """Of all processes, from the mean step; validation is left out."""
        if not self.header or not self.step_ms:
            return None
        return 1000 * self.header["batch_size"] * self.header["world_size"] / self.step_ms

    @cached_property
    def price(self) -> float | None:
        """Of an hour of the whole job: as the run knew it, by number or by table."""
        return self.header.get("price_per_hour", (self.run.config.get("monitor") or {}).get("price_per_hour"))

    @cached_property
    def devices(self) -> int:
        return self.header.get("world_size") or self.run.summary.get("world_size") or 1

    @cached_property
    def length(self) -> float | None:
        """Epochs of the whole run: as many as it had, or is to have where it still trains."""
        return self.epochs_done if "status" in self.run.summary or not math.isfinite(self.epochs) else self.epochs

    @cached_property
    def hours(self) -> float | None:
        """Of the run so far, from the process's start."""
        wall = self.run.summary.get("wall_s") or self.wall_s or 0.0  # the first: from the start of its fit
        return max(wall, self.recorded_s) / 3600 or None

    @cached_property
    def recorded_s(self) -> float:
        """Seconds of the run that its records explain: start-up, steps and validation."""
        return self.startup["s"] + (self.epoch_s or 0.0) * (self.epochs_done or 0.0)

    @cached_property
    def hours_per_epoch(self) -> float | None:
        return self.hours / self.epochs_done if self.epochs_done and self.hours else None

    # -- the teacher ---------------------------------------------------------------------------------------------------
    @cached_property
    def _teacher(self) -> dict[str, Any]:
        return (self.run.config.get("model") or {}).get("teacher") or {}

    @cached_property
    def cached(self) -> bool:
        """Whether the run has a cache of the teacher's answers: as measured (``auto``), else as set."""
        setting = self._teacher.get("cache") in (True, "on", "only")  # YAML 1.1 reads a bare on as a truth value
        return self.header.get("cached", setting)

    @cached_property
    def has_pixels(self) -> bool:
        """Whether the run keeps the pixels of its views."""
        return bool(self.header.get("pixels"))

    @cached_property
    def views(self) -> int:
        return self._teacher.get("cache_views") or CACHE_VIEWS

    @cached_property
    def computed_share(self) -> float:
        """Of the run's batches, those whose answers the teacher computed: the others were read from a cache."""
        cache = self.run.summary.get("cache") if self.cached else None
        counts = [cache] if cache and "answers_read" in cache else list((cache or {}).values())
        read, computed = (sum(c[f"answers_{what}"] for c in counts) for what in ("read", "computed"))
        if read + computed:
            return computed / (read + computed)
        return min(1.0, self.views / (self.epochs_done or self.epochs)) if self.cached else 1.0

    @cached_property
    def teacher_ms(self) -> float | None:
        """Ms of the teacher in a step that computes its answers; ``None``: no step has."""
        return self.phases.get("teacher", 0.0) / self.computed_share if self.computed_share else None

    @cached_property
    def views_before(self) -> float:
        done = self.epochs_done or self.epochs
        known = self.cached and math.isfinite(done)
        return max(0.0, min(self.views, done) - self.computed_share * done) if known else 0.0

    @cached_property
    def cache_bytes(self) -> float | None:
        """A checksum, the largest logit, all logits and features in half precision, for each view of each picture."""
        data = self.run.summary.get("data")
        if not data:
            return None
        kept = self._teacher.get("cache_topk")
        answer = 8 + (4 * kept if kept else 2 * data["classes"]) + self.header.get("feature_bytes", 0)
        return data["train"] * min(self.views, self.epochs) * answer

    # -- what was learnt -----------------------------------------------------------------------------------------------
    def best_val(self, student: str = "") -> float | None:
        """The task's main metric of the student that is exported; while the run trains, its best value so far."""
        exported = self.run.model_of(student).get("best_val") or {}
        if "status" in self.run.summary and self.run.primary in exported:
            return exported[self.run.primary]
        column = f"{student}/val/{self.run.primary}" if student else f"val/{self.run.primary}"
        known = [row[column] for row in self.run.metrics if column in row]
        best = min if less_is_better(self.run.primary) else max
        return best(known) if known else None
