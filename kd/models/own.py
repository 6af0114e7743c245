"""Users' own models: any module that takes pictures, under the few names that timm's models have."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kd.errors import UserError, plain
from kd.models.preprocess import Size
from kd.models.sharding import is_sharded
from kd.models.taps import classifier_of
from kd.settings import height_width
from kd.storage.elsewhere import json_of

EXAMPLES = {"img_size": "224", "mean": "[0.5,0.5,0.5]", "std": "[0.5,0.5,0.5]"}
"""Of settings that say what a model takes, for a message."""


class Builder(Protocol):
    """Makes a model: a user's class with this method, whose arguments are given in YAML.

    A builder may have ``num_classes`` (of weights that it loads; 0: they have no classifier) and ``class_names``. The
    model may have ``img_size``, ``mean`` and ``std``, which count where the settings have none.
    """

    def build(self, num_classes: int, img_size: Size | None) -> nn.Module:
        """A model of float pictures ``(N, 3, H, W)``, normalised; it gives logits ``(N, num_classes)``.

        Args:
            num_classes: of the classifier; 0 for a model that gives its features ``(N, D)``, or, as detectors'
                backbones do, maps (:func:`features_of`).
            img_size: height and width of its input; None: its own.
        """
        ...


def logits_of(output: object) -> Tensor:
    """The logits (or features) in a model's output: a tensor; ``.logits``; a dict's ``logits``, or its ``out``, as
    torchvision's segmentation models have it; the first item of a tuple or list.

    Raises:
        UserError: none of these.

    >>> import torch
    >>> logits_of({"logits": torch.zeros(1, 2), "loss": None}).shape
    torch.Size([1, 2])
    """
    logits = getattr(output, "logits", output)
    if isinstance(output, Mapping):
        logits = output.get("logits", output.get("out"))
    elif isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor):
        return logits
    raise UserError(
        f"a model must give a tensor, an output with .logits, a dict with 'logits' or 'out', or a "
        f"tuple, got {type(output).__name__}"
    )


def maps_in(output: object) -> list[Tensor]:
    """The maps ``(N, C, H, W)`` in a detector's backbone's output: one, or several in a tuple, list or dict.

    Returns:
        In the backbone's order; [] where anything in the output is not a tensor of four axes.
    """
    outputs: list[Any] = [output]
    if isinstance(output, Mapping):
        outputs = list(output.values())
    elif isinstance(output, tuple | list):
        outputs = list(output)
    are_maps = all(isinstance(one, Tensor) and one.ndim == 4 for one in outputs)
    return outputs if are_maps else []


def features_of(output: object) -> Tensor:
    """The features in the output of a model without a classifier: of maps the last, averaged over its positions,
    ``(N, D)``; else the tensor that :func:`logits_of` finds, as it is.

    Raises:
        UserError: neither maps, nor what :func:`logits_of` takes.

    >>> import torch
    >>> features_of((torch.zeros(1, 64, 8, 8), torch.zeros(1, 128, 4, 4))).shape
    torch.Size([1, 128])
    """
    maps = maps_in(output)
    if maps:
        return maps[-1].mean(dim=(2, 3))
    return logits_of(output)


def classes_of(model: nn.Module) -> int:
    """How many classes a model answers with; 0 where unknown.

    It is ``num_classes`` of the model if that is a whole number. Else it is the outputs of the last layer that has any, in
    the model's classifier (:func:`~kd.models.taps.classifier_of`; of a Sequential its last member).
    """
    known = getattr(model, "num_classes", None)
    if isinstance(known, int):
        return known
    try:
        if isinstance(model, nn.Sequential):
            head = model[-1]
        else:
            head = classifier_of(model, "student")
    except UserError:
        return 0
    outputs = [
        getattr(layer, "out_features", getattr(layer, "out_channels", 0))
        for layer in head.modules()
    ]
    return next((count for count in reversed(outputs) if count), 0)


class OwnModel(nn.Module):
    """Any module under the names that timm's models have; its layers are below ``model``."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        img_size: Size,
        mean: Sequence[float],
        std: Sequence[float],
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        """Wraps a model; its classifier is the last linear layer with ``num_classes`` outputs.

        Args:
            model: takes pictures ``(N, 3, H, W)``.
            num_classes: of the data; 0: it has no classifier, and :meth:`forward` gives features.
            img_size: height and width of its input, in pixels.
            mean: of its input, by channel, in [0, 1].
            std: likewise.
            made_by: the builder and its arguments, as a student's file records them.
        """
        super().__init__()
        self.model = model
        self.num_classes = num_classes
        self.made_by = dict(made_by or {})
        self.classifier = ""
        for path, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer.out_features == num_classes:
                self.classifier = path
        self.pretrained_cfg: dict[str, Any] = {
            "input_size": (3, *img_size),
            "mean": tuple(mean),
            "std": tuple(std),
            "classifier": f"model.{self.classifier}" if self.classifier else "model.head",
        }
        self.num_prefix_tokens = sum(
            value.shape[-2] if name.endswith("register_tokens") else 1
            for name, value in model.named_parameters()
            if name.endswith(("cls_token", "class_embedding", "register_tokens"))
        )

    def get_classifier(self) -> nn.Module:
        """The last linear layer with as many outputs as there are classes; an ``nn.Identity`` where there is none."""
        if self.classifier:
            return self.model.get_submodule(self.classifier)
        return nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns gradient checkpointing of the user's model on or off, by the name that timm's models use.

        Raises:
            UserError: the model has no such method.
        """
        switch: Any = getattr(self.model, "set_grad_checkpointing", None)
        if switch is None:
            raise UserError(
                f"grad_checkpointing: {type(self.model).__name__} has no set_grad_checkpointing"
            )
        switch(enable)

    def forward(self, x: Tensor) -> Tensor:
        """``(N, 3, H, W)`` -> logits ``(N, num_classes)``, or without classes features ``(N, D)``; a UserError where the
        model's output has neither (:func:`logits_of`).
        """
        output = self.model(x)
        if self.num_classes:
            return logits_of(output)
        return features_of(output)


def frozen_copy(model: nn.Module, name: str) -> nn.Module:
    """A frozen copy of a user's model in eval mode that computes with the same memory, until it is moved or cast.

    The model itself keeps its flags, mode, device and type, whatever becomes of the copy. Of what ``torch.compile(model)``
    returns the copy is compiled likewise; of a model that was compiled in place it runs as it is written.

    Args:
        model: the user's.
        name: of the argument, for messages.

    Raises:
        UserError: it can't be copied.
    """
    inner = uncompiled(model)
    instead = f"give a function in its place, lambda images: {name}(images)"
    same_memory: dict[int, Any] = {}
    for tensor in (*inner.parameters(), *inner.buffers()):
        if type(tensor) is nn.Parameter:
            same_memory[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=False)
        elif type(tensor) is Tensor:
            same_memory[id(tensor)] = tensor.detach()
    try:
        copied = copy.deepcopy(inner, same_memory)
    except Exception as error:
        kind = type(inner).__name__
        raise UserError(f"{name}: {kind} can't be copied ({plain(error)}); {instead}") from error
    compile_as(model, copied)
    return copied.requires_grad_(False).eval()


def uncompiled(model: nn.Module) -> nn.Module:
    """The model in what ``torch.compile(model)`` returns, whose layers and parameters have their own names; else itself."""
    inner = model._modules.get("_orig_mod")
    if inner is None or not hasattr(model, "dynamo_ctx"):
        return model
    return inner


def compile_as(given: nn.Module, model: nn.Module) -> None:
    """Compiles ``model`` in place by the backend and options of ``given``, where ``torch.compile`` has returned that."""
    if uncompiled(given) is not given:
        model._compiled_call_impl = given.dynamo_ctx(model._call_impl)  # type: ignore[operator]


class AsGiven:
    """What training changes of a user's model beside its weights: modes, types, flags, and how it is compiled."""

    def __init__(self, model: nn.Module) -> None:
        """Notes the present state of ``model``; :meth:`exchange` brings it back."""
        self._model = model
        self._other = self._state()

    def _state(self) -> tuple[dict[nn.Module, Any], dict[str, Any], object]:
        """The modules' modes and compiled calls, the tensors' types and flags, and which heads a distilled ViT returns."""
        modules = {m: (m.training, m._compiled_call_impl) for m in self._model.modules()}
        tensors = {name: (t.dtype, t.requires_grad) for name, t in self._tensors()}
        return modules, tensors, getattr(self._model, "distilled_training", None)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers by name."""
        return chain(self._model.named_parameters(), self._model.named_buffers())

    @torch.no_grad()
    def exchange(self) -> None:
        """Gives the model the state that was noted, and notes the one that it had. Models in shards keep theirs."""
        if is_sharded(self._model):
            return
        modules, tensors, distilled = self._other
        self._other = self._state()
        for module, (training, compiled) in modules.items():
            module.training = training
            module._compiled_call_impl = compiled
        for name, tensor in self._tensors():
            # what a run has added (the units of numbers) stays as it is
            dtype, has_gradient = tensors.get(name, (tensor.dtype, False))
            tensor.data = tensor.data.to(dtype)
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(has_gradient)
        if distilled is not None:
            self._model.set_distilled_training(distilled)  # type: ignore[operator]


def build_own(
    builder: Builder,
    num_classes: int,
    img_size: Size | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    key: str,
) -> nn.Module:
    """The model that a builder makes, wrapped under timm's names (:class:`OwnModel`) unless it has ``pretrained_cfg`` and
    ``get_classifier`` already.

    Args:
        builder: the user's.
        num_classes: of the data; 0: no classifier.
        img_size: height and width of the input; None: the builder's own.
        mean: of the input, by channel; None: as the model says.
        std: likewise.
        key: of the model's settings (``model.teacher``), for messages.

    Raises:
        UserError: a builder that fails in a usual way (those of the ``except`` below; other errors are raised as they are)
            or makes no module, or a model whose input neither settings nor model describe.
    """
    try:
        model = builder.build(num_classes, img_size)
    except (UserError, ImportError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise error_of_builder(error, key) from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserError(
            f"{key}.builder: {name_of(builder)} must build a torch module, got {kind} (a class that answers has "
            "answer(self, batch, wanted) and identity(self))"
        )
    if hasattr(model, "pretrained_cfg") and hasattr(model, "get_classifier"):
        return model
    # What the model takes: by the settings, else by its own attributes.
    given = {"img_size": img_size, "mean": mean, "std": std}
    takes = {name: value or getattr(model, name, None) for name, value in given.items()}
    missing = [name for name, value in takes.items() if value is None]
    if missing:
        words = " ".join(f"{key}.{name}={EXAMPLES[name]}" for name in missing)
        raise UserError(
            f"{key}.{missing[0]}: {name_of(builder)} does not say what its model takes, so the settings must, for "
            f"example {words}"
        )
    size = height_width(takes["img_size"])  # type: ignore[arg-type]
    return OwnModel(model, num_classes, size, takes["mean"], takes["std"], remade(builder))  # type: ignore[arg-type]


def error_of_builder(error: Exception, key: str) -> UserError:
    """A builder's error as a UserError in one line, which begins with the builder's key.

    Args:
        error: a UserError whose text begins with ``builder.ARGUMENT:`` names that argument's key.
        key: of the model's settings (``model.teacher``).
    """
    reason = str(error) if isinstance(error, UserError) else plain(error)
    if reason.startswith("builder."):
        return UserError(f"{key}.{reason}")
    return UserError(f"{key}.builder: {reason}")


def name_of(builder: Builder) -> str:
    """A short name of a builder for tables and files: its ``name``, else its class."""
    return str(getattr(builder, "name", type(builder).__name__))


def remade(builder: Builder) -> dict[str, Any]:
    """Class path and arguments by which the builder is made again, where its attributes are its arguments.

    A student's file has it as ``builder``. {} where the attributes are nothing that a JSON file can hold; such a builder
    makes no student (:func:`kd.models.build.build_model` refuses it).
    """
    kind = type(builder)
    made_by = {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": dict(vars(builder)),
    }
    try:
        return json_of(json.dumps(made_by))
    except (TypeError, ValueError):  # arguments that no file can hold
        return {}
