"""Vision models of transformers as teachers (extra ``hf``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from kd.models.preprocess import Size
from kd.models.weights import names_in
from kd.settings import height_width
from kd.storage.elsewhere import (
    json_of,
    mapping_in,
    mapping_of,
    plain_name,
    regular_files,
    text_of,
)

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
    "beit", "bit", "clip", "clip_vision_model", "convnext", "convnextv2", "cvt", "data2vec-vision", "deit",
    "dinov2", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit", "efficientnet", "focalnet", "hiera",
    "ijepa", "levit", "metaclip_2", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "poolformer",
    "pvt", "pvt_v2", "regnet", "resnet", "segformer", "siglip", "siglip2", "siglip2_vision_model",
    "siglip_vision_model", "swiftformer", "swin", "swinv2", "van", "vit", "vit_mae", "vit_msn",
]  # fmt: skip
"""Vision models of transformers that are made of their configuration alone: none takes a part from timm or the hub."""


@dataclass
class HuggingFaceBuilder:
    """Builds a vision model of transformers as a teacher: ViT, DINOv2 (with registers), SigLIP, Swin, ConvNeXt, ...

    Attributes:
        path: a folder of ``save_pretrained``, or a name on the hub (downloads it). Its class names, size, mean and
            standard deviation come along.

    Raises:
        UserError: where it is used, no transformers, or a path that is no model of it.
    """

    path: str
    teaches_alone = True  # a student of transformers could not be saved as one of kd's

    @property
    def name(self) -> str:
        """A short name for tables and files: that of the folder."""
        return f"hf_{Path(self.path).name}"

    @property
    def num_classes(self) -> int:
        """Classes that its weights name; 0: they have no classifier."""
        config = self._config()
        architectures = config.architectures or []
        if not any("ForImageClassification" in name for name in architectures):
            return 0
        return config.num_labels or 0

    @property
    def class_names(self) -> list[str]:
        """Names of the weights' classes by id; empty without a classifier, and for ``LABEL_0`` and the like."""
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
        config = self._config()
        if num_classes:
            config.num_labels = num_classes
            kind = _transformers().AutoModelForImageClassification
        else:
            config = getattr(config, "vision_config", config)
            kind = _transformers().AutoModel
        make = partial(kind.from_config, config, trust_remote_code=False)
        check_memory(make, self.name, {"num_classes": num_classes})
        model = self._load(kind, config)
        # most published weights lack a ViT's pooler, a linear layer with tanh over the class token: it would be random
        if not num_classes and hasattr(getattr(model, "pooler", None), "dense"):
            model.pooler = None  # type: ignore[assignment]
        pixels = self._pixels()
        moments = Pixels.said_in(pixels, Path(self.path) / PIXELS)
        size = img_size or _size(pixels) or height_width(_image_size(config, 224))
        mean = moments.image_mean or HALF
        std = moments.image_std or HALF
        return HuggingFaceModel(model, num_classes, size, mean, std)

    def _config(self) -> "transformers.PretrainedConfig":
        """The configuration of transformers.

        It is read as data: transformers only gets the arguments of a family in :data:`FAMILIES`, without what fetches code
        or weights; attention by code of the hub becomes torch's own. The text model of a pair (CLIP, SigLIP) is left at its
        defaults: it is never built.

        Raises:
            UserError: no such model, a family that is not in :data:`FAMILIES`, or arguments that
                :func:`kd.models.arguments.check_arguments` refuses.
        """
        transformers = _transformers()
        try:
            given = self._content(CONFIG)
            family = given.get("model_type", "")
            if family not in FAMILIES:
                known = ", ".join(FAMILIES)
                raise ValueError(f"model_type must be one of {known}, got '{str(family)[:40]}'")
            if (Path(self.path) / ADAPTER).exists():
                raise ValueError(f"it has an {ADAPTER}; a whole model is read")
            arguments = architecture_alone(given)
            del arguments["model_type"]
            arguments.pop("text_config", None)
            check_arguments(arguments, f"{CONFIG}: ")
            return transformers.AutoConfig.for_model(family, **arguments)
        except UserError as error:
            raise UserError(f"builder.path: {error}") from error
        except Exception as error:  # of values that transformers does not expect: many kinds
            reason = " ".join(str(error).split())[:600]
            raise UserError(
                f"builder.path: {self.path} is no model of transformers: {reason}"
            ) from error

    def _content(self, name: str) -> dict[str, Any]:
        """The content of a JSON file in ``path``, a mapping; {} where the file is missing. A file of the hub is downloaded.

        Raises:
            OSError: no such folder or name, or a file that is not opened.
            ValueError: the file holds no mapping.
        """
        from transformers.utils import cached_file

        regular_files(Path(self.path))
        file = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False)
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
        for index in Path(self.path).glob("*.index.json"):  # files of weights, by tensor
            for name in mapping_in(mapping_of(index), "weight_map").values():
                plain_name(str(name), f"builder.path: {index}")
        model, loading = kind.from_pretrained(
            self.path,
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
        """The settings by which the input is prepared; empty where ``path`` has none, or the hub can't be reached.

        Raises:
            UserError: a file of them that holds no mapping.
        """
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
        native = height_width(_image_size(model.config, 0))
        takes = signature(model.forward).parameters
        other_size = native != self.pretrained_cfg["input_size"][1:]
        if other_size and "interpolate_pos_encoding" in takes:
            self._options = {"interpolate_pos_encoding": True}
        else:
            self._options = {}

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


def _size(pixels: Mapping[str, Any]) -> Size | None:
    """Height and width in pixels that an image processor gives, by its settings ``pixels``: of its crop, else its resizing.

    A square where these name a shortest edge alone; None where they name no size.
    """
    crop = pixels.get("crop_size") if pixels.get("do_center_crop") else None
    size = crop or pixels.get("size") or {}
    if isinstance(size, int):
        return height_width(size)
    if "height" in size:
        return size["height"], size["width"]
    side = size.get("shortest_edge")
    if side is None:
        return None
    return height_width(side)
