"""Numbers of a run, each worked out once from its records. Limits, rules and pages read them; none reads records."""

import math
from dataclasses import dataclass
from functools import cached_property

from kd.report.metric import less_is_better
from kd.report.ratio import Number, known, ratio
from kd.report.records import percentile
from kd.report.step_facts import COMPUTING, StepFacts, Swing, phase_share
from kd.report.tables import Parts, results_of
from kd.storage.elsewhere import Json

CACHE_VIEWS = 4  # of each picture, that a teacher's cache keeps by default
STUDENT_PHASES = ("student", "forward", "loss", "backward", "optimizer")
"""Phases of the student's own training."""
DATA_WAIT_AT = 0.1  # of the step waits for its batch
SWINGS = 1.5  # a computing phase swings from this ratio of its percentiles
MUCH_OF_A_STEP = 0.25
FEWEST_SWINGING = 20
SUMMED = ("batches", "busy_s", "mb")  # of a data machine, over all training processes
BUSY = 0.7  # makers that work for less of the time are held up by something else


@dataclass(frozen=True)
class TierFacts:
    """The tier over a run, of all training processes together."""

    machines: int
    """Machines that were there at the end."""
    cores: int
    """Of these."""
    makers: int
    """Processes on these that were ready to make batches, for all training processes."""
    batches: int
    """Made between the first reading and the last, also by machines that have gone."""
    busy_s: float
    """Seconds that makers worked, added up."""
    mb: float
    """MB that were sent."""
    seconds: float
    """Between the first reading and the last, of the training process that was read longest."""
    may_ask: int
    """Batches that a training process, the first of these, may have requested and not used, at the end."""
    ranks: int
    """Training processes with two readings or more."""

    @property
    def busy(self) -> float:
        """Share of the time that the makers worked, in 0..1."""
        return min(1.0, ratio(self.busy_s, self.makers * self.seconds))


class Facts(StepFacts):
    """What a run's records say of its steps, its machines, its length and what it learnt."""

    @cached_property
    def tier(self) -> TierFacts | None:
        """The machines that made the batches, of all ranks together; None without a data tier, or where no rank has two
        readings.

        Counts of a machine grow from reading to reading; what was made is the difference of the newest and the first one.
        """
        by_rank = [readings for readings in self.run.tier.values() if len(readings) > 1]
        if not by_rank:
            return None

        here = {one["node"]: one for one in by_rank[0][-1]["machines"] if not one["gone"]}
        sums: Json = dict.fromkeys([*SUMMED, "makers"], 0)
        for first, *_, last in by_rank:
            for name in SUMMED:
                sums[name] += sum(machine[name] for machine in last["machines"])
                sums[name] -= sum(machine[name] for machine in first["machines"])
            sums["makers"] += sum(one["makers"] for one in last["machines"] if one["node"] in here)
        return TierFacts(
            machines=len(here),
            cores=sum(machine["cores"] for machine in here.values()),
            **sums,
            seconds=max(readings[-1]["t"] - readings[0]["t"] for readings in by_rank),
            may_ask=by_rank[0][-1]["may_ask"],
            ranks=len(by_rank),
        )

    # -- the run's length ----------------------------------------------------------------------------------------------
    @cached_property
    def batches_per_epoch(self) -> float:
        """Batches of an epoch that one training process takes; infinite where the data set has no end, or nothing says."""
        return self.header.get("batches_per_epoch") or math.inf

    @cached_property
    def epochs(self) -> float:
        """Epochs that the run is to have, by ``max_epochs`` or ``max_steps``, whichever comes first.

        Infinite where neither limits them, or steps alone do and an epoch's length is not known. An epoch's last batch ends
        a step, whether or not so many batches as ``accumulate`` have come.
        """
        trainer = self.run.config.get("trainer") or {}
        max_epochs = self.header.get("max_epochs", trainer.get("max_epochs"))
        max_steps = self.header.get("max_steps")
        batches_a_step = self.header.get("accumulate", 1)
        steps_an_epoch = math.ceil(ratio(self.batches_per_epoch, batches_a_step))  # 0: not known
        limits = [max_epochs or 0, ratio(max_steps or 0, steps_an_epoch)]
        positive = [limit for limit in limits if limit > 0]
        return min(positive, default=math.inf)

    @cached_property
    def epochs_done(self) -> Number:
        """Epochs that the run has trained so far, with the part of one that is not finished; None: nothing is known."""
        if not (self.steps and math.isfinite(self.batches_per_epoch)):
            return self.run.summary.get("epochs")
        newest = self.steps[-1]
        done = ratio(newest["step"] + 1, self.batches_per_epoch)
        epoch = newest.get("epoch", math.floor(done))
        # outside of its epoch in a run that was resumed with more or fewer batches an epoch
        return min(max(done, epoch), epoch + 1)

    @cached_property
    def startup(self) -> Json:
        """The newest start: ``s``, seconds until the first step was done (0: not recorded); ``parts``, seconds by part."""
        return self.run.event("startup") or {"s": 0.0, "parts": {}}

    @cached_property
    def startup_s(self) -> float:
        """Seconds until the first step was done; 0: not recorded."""
        return float(self.startup["s"])

    @cached_property
    def wall_s(self) -> Number:
        """Seconds from the process's start, from which start-up is measured too, to its newest record.

        None where the records or the start-up are missing.
        """
        header_t = self.header.get("t")
        if header_t is None or not self.startup_s:
            return None
        newest_t: float = self.total.get("t") or header_t
        if self.steps:
            newest_t = max(newest_t, self.steps[-1]["t"])
        # The header is written before the first step, whose seconds are part of the start-up.
        first_step_s = self.startup["parts"].get("first step", 0.0)
        return self.startup_s + max(0.0, newest_t - header_t - first_step_s)

    @cached_property
    def epoch_s(self) -> Number:
        """Seconds an epoch with its validation, from the mean step and the epoch's length; None where one is not known."""
        batch_ms = self.step_ms + self.phases.get("validation", 0.0)
        if not batch_ms or not math.isfinite(self.batches_per_epoch):
            return None
        return batch_ms * self.batches_per_epoch / 1000

    @cached_property
    def planned_s(self) -> Number:
        """Seconds of the whole run from the process's start: so far, or as planned where it still trains; None: unknown."""
        if self.left_s is None or self.epoch_s is None:
            return self.wall_s
        return max(self.wall_s or 0.0, self.startup_s + self.epoch_s * self.epochs)

    @cached_property
    def left_s(self) -> Number:
        """Seconds until the end of a run that trains; None for a finished run, without a limit or steps, or where an epoch's
        length is not known.
        """
        if self.has_ended or self.epoch_s is None or not math.isfinite(self.epochs):
            return None
        return max(0.0, self.epoch_s * (self.epochs - (self.epochs_done or 0.0)))

    @cached_property
    def has_ended(self) -> bool:
        """Whether the run has a status; one that trains or was killed has none."""
        return "status" in self.run.summary

    @cached_property
    def results(self) -> dict[str, Parts]:
        """What commands have measured of the present weights, by name; what is left out is noted in the records."""
        return results_of(self.run.folder, self.run.notes.append)

    @cached_property
    def images_per_s(self) -> Number:
        """Pictures a second of all processes, from the mean step without validation; None without steps or batch size."""
        pictures = self.header.get("batch_size", 0) * self.header.get("world_size", 1)
        return ratio(1000 * pictures, self.step_ms) or None

    @cached_property
    def price(self) -> Number:
        """Price of an hour of the whole job, as the run had it from a number or a table; None: not given."""
        monitor = self.run.config.get("monitor") or {}
        return self.header.get("price_per_hour", monitor.get("price_per_hour"))

    @cached_property
    def devices(self) -> int:
        """Training processes of all machines; each has a GPU, or trains on CPUs."""
        return self.header.get("world_size") or self.run.summary.get("world_size") or 1

    @cached_property
    def length(self) -> Number:
        """Epochs of the whole run: as many as it had, or is to have where it still trains; of a run without a limit those so
        far; None: nothing is known.
        """
        if self.has_ended or not math.isfinite(self.epochs):
            return self.epochs_done
        return self.epochs

    @cached_property
    def hours(self) -> Number:
        """Hours of the run: once it has ended ``wall_s`` of its summary; else hours so far, by the larger of :attr:`wall_s`
        and :attr:`recorded_s`. None where nothing is known.
        """
        of_fit = self.has_ended and self.run.summary.get("wall_s")
        return (of_fit or max(self.wall_s or 0.0, self.recorded_s)) / 3600 or None

    @cached_property
    def recorded_s(self) -> float:
        """Seconds of the run that its records explain: start-up, steps and validation."""
        return self.startup_s + (self.epoch_s or 0.0) * (self.epochs_done or 0.0)

    # -- the teacher ---------------------------------------------------------------------------------------------------
    @cached_property
    def _teacher(self) -> Json:
        return (self.run.config.get("model") or {}).get("teacher") or {}

    @cached_property
    def cached(self) -> bool:
        """Whether the run has a cache of the teacher's answers: as measured (``auto``), else as set."""
        # YAML 1.1 reads a bare on as a truth value
        return self.header.get("cached", self._teacher.get("cache") in (True, "on", "only"))

    @cached_property
    def has_pixels(self) -> bool:
        """Whether a cache holds the pictures' pixels too."""
        return bool(self.header.get("pixels"))

    @cached_property
    def views(self) -> int:
        """Views of each picture that a cache keeps."""
        return self._teacher.get("cache_views") or CACHE_VIEWS

    @cached_property
    def computed_share(self) -> float:
        """Share of the run's answers that the teacher computed, 0 to 1; the others were read from a cache.

        As counted at the end of a run in one part; of any other, as its epochs and the cache's views would have it: a part
        counts its own answers alone.
        """
        if not self.cached:
            return 1.0
        starts = [event for event in self.run.events if event["name"] == "startup"]
        resumed = len(starts) > len(self.run.headers)
        cache = {} if resumed else self.run.summary.get("cache") or {}
        by_teacher = [cache] if "answers_read" in cache else cache.values()
        computed = sum(counts["answers_computed"] for counts in by_teacher)
        answers = computed + sum(counts["answers_read"] for counts in by_teacher)
        if answers:
            return ratio(computed, answers)
        return min(1.0, ratio(self.views, self.epochs_done or self.epochs))

    @cached_property
    def has_teacher(self) -> bool:
        """Whether a teacher answers in the training."""
        return bool(self._teacher) or "teacher" in self.phases

    @cached_property
    def teacher_ms(self) -> Number:
        """Ms of the teacher in a step that computes its answers; ``None``: no step has."""
        if not self.computed_share:
            return None
        return ratio(self.phases.get("teacher", 0.0), self.computed_share)

    @cached_property
    def views_before(self) -> float:
        """Views that were in the cache before the run; 0 without a cache, or where no epochs are known.

        They are the views that its epochs needed, less those that the teacher computed.
        """
        epochs = self.epochs_done or self.epochs
        if not self.cached or not math.isfinite(epochs):
            return 0.0
        return max(0.0, min(self.views, epochs) - self.computed_share * epochs)

    @cached_property
    def cache_bytes(self) -> Number:
        """Bytes of a full cache, with the answers in half precision; None before the run's end.

        Of each view of each picture: 8 bytes for a checksum and the largest logit; 2 for each class, or 4 for each of
        the largest ``cache_topk`` with its class; and the features. A run with fewer epochs than views fills one view an
        epoch.
        """
        data = self.run.summary.get("data")
        if not data:
            return None
        largest = self._teacher.get("cache_topk")
        logits_bytes = 4 * largest if largest else 2 * data["classes"]
        answer_bytes = 8 + logits_bytes + self.header.get("feature_bytes", 0)
        return data["train"] * min(self.views, self.epochs) * answer_bytes

    @cached_property
    def swing(self) -> Swing | None:
        """The computing phase with the widest spread (p95 less p5, ms), of those that take :data:`MUCH_OF_A_STEP` or more.

        None unless its p95 over p50, or its p50 over p5, is at least :data:`SWINGS`; also with fewer than
        :data:`FEWEST_SWINGING` usual steps.

        A cached teacher's phase is left out: some steps compute answers and others read them.
        """
        if len(self.usual_steps) < FEWEST_SWINGING:
            return None
        swings = []
        for name in COMPUTING:
            varies_anyway = name == "teacher" and self.cached
            if phase_share(self.phases, name) >= MUCH_OF_A_STEP and not varies_anyway:
                times = [step["p"].get(name, 0.0) for step in self.usual_steps]
                swings.append(Swing(name, *(percentile(times, q) for q in (5, 50, 95))))
        if not swings:
            return None
        widest = max(swings, key=lambda swing: swing.high - swing.low)
        above = ratio(widest.high, max(widest.middle, 1e-6))
        below = ratio(widest.middle, max(widest.low, 1e-6))
        return widest if max(above, below) >= SWINGS else None

    # -- what was learnt -----------------------------------------------------------------------------------------------
    def best_val(self) -> Number:
        """The task's main metric of the student that is exported; while the run trains, its best value so far.

        None where it was not validated, or always was NaN.
        """
        metric = self.run.primary
        exported = known((self.run.student.get("best_val") or {}).get(metric))
        if self.has_ended and exported is not None:
            return exported
        best = min if less_is_better(metric) else max
        column = f"val/{metric}"
        values = (row.get(column, math.nan) for row in self.run.metrics)
        return best((value for value in values if not math.isnan(value)), default=None)

    def exports_its_start(self) -> bool:
        """Whether the student is exported as it was before the first step (best epoch 0).

        The run chooses that where each epoch was worse by more than the metric's error.
        """
        student = self.run.student
        best = student.get("best_val") or {}
        return bool(student.get("start_val")) and best.get("epoch") == 0
