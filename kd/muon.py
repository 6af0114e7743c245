"""timm's Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) as kd uses it.

Two things differ. On a CPU it iterates in float32: bfloat16 is 20 to 30 times as slow there without instructions for
it. On other devices weights of one shape, tall ones transposed, are orthogonalised together, unless they are shards: the
step of a ViT-Ti takes some hundred calls of operators in place of 2,700, at each of which a GPU would wait. (On a CPU,
where nothing waits, twelve matrices at once leave its cache, and the step takes 15 % longer.) AdaMuon (``adamuon``,
``nadamuon``), which is of the same class, has the first difference alone: it steps weights one by one everywhere.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

import torch
from timm.optim import muon
from torch import Tensor
from torch.optim import Optimizer


def is_timms(kind: type[Optimizer]) -> bool:
    """Whether a class of optimizers is timm's own Muon, which kd replaces by :func:`own_muon`'s class."""
    return kind is muon.Muon


@cache
def own_muon() -> type[Optimizer]:
    """timm's Muon class with kd's step and iteration. It comes from a copy of timm's module; timm's own stays as it is.

    In the copy two functions are replaced that the class calls by name: ``zeropower_via_newtonschulz`` (the iteration) and
    ``muon`` (the step). The class is made once a process, so that all such optimizers are of one class. It can't be pickled:
    by its name Python would import timm's own class.
    """
    spec: Any = muon.__spec__
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    orthogonalise = module.zeropower_via_newtonschulz
    one_by_one = module.muon
    together: Callable[..., None] = partial(step_by_shapes, module)

    def in_the_devices_dtype(gradient: Tensor, *args: object, **kwargs: object) -> Tensor:
        """timm's iteration on a matrix ``(out, in)`` or several ``(K, out, in)``, in float32 on a CPU, else in bfloat16,
        whatever the gradient's dtype.

        The gradient stays as it is. Returns a new tensor of the same shape in that dtype.
        """
        if gradient.is_cpu:
            dtype = torch.float32
        else:
            dtype = torch.bfloat16
        return orthogonalise(gradient, *args, dtype=dtype, **kwargs)

    def step(
        params: list[Tensor], grads: list[Tensor], momentum_bufs: list[Tensor], **settings: object
    ) -> None:
        """One step, in place, of the weights of a parameter group that Muon trains (timm's class has AdamW for the others).

        On a GPU or the like weights of one shape are stepped together (:func:`step_by_shapes`, which explains the
        arguments). They are stepped one by one on a CPU, where weights are shards, and with two settings of timm's:
        ``scale_eps``, by which a tall matrix gets another result than its transpose, and a ``conv_mode`` that takes filters
        apart. timm's class calls this.
        """
        # a shard (DTensor) has no whole matrix to stack with others
        plain_tensors = type(params[0].data) is Tensor
        apart = settings["scale_eps"] or settings["conv_mode"] != "flatten"
        if params[0].is_cpu or not plain_tensors or apart:
            one_by_one(params, grads, momentum_bufs, **settings)
        else:
            together(params, grads, momentum_bufs, **settings)

    module.zeropower_via_newtonschulz = in_the_devices_dtype  # type: ignore[attr-defined]
    module.muon = step  # type: ignore[attr-defined]
    return module.Muon


@torch.no_grad()
def step_by_shapes(
    module: ModuleType,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    adjust_lr_fn: str | None,
    ns_steps: int,
    ns_coefficients: str | Sequence[tuple[float, float, float]],
    eps: float,
    safety_factor: float,
    **_: object,
) -> None:
    """One step of Muon, the weights of each shape together. With the gradient G, the momentum M and the weights W::

        W <- (1 - lr * weight_decay) W
        M <- momentum * M + (1 - momentum) G
        U  = momentum * M + (1 - momentum) G   with Nesterov's momentum, M without
        W <- W - lr * scale * orthogonal(U)

    Args:
        module: the copy of timm's module, whose iteration, coefficients and scale are used.
        params: weights, each ``(out, in, ...)``; changed in place.
        grads: of the weights, one for each; they stay as they are.
        momenta: the running means M, one for each; changed in place.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: of the gradients' mean.
        nesterov: see above.
        adjust_lr_fn: timm's name of the scale by shape; None: 1.
        ns_steps: steps of the iteration.
        ns_coefficients: timm's name of its coefficients, or the coefficients themselves.
        eps: of the iteration, the least norm that it divides by.
        safety_factor: of the iteration, a factor of that norm.
        **_: timm's further arguments, which are not used: the caller takes this step only where they make no difference.
    """
    torch._foreach_mul_(list(params), 1 - lr * weight_decay)
    torch._foreach_lerp_(list(momenta), list(grads), 1.0 - momentum)
    if nesterov:
        updates = list(torch._foreach_lerp(list(grads), list(momenta), momentum))
    else:
        updates = list(momenta)

    # (out, in, ...) as (out, everything else): each filter is one row
    matrices = [update.flatten(1) for update in updates]
    coefficients = module.resolve_ns_coefficients(ns_coefficients, module._COEFFICIENTS)
    for sides in _by_shape(matrices):
        # each side is stacked by itself, then transposed as a whole: few copies
        stacks = []
        for is_tall, numbers in enumerate(sides):
            if numbers:
                of_side = torch.stack([matrices[number] for number in numbers])
                stacks.append(of_side.mT if is_tall else of_side)
        together = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
        orthogonal = module.zeropower_via_newtonschulz(
            together, ns_steps, coefficients, eps=eps, safety_factor=safety_factor
        ).to(params[0].dtype)
        wide, tall = orthogonal.split([len(numbers) for numbers in sides])
        if len(tall):
            tall = tall.mT.contiguous()
        for numbers, directions in zip(sides, (wide, tall), strict=True):
            if not numbers:
                continue
            scale = 1.0
            if adjust_lr_fn:
                scale = module.get_lr_scale(directions.shape[-2:], adjust_lr_fn)
            weights = [params[number] for number in numbers]
            steps = [one.view_as(weight) for one, weight in zip(directions, weights, strict=True)]
            torch._foreach_add_(weights, steps, alpha=-lr * scale)


def _by_shape(matrices: Sequence[Tensor]) -> list[tuple[list[int], list[int]]]:
    """Groups matrices by shape, by their numbers in the sequence. A tall one joins the group of its transpose, as
    ``orthogonal(U^T)`` is ``orthogonal(U)^T``.

    Returns:
        A pair for each shape ``(R, C)`` with R <= C: numbers of the matrices ``(R, C)``, and of the tall ones ``(C, R)``.
    """
    groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for number, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        is_tall = rows > columns
        shape = (columns, rows) if is_tall else (rows, columns)
        wide, tall = groups.setdefault(shape, ([], []))
        side = tall if is_tall else wide
        side.append(number)
    return list(groups.values())
