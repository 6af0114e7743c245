"""Brings weights into a model's own layout and loads them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from kd.errors import UserError
from kd.models.layouts import COUNTER, FileModel, choose_layout
from kd.models.weights import read_weights, say

WRAPPINGS = (
    "state_dict",
    "state_dict_ema",
    "model_ema",
    "model_state_dict",
    "model",
    "module",
)
"""Names below which trainers save a model."""

NEW = "kd_new_classifier"
"""An attribute of models: whether the classifier has no weights from the file."""

# what a file that does not fit may need
ANOTHER_MODEL = (
    "; another of timm's: {root}.arch; a model of another library or of your own: {root}.builder"
    " (kd/models/README.md)"
)
NO_HEAD = (
    "; a backbone has no classifier: recipe=photos {root}.backbone={path} fine-tunes it first, "
    "recipe=foundation_vit learns its features without labels"
)
"""The end of a message about a checkpoint without a classifier."""


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
    found = _state_in(tensors, model, about.img_size, part, place, key)
    state, last = _with_classifier(found, model, about.classes, classes, head, place, key)
    _check_fit(state, model, head, path, place, key)
    trained = {name for name, _ in model.named_parameters()}
    _check_numbers(state, trained, place)

    expected = model.state_dict()
    in_models_dtype = {}
    for name, value in state.items():
        dtype = expected[name].dtype
        in_models_dtype[name] = value.to(dtype)
    model.load_state_dict(in_models_dtype, strict=False)
    has_classifier = all(name in state for name in last)
    setattr(model, NEW, not has_classifier)


def _state_in(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    img_size: Sequence[int] | None,
    part: str | None,
    place: str,
    key: str,
) -> dict[str, Tensor]:
    """The tensors of a file that are the model's, under its names; where they were found is reported.

    Args:
        tensors: all of the file's, by name.
        model: that they are for.
        img_size: height and width of the input that the file names, or None.
        part: as of :func:`load_checkpoint`.
        place: setting and file, which begin messages.
        key: the setting.
    """
    layout = choose_layout(tensors, model, img_size, part, place, key)
    if layout.library:
        say(f"{place}: names of {layout.library} brought into timm's")
    state = layout.state
    missing = model.state_dict().keys() - state.keys()
    state |= _head_beside(tensors, layout, missing, model)
    left_out = len(tensors) - len(state)
    _say_prefix(layout, left_out, place)
    return state


def _with_classifier(
    state: Mapping[str, Tensor],
    model: nn.Module,
    files_classes: Sequence[str],
    classes: Sequence[str],
    head: bool,
    place: str,
    key: str,
) -> tuple[Mapping[str, Tensor], list[str]]:
    """The state with its classifier where that is taken: not one of other classes or another form, which is reported.

    Args:
        state: the file's tensors under the model's names.
        model: that they are for.
        files_classes: names of the file's classes; empty: not known.
        classes: as of :func:`load_checkpoint`.
        head: likewise; a teacher's classifier of other classes is an error.
        place: setting and file, which begin messages.
        key: the setting.

    Returns:
        The state, and the names of the classifier's tensors.
    """
    expected = model.state_dict()
    heads = classifier_names(model)
    of_head = _below(expected, heads)
    of_files_head = _below(state, heads)
    if not of_head:  # a model that was built without a classifier
        state = _without(state, of_files_head)
    # a dense model's head is more than its last layer
    last = _below(of_head, ["head.classifier"]) or of_head
    reason = _other_classes(files_classes, classes, state, expected, last)
    if reason and head:
        hint = "" if files_classes else _of_other_classes(key.removesuffix(".checkpoint"))
        raise UserError(f"{place} {reason}{hint}")
    both_have_heads = bool(of_head and of_files_head)
    if not reason and not head and both_have_heads and not _same_form(state, expected, last):
        reason = "has a classifier of another form"
        last = of_files_head
    if reason:
        state = _without(state, last)
        say(f"{place} {reason}: its backbone is taken, the classifier is new")
    if of_head and not of_files_head and not head:
        say(f"{place} has no classifier: its backbone is taken, the classifier is new")
    return state, last


def _check_fit(
    state: Mapping[str, Tensor], model: nn.Module, head: bool, path: Path, place: str, key: str
) -> None:
    """Refuses a state that lacks tensors, or has others than the model's, with a hint where the reason is a common one.

    Args:
        state: what is to be loaded.
        model: into which.
        head: whether its classifier must be there, too.
        path: of the file, as it was given.
        place: setting and file, which begin the message.
        key: the setting.
    """
    expected = model.state_dict()
    heads = classifier_names(model)
    of_head = _below(expected, heads)
    missing = []
    for name in expected:
        is_needed = head or name not in of_head
        if is_needed and name not in state and not name.endswith(COUNTER):
            missing.append(name)
    misfits = _misfits(state, expected, missing)
    if not misfits:
        return
    root = key.removesuffix(".checkpoint")
    hint = ""
    is_backbone = not _below(state, heads) and set(missing) <= set(of_head)
    if head and ".teacher" in key and is_backbone:
        hint = NO_HEAD.format(root=root, path=path)
    elif 2 * len(missing) > len(expected):
        hint = ANOTHER_MODEL.format(root=root)
    more = ""
    if len(misfits) > 3:
        more = f" (and {len(misfits) - 3} more)"
    shown = "; ".join(misfits[:3])
    raise UserError(f"{place} does not fit: {shown}{more}{hint}")


def _of_other_classes(spec: str) -> str:
    """What to do about a classifier whose classes nobody names; ``spec``: the key of the model's settings."""
    hint = f"; {spec}.classes=FILE (one name a line) says which those are"
    if spec == "model.teacher":
        hint += "; if they are others, recipe=photos model.teacher.backbone=FILE fine-tunes a teacher for yours first"
    return hint


def _without(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """A state without the tensors of these names."""
    return {name: value for name, value in state.items() if name not in names}


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
        if name in parameters:
            wrong = ~value.isfinite()
        else:
            wrong = value.isnan()
        count = int(wrong.sum())
        if count:
            raise UserError(
                f"{place} holds {count} value{'s' * (count > 1)} of {name} that are NaN or infinite: take a checkpoint "
                "from before its training failed"
            )


def _misfits(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], missing: Sequence[str]
) -> list[str]:
    """What keeps a state from being loaded, as sentences: other shapes, then missing names, then names too many.

    Args:
        state: the file's tensors by name.
        expected: the model's own.
        missing: names that the file lacks and the model needs.
    """
    sentences = []
    for name, value in expected.items():
        if name not in state:
            continue
        in_file = tuple(state[name].shape)
        in_model = tuple(value.shape)
        if in_file != in_model:
            sentences.append(f"{name} is {in_file} there, {in_model} here")
    sentences += [f"{name} is missing" for name in missing]
    sentences += [f"{name} is not in the model" for name in state if name not in expected]
    return sentences


def _same_form(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], last: Sequence[str]
) -> bool:
    """Whether the file's classifier has the same tensors as the model's, by names and shapes.

    Args:
        state: tensors of the file, by name.
        expected: the model's own.
        last: names of the classifier's tensors in the model.
    """
    modules = {name.rpartition(".")[0] for name in last}
    in_file = _below(state, modules)
    return _shapes_of(state, in_file) == _shapes_of(expected, last)


def _shapes_of(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    return {name: state[name].shape for name in names}


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
    if not names or not classes or list(names) == list(classes):
        return ""
    for i, (of_file, of_data) in enumerate(zip(names, classes, strict=False)):
        if of_file != of_data:
            return f"was trained on other classes: class {i} is {of_file!r} there, {of_data!r} in the data"
    return f"names {len(names)} classes, the data has {len(classes)}"


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


def _say_prefix(layout: FileModel, left_out: int, name: str) -> None:
    """Reports below which name a model's weights were found, where a trainer's usual wrapping does not explain it.

    Args:
        layout: where they were found.
        left_out: number of the file's tensors that are not taken.
        name: setting and file, which begin the line.
    """
    names = layout.prefix.split(".")[:-1]
    if names and names[0] in WRAPPINGS:
        names = names[1:]
    if names and names[0] == "module":  # of DistributedDataParallel
        names = names[1:]
    if not layout.prefix or layout.library or not (names or layout.rivals):
        return
    shown = ".".join(names) or layout.prefix[:-1]
    beside = ""
    if left_out > 0:
        beside = f", {left_out} tensors beside it are left out"
    other = ""
    if layout.rivals:
        other = f" (another model: '{layout.rivals[0][:-1] or '.'}')"
    say(f"{name}: the weights below '{shown}' are taken{beside}{other}")


def _head_beside(
    tensors: Mapping[str, Tensor], layout: FileModel, missing: set[str], model: nn.Module
) -> dict[str, Tensor]:
    """The one linear layer beside a wrapped backbone that is of the classifier's width, where the backbone has none.

    Args:
        tensors: all of the file's, by name.
        layout: the model that was found in them.
        missing: names of the model's tensors that the layout lacks.
        model: the wanted one.

    Returns:
        Weight and bias under the model's names; {} where not exactly one classifier is missing, where the layout's names
        begin at the file's top, and where no layer, or more than one, may be the classifier.
    """
    missing_heads = [name for name in classifier_names(model) if f"{name}.weight" in missing]
    if len(missing_heads) != 1 or not layout.prefix:
        return {}
    (head,) = missing_heads
    width = model.state_dict()[f"{head}.weight"].shape[1:]
    models = (layout.prefix, *(prefix for prefix in layout.rivals if prefix))

    # linear layers of that width outside of all models in the file, with the last dot
    layers = []
    for name, value in tensors.items():
        is_linear = name.endswith("weight") and value.ndim == 2
        if is_linear and value.shape[1:] == width and not name.startswith(models):
            layers.append(name.removesuffix("weight"))
    if len(layers) != 1:
        return {}
    (layer,) = layers
    state = {}
    for kind in ("weight", "bias"):
        if f"{layer}{kind}" in tensors:
            state[f"{head}.{kind}"] = tensors[f"{layer}{kind}"]
    return state


def freeze_backbone(model: nn.Module, arch: str) -> tuple[str, ...]:
    """Leaves a gradient to the classifier alone.

    Args:
        model: changed in place.
        arch: its name, for the message.

    Returns:
        The module paths of the classifier's layers (:func:`classifier_names`).

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
