"""Small data and models that the tests share."""

import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.io import decode_image
from torchvision.transforms import v2

from kd.errors import UserError
from kd.storage.weights_files import read_metadata
from tests._files import write_yaml

ROOT = Path(__file__).parent.parent
TINY = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
ARCH = "vit_tiny_patch16_224"
CLASSES = ("apple", "bread", "cake", "dates")
WITHOUT_TEACHER = [
    "model.teacher=null", "model.student.inherit=false", "model.task_loss_weight=1", "model.distill_losses={}",
    "model.taps={}",
]  # fmt: skip
"""Words by which a recipe trains its student from random weights by labels alone."""
Command = Callable[[str, Sequence[str]], str]
"""Runs a command by its name and its words and gives what it says: the fixtures ``refusal``, which must end with status
2, and ``prints``, with status 0."""
ACCELERATOR = os.environ.get("KD_TEST_ACCELERATOR", "cpu")
"""Where runs of the tests train: ``KD_TEST_ACCELERATOR=cuda pytest`` has them on a GPU."""


@contextmanager
def refuses(match: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A mistake of the user's is told, in one line that holds ``match``."""
    with pytest.raises(UserError, match=match) as error:
        yield error
    assert "\n" not in str(error.value)


def draw_folder(
    root: Path, train: int = 12, val: int = 4, classes: tuple[str, ...] = CLASSES, size: int = 40
) -> Path:
    """An ImageFolder whose classes differ in colour; noise makes each picture its own."""
    rng = np.random.RandomState(0)
    for split, count in (("train", train), ("val", val)):
        for c, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                colour = np.array([60 * c, 255 - 60 * c, 128])
                pixels = np.clip(colour + rng.normal(0, 40, (size, size + 4, 3)), 0, 255).astype(
                    np.uint8
                )
                Image.fromarray(pixels).save(folder / f"{i:02d}.jpg", quality=90)
    return root


def draw_picture(path: Path, size: tuple[int, int] = (8, 6), color: str = "red") -> Path:
    """A picture of one colour, its folders with it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def tiny_vit(num_classes: int = len(CLASSES), seed: int = 0, **kwargs: object) -> torch.nn.Module:
    """A ViT of a few thousand parameters at 32 px."""
    torch.manual_seed(seed)
    return timm.create_model(ARCH, num_classes=num_classes, **{"img_size": 32, **TINY, **kwargs})


def save_teacher(path: Path, num_classes: int = len(CLASSES), **kwargs: object) -> Path:
    """A checkpoint of a tiny ViT."""
    save_file(tiny_vit(num_classes, **kwargs).state_dict(), path)
    return path


def write_recipe(path: Path, data: Path, teacher: Path | None, **changes: object) -> Path:
    """A complete recipe for the tiny pair; ``changes`` are dotted keys with ``__`` for the dot."""
    config: dict = {
        "recipe": "tiny",
        "preflight": "warn",
        "data": {
            "source": {"class_path": "kd.data.sources.ImageFolder", "init_args": {"root": str(data)}},
            "img_size": 32, "batch_size": 8, "num_workers": 0,
        },
        "model": {
            "teacher": {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(teacher)} if teacher else None,
            "student": {"arch": ARCH, "img_size": 32, "kwargs": {**TINY, "depth": 1}},
            "task_loss_weight": 0.5,
            "distill_losses": {"kd": {"class_path": "kd.losses.KDLoss", "init_args": {"temperature": 2.0}}}
            if teacher else {},
        },
        "optim": {"lr": 0.001, "warmup_epochs": 0},
        "trainer": {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": ACCELERATOR},
        "runs_dir": str(path.parent / "runs"),
    }  # fmt: skip
    for key, value in changes.items():
        node, *rest = key.split("__")
        place = config
        for part in rest:
            place = place[node]
            node = part
        place[node] = value
    write_yaml(path, config)
    return path


def tiny_recipe(folder: Path, **changes: object) -> Path:
    """Pictures, a teacher and the recipe of the tiny pair, in a folder."""
    teacher = save_teacher(folder / "teacher.safetensors", seed=1)
    return write_recipe(folder / "tiny.yaml", draw_folder(folder / "pictures"), teacher, **changes)


def run_cli(
    *items: str, program: str = "train", env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """``kd-train`` or ``kd-eval`` in a process of its own, one thread."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; from kd.cli import {program}_main; sys.exit({program}_main())", *items]
        if program != "train"
        else [sys.executable, "-m", "kd.cli", *items],
        cwd=ROOT, text=True, capture_output=True, timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )  # fmt: skip


def plain_answers(
    model: torch.nn.Module, folder: Path, size: int, mean: Sequence[float], std: Sequence[float]
) -> list[tuple[int, int]]:
    """Class id and answer of each picture of ``folder/<class>``, by torchvision and the model alone.

    Of a picture's short side 7 / 8 are seen, scaled to ``size``.
    """
    steps = v2.Compose([
        v2.Resize(math.floor(size / 0.875), antialias=True), v2.CenterCrop(size),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std),
    ])  # fmt: skip
    found = []
    for label, name in enumerate(sorted(path.name for path in folder.iterdir())):
        for file in sorted((folder / name).iterdir()):
            with torch.inference_mode():
                answer = model.eval()(steps(decode_image(str(file)))[None]).argmax()
            found.append((label, int(answer)))
    return found


class StopwatchHere:
    """Times a model in this process, where torch is imported already; what it loads must be picklable all the same."""

    def __init__(self, load: Callable[[], Callable[[np.ndarray], object]], threads: int) -> None:
        self.call = pickle.loads(pickle.dumps(load))()

    def measure(self, pictures: np.ndarray, repeats: int) -> tuple[list[float], float]:
        took = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.call(pictures)
            took.append(1000 * (time.perf_counter() - start))
        return took, 100.0

    def close(self) -> None:
        pass


class LossTester:
    """What every loss must stand: one instance a loss, one method a property.

    Args:
        function: ``(student, teacher, target) -> scalar``.
        reference: the same in NumPy, float64, written from the definition.
        make: ``(rng, n, scale) -> (student, teacher, target)`` in float64.
        zero_at_teacher: the loss is 0 where both inputs are equal.
        per_sample: the loss is a mean over samples, so that halves of a batch average to the whole.
        differentiated: all of the value's dependence on the student has a gradient (else a test of its own).
    """

    def __init__(
        self,
        function,
        reference,
        make,
        zero_at_teacher=True,
        per_sample=True,
        differentiated=True,
    ) -> None:
        self.function, self.reference, self.make = function, reference, make
        self.zero_at_teacher, self.per_sample, self.differentiated = (
            zero_at_teacher,
            per_sample,
            differentiated,
        )

    def inputs(
        self, n: int = 6, scale: float = 2.0, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Float64 inputs of a batch of ``n``."""
        return self.make(np.random.RandomState(seed), n, scale)

    def check_reference(self) -> None:
        """Equals the independent formula."""
        for seed in range(3):
            student, teacher, target = self.inputs(seed=seed)
            ours = self.function(student, teacher, target).item()
            theirs = self.reference(student.numpy(), teacher.numpy(), target.numpy())
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-10)

    def check_gradient(self) -> None:
        """Passes gradcheck in the student; the teacher's side is detached."""
        student, teacher, target = self.inputs(n=4, scale=1.0)
        student.requires_grad_()
        if self.differentiated:
            assert torch.autograd.gradcheck(
                lambda s: self.function(s, teacher, target), (student,), atol=1e-4
            )
        theirs = teacher.clone().requires_grad_()
        self.function(student, theirs, target).backward()
        assert theirs.grad is None

    def check_zero(self) -> None:
        """Is 0 where student and teacher agree, and more elsewhere; or is not a divergence."""
        student, teacher, target = self.inputs()
        at_teacher = self.function(teacher.clone(), teacher, target).item()
        if self.zero_at_teacher:
            assert abs(at_teacher) < 1e-8
        assert self.function(student, teacher, target).item() > at_teacher

    def check_low_precision(self) -> None:
        """In bf16 autocast on bf16 inputs: float32 out, near the float64 value."""
        student, teacher, target = (
            x.bfloat16() if x.is_floating_point() and x.ndim else x for x in self.inputs()
        )
        with torch.autocast("cpu", torch.bfloat16):
            value = self.function(student, teacher, target)
        assert value.dtype == torch.float32
        exact = self.function(student.double(), teacher.double(), target).item()
        assert abs(value.item() - exact) <= 2e-2 * abs(exact) + 1e-4

    def check_extreme(self) -> None:
        """Inputs of +-60 give a finite value and gradient."""
        student, teacher, target = self.inputs()
        student = (60 * student.sign()).float().requires_grad_()
        value = self.function(student, (-60 * teacher.sign()).float(), target)
        value.backward()
        assert torch.isfinite(value), value
        assert torch.isfinite(student.grad).all()

    def check_batch_of_one(self) -> None:
        """A batch of one is finite, with a finite gradient."""
        student, teacher, target = self.inputs(n=1)
        student.requires_grad_()
        value = self.function(student, teacher, target)
        value.backward()
        assert torch.isfinite(value), value
        assert torch.isfinite(student.grad).all()

    def check_halves(self) -> None:
        """Two processes with half the batch each average to one with the whole (or the loss relates samples)."""
        student, teacher, target = self.inputs(n=8)
        whole = self.function(student, teacher, target).item()
        halves = [
            self.function(student[i : i + 4], teacher[i : i + 4], target[i : i + 4]).item()
            for i in (0, 4)
        ]
        assert (abs(whole - sum(halves) / 2) < 1e-9 * abs(whole)) == self.per_sample

    def check_traced(self) -> None:
        """Traces into one graph, with the value and the gradient of the plain call."""
        self.check_compiled("eager")

    def check_compiled(self, backend: str = "aot_eager") -> None:
        """The backward pass is traced too."""
        torch.compiler.reset()
        compiled = torch.compile(self.function, backend=backend, fullgraph=True)
        results = []
        for function in (self.function, compiled):
            student, teacher, target = self.inputs()
            student.requires_grad_()
            value = function(student, teacher, target)
            value.backward()
            results.append((value.detach(), student.grad))
        torch.testing.assert_close(results[0], results[1])


def other_weights(run: Path) -> None:
    """As training that goes on leaves a run: its student has other weights."""
    file = run / "student.safetensors"
    metadata = read_metadata(file)
    save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata)


def error_in_a_thread(call: Callable[[], object]) -> Exception | None:
    """What a call raises in a thread that is not the main one, where Python lets no signal handler be set."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(call).exception()
    assert error is None or isinstance(error, Exception)
    return error


def place_of_examples(folder: Path) -> None:
    """Makes the files that the golden tables name: ``r.yaml``, its ``photos``, ``teacher.safetensors``, another, a run
    ``runs/tiny/000``, ``list.csv``, ``notes.txt``.
    """
    from kd.cli import main

    photos, weights = draw_folder(folder / "photos"), save_teacher(folder / "teacher.safetensors")
    recipe = write_recipe(folder / "r.yaml", photos, weights, data__img_size=40)
    save_teacher(folder / "other.safetensors", seed=7)
    (folder / "list.csv").write_text("path,label\napple/00.jpg,apple\n")
    (folder / "notes.txt").write_text("my notes\n")
    assert main("train", [f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    assert main("export", [str(folder / "runs/tiny/000"), "to=onnx"]) == 0
