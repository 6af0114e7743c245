"""Brings weights into a model's own layout and loads them."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.foreign import of_mobilenet, renamed
from kd.models.weights import About, read_weights, say

NEW = "kd_new_classifier"  # an attribute of a model whose classifier has no weights from its file


def load_checkpoint(model: nn.Module, path: Path, key: str, classes: Sequence[str] = (), head: bool = False) -> None:
    """Loads weights into ``model``; position embeddings of another size are resampled.

    Args:
        model: to load into.
        path: see :func:`read_weights`.
        key: the configuration key that named the file.
        classes: names of the model's classes, compared with the file's where it has them.
        head: the file must hold the same classes (a teacher's must); else a file of other classes gives its backbone.

    Raises:
        UserError: no such file, not a checkpoint, or tensors that do not fit (the first ones are named).
    """
    file, given, about = read_weights(path, key)
    given, library = renamed(given)
    if not library:
        given, library = of_mobilenet(given, model)
    if library:
        say(f"{key}: {file}: names of {library} brought into timm's")
    state = _in_the_models_layout(_without_prefix(given, model, f"{key}: {file}"), model, about)
    expected, names = model.state_dict(), classifier_names(model)
    of_head, of_files_head = _below(expected, names), _below(state, names)
    if not of_head:  # a model that was built without a classifier
        state = {k: v for k, v in state.items() if k not in of_files_head}
    last = _below(of_head, ["head.classifier"]) or of_head  # a dense model's head is more than its classifier
    other = _other_classes(about.classes, classes, state, expected, last)
    if other and head:
        hint = f"; {key.removesuffix('.checkpoint')}.classes=FILE (one name a line) says which those are"
        raise UserError(f"{key}: {file} {other}{'' if about.classes else hint}")
    if other:
        state = {k: v for k, v in state.items() if k not in last}
        say(f"{key}: {file} {other}: its backbone is taken, the classifier is new")
    if of_head and not of_files_head and not head:
        say(f"{key}: {file} has no classifier: its backbone is taken, the classifier is new")
    wrong = [
        f"{k} is {tuple(state[k].shape)} there, {tuple(v.shape)} here"
        for k, v in expected.items()
        if k in state and state[k].shape != v.shape
    ]
    missing = [k for k in expected if k not in state and (head or k not in of_head)]
    wrong += [f"{k} is missing" for k in missing]
    wrong += [f"{k} is not in the model" for k in state if k not in expected]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        root = key.removesuffix(".checkpoint")
        hint = f"; another of timm's: {root}.arch; a model of another library or of your own: {root}.builder"
        hint = f"{hint} (kd/models/README.md)" if 2 * len(missing) > len(expected) else ""
        if head and not of_files_head and ".teacher" in key and {*missing} <= {*of_head}:
            hint = f"; a backbone has no classifier: recipe=photos {root}.backbone={path} fine-tunes it first, "
            hint += "recipe=foundation_vit learns its features without labels"
        raise UserError(f"{key}: {file} does not fit: {'; '.join(wrong[:3])}{more}{hint}")
    model.load_state_dict({k: v.to(expected[k].dtype) for k, v in state.items()}, strict=False)
    setattr(model, NEW, not all(k in state for k in last))


def has_new_classifier(model: nn.Module) -> bool:
    """Whether all but the classifier has weights from a file (:func:`load_checkpoint`, or timm's pre-trained ones)."""
    return bool(getattr(model, NEW, False))


def _other_classes(
    names: Sequence[str], classes: Sequence[str], state: Mapping[str, Tensor], expected: Mapping[str, Tensor],
    last: Sequence[str],
) -> str:  # fmt: skip
    """How the file's classes differ from the data's; empty where they don't, or nothing is known."""
    for k in last:
        given, wanted = tuple(state[k].shape) if k in state else (), tuple(expected[k].shape)
        if given and given != wanted and given[1:] == wanted[1:]:
            return f"names {given[0]} classes, the data has {wanted[0]}"
    if not names or not classes or list(names) == list(classes):
        return ""
    i = next((i for i, (a, b) in enumerate(zip(names, classes, strict=False)) if a != b), None)
    if i is None:
        return f"names {len(names)} classes, the data has {len(classes)}"
    return f"was trained on other classes: class {i} is {names[i]!r} there, {classes[i]!r} in the data"


def classifier_names(model: nn.Module) -> list[str]:
    """The module paths of a model's last layers (two for a model with a distillation token)."""
    found = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return [found] if isinstance(found, str) else list(found)


def _below(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return [key for key in keys if key.startswith(prefixes)]


def _without_prefix(state: dict[str, Tensor], model: nn.Module, name: str) -> dict[str, Tensor]:
    """The state without the prefix that a wrapper class (``self.model = ...``) gives every name; with kd's own."""
    if {f"model.{name}" for name in state} == set(model.state_dict()):  # of a builder's module, trained elsewhere
        return {f"model.{name}": tensor for name, tensor in state.items()}
    for part in (model, getattr(model, "backbone", None)):
        if not isinstance(part, nn.Module):
            continue
        expected = set(part.state_dict())
        prefix = _common_prefix(state, expected)
        if prefix is None:
            continue
        if not prefix or (part is not model and prefix == "backbone."):
            return state
        inner = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        inner |= _head_beside(state, prefix, expected - inner.keys(), part)
        rest = len(state) - len(inner)
        left = f", {rest} tensors beside it are left out" if rest else ""
        say(f"{name}: the weights below '{prefix[:-1]}' are taken{left}")
        return inner
    return state


def _head_beside(state: Mapping[str, Tensor], prefix: str, missing: set[str], model: nn.Module) -> dict[str, Tensor]:
    """The one linear layer beside a wrapped backbone that is of the classifier's width, where the backbone has none."""
    names = [name for name in classifier_names(model) if f"{name}.weight" in missing]
    width = model.state_dict()[f"{names[0]}.weight"].shape[1:] if len(names) == 1 else None
    beside = [k.removesuffix("weight") for k, v in state.items() if k.endswith("weight") and v.shape[1:] == width
              and v.ndim == 2 and not k.startswith(prefix)]  # fmt: skip
    if len(beside) != 1:
        return {}
    parts = ("weight", "bias")
    return {f"{names[0]}.{part}": state[f"{beside[0]}{part}"] for part in parts if f"{beside[0]}{part}" in state}


def _common_prefix(state: Mapping[str, Tensor], expected: set[str]) -> str | None:
    """The prefix of at least half of the expected names; None where they have none in common."""
    if len(expected & state.keys()) * 2 >= len(expected):
        return ""
    anchor = max(expected, key=len, default="")
    candidates = {k[: -len(name)] for name in (anchor, *sorted(expected)[:8]) for k in state if k.endswith(f".{name}")}
    hits = {prefix: sum(prefix + name in state for name in expected) for prefix in sorted(candidates)}
    best = max(hits, key=lambda prefix: hits[prefix], default=None)
    return best if best is not None and hits[best] * 2 >= len(expected) else None


def _in_the_models_layout(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """Applies the architecture's own checkpoint filter; a plain timm file becomes a dense model's backbone."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return _filtered(state, model, about)
    inner = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    if inner:
        rest = {k: v for k, v in state.items() if not k.startswith("backbone.")}
        return {**_prefixed(_filtered(inner, backbone, about)), **rest}
    wanted = backbone.state_dict()  # a file for classification holds more: layers after the last level, a classifier
    return _prefixed({k: v for k, v in _filtered(state, backbone, about).items() if k in wanted})


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"backbone.{k}": v for k, v in state.items()}


def _filtered(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """timm keeps a filter for foreign layouts and other position embeddings beside the model class."""
    state = _with_positions(state, model, about)
    convert: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if convert is None or (
        state.keys() == model.state_dict().keys()
        and all(v.shape == state[k].shape for k, v in model.state_dict().items())
    ):
        return state
    try:
        return convert(state, model)
    except Exception:  # a file of another architecture: the comparison of keys and shapes says it better
        return state


CLEARLY = 0.8  # of the squared difference between neighbours on a square grid


def grid_shown(positions: Tensor) -> list[int]:
    """The grid that is not square on which neighbouring position embeddings ``(L, D)`` are alike; else nothing."""
    length, off = len(positions), {}
    for height in (n for n in range(2, length // 2 + 1) if length % n == 0):
        grid = positions.float().unflatten(0, (height, length // height))
        pairs = [grid.diff(dim=0).square().mean(-1), grid.diff(dim=1).square().mean(-1)]
        off[height] = torch.cat([part.flatten() for part in pairs]).mean().item()
    best, square = min(off, key=off.__getitem__, default=0), math.isqrt(length)
    if best == square or best == 0 or off[best] > CLEARLY * off.get(square, max(off.values())):
        return []
    return [best, length // best]


def _with_positions(state: dict[str, Tensor], model: nn.Module, about: About) -> dict[str, Tensor]:
    """Resamples position embeddings from the grid that the file names or that they show; one number fits many grids."""
    new: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    positions, patch = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    if new is None or positions is None or patch is None or positions.ndim != 3:
        return state
    if about.img_size is not None:
        old = [side // step for side, step in zip(about.img_size, patch.shape[-2:], strict=True)]
    else:
        own = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
        old = grid_shown(positions[0, own:])
        if not old:
            return state
        say(f"position embeddings of {old[0]}x{old[1]} patches (by how alike neighbours are) for {new[0]}x{new[1]}")
    prefix = positions.shape[1] - old[0] * old[1]
    if old == list(new) or prefix not in (0, getattr(model, "num_prefix_tokens", 0)):
        return state
    return {**state, "pos_embed": resample_abs_pos_embed(positions, list(new), old, num_prefix_tokens=prefix)}


def freeze_backbone(model: nn.Module, arch: str) -> tuple[str, ...]:
    """Leaves a gradient to the classifier alone; gives the paths of its layers.

    Raises:
        UserError: it has no weights.
    """
    trained = tuple(classifier_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(f"{head}." for head in trained)))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model.student.freeze: nothing is left to train of {arch}, whose classifier "
                        f"({', '.join(trained)}) has no weights")  # fmt: skip
    return trained
