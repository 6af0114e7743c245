"""States of a checkpoint, compared with what they are loaded into.

torch's fused steps read the state of an optimizer by the size of its weights: a moment of one number is read, and
written, past its end. Lightning and torch put a checkpoint's values into their objects as they are. A state is
therefore loaded only if it has the form of the state that this run would have written.

``place`` is, in all functions, the path of a value in the checkpoint: it begins a user's error.
"""

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from kd.errors import UserError, plain

MOST = 2**53  # of counters: whole numbers that a float64 holds
OF_LOADERS = "combined_loader"  # Lightning keeps the states of the user's own stateful loaders here
SINGLE = {"fused": None, "foreach": False, "capturable": False}
"""Settings of a step that runs on any device, with the same state."""


def check_form(value: object, expected: object, place: str) -> None:
    """Compares a state with the run's own: the same kind, the same keys or fewer, the same lengths, finite numbers.

    It looks into mappings and lists, part by part; what is below :data:`OF_LOADERS` is not compared. What is true or false
    in the run's own may be null; a number may not. Words and dtypes must be equal.

    Args:
        value: as it is in a checkpoint.
        expected: the same part of this run's state; None takes null, true, false or any number below :data:`MOST`.
        place: names it in the message.

    Raises:
        UserError: the first difference.
    """
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
        for key, part in value.items():
            if key == OF_LOADERS:
                continue
            if key not in expected:
                raise UserError(f"{place}: unknown key {_shown(key)}")
            check_form(part, expected[key], f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        count = len(expected)
        if not isinstance(value, list | tuple) or len(value) != count:
            shown = _shown(value)
            raise UserError(f"{place}: must be a list of {count}, got {shown}")
        for number, part in enumerate(value):
            place_of_part = f"{place}.{number}"
            check_form(part, expected[number], place_of_part)
    elif wanted := _unmet_demand(value, expected):
        raise UserError(f"{place}: must {wanted}, got {_shown(value)}")


def _unmet_demand(value: object, expected: object) -> str:
    """What is wrong with a checkpoint's value, by the run's own value: the end of a message, after "must"; "" for a value
    that fits.

    A tensor without axes counts as a counter (``step``), and may not be negative, where the run's own is above 0. The
    moment of a weight without axes may be negative. It is told from a counter by its value in the rehearsed step
    (:func:`_rehearsed`): 0, as all gradients there are.
    """
    may_be_null = value is None or isinstance(value, bool)
    # False for NaN too; math.isfinite would raise an error on whole numbers beyond floats
    is_finite = isinstance(value, int | float) and not may_be_null and abs(value) < MOST
    if isinstance(expected, Tensor):
        wanted = _shown(expected)
        if not isinstance(value, Tensor) or _shown(value) != wanted:
            return f"be {wanted}"
        is_counter = expected.dim() == 0 and bool(expected > 0)
        if is_counter and bool(value < 0):
            return "not be negative"
        return _demand_if_not_finite(value)
    if expected is None:
        return "" if may_be_null or is_finite else "be null or a number"
    if isinstance(expected, bool):
        return "" if may_be_null else "be true, false or null"
    if isinstance(expected, int | float):
        if not is_finite or (isinstance(expected, int) and not isinstance(value, int)):
            return f"be a finite number{', whole' * isinstance(expected, int)}"
        return "not be negative" if expected >= 0 > value else ""  # type: ignore[operator]
    return "" if value == expected else f"be {_shown(expected)}"  # a word, a dtype


def _demand_if_not_finite(value: Tensor) -> str:
    """The end of a message, after "must", for a tensor with NaN or infinite numbers; "" for any other."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        return "have finite numbers alone"
    return ""


def check_numbers(value: object, place: str) -> None:
    """Raises a UserError unless ``value`` is a mapping of names to numbers (also NaN and infinite) or such mappings.

    The names of inner mappings themselves are not checked.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(value)}")
    for key, part in value.items():
        if isinstance(part, Mapping):
            check_numbers(part, f"{place}.{key}")
        elif not isinstance(key, str) or type(part) not in (int, float):
            shown = f"{_shown(key)}: {_shown(part)}"
            raise UserError(f"{place}: must map names to numbers, got {shown}")


def check_weights(state: Mapping[str, Any], module: nn.Module, place: str) -> None:
    """Compares the kinds of a checkpoint's weights with the module's; names and shapes are compared on loading.

    Args:
        state: weights of the checkpoint, by name.
        module: whose ``state_dict`` counts.
        place: names the checkpoint in the message.

    Raises:
        UserError: a weight has whole numbers where the module's has fractions, or the other way round; or it is no tensor.
    """
    for name, expected in module.state_dict().items():
        value = state.get(name, expected)
        if isinstance(value, Tensor) and value.is_floating_point() == expected.is_floating_point():
            continue
        raise UserError(f"{place}: {name} must be {_shown(expected)}, got {_shown(value)}")


def check_optimizers(
    optimizers: Sequence[Optimizer],
    states: object,
    weights: Mapping[str, Tensor],
    module: nn.Module,
    place: str,
) -> None:
    """Compares the optimizers' states in a checkpoint with the weights that they are for, before they are loaded.

    torch numbers the parameters of all groups of an optimizer from 0, in their order, and so must the checkpoint.

    Args:
        optimizers: of this run, as Lightning has them.
        states: what the checkpoint has below ``optimizer_states``: of each ``state`` by the parameter's number, and
            ``param_groups``.
        weights: of the checkpoint, by name: another precision has states of its own dtype.
        module: has the parameters, by the same names.
        place: names the checkpoint in the message.

    Raises:
        UserError: the first difference.
    """
    if not isinstance(states, list) or len(states) != len(optimizers):
        raise UserError(
            f"{place}: must have {len(optimizers)} optimizer_states, got {_shown(states)}"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer, state in zip(optimizers, states, strict=True):
        _check_optimizer(optimizer, state, weights, names, place)


def _check_optimizer(
    optimizer: Optimizer,
    state: object,
    weights: Mapping[str, Tensor],
    names: Mapping[int, str],
    place: str,
) -> None:
    """Compares one optimizer's groups, then of each group the state of each parameter and the group's settings.

    Arguments and errors as of :func:`check_optimizers`, but for the parameters' ``names`` by their ids. A parameter without
    state passes: no gradient has come to it yet.
    """
    saved: Any = state if isinstance(state, Mapping) else {}
    groups = saved.get("param_groups")
    contents = saved.get("state")
    counter = itertools.count()
    numbers = [[next(counter) for _ in own["params"]] for own in optimizer.param_groups]
    numbered = []
    for group in groups if isinstance(groups, list) else ():
        numbered.append(group.get("params") if isinstance(group, Mapping) else None)
    if numbered != numbers or not isinstance(contents, Mapping):
        sizes = [len(of_group) for of_group in numbers]
        raise UserError(
            f"{place}: an optimizer's state must have state, and param_groups of {sizes} parameters numbered from 0, "
            f"got {_shown(groups or state)}"
        )

    # on loading torch converts states to the parameter's dtype; in the checkpoint they have its weights' dtype
    converts = not isinstance(optimizer, ZeroRedundancyOptimizer)
    left = dict(contents)
    for i, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        after_a_step: dict[object, tuple[Any, dict[str, Any]]] = {}  # by shape and dtype
        for number, parameter in zip(numbers[i], own["params"], strict=True):
            name = names.get(id(parameter), f"parameter {number}")
            dtype = parameter.dtype
            if converts and name in weights and weights[name].is_floating_point():
                dtype = weights[name].dtype
            form = (parameter.shape, dtype)
            if form not in after_a_step:
                after_a_step[form] = _rehearsed(optimizer, own, *form)
            expected, settings = after_a_step[form]
            content = left.pop(number, {})
            if content != {}:  # else no gradient has come yet
                _check_state(
                    content, expected, parameter, f"{place}: the optimizer's state of {name}"
                )
        if not own["params"]:
            continue
        # a checkpoint's whole numbers may be fractions
        for key, value in settings.items():
            if type(value) is int:
                settings[key] = float(value)
        check_form(_settings(group), settings, f"{place}: the optimizer's param_groups.{i}")
    # what is left is of parameters that this run does not have
    check_form(left, {}, f"{place}: the optimizer's state")


def _check_state(
    content: object, expected: dict[str, Any] | None, parameter: Tensor, place: str
) -> None:
    """Compares the state of one parameter.

    Args:
        content: of the checkpoint, state by name (``exp_avg``, ``step``, ...).
        expected: what a step would write, all of which it must have; None, of an optimizer of the user's own: tensors, also
            in lists, must be finite and have the parameter's shape or one number.
        parameter: of the run.
        place: see the module.

    Raises:
        UserError: a state of another form, one too many or too few.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"{place}: must be a mapping, got {_shown(content)}")
    if expected is not None:
        check_form(content, expected, place)
        for key in expected:
            if key not in content:
                raise UserError(f"{place}: has no {key}")
        return
    for key, value in content.items():
        for part in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(part, Tensor):
                continue
            wanted = _demand_if_not_finite(part)
            if part.numel() != 1 and part.shape != parameter.shape:
                wanted = f"have the shape {tuple(parameter.shape)}"
            if wanted:
                raise UserError(f"{place}: {key} must {wanted}, got {_shown(part)}")


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
        after the step, as some optimizers count their steps there.

    Raises:
        UserError: the step fails.
    """
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    own = _settings(group)
    if not type(inner).__module__.startswith(("torch.", "timm.", "kd.")):
        return None, own
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    # what it held of such a parameter before its first step: torch's Adagrad below 2.12 has sums then
    alike = (
        held for other, held in inner.state.items() if (other.shape, other.dtype) == (shape, dtype)
    )
    state = tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), dict(next(alike, {})))
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
    return dict(copied.state[parameter]), after


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _shown(value: object) -> str:
    """A value in a message: its type, and its first 60 characters; of a tensor dtype and shape (``float32 (3, 4)``)."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"
