"""The search: asks for values, runs trials beside each other, stops poor ones early, remembers everything."""

import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from filelock import FileLock

from kd.errors import Stopped, UserError
from kd.fleet.tuning.plan import SearchPlan, difference
from kd.fleet.tuning.space import item, short
from kd.fleet.tuning.study import Study
from kd.fleet.tuning.trials import TrialPlace, TrialRun, epoch_values, lock_trial
from kd.machine import signals_kept
from kd.report.metric import duration
from kd.run.build import teachers_in
from kd.run.run import settings_of
from kd.run.train_first import teacher_settings
from kd.storage.writing import make_folder

say = partial(print, flush=True)
POLL_S = 0.2
TOO_LONG = "took too long"
MAKES_THE_RULE = 5  # so many failures and nothing else: the search itself is wrong


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
    """One process's part in a search; others, here or on other machines, may work in the same folder."""

    def __init__(
        self, plan: SearchPlan, free: Sequence[TrialPlace], changed: Callable[["Search"], None]
    ) -> None:
        self.plan, self.changed = plan, changed
        make_folder(plan.folder)
        self.lock = FileLock(plan.folder / "ask.lock")
        with self.lock:
            directions = [objective.direction for objective in plan.objectives]
            self.study = Study(
                plan.folder, directions, plan.sampler, plan.pruner, plan.epochs, plan.config["seed"]
            )
            now = plan.settings()
            if changed_one := difference(self.study.begun_with(now), now):
                raise UserError(
                    f"name: the search in {plan.folder} was begun with {changed_one}; give the same "
                    "settings to resume it, or name=OTHER to begin another"
                )
        self.free, self.places = list(free), len(free)
        self.running: list[Running] = []
        self.going: list[TrialRun] = []
        self.stopped_by: int | None = None
        self.began = time.monotonic()
        self.seconds: list[float] = []
        self.extra: list[str] = []

    def run(self) -> None:
        """Searches until the trials or the hours are used up.

        Raises:
            Stopped: by SIGTERM or SIGINT; the running trials have saved, and the same command resumes them.
            UserError: the first trials have all failed.
        """
        with signals_kept(self._on_signal):
            self.extra = _shared(self.plan)
            try:
                while True:
                    self._watch()
                    self._fill()
                    if not self.running or self._ends_early():
                        break
                    time.sleep(POLL_S)
            finally:  # a full disk, too, leaves no process
                for job in self.jobs():
                    job.stop("the search failed")
                for job in self.jobs():
                    job.wait()

    def _ends_early(self) -> bool:
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

    def folder_of(self, number: int) -> Path:
        """The folder of trial ``number``."""
        return self.plan.folder / "trials" / f"{number:04d}"

    def _fill(self) -> None:
        while self.free and self.stopped_by is None:
            with self.lock:
                next_one = self._taken_over() or self._new()
            if next_one is None:
                return
            trial, chosen, owner = next_one
            job = TrialRun(
                self.folder_of(trial.number), self.plan.config["recipe"], self.free.pop(0), owner
            )
            values = [item(key, value) for key, value in chosen.items()]
            self.running.append(Running(trial, chosen, job))
            job.begin([*self.plan.items, *self.extra, *values])

    def _taken_over(self) -> tuple[Any, dict[str, Any], IO[str]] | None:
        for frozen in self.study.trials("running"):
            owner = lock_trial(self.folder_of(frozen.number))
            if owner is not None:
                return (*self.study.again(frozen.number, self.plan.space), owner)
        return None

    def _new(self) -> tuple[Any, dict[str, Any], IO[str]] | None:
        if self.study.exhausted or len(self.study.trials()) >= self.plan.trials:
            return None
        trial, chosen = self.study.ask(self.plan.space)
        owner = lock_trial(self.folder_of(trial.number))
        assert owner is not None, "a new trial's folder is nobody's"
        return trial, chosen, owner

    def _watch(self) -> None:
        for running in list(self.running):
            ended = running.job.status is not None  # read before the metrics, which are whole then
            self._report(running)
            if (
                self.plan.trial_hours
                and time.monotonic() - running.job.began > 3600 * self.plan.trial_hours
            ):
                running.job.stop(TOO_LONG)
            if ended and not self._goes_on(running.job):
                self._end(running)

    def _goes_on(self, job: TrialRun) -> bool:
        """Whether a finished run is now timed, for an objective of latency."""
        done = job.status == 0 and not job.stopped and job.summary().get("status") == "done"
        return done and self.plan.wants_latency and job.time_student()

    def _report(self, running: Running) -> None:
        if len(self.plan.objectives) > 1 or not self.plan.objectives[0].name.startswith("val/"):
            return
        known = self.study.trial(running.trial.number).intermediate_values
        for epoch, value in epoch_values(running.job.run, self.plan.objectives[0].name):
            if epoch in known:
                continue
            running.trial.report(value, epoch)
            if (
                epoch < self.plan.epochs
                and not running.job.stopped
                and running.trial.should_prune()
            ):
                running.job.stop("pruned")

    def _end(self, running: Running) -> None:
        job, summary = running.job, running.job.summary()
        by_signal = job.status in (130, 143, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
        notes = {
            "folder": str(job.run),
            "wall_s": summary.get("wall_s"),
            "epochs": summary.get("epochs"),
        }
        whole = summary.get("status") == "done" and not (
            self.plan.wants_latency and not job.has_latency
        )
        if job.status == 0 and whole:
            values = [objective.value(job.run) for objective in self.plan.objectives]
            self.study.tell(running.trial, "complete", values, notes)
        elif job.stopped == "pruned" and by_signal:
            self.study.tell(running.trial, "pruned", None, notes)
        elif not by_signal or job.stopped in ("", TOO_LONG):
            too_long = f"took longer than trial_hours={self.plan.trial_hours}"
            reason = too_long if job.stopped == TOO_LONG else job.reason()
            self.study.tell(running.trial, "failed", None, {"reason": reason, **notes})
        self.running.remove(running)
        self.free.append(job.slot)
        job.owner.close()
        if job.stopped in ("", "pruned", TOO_LONG):
            self.seconds.append(
                max(time.monotonic() - job.began, summary.get("wall_s") or 0.0)
            )  # it may be resumed
            say(self.line(running))
            self.changed(self)

    def line(self, running: Running) -> str:
        """A trial that has ended, and how far the search is."""
        trial = self.study.trial(running.trial.number)
        state = {"COMPLETE": "", "PRUNED": "stopped early: ", "FAIL": "failed: "}[trial.state.name]
        if trial.state.name == "FAIL":
            value = trial.user_attrs["reason"]
        else:
            numbers = trial.values or list(trial.intermediate_values.values())[-1:]
            value = ", ".join(
                f"{o.name} {v:.4g}" for o, v in zip(self.plan.objectives, numbers, strict=False)
            )
        chosen = " ".join(f"{key}={short(v)}" for key, v in running.chosen.items())
        return f"trial {trial.number}: {state}{value} ({chosen}); {self.progress()}"

    def progress(self) -> str:
        """One line: how many trials have ended, the best so far, the time left."""
        done = self.study.trials("complete", "pruned", "failed")
        ended, total = len(done), self.plan.trials
        best = self.study.best()
        so_far = f", best trial {best[0].number}" if best else ""
        took = self.seconds or [
            t.user_attrs["wall_s"] for t in done if t.user_attrs.get("wall_s")
        ]  # before a resume
        left = statistics.mean(took) * max(0, total - ended) / self.places if took else math.inf
        if self.plan.hours is not None:
            left = min(left, max(0.0, 3600 * self.plan.hours - (time.monotonic() - self.began)))
        return f"{ended} of {total} ended{so_far}" + (
            f", about {duration(left)} left" if math.isfinite(left) else ""
        )

    def _end_all(self, why: str) -> None:
        """Stops all trials and waits until they have saved: no process is left over."""
        for running in self.running:
            running.job.stop(why)
        while self.running:
            self._watch()
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first lets trials save; a second Ctrl-C waits for none of them."""
        if self.stopped_by is not None and number == signal.SIGINT:
            for job in self.jobs():
                job.patience_s = 0
        self.stopped_by = self.stopped_by or number

    def jobs(self) -> list[TrialRun]:
        """All jobs that this process holds: those that end, and those that run."""
        return [*self.going, *(running.job for running in self.running)]

    def wait(self, jobs: Sequence[TrialRun], items: Sequence[Sequence[str]]) -> None:
        """Runs jobs to their ends, as many at a time as there are places.

        Raises:
            Stopped: by a signal; they have saved.
        """
        waiting, free = list(zip(jobs, items, strict=True)), list(self.free)
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
    specs = list(teachers_in(plan.config["model"]).values())
    if not specs:
        return []
    searched = any(space.key.startswith(("model.teacher", "data.source")) for space in plan.space)
    typed = [*plan.items, *(f"{space.key}=" for space in plan.space)]
    found = {} if searched else teacher_settings(plan.config, typed, settings_of)
    teacher = [f"{key}={value or 'null'}" for key, value in found.items()]
    answers = "computed by each (model.teacher.cache=on: read by all trials of one data setting)"
    if all(spec["cache"] in (True, "on", "only") for spec in specs):
        answers = "read by all trials of one data setting"
    say(f"kd-tune: the teacher is measured once for all trials; its answers are {answers}")
    return teacher
