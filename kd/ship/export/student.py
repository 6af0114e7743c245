"""The student alone: weights that plain timm loads."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from kd.distill.student import Student
from kd.errors import UserError, plain
from kd.models import Preprocess, height_width
from kd.models.arguments import check_arguments, without_values
from kd.models.output_scale import unit_output
from kd.models.own import OwnModel, build_own
from kd.models.segmenter import DenseModel
from kd.module.distillation import DistillationModule
from kd.storage.checkpoints import student_weights_in
from kd.storage.elsewhere import LARGEST_STUDENT, json_of, regular
from kd.storage.student_metadata import StudentMetadata, student_metadata_in
from kd.storage.tensors import read_checkpoint
from kd.storage.writing import second_name, write_bytes, write_json
from kd.tasks import Task


def student_metadata(student: Student) -> dict[str, str]:
    """What one needs to use the weights, as safetensors metadata: strings, ``arch`` as it is and all others as JSON.

    ``arch``, ``kwargs``, ``classes`` and ``task`` always; ``img_size`` (pixels: the side, or height and width), ``mean``
    and ``std`` where kd prepares the pictures; ``dense`` for a segmenter above a timm backbone; ``builder`` for a model
    that timm has not built; ``facts``, numbers of the classes, where the data have some; ``classifies`` (false) where
    nothing has trained the classifier. :func:`kd.storage.student_metadata.student_metadata_in` reads them.
    """
    prepare: Any = student.prepare
    dense = isinstance(student.model, DenseModel)
    backbone: Any = student.model.backbone if dense else student.model
    kwargs = getattr(backbone, "made_with", {})
    content: dict[str, Any] = {
        "kwargs": {**kwargs, "num_classes": len(student.classes)},
        "classes": student.classes,
        "task": remade_task(student.objective.task),
    }
    if isinstance(prepare, Preprocess):
        height, width = prepare.size
        content["img_size"] = height if height == width else prepare.size
        content["mean"] = prepare.mean
        content["std"] = prepare.std
    if dense:
        content["dense"] = True  # a timm backbone below kd.models.segmenter.DenseModel
    if isinstance(backbone, OwnModel):
        content["builder"] = backbone.made_by
    if student.data.facts:
        content["facts"] = student.data.facts
    if not student.classifies:
        # nothing has trained the classifier: what counts are the features below it
        content["classifies"] = False
    return {"arch": student.arch, **{key: json.dumps(value) for key, value in content.items()}}


def remade_task(task: Task) -> dict[str, Any]:
    """Class path (``class_path``) and arguments (``init_args``) by which a task is made again.

    An argument is read from the attribute of its name. Left out are those without one, those whose value is not a string,
    number, dict or list, and those that the data decides.

    >>> from kd.tasks import Classification
    >>> remade_task(Classification(label_smoothing=0.1))["init_args"]["label_smoothing"]
    0.1
    """
    kind = type(task)
    init_args = {}
    for name in signature(kind).parameters:
        value = getattr(task, name, None)
        of_data = name in ("num_classes", "ignore_index")
        if not of_data and isinstance(value, str | int | float | dict | list):
            init_args[name] = value
    module = kind.__module__
    if module.startswith("kd.tasks."):
        module = "kd.tasks"
    return {"class_path": f"{module}.{kind.__qualname__}", "init_args": init_args}


def save_student(
    module: DistillationModule | Student, path: str | Path, checkpoint: Path | None = None
) -> None:
    """Writes ``student.safetensors``: ``timm.create_model(arch, **kwargs)`` + ``load_state_dict``, no ``kd`` needed.

    Beside it the folder ``student/`` of the same weights, as timm (``local-dir:``) or transformers load it; none of a
    segmenter, of a model of your own, or of one that prepares its pictures itself. The weights are the moving average's
    where there is one. In a run the first process calls it.

    Args:
        module: the trained module, or its student.
        path: the file to write; replaced in one step.
        checkpoint: take the weights from this training checkpoint instead of the module's present ones.
    """
    path = Path(path)
    student = module.student if isinstance(module, DistillationModule) else module
    if checkpoint is None:
        weights = student.final.state_dict()
    else:
        weights = student_weights_in(read_checkpoint(checkpoint)["state_dict"])
    state = unit_output(weights)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # not by save_file: its files can be read by their owner alone
    write_bytes(path, in_order(save(on_host, student_metadata(student))))

    model: Any = student.model
    prepare: Any = student.prepare
    folder = path.with_suffix("")  # student/ beside student.safetensors
    if not isinstance(prepare, Preprocess):  # a model of the user's own, whose input is not known
        return
    if hasattr(model, "made_with"):  # timm builds no models for dense prediction
        config = timm_config(
            model, student.arch, model.made_with, prepare, student.classes, student.data.crop_ratio
        )
        write_timm_folder(path, folder, config)


def in_order(file: bytes) -> bytes:
    """A safetensors file with sorted metadata, so that equal students give equal files: the library writes the metadata in
    a random order.

    The format: eight bytes with the header's length (little-endian), the header as JSON, the weights.
    """
    end_of_header = 8 + int.from_bytes(file[:8], "little")
    header = json_of(file[8:end_of_header])
    weights = file[end_of_header:]

    metadata = header["__metadata__"]
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    while len(text) % 8:  # the weights begin at a multiple of 8
        text += b" "
    length = len(text).to_bytes(8, "little")
    return length + text + weights


def timm_config(
    model: nn.Module,
    arch: str,
    made_with: dict[str, Any],
    prepare: Preprocess,
    classes: list[str],
    crop_ratio: float,
) -> dict[str, Any]:
    """The ``config.json`` by which timm builds the student and knows its input and class names.

    Args:
        model: built by timm, with or without a classifier.
        arch: timm's name of it.
        made_with: arguments of ``timm.create_model``.
        prepare: the input that the student was trained with.
        classes: names by class id.
        crop_ratio: share of a scaled picture's side that validation's crop keeps.
    """
    pretrained_cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    return {
        "architecture": arch,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "label_names": classes,
        "model_args": {k: v for k, v in made_with.items() if k != "num_classes"},
        "pretrained_cfg": {
            "input_size": [3, *prepare.size],
            "fixed_input_size": bool(pretrained_cfg.get("fixed_input_size")),
            "interpolation": "bilinear",
            "crop_pct": crop_ratio,
            "crop_mode": "center",
            "mean": prepare.mean,
            "std": prepare.std,
            "num_classes": model.num_classes,
            "first_conv": pretrained_cfg.get("first_conv"),
            "classifier": pretrained_cfg.get("classifier"),
        },
    }


def write_timm_folder(weights: Path, folder: Path, config: dict[str, Any]) -> None:
    """Writes a folder for ``timm.create_model("local-dir:...")``: ``model.safetensors`` and ``config.json``.

    Args:
        weights: of the student; the folder's are a hard link to them, a copy where the disk has no links.
        folder: made where it is missing.
        config: of :func:`timm_config`.
    """
    second_name(weights, folder / "model.safetensors")
    write_json(folder / "config.json", config)


def load_student(
    path: str | Path, builder: type | None = None
) -> tuple[nn.Module, Preprocess, list[str]]:
    """Reads ``student.safetensors``: the model in eval mode, its input, its class names.

    Args:
        path: the file, or the folder of a run. It is data: what it says of its model runs no code but timm's and
            :mod:`kd.models`'.
        builder: the class that has built its model, where that is one of your own.

    Raises:
        UserError: no such file, a damaged one, or one whose model can't be built.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "student.safetensors"
    with _reading(path):
        make, preprocess, classes = _described(path, builder)
        model = make()
        model.load_state_dict(load_file(regular(path, LARGEST_STUDENT)))
    return model.eval(), preprocess, classes


def untrained_student(path: Path, seed: int, builder: type | None = None) -> nn.Module:
    """The model that ``student.safetensors`` describes, in eval mode, with new random weights.

    Args:
        path: the file, see :func:`load_student`.
        seed: of the weights; the random state of torch is left as it was.
        builder: see :func:`load_student`.

    Raises:
        UserError: as of :func:`load_student`.
    """
    with _reading(path), torch.random.fork_rng(devices=[]):
        make, _, _ = _described(path, builder)
        torch.manual_seed(seed)
        return make().eval()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Inside, whatever a damaged file makes the readers raise becomes a UserError of one line that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path}: its model can't be built: {plain(error)}") from error


def _described(
    path: Path, builder: type | None
) -> tuple[Callable[[], nn.Module], Preprocess, list[str]]:
    """What makes the model that a file describes (without its weights), its input, and its class names.

    Args:
        path: ``student.safetensors``.
        builder: the class that has built the file's model; None: timm makes it, and the names and shapes of its weights
            are compared with the file's first (:func:`_check_shapes`).

    Raises:
        UserError: as of :func:`_of_timm`, :func:`_of_builder`, :func:`input_size` and :func:`_check_shapes`.
    """
    metadata = student_metadata_in(path)
    if metadata.builder is not None:
        make = _of_builder(path, metadata, builder)
    else:
        make = _of_timm(path, metadata)
    size = input_size(metadata, path)
    preprocess = Preprocess(size, metadata.mean, metadata.std)
    if builder is None:
        _check_shapes(path, make)
    return make, preprocess, metadata.classes


def input_size(metadata: StudentMetadata, path: Path) -> int | list[int]:
    """The side, or height and width, of the model's input in pixels.

    Raises:
        UserError: the file at ``path`` does not say it, as its model prepares its pictures itself.
    """
    if metadata.img_size is None:
        raise UserError(f"{path}: its metadata lacks img_size, the side of its model's input")
    return metadata.img_size


def builder_in(path: Path) -> str:
    """Class path of the builder that made the student in a file; "" where timm has built it."""
    return (student_metadata_in(path).builder or {}).get("class_path", "")


def _of_timm(path: Path, metadata: StudentMetadata) -> Callable[[], nn.Module]:
    """A function that makes a model of timm's, also below :class:`DenseModel`, by the metadata of the file at ``path``.

    Raises:
        UserError: timm has no such model, the size of its input is not known, or arguments do not fit the file's tensors.
    """
    if metadata.img_size is None or not timm.is_model(metadata.arch):
        raise UserError(
            f"{path}: holds the weights of a {metadata.arch}, which kd can't build: load them into your own "
            "with safetensors.torch.load_file"
        )
    arch = metadata.arch
    kwargs = dict(metadata.kwargs)
    classes = kwargs.pop("num_classes")
    check_arguments(kwargs, f"{path}: ", shapes_in(path))
    if metadata.has_own_form:
        return lambda: DenseModel(timm.create_model(arch, num_classes=0, **kwargs), classes)
    return lambda: timm.create_model(arch, num_classes=classes, **kwargs)


def _of_builder(
    path: Path, metadata: StudentMetadata, builder: type | None
) -> Callable[[], nn.Module]:
    """What makes a model of a builder, by the class that is handed over.

    Args:
        path: the file, for messages.
        metadata: of the file.
        builder: the user's class; None is refused: the class that the file names is never imported here.

    Raises:
        UserError: no class is handed over, or nothing can build the model again.
    """
    if not metadata.builder:
        raise UserError(
            f"{path}: its builder's arguments fit no file, so nothing can build it again"
        )
    name = metadata.builder["class_path"]
    arguments = metadata.builder["init_args"]
    if builder is None:
        raise UserError(
            f"{path}: its model is built by {name}: kd.load_student(FILE, builder=CLASS) takes the "
            f"class; commands, if you trust it, trust={name.rpartition('.')[0]}"
        )
    make: Any = builder
    size = height_width(input_size(metadata, path))
    count = metadata.num_classes
    mean, std = metadata.mean, metadata.std
    return lambda: build_own(make(**arguments), count, size, mean, std, str(path))


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file's tensors by name, without reading them."""
    with safe_open(regular(path, LARGEST_STUDENT), framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _check_shapes(path: Path, make: Callable[[], nn.Module]) -> None:
    """Checks, before a model is built in memory, that a file's weights fit it: it may be larger than any machine.

    Args:
        path: the file.
        make: makes the model; called once, on the meta device.

    Raises:
        UserError: names or shapes of the weights differ.
    """
    with without_values():
        state = make().state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if shapes != shapes_in(path):
        raise UserError(f"{path}: its weights don't fit the model that it describes")
