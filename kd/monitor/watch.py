"""Asks the rules about a run while it trains, and acts where one fires or the run's budget is spent."""

import json
import math
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pytorch_lightning import LightningModule, Trainer

from kd.callbacks.hooks import Closing
from kd.errors import UserError, first_line
from kd.machine import python
from kd.monitor.watched import Watched
from kd.report.records import Writer
from kd.settings import Action, MonitorSettings
from kd.storage.elsewhere import Json, json_of
from kd.storage.shown import HIDDEN

TRIES = 3  # of a webhook
WAITS_S = 10.0  # for its answer, each time
PAUSE_S = 1.0  # before its second try; twice as long before each later one


class Watch(Closing):
    """Every ``rules_every_s`` seconds on rank 0 the rules read the run's records, in a process of their own.

    A rule that fires is written to ``records/watch.jsonl``, and acts, once in each process that trains the run. A step waits
    for none of it.
    """

    def __init__(
        self, watched: Watched, stop_for: Callable[[str], None], spec: MonitorSettings
    ) -> None:
        """Stores the settings; the threads begin with the training.

        Args:
            watched: the training.
            stop_for: is called with the rule's name where one stops the run.
            spec: rules, actions and the budget.
        """
        self.watched = watched
        self._stop_for = stop_for
        self._spec = spec
        self._earlier_s = 0.0
        self._fired: set[str] = set()
        self._end = threading.Event()
        self._closed = False
        self._writing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._began = time.monotonic()
        self.newest: Json = {}
        """``verdict`` and ``findings``, as :func:`ask_rules` gave them last; {} before, and on other ranks than 0."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the file and starts the threads that check limits and, with ``rules_every_s``, rules; on rank 0."""
        if not trainer.is_global_zero:
            return
        self._trainer, self._folder = trainer, self.watched.folder(trainer)
        self._writer = Writer(self._folder / "records" / "watch.jsonl", {"of": "watch"})
        self._end.clear()
        self._closed = False
        self._threads = [threading.Thread(target=self._keep_limits, name="kd-limits", daemon=True)]
        if self._spec.rules_every_s:
            self._threads.append(threading.Thread(target=self._watch, name="kd-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    def _watch(self) -> None:
        """Thread: every ``rules_every_s`` seconds, applies the rules to the run's records and acts on what they find.

        Where the rules can't be applied, the findings of the time before count again.
        """
        while not self._end.wait(self._spec.rules_every_s):
            answer = ask_rules(self._folder)
            if self._closed:  # the training has ended without waiting for so long
                return
            if answer:
                self.newest = answer
            actions = self._spec.actions or {}
            for finding in self.newest.get("findings", []):
                rule = finding["rule"]
                self._act(rule, finding["text"], finding["lever"], actions.get(rule))

    def _keep_limits(self) -> None:
        """Thread: stops the run once ``max_hours`` or the ``budget`` is spent, the earlier one first.

        Time before a resume counts. The budget, in the currency of ``price_per_hour``, is turned into seconds.
        """
        hours = self._spec.max_hours
        budget = self._spec.budget
        limits = []
        if hours:
            limits.append((3600 * hours, "MaxHours", f"{hours} hours"))
        if budget and self._spec.price_per_hour:
            seconds = 3600 * budget / self._spec.price_per_hour
            limits.append((seconds, "BudgetSpent", f"a budget of {budget}"))
        for seconds, name, limit in sorted(limits):
            left_s = max(0.0, seconds - self._spent_s())
            if self._end.wait(min(left_s, threading.TIMEOUT_MAX)):
                return
            self._act(name, f"{limit} spent", self.watched.resume, "stop")

    def _spent_s(self) -> float:
        """Seconds since this was made, and those before a resume."""
        return self._earlier_s + time.monotonic() - self._began

    def _act(self, rule: str, text: str, lever: str, action: Action | None) -> None:
        """What a rule or limit does the first time it fires: writes an event and, by its action, reports, stops or posts.

        What it could not do is reported, and raises nothing. Both threads call it: the writer is used under a lock.

        Args:
            rule: its name; a second call with it does nothing.
            text: what was found.
            lever: which setting mends it.
            action: from ``monitor.actions``; None: the finding is only written to ``records/watch.jsonl``.
        """
        if rule in self._fired:
            return
        self._fired.add(rule)
        if action == "stop":  # whatever fails below
            self._stop_for(rule)
        event = {
            "rule": rule,
            "text": text,
            "lever": lever,
            "action": action,
            "step": self._trainer.global_step,
        }
        if action is not None:
            self.watched.report(f"{rule}: {text}; {lever}")
        try:
            now = round(time.time(), 1)
            with self._writing:
                self._writer.write({"kind": "event", "name": "finding", "t": now, **event})
            if action == "webhook" and self._spec.webhook is not None:
                host = socket.gethostname()
                post(self._spec.webhook, {"run": str(self._folder), "host": host, **event})
        except Exception as error:
            setting = "webhook" if action == "webhook" else ""
            self.watched.report(f"{rule}: {first_line(error)}", setting)

    def state_dict(self) -> Json:
        """``spent_s``: seconds that the run has taken, its start and those before a resume included."""
        return {"spent_s": self._spent_s()}

    def load_state_dict(self, state_dict: Json) -> None:
        """Takes the seconds spent before a resume; a UserError where they are no finite number >= 0."""
        spent_s = state_dict["spent_s"]
        is_number = isinstance(spent_s, int | float) and not isinstance(spent_s, bool)
        if not is_number or not 0 <= spent_s < math.inf:
            raise UserError(
                f"resume: the checkpoint's spent_s: must be a finite number >= 0, got {spent_s!r}"
            )
        self._earlier_s = spent_s

    def close(self, trainer: Trainer) -> None:
        """Ends the threads and closes the file; safe to call again.

        It waits for a post on its way, for each thread up to ``TRIES * WAITS_S`` seconds; what the rules find later does
        nothing.
        """
        if not self._threads:
            return
        self._end.set()
        for thread in self._threads:
            thread.join(timeout=TRIES * WAITS_S)
        self._threads = []
        self._closed = True
        with self._writing:
            self._writer.close()


def ask_rules(folder: Path) -> Json:
    """A run's ``verdict`` and ``findings`` so far, by ``python -m kd.report`` in another process; {} where that fails.

    It may take minutes, at most 300 s; the thread that calls it waits.
    """
    command = python("-m", "kd.report", str(folder))
    paths = os.pathsep.join(
        p for p in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if p
    )
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, timeout=300
        )
        return dict(json_of(done.stdout))
    except (OSError, TypeError, ValueError, subprocess.SubprocessError):
        return {}


def post(address: str, content: Json) -> None:
    """Posts JSON, up to :data:`TRIES` times with growing pauses.

    Raises:
        OSError: the last try has failed; its text has no part of the address, which may hold a secret.
    """
    body = json.dumps(content).encode()
    for attempt in range(TRIES):
        try:
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=WAITS_S):
                return
        except Exception as error:
            if attempt + 1 == TRIES:
                # the texts of other errors hold parts of the address
                is_answer = isinstance(error, urllib.error.URLError)
                reason = first_line(error) if is_answer else type(error).__name__
                raise OSError(f"{HIDDEN}: {reason}") from error
            time.sleep(PAUSE_S * 2**attempt)
