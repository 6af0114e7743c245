"""Optimizer and learning-rate schedule, by optimizer steps: linear warm-up, then a cosine, steps downwards or the user's."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from timm.models import group_parameters
from timm.optim import (
    get_optimizer_class,
    get_optimizer_info,
    list_optimizers,
    param_groups_weight_decay,
)
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kd.errors import UserError, plain
from kd.muon import is_timms, own_muon
from kd.settings import OptimSettings

OF_LR = ("initial_lr", "max_lr_snapshot", "fallback_lr_scale")
"""What torch and timm keep of a learning rate in a parameter group, beside ``lr``."""


class OptimSpec(OptimSettings):
    """How the student is optimized; :class:`kd.settings.OptimSettings` explains the arguments.

    Raises:
        ValueError: a value out of range, a name that timm does not have, or ``adahessian``; begins with the field's name.
        UserError: ``kwargs`` that the optimizer does not take, or a schedule without the method ``factor``; names the key.
    """

    def __post_init__(self) -> None:
        """Checks the fields, the optimizer's name, ``kwargs`` (by a trial step on a small layer) and the user's schedule;
        errors as of the class.
        """
        super().__post_init__()
        if self.name not in list_optimizers():
            raise ValueError(f"name must be one of timm's optimizers, got '{self.name}'")
        if self.name == "adahessian":
            raise ValueError(
                "name must not be that of an optimizer that needs second derivatives, got 'adahessian'"
            )
        _try_kwargs(self)
        if not (isinstance(self.schedule, str) or hasattr(self.schedule, "factor")):
            needs = "factor(progress), progress in 0..1 of the steps after the warm-up"
            raise UserError(
                f"optim.schedule: {type(self.schedule).__name__} needs the method {needs}"
            )

    def check_resumed(self, before: dict[str, Any]) -> None:
        """Refuses settings with which the optimizer state of a checkpoint can't be used; all others may change at a resume.

        Three settings decide which groups of parameters there are: whether there is weight decay, whether norms and biases
        have it too, and whether ``layer_decay`` is below 1. A checkpoint's state belongs to these groups by number. New
        ``kwargs`` that need another state (``amsgrad``) are refused later, when the states are compared
        (:func:`kd.module.resumed_state.check_optimizers`).

        Args:
            before: the settings that the checkpoint was made with, from :meth:`settings`; what is missing is not compared.

        Raises:
            UserError: another optimizer; or one of ``weight_decay``, ``decay_norm_and_bias`` and ``layer_decay`` turned
                on or off.
        """
        name = before.get("name", self.name)
        if name != self.name:
            raise UserError(
                f"optim.name: a resumed run keeps its optimizer ({name}, given {self.name})"
            )
        for field, off in (
            ("weight_decay", 0),
            ("decay_norm_and_bias", False),
            ("layer_decay", 1),
        ):
            now = getattr(self, field)
            then = before.get(field, now)
            if (then == off) != (now == off):
                raise UserError(
                    f"optim.{field}: can't be turned on or off in a resumed run ({then} before), got {now}"
                )

    def settings(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint stores them and :meth:`check_resumed` reads them; of a schedule of the user's
        own the name of its class.
        """
        content = asdict(self)
        if not isinstance(self.schedule, str):
            content["schedule"] = type(self.schedule).__name__
        return content

    def build(self, modules: Iterable[nn.Module], pace: "Pace") -> tuple[Optimizer, LambdaLR]:
        """The optimizer over all trainable parameters of ``modules``, and its schedule; the caller steps the schedule after
        each optimizer step.

        ``lr`` is used as it is: :func:`for_start` and :func:`scaled_to_batch` adjust it before.

        Raises:
            UserError: as :func:`build_optimizer` and :func:`build_schedule`.
        """
        optimizer = build_optimizer(modules, self, pace.fused)
        return optimizer, build_schedule(optimizer, self, pace.total_steps, pace.steps_per_epoch)

    def note(self, pace: "Pace") -> str:
        """A line for the user where :func:`steps_of_warmup` shortens the warm-up, because the one that is set would be as
        long as the run or longer.

        "" where it is not shortened, where the run's or the epoch's length is not known, and for a run of fewer than two
        steps.
        """
        total = pace.total_steps
        if math.isinf(pace.steps_per_epoch) or total < 2:
            return ""
        wanted = round(self.warmup_epochs * pace.steps_per_epoch)
        steps = steps_of_warmup(self.warmup_epochs, total, pace.steps_per_epoch)
        if steps == wanted:
            return ""
        return (
            f"optim.warmup_epochs: {self.warmup_epochs:g} would be all of the run's {total:g} steps; "
            f"the warm-up is shortened to {steps}"
        )


SHORT_WARMUP = 0.1
"""Share of a run's steps that are warm-up where the warm-up that is set is as long as the run or longer."""
OWN_FUNCTION = "a function of the user's own"
"""What a checkpoint stores in the place of the name of an optimizer that such a function makes."""
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""A function of the user's own: the trainable parameters -> an optimizer over them."""


@dataclass
class GivenOptim(OptimSpec):
    """An optimizer made by a function of the user's own; its learning rate stays as it is.

    The other fields keep their defaults, which neither the optimizer nor its rate follows.
    """

    make: MakeOptimizer | None = None
    """Trainable parameters -> optimizer; never None, as :func:`as_optim` sets it. (It has a default only because the fields
    before it have defaults.)"""

    def settings(self) -> dict[str, Any]:
        """What a checkpoint stores: in place of an optimizer's name, that it is a function of the user's own."""
        return {"name": OWN_FUNCTION}

    def check_resumed(self, before: dict[str, Any]) -> None:
        """Refuses a checkpoint whose optimizer was one of timm's. That of another function is not noticed.

        Args:
            before: the checkpoint's settings, from :meth:`settings`; without a name nothing is refused.

        Raises:
            UserError: the checkpoint's optimizer was one of timm's.
        """
        name = before.get("name", OWN_FUNCTION)
        if name != OWN_FUNCTION:
            raise UserError(
                f"optim: a resumed run keeps its optimizer ({name}, given {OWN_FUNCTION})"
            )

    def note(self, pace: "Pace") -> str:
        """Returns "": with a function of the user's own there is no warm-up, so none is shortened."""
        return ""

    def build(self, modules: Iterable[nn.Module], pace: "Pace") -> tuple[Optimizer, LambdaLR]:
        """Calls the user's function on the trainable parameters; the learning rate stays as the function sets it.

        Args:
            modules: what is trained.
            pace: not used.

        Returns:
            The optimizer, and a schedule whose factor is 1 in each step.

        Raises:
            TypeError: the function returns no optimizer.
        """
        assert self.make is not None
        optimizer = self.make(_trainable(modules))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optim: the function must give a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        return optimizer, LambdaLR(optimizer, lambda step: 1.0)


def _trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """All modules' parameters that require a gradient, in order; one that two of the modules share comes twice."""
    parameters = []
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameters.append(parameter)
    return parameters


def as_optim(given: "OptimSpec | Mapping[str, Any] | MakeOptimizer | None") -> OptimSpec:
    """The settings from what the Python classes take as ``optim``: settings, a dict of them, a function (see
    :class:`GivenOptim`), or None for the defaults.

    Raises:
        TypeError: none of these kinds, or a key that is not a field.
        ValueError: a value in the dict that :class:`OptimSpec` refuses (a UserError for ``kwargs``).
    """
    if given is None:
        return OptimSpec()
    if isinstance(given, OptimSpec):
        return given
    if isinstance(given, Mapping):
        known = [field.name for field in fields(OptimSpec)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise TypeError(f"optim: no key '{unknown[0]}' (allowed: {', '.join(known)})")
        return OptimSpec(**given)
    if callable(given):
        return GivenOptim(make=given)
    raise TypeError(
        f"optim: must be a kd.OptimSpec, a dict of its fields or a function that makes an optimizer of the "
        f"trainable parameters, got {type(given).__name__}"
    )


@dataclass(frozen=True)
class Pace:
    """How a run goes through its optimizer steps."""

    total_steps: float
    """Optimizer steps of the whole run; infinite where its end is not known."""
    steps_per_epoch: float
    """Optimizer steps of an epoch; infinite for a loader without a length."""
    global_batch: int | None = None
    """Pictures of an optimizer step, over all processes and accumulated batches; None: not known."""
    fused: bool = True
    """Whether torch's fused steps may be used: not where gradients are scaled (``precision=16-mixed``)."""

    def epochs(self, max_epochs: int | None) -> int:
        """How many epochs the run will have: by ``max_epochs`` or by its steps, rounded up, whichever ends it first.

        1 where neither is bounded, and where the run's steps are known but the epoch's are not (``max_steps`` with a loader
        without a length).

        Args:
            max_epochs: the Trainer's; None or -1: no bound.
        """
        bounds = []
        if max_epochs is not None and max_epochs > 0:
            bounds.append(max_epochs)
        if not math.isinf(self.total_steps):
            bounds.append(max(1, math.ceil(self.total_steps / self.steps_per_epoch)))
        return min(bounds, default=1)


def _try_kwargs(spec: OptimSpec) -> None:
    """Tries ``optim.kwargs`` by one step on a small layer, as some optimizers take arguments that their step refuses.

    Afterwards torch's random generator is as before. Without ``kwargs`` nothing is tried.

    Raises:
        UserError: an argument that has a key of its own (``lr``, ``weight_decay``), one that the optimizer or its step
            refuses, or an optimizer that can't be used here (:func:`_kind_and_kwargs`).
    """
    for name in ("lr", "weight_decay"):
        if name in spec.kwargs:
            raise UserError(f"optim.kwargs.{name}: is optim.{name}")
    if not spec.kwargs:
        return
    kind, kwargs = _kind_and_kwargs(spec)
    try:
        with torch.random.fork_rng(devices=[]):  # kron's step draws, too
            model = nn.Linear(8, 8)  # of smaller weights timm's Muon leaves the step to AdamW
            optimizer: Optimizer = kind(
                model.parameters(), weight_decay=spec.weight_decay, **kwargs
            )
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    except Exception as error:
        raise UserError(
            f"optim.kwargs: {spec.name} can't work with {spec.kwargs}: {plain(error)}"
        ) from error


def for_start(spec: OptimSpec, scratch: bool) -> OptimSpec:
    """The settings with the peak learning rate for a student's first weights: ``lr_scratch`` for random ones, where it is
    given; else ``lr``.

    Args:
        spec: as set; it stays as it is.
        scratch: whether the student starts from random weights.
    """
    if scratch and spec.lr_scratch is not None:
        return replace(spec, lr=spec.lr_scratch)
    return spec


def scaled_to_batch(spec: OptimSpec, global_batch: int) -> OptimSpec:
    """The settings with the peak learning rate for this run's batch::

        lr <- lr * (global_batch / lr_batch)         SGD, and its kinds SGDW, SGDP, FusedSGD and SGD8bit
        lr <- lr * (global_batch / lr_batch) ** 0.5  all others

    Without ``lr_batch`` the settings are returned unchanged.

    Args:
        spec: as set; it stays as it is.
        global_batch: samples of an optimizer step, over all processes and accumulated batches.

    Source: linear for SGD, Goyal et al., arXiv 1706.02677; the square root for adaptive optimizers, Malladi et al.,
    arXiv 2205.10287.
    """
    if spec.lr_batch is None:
        return spec
    ratio = global_batch / spec.lr_batch
    kind, _ = _kind_and_kwargs(spec)
    factor = ratio
    if "SGD" not in kind.__name__:
        factor = math.sqrt(ratio)
    return replace(spec, lr=spec.lr * factor)


def parameter_groups(
    modules: Iterable[nn.Module], weight_decay: float, all_alike: bool = False
) -> list[dict[str, Any]]:
    """Divides trainable parameters into those with and without weight decay, by timm's rule: those of at most one axis
    (biases, norms, layer scales), those named ``bias`` and those that a model exempts have none.

    Args:
        modules: what is trained; a model in them may exempt parameters by a method ``no_weight_decay`` that returns their
            names.
        weight_decay: of those that have one; with 0 all are in one group.
        all_alike: whether all parameters have it, in one group.

    Returns:
        Groups with ``params`` and ``weight_decay``, as optimizers take them; the one with 0 first, an empty one left out.
        A checkpoint numbers parameters in this order, but with ``optim.layer_decay`` in that of :func:`groups_by_layer`.
    """
    if all_alike:
        return [{"params": _trainable(modules), "weight_decay": weight_decay}]
    by_decay: dict[float, list[nn.Parameter]] = {}
    for module in modules:
        exempt = set()
        for prefix, model in _models_with("no_weight_decay", module):
            exempt |= {prefix + name for name in model.no_weight_decay()}
        for group in param_groups_weight_decay(module, weight_decay, no_weight_decay_list=exempt):
            by_decay.setdefault(group["weight_decay"], []).extend(group["params"])
    groups = []
    for decay in sorted(by_decay):
        if by_decay[decay]:
            groups.append({"params": by_decay[decay], "weight_decay": decay})
    return groups


def _models_with(method: str, module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the outermost modules that have a method, ``module`` itself or those inside it, as pairs ``(prefix, module)``.

    A method that only ``__getattr__`` finds does not count: what ``torch.compile`` returns passes on the methods of the
    model inside it, but that model's parameters have a prefix there.

    Args:
        method: its name.
        module: where the search begins; inside a module that has the method it ends.
        prefix: of the names of ``module``'s parameters; the pairs' prefixes begin with it.
    """
    if hasattr(type(module), method) or method in vars(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _models_with(method, child, f"{prefix}{name}.")


def groups_by_layer(
    groups: Iterable[dict[str, Any]],
    modules: Iterable[nn.Module],
    lr: float,
    layer_decay: float,
) -> list[dict[str, Any]]:
    """Divides groups of parameters further by the depth of their layers; each part has a rate of its own::

        lr of layer l of L = lr * layer_decay ** (L - l)

    Parameters outside of timm's models, such as those of losses' own layers, have the last layer's rate.

    Source: Clark et al., ELECTRA, ICLR 2020; for vision transformers Bao et al., BEiT, ICLR 2022.

    Args:
        groups: of :func:`parameter_groups`.
        modules: what is trained; timm's models say which layer each parameter belongs to (``group_matcher``).
        lr: of the last layer.
        layer_decay: a layer's rate as a share of the next layer's, above 0 and at most 1.

    Returns:
        Groups with ``params``, ``lr`` and the settings of the group that they were part of: in the order of ``groups``, and
        within each from the first layer to the last.

    Raises:
        UserError: none of the modules has a ``group_matcher``.
    """
    share_of_lr: dict[nn.Parameter, float] = {}
    for module in modules:
        for _, model in _models_with("group_matcher", module):
            layer_of_name = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
            last_layer = max(layer_of_name.values())
            for name, parameter in model.named_parameters():
                layers_after = last_layer - layer_of_name[name]
                share_of_lr[parameter] = layer_decay**layers_after
    if not share_of_lr:
        raise UserError(
            f"optim.layer_decay: needs a model of timm, which tells its layers; got {layer_decay:g} for another"
        )

    divided = []
    for group in groups:
        by_share: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_share.setdefault(share_of_lr.get(parameter, 1.0), []).append(parameter)
        for share in sorted(by_share):
            divided.append({**group, "params": by_share[share], "lr": lr * share})
    return divided


def _kind_and_kwargs(spec: OptimSpec) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and its arguments by name, without weight decay.

    The arguments are ``lr``, those that timm sets for the optimizer's name, and ``momentum`` 0.9 where it has one (Muon and
    AdaMuon keep their 0.95); ``optim.kwargs`` replaces any of them. timm's Muon is replaced by kd's (:mod:`kd.muon`).

    Raises:
        UserError: an optimizer of apex or bitsandbytes without a GPU or without that package; names ``optim.name``.
    """
    try:
        kind: Any = get_optimizer_class(spec.name, bind_defaults=False)
    except (AssertionError, ImportError) as error:  # timm's, without a GPU or without the package
        raise UserError(f"optim.name: {spec.name} can't be used here: {error}") from error
    # one class may have several names in timm, each with arguments of its own
    info = get_optimizer_info(spec.name)
    kwargs = {"lr": spec.lr, **(info.defaults or {})}
    if is_timms(kind):
        kind = own_muon()  # keeps its default momentum, 0.95
    elif info.has_momentum:
        kwargs["momentum"] = 0.9
    return kind, kwargs | spec.kwargs


def build_optimizer(modules: Iterable[nn.Module], spec: OptimSpec, fused: bool = True) -> Optimizer:
    """The optimizer over all trainable parameters of ``modules``; with ``optim.zero`` its state is sharded over the
    processes (``ZeroRedundancyOptimizer``).

    Args:
        modules: what to train.
        spec: how; ``lr`` is used as it is (see :func:`for_start` and :func:`scaled_to_batch`).
        fused: use torch's fused step (one kernel for many weights) where AdamW, Adam or SGD of torch's is chosen;
            ``fused`` in ``optim.kwargs`` counts in its place, and ``foreach: true`` there turns it off.

    Raises:
        UserError: ``optim.zero`` without a process group, ``optim.layer_decay`` below 1 without a model of timm's, or an
            optimizer that needs a GPU or a package that is missing.
    """
    modules = list(modules)
    groups = parameter_groups(modules, spec.weight_decay, spec.decay_norm_and_bias)
    if spec.layer_decay != 1:
        groups = groups_by_layer(groups, modules, spec.lr, spec.layer_decay)
    kind, kwargs = _kind_and_kwargs(spec)
    has_fused_step = kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    if has_fused_step and not kwargs.get("foreach"):  # torch takes one of the two
        kwargs.setdefault("fused", fused)
    if not spec.zero:
        return kind(groups, **kwargs)
    if not torch.distributed.is_initialized():
        raise UserError(
            "optim.zero: needs several processes, for example config=ddp_2cpu; optim.zero=false trains on one"
        )
    # in its buckets weights lose their memory order, and DDP would then read their gradients in the wrong one
    views = all(p.is_contiguous() for group in groups for p in group["params"])
    return ZeroRedundancyOptimizer(
        groups, optimizer_class=kind, parameters_as_bucket_view=views, **kwargs
    )


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group (rate, weight decay, betas, ...) by name, without the parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def take_words(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Sets each parameter group's switches and words (``fused``, ``amsgrad``: all settings that are true, false, None or
    text) back to this run's; loading a state has replaced them by the checkpoint's. Changes the groups in place.

    Args:
        optimizer: after its state was loaded.
        settings: what this run made it with, by parameter group: from :func:`group_settings`.
    """
    pairs = zip(optimizer.param_groups, settings, strict=True)
    for group, own in pairs:
        for name, value in own.items():
            is_word = value is None or isinstance(value, bool | str)
            if is_word:
                group[name] = value


def settle_resumed(
    optimizer: Optimizer,
    schedule: LambdaLR,
    settings: list[dict[str, Any]],
    keys: Iterable[str],
    position: int,
) -> None:
    """Sets the learning rate and the settings ``keys`` back to this run's, and moves the schedule to ``position``; in place.

    torch restores a checkpoint's settings with its state, also those that the user has changed since. Each state also
    gets the memory order of its weight: fused steps need it, and a checkpoint's may differ.

    Args:
        optimizer: after its state was loaded.
        schedule: likewise.
        settings: what this run made the optimizer with, by parameter group: from :func:`group_settings`, after the schedule
            was built.
        keys: names of further settings that are taken from this run (``weight_decay``, ``betas``, ...); all others stay the
            checkpoint's.
        position: optimizer steps of the schedule that count as done.
    """
    # base rate times the schedule's factor, as torch's LambdaLR computes it
    schedule.base_lrs = [of_group["initial_lr"] for of_group in settings]
    schedule.last_epoch = position
    factors = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    schedule._last_lr = [base * factor(position) for base, factor in factors]

    from_this_run = {*keys, *OF_LR}
    groups = zip(optimizer.param_groups, settings, schedule._last_lr, strict=True)
    for group, of_group, lr in groups:
        for key, value in of_group.items():
            if key in from_this_run:
                group[key] = value
        group["lr"] = lr
    inner = getattr(optimizer, "optim", optimizer)  # below ZeRO
    _order_state_as_weights(inner)


def _order_state_as_weights(optimizer: Optimizer) -> None:
    """Gives each state that has its weight's shape the weight's memory order too (``channels_last`` or not), in place; the
    values stay.

    Fused steps read a weight and its states in the order of the memory, so the orders must agree.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue  # a counter, or a mean that is kept in factors
            if value.stride() != parameter.stride():
                in_order = torch.empty_like(parameter, dtype=value.dtype)
                state[name] = in_order.copy_(value)


def steps_done(global_step: int, by_epochs: int, total_by_epochs: float, max_steps: int) -> int:
    """The optimizer step of the schedule at which a resumed run continues, chosen so that schedule and run end together.

    With another batch size a run makes another number of steps for the same samples. So under a bound in epochs the samples
    seen count, and under ``max_steps`` the steps made; with both bounds the one that ends the run first decides.

    Args:
        global_step: optimizer steps made so far.
        by_epochs: optimizer steps that this run would have made for the samples seen so far.
        total_by_epochs: optimizer steps of all its epochs; infinite where their number is not bounded.
        max_steps: bound on the optimizer steps; -1 for none.

    >>> steps_done(12, 6, total_by_epochs=12, max_steps=-1), steps_done(12, 6, total_by_epochs=100, max_steps=20)
    (6, 12)
    """
    if max_steps < 0:
        return by_epochs
    length_of_schedule = min(total_by_epochs, max_steps)
    left_of_run = min(total_by_epochs - by_epochs, max_steps - global_step)
    return max(0, int(length_of_schedule - left_of_run))


def warmup_cosine(step: int, warmup_steps: int, total_steps: float, min_ratio: float) -> float:
    """Factor of the learning rate at ``step`` (from 0): linear warm-up, then a cosine down to ``min_ratio``.

    Args:
        step: optimizer steps done.
        warmup_steps: as of :func:`warmup_then`.
        total_steps: likewise.
        min_ratio: the factor at the run's end and after it, >= 0.

    >>> [round(warmup_cosine(step, 2, 6, min_ratio=0.0), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def factor(progress: float) -> float:
        """The factor after the warm-up, by the progress in 0..1: from 1 down to ``min_ratio``."""
        cosine = 1 + math.cos(math.pi * progress)  # 2 at the peak, 0 at the end
        return min_ratio + (1 - min_ratio) * cosine / 2

    return warmup_then(step, warmup_steps, total_steps, factor)


def warmup_then(
    step: int, warmup_steps: int, total_steps: float, factor: Callable[[float], float]
) -> float:
    """Factor of the learning rate at ``step`` (from 0): linear warm-up to 1, then a function of the run's progress.

    Args:
        step: optimizer steps done.
        warmup_steps: of the warm-up; in its last one the factor is 1.
        total_steps: of the run; infinite: the progress stays 0.
        factor: progress after the warm-up, in 0..1 -> factor of the learning rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    after_warmup = max(1, total_steps - warmup_steps)
    return factor(min(1.0, (step - warmup_steps) / after_warmup))


def warmup_then_steps(step: int, warmup_steps: int, milestones: Sequence[int]) -> float:
    """Factor of the learning rate at ``step`` (from 0): linear warm-up to 1; then each milestone that is reached divides it
    by 10.

    Args:
        step: optimizer steps done.
        warmup_steps: of the warm-up; milestones within it take effect at its end.
        milestones: optimizer steps, ascending.

    >>> [round(warmup_then_steps(step, 2, milestones=[3, 5]), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.1 ** bisect_right(milestones, step)


def steps_of_warmup(warmup_epochs: float, total_steps: float, steps_per_epoch: float) -> int:
    """How many optimizer steps the warm-up has: as set, to the nearest step, or a tenth of the run (:data:`SHORT_WARMUP`),
    rounded down, where the run would have no step after it.

    Args:
        warmup_epochs: as set, fractions allowed.
        total_steps: optimizer steps of the run; may be infinite.
        steps_per_epoch: finite.

    >>> steps_of_warmup(1, 30, 10), steps_of_warmup(5, 30, 10)
    (10, 3)
    """
    steps = round(warmup_epochs * steps_per_epoch)
    if steps < total_steps:
        return steps
    return int(SHORT_WARMUP * total_steps)


def build_schedule(
    optimizer: Optimizer, spec: OptimSpec, total_steps: float, steps_per_epoch: float
) -> LambdaLR:
    """The schedule of the learning rate, by optimizer steps: warm-up, then steps downwards if there are milestones, else the
    user's own function or a cosine, to the end of the run.

    Args:
        optimizer: from now on each group's rate is the one that it was made with, times the factor of the step.
        spec: warm-up and milestones in epochs, each to the nearest step; the least rate; a schedule of the user's own.
        total_steps: optimizer steps of the run; infinite: its end is not known, and after the warm-up the progress stays 0,
            so that a cosine stays at its peak.
        steps_per_epoch: infinite for a loader without a length.

    Raises:
        UserError: a loader without a length, with a warm-up or milestones: these count epochs.
    """
    warmup = 0
    if math.isinf(steps_per_epoch):  # a loader without a length
        for key, value, off in (
            ("optim.milestones", spec.milestones, "optim.schedule=cosine optim.milestones=null"),
            ("optim.warmup_epochs", spec.warmup_epochs, "optim.warmup_epochs=0"),
        ):
            if value:
                raise UserError(
                    f"{key}: counts epochs, whose length the training loader does not give; give it a "
                    f"length, or {off}"
                )
    else:
        warmup = steps_of_warmup(spec.warmup_epochs, total_steps, steps_per_epoch)
    if spec.milestones:
        milestones = [round(epoch * steps_per_epoch) for epoch in spec.milestones]
        return LambdaLR(optimizer, lambda step: warmup_then_steps(step, warmup, milestones))
    own: Any = spec.schedule
    if not isinstance(own, str):
        return LambdaLR(optimizer, lambda step: warmup_then(step, warmup, total_steps, own.factor))
    return LambdaLR(
        optimizer, lambda step: warmup_cosine(step, warmup, total_steps, spec.min_lr_ratio)
    )
