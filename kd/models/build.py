"""Builds models from what a recipe says."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from torch import nn

from kd.config.suggest import near
from kd.errors import NEARLY, UserError, builder_hint, plain
from kd.models.arguments import check_arguments, check_memory, listed
from kd.models.foreign import HUGGING_FACE, TRANSFORMERS
from kd.models.hub import check_downloadable
from kd.models.loading import NEW, load_checkpoint
from kd.models.own import Builder, build_own, error_of_builder, name_of, remade
from kd.models.preprocess import evaluating, preprocess_for
from kd.models.segmenter import DenseModel
from kd.models.spec import ModelSpec, StudentSpec, TeacherSpec
from kd.models.weights import About, about, say
from kd.settings import height_width

Spec = TypeVar("Spec", bound=ModelSpec)
PATCHES = "patch_size"
AUTO = "auto"
"""kd's own value of timm's argument ``patch_size``, of a student that inherits."""
SMALL = 10_000_000 * 224**2
"""Weights times pixels of a model that computes a picture in less time than PyTorch takes without values."""


def build_model(
    spec: ModelSpec,
    num_classes: int,
    key: str,
    classes: Sequence[str] = (),
    head: bool = False,
    dense: bool = False,
) -> nn.Module:
    """Builds a model of timm, or of the user's builder, on the CPU, and loads its weights.

    It is tried by a forward of one picture (:func:`_check_forward`). Afterwards
    :func:`kd.models.loading.has_new_classifier` says whether its backbone alone has trained weights.

    Args:
        spec: what to build; completed from its checkpoint before (:func:`completed`).
        num_classes: outputs of its classifier; 0 for a model without one.
        key: the configuration key of ``spec`` (``model.teacher``), named in errors.
        classes: names of the model's classes, compared with the checkpoint's where it has them.
        head: the weights must hold a classifier too, a builder's and timm's as well, for as many classes (a teacher's must;
            a student may bring a backbone alone).
        dense: a classifier for every pixel on top of the timm model (:class:`kd.models.segmenter.DenseModel`).

    Raises:
        UserError: an unknown architecture, an unusable argument, too little memory, weights that can't be had or do not
            fit, a dense model of a builder, or as of :func:`_built`.
    """
    if spec.builder is not None and dense:
        raise UserError(
            f"{key}.builder: dense prediction is built on timm's models alone, give {key}.arch"
        )
    if spec.builder is not None:
        model = _built(spec, spec.builder, num_classes, key, head)
    else:
        check_arch(spec.arch, key)
        if head and not dense:
            _check_pretrained_classes(spec, num_classes, key)
        model = _create(spec, 0 if dense else num_classes, key)
        known = model.pretrained_cfg["num_classes"]  # type: ignore[index]
        setattr(model, NEW, spec.pretrained and not dense and known != num_classes)
    if dense:
        model = DenseModel(model, num_classes)
    if spec.checkpoint:
        load_checkpoint(
            model, Path(spec.checkpoint), f"{key}.checkpoint", classes, head, spec.checkpoint_key
        )
    _check_forward(model, spec, key)
    if spec.channels_last:
        return model.to(memory_format=torch.channels_last)
    return model


def _built(spec: ModelSpec, builder: Builder, num_classes: int, key: str, head: bool) -> nn.Module:
    """A model of the user's builder; of weights with other classes than the data's the classifier is made anew, and
    reported.

    Args:
        spec: the model's settings.
        builder: makes it.
        num_classes: of the data; 0: none.
        key: of the settings, for messages.
        head: whether the weights' own classifier is needed, a teacher's; then other classes are an error.

    Raises:
        UserError: with ``head`` other classes, a student's builder that no file can hold, or as of
            :func:`build_own`.
    """
    try:
        count = getattr(builder, "num_classes", None)  # of the weights
    except UserError as error:
        raise error_of_builder(error, key) from error
    if num_classes and not spec.checkpoint and count not in (None, num_classes):
        reason = f"{name_of(builder)} names {count} classes, the data has {num_classes}"
        hint = f"; {key}.classes says which those are"
        if not count:
            reason = f"{name_of(builder)} has no classifier"
            hint = f" ({key}.head=false: its features teach)"
        if head:
            raise UserError(f"{key}.builder: {reason}{hint}")
        say(f"{key}: {reason}: its backbone is taken, the classifier is new")
    is_student = isinstance(spec, StudentSpec)
    if is_student and getattr(builder, "teaches_alone", False):
        raise UserError(
            f"{key}.builder: {name_of(builder)} teaches alone; a student is a model of timm's or of a builder of your own"
        )
    if is_student and not remade(builder):
        raise UserError(
            f"{key}.builder: {name_of(builder)} has attributes that the student's file can't hold; "
            "it must keep its arguments alone, as numbers, texts, lists or mappings, under their own names"
        )
    size = None if spec.img_size is None else height_width(spec.img_size)
    return build_own(builder, num_classes, size, spec.mean, spec.std, key)


@torch.no_grad()
def _check_forward(model: nn.Module, spec: ModelSpec, key: str) -> None:
    """Refuses a model that was built, but can't run with its arguments: tries a forward of one picture.

    A large model runs without values (meta tensors); a small one (:data:`SMALL`), and one that needs values, runs on a
    picture of zeros.

    Args:
        model: built; left in the mode it was in.
        spec: its settings.
        key: of the settings, for messages.

    Raises:
        UserError: the forward of zeros fails.
    """
    size = preprocess_for(model, spec.img_size).size
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    picture = torch.zeros(1, 3, *size)
    weights = sum(tensor.numel() for tensor in tensors.values())
    with evaluating(model):
        if weights * math.prod(size) > SMALL:
            empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
            try:
                torch.func.functional_call(model, empty, (picture.to("meta"),))
                return
            except Exception:  # some layers need values: the real forward decides
                pass
        try:
            model(picture)
        except Exception as error:
            shown = f"{size[0]}x{size[1]}: {plain(error)}"
            raise UserError(f"{key}: {spec.arch} can't take pictures of {shown}") from error


def _create(spec: ModelSpec, num_classes: int, key: str) -> nn.Module:
    """A model of timm's; with timm's own weights where the settings want them (``pretrained``) and name no checkpoint.

    Its arguments are checked first. Where the settings have ``kwargs`` or ``img_size``, its size in memory is checked too.

    Args:
        spec: its settings.
        num_classes: outputs of the classifier; 0: none.
        key: of the settings, for messages.

    Raises:
        UserError: an argument that is refused, weights that can't be had, or what the architecture has against them.
    """
    kwargs = dict(spec.kwargs)
    check_arguments(kwargs, f"{key}.kwargs.")
    if spec.img_size is not None:
        kwargs["img_size"] = spec.img_size
    pretrained = spec.pretrained and not spec.checkpoint
    if kwargs:
        check_memory(
            partial(timm_model, spec.arch, num_classes=num_classes, **kwargs),
            f"{key}: {spec.arch}",
            kwargs,
        )
    if pretrained:
        check_downloadable(spec.arch, f"{key}.checkpoint")
    try:
        return timm_model(spec.arch, pretrained=pretrained, num_classes=num_classes, **kwargs)
    except OSError as error:
        raise UserError(f"{key}.pretrained: no weights for {spec.arch}: {plain(error)}") from error
    except Exception as error:  # whatever an architecture has against its arguments
        with_arguments = f" with {listed(kwargs)}" if kwargs else ""
        raise UserError(
            f"{key}: {spec.arch} can't be built{with_arguments}: {plain(error)}"
        ) from error


def timm_model(arch: str, **kwargs: Any) -> nn.Module:
    """``timm.create_model(arch, **kwargs)``; without ``img_size`` for models that take any size and no such
    argument.

    The model's attribute ``made_with`` holds the arguments but ``pretrained``, for the student's file.
    """
    try:
        model = timm.create_model(arch, **kwargs)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        kwargs.pop("img_size")
        model = timm.create_model(arch, **kwargs)
    object.__setattr__(model, "made_with", {k: v for k, v in kwargs.items() if k != "pretrained"})
    return model


def check_arch(arch: str, key: str) -> None:
    """Checks that timm has a model of this name, without building it.

    Args:
        arch: the name.
        key: the model's configuration key.

    Raises:
        UserError: none given, a name of the Hugging Face hub, or unknown; the message has the nearest name.
    """
    if not arch:
        raise UserError(
            f"{key}.arch: which model? Give one of timm.list_models(), or a {key}.checkpoint with its name"
        )
    if arch.startswith(("hf_hub:", "hf-hub:")):
        raise UserError(
            f"{key}.arch: '{arch}' is not a timm model; download it ({key}.checkpoint=DIR), or {key}={arch} loads one of "
            "transformers"
        )
    if not timm.is_model(arch):
        name, has_tag, _ = arch.partition(".")
        known = timm.list_models()
        other = near(name, known, NEARLY) if has_tag else ""
        other = other or builder_hint(arch, key) or near(arch, known)
        raise UserError(f"{key}.arch: timm has no model '{arch}'{other}")


def _check_pretrained_classes(spec: ModelSpec, num_classes: int, key: str) -> None:
    """Refuses timm's pre-trained weights, of a teacher, that were made for another number of classes.

    Args:
        spec: its settings.
        num_classes: of its classifier: as many as the teacher's names where these are other than the data's, else as
            the data has.
        key: the configuration key of ``spec``, named in the error.

    Raises:
        UserError: the numbers differ. Weights of which timm knows no number pass.
    """
    config = None
    if spec.pretrained and not spec.checkpoint:
        config = timm.get_pretrained_cfg(spec.arch)
    count = config.num_classes if config else None
    if count not in (None, num_classes):
        raise UserError(
            f"{key}.pretrained: timm's {spec.arch} names {count} classes, expected {num_classes}; {key}.classes=FILE "
            f"with a name for each of the {count} says which those are, or fine-tune it first and give {key}.checkpoint"
        )


def completed(spec: Spec, key: str) -> Spec:
    """``spec`` completed from its checkpoint: architecture and its arguments, input size, mean and std.

    Mean and std of the settings count, and the file's fill what they leave open. Architecture, arguments and size:

    - settings of a teacher that name another architecture than the file, or none: all three as the file has them;
    - settings of a teacher that name the file's, or of a student that name none: the file fills what they leave open;
    - settings of a student that name an architecture: as the settings have them; where the file has another one, mean and
      std are not filled either;
    - a file of another library, for which timm may have several names: as the settings have them, if they name one.

    A builder's name becomes ``arch``.

    Args:
        spec: a teacher's or student's settings.
        key: their configuration key, named in messages.

    Returns:
        The completed settings, ``spec`` itself unchanged. An architecture that a teacher's settings do not name is reported.

    Raises:
        UserError: a checkpoint of transformers, or of a builder, without that builder.
    """
    file = about(spec.checkpoint)
    is_teacher = isinstance(spec, TeacherSpec)
    if spec.builder is not None:
        name = name_of(spec.builder)
        if spec.arch not in ("", name):
            say(f"{key}: built by {name}, not timm's {spec.arch}")
        return replace(spec, arch=name, **_moments(spec, file))
    needs_both_tokens = file.two_token_head and isinstance(spec, TeacherSpec) and spec.head
    if file.builder == TRANSFORMERS or needs_both_tokens:
        raise UserError(
            f"{key}.checkpoint: {spec.checkpoint} is a model of transformers, not timm's; in its place: "
            f"{key}.builder={HUGGING_FACE} {key}.builder.path={spec.checkpoint}"
        )
    if file.builder:
        raise UserError(
            f"{key}.builder: {spec.checkpoint} was built by {file.builder}; name it and its arguments"
        )

    moments = _moments(spec, file)
    if not file.arch or (file.foreign and spec.arch):  # timm may have several names for it
        return replace(spec, **moments)
    if not is_teacher and spec.arch:
        return replace(spec, **moments) if spec.arch == file.arch else spec
    if is_teacher and spec.arch != file.arch:
        config = timm.get_pretrained_cfg(file.arch)
        size: Any = file.img_size or (config and config.input_size[-2:])
        if size and size[0] == size[1]:
            size = size[0]
        instead = f", not the settings' {spec.arch}" if spec.arch else ""
        of_file = f" at {size} px" if file.img_size else ""
        evidence = f"{spec.checkpoint} says"
        if file.foreign:
            evidence = f"the tensors in {spec.checkpoint} show"
        if file.others:
            evidence += f"; with equal tensors: {', '.join(file.others[:3])} ({key}.arch=NAME)"
        say(f"{key}: {file.arch}{of_file}, as {evidence}{instead}")
        return replace(spec, arch=file.arch, img_size=size, kwargs=file.kwargs, **moments)
    known: Any = spec.img_size or file.img_size
    kwargs = {**file.kwargs, **spec.kwargs}
    return replace(spec, arch=file.arch, img_size=known, kwargs=kwargs, **moments)


def _moments(spec: ModelSpec, file: About) -> dict[str, Any]:
    """Mean and standard deviation, by name: those of the settings, else the file's three of red, green and blue."""
    moments = {}
    for name in ("mean", "std"):
        of_file = getattr(file, name)
        is_usable = of_file and len(of_file) == 3
        moments[name] = getattr(spec, name) or (list(of_file) if is_usable else None)
    return moments


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trainable or not, also where DeepSpeed has sharded them."""
    # DeepSpeed empties what is in shards.
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
