"""Where a step's time goes: a clock that always runs for exactly one phase. Likewise the parts of a run's start."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import kd
from kd.report.records import PHASES

# the phase of all that no other one covers: callbacks, loggers, the training loop itself; in a loop without Lightning
# (kd.Monitor) that phase is "rest"
REST = "logging"
ASIDE = "outside of the step: "
"""How the ranges of scopes begin in kernel profiles."""
PENDING = 64  # ended steps that may wait for the device; at so many, take() waits for the oldest


@dataclass
class StepTimes:
    """Where the time of one training step went."""

    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds by phase (:data:`PHASES`, and scopes such as ``validation``), on the device's clock where there is
    one, else on the host's."""
    host_ms: float = 0.0
    """Milliseconds from the step's start to its end, on the host's clock, scopes such as ``validation`` included."""
    data_cpu_ms: float = 0.0
    """Milliseconds of CPU time of the training thread while it waited for (or made) the batch."""
    ready_ms: float = 0.0
    """Milliseconds that the training thread was ready to run and waited for a free core, outside of scopes (Linux; else
    0)."""
    data_ready_ms: float = 0.0
    """The part of ``ready_ms`` that fell into the wait for the batch."""
    launch_ms: float = 0.0
    """Milliseconds on the host's clock in the phases of a step other than ``data``."""
    t: float = 0.0
    """Unix time of the end, in seconds, on the host."""
    tag: Any = None
    """What the caller gave to :meth:`Clock.cut`."""


class Clock:
    """Attributes time to the innermost open phase; phases therefore add up to the step.

    On a GPU each change of phase records an event, and a phase's time is the device's time between two events: a wait for
    data counts only while the device is idle, and kernels count in the phase that launched them. :meth:`take` reads events
    steps later; it waits for the device only where the caller wants it or :data:`PENDING` steps are outstanding.

    Inside a *scope* (``validation``; :meth:`within`) all time counts as the scope in place of the open phase, but for
    ``checkpoint``.

    All its methods are called in the thread that trains, but for :meth:`turn`. A step lasts from one :meth:`cut`, or from
    :meth:`restart`, to the next cut.

    Args:
        event: makes an event of the GPU (``torch.cuda.Event(enable_timing=True)``), called when none is left to use
            again; None: the host's clock alone counts.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        """Begins the first step, in the phase :data:`REST`. The clock belongs to the thread that makes it.

        On Linux it keeps the kernel's file about that thread open, until :meth:`close`.

        Args:
            event: as of the class.
        """
        self._make_event = event
        self.ranges: Any = None  # such as ``torch.cuda.nvtx``: what is entered is pushed, and popped when it is left
        self._spare: list[Any] = []  # events to record again
        self._open = [REST]  # phases, the innermost last
        self.scope: str | None = None
        self._range_of_scope = ExitStack()
        self._thread = threading.get_ident()
        self._schedstat: int | None = None
        # the kernel's account of this thread (Documentation/scheduler), in ns
        account = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        with suppress(OSError):
            self._schedstat = os.open(account, os.O_RDONLY)
        # ended steps: the event at the start, then each phase with the event at its end
        self._pending: deque[tuple[StepTimes, Any, list[tuple[str, Any]]]] = deque()
        self._finished: list[StepTimes] = []
        self._begin()

    def _begin(self) -> None:
        """Begins a step: all times count from here; the open phases and the scope stay."""
        self._start = self._last = time.perf_counter()
        self._last_cpu = time.thread_time()
        ready_ms = self._ready_ms()
        # the step's ready_ms counts from here; waits inside a scope are added, so that they do not count
        self._ready = ready_ms
        self._ready_aside = ready_ms  # the account when the scope last changed
        self._data_ready = ready_ms  # the account when a wait for data began
        self._step = StepTimes()
        self._host = dict[str, float]()
        self._marks: list[tuple[str, Any]] = []
        self._first_event = self._event()

    def _ready_ms(self) -> float:
        """Milliseconds that the clock's thread was ready to run and waited for a free core, since the thread began; 0
        without Linux's account.
        """
        if self._schedstat is not None:
            return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e6
        return 0.0

    def close(self) -> None:
        """Closes the kernel's file that the clock reads; to be called after the last step, as ``ready_ms`` of a later one
        would be wrong.
        """
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def restart(self) -> None:
        """Begins a step anew: the time since the last cut is forgotten, and all open phases are closed. An open scope stays
        open, and steps that have ended stay for :meth:`take`.
        """
        self._open = [REST]
        self._begin()

    def _event(self) -> Any:
        """An event, recorded on the device's stream now; used ones are recorded again. None without a device."""
        if self._make_event is None:
            return None
        if self._spare:
            event = self._spare.pop()
        else:
            event = self._make_event()
        event.record()
        return event

    def _mark(self) -> None:
        """Adds the host's time since the last mark to the open phase, in ms. Called just before the phase or the scope
        changes, and at a step's end.

        Inside a scope the time counts to the scope, except in the phase ``checkpoint``. On a GPU it also records the event
        from which :meth:`take` gets the phase's time there. The CPU time and the wait for a core of the phase ``data`` are
        added only in the clock's own thread: DDP's hook calls this in autograd's thread.
        """
        now = time.perf_counter()
        phase = self._open[-1]
        if self.scope and phase != "checkpoint":
            phase = self.scope
        spent = 1000 * (now - self._last)
        self._last = now
        self._host[phase] = self._host.get(phase, 0.0) + spent
        if threading.get_ident() == self._thread:
            cpu = time.thread_time()
            if phase == "data":
                self._step.data_cpu_ms += 1000 * (cpu - self._last_cpu)
                self._step.data_ready_ms += self._ready_ms() - self._data_ready
            self._last_cpu = cpu
        if self._make_event is not None:
            self._marks.append((phase, self._event()))

    def enter(self, phase: str) -> None:
        """Opens a phase inside the current one; time counts for the innermost alone, until :meth:`leave`.

        Args:
            phase: one of :data:`PHASES`; one inside itself makes no mark. It is also pushed as a range (``monitor.nvtx``).
        """
        changes = phase != self._open[-1]
        if changes:
            self._mark()
        self._open.append(phase)
        if changes:
            self._data_begins()
        if self.ranges is not None:
            self.ranges.range_push(phase)

    def leave(self) -> None:
        """Closes the innermost phase, and its range; the phase around it continues. Where only the outermost is open,
        nothing happens.
        """
        if len(self._open) > 1:
            changes = self._open[-1] != self._open[-2]
            if changes:
                self._mark()
            self._open.pop()
            if changes:
                self._data_begins()
            if self.ranges is not None:
                self.ranges.range_pop()

    def turn(self, phase: str) -> None:
        """Ends the innermost phase and begins ``phase`` in its place; where none was entered, in place of the outermost.

        DDP's hook calls this from autograd's thread, for the communication at the end of the backward pass. The profiler of
        the training loop calls it with ``data`` for the loader's start, and with the outermost phase once a batch has come.
        Ranges (``monitor.nvtx``) stay as they are.
        """
        self._mark()
        self._open[-1] = phase
        self._data_begins()

    def _data_begins(self) -> None:
        """Where the innermost phase is now ``data``, its waits for a core (``data_ready_ms``) count from here on.

        Called after each change of phase or scope.
        """
        if self._open[-1] == "data":
            self._data_ready = self._ready_ms()

    def within(self, scope: str | None) -> None:
        """Opens a scope: from now on all time counts as ``scope`` (``validation``), except in the phase ``checkpoint``.

        A scope is no phase of the step, but :attr:`StepTimes.host_ms` includes its time. None ends the scope, and the open
        phase counts again. Scopes do not nest: a second one replaces the first, and after None no scope is open. Where
        torch's profiler records, a scope is a range there (:data:`ASIDE`).
        """
        self._mark()
        self._leave_scope_out()
        self.scope = scope
        self._data_begins()
        self._range_of_scope.close()
        if scope is not None and torch.autograd._profiler_enabled():
            self._range_of_scope.enter_context(torch.profiler.record_function(ASIDE + scope))

    def _leave_scope_out(self) -> None:
        """Takes the waits for a core since the last call out of the step's ``ready_ms``, where they fell into a scope.

        Called where a scope begins or ends, and at a step's end. Reads the account into ``_ready_aside`` in any case.
        """
        ready = self._ready_ms()
        if self.scope is not None:
            self._ready += ready - self._ready_aside
        self._ready_aside = ready

    def cut(self, tag: object = None) -> None:
        """Ends a step, and begins the next one; :meth:`take` then returns the ended step, on a GPU once the device has
        reached its end.

        It waits for nothing. Open phases stay open.

        Args:
            tag: whatever the caller wants to find at the step's times (:attr:`StepTimes.tag`), such as its number.
        """
        self._mark()
        step = self._step
        host = self._host
        step.t = time.time()
        step.tag = tag
        step.host_ms = 1000 * (self._last - self._start)
        self._leave_scope_out()
        step.ready_ms = self._ready_aside - self._ready
        step.launch_ms = sum(
            ms for phase, ms in host.items() if phase in PHASES and phase != "data"
        )
        if self._make_event is None:
            step.phases = host
            self._finished.append(step)
        else:
            self._pending.append((step, self._first_event, self._marks))
        self._begin()

    def take(self, wait: bool = False) -> list[StepTimes]:
        """Ended steps whose times are known, oldest first; each is returned once. On a GPU ``phases`` has its times.

        Args:
            wait: wait for all ended steps; else wait only while :data:`PENDING` or more are unknown, for the oldest.
        """
        while self._pending:
            step, first, marks = self._pending[0]
            if not marks[-1][1].query():  # the device has not reached the step's end
                if not wait and len(self._pending) < PENDING:
                    break
                marks[-1][1].synchronize()
            self._pending.popleft()
            before = first
            for phase, event in marks:
                step.phases[phase] = step.phases.get(phase, 0.0) + before.elapsed_time(event)
                self._spare.append(before)
                before = event
            self._spare.append(before)
            self._finished.append(step)
        done = self._finished
        self._finished = []
        return done


_called_at: float | None = None  # Unix time; None outside of kd's functions


@contextmanager
def start_counts_from_now() -> Iterator[None]:
    """Inside, :func:`run_start` returns the time at which this context was entered: the program that calls ``kd.train`` may
    be hours old. Afterwards it returns what it did before.
    """
    global _called_at
    before = _called_at
    _called_at = time.time()
    try:
        yield
    finally:
        _called_at = before


def run_start(used: bool) -> float:
    """Unix time at which a run's start began: the call of kd's function (:func:`start_counts_from_now`), else the program's
    start.

    Args:
        used: whether this process has had a run before; then, outside of kd's functions, the run's start is now.
    """
    if _called_at is not None:
        return _called_at
    return time.time() if used else process_start()


def process_start() -> float:
    """Unix time when this program began: the import of kd or the start of this process, whichever is later.

    The process may be older than the import: it may have been a shell or an installation. A process that was forked after
    the import is younger.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return max(kd._IMPORTED, psutil.Process().create_time())
    # by the process's age: the kernel's start time is off where the clock was set since
    stat = Path("/proc/self/stat").read_text()
    _, _, after_name = stat.rpartition(")")
    start_ticks = int(after_name.split()[19])  # starttime, the 22nd of all (man 5 proc)
    start_s = start_ticks / os.sysconf("SC_CLK_TCK")
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = since_boot_s - start_s
    started = time.time() - age_s
    return max(kd._IMPORTED, started)


_parts_of_the_start: list[
    tuple[str, float, float]
] = []  # name, Unix time of the beginning, seconds


class part_of_the_start(ContextDecorator):
    """Times what runs inside, as a named part of a run's start; a part within a part counts to the outer one.

    A context or a decorator; :func:`parts_of_the_start` reads the times. It counts in one thread, the one that starts.

    Args:
        name: what the report calls it.
    """

    _open = 0  # of all parts, how many are open now

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        part_of_the_start._open += 1
        self._began = time.time()

    def __exit__(self, *error: object) -> None:
        """Closes the part; of an outermost one it keeps name, beginning and seconds. Errors pass on."""
        part_of_the_start._open -= 1
        if not part_of_the_start._open:
            _parts_of_the_start.append((self.name, self._began, time.time() - self._began))


def parts_of_the_start(since: float, until: float) -> dict[str, float]:
    """Seconds by name of the parts that began at ``since`` or later and before ``until`` (Unix times); parts of one name are
    added up.
    """
    seconds: dict[str, float] = {}
    for name, began, took in _parts_of_the_start:
        if since <= began < until:
            seconds[name] = seconds.get(name, 0.0) + took
    return seconds


_running: Clock | None = None


def run_clock(clock: Clock | None) -> None:
    """Makes ``clock`` the one of this process that :class:`annotate` and :func:`outside_of_the_step` use; None: none."""
    global _running
    _running = clock


@contextmanager
def outside_of_the_step(name: str) -> Iterator[None]:
    """Counts the time of what runs inside as the scope ``name``, such as ``validation``, in place of the step's phases
    (:meth:`Clock.within`). Afterwards no scope is open, even where one was before.

    Where no clock runs (:func:`run_clock`), no time is counted.
    """
    clock = _running
    if clock is not None:
        clock.within(name)
    try:
        yield
    finally:
        if clock is not None:
            clock.within(None)


class annotate(ContextDecorator):
    """Names a part of the work, as a context or a decorator.

    The name shows in kernel profiles (``monitor.kernels_at``, ``monitor.nvtx``); ``teacher``, ``student`` and the other
    names of :data:`kd.report.records.PHASES` also become phases of the step. Costs about a microsecond without a clock or
    profiler, and nothing in a compiled graph.

    Args:
        name: of the range.

    >>> with annotate("my part"):
    ...     pass
    """

    def __init__(self, name: str) -> None:
        """Nothing is opened yet; ``name``: one of :data:`PHASES`, or any other for profilers alone."""
        self.name = name
        self._clock: Clock | None = None
        self._named: Any = None
        self._range: Any = None

    def _recreate_cm(self) -> "annotate":
        """A new object for each call of a decorated function, as the function may call itself; ``contextlib`` calls this."""
        return annotate(self.name)

    def __enter__(self) -> "annotate":
        """With a running clock (:func:`run_clock`) opens the phase of this name, with its range (``monitor.nvtx``); for a
        name that is not in :data:`PHASES` the range alone.

        Where torch's profiler records, it also opens a range there, clock or not. While torch compiles it does nothing.
        """
        if torch.compiler.is_compiling():
            return self
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(self.name).__enter__()
        if _running is not None and self.name in PHASES:
            self._clock = _running
            self._clock.enter(self.name)
        elif _running is not None and _running.ranges is not None:
            self._named = _running.ranges
            self._named.range_push(self.name)
        return self

    def __exit__(self, *error: object) -> None:
        """Closes what :meth:`__enter__` has opened, also after an error, which passes on."""
        if self._clock is not None:
            self._clock.leave()
        if self._named is not None:
            self._named.range_pop()
        if self._range is not None:
            self._range.__exit__(*error)
        self._clock = self._range = self._named = None
