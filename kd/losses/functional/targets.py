"""Targets of teachers' features brought to one scale, and how several teachers share a picture's loss."""

import math

import torch
from torch import Tensor


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
