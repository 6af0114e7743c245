"""States of a checkpoint, compared with what they are loaded into.

torch's fused steps read the state of an optimizer by the size of its weights: a moment of one number is read, and
written, past its end. Lightning and torch put a checkpoint's values into their objects as they are. A state is
therefore loaded only if it has the form of the state that this run would have written.

``place`` is, in all functions, the path of a value in the checkpoint: it begins a user's error.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from kd.errors import UserError, plain

MOST = 2**53  # of counters: whole numbers that a float64 holds
OF_LOADERS = "combined_loader"  # Lightning keeps the states of the user's own stateful loaders here
SINGLE = {"fused": None, "foreach": False, "capturable": False}
"""Settings of a step that runs on any device, with the same state."""


def check_form(value: object, expected: object, place: str) -> None:
    """Compares a state with the run's own: the same kind, the same keys or fewer, the same lengths, finite numbers.

    It looks into mappings and lists, part by part. What is true or false in the run's own may be null; a number may not.
    Words and dtypes must be equal.

    Args:
        value: as it is in a checkpoint.
        expected: the same part of this run's state; None takes null, true, false or any number below :data:`MOST`.
        place: names it in the message.

    Raises:
        UserError: the first difference.
    """
    if isinstance(expected, Mapping):
        _check_keys(value, expected, place)
    elif isinstance(expected, list | tuple):
        _check_list(value, expected, place)
    elif isinstance(expected, Tensor):
        _check_tensor(value, expected, place)
    elif expected is None:
        if not (value is None or isinstance(value, bool) or _is_number(value)):
            raise UserError(f"{place}: must be null or a number, got {_shown(value)}")
    elif isinstance(expected, bool):
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{place}: must be true, false or null, got {_shown(value)}")
    elif isinstance(expected, int | float):
        _check_number(value, expected, place)
    elif value != expected:  # a word, a dtype
        raise UserError(f"{place}: must be {_shown(expected)}, got {_shown(value)}")


def _check_keys(value: object, expected: Mapping[Any, Any], place: str) -> None:
    """Checks a mapping of a checkpoint, key by key; keys may be missing. States of the user's own loaders may be anything.

    Args:
        value: of the checkpoint.
        expected: the run's own: the keys that it may have, and their forms.
        place: its path in the checkpoint, with which a user's error begins.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
    for key, part in value.items():
        if key == OF_LOADERS:
            continue
        if key not in expected:
            raise UserError(f"{place}: unknown key {_shown(key)}")
        check_form(part, expected[key], f"{place}.{key}")


def _check_list(value: object, expected: Sequence[object], place: str) -> None:
    """Checks a list: as long as the run's own, part by part of the same form; arguments as of :func:`_check_keys`."""
    count = len(expected)
    if not isinstance(value, list | tuple) or len(value) != count:
        shown = _shown(value)
        raise UserError(f"{place}: must be a list of {count}, got {shown}")
    for number, part in enumerate(value):
        place_of_part = f"{place}.{number}"
        check_form(part, expected[number], place_of_part)


def _check_number(value: object, expected: float, place: str) -> None:
    """Checks a number: finite and below :data:`MOST`, whole where the run's own is, and negative only where that is.

    Arguments as of :func:`_check_keys`.
    """
    kind = "a finite number"
    is_right = _is_number(value)
    if isinstance(expected, int):
        kind = "a finite number, whole"
        is_right = is_right and isinstance(value, int)
    if not is_right:
        raise UserError(f"{place}: must be {kind}, got {_shown(value)}")
    if expected >= 0 > value:  # type: ignore[operator]
        raise UserError(f"{place}: must not be negative, got {_shown(value)}")


def check_numbers(value: object, place: str) -> None:
    """Raises a UserError unless ``value`` is a mapping of names to numbers (also NaN and infinite) or such mappings.

    The names of inner mappings themselves are not checked.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
    for key, part in value.items():
        if isinstance(part, Mapping):
            check_numbers(part, f"{place}.{key}")
            continue
        is_number = isinstance(part, int | float) and not isinstance(part, bool)
        if not isinstance(key, str) or not is_number:
            raise UserError(
                f"{place}: must map names to numbers, got {_shown(key)}: {_shown(part)}"
            )


def check_weights(state: Mapping[str, Any], module: nn.Module, place: str) -> None:
    """Compares the kinds of a checkpoint's weights with the module's; names and shapes are compared on loading.

    Args:
        state: weights of the checkpoint, by name.
        module: whose ``state_dict`` counts.
        place: names the checkpoint in the message.

    Raises:
        UserError: whole numbers where the module has fractions, or the other way round; no tensor.
    """
    for name, expected in module.state_dict().items():
        if name not in state:
            continue
        value = state[name]
        same_kind = (
            isinstance(value, Tensor) and value.is_floating_point() == expected.is_floating_point()
        )
        if not same_kind:
            raise UserError(f"{place}: {name} must be {_described(expected)}, got {_shown(value)}")


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
    names = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
    for optimizer, state in zip(optimizers, states, strict=True):
        _check_optimizer(optimizer, state, weights, names, place)


def _check_optimizer(
    optimizer: Optimizer,
    state: object,
    weights: Mapping[str, Tensor],
    names: Mapping[int, str],
    place: str,
) -> None:
    """Compares one optimizer: its groups and their settings, then the state of each parameter.

    Args:
        optimizer: of this run.
        state: its state in the checkpoint: ``state`` by the parameter's number, and ``param_groups``.
        weights: of the checkpoint, by name.
        names: of the parameters, by their ids.
        place: names the checkpoint in the message.

    Raises:
        UserError: the first difference.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise UserError(
            f"{place}: an optimizer's state must have state and param_groups, got {_shown(state)}"
        )
    place = f"{place}: the optimizer's"
    groups = _checked_groups(optimizer, state.get("param_groups"), place)
    contents = state["state"]
    count = sum(len(group["params"]) for group in groups)
    for key in contents:
        if type(key) is not int or not 0 <= key < count:
            raise UserError(f"{place} state is of parameter {_shown(key)}, which it does not have")

    # torch converts states to the dtype of the parameters, which the checkpoint's weights have had
    converts = not isinstance(optimizer, ZeroRedundancyOptimizer)
    pairs = zip(groups, optimizer.param_groups, strict=True)
    for number, (group, own) in enumerate(pairs):
        parameters = own["params"]
        first = parameters[0]
        _, settings = _rehearsed(optimizer, own, first.shape, first.dtype)
        check_form(_settings(group), settings, f"{place} param_groups.{number}")
        states: dict[object, dict[str, Any] | None] = {}  # after a step, by shape and dtype
        for key, parameter in zip(group["params"], parameters, strict=True):
            name = names.get(id(parameter), f"parameter {key}")
            dtype = parameter.dtype
            saved = weights.get(name)
            if converts and saved is not None and saved.is_floating_point():
                dtype = saved.dtype
            form = (parameter.shape, dtype)
            if form not in states:
                states[form], _ = _rehearsed(optimizer, own, *form)
            content = contents.get(key, {})
            _check_state(content, states[form], parameter, f"{place} state of {name}")


def _checked_groups(optimizer: Optimizer, groups: object, place: str) -> list[Mapping[str, Any]]:
    """A checkpoint's parameter groups, after a check: as many as this run's, with as many parameters each.

    torch numbers the parameters of all groups from 0, in their order, and so must the checkpoint.

    Args:
        optimizer: of this run.
        groups: below ``param_groups`` of the checkpoint's state.
        place: begins the message.

    Raises:
        UserError: other groups, sizes or numbers.
    """
    own_groups = optimizer.param_groups
    if not isinstance(groups, list) or len(groups) != len(own_groups):
        raise UserError(f"{place} param_groups must be {len(own_groups)}, got {_shown(groups)}")
    sizes = [len(group["params"]) for group in own_groups]
    first = 0
    for group, size in zip(groups, sizes, strict=True):
        numbers = None
        if isinstance(group, Mapping):
            numbers = group.get("params")
        if not isinstance(numbers, list) or len(numbers) != size:
            raise UserError(f"{place} param_groups must have {sizes} parameters")
        if numbers != list(range(first, first + size)):
            last = sum(sizes) - 1
            raise UserError(f"{place} parameters must be numbered from 0 to {last}")
        first += size
    return groups


def _check_state(
    content: object, expected: dict[str, Any] | None, parameter: Tensor, place: str
) -> None:
    """Compares the state of one parameter.

    Args:
        content: of the checkpoint, state by name (``exp_avg``, ``step``, ...).
        expected: what a step would write, likewise; None: it can't be foreseen.
        parameter: of the run.
        place: see the module.

    Raises:
        UserError: a state of another form, one too many or too few; an empty ``content`` passes. Of an optimizer that can't
            be foreseen only what :func:`_check_any_state` refuses.
    """
    if expected is None:
        _check_any_state(content, parameter, place)
    elif content != {}:  # empty where no gradient has come yet
        check_form(content, expected, place)
        assert isinstance(content, Mapping), "checked"
        missing = sorted(expected.keys() - content.keys())
        if missing:
            raise UserError(f"{place}: has no {missing[0]}")


def _rehearsed(
    optimizer: Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A step of a copy of an optimizer over zeros, on the CPU: what its state and its settings then are.

    The run's optimizer, its weights and its random numbers stay as they are. An optimizer of the user's own may do anything
    in its step, so it makes none.

    Args:
        optimizer: of the run; of one that is sharded (ZeRO) the optimizer inside it is copied.
        group: of the run's parameters.
        shape: of one of them.
        dtype: likewise.

    Returns:
        The parameter's state by name (``exp_avg``, ...), None for an optimizer of the user's own; and the group's settings
        after the step, as some optimizers count their steps there, whole numbers as fractions.

    Raises:
        UserError: the step fails.
    """
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    own = _settings(group)
    if not type(inner).__module__.startswith(("torch.", "timm.", "kd.")):
        return None, _any_number(own)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    # what it held of such a parameter before its first step: torch's Adagrad below 2.12 has sums then
    held = [
        state
        for other, state in inner.state.items()
        if (other.shape, other.dtype) == (shape, dtype)
    ]
    state = {}
    for name, value in held[0].items() if held else ():
        state[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    copied = object.__new__(type(inner))
    copied.__dict__.update(vars(inner))
    copied.__dict__.pop("step", None)  # the wrapper that a schedule puts around the real one's
    copied._optimizer_step_pre_hooks = OrderedDict()
    copied._optimizer_step_post_hooks = OrderedDict()
    copied.state = defaultdict(dict, {parameter: state})
    on_cpu = {name: value for name, value in SINGLE.items() if name in own}
    copied.param_groups = [{**own, **on_cpu, "params": [parameter]}]
    try:
        with torch.random.fork_rng(devices=[]):
            copied.step()
    except Exception as error:
        raise UserError(f"resume: the optimizer can't make a step: {plain(error)}") from error
    after = {**_settings(copied.param_groups[0]), **{name: own[name] for name in on_cpu}}
    return dict(copied.state[parameter]), _any_number(after)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _any_number(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with whole numbers as fractions, which a checkpoint's may be."""
    return {key: float(value) if type(value) is int else value for key, value in settings.items()}


def _check_any_state(content: object, parameter: Tensor, place: str) -> None:
    """Checks the tensors in the state of an optimizer that the user made, also in lists: each is finite, and has the
    parameter's shape or one number. What is no tensor is taken as it is.

    Args:
        content: of the checkpoint, for one parameter: a mapping.
        parameter: of the run.
        place: see the module.
    """
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
    """All tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _check_tensor(value: object, expected: Tensor, place: str) -> None:
    """Refuses what is not a finite tensor of the shape and dtype of ``expected``, and negative counters.

    A counter is a tensor without axes that the run's own holds above 0, as ``step`` is after one. A moment of a weight
    without axes is none: it is 0 there, as the rehearsed gradients are, and may be negative.
    """
    wanted = _described(expected)
    if not isinstance(value, Tensor) or _described(value) != wanted:
        raise UserError(f"{place}: must be {wanted}, got {_shown(value)}")
    _check_finite(value, place)
    is_counter = expected.dim() == 0 and bool(expected > 0)
    if is_counter and value < 0:
        number = float(value)
        raise UserError(f"{place}: must not be negative, got {number:g}")


def _check_finite(value: Tensor, place: str) -> None:
    """Raises a UserError for a tensor of fractions with a NaN or an infinite number; whole numbers are never either."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise UserError(f"{place}: has NaN or infinite numbers")


def _is_number(value: object) -> bool:
    """Whether it is a finite number, and not one too large to count with (:data:`MOST`)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # False for NaN too; math.isfinite would raise an error on whole numbers beyond floats
    return abs(value) < MOST


def _described(value: Tensor) -> str:
    """Dtype and shape: ``float32 (3, 4)``."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _shown(value: object) -> str:
    """A value in a message: its type, and its first 60 characters; of a tensor dtype and shape."""
    if isinstance(value, Tensor):
        return _described(value)
    return f"{type(value).__name__} {value!r:.60}"
