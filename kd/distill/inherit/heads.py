"""Attention heads of the student from the teacher's: chosen where the two have one head size, else fitted.

A head's pattern is ``softmax(q k / sqrt(size))``: of queries and keys only their product counts. At another size the
student's head keeps the leading directions of that product, as the queries and keys of the sample have them; of the
values it keeps those that write most into the stream. What a constant adds to the keys is the same for all of them, and
the softmax does not see it. A student with more heads than the teacher gives several to one, each with other values.
"""

import torch
from torch import Tensor


def head_map(
    qkv: Tensor, out: Tensor, write: Tensor, heads: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Maps the teacher's heads onto the student's; ``heads`` and ``sizes`` are of student and teacher.

    ``qkv`` is the teacher's ``(N, L, 3 * heads * size)``, ``out`` its heads' outputs ``(N, L, heads * size)``,
    ``write`` what multiplies them in the student's stream, ``(D_student, heads * size)``. Returns the map of queries,
    keys and values, ``(3 * student's heads * size, 3 * teacher's)``, and the student's ``write``.
    """
    (heads_student, heads_teacher), (size, own) = heads, sizes
    queries, keys, _ = (part.reshape(-1, heads_teacher, own).double() for part in qkv.chunk(3, -1))
    moments = torch.stack(
        [_covariance(out[..., h * own : (h + 1) * own]) for h in range(heads_teacher)]
    )
    writes = (
        write.double().unflatten(1, (heads_teacher, own)).movedim(1, 0)
    )  # (heads, D_student, size)
    power = torch.stack([(w @ c * w).sum() for w, c in zip(writes, moments, strict=True)])
    chosen = power.topk(min(heads_student, heads_teacher)).indices.sort().values.tolist()
    mapped, written = (
        torch.zeros(3, heads_student, size, heads_teacher, own, dtype=torch.float64),
        [],
    )
    for head in range(heads_student):
        source, copy = chosen[head % len(chosen)], head // len(chosen)
        mapped[0, head, :, source], mapped[1, head, :, source] = _patterns(
            queries[:, source], keys[:, source], size
        )
        mapped[2, head, :, source], w = _values(moments[source], writes[source], size, copy)
        written.append(w)
    flat = [part.reshape(heads_student * size, heads_teacher * own) for part in mapped]
    return torch.block_diag(*flat).float(), torch.cat(written, 1).float()


def _patterns(queries: Tensor, keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Maps of one head's queries and keys, (samples, own), to ``size`` dimensions with about the same products."""
    own = queries.shape[1]
    root, back = _roots(queries.T @ queries / len(queries))
    key_root, key_back = _roots(_covariance(keys))
    left, strength, right = torch.linalg.svd(root @ key_root)
    kept = min(size, own)
    gain = (
        strength[:kept, None].sqrt() * (size / own) ** 0.25
    )  # the softmax divides by the root of the head's size
    maps = torch.zeros(2, size, own, dtype=queries.dtype)
    maps[0, :kept] = gain * (left.T[:kept] @ back)
    maps[1, :kept] = gain * (right[:kept] @ key_back)
    return maps[0], maps[1]


def _values(covariance: Tensor, write: Tensor, size: int, copy: int) -> tuple[Tensor, Tensor]:
    """A map of one head's values to ``size`` dimensions, and what these are written with: the ``copy``-th portion."""
    root, back = _roots(covariance)
    left, strength, right = torch.linalg.svd(write @ root, full_matrices=False)
    rows = slice(copy * size, (copy + 1) * size)
    values = torch.zeros(size, write.shape[1], dtype=write.dtype)
    written = torch.zeros(len(write), size, dtype=write.dtype)
    part = right[rows] @ back
    values[: len(part)] = part
    written[:, : len(part)] = left[:, rows] * strength[rows]
    return values, written


def _covariance(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).double()
    flat = flat - flat.mean(0)
    return flat.T @ flat / len(flat)


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The root of a symmetric positive matrix, and its inverse; directions that hardly occur are left out of that."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    root = values.sqrt()
    inverse = torch.where(values > 1e-9 * values.max(), 1 / root.clamp(min=1e-30), 0)
    return vectors * root @ vectors.T, vectors * inverse @ vectors.T
