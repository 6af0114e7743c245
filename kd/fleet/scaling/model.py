"""How a step grows with the batch and with the processes: a cost model, fitted to short runs on one machine.

A step of a process has two summands, ``step = compute + exposed communication``:

- compute, by part of the step, is a line in the pictures of the process: ``fixed + each * pictures``;
- communication is a ring, by the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective
  Communication Operations in MPICH" (IJHPCA 2005): one pass of ``m`` MB around ``n`` members takes
  ``(n - 1) * alpha + (n - 1) / n * m * beta``. The backward pass hides a share of it (:class:`Overlap`).

Between machines there is a second ring of the same form, whose alpha and beta come from the network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, mean

PARTS = ("teacher", "forward", "backward", "rest")
"""Parts of a step's compute."""
PASSES = {"ddp": 2, "zero": 3, "fsdp": 3}
"""How often (n - 1) / n of the gradients' bytes leave each process in a step, by strategy: an all-reduce is two passes;
ZeRO also sends the updated weights; FSDP gathers the weights twice and scatters the gradients."""

MACHINES = 2
"""Machines that a step is predicted for: a forecast goes no farther than twice what was measured."""

PARAMETERS = 2
"""Parameters of a line: two readings are on it whatever they are, so they say nothing of its error."""


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
    """Peak memory of a process in MB; None: not recorded."""
    state_mb: float | None = None
    """MB of weights, gradients and optimizer state of the students in a process; None: not recorded."""
    spread: float = 0.0
    """Spread of its steps as a share of the median: half of the range of the middle two thirds."""

    def slower(self) -> "ShortRun":
        """The same run with each time longer by its steps' spread: one end of what it may have measured.

        :func:`fit` fits the model to it as well, to see how far this run's noise moves the forecast.
        """
        factor = 1 + self.spread
        return replace(
            self,
            parts={name: ms * factor for name, ms in self.parts.items()},
            exposed=self.exposed * factor,
        )

    @property
    def step_ms(self) -> float:
        """Milliseconds of a median step: all parts, and the wait for gradients."""
        return sum(self.parts.values()) + self.exposed


# -- compute: a line in the batch ------------------------------------------------------------------


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
    """Fits a line by least squares; neither ``fixed`` nor ``each`` is below 0.

    Args:
        points: ``(pictures, ms)``. Where all have the same number of pictures, all time counts as time a picture.
    """
    pictures = [x for x, _ in points]
    times = [ms for _, ms in points]
    if len(set(pictures)) == 1:
        return Line(0.0, mean(times) / mean(pictures))
    each, fixed = linear_regression(pictures, times)
    if each < 0:  # the best line that does not fall is level
        return Line(mean(times), 0.0)
    if fixed < 0:  # the best line through the origin: each = sum(x y) / sum(x x)
        sum_xy = sum(x * ms for x, ms in points)
        sum_xx = sum(x * x for x in pictures)
        return Line(0.0, sum_xy / sum_xx)
    return Line(fixed, each)


# -- communication: a ring, and the share of it that the backward pass hides ------------------------


@dataclass(frozen=True)
class RingCost:
    """The two constants of a ring: ``alpha`` of each message and ``beta`` of each MB."""

    alpha_ms: float
    """Milliseconds of a message."""
    ms_per_mb: float
    """Beta: milliseconds for each MB that one process sends."""

    def pass_ms(self, members: int, mb: float) -> float:
        """Milliseconds of one pass of ``mb`` around ``members``; an all-reduce is two passes.

        Args:
            members: n of the equation: processes inside a machine, or machines.
            mb: m, MB of the whole message, of which each member sends (n - 1) / n.
        """
        # (n - 1) messages of m / n MB each, Thakur et al. 2005
        messages = members - 1
        return messages * self.alpha_ms + messages / members * mb * self.ms_per_mb


def fit_ring(times: Sequence[tuple[int, float, float]]) -> RingCost:
    """Fits alpha and beta to all-reduces that were timed; neither is below 0.

    The equation of an all-reduce, ``ms = alpha * 2 (n - 1) + beta * 2 (n - 1) / n * mb``, is divided by ``ms``, so
    that small and large messages weigh alike: ``1 = alpha * a + beta * b``. Least squares over all rows gives the
    normal equations

        alpha * sum(a a) + beta * sum(a b) = sum(a)
        alpha * sum(a b) + beta * sum(b b) = sum(b)

    which Cramer's rule solves.

    Args:
        times: ``(processes, MB, ms)`` of each all-reduce; at least two that differ in ``processes / MB``.
    """
    sum_a = sum_b = sum_aa = sum_bb = sum_ab = 0.0
    for n, mb, ms in times:
        a = 2 * (n - 1) / ms
        b = 2 * (n - 1) / n * mb / ms
        sum_a += a
        sum_b += b
        sum_aa += a * a
        sum_bb += b * b
        sum_ab += a * b

    determinant = sum_aa * sum_bb - sum_ab * sum_ab
    alpha = (sum_a * sum_bb - sum_b * sum_ab) / determinant
    beta = (sum_b * sum_aa - sum_a * sum_ab) / determinant
    if alpha < 0:  # beta alone: beta = sum(b) / sum(b b)
        return RingCost(0.0, sum_b / sum_bb)
    if beta < 0:  # alpha alone
        return RingCost(sum_a / sum_aa, 0.0)
    return RingCost(alpha, beta)


@dataclass(frozen=True)
class Overlap:
    """How much of a strategy's communication the backward pass hides."""

    share: float
    """Share of the backward pass that hides communication, in 0..1."""
    fixed_ms: float
    """Milliseconds that nothing hides (pieces, waiting for the slowest)."""

    def exposed_ms(self, ring_ms: float, backward_ms: float) -> float:
        """Milliseconds that communication adds to a step: ``max(0, ring - share * backward) + fixed``.

        Args:
            ring_ms: of the communication by itself.
            backward_ms: of the backward pass.
        """
        return max(0.0, ring_ms - self.share * backward_ms) + self.fixed_ms


def fit_overlap(points: Sequence[tuple[float, float, float]]) -> Overlap:
    """Fits the share, in steps of 0.02, and the fixed time by least squares; the smallest of equally good shares.

    Args:
        points: ``(ring ms, backward ms, exposed ms)`` of each run.
    """
    best = Overlap(share=0.0, fixed_ms=0.0)
    least = math.inf
    for step in range(51):  # the error is not smooth in the share: try 0, 0.02, ..., 1
        share = step / 50
        # for one share the best fixed time is the mean of what the rest of the equation leaves
        hidden = Overlap(share=share, fixed_ms=0.0)
        rest_ms = [exposed - hidden.exposed_ms(ring, back) for ring, back, exposed in points]
        overlap = Overlap(share=share, fixed_ms=max(0.0, mean(rest_ms)))
        error = 0.0
        for ring, back, exposed in points:
            error += (overlap.exposed_ms(ring, back) - exposed) ** 2
        if error < least:
            least = error
            best = overlap
    return best


def serial_part(times: Sequence[tuple[int, float]]) -> float:
    """The part of a step that more processes do not shorten, in 0..1, by Amdahl's law; 0.2: a fifth of the step.

    ``time(n) / time(1) = s + (1 - s) / n`` gives ``time(n) / time(1) - 1 / n = s * (1 - 1 / n)``, fitted by least
    squares.

    Args:
        times: ``(processes, ms)`` at one global batch; one of them of one process, and at least one of several.
    """
    single_ms = next(ms for n, ms in times if n == 1)
    dot = 0.0
    norm = 0.0
    for n, ms in times:
        if n > 1:
            x = 1 - 1 / n
            y = ms / single_ms - 1 / n
            dot += x * y
            norm += x * x
    return min(1.0, max(0.0, dot / norm))


# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Between machines."""

    gbit: float = 100.0
    """Gbit/s that one machine sends."""
    given: bool = False
    """Whether the user gave it; else it is assumed, and the band holds half and double of it."""
    latency_ms: float = 0.05
    """Assumed milliseconds of a message."""

    @property
    def ring(self) -> RingCost:
        """The ring between machines: one MB is 8 Mbit, so ``8 / gbit`` ms."""
        return RingCost(self.latency_ms, 8 / self.gbit)

    def times(self, factor: float) -> "Network":
        """A network of ``factor`` times the Gbit/s, with the same latency; it counts as given."""
        return Network(gbit=self.gbit * factor, given=True, latency_ms=self.latency_ms)


@dataclass(frozen=True)
class StepModel:
    """A recipe's step with one strategy, fitted to short runs on one machine."""

    strategy: str
    """A key of :data:`PASSES`."""
    rates: dict[str, Line]
    """Compute by part (:data:`PARTS`), of one process on a full machine."""
    ring: RingCost
    """Ring inside a machine."""
    overlap: Overlap
    """How much of the communication is hidden."""
    gradient_mb: float
    """MB of the gradients of all students."""
    processes: int
    """Processes of a full machine: the most that were measured."""
    error: float | None
    """Largest deviation of a predicted step from a measured one with several processes, as a share; None: no more
    readings than parameters."""
    perturbed: tuple["StepModel", ...] = ()
    """The same, each fitted with one reading longer by its steps' spread; for the band of :meth:`forecast`."""

    def compute_ms(self, batch: float) -> float:
        """Milliseconds that a process computes for a batch of its own, without communication."""
        return sum(line(batch) for line in self.rates.values())

    def step_ms(
        self, processes: int, batch: float, machines: int = 1, network: Network | None = None
    ) -> float:
        """Milliseconds of a step.

        Args:
            processes: on each machine.
            batch: pictures of each process.
            machines: how many.
            network: between the machines, not used with one; None: the assumed one.
        """
        compute_ms = self.compute_ms(batch)
        if processes * machines == 1:
            return compute_ms
        passes = PASSES[self.strategy]
        ring_ms = passes * self.ring.pass_ms(processes, self.gradient_mb)
        if machines > 1:
            outer_ring = (network or Network()).ring
            ring_ms += passes * outer_ring.pass_ms(machines, self.gradient_mb)
        backward_ms = self.rates["backward"](batch)
        return compute_ms + self.overlap.exposed_ms(ring_ms, backward_ms)

    def forecast(self, batch: float, network: Network) -> tuple[float, float, float]:
        """Milliseconds of a step on :data:`MACHINES` full machines: best, expected, worst.

        The band holds half and double of an assumed network, the model's largest error (0 where it is not known), and
        the spread of the measured steps: each reading's spread moves the forecast by so many ms, and independent moves
        add up in squares. The best step takes a hundredth of the expected one at least: measured times that vary by more
        than their size would have it take none.

        Args:
            batch: pictures of each process; may be a fraction.
            network: between the machines.
        """

        def step_ms(model: StepModel, between: Network) -> float:
            return model.step_ms(self.processes, batch, MACHINES, between)

        expected = step_ms(self, network)
        fast = slow = expected
        if not network.given:
            fast = step_ms(self, network.times(2.0))
            slow = step_ms(self, network.times(0.5))
        squares = 0.0
        for model in self.perturbed:
            move = step_ms(model, network) - expected
            squares += move * move
        spread = math.sqrt(squares)
        error = self.error or 0.0
        best = fast * (1 - error) - spread
        worst = slow * (1 + error) + spread
        return max(0.01 * expected, best), expected, worst


def fit(
    readings: Sequence[ShortRun], strategy: str, ring: RingCost, gradient_mb: float
) -> StepModel:
    """Fits the model of one strategy, and again with each reading longer by its spread.

    Args:
        readings: all short runs; those of ``ddp`` give the compute of every strategy. At least one of ``strategy`` has
            several processes.
        strategy: a key of :data:`PASSES`.
        ring: inside a machine.
        gradient_mb: MB of the gradients of all students.
    """
    model = _fit_once(readings, strategy, ring, gradient_mb)
    perturbed = []
    for i, reading in enumerate(readings):
        if reading.spread:
            slower = list(readings)
            slower[i] = reading.slower()
            of_slower = _fit_once(slower, strategy, ring, gradient_mb)
            perturbed.append(of_slower)
    return replace(model, perturbed=tuple(perturbed))


def _fit_once(
    readings: Sequence[ShortRun], strategy: str, ring: RingCost, gradient_mb: float
) -> StepModel:
    """Fits one strategy's model to the readings: compute from ddp on the full machine, then communication.

    ``error`` is the largest relative error of a predicted step; None where the strategy has not more
    readings with several processes than :data:`PARAMETERS`.

    Args:
        readings: of all strategies; times in ms.
        strategy: of the model.
        ring: what an all-reduce costs.
        gradient_mb: size of the gradients in MB.
    """
    # compute: as ddp has it on a full machine, where cores and memory are shared by all processes
    most = max(reading.processes for reading in readings)
    rates = {}
    for part in PARTS:
        points = []
        for reading in readings:
            if reading.processes == most and reading.strategy == "ddp":
                points.append((reading.batch, reading.parts[part]))
        rates[part] = fit_line(points)
    model = StepModel(
        strategy, rates, ring, Overlap(share=0.0, fixed_ms=0.0), gradient_mb, most, None
    )

    # communication: ddp times its waits; of the others it is what a step takes beyond its compute
    several = [r for r in readings if r.strategy == strategy and r.processes > 1]
    talk = []  # (ring ms, backward ms, exposed ms)
    for reading in several:
        ring_ms = PASSES[strategy] * ring.pass_ms(reading.processes, gradient_mb)
        backward_ms = rates["backward"](reading.batch)
        exposed_ms = reading.exposed
        if strategy != "ddp":
            exposed_ms = max(0.0, reading.step_ms - model.compute_ms(reading.batch))
        talk.append((ring_ms, backward_ms, exposed_ms))
    model = replace(model, overlap=fit_overlap(talk))

    # the error is known where there are more readings than parameters
    if len(several) <= PARAMETERS:
        return model
    largest_error = 0.0
    for reading in several:
        predicted_ms = model.step_ms(reading.processes, reading.batch)
        error = abs(predicted_ms / reading.step_ms - 1)
        largest_error = max(largest_error, error)
    return replace(model, error=largest_error)
