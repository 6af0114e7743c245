"""The search: asks for values, runs trials beside each other, stops poor ones early, remembers everything."""

import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any

from filelock import FileLock

from kd.errors import Stopped, UserError
from kd.fleet.tuning.plan import SearchPlan, difference
from kd.fleet.tuning.space import item, short
from kd.fleet.tuning.study import Study
from kd.fleet.tuning.trials import Slot, TrialRun, epoch_values, lock_trial
from kd.machine import signals_kept
from kd.progress import bar
from kd.report.metric import duration
from kd.run.needs import teachers_in
from kd.run.train_first import teacher_settings
from kd.storage.writing import guard, make_folder

say = partial(print, flush=True)
"""Prints a line at once, also into a pipe."""
POLL_S = 0.2
"""Seconds between two looks at the trials."""
ENDED = ("complete", "pruned", "failed")
"""States of trials that have ended."""
TOO_LONG = "took too long"
"""Why a trial was stopped that took longer than ``trial_hours``."""
MAKES_THE_RULE = 5
"""So many failures and nothing else: the search itself is wrong."""


@dataclass
class Running:
    """A trial that runs."""

    trial: Any
    """Optuna's trial."""
    chosen: dict[str, Any]
    """The trial's values by key."""
    job: TrialRun
    """The trial's process."""


class Search:
    """One process's part in a search; others, here or on other machines, may work in the same folder.

    Args:
        plan: the search.
        free: the places where trials can run.
        changed: called with the search after each trial that has ended, in this process: writes ``best.yaml``.
    """

    def __init__(
        self, plan: SearchPlan, free: Sequence[Slot], changed: Callable[["Search"], None]
    ) -> None:
        """Begins a search in its folder, or opens the one that is there; arguments as of the class.

        Raises:
            UserError: the folder's search has other settings.
        """
        self.plan = plan
        self.changed = changed
        guard(plan.folder.parents[1])  # what lies below the recipe's folder may be a stranger's
        make_folder(plan.folder)
        self.lock = FileLock(plan.folder / "ask.lock")  # one process at a time draws values
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
        self.free = list(free)
        self.places = len(free)
        self.running: list[Running] = []  # trials of the search
        self.going: list[TrialRun] = []  # runs that confirm the winner
        self.stopped_by: int | None = None  # number of the signal
        self.began = time.monotonic()
        self.seconds: list[float] = []  # that each ended trial took
        self.ended = 0  # trials that have ended, of all processes
        self.shown = bar(label="all trials", total=0, disable=True)
        self.extra: list[str] = []  # settings that all trials share beside the plan's

    def run(self) -> None:
        """Searches until the trials or the hours are used up.

        Raises:
            Stopped: by SIGTERM or SIGINT; the running trials have saved, and the same command resumes them.
            UserError: the first trials have all failed.
        """
        with signals_kept(self._on_signal):
            self.extra = _shared(self.plan)
            self.ended = len(self.study.trials(*ENDED))
            epochs = self.plan.trials * self.plan.epochs
            self.shown = bar(label="all trials", unit=" epochs", total=epochs)
            try:
                while True:
                    self._watch()
                    self._fill()
                    self._show()
                    if not self.running or self._must_end():
                        break
                    time.sleep(POLL_S)
            finally:  # a full disk, too, leaves no process
                self.shown.close()
                for job in self.jobs():
                    job.stop("the search failed")
                for job in self.jobs():
                    job.wait()

    def _show(self) -> None:
        """Moves the bar over the epochs of all trials; one that has ended counts as a whole."""
        metric = self.plan.objectives[0].name
        epochs = self.ended * self.plan.epochs
        for running in self.running:
            epochs += len(epoch_values(running.job.run, metric))
        if epochs > self.shown.n:
            self.shown.update(epochs - self.shown.n)
        elif sys.stderr.isatty():  # the time left goes on
            self.shown.refresh()

    def _must_end(self) -> bool:
        """Whether the hours are up. Before it returns True or raises, all running trials have saved and ended.

        Raises:
            Stopped: a signal has come.
            UserError: :data:`MAKES_THE_RULE` trials or more have failed, and no other has ended.
        """
        if self.stopped_by is not None:
            self._end_all(signal.Signals(self.stopped_by).name)
            raise Stopped(self.stopped_by)
        if self.plan.hours is not None and time.monotonic() - self.began > 3600 * self.plan.hours:
            self._end_all("its hours are up")
            return True
        failed = self.study.trials("failed")
        if len(failed) >= MAKES_THE_RULE and not self.study.trials("complete", "pruned"):
            self._end_all("the first trials failed")
            raise UserError(
                f"the first {len(failed)} trials failed, the last: {failed[-1].user_attrs.get('reason')}"
            )
        return False

    def _fill(self) -> None:
        """Starts a trial on each free place: first those that an ended process has left, then new ones.

        Values are drawn under the folder's lock, so that no two processes take the same trial.
        """
        while self.free and self.stopped_by is None:
            with self.lock:
                trial_to_run = self._take_over() or self._new()
            if trial_to_run is None:
                return
            trial, chosen, owner = trial_to_run
            folder = self.plan.folder_of(trial.number)
            recipe = self.plan.config["recipe"]
            place = self.free.pop(0)
            job = TrialRun(folder, recipe, place, owner)
            self.running.append(Running(trial, chosen, job))
            values = [item(key, value) for key, value in chosen.items()]
            job.begin([*self.plan.items, *self.extra, *values])

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
        trials = len(self.study.trials())
        if self.study.exhausted or trials >= self.plan.trials:
            return None
        trial, chosen = self.study.ask(self.plan.space)
        folder = self.plan.folder_of(trial.number)
        owner = lock_trial(folder)
        assert owner is not None, "a new trial's folder is nobody's"
        return trial, chosen, owner

    def _watch(self) -> None:
        """Reports new metrics of all trials, stops poor and slow ones, and records those that have ended."""
        for running in list(self.running):
            job = running.job
            ended = job.status is not None  # read before the metrics, which are whole then
            self._report(running)
            hours = (time.monotonic() - job.began) / 3600
            if self.plan.trial_hours and hours > self.plan.trial_hours:
                job.stop(TOO_LONG)
            if ended and not self._begins_timing(job):
                self._end(running)

    def _begins_timing(self, job: TrialRun) -> bool:
        """Whether a finished run is now timed, for an objective of latency."""
        done = job.status == 0 and not job.stopped and job.summary().get("status") == "done"
        return done and self.plan.wants_latency and job.time_student()

    def _report(self, running: Running) -> None:
        """Reports the metric of each new epoch (from 1) to the pruner, which may stop the trial.

        Only with one objective that is a validation metric: no other is known at each epoch.
        """
        objective = self.plan.objectives[0]
        if len(self.plan.objectives) > 1 or not objective.name.startswith("val/"):
            return
        reported = self.study.trial(running.trial.number).intermediate_values
        for epoch, value in epoch_values(running.job.run, objective.name):
            if epoch in reported:
                continue
            running.trial.report(value, epoch)
            can_stop = epoch < self.plan.epochs and not running.job.stopped
            if can_stop and running.trial.should_prune():
                running.job.stop("pruned")

    def _end(self, running: Running) -> None:
        """Records how a trial has ended, frees its place and its lock; then prints its line and calls :attr:`changed`.

        Finished, and timed where an objective is latency: complete. Ended by the pruner's stop: pruned. Stopped for
        :data:`TOO_LONG`, ended with an error, or killed by somebody else: failed. One that was stopped with the search,
        and then was ended by that or had finished without being timed, is not recorded: it stays running, and the next
        search resumes it. A trial that was stopped with the search is not printed, and :attr:`changed` not called.
        """
        job = running.job
        summary = job.summary()
        stopped_with_search = job.stopped not in ("", "pruned", TOO_LONG)
        finished = job.status == 0 and summary.get("status") == "done"
        by_signal = job.status in (130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
        notes = {
            "folder": str(job.run),
            "wall_s": summary.get("wall_s"),
            "epochs": summary.get("epochs"),
        }
        timed = job.has_latency or not self.plan.wants_latency
        if finished and timed:
            values = [objective.value(job.run) for objective in self.plan.objectives]
            self.study.tell(running.trial, "complete", values=values, notes=notes)
        elif job.stopped == "pruned" and by_signal:
            self.study.tell(running.trial, "pruned", values=None, notes=notes)
        elif not (stopped_with_search and (by_signal or finished)):
            reason = job.reason()
            if job.stopped == TOO_LONG:
                reason = f"took longer than trial_hours={self.plan.trial_hours}"
            self.study.tell(running.trial, "failed", values=None, notes={"reason": reason, **notes})
        self.running.remove(running)
        self.free.append(job.slot)
        job.owner.close()
        if not stopped_with_search:
            # the run may have begun before, and was resumed here
            here_s = time.monotonic() - job.began
            self.seconds.append(max(here_s, summary.get("wall_s") or 0.0))
            self.ended = len(self.study.trials(*ENDED))
            self.shown.clear()
            say(self.line(running))
            self.changed(self)

    def line(self, running: Running) -> str:
        """One line for people: how a trial that is recorded has ended, with which values, and how far the search is."""
        trial = self.study.trial(running.trial.number)
        state = trial.state.name
        if state == "FAIL":
            reason = trial.user_attrs["reason"]
            result = f"failed: {reason}"
        elif state == "PRUNED":
            values = list(trial.intermediate_values.values())
            result = f"stopped early: {self._values(values[-1:])}"
        else:
            result = self._values(trial.values)
        chosen = [f"{key}={short(value)}" for key, value in running.chosen.items()]
        settings = " ".join(chosen)
        return f"trial {trial.number}: {result} ({settings}); {self.progress()}"

    def _values(self, values: Sequence[float]) -> str:
        """Values of the objectives, with their names; of a trial that was stopped, the first alone or none."""
        words = []
        for objective, value in zip(self.plan.objectives, values, strict=False):
            words.append(f"{objective.name} {value:.4g}")
        return ", ".join(words)

    def progress(self) -> str:
        """One line: how many trials have ended, the best so far, the time left; the last two where they are known."""
        ended = self.study.trials(*ENDED)
        text = f"{len(ended)} of {self.plan.trials} ended"
        best = self.study.best()
        if best:
            text += f", best trial {best[0].number}"
        left_s = self._seconds_left(ended)
        if math.isfinite(left_s):
            text += f", about {duration(left_s)} left"
        return text

    def _seconds_left(self, ended: Sequence[Any]) -> float:
        """Seconds until the end of the search; infinite where they are not known.

        By the mean of the trials that have ended, on all places at a time; at most what is left of the hours.
        """
        seconds = self.seconds
        if not seconds:  # none has ended here yet: those before a resume
            of_runs = [trial.user_attrs.get("wall_s") for trial in ended]
            seconds = [wall_s for wall_s in of_runs if wall_s]
        left_s = math.inf
        if seconds:
            trials_left = max(0, self.plan.trials - len(ended))
            left_s = statistics.mean(seconds) * trials_left / self.places
        if self.plan.hours is not None:
            hours_left_s = 3600 * self.plan.hours - (time.monotonic() - self.began)
            left_s = min(left_s, max(0.0, hours_left_s))
        return left_s

    def _end_all(self, why: str) -> None:
        """Stops all trials and waits until they have saved: no process is left over.

        Args:
            why: becomes :attr:`kd.fleet.tuning.trials.TrialRun.stopped`.
        """
        for running in self.running:
            running.job.stop(why)
        while self.running:
            self._watch()
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT: the first lets trials save; a second Ctrl-C has them killed at once.

        It only notes the signal; the loop in :meth:`run` or :meth:`wait` acts on it.
        """
        if self.stopped_by is not None and number == signal.SIGINT:
            for job in self.jobs():
                job.patience_s = 0
        self.stopped_by = self.stopped_by or number

    def jobs(self) -> list[TrialRun]:
        """All runs that this process holds: those of :attr:`going`, and the trials."""
        return [*self.going, *(running.job for running in self.running)]

    def wait(self, jobs: Sequence[TrialRun], items: Sequence[Sequence[str]]) -> None:
        """Runs jobs to their ends, as many at a time as there are places: those that confirm the winner.

        Args:
            jobs: the runs; whether one has failed is for the caller to see. Each gets a place, and its lock is freed at
                its end.
            items: each one's words of ``kd-train``'s command line; not read of a run that is resumed.

        Raises:
            Stopped: by a signal; they have saved.
        """
        waiting = list(zip(jobs, items, strict=True))
        free = list(self.free)
        with signals_kept(self._on_signal):
            while waiting or self.going:
                while waiting and free and self.stopped_by is None:
                    job, command = waiting.pop(0)
                    job.slot = free.pop(0)
                    job.begin(command)
                    self.going.append(job)
                for job in [j for j in self.going if j.status is not None]:
                    self.going.remove(job)
                    free.append(job.slot)
                    job.owner.close()
                if self.stopped_by is not None:
                    for job in self.going:
                        job.stop("stopped")
                    if not self.going:
                        raise Stopped(self.stopped_by)
                time.sleep(POLL_S)


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
        for key, value in teacher_settings(plan.config, typed, plan.trusted).items():
            teacher.append(f"{key}={value or 'null'}")
    answers = "computed by each (model.teacher.cache=on: read by all trials of one data setting)"
    if all(spec["cache"] in (True, "on", "only") for spec in specs):
        answers = "read by all trials of one data setting"
    say(f"kd-tune: the teacher is measured once for all trials; its answers are {answers}")
    return teacher
