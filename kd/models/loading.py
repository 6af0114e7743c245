"""Brings weights into a model's own layout and loads them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from kd.errors import UserError
from kd.models.foreign import HUGGING_FACE
from kd.models.layouts import COUNTER, FileModel, choose
from kd.models.weights import read_weights, say

WRAPPINGS = (
    "state_dict",
    "state_dict_ema",
    "model_ema",
    "model_state_dict",
    "model",
    "module",
)  # of trainers
NEW = "kd_new_classifier"  # an attribute of a model whose classifier has no weights from its file


def load_checkpoint(
    model: nn.Module,
    path: Path,
    key: str,
    classes: Sequence[str] = (),
    head: bool = False,
    part: str | None = None,
) -> None:
    """Loads weights into ``model``; position embeddings of another size are resampled.

    Args:
        model: the model; a file with its own names and shapes is loaded unchanged.
        path: a weights file or folder (:func:`kd.models.weights.weights_file`).
        key: the setting that names the file, for messages.
        classes: names of the data's classes, where the file's are to be compared with them.
        head: the classifier must come from the file too.
        part: which of several models in the file, see :func:`kd.models.layouts.choose`.

    Raises:
        UserError: the file can't be read, holds two models that fit equally well, or does not fit.
    """
    file, tensors, about = read_weights(path, key)
    expected, names = model.state_dict(), classifier_names(model)
    layout = choose(tensors, model, about.img_size, part, f"{key}: {file}", key)
    state = layout.state
    if layout.library:
        say(f"{key}: {file}: names of {layout.library} brought into timm's")
    if layout.positions:
        say(f"{key}: {file}: {layout.positions}")
    state |= _head_beside(tensors, layout, expected.keys() - state.keys(), model)
    _say_prefix(layout, len(tensors) - len(state), f"{key}: {file}")
    of_head, of_files_head = _below(expected, names), _below(state, names)
    if not of_head:  # a model that was built without a classifier
        state = {k: v for k, v in state.items() if k not in of_files_head}
    last = (
        _below(of_head, ["head.classifier"]) or of_head
    )  # a dense model's head is more than its classifier
    other = _other_classes(about.classes, classes, state, expected, last)
    if other and head:
        hint = f"; {key.removesuffix('.checkpoint')}.classes=FILE (one name a line) says which those are"
        raise UserError(f"{key}: {file} {other}{'' if about.classes else hint}")
    if (
        not other
        and not head
        and of_head
        and of_files_head
        and not _same_form(state, expected, last)
    ):
        other, last = "has a classifier of another form", of_files_head
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
    missing = [
        k
        for k in expected
        if k not in state and (head or k not in of_head) and not k.endswith(COUNTER)
    ]
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
        if layout.library == "transformers" and _reads_two_tokens(state, expected, last):
            hint = f"; its classifier reads the class token and the patches' mean: {root}.builder={HUGGING_FACE}"
            hint += f" {root}.builder.path=FOLDER (of save_pretrained)"
        raise UserError(f"{key}: {file} does not fit: {'; '.join(wrong[:3])}{more}{hint}")
    model.load_state_dict({k: v.to(expected[k].dtype) for k, v in state.items()}, strict=False)
    setattr(model, NEW, not all(k in state for k in last))


def _same_form(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], last: Sequence[str]
) -> bool:
    """Whether the file's classifier has the same layers, with the same shapes."""
    modules = {name.rpartition(".")[0] for name in last}
    in_file = [name for name in state if any(name.startswith(f"{module}.") for module in modules)]
    return {*in_file} == {*last} and all(state[name].shape == expected[name].shape for name in last)


def _reads_two_tokens(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], last: Sequence[str]
) -> bool:
    """Whether the file's classifier takes twice the wanted one's width, as transformers' DINOv2 does."""
    weights = [name for name in last if name.endswith("weight") and name in state]
    return any(state[name].shape[1:] == (2 * expected[name].shape[1],) for name in weights)


def has_new_classifier(model: nn.Module) -> bool:
    """Whether all but the classifier has weights from a file (:func:`load_checkpoint`, or timm's pre-trained ones)."""
    return bool(getattr(model, NEW, False))


def _other_classes(
    names: Sequence[str],
    classes: Sequence[str],
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    last: Sequence[str],
) -> str:
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
    return (
        f"was trained on other classes: class {i} is {names[i]!r} there, {classes[i]!r} in the data"
    )


def classifier_names(model: nn.Module) -> list[str]:
    """The module paths of a model's last layers (two for a model with a distillation token)."""
    found = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    return [found] if isinstance(found, str) else list(found)


def _below(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return [key for key in keys if key.startswith(prefixes)]


def _say_prefix(layout: FileModel, left_out: int, name: str) -> None:
    """Reports below which name a model's weights were found, where a trainer's usual wrapping does not explain it."""
    parts = layout.prefix.split(".")[:-1]
    parts = parts[1:] if parts[:1] and parts[0] in WRAPPINGS else parts
    parts = parts[1:] if parts[:1] == ["module"] else parts  # of DistributedDataParallel
    if not layout.prefix or layout.library or not (parts or layout.rivals):
        return
    left = f", {left_out} tensors beside it are left out" if left_out > 0 else ""
    others = f" (another model: '{layout.rivals[0][:-1] or '.'}')" if layout.rivals else ""
    say(
        f"{name}: the weights below '{'.'.join(parts) or layout.prefix[:-1]}' are taken{left}{others}"
    )


def _head_beside(
    tensors: Mapping[str, Tensor], layout: FileModel, missing: set[str], model: nn.Module
) -> dict[str, Tensor]:
    """The one linear layer beside a wrapped backbone that is of the classifier's width, where the backbone has none."""
    names = [name for name in classifier_names(model) if f"{name}.weight" in missing]
    if len(names) != 1 or not layout.prefix:
        return {}
    width = model.state_dict()[f"{names[0]}.weight"].shape[1:]
    others = (layout.prefix, *(prefix for prefix in layout.rivals if prefix))
    beside = [
        name.removesuffix("weight")
        for name, value in tensors.items()
        if name.endswith("weight")
        and value.ndim == 2
        and value.shape[1:] == width
        and not name.startswith(others)
    ]
    if len(beside) != 1:
        return {}
    parts = ("weight", "bias")
    return {
        f"{names[0]}.{part}": tensors[f"{beside[0]}{part}"]
        for part in parts
        if f"{beside[0]}{part}" in tensors
    }


def freeze_backbone(model: nn.Module, arch: str) -> tuple[str, ...]:
    """Leaves a gradient to the classifier alone; gives the paths of its layers.

    Raises:
        UserError: it has no weights.
    """
    trained = tuple(classifier_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(f"{head}." for head in trained)))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"model.student.freeze: nothing is left to train of {arch}, whose classifier "
            f"({', '.join(trained)}) has no weights"
        )
    return trained
