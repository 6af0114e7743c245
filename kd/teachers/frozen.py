"""A frozen model as a teacher."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from kd.clock import annotate
from kd.data.batch import Batch
from kd.errors import UserError
from kd.models import Images, Prepare, TeacherSpec, trial
from kd.models.compiled import compile_in_place
from kd.models.own import logits_of
from kd.models.sharding import forget_forward, shard
from kd.models.taps import TRIAL, Taps, single_classifier
from kd.processes import whole
from kd.teachers.answer import ALL, Answer, Wanted
from kd.teachers.base import RunTeacher


class FrozenTeacher(RunTeacher):
    """A frozen model that answers for pictures: always in eval mode, never with a gradient.

    Args:
        model: or a function of pictures, whose layers can't be read.
        prepare: uint8 pictures -> the model's input.
        spec: the settings; None: the defaults.
        columns: where the data's classes are among the model's, ``(C,)``; None: they are the same, in the same order.
        key: the teacher's configuration key, named in errors.
        classes: how many the model itself has; None: not known.
    """

    is_shared_out = False
    """Whether its weights are sharded: then all processes must run it together."""

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Any],
        prepare: Prepare,
        spec: TeacherSpec | None = None,
        columns: Tensor | None = None,
        key: str = "model.teacher",
        classes: int | None = None,
    ) -> None:
        """Freezes the model (no gradient, eval mode); the arguments are the class's. :meth:`to` moves it."""
        self.model: nn.Module = model if isinstance(model, nn.Module) else _Called(model)
        self.prepare = prepare
        self.columns = columns
        self.key = key
        self.classes = classes
        self.spec = spec or TeacherSpec(arch=type(model).__name__)
        self.arch = self.spec.arch
        self.model.requires_grad_(False).eval()
        self.taps = Taps(self.model, [], prepare, self._trial)
        self._identity: dict[str, Any] = {}
        if isinstance(self.model, _Called):
            self.closed = "is a function, whose layers are unknown"
        self._classifier: tuple[Tensor, Tensor] | None = None
        self._original: nn.Module | None = None
        self._placed = False
        for weights in self.model.parameters():
            if weights.is_floating_point():
                self.device = weights.device
                self.dtype = weights.dtype
                break

    def to(
        self, device: torch.device, dtype: torch.dtype = torch.float32, keep: bool = False
    ) -> "FrozenTeacher":
        """Puts the weights where ``placement`` says, seen from the student's ``device``; a later call moves them again.

        They are stored in ``dtype``, as autocast would cast frozen weights each step; in float32 where the answers are
        numbers in units, for which half precision has too few digits. With ``keep`` the first call of all keeps a copy as
        loaded for :meth:`original`. The first call also compiles the model, where ``compile`` is set.
        A teacher in shards stays where it is. With ``placement=shard`` each process must call it.

        Raises:
            UserError: no such device, or no other process to share the weights with.
        """
        if self.spec.placement not in ("same", "shard"):
            device = torch.device(self.spec.placement)
        if self.gives_numbers:
            dtype = torch.float32
        if self._placed and (self.is_shared_out or (device, dtype) == (self.device, self.dtype)):
            return self
        self.identity()  # of the weights as loaded
        if keep and not self._placed:
            own = self.in_the_datas_classes()
            if own is self.model:
                self._original = copy.deepcopy(own)
            else:  # a copy already
                self._original = own
        # the classifier as loaded, before its weights are cast
        has_classifier = single_classifier(self.model) is not None
        if self._classifier is None and dtype != torch.float32 and has_classifier:
            self._classifier = tuple(x.clone() for x in self.classifier())  # type: ignore[assignment]
        self.device = device
        self.dtype = dtype
        if self.spec.placement == "shard":
            self._share_out()
        else:
            self._move()
        if self.columns is not None:
            self.columns = self.columns.to(self.device)
        if not self._placed:
            compile_in_place(self.model, self.spec.compile)
        self._placed = True
        return self

    def _move(self) -> None:
        """Moves the model to its device and precision.

        A device of ``placement`` that can't be used is a user's error; too little memory, or with ``placement=same`` any
        error, is raised as torch raises it.
        """
        try:
            self.model.to(device=self.device, dtype=self.dtype)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            if self.spec.placement == "same" or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{self.key}.placement: '{self.spec.placement}' can't be used: {reason}"
            ) from error

    def _share_out(self) -> None:
        """Shards the model's weights over all processes with FSDP2, once; a UserError without ``torch.distributed``."""
        if self.is_shared_out:
            return
        if not dist.is_initialized():
            raise UserError(
                f"{self.key}.placement: shard needs several processes, for example config=ddp_2cpu"
            )
        self.model.to(dtype=self.dtype)
        shard(self.model, init_device_mesh(self.device.type, (dist.get_world_size(),)), frozen=True)
        self.is_shared_out = True

    def answer(self, batch: Batch, wanted: Wanted, name: str = ALL) -> Answer:
        """The logits, wanted or not, and the features of the wanted layers, under ``name``; one forward.

        A model without a classifier gives no logits, and does not run where no layer is wanted. Features are float32, on the
        device of the pictures.
        """
        images = batch["image"]
        layers = [layer for layer in wanted.features if layer[0] == name]
        answer = Answer()
        if not layers:
            if self.spec.head:  # else it gives nothing
                answer.logits[name] = self(images)
            return answer
        with self.taps as caught:
            logits = self(images)
        if self.spec.head:
            answer.logits[name] = logits
        # CUDA graphs write the next answers into the same memory.
        copy_each = self.model._compiled_call_impl is not None
        for layer in layers:
            _, path, tokens = layer
            (feature,) = self.taps.read(caught, path, tokens)
            answer.features[layer] = feature.to(images.device, torch.float32, copy=copy_each)
        return answer

    def _trial(self) -> object:
        """A forward of two black pictures without autocast, by which taps find layers and their shapes."""

        def run(images: Tensor) -> object:
            return self.model(images.to(self.device, self.dtype))

        with torch.autocast(self.device.type, enabled=False):
            return trial(run, self.prepare, TRIAL)

    @annotate("teacher")
    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        """Pictures -> float32 logits ``(N, C)`` (dense: ``(N, C, h, w)``) in the data's classes, on the pictures' device;
        without a classifier the model's features. Probabilities are turned into logits (:meth:`as_logits`).
        """
        # Someone may have called train() on the model: dropout and BatchNorm must stay off.
        if any(module.training for module in self.model.modules()):
            self.model.eval()
        with torch.autocast(self.device.type, enabled=False):
            prepared = self.prepare(images.to(self.device))
            output = logits_of(self.model(prepared.to(self.dtype)))
        if self.is_shared_out:
            forget_forward(self.model)
        # A copy in any case: CUDA graphs (compile=reduce-overhead) write the next answers into the same memory.
        logits = output.to(torch.float32, copy=True)
        if self.gives_probabilities is not False:
            logits = self.as_logits(logits)
        if self.columns is not None:
            logits = logits.index_select(1, self.columns)
        return logits.to(images.device)

    def classifier(self) -> tuple[Tensor, Tensor]:
        """Weight ``(C, D)`` and bias ``(C,)`` of the last layer as loaded, float32, in the data's classes; 0 without a bias.

        They are on the model's device, or where the model was when :meth:`to` made it 16 bits. Of a model in shards all
        processes must call it.

        Raises:
            UserError: there is not one last layer with a weight of its own.
        """
        if self._classifier is not None:
            return self._classifier
        layer: Any = single_classifier(self.model)
        if layer is None:
            raise UserError(f"{self.key}: {self.arch} has no single classifier")
        weight = whole(layer.weight).float()
        bias = weight.new_zeros(len(weight))
        if getattr(layer, "bias", None) is not None:
            bias = whole(layer.bias).float()
        if self.columns is None:
            return weight, bias
        return weight[self.columns], bias[self.columns]

    def original(self) -> nn.Module:
        """The model with the data's classes and its weights as loaded: the copy that :meth:`to` has kept.

        Where no copy was kept, :meth:`in_the_datas_classes`: its weights are as loaded only before the first :meth:`to`.
        Students that inherit start from the result.
        """
        if self._original is not None:
            return self._original
        return self.in_the_datas_classes()

    def forget_original(self) -> None:
        """Frees the copy of the weights that :meth:`to` has kept."""
        self._original = None

    def in_the_datas_classes(self) -> nn.Module:
        """The model itself; where :attr:`columns` is set, a copy whose classifier has the data's classes in their order.

        Raises:
            UserError: as of :meth:`classifier`.
        """
        if self.columns is None:
            return self.model
        weight, bias = self.classifier()
        model: Any = copy.deepcopy(self.model)
        layer: Any = single_classifier(model)
        layer.weight = nn.Parameter(weight)
        layer.bias = nn.Parameter(bias)
        model.num_classes = len(weight)
        return model

    def names_of_its_columns(self, names: Sequence[str]) -> list[str] | None:
        """The data's class names in the order of the model's own columns.

        None where the model has more classes than the data, or, in another order than the data's, an unknown number.
        """
        if self.columns is None:
            return list(names)
        name_by_column = dict(zip(self.columns.tolist(), names, strict=True))
        if len(name_by_column) != self.classes:
            return None
        return [name_by_column[column] for column in sorted(name_by_column)]

    def identity(self) -> dict[str, Any]:
        """Architecture and a hash of the weights as loaded, stored in checkpoints instead of the weights.

        It is computed once: :meth:`to` calls it before it casts them.
        """
        if self._identity:
            return self._identity
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        self._identity = {"arch": self.arch, "weights": digest.hexdigest()[:16]}
        return self._identity

    def fingerprint(self) -> dict[str, Any]:
        """Identity, arguments, input (sizes in pixels) and precision: what a cached answer to a given picture depends
        on.

        ``prepare`` must be a :class:`kd.models.Preprocess`. A value that changes makes caches unreadable.
        """
        prepare: Any = self.prepare
        return {
            **self.identity(),
            "kwargs": self.spec.kwargs,
            "img_size": list(prepare.size),
            "mean": list(prepare.mean),
            "std": list(prepare.std),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def dtype_for(precision: str) -> torch.dtype:
    """The type of a teacher's weights beside a student that trains at Lightning's ``precision``.

    ``bf16-mixed``: bfloat16; ``16-mixed``: float16, as autocast would cast them in each step. Any other: float32.
    """
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)


class _Called(nn.Module):
    """A function as a module without parameters, so that a teacher has one kind of model."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.forward = function
