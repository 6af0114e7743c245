"""Losses over logits, as modules with settings.

Formula, source and shapes of each are at its function in :mod:`kd.losses.functional.logits`; when each one helps is in
kd/losses/README.md. All take ``(student_logits, teacher_logits, target)`` and give a scalar.
"""

from torch import Tensor

from kd.losses import functional
from kd.losses.base import LogitLoss, TopKLogits, check_range
from kd.losses.ranks import of_all_ranks


class KDLoss(LogitLoss):
    """Hinton's knowledge distillation, see :func:`kd.losses.functional.kd_loss`.

    On a student with a distillation token (timm's ``deit_*_distilled_*``) this is DeiT's soft distillation.

    Args:
        temperature: softens both distributions, > 0. The paper uses 1 to 20.
        teacher_temperature: another one for the teacher's side; default: the same.
        final_temperature: the temperature moves from ``temperature`` to this one, in equal steps over the epochs.

    >>> import torch
    >>> KDLoss(temperature=2.0)(torch.zeros(4, 10), torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))
    tensor(0.)
    """

    exclusive = True

    def __init__(
        self,
        temperature: float = 4.0,
        weight: float = 1.0,
        teacher_temperature: float | None = None,
        final_temperature: float | None = None,
    ) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(weight, temperature)
        check_range("teacher_temperature", teacher_temperature, "> 0")
        check_range("final_temperature", final_temperature, "> 0")
        self.teacher_temperature = teacher_temperature
        self.final_temperature = final_temperature

    def temperature_now(self) -> float:
        """The temperature of the present epoch: ``temperature`` in the first, ``final_temperature`` in the last."""
        if self.final_temperature is None or self.max_epochs < 2:
            return self.temperature
        last_epoch = self.max_epochs - 1
        share = min(int(self.epoch) / last_epoch, 1)
        change = self.final_temperature - self.temperature
        return self.temperature + share * change

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return functional.kd_loss(
            student_logits, teacher_logits, self.temperature_now(), self.teacher_temperature
        )

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The teacher's logits ``(N, C, ...)`` over its own temperature, or that of the present epoch."""
        if self.teacher_temperature is not None:
            return teacher_logits / self.teacher_temperature
        return teacher_logits / self.temperature_now()

    @property
    def topk_temperature(self) -> float | None:
        """The temperature of both sides in all epochs: with one a cache of the teacher's largest logits is enough.

        None: the sides or the epochs differ, so all logits are needed.
        """
        if self.final_temperature is not None:
            return None
        if self.teacher_temperature not in (None, self.temperature):
            return None
        return float(self.temperature)

    def forward_topk(self, student_logits: Tensor, teacher: TopKLogits, target: Tensor) -> Tensor:
        """As :meth:`forward`, from a cache of the teacher's largest logits: see
        :func:`kd.losses.functional.topk_kd_loss`.

        Args:
            student_logits: ``(N, C)``.
            teacher: values and classes ``(N, k)``, and the others' mass at this loss's temperature.
            target: not read.
        """
        tail = teacher.tails[float(self.temperature)]
        return functional.topk_kd_loss(
            student_logits, teacher.values, teacher.indices, tail, self.temperature
        )


class HardKDLoss(LogitLoss):
    """Cross-entropy with the teacher's decision, see :func:`kd.losses.functional.hard_kd_loss`.

    On a student with a distillation token (timm's ``deit_*_distilled_*``) this is DeiT's hard distillation.

    Args:
        weight: factor in the total loss.
    """

    exclusive = True

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return functional.hard_kd_loss(student_logits, teacher_logits)


class DKDLoss(LogitLoss):
    """Decoupled KD, see :func:`kd.losses.functional.dkd_loss`.

    Args:
        alpha: weight of the target against all others.
        beta: weight of the others among themselves; the paper uses 0.5 to 8.
        temperature: > 0.
        warmup_epochs: the loss grows linearly over that many epochs (the paper: 20 of 240), 0 for none.
    """

    needs_class_ids = True
    least_classes = 3

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 8.0,
        temperature: float = 4.0,
        warmup_epochs: int = 0,
        weight: float = 1.0,
    ) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(weight, temperature)
        check_range("alpha", alpha, ">= 0")
        check_range("beta", beta, ">= 0")
        check_range("warmup_epochs", warmup_epochs, ">= 0")
        self.alpha = alpha
        self.beta = beta
        self.warmup_epochs = warmup_epochs

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """Student's and teacher's logits ``(N, C)``, class ids ``(N,)`` -> a scalar, weighted up during
        ``warmup_epochs``.
        """
        loss = functional.dkd_loss(
            student_logits, teacher_logits, target, self.alpha, self.beta, self.temperature
        )
        return loss * self.warmed_up(self.warmup_epochs)


class DISTLoss(LogitLoss):
    """Correlations in place of a divergence, see :func:`kd.losses.functional.dist_loss`.

    Args:
        beta: weight of the relation between classes.
        gamma: weight of the relation within a class, over the batch.
        temperature: > 0.
        gather: compare over the batches of all processes instead of each process's own.
    """

    exclusive = True

    def __init__(
        self,
        beta: float = 1.0,
        gamma: float = 1.0,
        temperature: float = 1.0,
        weight: float = 1.0,
        gather: bool = False,
    ) -> None:
        """Stores the arguments, which are the class's."""
        super().__init__(weight, temperature)
        self.beta = beta
        self.gamma = gamma
        self.gather = gather

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Refuses two classes with ``beta``: any two pairs of numbers correlate by 1 or -1, without a gradient.

        Args:
            num_classes: of the data.
            num_samples: not read.
            ignore_index: not read.
        """
        if num_classes < 3 and self.beta:
            raise ValueError(
                f"DISTLoss needs >= 3 classes or beta=0, the data has {num_classes}; KDLoss takes two"
            )

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar; over the batches of all processes where it gathers."""
        if self.gather:
            student_logits, teacher_logits = of_all_ranks(student_logits, teacher_logits)
        return functional.dist_loss(
            student_logits, teacher_logits, self.beta, self.gamma, self.temperature
        )


class NKDLoss(LogitLoss):
    """Normalised KD, see :func:`kd.losses.functional.nkd_loss`.

    Args:
        gamma: weight of the other classes.
        temperature: > 0, of the other classes alone.
    """

    needs_class_ids = True
    least_classes = 3

    def __init__(self, gamma: float = 1.5, temperature: float = 1.0, weight: float = 1.0) -> None:
        super().__init__(weight, temperature)
        self.gamma = gamma

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, class ids ``(N,)`` -> scalar."""
        return functional.nkd_loss(
            student_logits, teacher_logits, target, self.gamma, self.temperature
        )


class WSLDLoss(LogitLoss):
    """Weighted soft labels, see :func:`kd.losses.functional.wsld_loss`.

    Args:
        temperature: > 0.
        weight: factor in the total loss; the paper uses 2.25 to 2.5.
    """

    needs_labels = True

    def __init__(self, temperature: float = 2.0, weight: float = 1.0) -> None:
        super().__init__(weight, temperature)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, ids ``(N,)`` or probabilities ``(N, C)`` -> scalar."""
        return functional.wsld_loss(student_logits, teacher_logits, target, self.temperature)


class MLKDLoss(LogitLoss):
    """Multi-level logit distillation, see :func:`kd.losses.functional.mlkd_loss`.

    Args:
        temperatures: each > 0.
    """

    exclusive = True

    def __init__(
        self, temperatures: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0, 6.0), weight: float = 1.0
    ) -> None:
        """Checks the arguments, which are the class's."""
        super().__init__(weight)
        if not temperatures:
            raise ValueError("temperatures must hold at least one, got none")
        for temperature in temperatures:
            check_range("temperatures", temperature, "> 0")
        self.temperatures = tuple(temperatures)

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The teacher's logits over the lowest of the temperatures."""
        return teacher_logits / min(self.temperatures)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return functional.mlkd_loss(student_logits, teacher_logits, self.temperatures)


class BinaryKDLoss(LogitLoss):
    """KD for labels that do not exclude each other, see :func:`kd.losses.functional.binary_kd_loss`.

    Args:
        temperature: > 0.
    """

    def __init__(self, temperature: float = 1.0, weight: float = 1.0) -> None:
        super().__init__(weight, temperature)

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> Tensor:
        """``(N, C)``, ``(N, C)``, unused -> scalar."""
        return functional.binary_kd_loss(student_logits, teacher_logits, self.temperature)


class StandardizedLoss(LogitLoss):
    """Any logit loss over standardised logits, see :func:`kd.losses.functional.standardize_logits`.

    Args:
        loss: the loss; its own weight must be 1.
        weight: factor in the total loss; the paper uses 9 with KD at temperature 2.

    >>> import torch
    >>> bool(StandardizedLoss(KDLoss(2.0))(torch.eye(3), 5 * torch.eye(3), torch.arange(3)) < 1e-6)
    True
    """

    exclusive = True
    least_classes = 3  # standardised, any two logits are the same two numbers, without a gradient

    def __init__(self, loss: LogitLoss, weight: float = 1.0) -> None:
        """Takes over what the loss inside needs of labels and indices, so that a batch is prepared for it, and whether it
        compares maps.

        Raises:
            ValueError: the loss inside has a weight other than 1.
        """
        super().__init__(weight)
        if loss.weight != 1:
            raise ValueError(
                f"weight must be given to StandardizedLoss, the loss inside it got {loss.weight}"
            )
        self.loss = loss
        self.needs_class_ids = loss.needs_class_ids
        self.needs_labels = loss.needs_labels
        self.needs_index = loss.needs_index
        self.for_maps = loss.for_maps
        self.for_numbers = loss.for_numbers
        self.final_temperature = getattr(loss, "final_temperature", None)

    def bind(self, num_classes: int, num_samples: int, ignore_index: int | None = None) -> None:
        """Prepares both itself and the loss inside.

        Raises:
            ValueError: two classes: standardised, any two logits are the same two numbers, without a gradient.
        """
        super().bind(num_classes, num_samples, ignore_index)
        self.loss.bind(num_classes, num_samples, ignore_index)

    def counted(self, target: Tensor) -> Tensor:
        """As the loss inside counts."""
        return self.loss.counted(target)

    def softened(self, teacher_logits: Tensor) -> Tensor:
        """The standardised teacher's logits, softened by the loss inside."""
        return self.loss.softened(functional.standardize_logits(teacher_logits))

    def forward(
        self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor, **extra: Tensor
    ) -> Tensor:
        """``(N, C)``, ``(N, C)``, the target of the loss inside -> scalar."""
        self.loss.epoch = self.epoch
        self.loss.max_epochs = self.max_epochs
        student = functional.standardize_logits(student_logits)
        teacher = functional.standardize_logits(teacher_logits)
        return self.loss(student, teacher, target, **extra)
