"""Vision models of transformers as teacher or student (extra ``hf``)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kd.errors import UserError, needs_extra
from kd.models.arguments import architecture_alone, check_arguments, check_memory
from kd.models.foreign import Pixels
from kd.models.own import OwnModel
from kd.models.preprocess import Preprocess, Size
from kd.models.weights import names_in
from kd.settings import height_width
from kd.storage.elsewhere import (
    RefusedFile,
    json_of,
    mapping_in,
    mapping_of,
    plain_name,
    regular_files,
    text_of,
)
from kd.storage.writing import folder_for, write_json

if TYPE_CHECKING:
    import transformers

HALF = (0.5, 0.5, 0.5)
"""Mean and deviation of pictures, where the model's file names none."""
CONFIG = "config.json"
"""The file of a model's family and its arguments."""
PIXELS = "preprocessor_config.json"
"""The file of how pictures are prepared."""
PROCESSOR = "processor_config.json"
"""The file that has these settings as its ``image_processor`` where a model also reads text."""
ADAPTER = "adapter_config.json"
"""The file of a model's changes: with the package peft transformers would read the model that it names."""
FAMILIES = [
    "beit",
    "bit",
    "clip",
    "clip_vision_model",
    "convnext",
    "convnextv2",
    "cvt",
    "data2vec-vision",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_convnext",
    "dinov3_vit",
    "efficientnet",
    "focalnet",
    "hiera",
    "ijepa",
    "levit",
    "metaclip_2",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilevit",
    "mobilevitv2",
    "poolformer",
    "pvt",
    "pvt_v2",
    "regnet",
    "resnet",
    "segformer",
    "siglip",
    "siglip2",
    "siglip2_vision_model",
    "siglip_vision_model",
    "swiftformer",
    "swin",
    "swinv2",
    "van",
    "vit",
    "vit_mae",
    "vit_msn",
]
"""Vision models of transformers that are made of their configuration alone: none asks timm or the hub for a part."""


@dataclass
class HuggingFaceBuilder:
    """Builds a vision model of transformers: ViT, DINOv2 (with registers), SigLIP, Swin, ConvNeXt, ...

    Attributes:
        path: a folder of ``save_pretrained``, or a name on the hub (downloads it). Its class names, size, mean and
            standard deviation come along.
        config: instead of a path: ``model_type`` and arguments of its configuration, for random weights.

    Raises:
        UserError: neither or both; where it is used, no transformers, or a path or config that is no model of it.
    """

    path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses both or neither of ``path`` and ``config``."""
        if bool(self.path) == bool(self.config):
            raise UserError(
                "HuggingFaceBuilder takes a path (a folder, or a name on the hub) or a config with its model_type"
            )

    @property
    def name(self) -> str:
        """A short name for tables and files: that of the folder, or the model's type."""
        return f"hf_{Path(self.path).name if self.path else self.config.get('model_type')}"

    @property
    def num_classes(self) -> int | None:
        """Classes that its weights name; 0: they have no classifier; None: there are no weights."""
        if not self.path:
            return None
        config = self._config()
        architectures = config.architectures or []
        if not any("ForImageClassification" in name for name in architectures):
            return 0
        return config.num_labels

    @property
    def class_names(self) -> list[str]:
        """Names of the weights' classes by id; empty without weights or a classifier, and for ``LABEL_0`` and the like."""
        if not self.num_classes:
            return []
        return names_in({"id2label": self._config().id2label})

    def build(self, num_classes: int, img_size: Size | None) -> nn.Module:
        """A model of ``num_classes`` outputs, on the CPU; a classifier of other classes than the weights' starts anew.

        Args:
            num_classes: of the classifier; 0: the model gives its features.
            img_size: height and width of the input; None: as ``preprocessor_config.json`` says, else the configuration, else
                224 x 224.

        Returns:
            A :class:`HuggingFaceModel`.

        Raises:
            UserError: too large for the memory, weights that lack more than a classifier and a pooler, or as of
                :meth:`_config`.
        """
        config = self._config(img_size)
        if num_classes:
            config.num_labels = num_classes
            kind = _transformers().AutoModelForImageClassification
        else:
            config = getattr(config, "vision_config", config)
            kind = _transformers().AutoModel
        make = partial(kind.from_config, config, trust_remote_code=False)
        check_memory(make, self.name, {"num_classes": num_classes})
        model = self._load(kind, config) if self.path else make()
        if not num_classes:
            _without_unused(model)
        pixels = self._pixels()
        moments = Pixels.said_in(pixels, Path(self.path or "") / PIXELS)
        size = img_size or _size(pixels) or height_width(_image_size(config, 224))
        mean = moments.image_mean or HALF
        std = moments.image_std or HALF
        made_by = {
            "class_path": f"{__name__}.HuggingFaceBuilder",
            "init_args": {"config": model.config.to_dict()},
        }
        plain_values = json_of(json.dumps(made_by, default=str))
        return HuggingFaceModel(model, num_classes, size, mean, std, plain_values)

    def _config(self, img_size: Size | None = None) -> "transformers.PretrainedConfig":
        """The configuration of transformers: that of ``path``, or one from ``config``.

        It is read as data: transformers only gets the arguments of a family in :data:`FAMILIES`, without what fetches code
        or weights; attention by code of the hub becomes torch's own. The text model of a pair (CLIP, SigLIP) is left at its
        defaults: it is never built.

        Args:
            img_size: height and width that replace ``image_size`` of ``config`` itself; that of a ``vision_config`` in it,
                and that of ``path``, stay.

        Raises:
            UserError: no such model, a family that is not in :data:`FAMILIES`, or arguments that
                 :func:`kd.models.arguments.check_arguments` refuses.
        """
        transformers = _transformers()
        try:
            given = self._content(CONFIG) if self.path else self.config
            where = f"builder.path: {CONFIG}: " if self.path else "builder.config."
            family = given.get("model_type", "")
            if family not in FAMILIES:
                known = ", ".join(FAMILIES)
                raise ValueError(f"model_type must be one of {known}, got '{str(family)[:40]}'")
            arguments = architecture_alone(given)
            del arguments["model_type"]
            if self.path:
                if (Path(self.path) / ADAPTER).exists():
                    raise ValueError(f"it has an {ADAPTER}; a whole model is read")
                arguments.pop("text_config", None)
            else:
                arguments.pop("architectures", None)
            check_arguments(arguments, where)
            if img_size is not None and not self.path and "image_size" in arguments:
                height, width = img_size
                arguments["image_size"] = height if height == width else [height, width]
            return transformers.AutoConfig.for_model(family, **arguments)
        except RefusedFile as error:
            raise UserError(f"builder.path: {error}") from error
        except UserError:
            raise
        except Exception as error:  # of values that transformers does not expect: many kinds
            what = f"path: {self.path}" if self.path else "config: it"
            reason = " ".join(str(error).split())[:600]
            raise UserError(f"builder.{what} is no model of transformers: {reason}") from error

    def _content(self, name: str) -> dict[str, Any]:
        """What a JSON file in ``path`` maps, empty where it is missing; a file of the hub is downloaded.

        Raises:
            OSError: no such folder or name, or a file that is not opened.
            ValueError: the file holds no mapping.
        """
        from transformers.utils import cached_file

        regular_files(Path(str(self.path)))
        file = cached_file(str(self.path), name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            return {}
        content = json_of(text_of(file))
        if not isinstance(content, dict):
            raise ValueError(f"{name} holds no mapping")
        return content

    def _load(
        self, kind: type["transformers.AutoModel"], config: "transformers.PretrainedConfig"
    ) -> "transformers.PreTrainedModel":
        """The model of ``kind`` with the weights of ``path``; only classifier and pooler may be new, else a UserError.

        Its index may name only files of the folder itself, which :meth:`_content` has checked.
        """
        for index in Path(str(self.path)).glob("*.index.json"):  # files of weights, by tensor
            for name in mapping_in(mapping_of(index), "weight_map").values():
                plain_name(str(name), f"builder.path: {index}")
        model, loading = kind.from_pretrained(
            str(self.path),
            config=config,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
        may_be_new = ("classifier.", "pooler.")
        missing = sorted(key for key in loading["missing_keys"] if not key.startswith(may_be_new))
        if missing:
            lacks = ", ".join(missing[:3])
            raise UserError(f"{self.path} does not fit {type(model).__name__}: {lacks} missing")
        return model

    def _pixels(self) -> Mapping[str, Any]:
        """The settings by which the input is prepared; empty where ``path`` has none."""
        if not self.path:
            return {}
        try:
            nested = mapping_in(self._content(PROCESSOR), "image_processor")
            return nested or self._content(PIXELS)
        except OSError:  # of the hub: not fetched, and not to be reached
            return {}
        except ValueError as error:
            raise UserError(f"builder.path: {self.path}: {PIXELS}: {error}") from error


class HuggingFaceModel(OwnModel):
    """A vision model of transformers under timm's names; its layers are below ``model``."""

    def __init__(self, model: "transformers.PreTrainedModel", *args: Any) -> None:
        """Wraps a model of transformers; for another input size than its own it interpolates its positions, where its
        forward can.

        Args:
            model: of transformers.
            args: the other arguments of :class:`OwnModel`, in order.
        """
        super().__init__(model, *args)
        for name, parameter in model.named_parameters():
            # For masked training alone: it would never get a gradient.
            if name.endswith("mask_token"):
                parameter.requires_grad_(False)
        native = height_width(_image_size(model.config, 0))
        takes = signature(model.forward).parameters
        other_size = native != self.pretrained_cfg["input_size"][1:]
        if other_size and "interpolate_pos_encoding" in takes:
            self._options = {"interpolate_pos_encoding": True}
        else:
            self._options = {}

    @property
    def num_features(self) -> int:
        """Width of the classifier's input, or of the features without one; 0 where that is not known."""
        return super().num_features or int(getattr(self.model.config, "hidden_size", 0))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns gradient checkpointing on or off, by the name that timm's models use."""
        model: Any = self.model
        model.gradient_checkpointing_enable() if enable else model.gradient_checkpointing_disable()

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that weight decay leaves alone: special tokens and position embeddings."""
        kinds = (
            "cls_token",
            "register_tokens",
            "position_embeddings",
            "position_embedding.weight",
            "class_embedding",
        )
        return {name for name, _ in self.named_parameters() if name.endswith(kinds)}

    def forward(self, x: Tensor) -> Tensor:
        """Prepared pictures ``(N, 3, H, W)`` -> logits ``(N, C)``; without a classifier features ``(N, D)``.

        The features are the pooler's output where there is one; else the mean of the last map, or the class token, or the
        mean of the tokens.
        """
        output = self.model(x, **self._options)
        if self.num_classes:
            return output.logits
        pooled = getattr(output, "pooler_output", None)
        if isinstance(pooled, Tensor):
            return pooled.flatten(1)
        tokens = output.last_hidden_state
        if tokens.ndim == 4:
            return tokens.mean((2, 3))
        if self.num_prefix_tokens:
            return tokens[:, 0]
        return tokens.mean(1)

    def save_folder(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        classes: list[str],
        crop_ratio: float,
        want: Preprocess,
    ) -> None:
        """Writes a folder that ``AutoModelForImageClassification.from_pretrained(folder)`` reads.

        Args:
            folder: made where it is missing.
            state: weights, with "model." before their names.
            classes: names, in the order of the logits.
            crop_ratio: share in (0, 1] of the resized picture's shorter side that the centre crop has.
            want: the model's input: size in pixels, mean and std.
        """
        model: Any = self.model
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {name: i for i, name in enumerate(classes)}
        model.save_pretrained(
            folder_for(folder), state_dict={k.removeprefix("model."): v for k, v in state.items()}
        )
        height, width = want.size
        pixels = {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": 2,
            "size": {"shortest_edge": round(min(want.size) / crop_ratio)},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(want.mean),
            "image_std": list(want.std),
        }
        write_json(folder / PIXELS, pixels)


def _transformers() -> ModuleType:
    """The module ``transformers``; a user's error names the extra where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"HuggingFaceBuilder {needs_extra('hf')}") from error
    return transformers


def _image_size(config: "transformers.PretrainedConfig", unknown: int) -> int | Sequence[int]:
    """A side, or height and width, in pixels, by the configuration or its ``vision_config``; ``unknown`` without one."""
    return getattr(getattr(config, "vision_config", config), "image_size", unknown)


def _without_unused(model: nn.Module) -> None:
    """Removes a ViT's pooler from a model without a classifier, whose features are then the class token; other models stay
    as they are.

    Most published vision weights lack the pooler, a linear layer with tanh over the class token: it would be random.
    """
    if type(getattr(model, "pooler", None)).__name__.endswith("Pooler") and hasattr(
        model.pooler, "dense"
    ):
        model.pooler = None  # type: ignore[assignment]


def _size(pixels: Mapping[str, Any]) -> Size | None:
    """Height and width in pixels after an image processor's resizing and crop, by its settings ``pixels``; of a shortest
    edge alone a square; None: not named.
    """
    size = pixels.get("size")
    if pixels.get("do_center_crop"):
        size = pixels.get("crop_size") or size
    if isinstance(size, Mapping) and "height" in size:
        return size["height"], size["width"]
    side = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if side is None:
        return None
    return height_width(side)
