"""Brings weights into a model's own layout and loads them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from torch import Tensor, nn

from kd.errors import UserError
from kd.models.layouts import COUNTER, FileModel, State, choose_layout
from kd.models.weights import read_weights, say

NEW = "kd_new_classifier"
"""An attribute of models: whether the classifier has no weights from the file."""

WRAPPING = re.compile(r"^((state_dict|model_state_dict|model|module)\.)?(module\.)?")
"""Names that trainers usually put before a model's own; the second of DistributedDataParallel."""

# what a file that does not fit may need
ANOTHER_MODEL = (
    "; another of timm's: {root}.arch; a model of another library or of your own: {root}.builder"
    " (kd/models/README.md)"
)
THIS_MODEL = "; these are {arch}'s: {root}.arch={arch}"
NO_HEAD = (
    "; a backbone has no classifier: recipe=photos {root}.backbone={path} fine-tunes it first, "
    "recipe=foundation_vit learns its features without labels"
)
"""The end of a message about a checkpoint without a classifier."""
OTHER_CLASSES = (
    "; {root}.classes=FILE (one name a line) says which those are; if they are others, recipe=photos "
    "model.teacher.backbone=FILE fine-tunes a teacher for yours first"
)
"""The end of a message about a teacher's classifier of classes that nobody names."""


def load_checkpoint(
    model: nn.Module,
    path: Path,
    key: str,
    classes: Sequence[str] = (),
    head: bool = False,
    part: str | None = None,
) -> None:
    """Loads weights into ``model``; position embeddings of another size are resampled.

    A classifier of other classes or another form, or none in the file, leaves a student's as it was made: reported to the
    user, and :func:`has_new_classifier` is true afterwards.

    Args:
        model: the model; a file with its own names and shapes is loaded unchanged.
        path: a weights file or folder (:func:`kd.storage.weights_files.weights_file`).
        key: the setting that names the file, for messages.
        classes: names of the data's classes, where the file's are to be compared with them.
        head: the classifier must come from the file too (a teacher's); one of other classes is then an error.
        part: which of several models in the file, see :func:`kd.models.layouts.choose_layout`.

    Raises:
        UserError: the file can't be read, holds two models that fit equally well, does not fit, or has NaN or infinite
            weights.
    """
    file, tensors, about = read_weights(path, key)
    place = f"{key}: {file}"
    root = key.removesuffix(".checkpoint")
    layout = choose_layout(tensors, model, about.img_size, part, place, key)
    _say_where(layout, place)
    state = layout.state
    expected = model.state_dict()
    heads = classifier_names(model)
    of_head = _below(expected, heads)
    # a dense model's head is more than its last layer
    last = _below(of_head, ["head.classifier"]) or of_head
    reason = _other_classes(about.classes, classes, state, expected, last)
    if reason and head:
        hint = "" if about.classes else OTHER_CLASSES.format(root=root)
        raise UserError(f"{place} {reason}{hint}")
    if not head:
        reason, left_out = _why_new_classifier(reason, state, expected, _below(state, heads), last)
        state = {name: value for name, value in state.items() if name not in left_out}
    if reason:
        say(f"{place} {reason}: its backbone is taken, the classifier is new")
    misfits = _misfits(state, expected, [] if head else of_head)
    if misfits:
        more = ""
        if len(misfits) > 3:
            more = f" (and {len(misfits) - 3} more)"
        missing = set()
        for name in expected:
            if name not in state and not name.endswith(COUNTER):
                missing.add(name)
        hint = ""
        if head and ".teacher" in key and missing == set(of_head):
            hint = NO_HEAD
        elif about.arch:
            hint = THIS_MODEL
        elif 2 * len(missing) > len(expected):
            hint = ANOTHER_MODEL
        hint = hint.format(root=root, path=path, arch=about.arch)
        raise UserError(f"{place} does not fit: {'; '.join(misfits[:3])}{more}{hint}")
    _check_numbers(state, {name for name, _ in model.named_parameters()}, place)

    in_models_dtype = {name: value.to(expected[name].dtype) for name, value in state.items()}
    model.load_state_dict(in_models_dtype, strict=False)
    has_classifier = all(name in state for name in last)
    setattr(model, NEW, not has_classifier)


def _say_where(layout: FileModel, place: str) -> None:
    """Reports where a model's weights were found: under the names of another library, or below a name that is no trainer's
    usual wrapping (:data:`WRAPPING`). Else nothing is reported.

    Args:
        layout: where they were found.
        place: setting and file, which begin the line.
    """
    below = WRAPPING.sub("", layout.prefix)
    if layout.library:
        say(f"{place}: names of {layout.library} brought into timm's")
    elif below:
        say(f"{place}: the weights below '{below[:-1]}' are taken")


def _why_new_classifier(
    reason: str,
    state: State,
    expected: Mapping[str, Tensor],
    of_files_head: Sequence[str],
    last: Sequence[str],
) -> tuple[str, Sequence[str]]:
    """Why a student's classifier is not taken from the file, "" where it is taken or the model has none; and names of the
    tensors in the file that are left out.

    Args:
        reason: that the classes are others; "": not known so far.
        state: the file's tensors under the model's names.
        expected: the model's own.
        of_files_head: names of the file's last layers' tensors.
        last: names of the model's classifier's tensors.
    """
    if reason:
        return reason, last
    if not last:
        return "", of_files_head
    if not of_files_head:
        return "has no classifier", []
    in_file = _below(state, {name.rpartition(".")[0] for name in last})
    has_all = set(in_file) == set(last)
    if has_all and all(state[name].shape == expected[name].shape for name in last):
        return "", []
    return "has a classifier of another form", of_files_head


def _misfits(state: State, expected: Mapping[str, Tensor], optional: Sequence[str]) -> list[str]:
    """How a state differs from a model's, a text for each tensor: another shape, missing, or not in the model.

    Args:
        state: what is to be loaded.
        expected: the model's own tensors.
        optional: names of those that it may lack, beside BatchNorm's counters.
    """
    misfits = []
    for name, value in expected.items():
        if name not in state:
            continue
        in_file = tuple(state[name].shape)
        in_model = tuple(value.shape)
        if in_file != in_model:
            misfits.append(f"{name} is {in_file} there, {in_model} here")
    for name in expected:
        is_optional = name in optional or name.endswith(COUNTER)
        if name not in state and not is_optional:
            misfits.append(f"{name} is missing")
    misfits += [f"{name} is not in the model" for name in state if name not in expected]
    return misfits


def _check_numbers(state: Mapping[str, Tensor], parameters: set[str], place: str) -> None:
    """Refuses weights that are NaN, or infinite: a training that had failed has written them.

    Buffers may hold infinities, as masks of attention do.

    Args:
        state: tensors by name.
        parameters: names of those that are trained.
        place: of the file, for messages.

    Raises:
        UserError: names the first tensor with such values.
    """
    for name, value in state.items():
        if not value.is_floating_point():
            continue
        wrong = ~value.isfinite() if name in parameters else value.isnan()
        count = int(wrong.sum())
        if count:
            raise UserError(
                f"{place} holds NaN or infinite weights, {count} of {name}: take a checkpoint from before its training "
                "failed"
            )


def has_new_classifier(model: nn.Module) -> bool:
    """Whether a model has weights from a file (:func:`load_checkpoint`, or timm's pre-trained ones), but its classifier has
    none from there; False of a model without any.
    """
    return bool(getattr(model, NEW, False))


def _other_classes(
    names: Sequence[str],
    classes: Sequence[str],
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    last: Sequence[str],
) -> str:
    """How the file's classes differ from the data's, in words; "" where they don't, or nothing is known.

    Args:
        names: the file's classes, in order; empty: unknown, then only their number is compared.
        classes: the data's, likewise.
        state: tensors of the file.
        expected: the model's own.
        last: names of the classifier's tensors.
    """
    for name in last:
        if name not in state:
            continue
        in_file = tuple(state[name].shape)
        in_model = tuple(expected[name].shape)
        if in_file and in_file != in_model and in_file[1:] == in_model[1:]:
            return f"names {in_file[0]} classes, the data has {in_model[0]}"
    if not names or not classes:
        return ""
    for i, (of_file, of_data) in enumerate(zip_longest(names, classes)):
        if of_file != of_data:
            return f"was trained on other classes: class {i} is {of_file!r} there, {of_data!r} in the data"
    return ""


def classifier_names(model: nn.Module) -> list[str]:
    """The module paths of a model's last layers, as timm names them (two with a distillation token); of models without
    timm's configuration ``head``, whether they have it or not.
    """
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or "head"
    if isinstance(names, str):
        return [names]
    return list(names)


def _below(keys: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The names of tensors that belong to modules."""
    prefixes = tuple(f"{name}." for name in modules)
    return [key for key in keys if key.startswith(prefixes)]


def freeze_backbone(model: nn.Module) -> tuple[str, ...]:
    """Freezes all parameters but those of the classifier's layers.

    Args:
        model: changed in place.

    Returns:
        The module paths of the classifier's layers (:func:`classifier_names`).
    """
    trained = tuple(classifier_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(_below([name], trained)))
    return trained
