"""The search: draws values, runs trials beside each other, stops poor ones early, remembers everything."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import IO, Any

from filelock import FileLock

from kd.errors import UserError
from kd.fleet.tuning.plan import SearchPlan, first_difference
from kd.fleet.tuning.results import write_best
from kd.fleet.tuning.study import Study, Trial
from kd.fleet.tuning.trials import (
    SIGNALS,
    WITH_SEARCH,
    Pool,
    Slot,
    TrialRun,
    epoch_values,
    lock_trial,
)
from kd.report.metric import short
from kd.run.request import as_word
from kd.run.train_first import train_teacher_first
from kd.settings import teachers_in
from kd.storage.writing import file_for, guard, make_folder

say = partial(print, flush=True)
"""Prints a line at once, also into a pipe."""
TOO_LONG = "took too long"
"""Why a trial was stopped that took longer than ``trial_hours``."""
MAKES_THE_RULE = 5
"""So many failures and nothing else: the search itself is wrong."""


class Search:
    """One process's part in a search; others, here or on other machines, may work in the same folder.

    Args:
        plan: the search.
        slots: the places where trials can run.
    """

    def __init__(self, plan: SearchPlan, slots: Sequence[Slot]) -> None:
        """Begins a search in its folder, or opens the one that is there; arguments as of the class.

        Raises:
            UserError: the folder's search has other settings.
        """
        self.plan = plan
        # what is in the recipe's folder may be a stranger's
        make_folder(guard(plan.folder, within=plan.folder.parents[1]))
        # one process at a time draws values
        self.lock = FileLock(file_for(plan.folder / "ask.lock"))
        with self.lock:
            directions = [objective.direction for objective in plan.objectives]
            self.study = Study(
                plan.folder,
                directions,
                plan.options.sampler,
                plan.pruner,
                plan.epochs,
                plan.config["seed"],
            )
            now = plan.settings()
            changed_setting = first_difference(self.study.begun_with(now), now)
            if changed_setting:
                raise UserError(
                    f"name: the search in {plan.folder} was begun with {changed_setting}; give the same "
                    "settings to resume it, or name=OTHER to begin another"
                )
        self.pool = Pool(slots)
        self.extra: list[str] = []  # settings that all trials share beside the plan's

    def run(self) -> None:
        """Searches until the trials are used up; ``best.yaml`` is written after each trial.

        Raises:
            Stopped: by SIGTERM or SIGINT; the running trials have saved, and the same command resumes them.
            UserError: the first trials have all failed.
        """
        self.extra = _teacher_of_all(self.plan)
        self.pool.run(self._begin)
        write_best(self.study, self.plan, self.extra)

    def _begin(self, slot: Slot) -> tuple[TrialRun, Iterator[None]] | None:
        """Takes a trial for a place: first one that an ended process has left, then a new one; None where none is left.

        Returns the trial's run and its steps (:meth:`_trial`), of which none is made yet. Values are drawn under the
        folder's lock, so that no two processes take the same trial.
        """
        with self.lock:
            drawn = self._left_over() or self._new()
        if drawn is None:
            return None
        trial, chosen, owner = drawn
        folder = self.plan.folder_of(trial.number)
        job = TrialRun(folder, self.plan.config["recipe"], slot, owner)
        return job, self._trial(job, trial, chosen)

    def _left_over(self) -> tuple[Trial, dict[str, Any], IO[str]] | None:
        """A trial that has begun and that no process runs any more, since its search was stopped or killed.

        Returns:
            The trial, its values by key, and its lock; None without any.
        """
        for frozen in self.study.trials("running"):
            owner = lock_trial(self.plan.folder_of(frozen.number))
            if owner is not None:
                return (*self.study.again(frozen.number, self.plan.space), owner)
        return None

    def _new(self) -> tuple[Trial, dict[str, Any], IO[str]] | None:
        """A new trial, its values by key, and its lock; None where the search has all its trials."""
        drawn = len(self.study.trials())
        if self.study.exhausted or drawn >= self.plan.options.trials:
            return None
        trial, chosen = self.study.ask(self.plan.space)
        owner = lock_trial(self.plan.folder_of(trial.number))
        assert owner is not None, "a new trial's folder is nobody's"
        return trial, chosen, owner

    def _trial(self, job: TrialRun, trial: Trial, chosen: dict[str, Any]) -> Iterator[None]:
        """A trial from its start to its record; yields while its process runs. A recorded trial is printed, and
        ``best.yaml`` is written.

        Args:
            job: its run.
            trial: Optuna's.
            chosen: its values by key.

        Raises:
            UserError: :data:`MAKES_THE_RULE` trials or more have failed, and no other has ended.
        """
        began = time.monotonic()
        values = [as_word(key, value) for key, value in chosen.items()]
        training = job.train([*self.plan.items, *self.extra, *values])
        timing = job.time_student() if self.plan.wants_latency else ()
        for _ in chain(training, timing):
            self._report(job, trial)
            hours = (time.monotonic() - began) / 3600
            if self.plan.options.trial_hours and hours > self.plan.options.trial_hours:
                job.stop(TOO_LONG)
            yield
        self._report(job, trial)
        if not self._record(job, trial):
            return
        say(self._line(trial.number, values))
        write_best(self.study, self.plan, self.extra)
        failed = self.study.trials("failed")
        if len(failed) >= MAKES_THE_RULE and not self.study.trials("complete", "pruned"):
            reason = failed[-1].user_attrs.get("reason")
            raise UserError(f"the first {len(failed)} trials failed, the last: {reason}")

    def _report(self, job: TrialRun, trial: Trial) -> None:
        """Reports the metric of each new epoch (from 1) to the pruner, which may stop the trial.

        Only with one objective that is a validation metric: no other is known at each epoch.
        """
        if not self.plan.is_known_by_epoch:
            return
        reported = self.study.trial(trial.number).intermediate_values
        for epoch, value in epoch_values(job.run, self.plan.objectives[0].name):
            if epoch in reported:
                continue
            trial.report(value, epoch)
            if epoch < self.plan.epochs and trial.should_prune():
                job.stop("pruned")

    def _record(self, job: TrialRun, trial: Trial) -> bool:
        """Records how a trial has ended; returns whether it was recorded.

        Finished, and timed where an objective is latency: complete. Ended by the pruner's stop: pruned. Stopped for
        :data:`TOO_LONG`, ended with an error or without a number for an objective, or killed by somebody else: failed. One
        that was stopped with the search, and then was ended by that or had finished without being timed, is not recorded: it
        stays running, and the next search resumes it.
        """
        by_signal = job.poll() in SIGNALS
        notes = {"folder": str(job.run)}
        if job.is_done and (job.has_latency or not self.plan.wants_latency):
            values = [objective.value(job.run) for objective in self.plan.objectives]
            if any(map(math.isnan, values)):
                notes["reason"] = "an objective is not known, or NaN"
                self.study.tell(trial, "failed", None, notes)
            else:
                self.study.tell(trial, "complete", values, notes)
        elif job.stopped == "pruned" and by_signal:
            self.study.tell(trial, "pruned", None, notes)
        elif job.stopped == WITH_SEARCH and (by_signal or job.is_done):
            return False
        else:
            reason = job.reason()
            if job.stopped == TOO_LONG:
                reason = f"took longer than trial_hours={self.plan.options.trial_hours}"
            self.study.tell(trial, "failed", None, {"reason": reason, **notes})
        return True

    def _line(self, number: int, settings: Sequence[str]) -> str:
        """One line for people: how a trial that is recorded has ended, and how far the search is."""
        trial = self.study.trial(number)
        result = trial.state.name.lower()
        if result == "fail":
            result = f"failed: {trial.user_attrs['reason']}"
        elif result == "complete":
            reached = zip(self.plan.objectives, trial.values, strict=True)
            result = ", ".join(f"{objective.name} {short(value)}" for objective, value in reached)
        words = " ".join(settings)
        return f"trial {number}: {result} ({words}); {self.progress()}"

    def progress(self) -> str:
        """How many trials have ended, and the best so far where there is one."""
        ended = len(self.study.trials("complete", "pruned", "failed"))
        text = f"{ended} of {self.plan.options.trials} ended"
        best = self.study.best()
        if best:
            text += f", best trial {best[0].number}"
        return text


OF_TEACHER = ("model.teacher", "data.source", "data.on_bad_image", "data.val_fraction=", "seed=")
"""How searched keys begin that change what a teacher learns from: one trained for other splits has seen a trial's
validation pictures."""


def _teacher_of_all(plan: SearchPlan) -> list[str]:
    """Settings, as ``key=value``, that give all trials the teacher of ``model.teacher.recipe``, found or trained before the
    first trial (:func:`train_teacher_first`, which also raises).

    [] where that gives none, or where a search changes the teacher or the pictures that it may learn from
    (:data:`OF_TEACHER`): then each trial finds or trains its own.
    """
    searched = [f"{space.key}=" for space in plan.space]
    if any(word.startswith(OF_TEACHER) for word in searched):
        return []
    if not teachers_in(plan.config["model"]):
        return []
    found = train_teacher_first(plan.config, plan.trusted)
    return [as_word(key, value) for key, value in found.items()]
