"""The frozen teacher, or several."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from kd.clock import annotate
from kd.errors import UserError
from kd.models import Images, TeacherSpec, build_model, completed, preprocess_for, read_names
from kd.models.sharding import forget_forward, is_sharded, shard, whole
from kd.models.weights import about

ALL = ""
"""The name of the answer of all teachers together."""


class Teacher:
    """A frozen model that answers for uint8 pictures: always in eval mode, never with a gradient.

    Deliberately no ``nn.Module``: a LightningModule that holds one keeps it out of its checkpoints, its optimizer,
    DDP's broadcasts and ``train()`` without further care. It moves by :meth:`to` alone.

    Where the teacher names other classes than the data (more, or in another order), its logits are brought into the
    data's order, and what it alone knows is left out.

    Args:
        spec: architecture, weights and classes.
        num_classes: classes of the data.
        classes: their names, compared with the teacher's where it has them.
        key: the configuration key of ``spec``, named in errors.
        dense: a model for dense prediction (:mod:`kd.models.segmenter`).

    Raises:
        UserError: an unknown architecture, a checkpoint that does not fit, or classes that the teacher lacks.
    """

    def __init__(
        self,
        spec: TeacherSpec,
        num_classes: int,
        classes: Sequence[str] = (),
        key: str = "model.teacher",
        dense: bool = False,
    ) -> None:
        given, spec = spec, completed(spec, key)
        self.spec = given if given.arch == spec.arch else spec  # what is only completed keeps its key among the caches
        self.arch, self.key = spec.arch, key
        names, self.columns = _columns(spec, classes, key)
        count = len(names) if self.columns is not None else num_classes
        self.has_head, self.classes = spec.head, count
        self.model: nn.Module = build_model(
            spec, count if spec.head else 0, key, names or classes, head=spec.head, dense=dense
        )
        self.model.requires_grad_(False).eval()
        self.preprocess = preprocess_for(self.model, spec.img_size, spec.channels_last, spec.mean, spec.std)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self._identity: dict[str, Any] = {}
        self._classifier: tuple[Tensor, Tensor] | None = None
        self._original: nn.Module | None = None
        self._placed = False

    @property
    def members(self) -> "dict[str, Teacher]":
        """Itself, under the name of all."""
        return {ALL: self}

    @property
    def is_shared_out(self) -> bool:
        """Whether it answers only where all processes ask."""
        return is_sharded(self.model)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "Teacher":
        """Puts the weights where ``placement`` says, seen from the student's ``device``; later calls change nothing.

        With bfloat16 they are stored so: autocast would cast frozen weights anew each step. ``keep`` keeps a copy as
        loaded for :meth:`original`.

        Raises:
            UserError: there is no such device, or nothing to share the weights with.
        """
        if self._placed:
            return self
        self._placed = True
        self.identity()  # of the weights as loaded
        if keep:
            own = self.in_the_datas_classes()
            self._original = copy.deepcopy(own) if own is self.model else own
        if self.has_head and dtype != torch.float32 and isinstance(self.model.get_classifier(), nn.Module):  # type: ignore[operator]
            self._classifier = tuple(x.clone() for x in self.classifier())  # type: ignore[assignment]
        self.device, self.dtype = device, dtype
        if self.spec.placement == "shard":
            self._share_out()
        else:
            if self.spec.placement != "same":
                self.device = torch.device(self.spec.placement)
            self._move()
        if self.columns is not None:
            self.columns = self.columns.to(self.device)
        self.spec.compile_in_place(self.model)
        return self

    def _move(self) -> None:
        try:
            self.model.to(device=self.device, dtype=self.dtype)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            if self.spec.placement == "same" or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.key}.placement: '{self.spec.placement}' can't be used: {reason}") from error

    def _share_out(self) -> None:
        if self.is_shared_out:  # several students have it in common
            return
        if not dist.is_initialized():
            raise UserError(f"{self.key}.placement: shard needs several processes, for example config=ddp_2cpu")
        self.model.to(dtype=self.dtype)
        shard(self.model, init_device_mesh(self.device.type, (dist.get_world_size(),)), frozen=True)

    @annotate("teacher")
    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> float32 logits ``(N, C)`` (dense: ``(N, C, H', W')``), in the data's classes.

        A teacher without a head gives its features, ``(N, D)``. The answer is on the pictures' device, wherever the
        teacher is.
        """
        if any(module.training for module in self.model.modules()):  # whatever was called on it in between: its
            self.model.eval()  # dropout and BatchNorm never wake
        with torch.autocast(self.device.type, enabled=False):
            given = self.model(self.preprocess(images.to(self.device)).to(self.dtype))
        if self.is_shared_out:
            forget_forward(self.model)
        # a copy in any case: CUDA graphs (compile=reduce-overhead) write the next answers into the same memory
        logits = given.to(torch.float32, copy=True)
        return (logits if self.columns is None else logits.index_select(1, self.columns)).to(images.device)

    def answers(self, images: Images) -> dict[str, Tensor]:
        """The logits by teacher, see :class:`Ensemble`."""
        return {ALL: self(images)}

    def classifier(self) -> tuple[Tensor, Tensor]:
        """Weight ``(C, D)`` and bias ``(C,)`` of the last layer, float32, in the data's classes.

        As loaded: not rounded to what the teacher computes in, wherever it is.

        Raises:
            UserError: the model has no last layer, or two.
        """
        if self._classifier is not None:
            return self._classifier
        layer: Any = self.model.get_classifier()  # type: ignore[operator]
        if not hasattr(layer, "weight"):
            raise UserError(f"{self.key}: {self.arch} has no single classifier")
        weight = whole(layer.weight).float()
        bias = weight.new_zeros(len(weight)) if layer.bias is None else whole(layer.bias).float()
        return (weight, bias) if self.columns is None else (weight[self.columns], bias[self.columns])

    def original(self) -> nn.Module:
        """The model with the data's classes and its weights as loaded, on the CPU unless it was placed before."""
        return self.in_the_datas_classes() if self._original is None else self._original

    def forget_original(self) -> None:
        """Lets go of the copy that :meth:`to` has kept."""
        self._original = None

    def in_the_datas_classes(self) -> nn.Module:
        """The model itself, or a copy whose classifier has the data's classes where the two differ."""
        if self.columns is None:
            return self.model
        model: Any = copy.deepcopy(self.model)
        layer = model.get_classifier()
        weight, bias = self.classifier()
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        model.num_classes = len(weight)
        return model

    def names_of_its_columns(self, names: Sequence[str]) -> list[str] | None:
        """Names of the data's classes, in the order in which the model itself has them; None where it knows more."""
        if self.columns is None:
            return list(names)
        own = dict(zip(self.columns.tolist(), names, strict=True))
        return [own[i] for i in sorted(own)] if len(own) == self.classes else None

    def identity(self) -> dict[str, Any]:
        """Architecture and a hash of the weights, stored in checkpoints instead of the weights."""
        if self._identity:
            return self._identity
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        self._identity = {"arch": self.spec.arch, "weights": digest.hexdigest()[:16]}
        return self._identity


class Ensemble:
    """Several teachers: each answers with its own input size and normalisation, all together with the weighted mean.

    The mean is of the logits: ``sum(weight_i * logits_i) / sum(weight_i)``.

    Args:
        members: the teachers by name.
    """

    has_head = True
    preprocess = None

    def __init__(self, members: Mapping[str, Teacher]) -> None:
        self.members = dict(members)
        self.arch = " + ".join(teacher.arch for teacher in members.values())
        self.model = nn.ModuleList([teacher.model for teacher in members.values()])
        weights = torch.tensor([teacher.spec.weight for teacher in members.values()])
        self._shares = (weights / weights.sum()).tolist()

    @property
    def is_shared_out(self) -> bool:
        """Whether it answers only where all processes ask."""
        return any(teacher.is_shared_out for teacher in self.members.values())

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False) -> "Ensemble":
        """Moves all."""
        for teacher in self.members.values():
            teacher.to(device, dtype, keep)
        return self

    def forget_original(self) -> None:
        """All let go of their copies."""
        for teacher in self.members.values():
            teacher.forget_original()

    def answers(self, images: Images) -> dict[str, Tensor]:
        """uint8 ``(N, 3, H, W)`` -> the logits of each teacher by name, and of all together as ``ALL``.

        Dense answers are brought to the size of the first teacher's.
        """
        own = {name: teacher(images) for name, teacher in self.members.items()}
        return {ALL: self._mean(list(own.values())), **own}

    def _mean(self, logits: list[Tensor]) -> Tensor:
        size = logits[0].shape[2:]
        if any(x.shape[2:] != size for x in logits):
            logits = [nn.functional.interpolate(x, size, mode="bilinear") for x in logits]
        parts = [share * x for share, x in zip(self._shares, logits, strict=True)]
        return sum(parts[1:], parts[0])

    def __call__(self, images: Images) -> Tensor:
        """The weighted mean of the logits."""
        return self.answers(images)[ALL]

    def identity(self) -> dict[str, Any]:
        """Each teacher's."""
        return {name: teacher.identity() for name, teacher in self.members.items()}


def dtype_for(precision: str) -> torch.dtype:
    """What a teacher's weights are kept in beside a student that trains at Lightning's ``precision``."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)


def build_teachers(
    one: TeacherSpec | None, several: Mapping[str, TeacherSpec], classes: Sequence[str], dense: bool
) -> Teacher | Ensemble | None:
    """The teacher of ``model.teacher``, the ensemble of ``model.teachers``, or none.

    Raises:
        UserError: both are given, or a teacher that can't be built.
    """
    if one and several:
        raise UserError("model.teachers: give model.teacher or model.teachers, not both (model.teacher=null)")
    if not several:
        return _shared(one, classes, "model.teacher", dense) if one else None
    headless = [name for name, spec in several.items() if not spec.head]
    if headless:
        raise UserError(f"model.teachers.{headless[0]}.head: an ensemble's teachers all need a classifier")
    return Ensemble({name: _shared(s, classes, f"model.teachers.{name}", dense) for name, s in several.items()})


_pool: dict[str, Teacher] | None = None


@contextmanager
def shared_teachers() -> Iterator[None]:
    """Inside, teachers of equal settings are one object: several students of one run learn from it."""
    global _pool
    _pool = {}
    try:
        yield
    finally:
        _pool = None


def _shared(spec: TeacherSpec, classes: Sequence[str], key: str, dense: bool) -> Teacher:
    if _pool is None:
        return Teacher(spec, len(classes), classes, key, dense)
    name = repr((spec, list(classes), dense))
    if name not in _pool:
        _pool[name] = Teacher(spec, len(classes), classes, key, dense)
    return _pool[name]


def _columns(spec: TeacherSpec, classes: Sequence[str], key: str) -> tuple[list[str], Tensor | None]:
    """The teacher's class names, and where the data's classes are among them; None where they are the same."""
    names = _names(spec, classes, key)
    if not names or not classes or not spec.head:
        return names, None
    wanted = [spec.class_map.get(name, name) for name in classes]
    unknown = [name for name in spec.class_map if name not in classes]
    if unknown:
        raise UserError(f"{key}.class_map: '{unknown[0]}' is no class of the data")
    if names == wanted:
        return names, None
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{key}.classes: '{twice}' stands {names.count(twice)} times among the teacher's {len(names)} "
                        "names, so that it is open which of its answers is meant")  # fmt: skip
    places = {name: i for i, name in enumerate(names)}
    missing = [(own, name) for own, name in zip(classes, wanted, strict=True) if name not in places]
    if missing:
        own, name = missing[0]
        raise UserError(
            f"{key}.class_map: the teacher has no class '{name}'{f' (for {own})' if own != name else ''} among its "
            f"{len(names)}, {len(missing)} of the data's {len(classes)} are missing; name them: "
            f"{key}.class_map.{own}=NAME"
        )
    return names, torch.tensor([places[name] for name in wanted])


def _names(spec: TeacherSpec, classes: Sequence[str], key: str) -> list[str]:
    """From the settings, the checkpoint, or timm's list of ImageNet's classes."""
    if isinstance(spec.classes, str):
        return read_names(Path(spec.classes), f"{key}.classes")
    if spec.classes:
        return list(spec.classes)
    if spec.checkpoint:
        return about(spec.checkpoint).classes
    if spec.builder is not None:
        return list(getattr(spec.builder, "class_names", []))
    return _imagenet_names(spec, classes)


def _imagenet_names(spec: TeacherSpec, classes: Sequence[str]) -> list[str]:
    """timm's names (n01440764 ...) of a pre-trained model's classes, where they cover the data's."""
    config = timm.get_pretrained_cfg(spec.arch) if spec.pretrained else None
    subset = infer_imagenet_subset({"num_classes": config.num_classes}) if config else None
    if subset is None or config is None or config.num_classes == len(classes):
        return []
    names = list(ImageNetInfo(subset).label_names())
    return names if {spec.class_map.get(name, name) for name in classes} <= set(names) else []
