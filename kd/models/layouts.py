"""Finds one model's tensors in a weights file, and brings them under that model's names.

Nothing is decided by a list of names. Every place in the file that may hold the model is tried: as it is, under the
names of other libraries, and through the filter that timm keeps beside the architecture. The place from which the
most tensors have the model's names *and* shapes is taken. Two models that fit equally well are a question to the user.
"""

import contextlib
import inspect
import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from kd.errors import UserError
from kd.models.foreign import foreign_models

COUNTER = ".num_batches_tracked"  # of BatchNorm, which only reads it without a momentum; many files lack it
DEEPEST = 12  # dots of a name behind which no prefix ends
PRETRAINING = ("decoder_", "mask_token")  # of masked autoencoders: parts that no classifier has
AVERAGES = {
    "state_dict_ema": "state_dict",
    "model_ema": "model",
}  # timm's order of what its trainer saves
CLEARLY = 0.8  # of the squared difference between neighbours on a square grid
ROW_ENDS = 2.0  # how many times the difference between neighbours one row's end and the next one's begin differ
Size = Sequence[int]


@dataclass
class FileModel:
    """One model of a file, under the names of the wanted one."""

    prefix: str  # what is before its names in the file, with the last dot; "" where they begin at the top
    state: dict[str, Tensor]  # under the wanted model's names
    library: str = ""  # whose names were replaced
    positions: str = ""  # what was found out about its position embeddings, for the user
    same_shape: int = 0  # how many of the wanted model's tensors it has, with their shapes
    same_name: int = 0  # how many with any shape
    rivals: list[str] = field(
        default_factory=list
    )  # the prefixes of other models that were passed over

    @property
    def rank(self) -> tuple[int, int, int]:
        """The higher, the better it fits: equal shapes, equal names, few tensors that the wanted model lacks."""
        return self.same_shape, self.same_name, self.same_name - len(self.state)


def choose(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    img_size: Size | None,
    part: str | None,
    name: str,
    key: str,
) -> FileModel:
    """The place in a file whose tensors fit the model best.

    Args:
        tensors: all of the file's, by dotted name (:func:`kd.models.weights.tensors_in`).
        model: the wanted one.
        img_size: height and width of the input that the file names, or None.
        part: names that must be among those before the model's (``teacher``, ``net.encoder``); ``.``: the shortest
            prefix of all.
        name: of the file, for messages.
        key: the setting that names the file; ``part`` is from ``<key>_key``.

    Raises:
        UserError: two models fit equally well, or nothing is below ``part``.
    """
    layouts = list(_layouts(tensors, model, img_size))
    half = _expected_count(model) / 2
    fitting = [layout for layout in layouts if layout.same_shape >= half] or layouts
    if part is not None:
        fitting = _below_part(fitting, part, f"{name} ({key}_key)")
    best = max(fitting, key=lambda layout: layout.rank, default=FileModel("", dict(tensors)))
    others = [
        layout
        for layout in fitting
        if layout.same_shape >= half and not _same_weights(layout, best)
    ]
    replaced = [layout for layout in others if _is_plain_of(layout.prefix, best.prefix)]
    equal = [
        layout
        for layout in others
        if layout.same_shape == best.same_shape and layout not in replaced
    ]
    average = next((layout for layout in equal if _is_plain_of(best.prefix, layout.prefix)), None)
    if average is not None and len(equal) == 1:
        replaced, equal, best = [best], [], average
    if equal:
        shown = _distinct_prefixes([best, *equal])
        listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
        raise UserError(
            f"{name} holds {len(shown)} models that fit equally well, below {listed}; "
            f"{key}_key=NAME says which, for example {key}_key={shown[0].strip(chr(39))}"
        )
    best.rivals = [layout.prefix for layout in [*others, *replaced] if layout is not best]
    best.state = {
        k: v
        for k, v in best.state.items()
        if not k.startswith(PRETRAINING) or k in model.state_dict()
    }
    return best


def _expected_count(model: nn.Module) -> int:
    return sum(not name.endswith(COUNTER) for name in model.state_dict())


def _below_part(layouts: list[FileModel], part: str, name: str) -> list[FileModel]:
    """Those whose prefix has the given names in it."""
    if part == ".":
        shortest = min((len(layout.prefix) for layout in layouts), default=0)
        return [layout for layout in layouts if len(layout.prefix) == shortest]
    chosen = [layout for layout in layouts if f".{part}." in f".{layout.prefix}"]
    if not chosen:
        prefixes = sorted({layout.prefix[:-1] or "." for layout in layouts})
        raise UserError(
            f"{name}: no model below '{part}'; models are below: {', '.join(prefixes) or 'nothing'}"
        )
    return chosen


def _same_weights(one: FileModel, other: FileModel) -> bool:
    """Whether all tensors that both have are equal: then they are one model, found at two places or in two ways."""
    shared = one.state.keys() & other.state.keys()
    return all(
        one.state[name] is other.state[name]
        or (
            one.state[name].shape == other.state[name].shape
            and torch.equal(one.state[name], other.state[name])
        )
        for name in shared
    )


def _is_plain_of(plain: str, average: str) -> bool:
    """Whether the one is the weights whose moving average the other is, as timm's trainer names the two."""
    first = average.split(".")[0]
    return first in AVERAGES and plain.split(".")[0] == AVERAGES[first]


def _distinct_prefixes(layouts: Sequence[FileModel]) -> list[str]:
    """The prefixes without what all begin with, in quotes; ``.`` for one that is before the others' names."""
    parts = [layout.prefix.split(".")[:-1] for layout in layouts]
    while all(parts) and len({one[0] for one in parts}) == 1:
        parts = [one[1:] for one in parts]
    return [f"'{'.'.join(one) or '.'}'" for one in parts]


# -- every place and every way --------


def _layouts(
    tensors: Mapping[str, Tensor], model: nn.Module, img_size: Size | None
) -> Iterator[FileModel]:
    """Every way to read the file as the model. Where a place has its names and shapes, no other way is tried there."""
    expected = {
        name: value for name, value in model.state_dict().items() if not name.endswith(COUNTER)
    }
    below, shaped = Counter[str](), Counter[str]()
    for name, value in tensors.items():
        for prefix, rest in _splits(name):
            below[prefix] += 1
            shaped[prefix] += rest in expected and expected[rest].shape == value.shape
    exact = {prefix for prefix, count in shaped.items() if count == len(expected)}
    places = exact or {prefix for prefix, count in below.items() if 3 * count >= len(expected)}
    for prefix in sorted(places):
        state = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        for variant in _variants(state, expected):
            yield _fitted(prefix, variant, "", model, expected, img_size)
    if not exact:
        for prefix, state, library in foreign_models(tensors, model):
            yield _fitted(prefix, state, library, model, expected, img_size)


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """``a.b.c`` -> ``("", "a.b.c")``, ``("a.", "b.c")``, ``("a.b.", "c")``."""
    yield "", name
    place = name.find(".") + 1
    for _ in range(DEEPEST):
        if not place:
            return
        yield name[:place], name[place:]
        place = name.find(".", place) + 1


def _variants(
    state: dict[str, Tensor], expected: Mapping[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    yield state
    if all(
        name.startswith("model.") for name in expected
    ):  # a builder's module, trained outside of ours
        yield {f"model.{name}": value for name, value in state.items()}
    if (
        "register_tokens" in state and "mask_token" not in state
    ):  # by which timm's filter knows DINOv2's layout
        yield {**state, "mask_token": state["register_tokens"]}
    if (
        "class_embedding" in state
    ):  # CLIP's picture tower alone: timm's filter reads it as a part of CLIP
        yield {f"visual.{name}": value for name, value in state.items()}


def _fitted(
    prefix: str,
    state: dict[str, Tensor],
    library: str,
    model: nn.Module,
    expected: Mapping[str, Tensor],
    img_size: Size | None,
) -> FileModel:
    """The state through the architecture's filter, and how well it fits."""
    state, positions = _in_the_models_layout(state, model, img_size)
    same_name = [name for name in expected if name in state]
    same_shape = sum(state[name].shape == expected[name].shape for name in same_name)
    return FileModel(prefix, state, library, positions, same_shape, len(same_name))


def _in_the_models_layout(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> tuple[dict[str, Tensor], str]:
    """Applies the architecture's own checkpoint filter; a plain timm file becomes a dense model's backbone."""
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        return _filtered(state, model, img_size)
    inner = {
        name.removeprefix("backbone."): value
        for name, value in state.items()
        if name.startswith("backbone.")
    }
    if inner:
        rest = {name: value for name, value in state.items() if not name.startswith("backbone.")}
        filtered, positions = _filtered(inner, backbone, img_size)
        return {**_prefixed(filtered), **rest}, positions
    wanted = (
        backbone.state_dict()
    )  # a file for classification holds more: layers after the last level, a classifier
    filtered, positions = _filtered(state, backbone, img_size)
    return _prefixed({name: value for name, value in filtered.items() if name in wanted}), positions


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"backbone.{name}": value for name, value in state.items()}


def _filtered(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> tuple[dict[str, Tensor], str]:
    """timm keeps a filter for foreign layouts and other position embeddings beside the model class."""
    state, positions = _with_positions(state, model, img_size)
    convert: Callable[..., dict[str, Tensor]] | None = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", None
    )
    if convert is None or _is_exact(state, model):
        return state, positions
    options: dict[str, Any] = {}
    if (
        "adapt_layer_scale" in inspect.signature(convert).parameters
    ):  # DeiT III's authors write gamma_1 for ls1.gamma
        options["adapt_layer_scale"] = any("gamma_" in name for name in state)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some print what they try
            return convert(
                dict(state), model, **options
            ), positions  # a copy: some take tensors out
    except (
        Exception
    ):  # a file of another architecture: the comparison of keys and shapes says it better
        return state, positions


def _is_exact(state: Mapping[str, Tensor], model: nn.Module) -> bool:
    """Whether the state has the model's names, no others, and the model's shapes."""
    expected = model.state_dict()
    names = {name for name in expected if not name.endswith(COUNTER)}
    given = {name for name in state if not name.endswith(COUNTER)}
    return names == given and all(state[name].shape == expected[name].shape for name in names)


# -- position embeddings --------


def _with_positions(
    state: dict[str, Tensor], model: nn.Module, img_size: Size | None
) -> tuple[dict[str, Tensor], str]:
    """Resamples position embeddings from a grid that is not square, which timm's filter does not know.

    The grid is what the file names. Else it is square, as timm takes it, unless the embeddings clearly show another.
    Embeddings that have the model's shape stay as they are: what they show is only reported.
    """
    new: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    positions, patch = state.get("pos_embed"), state.get("patch_embed.proj.weight")
    if new is None or positions is None or patch is None or positions.ndim != 3 or patch.ndim != 4:
        return state, ""
    before = (
        0
        if getattr(model, "no_embed_class", False)
        else int(getattr(model, "num_prefix_tokens", 0))
    )
    if img_size is not None:
        grid = [side // step for side, step in zip(img_size, patch.shape[-2:], strict=True)]
        if positions.shape[1] - grid[0] * grid[1] != before:  # another layout: the filter knows it
            return state, ""
        report = ""
    else:
        grid = _grid_of(positions[0], before, int(getattr(model, "num_prefix_tokens", 0)))
        report = (
            f"position embeddings of {grid[0]}x{grid[1]} patches (by how alike neighbours are)"
            if grid
            else ""
        )
        if report and positions.shape == model.state_dict()["pos_embed"].shape:
            return (
                state,
                f"{report} are loaded unchanged into a model of {new[0]}x{new[1]}; is img_size right?",
            )
        report = report and f"{report} for {new[0]}x{new[1]}"
    if not grid or grid == list(new):
        return state, ""
    return {
        **state,
        "pos_embed": resample_abs_pos_embed(positions, list(new), grid, num_prefix_tokens=before),
    }, report


def _grid_of(positions: Tensor, before: int, prefix_tokens: int) -> list[int]:
    """The grid that is not square which position embeddings ``(L, D)`` show; nothing where they leave it to timm.

    Args:
        positions: of the patches, after those of the class token and the like.
        before: how many are not patches', by the model's convention.
        prefix_tokens: of the model; a file of another convention may have a position for each, or for one.
    """
    for other in (before, 1, prefix_tokens, 0):
        patches = len(positions) - other
        if patches > 0 and math.isqrt(patches) ** 2 == patches:
            return grid_shown(positions[other:]) if other == before else []
    return grid_shown(positions[before:])


def grid_shown(positions: Tensor) -> list[int]:
    """The grid that is not square on which neighbouring position embeddings ``(L, D)`` are alike; else nothing.

    On a true grid the end of a row and the beginning of the next are far apart; in a mere sequence they are neighbours.
    """
    length, off, ends = len(positions), {}, {}
    for height in (n for n in range(2, length // 2 + 1) if length % n == 0):
        grid = positions.float().unflatten(0, (height, length // height))  # (rows, columns, D)
        pairs = [grid.diff(dim=0).square().mean(-1), grid.diff(dim=1).square().mean(-1)]
        off[height] = torch.cat([part.flatten() for part in pairs]).mean().item()
        ends[height] = (grid[1:, 0] - grid[:-1, -1]).square().mean().item()
    best, square = min(off, key=off.__getitem__, default=0), math.isqrt(length)
    if best in (0, square) or off[best] > CLEARLY * off.get(square, max(off.values())):
        return []
    if ends[best] < ROW_ENDS * off[best]:
        return []
    return [best, length // best]
