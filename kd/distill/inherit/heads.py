"""Attention heads of another size: the student's from the teacher's, by what their products and outputs are.

Of queries q and keys k a head's pattern, ``softmax(q k' / sqrt(S))``, reads the products alone. A student's head of
another size S keeps the leading directions of these products, weighed by how the sample's queries and keys are spread.
A constant added to all keys adds the same to all scores of a query, which the softmax does not see, so keys are centred.

Of the values a student's head keeps the directions that write most into the stream. A student with more heads than the
teacher gives several of them to one teacher's head: all have its pattern, each has the next portion of its values.

Both are truncated singular value decompositions, the best approximations of their rank (Eckart and Young, 1936).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kd.distill.inherit.maps import covariance


@dataclass(frozen=True)
class Heads:
    """The shape of an attention."""

    count: int
    """Heads, H."""
    size: int
    """Dimensions of a head's queries, keys and values, S."""

    @property
    def width(self) -> int:
        """Dimensions of all heads' queries, ``H * S``."""
        return self.count * self.size


def map_heads(
    qkv: Tensor, outputs: Tensor, write: Tensor, student: Heads, teacher: Heads
) -> tuple[Tensor, Tensor]:
    """Linear maps from the teacher's heads to the student's, which are of another size.

    Args:
        qkv: the teacher's queries, keys and values on the sample, ``(N, L, 3 * H_t * S_t)``.
        outputs: its heads' outputs (values averaged by the pattern), ``(N, L, H_t * S_t)``.
        write: what multiplies these outputs in the student's stream, ``(D_student, H_t * S_t)``.
        student: the student's heads.
        teacher: the teacher's heads.

    Returns:
        The map of queries, keys and values, ``(3 * H_s * S_s, 3 * H_t * S_t)``, and what multiplies the student's
        heads' outputs in its stream, ``(D_student, H_s * S_s)``.
    """
    by_head = []
    for part in qkv.chunk(3, -1):
        rows_RHS = part.reshape(-1, teacher.count, teacher.size)
        by_head.append(rows_RHS.double())
    queries_RHS, keys_RHS, _ = by_head
    covariances = []  # of each teacher's head's outputs, (S_t, S_t)
    for outputs_S in outputs.split(teacher.size, dim=-1):
        covariances.append(covariance(outputs_S))
    writes_HDS = write.double().unflatten(1, (teacher.count, teacher.size)).movedim(1, 0)

    sources = _strongest_heads(covariances, writes_HDS, student.count)

    # Each of the student's heads from one of these; where it has more heads, each is used several times.
    shape = student.count, student.size, teacher.count, teacher.size
    query_maps = torch.zeros(shape, dtype=torch.float64)
    key_maps = torch.zeros(shape, dtype=torch.float64)
    value_maps = torch.zeros(shape, dtype=torch.float64)
    student_writes = []
    for head in range(student.count):
        source = sources[head % len(sources)]
        portion = head // len(sources)
        queries = queries_RHS[:, source]
        keys = keys_RHS[:, source]
        query_map, key_map = _map_products(queries, keys, student.size)
        value_map, student_write = _map_values(
            covariances[source], writes_HDS[source], student.size, portion
        )
        query_maps[head, :, source] = query_map
        key_maps[head, :, source] = key_map
        value_maps[head, :, source] = value_map
        student_writes.append(student_write)

    flat_maps = []
    for maps in (query_maps, key_maps, value_maps):
        flat_maps.append(maps.reshape(student.width, teacher.width))
    return torch.block_diag(*flat_maps).float(), torch.cat(student_writes, 1).float()


def _strongest_heads(
    covariances: Sequence[Tensor], writes_HDS: Tensor, student_count: int
) -> list[int]:
    """The teacher's heads that write most into the stream, at most as many as the student has, in rising order.

    Head h writes ``E |W o|^2 = trace(W Cov(o) W')``.

    Args:
        covariances: of each head's outputs, ``(S, S)``.
        writes_HDS: W of each head, ``(H, D_student, S)``.
        student_count: heads of the student.
    """
    powers = []
    for write, spread in zip(writes_HDS, covariances, strict=True):
        squares = write @ spread * write
        powers.append(squares.sum())
    count = min(student_count, len(powers))
    strongest = torch.stack(powers).topk(count).indices
    return strongest.sort().values.tolist()


def _map_products(queries: Tensor, keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Maps of one head's queries and keys to ``size`` dimensions that keep its scores as well as possible.

    With the roots Q of the queries' second moment and K of the keys' covariance, and ``Q K = U S V'``::

        q . k = (U' Q^-1 q)' S (V' K^-1 k)

    Both vectors on the right have uncorrelated entries of variance 1, so the largest singular values are what a
    smaller head should keep. Each map gets the root of them, and a gain, as scores are divided by the root of the
    head's size: ``gain^2 / sqrt(size) = 1 / sqrt(teacher's size)``.

    Args:
        queries: ``(R, S_t)``.
        keys: ``(R, S_t)``.
        size: the student's, S_s.

    Returns:
        Two maps, ``(S_s, S_t)`` each; rows beyond ``S_t`` are 0.
    """
    teacher_size = queries.shape[1]
    query_moment = queries.T @ queries / len(queries)
    key_covariance = covariance(keys)
    query_root, query_inverse = _root_and_inverse(query_moment)
    key_root, key_inverse = _root_and_inverse(key_covariance)
    left, strength, right = torch.linalg.svd(query_root @ key_root)

    # the leading rows of U' Q^-1 and of V' K^-1, each times the root of S and the gain
    rank = min(size, teacher_size)
    head_gain = (size / teacher_size) ** 0.25
    gain_R1 = strength[:rank, None].sqrt() * head_gain
    query_rows = left.T[:rank] @ query_inverse
    key_rows = right[:rank] @ key_inverse

    empty_rows = (0, 0, 0, size - rank)
    return pad(gain_R1 * query_rows, empty_rows), pad(gain_R1 * key_rows, empty_rows)


def _map_values(spread: Tensor, write: Tensor, size: int, portion: int) -> tuple[Tensor, Tensor]:
    """A map of one head's values to ``size`` dimensions, and what multiplies them in the student's stream.

    With the root C of the covariance of the head's outputs o, and ``W C = U S V'``: ``W o = (U S) (V' C^-1 o)``, whose
    terms fall in what they write. A student's head takes ``size`` of them, the ``portion``-th (from 0).

    Args:
        spread: the covariance of the head's outputs, ``(S_t, S_t)``.
        write: W, ``(D_student, S_t)``.
        size: the student's, S_s.
        portion: which terms: from ``portion * size`` on.

    Returns:
        ``(S_s, S_t)`` and ``(D_student, S_s)``; 0 where no terms are left.
    """
    root, inverse = _root_and_inverse(spread)
    left, strength, right = torch.linalg.svd(write @ root, full_matrices=False)

    # of the chosen terms, the rows of V' C^-1 and the columns of U S
    first = portion * size
    terms = slice(first, first + size)
    value_rows = right[terms] @ inverse
    write_columns = left[:, terms] * strength[terms]
    left_over = size - len(value_rows)  # where no more are left
    value_map = pad(value_rows, (0, 0, 0, left_over))
    student_write = pad(write_columns, (0, left_over))
    return value_map, student_write


def _root_and_inverse(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive semi-definite matrix, and the root's inverse, ``(S, S)`` each.

    The root of ``V diag(v) V'`` is ``V diag(sqrt v) V'``. The inverse leaves out directions that hardly occur.
    """
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    occurs = values > 1e-9 * values.max()
    roots = values.sqrt()
    inverses = torch.where(occurs, 1 / roots.clamp(min=1e-30), 0)
    root = vectors * roots @ vectors.T
    inverse = vectors * inverses @ vectors.T
    return root, inverse
