"""Attention heads of another size: the student's from the teacher's, by what their products and outputs are.

Of queries q and keys k a head's pattern, ``softmax(q k' / sqrt(S))``, reads the products alone. A student's head of
another size S keeps the leading directions of these products, weighed by how the sample's queries and keys are spread.
A constant added to all keys adds the same to all scores of a query, which the softmax does not see, so keys are centred.

Of the values a student's head keeps the directions that write most into the stream. A student with more heads than the
teacher gives several of them to one teacher's head: all have its pattern, each has the next portion of its values.

Both are truncated singular value decompositions, the best approximations of their rank (Eckart and Young, 1936).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    queries_RHS, keys_RHS, _ = (
        part.reshape(-1, teacher.count, teacher.size).double() for part in qkv.chunk(3, -1)
    )
    covariances = []  # of each teacher's head's outputs, (S_t, S_t)
    for outputs_S in outputs.split(teacher.size, dim=-1):
        covariances.append(_covariance(outputs_S))
    writes_HDS = write.double().unflatten(1, (teacher.count, teacher.size)).movedim(1, 0)

    # The teacher's heads that write most into the stream: E |W o|^2 = trace(W Cov(o) W').
    powers = []
    for head_write, covariance in zip(writes_HDS, covariances, strict=True):
        powers.append((head_write @ covariance * head_write).sum())
    kept_count = min(student.count, teacher.count)
    kept_heads = torch.stack(powers).topk(kept_count).indices.sort().values.tolist()

    # Each of the student's heads from one of these; where it has more heads, each is used several times.
    shape = student.count, student.size, teacher.count, teacher.size
    query_map, key_map, value_map = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    student_writes = []
    for head in range(student.count):
        source = kept_heads[head % kept_count]
        portion = head // kept_count
        query_map[head, :, source], key_map[head, :, source] = _map_products(
            queries_RHS[:, source], keys_RHS[:, source], student.size
        )
        value_map[head, :, source], student_write = _map_values(
            covariances[source], writes_HDS[source], student.size, portion
        )
        student_writes.append(student_write)
    maps = [each.reshape(student.width, teacher.width) for each in (query_map, key_map, value_map)]
    return torch.block_diag(*maps).float(), torch.cat(student_writes, 1).float()


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
    query_root, query_inverse = _root_and_inverse(queries.T @ queries / len(queries))
    key_root, key_inverse = _root_and_inverse(_covariance(keys))
    left, strength, right = torch.linalg.svd(query_root @ key_root)

    rank = min(size, teacher_size)
    gain = strength[:rank, None].sqrt() * (size / teacher_size) ** 0.25
    query_map = torch.zeros(size, teacher_size, dtype=queries.dtype)
    key_map = torch.zeros(size, teacher_size, dtype=queries.dtype)
    query_map[:rank] = gain * (left.T[:rank] @ query_inverse)
    key_map[:rank] = gain * (right[:rank] @ key_inverse)
    return query_map, key_map


def _map_values(
    covariance: Tensor, write: Tensor, size: int, portion: int
) -> tuple[Tensor, Tensor]:
    """A map of one head's values to ``size`` dimensions, and what multiplies them in the student's stream.

    With the root C of the covariance of the head's outputs o, and ``W C = U S V'``: ``W o = (U S) (V' C^-1 o)``, whose
    terms fall in what they write. A student's head takes ``size`` of them, the ``portion``-th (from 0).

    Args:
        covariance: of the head's outputs, ``(S_t, S_t)``.
        write: W, ``(D_student, S_t)``.
        size: the student's, S_s.
        portion: which terms: from ``portion * size`` on.

    Returns:
        ``(S_s, S_t)`` and ``(D_student, S_s)``; 0 where no terms are left.
    """
    root, inverse = _root_and_inverse(covariance)
    left, strength, right = torch.linalg.svd(write @ root, full_matrices=False)
    terms = slice(portion * size, (portion + 1) * size)
    term_values = right[terms] @ inverse
    values = torch.zeros(size, write.shape[1], dtype=write.dtype)
    values[: len(term_values)] = term_values
    student_write = torch.zeros(len(write), size, dtype=write.dtype)
    student_write[:, : len(term_values)] = left[:, terms] * strength[terms]
    return values, student_write


def _covariance(vectors: Tensor) -> Tensor:
    """``(..., D)`` -> ``(D, D)``, float64."""
    rows = vectors.reshape(-1, vectors.shape[-1]).double()
    rows = rows - rows.mean(0)
    return rows.T @ rows / len(rows)


def _root_and_inverse(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of a positive matrix, and its inverse, which leaves out directions that hardly occur."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    root = values.sqrt()
    occurs = values > 1e-9 * values.max()
    inverse = torch.where(occurs, 1 / root.clamp(min=1e-30), 0)
    return vectors * root @ vectors.T, vectors * inverse @ vectors.T
