"""How a step grows with the batch and with the processes: fitted to short runs, then carried on to more machines.

A step is one process's compute (fixed, and for each picture) and the communication that shows, by the alpha-beta model
of rings (Thakur et al., "Optimization of collective communication operations in MPICH", IJHPCA 2005).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, mean

PARTS = ("teacher", "forward", "backward", "rest")
# times that (n - 1) / n of the gradients' bytes leave each process in a step: an all-reduce is two; ZeRO also sends the
# updated weights; FSDP gathers the weights twice and scatters the gradients
PASSES = {"ddp": 2, "zero": 3, "fsdp": 3}

PARAMETERS = 2  # of a line: two readings are on it whatever they are


@dataclass(frozen=True)
class ShortRun:
    """What one short run has recorded."""

    strategy: str
    """A key of :data:`PASSES`."""
    processes: int
    """Processes that took part."""
    batch: int
    """Pictures of each process."""
    parts: dict[str, float]
    """Median milliseconds of a step by part (:data:`PARTS`)."""
    exposed: float
    """Milliseconds of a step spent waiting for gradients."""
    sent_mb: float | None = None
    """MB that this machine sent over its network devices (loopback too), a process and step; None: not recorded."""
    memory_mb: float | None = None
    """A process's peak."""
    state_mb: float | None = None
    """Weights, gradients and optimizer state of the students, by process."""
    spread: float = 0.0
    """Spread of its steps as a share of the median: half of the range of the middle two thirds."""

    def slower(self) -> "ShortRun":
        """The same run with each time longer by its steps' spread: one end of what it may have measured."""
        times = 1 + self.spread
        return replace(
            self,
            parts={name: ms * times for name, ms in self.parts.items()},
            exposed=self.exposed * times,
        )

    @property
    def step_ms(self) -> float:
        """Milliseconds of a median step: all parts, and the wait for gradients."""
        return sum(self.parts.values()) + self.exposed


@dataclass(frozen=True)
class Line:
    """Time as a line in the batch: ``fixed + each * pictures``, in ms."""

    fixed: float
    """Milliseconds whatever the batch."""
    each: float
    """Milliseconds a picture."""

    def __call__(self, pictures: float) -> float:
        return self.fixed + self.each * pictures


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares through ``(pictures, ms)``; neither part is below 0. Of one batch size all is taken as its own."""
    x, y = zip(*points, strict=True)
    each, fixed = linear_regression(x, y) if len({*x}) > 1 else (mean(y) / mean(x), 0.0)
    if each < 0:
        return Line(mean(y), 0.0)
    return (
        Line(fixed, each)
        if fixed >= 0
        else Line(0.0, sum(a * b for a, b in points) / sum(a * a for a, _ in points))
    )


@dataclass(frozen=True)
class RingCost:
    """Time of one ring all-reduce's message: ``alpha_ms`` and a cost per MB sent."""

    alpha_ms: float
    """Milliseconds of a message."""
    ms_per_mb: float
    """Milliseconds for each MB that one process sends."""

    def pass_ms(self, members: int, mb: float) -> float:
        """One pass of ``mb`` around: an all-reduce is two."""
        return (members - 1) * self.alpha_ms + (members - 1) / members * mb * self.ms_per_mb


def fit_ring(times: Sequence[tuple[int, float, float]]) -> RingCost:
    """Alpha and beta of measured all-reduces ``(processes, MB, ms)``, relative least squares; neither is below 0."""
    rows = [(2 * (n - 1) / ms, 2 * (n - 1) / n * mb / ms) for n, mb, ms in times]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, a1, b1 = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    if alpha < 0:
        return RingCost(0.0, b1 / bb)
    return RingCost(alpha, beta) if beta >= 0 else RingCost(a1 / aa, 0.0)


@dataclass(frozen=True)
class Talk:
    """How much of a strategy's communication is visible in a step."""

    overlap: float
    """Share of the backward pass that hides communication, in 0..1."""
    fixed_ms: float
    """Milliseconds in addition (pieces, waiting for the slowest)."""

    def shown(self, ring_ms: float, backward_ms: float) -> float:
        """Milliseconds of a step that communication adds.

        Args:
            ring_ms: of the communication by itself.
            backward_ms: of the backward pass, which hides a share of it.
        """
        return max(0.0, ring_ms - self.overlap * backward_ms) + self.fixed_ms


def fit_talk(points: Sequence[tuple[float, float, float]]) -> Talk:
    """Of ``(ring ms, backward ms, ms that showed)``: the overlap whose rest is most even; 0 fixed at least."""

    def error(overlap: float) -> tuple[float, Talk]:
        rest = [shown - max(0.0, ring - overlap * backward) for ring, backward, shown in points]
        talk = Talk(overlap, max(0.0, sum(rest) / len(rest)))
        return sum((talk.shown(r, b) - s) ** 2 for r, b, s in points), talk

    return min(
        (error(step / 50) for step in range(51)), key=lambda found: (found[0], found[1].overlap)
    )[1]


def serial_part(times: Sequence[tuple[int, float]]) -> float:
    """Amdahl's serial part of ``(processes, ms)`` at one global batch; the first is of one process."""
    alone = next(ms for n, ms in times if n == 1)
    rows = [(1 - 1 / n, ms / alone - 1 / n) for n, ms in times if n > 1]
    return min(1.0, max(0.0, sum(a * b for a, b in rows) / sum(a * a for a, _ in rows)))


@dataclass(frozen=True)
class Network:
    """Between machines."""

    gbit: float = 100.0
    """Gbit/s that one machine sends."""
    given: bool = False
    """Whether the user gave it; else it is assumed, and the band holds half and double of it."""
    latency_ms: float = 0.05
    """Assumed milliseconds of a message."""


@dataclass(frozen=True)
class Model:
    """A recipe's step with one strategy, fitted to short runs on one machine."""

    strategy: str
    """A key of :data:`PASSES`."""
    rates: dict[str, Line]
    """Time by part, of one process on a full machine."""
    ring: RingCost
    """All-reduce inside a machine."""
    talk: Talk
    """How much of the communication is visible."""
    gradient_mb: float
    """Gradients of all students."""
    processes: int
    """Processes of a full machine."""
    error: float | None
    """Largest deviation from what was measured, as a share; None: no more readings than parameters."""
    shaken: tuple["Model", ...] = ()
    """The same, fitted with one reading longer by its steps' spread."""

    def compute_ms(self, batch: float) -> float:
        """Milliseconds that a process computes for a batch of its own, without communication."""
        return sum(line(batch) for line in self.rates.values())

    def step_ms(
        self, processes: int, batch: float, machines: int = 1, network: Network | None = None
    ) -> float:
        """A step of ``processes`` on each of ``machines``, ``batch`` pictures each."""
        if processes * machines == 1:
            return self.compute_ms(batch)
        ring = PASSES[self.strategy] * self.ring.pass_ms(processes, self.gradient_mb)
        if machines > 1:
            between = network or Network()
            outer = RingCost(between.latency_ms, 8 / between.gbit)
            ring += PASSES[self.strategy] * outer.pass_ms(machines, self.gradient_mb)
        return self.compute_ms(batch) + self.talk.shown(ring, self.rates["backward"](batch))

    def band(self, batch: float, machines: int, network: Network) -> tuple[float, float, float]:
        """Milliseconds of a step on so many machines: best, expected, worst (model's error, steps' spread)."""
        rates = (1.0, 1.0, 1.0) if network.given else (2.0, 1.0, 0.5)
        rate = [Network(network.gbit * times, True, network.latency_ms) for times in rates]
        best, middle, worst = (self.step_ms(self.processes, batch, machines, r) for r in rate)
        moved = (
            other.step_ms(self.processes, batch, machines, rate[1]) - middle
            for other in self.shaken
        )
        spread, error = math.sqrt(sum(ms * ms for ms in moved)), self.error or 0.0
        return max(0.0, best * (1 - error) - spread), middle, worst * (1 + error) + spread


def fit(readings: Sequence[ShortRun], strategy: str, ring: RingCost, gradient_mb: float) -> Model:
    """The model of one strategy: compute as ``ddp`` has it on a full machine, all beyond it is communication."""
    model = _fit(readings, strategy, ring, gradient_mb)
    shaken = ([r.slower() if r is one else r for r in readings] for one in readings if one.spread)
    return replace(
        model, shaken=tuple(_fit(other, strategy, ring, gradient_mb) for other in shaken)
    )


def _fit(readings: Sequence[ShortRun], strategy: str, ring: RingCost, gradient_mb: float) -> Model:
    most = max(r.processes for r in readings)
    full = [r for r in readings if r.processes == most and r.strategy == "ddp"]
    rates = {part: fit_line([(r.batch, r.parts[part]) for r in full]) for part in PARTS}
    bare = Model(strategy, rates, ring, Talk(0.0, 0.0), gradient_mb, most, None)
    own = [r for r in readings if r.strategy == strategy and r.processes > 1]

    def shown(r: ShortRun) -> float:
        return r.exposed if strategy == "ddp" else max(0.0, r.step_ms - bare.compute_ms(r.batch))

    talking = [PASSES[strategy] * ring.pass_ms(r.processes, gradient_mb) for r in own]
    talk = fit_talk(
        [(t, rates["backward"](r.batch), shown(r)) for t, r in zip(talking, own, strict=True)]
    )
    fitted = replace(bare, talk=talk)
    error = max(abs(fitted.step_ms(r.processes, r.batch) / r.step_ms - 1) for r in own)
    return replace(fitted, error=error if len(own) > PARAMETERS else None)
