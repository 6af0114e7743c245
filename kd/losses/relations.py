"""Losses over the relations between samples. They look at ``prelogits`` unless told otherwise."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from kd.losses.base import FeatureLoss, Shape
from kd.losses.functional import cka_loss, crd_loss, rkd_loss, sp_loss
from kd.losses.functional._checks import matmul, positive
from kd.losses.ranks import in_parallel, of_all_ranks, own_rows


class RKDLoss(FeatureLoss):
    """Relational KD: distances and angles, see :func:`kd.losses.functional.rkd_loss`. No parameters.

    Args:
        distance_weight: >= 0.
        angle_weight: >= 0. The angle term takes the cube of the batch size in memory.
        weight: factor in the total loss.
        gather: compare with the batches of all P processes too; the angle term then takes P^2 times the memory.

    >>> import torch
    >>> x = torch.tensor([[0.0, 0], [3, 4], [6, 1]])
    >>> RKDLoss()(2 * x, x, torch.zeros(3))
    tensor(0.)
    """

    default_tap = "prelogits"

    def __init__(
        self, distance_weight: float = 25.0, angle_weight: float = 50.0, weight: float = 1.0, gather: bool = True
    ) -> None:
        super().__init__(weight)
        self.distance_weight, self.angle_weight, self.gather = distance_weight, angle_weight, gather

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, D_s)``, ``(N, D_t)``, unused -> scalar."""
        weights, vertices = (self.distance_weight, self.angle_weight), None
        if self.gather:
            vertices = own_rows(len(student_features))
            student_features, teacher_features = of_all_ranks(student_features, teacher_features)
        return rkd_loss(student_features, teacher_features, *weights, vertices)


class SPLoss(FeatureLoss):
    """Similarity-preserving KD, see :func:`kd.losses.functional.sp_loss`. No parameters.

    Args:
        weight: factor in the total loss.
        gather: compare over the batches of all processes instead of each process's own.

    >>> import torch
    >>> SPLoss()(torch.eye(2), torch.eye(2), torch.zeros(2))
    tensor(0.)
    """

    default_tap = "prelogits"

    def __init__(self, weight: float = 1.0, gather: bool = True) -> None:
        super().__init__(weight)
        self.gather = gather

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, ...)``, ``(N, ...)``, unused -> scalar."""
        if self.gather:
            student_features, teacher_features = of_all_ranks(student_features, teacher_features)
        return sp_loss(student_features, teacher_features)


class CKALoss(FeatureLoss):
    """One minus the linear CKA of the batch, see :func:`kd.losses.functional.cka_loss`. No parameters.

    Args:
        weight: factor in the total loss.
        gather: compare over the batches of all processes instead of each process's own.

    >>> import torch
    >>> CKALoss()(torch.eye(2), torch.eye(2), torch.zeros(2)).round(decimals=4)
    tensor(0.)
    """

    default_tap = "prelogits"

    def __init__(self, weight: float = 1.0, gather: bool = True) -> None:
        super().__init__(weight)
        self.gather = gather

    def forward(self, student_features: Tensor, teacher_features: Tensor, target: Tensor) -> Tensor:
        """``(N, ...)``, ``(N, ...)``, unused -> scalar."""
        if self.gather:
            student_features, teacher_features = of_all_ranks(student_features, teacher_features)
        return cka_loss(student_features, teacher_features)


class CRDLoss(FeatureLoss):
    """Contrastive representation distillation with a memory of the whole training set, arXiv 1910.10699.

    Both models' embeddings, projected and normalised, are told apart from ``negatives`` random samples of the other
    model's memory, see :func:`kd.losses.functional.crd_loss`. The memory holds two vectors of ``embed_dim`` a training
    picture; it is part of checkpoints and the same on all processes. Negatives are drawn from the whole set, once for
    all pictures of a batch (the paper draws them for each one: the same in expectation at many times the cost; its code
    can also draw from other classes alone).

    Args:
        embed_dim: width of the projections.
        negatives: K, > 0 (the paper: 16,384).
        temperature: > 0.
        momentum: of the memory, in [0, 1).
        weight: factor in the total loss; the paper uses 0.8.
    """

    default_tap = "prelogits"
    needs_index = True
    equal_on_all_ranks = ("memory_student", "memory_teacher")
    memory_student: Tensor
    memory_teacher: Tensor
    scale: Tensor

    def __init__(
        self,
        embed_dim: int = 128,
        negatives: int = 4096,
        temperature: float = 0.07,
        momentum: float = 0.5,
        weight: float = 1.0,
    ) -> None:
        super().__init__(weight)
        for name, value in (("embed_dim", embed_dim), ("negatives", negatives), ("temperature", temperature)):
            positive(name, value)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be >= 0 and < 1, got {momentum}")
        self.embed_dim, self.negatives = embed_dim, negatives
        self.temperature, self.momentum = temperature, momentum
        self._shared = False

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Makes the memory."""
        self.num_samples = num_samples
        for name in ("memory_student", "memory_teacher"):
            self.register_buffer(name, F.normalize(torch.randn(num_samples, self.embed_dim), dim=1))
        self.register_buffer("scale", torch.full((2,), float("nan")))  # log of the two normalisers, of the first batch

    def build(self, student_shape: Shape, teacher_shape: Shape) -> None:
        """Makes the two projections."""
        self.project_student, self.project_teacher = (
            nn.Linear(torch.Size(shape[1:]).numel(), self.embed_dim) for shape in (student_shape, teacher_shape)
        )

    def forward(
        self, student_features: Tensor, teacher_features: Tensor, target: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """``(N, D_s)``, ``(N, D_t)``, unused, the samples' numbers ``(N,)`` -> scalar.

        Raises:
            ValueError: no indices: the loss remembers every sample by its number.
        """
        if index is None:
            raise ValueError("index must hold the samples' numbers (N,) for CRDLoss, got none")
        self._share()
        student = F.normalize(self.project_student(student_features.flatten(1)).float(), dim=1)
        teacher = F.normalize(self.project_teacher(teacher_features.detach().flatten(1)).float(), dim=1)
        others = torch.randint(self.num_samples, (self.negatives,), device=index.device)
        loss = self._contrast(teacher, self.memory_student, index, others, 0)
        loss = loss + self._contrast(student, self.memory_teacher, index, others, 1)
        self._remember(student.detach(), teacher.detach(), index)
        return loss

    def _contrast(self, anchors: Tensor, memory: Tensor, index: Tensor, others: Tensor, side: int) -> Tensor:
        partner = (anchors * memory[index]).sum(dim=1, keepdim=True)
        scores = torch.cat([partner, matmul(anchors, memory[others].T)], dim=1) / self.temperature
        if torch.isnan(self.scale[side]):
            self.scale[side] = scores.detach().logsumexp((0, 1)) - torch.log(
                torch.tensor(scores.numel() / self.num_samples)
            )
        return crd_loss(scores - self.scale[side], self.num_samples)

    def _share(self) -> None:
        """Once, rank 0's memory for all: from then on every process writes the same into its own."""
        if in_parallel() and not self._shared:
            for memory in (self.memory_student, self.memory_teacher):
                dist.broadcast(memory, 0)
        self._shared = True

    @torch.no_grad()
    def _remember(self, student: Tensor, teacher: Tensor, index: Tensor) -> None:
        student, teacher, index = of_all_ranks(student, teacher, index)
        for memory, new in ((self.memory_student, student), (self.memory_teacher, teacher)):
            mixed = self.momentum * memory[index] + (1 - self.momentum) * new
            memory[index] = F.normalize(mixed, dim=1)
