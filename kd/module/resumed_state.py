"""States of a checkpoint, compared with what they are loaded into.

torch's fused steps read the state of an optimizer by the size of its weights: a moment of one number is read, and
written, past its end. Lightning and torch put a checkpoint's values into their objects as they are. A state is
therefore loaded only if it has the form of the state that this run would have written.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from kd.errors import UserError, plain
from kd.optim import Together, each_of

MOST = 2**53  # of counters: whole numbers that a float64 holds
OF_LOADERS = "combined_loader"  # Lightning keeps the states of the user's own stateful loaders here
SINGLE = {
    "fused": None,
    "foreach": False,
    "capturable": False,
}  # steps that run on any device, with the same state


def check_form(value: object, own: object, place: str) -> None:
    """Compares a state with the run's own: the same kind, the same keys or fewer, the same lengths, finite numbers.

    Args:
        value: as it is in a checkpoint.
        own: the same part of this run's state; None takes any plain number.
        place: names it in the message.

    Raises:
        UserError: the first difference.
    """
    if isinstance(own, Mapping):
        _check_keys(value, own, place)
    elif isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(own):
            raise UserError(f"{place}: must be a list of {len(own)}, got {_shown(value)}")
        for number, (part, own_part) in enumerate(zip(value, own, strict=True)):
            check_form(part, own_part, f"{place}.{number}")
    elif isinstance(own, Tensor):
        _check_tensor(value, own, place)
    elif own is None:
        if not (value is None or isinstance(value, bool) or _is_number(value)):
            raise UserError(f"{place}: must be null or a number, got {_shown(value)}")
    elif isinstance(own, bool):
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{place}: must be true, false or null, got {_shown(value)}")
    elif isinstance(own, int | float):
        _check_number(value, own, place)
    elif value != own:  # a word, a dtype
        raise UserError(f"{place}: must be {_shown(own)}, got {_shown(value)}")


def _check_keys(value: object, own: Mapping[Any, Any], place: str) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
    for key, part in value.items():
        if key == OF_LOADERS:
            continue
        if key not in own:
            raise UserError(f"{place}: unknown key {_shown(key)}")
        check_form(part, own[key], f"{place}.{key}")


def _check_number(value: object, own: float, place: str) -> None:
    """A finite number, whole where the run's own is, and negative only where that is."""
    if not _is_number(value) or (isinstance(own, int) and not isinstance(value, int)):
        raise UserError(
            f"{place}: must be a finite number{', whole' * isinstance(own, int)}, got {_shown(value)}"
        )
    if own >= 0 > value:  # type: ignore[operator]
        raise UserError(f"{place}: must not be negative, got {_shown(value)}")


def check_numbers(value: object, place: str) -> None:
    """Raises a UserError unless ``value`` is a mapping of names to finite numbers, NaN or such mappings."""
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
    for key, part in value.items():
        if isinstance(part, Mapping):
            check_numbers(part, f"{place}.{key}")
        elif (
            not isinstance(key, str) or isinstance(part, bool) or not isinstance(part, int | float)
        ):
            raise UserError(
                f"{place}: must map names to numbers, got {_shown(key)}: {_shown(part)}"
            )


def check_weights(state: Mapping[str, Any], module: nn.Module, place: str) -> None:
    """Compares the kinds of a checkpoint's weights with the module's; torch compares names and shapes on loading.

    Raises:
        UserError: whole numbers where the module has others, or the other way round; no tensor.
    """
    own = module.state_dict()
    for name in own.keys() & state.keys():
        value = state[name]
        if (
            not isinstance(value, Tensor)
            or value.is_floating_point() != own[name].is_floating_point()
        ):
            raise UserError(f"{place}: {name} must be {_described(own[name])}, got {_shown(value)}")


def check_optimizers(
    optimizers: Sequence[Optimizer],
    states: object,
    weights: Mapping[str, Tensor],
    module: nn.Module,
    place: str,
) -> None:
    """Compares the optimizers' states in a checkpoint with the weights that they are for, before they are loaded.

    Args:
        optimizers: of this run, as Lightning has them.
        states: what the checkpoint has below ``optimizer_states``.
        weights: of the checkpoint, by name: another precision has states of its own dtype.
        module: has the parameters, by the same names.
        place: names the checkpoint in the message.

    Raises:
        UserError: the first state that does not fit.
    """
    if not isinstance(states, list) or len(states) != len(optimizers):
        raise UserError(
            f"{place}: must have {len(optimizers)} optimizer_states, got {_shown(states)}"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer, state in zip(optimizers, states, strict=True):
        parts = (
            state.get("optimizers")
            if isinstance(optimizer, Together) and isinstance(state, Mapping)
            else [state]
        )
        if not isinstance(parts, list) or len(parts) != len(each_of(optimizer)):
            raise UserError(
                f"{place}: must have the states of {len(each_of(optimizer))} students' optimizers"
            )
        for one, part in zip(each_of(optimizer), parts, strict=True):
            _check_optimizer(one, part, weights, names, place)


def _check_optimizer(
    optimizer: Optimizer,
    state: object,
    weights: Mapping[str, Tensor],
    names: Mapping[int, str],
    place: str,
) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise UserError(
            f"{place}: an optimizer's state must have state and param_groups, got {_shown(state)}"
        )
    groups, place = state.get("param_groups"), f"{place}: the optimizer's"
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{place} param_groups must be {len(optimizer.param_groups)}, got {_shown(groups)}"
        )

    # torch numbers the parameters of all groups from 0, in their order
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(part) if isinstance(part, list) else -1 for part in numbers] != sizes:
        raise UserError(f"{place} param_groups must have {sizes} parameters")
    if list(chain(*numbers)) != list(range(len(parameters))):  # type: ignore[arg-type]
        raise UserError(f"{place} parameters must be numbered from 0 to {len(parameters) - 1}")

    # settings by this run's own; then the state that the checkpoint's settings make (with momentum or without)
    own_settings = [_settings(group) for group in optimizer.param_groups]
    after_step = _Rehearsal(optimizer, own_settings).settings_after_step()
    for number, (group, own) in enumerate(zip(groups, after_step, strict=True)):
        check_form(_settings(group), _any_number(own), f"{place} param_groups.{number}")
    expected = _Rehearsal(
        optimizer,
        [{**own, **_settings(group)} for group, own in zip(groups, own_settings, strict=True)],
    )

    unknown = [
        key for key in state["state"] if type(key) is not int or not 0 <= key < len(parameters)
    ]
    if unknown:
        raise UserError(
            f"{place} state is of parameter {_shown(unknown[0])}, which it does not have"
        )
    casts = not isinstance(
        optimizer, ZeroRedundancyOptimizer
    )  # torch converts states to the parameters' dtype
    group_of = [
        number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]
    ]
    for number, content in state["state"].items():
        parameter = parameters[number]
        name = names.get(id(parameter), f"parameter {number}")
        saved = weights.get(name)
        dtype = (
            saved.dtype
            if casts and saved is not None and saved.is_floating_point()
            else parameter.dtype
        )
        own_state = expected.state_of(group_of[number], parameter.shape, dtype)
        of_this = f"{place} state of {name}"
        if own_state is None:
            _check_any_state(content, parameter, of_this)
            continue
        if content:  # empty where no gradient has come yet
            check_form(content, own_state, of_this)
            if missing := sorted(own_state.keys() - content.keys()):
                raise UserError(f"{of_this}: has no {missing[0]}")


class _Rehearsal:
    """A step of the same optimizer over zeros, on the CPU: what its state and its settings then are."""

    def __init__(self, optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
        self._groups = optimizer.param_groups
        self._optimizer = (
            optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        )
        self._settings = settings  # of each group
        self._states: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}
        self._can_foresee = type(self._optimizer).__module__.startswith(("torch.", "timm.", "kd."))

    def settings_after_step(self) -> list[dict[str, Any]]:
        """The groups' settings after a step: some optimizers count their steps there."""
        if not self._can_foresee:
            return self._settings
        found = []
        for settings, group in zip(self._settings, self._groups, strict=True):
            after = _settings(
                self._step(settings, group["params"][0].shape, group["params"][0].dtype)[1]
            )
            found.append({**after, **{name: settings[name] for name in SINGLE if name in settings}})
        return found

    def state_of(self, group: int, shape: torch.Size, dtype: torch.dtype) -> dict[str, Any] | None:
        """The state of a parameter after one step; None for an optimizer of the user's own, which kd can't foresee."""
        if not self._can_foresee:
            return None
        key = (group, shape, dtype)
        if key not in self._states:
            self._states[key] = self._step(self._settings[group], shape, dtype)[0]
        return self._states[key]

    def _step(
        self, settings: dict[str, Any], shape: torch.Size, dtype: torch.dtype
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        on_cpu = {name: value for name, value in SINGLE.items() if name in settings}
        copied = object.__new__(type(self._optimizer))
        # an attribute ``step`` is the wrapper that a schedule puts around the real optimizer's
        copied.__dict__.update(
            {name: value for name, value in vars(self._optimizer).items() if name != "step"}
        )
        copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = (
            OrderedDict(),
            OrderedDict(),
        )
        copied.state, copied.param_groups = (
            defaultdict(dict),
            [{**settings, **on_cpu, "params": [parameter]}],
        )
        try:
            with torch.random.fork_rng(devices=[]):
                copied.step()
        except Exception as error:
            problem = (
                f"resume: the optimizer can't work with the checkpoint's settings: {plain(error)}"
            )
            raise UserError(problem) from error
        return dict(copied.state[parameter]), copied.param_groups[0]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _any_number(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with whole numbers as fractions, which a checkpoint's may be."""
    return {key: float(value) if type(value) is int else value for key, value in settings.items()}


def _check_any_state(content: object, parameter: Tensor, place: str) -> None:
    """Of an optimizer that the user made: tensors of the parameter's shape, or numbers; all finite."""
    if not isinstance(content, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(content)}")
    for key, value in content.items():
        for tensor in _tensors(value):
            if tensor.numel() != 1 and tensor.shape != parameter.shape:
                raise UserError(
                    f"{place}: {key} must have the shape {tuple(parameter.shape)}, got {_shown(tensor)}"
                )
            _check_finite(tensor, f"{place}: {key}")


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _check_tensor(value: object, own: Tensor, place: str) -> None:
    if not isinstance(value, Tensor) or value.shape != own.shape or value.dtype != own.dtype:
        raise UserError(f"{place}: must be {_described(own)}, got {_shown(value)}")
    _check_finite(value, place)
    if value.dim() == 0 and value < 0:  # a counter of steps, a norm
        raise UserError(f"{place}: must not be negative, got {_shown(value)}")


def _check_finite(value: Tensor, place: str) -> None:
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise UserError(f"{place}: has NaN or infinite numbers")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) < MOST


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _shown(value: object) -> str:
    return (
        _described(value) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
    )
