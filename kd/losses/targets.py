"""Teachers' features on one scale: a loss that regresses several of them weighs each alike.

``variance`` divides every channel by its own deviation; ``phi_s`` (:func:`phi_s`) turns and scales
all channels together.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from kd.losses.base import Float32, KnownOnHost
from kd.losses.numerics import matmul, wide
from kd.losses.ranks import in_parallel
from kd.settings import Standardization

BATCHES = 100
"""Batches of which the statistics are taken: more change little, and a moving target is harder to follow."""


class Standardizer(KnownOnHost, Float32):
    """Features of mean 0 and variance 1, by statistics of a sample (:meth:`settle`).

    ``variance`` divides each channel by its own deviation. ``phi_s`` turns and scales all channels together
    (:func:`phi_s`). Without :meth:`settle` the statistics are those of the first :data:`BATCHES`
    batches of all processes; until then ``phi_s`` only scales, by one number. After that they stay as they are. They
    are part of checkpoints, and float32 in any precision.

    Args:
        width: channels C of the features.
        kind: ``variance`` or ``phi_s``.

    Raises:
        ValueError: a width that ``phi_s`` has no rotation for.
    """

    mean: Tensor
    """``(C,)``."""
    scatter: Tensor
    """Sum over the rows of squared deviations from the mean, ``(C,)``, or of their products, ``(C, C)``."""
    turn: Tensor
    """``(C, C)``: what ``phi_s`` multiplies the centred features by; 0 until the statistics are complete."""
    rows: Tensor
    """How many feature vectors the statistics are of, float32 scalar."""
    batches: Tensor
    """How many batches, int64 scalar."""

    def __init__(self, width: int, kind: Standardization) -> None:
        """Begins without statistics; they are buffers, so checkpoints hold them.

        Args:
            width: C, channels of the teacher's features.
            kind: ``variance`` or ``phi_s``, which takes some widths alone: a ValueError for any other.
        """
        super().__init__()
        self.kind = kind
        shape = (width,) if kind == "variance" else (width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scatter", torch.zeros(shape))
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        if kind == "phi_s":
            try:
                hadamard(width)
            except ValueError as error:
                raise ValueError(
                    f"standardize=phi_s: {error}; standardize=variance takes any width"
                ) from error
            self.register_buffer("turn", torch.zeros(shape))

    def forward(self, features: Tensor) -> Tensor:
        """Standardises features ``(N, C, H, W)``, ``(N, L, C)`` or ``(N, C)`` -> the same shape, float32 at least.

        In training alone it first adds the batch to its statistics, until they are complete; with several processes all
        call it. The result has no gradient.
        """
        is_map = features.ndim == 4
        x = wide(features.detach())
        if is_map:
            x = x.movedim(1, -1)
        # after a load the host does not know yet how many batches the statistics have
        if self.known is None or (self.training and not self._is_complete):
            self._take_in(x.flatten(0, -2))
        x = self._standardized(x)
        if is_map:
            return x.movedim(-1, 1)
        return x

    def settle(self, features: Tensor) -> None:
        """Sets the statistics from a sample; later batches do not change them. Shapes as for :meth:`forward`.

        The sample is this process's alone inside :func:`kd.losses.ranks.without_gather`, else that of all processes.
        """
        self.batches.fill_(BATCHES - 1)  # the sample is the last batch that is wanted
        self.known = BATCHES - 1
        x = wide(features.detach())
        if x.ndim == 4:
            x = x.movedim(1, -1)
        self._add(x.flatten(0, -2))

    @property
    def _is_complete(self) -> bool:
        return self.known is not None and self.known >= BATCHES

    @torch.compiler.disable
    def _take_in(self, x: Tensor) -> None:
        """Adds rows ``(M, C)`` to the statistics in training, until these are complete.

        In any mode it first reads how many batches the statistics have, where the host does not know it. It runs outside of
        compiled graphs, as that number changes here.
        """
        if self.known is None:
            self.known = int(self.batches)
        if self.training and not self._is_complete:
            self._add(x)

    def _standardized(self, x: Tensor) -> Tensor:
        """``(..., C)`` by the present statistics; ``phi_s`` scales all channels alike until its statistics are
        complete.
        """
        x = x - self.mean
        if self._is_complete and self.kind == "phi_s":
            return matmul(x, self.turn.T)
        spread = self.scatter
        if self.kind != "variance":
            spread = self.scatter.diagonal().mean()
        variance = spread / self.rows.clamp_min(1)
        deviation = variance.sqrt().clamp_min(1e-6)
        return x / deviation

    @torch.no_grad()
    def _add(self, x: Tensor) -> None:
        """Adds the rows ``(M, C)`` of all processes' batches, in place. With the last batch that is wanted ``phi_s`` also
        gets its :attr:`turn`.

        With n rows of mean m so far, and k new ones of mean m': the scatter grows by the new ones' own and by
        ``(m' - m) (m' - m)' n k / (n + k)``, the mean by ``(m' - m) k / (n + k)`` (Chan, Golub and LeVeque, Updating
        Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
        """
        assert self.known is not None
        count = _sum_over_processes(x.new_full((), len(x)))
        batch_mean = _sum_over_processes(x.sum(dim=0)) / count
        within = _sum_over_processes(self._product(x - batch_mean))
        moved = batch_mean - self.mean
        total = self.rows + count
        between = self._product(moved[None]) * (self.rows * count / total)
        self.scatter += within + between
        self.mean += moved * (count / total)
        self.rows.copy_(total)
        self.batches += 1
        self.known += 1
        if self._is_complete and self.kind == "phi_s":
            covariance = self.scatter / self.rows
            self.turn.copy_(phi_s(covariance.cpu()))
            if in_parallel():  # another machine's eigenvectors may differ in their signs
                dist.broadcast(self.turn, 0)

    def _product(self, x: Tensor) -> Tensor:
        """Sum over rows ``(M, C)`` of their squares, ``(C,)``, or for ``phi_s`` of their outer products, ``(C, C)``."""
        if self.kind == "variance":
            return x.square().sum(dim=0)
        return matmul(x.T, x)


def _sum_over_processes(x: Tensor) -> Tensor:
    """A tensor summed over the processes that gather (:func:`kd.losses.ranks.in_parallel`), in place; alone as it is."""
    if in_parallel():
        dist.all_reduce(x)
    return x


def hadamard(order: int) -> Tensor:
    """A normalised Hadamard matrix ``(order, order)``, float64: orthogonal, all entries ``+-1 / sqrt(order)``.

    By Sylvester's doubling and Paley's two constructions over primes: 1, 2, and among the multiples of 4 all usual
    widths of vision models. Source: Paley, On Orthogonal Matrices, 1933.

    Args:
        order: > 0.

    Returns:
        ``(order, order)``, float64.

    Raises:
        ValueError: none of the three constructions has this order.

    >>> h = hadamard(12)
    >>> bool((h @ h.T - torch.eye(12)).abs().max() < 1e-12), round(float(h.abs().max()) ** 2, 6)
    (True, 0.083333)
    """
    return _signs(order) / math.sqrt(order)


def _signs(order: int) -> Tensor:
    """A Hadamard matrix of 1 and -1, ``(order, order)`` in float64; arguments and errors as of :func:`hadamard`."""
    two = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order == 2:
        return two
    if order % 4:
        raise ValueError(
            f"no Hadamard matrix has the order {order}: it must be 1, 2 or a multiple of 4"
        )
    # Paley's first construction: order - 1 is a prime, and 3 modulo 4.
    if _is_prime(order - 1):
        return torch.eye(order, dtype=torch.float64) + _with_border(_residues(order - 1), -1.0)
    # His second: half the order, less 1, is a prime, and 1 modulo 4.
    half = order // 2
    if half % 4 == 2 and _is_prime(half - 1):
        turned = torch.tensor([[1.0, -1], [-1, -1]], dtype=torch.float64)
        core = _with_border(_residues(half - 1), 1.0)
        return torch.kron(core, two) + torch.kron(torch.eye(half, dtype=torch.float64), turned)
    # Sylvester's doubling.
    try:
        return torch.kron(two, _signs(half))
    except ValueError:
        raise ValueError(f"no Hadamard matrix of the order {order} is known here") from None


def _is_prime(number: int) -> bool:
    """Whether a number has no divisor but 1 and itself."""
    if number < 2:
        return False
    largest = math.isqrt(number)
    divisors = range(2, largest + 1)
    return all(number % divisor for divisor in divisors)


def _residues(prime: int) -> Tensor:
    """Paley's matrix ``(prime, prime)``: 1 where column - row is a square modulo ``prime``, else -1; 0 if equal."""
    squares = {i * i % prime for i in range(1, prime)}
    sign_of_difference = -torch.ones(prime, dtype=torch.float64)
    sign_of_difference[list(squares)] = 1.0
    sign_of_difference[0] = 0.0
    row = torch.arange(prime)[:, None]
    column = torch.arange(prime)[None]
    differences = (column - row) % prime
    return sign_of_difference[differences]


def _with_border(core: Tensor, left: float) -> Tensor:
    """A matrix with one row more above, of 1, and one column more on the left, of ``left``; 0 in the corner."""
    size = len(core) + 1
    bordered = torch.zeros(size, size, dtype=torch.float64)
    bordered[1:, 1:] = core
    bordered[0, 1:] = 1.0
    bordered[1:, 0] = left
    return bordered


def phi_s(covariance: Tensor) -> Tensor:
    """PHI-S: the matrix ``A`` with which ``A (x - mean)`` has the variance 1 in every channel, whatever ``x`` had.

    ``A = H U' / sqrt(trace / C)``: ``U`` the eigenvectors of the covariance, ``H`` a normalised Hadamard matrix, which
    spreads every eigenvalue evenly over all channels. One scale for all directions: unlike dividing each channel by its
    own deviation it keeps the teacher's geometry (``A`` is a rotation times a number, and ``x`` comes back by its
    transpose). Source: Ranzinger et al., PHI-S: Distribution Balancing for Label-Free Multi-Teacher Distillation, arXiv
    2410.01680.

    Args:
        covariance: ``(C, C)``, of features; not all 0.

    Returns:
        ``(C, C)``, float64.

    Raises:
        ValueError: there is no Hadamard matrix of this width, or no variance.

    >>> covariance = torch.tensor([[9.0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0.1]]).double()
    >>> a = phi_s(covariance)
    >>> (a @ covariance @ a.T).diagonal()
    tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    covariance = covariance.double()
    scale = covariance.diagonal().mean().sqrt()
    if not scale > 0:
        raise ValueError("covariance must have a variance > 0, got none")
    _, vectors = torch.linalg.eigh(covariance)
    rotation = hadamard(len(covariance)).to(covariance.device)
    return rotation @ vectors.T / scale
