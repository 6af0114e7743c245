"""Asks the rules about a run while it trains, and acts where one fires or the run's budget is spent."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from tqdm import tqdm

from kd.callbacks.closing import Closing
from kd.callbacks.preemption import Preemption
from kd.callbacks.run_folder import RunFolder
from kd.errors import first_line
from kd.report.records import Writer
from kd.run.settings import Action
from kd.storage.elsewhere import json_of

TRIES = 3  # of a webhook
WAITS_S = 10.0  # for its answer
PAUSE_S = 1.0  # before its second try


class Watch(Closing):
    """Every ``every_s`` seconds on rank 0 the rules read the run's records, in a process of their own.

    A rule that fires is written to ``records/watch.jsonl`` once; its action, where it has one, follows: ``log`` prints
    it, ``webhook`` posts it as JSON, ``stop`` saves a checkpoint and ends the run with the status ``stopped: <rule>``.
    A step waits for none of it.
    """

    def __init__(
        self,
        folder: RunFolder,
        preemption: Preemption,
        every_s: float = 60.0,
        actions: dict[str, Action] | None = None,
        webhook: str | None = None,
        hours: float | None = None,
        budget: float | None = None,
        price_per_hour: float | None = None,
    ) -> None:
        self._preemption = preemption
        self.folder, self.every_s, self.actions, self.webhook = folder, every_s, actions or {}, webhook
        limits = {"MaxHours": hours, "BudgetSpent": budget / price_per_hour if budget and price_per_hour else None}
        self.hours = {name: limit for name, limit in limits.items() if limit is not None}
        self.limits = {"MaxHours": f"{hours} hours", "BudgetSpent": f"a budget of {budget}"}
        self._earlier_s = 0.0
        self._fired = set[str]()
        self._end, self._writing = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._began = time.monotonic()
        self.newest: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        assert self.folder.path is not None
        self._writer = Writer(self.folder.path / "records" / "watch.jsonl", {"of": "watch"})
        self._trainer = trainer
        self._end.clear()
        self._threads = [threading.Thread(target=self._keep_limits, name="kd-limits", daemon=True)]
        if self.every_s:
            watch = threading.Thread(target=self._watch, args=(self.folder.path,), name="kd-watch", daemon=True)
            self._threads.append(watch)
        for thread in self._threads:
            thread.start()

    def _watch(self, folder: Path) -> None:
        while not self._end.wait(self.every_s):
            self.newest = ask_rules(folder) or self.newest
            for finding in self.newest.get("findings", []):
                self._act(finding["rule"], finding["text"], finding["lever"], self.actions.get(finding["rule"]))

    def _keep_limits(self) -> None:
        """Time and budget, in a thread that waits for nothing else."""
        left = {name: 3600 * limit for name, limit in self.hours.items()}
        while left and not self._end.wait(max(0.0, min(left.values()) - self._spent_s())):
            name = min(left, key=lambda name: left[name])
            del left[name]
            self._act(name, f"{self.limits[name]} spent", "kd-train resume=RUN with more of it", "stop")

    def _spent_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began

    def _act(self, rule: str, text: str, lever: str, action: Action | None) -> None:
        """What a rule does the first time it fires; what it could not do is reported and ends nothing else."""
        if rule in self._fired:
            return
        self._fired.add(rule)
        if action == "stop":  # whatever fails below
            self._preemption.stop_for(rule)
        event = {"rule": rule, "text": text, "lever": lever, "action": action, "step": self._trainer.global_step}
        if action is not None:
            tqdm.write(f"kd-train: {rule}: {text}; {lever}", file=sys.stderr)
        try:
            with self._writing:
                self._writer.write({"kind": "event", "name": "finding", "t": round(time.time(), 1), **event})
            if action == "webhook" and self.webhook is not None:
                post(self.webhook, {"run": str(self.folder.path), "host": socket.gethostname(), **event})
        except Exception as error:
            key = "monitor.webhook" if action == "webhook" else "monitor"
            tqdm.write(f"kd-train: {key}: {rule}: {first_line(error)}", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        return {"spent_s": self._spent_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._earlier_s = state_dict["spent_s"]

    def close(self, trainer: Trainer) -> None:
        if not self._threads:
            return
        self._end.set()
        for thread in self._threads:
            thread.join(timeout=TRIES * WAITS_S)
        self._threads = []
        with self._writing:
            self._writer.close()


def ask_rules(folder: Path) -> dict[str, Any]:
    """``verdict`` and ``findings`` so far, computed in another process; empty where that fails."""
    command = [sys.executable, "-m", "kd.report", str(folder)]
    paths = os.pathsep.join(p for p in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if p)
    try:
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, timeout=300)
        return dict(json_of(done.stdout))
    except (OSError, TypeError, ValueError, subprocess.SubprocessError):
        return {}


def post(address: str, content: dict[str, Any]) -> None:
    """Posts JSON, up to :data:`TRIES` times."""
    body = json.dumps(content).encode()
    for attempt in range(TRIES):
        try:
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=WAITS_S):
                return
        except Exception as error:
            if attempt + 1 == TRIES:
                raise OSError(f"{address}: {first_line(error)}") from error
            time.sleep(PAUSE_S * 2**attempt)
