"""How many operations a step gives to a GPU, by phase: counted without one (:mod:`tests._fake_gpu`), never timed.

Each is a launch or more, 5 to 10 us of the host: a step of a small student waits for them. The recipe is ``grocery_vit``,
its models and its batch as they are, and a teacher that answers live. A change that launches less lowers the numbers here.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils as foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kd
from kd import muon
from kd.data.engines import device
from kd.data.transforms import MixPairs, train_transform
from kd.distill import casts
from kd.losses import KDLoss, MSELoss
from kd.models import Preprocess
from kd.optim import Pace
from kd.settings import Augment, TapSpec
from tests._fake_gpu import CUDA, Waits, backward, gpu

BATCH, SIDE, CLASSES = 64, 112, 81
FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "slice", "select", "detach", "alias", "split", "split_with_sizes", "unbind", "as_strided",
    "_reshape_alias", "unfold", "reshape", "lift_fresh", "empty", "empty_like", "new_empty",
    "chunk", "diagonal", "new_empty_strided", "empty_strided", "narrow", "set_", "resize_",
    "device", "is_pinned", "_local_scalar_dense", "sym_size", "is_same_size",
}  # fmt: skip
"""Operations that only change a shape, or make room: nothing is launched."""
CHECKED_BY_TYPE = (casts, muon, foreach_utils, torch_optimizer)
"""Modules that take many tensors at once where these are plain ones, by their types."""


def plain_type(value: object) -> type:
    """The type of a value, where a tensor that is not there counts as one that is."""
    if isinstance(value, FakeTensor):
        return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
    return type(value)


def attention(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    """What torch calls on a GPU for half precision, in one operation."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


@contextmanager
def as_on_a_gpu() -> Iterator[Waits]:
    """Inside there is a GPU, and what torch and kd do there for many tensors at once is done."""
    with gpu() as waits, ExitStack() as patches:
        for module in CHECKED_BY_TYPE:
            patches.enter_context(mock.patch.object(module, "type", plain_type, create=True))
        name = "torch.nn.functional.scaled_dot_product_attention"
        patches.enter_context(mock.patch(name, attention))
        cache = SimpleNamespace(
            L2_cache_size=50 * 2**20
        )  # timm's optimizers work in parts as large
        patches.enter_context(mock.patch("torch.cuda.get_device_properties", lambda *_: cache))
        yield waits


class Launches(TorchDispatchMode):
    """Counts what is given to the device, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "rest"
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        if name not in FREE and any(x.device.type == "cuda" for x in tensors):
            self.counts[self.phase][name] += 1
        return made

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """What is given inside belongs to this phase."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def watch(self, module: kd.DistillationModule) -> None:
        """What the models are given belongs to phases of their own."""
        assert module.teacher is not None
        forward, together = module.teacher.model.forward, module.student.casts

        def teacher(*args: Any, **kwargs: Any) -> Any:
            with self.within("teacher"):
                return forward(*args, **kwargs)

        @contextmanager
        def student(images: Tensor) -> Iterator[None]:
            with self.within("student"), together(images):
                yield

        module.teacher.model.forward = teacher
        module.student.casts = student  # type: ignore[assignment]


def grocery_vit() -> kd.DistillationModule:
    """The models and losses of the recipe."""
    student = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIDE, patch_size=14, num_classes=CLASSES
    )
    teacher = timm.create_model("vit_small_patch14_dinov2", img_size=SIDE, num_classes=CLASSES)
    prepare = Preprocess(SIDE, (0.5,) * 3, (0.5,) * 3)
    losses: dict[str, Callable[[], Any]] = {
        "kd": lambda: KDLoss(temperature=2.0, weight=0.9),
        "summary": lambda: MSELoss(standardize="variance"),
        "patches": lambda: MSELoss(standardize="variance"),
        "middle": lambda: MSELoss(standardize="variance", weight=60.0),
    }
    middle = ["maps@1/3", "maps@2/3"]
    return kd.DistillationModule(
        student,
        teacher,
        losses={name: make() for name, make in losses.items()},
        taps={
            "summary": TapSpec("prelogits", "prelogits"),
            "patches": TapSpec("maps", "maps"),
            "middle": TapSpec(middle, middle),
        },
        task=kd.Classification(CLASSES),
        task_loss_weight=0.0,
        prepare=prepare,
        teacher_prepare=prepare,
        data=kd.DataInfo([str(i) for i in range(CLASSES)], train=2640, soft_targets=True),
        optim={"name": "muon", "lr": 5e-4},
    )


def views_of(waits: Waits, launches: Launches) -> dict[str, Any]:
    """A batch of the recipe's augmentations, made on the device."""
    random.seed(0)
    torch.manual_seed(0)
    augment = Augment(scale=0.35, color_jitter=0.2, mixup=0.8, cutmix=1.0, mix_probability=1.0)
    chain = list(train_transform((SIDE, SIDE), augment).transforms)
    recipes = [device.draw(chain, 240, 320, (SIDE, SIDE)) for _ in range(BATCH)]
    mix = MixPairs(augment, CLASSES, 0)
    views = device.DeviceViews((SIDE, SIDE), augment, mix)
    plan = device.Plan(recipes, mix.draw([(i, 0) for i in range(BATCH)], (SIDE, SIDE)))
    ids = torch.zeros(BATCH, dtype=torch.long)
    plan.labels = mix.labels(ids, plan.mixes).float().numpy()
    crops = torch.zeros(BATCH, 3, SIDE, SIDE, dtype=torch.uint8, device=CUDA)
    ids = ids.to(CUDA)
    with launches.within("views"):
        return views({"image": crops, "plan": plan, "target": ids, "index": ids})


@pytest.fixture(scope="module")
def counts() -> dict[str, Counter[str]]:
    """Of the second step, by phase."""
    module = grocery_vit()
    assert module.teacher is not None
    module.teacher.identity()  # hashes the weights while they are real
    with as_on_a_gpu() as waits, Launches() as launches:
        module.to(CUDA)
        module.teacher.to(CUDA, torch.bfloat16)
        launches.watch(module)
        optimizer, _ = module.student.build_optimizer(Pace(100, 50))
        for number in range(2):
            launches.counts.clear()
            batch = views_of(waits, launches)
            with torch.autocast("cuda", torch.bfloat16), launches.within("losses"):
                out = module.training_step(batch, number)
            with launches.within("backward"):
                backward(out["loss"], waits)
            with launches.within("clip"):
                trained = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            with launches.within("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return dict(launches.counts)


MOST = {
    "views": 52,
    "student": 152,
    "teacher": 149,
    "losses": 176,
    "backward": 361,
    "clip": 8,
    "optimizer": 156,
}


@pytest.mark.parametrize(("phase", "most"), MOST.items())
def test_a_phase_launches_no_more_than_before(
    phase: str, most: int, counts: dict[str, Counter[str]]
) -> None:
    found = counts[phase]
    assert sum(found.values()) <= most, found.most_common()


def test_weights_are_rounded_once_a_step(counts: dict[str, Counter[str]]) -> None:
    """Autocast rounds each layer's weights in the forward pass, and their gradients in the backward."""
    rounds = counts["student"]["_to_copy"] + counts["backward"]["_to_copy"]
    assert rounds <= 93
    assert counts["student"]["_foreach_copy_"] == 1


def test_no_launch_is_outside_of_the_phases(counts: dict[str, Counter[str]]) -> None:
    rest = {phase: counts[phase] for phase in counts.keys() - MOST.keys() - {"rest"}}
    assert rest == {} and sum(counts["rest"].values()) <= 2
