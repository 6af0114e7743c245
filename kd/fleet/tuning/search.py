"""The search: asks for values, runs trials beside each other, stops poor ones early, remembers everything."""

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

from filelock import FileLock

from kd.errors import UserError
from kd.fleet.tuning.plan import SearchPlan, difference
from kd.fleet.tuning.space import item, short
from kd.fleet.tuning.study import Study
from kd.fleet.tuning.trials import WITH_SEARCH, Pool, Slot, TrialRun, epoch_values, lock_trial
from kd.progress import bar
from kd.run.train_first import train_teacher_first
from kd.settings import teachers_in
from kd.storage.writing import file_for, guard, make_folder

say = partial(print, flush=True)
"""Prints a line at once, also into a pipe."""
ENDED = ("complete", "pruned", "failed")
"""States of trials that have ended."""
TOO_LONG = "took too long"
"""Why a trial was stopped that took longer than ``trial_hours``."""
MAKES_THE_RULE = 5
"""So many failures and nothing else: the search itself is wrong."""


class Search:
    """One process's part in a search; others, here or on other machines, may work in the same folder.

    Args:
        plan: the search.
        slots: the places where trials can run.
        changed: called with the search after each trial that has ended, in this process: writes ``best.yaml``.
    """

    def __init__(
        self, plan: SearchPlan, slots: Sequence[Slot], changed: Callable[["Search"], None]
    ) -> None:
        """Begins a search in its folder, or opens the one that is there; arguments as of the class.

        Raises:
            UserError: the folder's search has other settings.
        """
        self.plan = plan
        self.changed = changed
        # what is in the recipe's folder may be a stranger's
        make_folder(guard(plan.folder, within=plan.folder.parents[1]))
        self.lock = FileLock(
            file_for(plan.folder / "ask.lock")
        )  # one process at a time draws values
        with self.lock:
            directions = [objective.direction for objective in plan.objectives]
            self.study = Study(
                plan.folder, directions, plan.sampler, plan.pruner, plan.epochs, plan.config["seed"]
            )
            now = plan.settings()
            changed_setting = difference(self.study.begun_with(now), now)
            if changed_setting:
                raise UserError(
                    f"name: the search in {plan.folder} was begun with {changed_setting}; give the same "
                    "settings to resume it, or name=OTHER to begin another"
                )
        self.pool = Pool(slots, plan.hours)
        self.extra: list[str] = []  # settings that all trials share beside the plan's
        self.shown = bar(label="all trials", total=0, disable=True)

    def run(self) -> None:
        """Searches until the trials or the hours are used up.

        Raises:
            Stopped: by SIGTERM or SIGINT; the running trials have saved, and the same command resumes them.
            UserError: the first trials have all failed.
        """
        self.extra = _shared(self.plan)
        self.shown = bar(label="all trials", unit=" trials", total=self.plan.trials)
        try:
            self.pool.run(self._begin, self._has_ended)
        finally:
            self.shown.close()

    def _begin(self, slot: Slot) -> TrialRun | None:
        """Starts a trial on a place: first one that an ended process has left, then a new one; None where none is left.

        Values are drawn under the folder's lock, so that no two processes take the same trial.
        """
        with self.lock:
            drawn = self._take_over() or self._new()
        if drawn is None:
            return None
        trial, chosen, owner = drawn
        folder = self.plan.folder_of(trial.number)
        recipe = self.plan.config["recipe"]
        job = TrialRun(folder, recipe, slot, owner, trial=trial, chosen=chosen)
        values = [item(key, value) for key, value in chosen.items()]
        job.begin([*self.plan.items, *self.extra, *values])
        return job

    def _take_over(self) -> tuple[Any, dict[str, Any], IO[str]] | None:
        """A trial that has begun and that no process runs any more, since its search was stopped or killed.

        Returns:
            The trial, its values by key, and its lock; None without any.
        """
        for frozen in self.study.trials("running"):
            owner = lock_trial(self.plan.folder_of(frozen.number))
            if owner is not None:
                return (*self.study.again(frozen.number, self.plan.space), owner)
        return None

    def _new(self) -> tuple[Any, dict[str, Any], IO[str]] | None:
        """A new trial, its values by key, and its lock; None where the search has all its trials."""
        drawn = len(self.study.trials())
        if self.study.exhausted or drawn >= self.plan.trials:
            return None
        trial, chosen = self.study.ask(self.plan.space)
        folder = self.plan.folder_of(trial.number)
        owner = lock_trial(folder)
        assert owner is not None, "a new trial's folder is nobody's"
        return trial, chosen, owner

    def _has_ended(self, job: TrialRun) -> bool:
        """Reports new metrics of a trial, and stops a poor or slow one; records one that has ended.

        Raises:
            UserError: :data:`MAKES_THE_RULE` trials or more have failed, and no other has ended.
        """
        ended = job.status is not None  # read before the metrics, which are whole then
        self._report(job)
        hours = (time.monotonic() - job.began) / 3600
        if self.plan.trial_hours and hours > self.plan.trial_hours:
            job.stop(TOO_LONG)
        if not ended or self._begins_timing(job):
            return False
        if not self._record(job):
            return True
        self.shown.clear()
        say(self.line(job))
        self.shown.update(len(self.study.trials(*ENDED)) - self.shown.n)
        self.changed(self)
        failed = self.study.trials("failed")
        if len(failed) >= MAKES_THE_RULE and not self.study.trials("complete", "pruned"):
            reason = failed[-1].user_attrs.get("reason")
            raise UserError(f"the first {len(failed)} trials failed, the last: {reason}")
        return True

    def _begins_timing(self, job: TrialRun) -> bool:
        """Whether a finished run is now timed, for an objective of latency."""
        done = job.status == 0 and not job.stopped and job.summary().get("status") == "done"
        return done and self.plan.wants_latency and job.time_student()

    def _report(self, job: TrialRun) -> None:
        """Reports the metric of each new epoch (from 1) to the pruner, which may stop the trial.

        Only with one objective that is a validation metric: no other is known at each epoch.
        """
        objective = self.plan.objectives[0]
        if len(self.plan.objectives) > 1 or not objective.name.startswith("val/"):
            return
        reported = self.study.trial(job.trial.number).intermediate_values
        for epoch, value in epoch_values(job.run, objective.name):
            if epoch in reported:
                continue
            job.trial.report(value, epoch)
            can_stop = epoch < self.plan.epochs and not job.stopped
            if can_stop and job.trial.should_prune():
                job.stop("pruned")

    def _record(self, job: TrialRun) -> bool:
        """Records how a trial has ended; whether it was recorded.

        Finished, and timed where an objective is latency: complete. Ended by the pruner's stop: pruned. Stopped for
        :data:`TOO_LONG`, ended with an error, or killed by somebody else: failed. One that was stopped with the search,
        and then was ended by that or had finished without being timed, is not recorded: it stays running, and the next
        search resumes it.
        """
        summary = job.summary()
        finished = job.status == 0 and summary.get("status") == "done"
        by_signal = job.status in (130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
        notes = {
            "folder": str(job.run),
            "wall_s": summary.get("wall_s"),
            "epochs": summary.get("epochs"),
        }
        if finished and (job.has_latency or not self.plan.wants_latency):
            values = [objective.value(job.run) for objective in self.plan.objectives]
            self.study.tell(job.trial, "complete", values=values, notes=notes)
        elif job.stopped == "pruned" and by_signal:
            self.study.tell(job.trial, "pruned", values=None, notes=notes)
        elif job.stopped == WITH_SEARCH and (by_signal or finished):
            return False
        else:
            reason = job.reason()
            if job.stopped == TOO_LONG:
                reason = f"took longer than trial_hours={self.plan.trial_hours}"
            self.study.tell(job.trial, "failed", values=None, notes={"reason": reason, **notes})
        return True

    def line(self, job: TrialRun) -> str:
        """One line for people: how a trial that is recorded has ended, with which values, and how far the search is."""
        trial = self.study.trial(job.trial.number)
        state = trial.state.name
        if state == "FAIL":
            result = f"failed: {trial.user_attrs['reason']}"
        elif state == "PRUNED":
            values = list(trial.intermediate_values.values())
            result = f"stopped early: {self._values(values[-1:])}"
        else:
            result = self._values(trial.values)
        words = [f"{key}={short(value)}" for key, value in job.chosen.items()]
        settings = " ".join(words)
        so_far = self.progress()
        return f"trial {trial.number}: {result} ({settings}); {so_far}"

    def _values(self, values: Sequence[float]) -> str:
        """Values of the objectives, with their names; of a trial that was stopped, the first alone or none."""
        named = zip(self.plan.objectives, values, strict=False)
        return ", ".join(f"{objective.name} {value:.4g}" for objective, value in named)

    def progress(self) -> str:
        """How many trials have ended, and the best so far where there is one."""
        text = f"{len(self.study.trials(*ENDED))} of {self.plan.trials} ended"
        best = self.study.best()
        return f"{text}, best trial {best[0].number}" if best else text


def _shared(plan: SearchPlan) -> list[str]:
    """Settings of the teacher that are found out once for all trials, as ``key=value``.

    A recipe without a teacher's checkpoint trains one here, before the first trial. [] without a teacher, or where a
    trial may have another one since its settings or the data are searched. With a teacher it prints what the trials share.
    """
    specs = list(teachers_in(plan.config["model"]).values())
    if not specs:
        return []
    searched = any(space.key.startswith(("model.teacher", "data.source")) for space in plan.space)
    typed = [*plan.items, *(f"{space.key}=" for space in plan.space)]
    teacher = []
    if not searched:
        for key, value in train_teacher_first(plan.config, typed, plan.trusted).items():
            teacher.append(f"{key}={value or 'null'}")
    answers = "computed by each (model.teacher.cache=on: read by all trials of one data setting)"
    if all(spec["cache"] in (True, "on", "only") for spec in specs):
        answers = "read by all trials of one data setting"
    say(f"kd-tune: the teacher's answers are {answers}")
    return teacher
