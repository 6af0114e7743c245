"""A first hour on a GPU, in parts: each a process with a limit of its own, each result a line on the disk at once.

    python scripts/bench/gpu.py --out DIR                              # all parts, some 10 minutes
    python scripts/bench/gpu.py --out DIR --only step compile          # a command of at most 8 minutes
    python scripts/bench/gpu.py --out DIR --small                      # all parts on a CPU, to try them

``DIR/results.jsonl`` gets the lines. A part that fails, hangs or runs out of memory costs itself alone. Whole trainings on
pictures are for ``peer_timm.py race``, a run's phases and kernels for ``kd-report`` (``monitor.kernels_at``), whether each
setting works on a GPU for ``KD_TEST_ACCELERATOR=cuda pytest``. An offline machine that has torch, timm and Lightning lacks
omegaconf, pydantic, pydantic_core, annotated-types, typing-inspection and pycocotools: ``pip download --no-deps --platform
manylinux_2_17_x86_64 --python-version 3.12 -d DIR NAME==VERSION``, unzipped.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import measure, options, synchronize

PEAK = 790e12  # dense bf16 of an H200 in practice (not measured here); the datasheet says 989
CLASSES = 1000


@dataclass
class Part:
    """Where a part says what it found."""

    name: str
    out: Path
    small: bool

    def say(self, **values: Any) -> None:
        """A line, on the disk before anything else happens."""
        line = json.dumps({"part": self.name, **values}, default=str)
        print(line, flush=True)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(line + "\n")

    def tried(self, call: Callable[[], dict[str, Any]], **values: Any) -> None:
        """The line of a measurement, or why there is none."""
        try:
            self.say(**values, **call())
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            self.say(**values, error=f"{type(error).__name__}: {text}")


def device_of() -> Any:
    """The GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- the pair, without an input ----------------------------------------------------------------------------------------
class Pair:
    """Teacher and student on the device; a step of ours, and one that is written by hand without any of our code."""

    def __init__(self, small: bool, mode: str | None = None) -> None:
        import timm
        import torch

        import kd
        from kd.models import preprocess_for
        from kd.optim import OptimSpec, build_optimizer

        self.device, self.side = device_of(), 32 if small else 224
        names = ("vit_large_patch16_224", "vit_small_patch16_224")
        more: dict[str, Any] = {"num_classes": CLASSES}
        if small:
            names = ("vit_tiny_patch16_224",) * 2
            more |= {"depth": 2, "img_size": 32, "patch_size": 8}
        teacher, *self.students = (
            timm.create_model(name, **more).to(self.device) for name in (*names, names[1])
        )
        self.flops = flops_of(teacher, self.students[0], self.side)
        self.teacher = teacher.eval().requires_grad_(False).to(torch.bfloat16)
        if mode:
            for model in (self.teacher, self.students[0]):
                model.compile(mode=mode, dynamic=False)
        prepare = preprocess_for(self.students[0], self.side)
        self.step = kd.Distillation(
            self.students[0],
            lambda x: self.teacher(x.to(torch.bfloat16)),
            prepare=prepare,
            teacher_prepare=prepare,
            losses={"kd": kd.KDLoss(2.0)},
            task=kd.Classification(CLASSES),
        )
        self.optimizers = [
            build_optimizer([self.students[0]], OptimSpec(lr=1e-4)),
            torch.optim.AdamW(self.students[1].parameters(), 1e-4, fused=True),
        ]
        constants = (prepare.mean, prepare.std)
        mean, std = (torch.tensor(x, device=self.device).view(1, 3, 1, 1) for x in constants)
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def arms(self, count: int) -> dict[str, Callable[[], object]]:
        """Calls on one batch of ``count`` pictures."""
        import torch
        import torch.nn.functional as F

        from kd.data.batch import Batch
        from kd.teachers import Answer

        shape = (count, 3, self.side, self.side)
        images = torch.randint(256, shape, dtype=torch.uint8, device=self.device)
        target = torch.randint(CLASSES, (count,), device=self.device)
        answers = torch.randn(count, CLASSES, device=self.device)
        batch: Batch = {"image": images, "target": target}
        cached = Answer({"": answers})

        def plain() -> Any:
            return torch.addcmul(self.shift, images.float(), self.scale)

        @torch.no_grad()
        def teacher() -> Any:
            return self.teacher(plain().to(torch.bfloat16)).float()

        def learn(which: int, loss: Any) -> None:
            with torch.autocast(self.device.type, torch.bfloat16):
                total = loss()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.students[which].parameters(), 1.0)
            self.optimizers[which].step()
            self.optimizers[which].zero_grad()

        def by_hand(theirs: Any) -> Any:
            logits = self.students[1](plain()).float()
            log_s, log_t = F.log_softmax(logits / 2, 1), F.log_softmax(theirs / 2, 1)
            kl = F.kl_div(log_s, log_t, reduction="batchmean", log_target=True)
            return F.cross_entropy(logits, target) + 4 * kl

        return {
            "teacher": teacher,
            "cached": lambda: learn(0, lambda: self.step.learn(batch, cached).total),
            "cached, by hand": lambda: learn(1, lambda: by_hand(answers)),
            "live": lambda: learn(0, lambda: self.step(images, target).total),
            "live, by hand": lambda: learn(1, lambda: by_hand(teacher().clone())),
        }


def flops_of(teacher: Any, student: Any, side: int) -> dict[str, float]:
    """Of a picture: the teacher's forward, the student's forward and backward ("cached"), and both."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for model, back in ((teacher, False), (student, True)):
        pictures = torch.zeros(2, 3, side, side, device=device_of())
        with FlopCounterMode(display=False) as counter:
            given = model(pictures)
            if back:
                given.sum().backward()
        model.zero_grad()
        found.append(counter.get_total_flops() / 2)
    return {"teacher": found[0], "cached": found[1], "live": sum(found)}


def step(part: Part, mode: str | None = None) -> None:
    """Images/s, share of the peak, the host's time and memory of each arm; kd and the hand-written step in turn."""
    import torch

    is_gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    pair = Pair(part.small, mode)
    count = 4 if part.small else 256
    arms = pair.arms(count)
    rows: dict[str, dict[str, Any]] = {}

    def first_calls(name: str) -> dict[str, Any]:
        """Seconds of the first, the host's milliseconds until the last launch of the second, memory."""
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        first_s = measure({name: arms[name]}, rounds=1, warmup=0)[name][0]
        start = time.perf_counter()
        arms[name]()
        host_ms = 1000 * (time.perf_counter() - start)
        synchronize()
        gb = torch.cuda.max_memory_allocated() / 1e9 if is_gpu else 0.0
        rows[name] = {
            "first_s": round(first_s, 2),
            "host_ms": round(host_ms, 2),
            "gb": round(gb, 1),
        }
        return rows[name]

    for name in [name for name in arms if not (mode and "hand" in name)]:
        part.tried(lambda name=name: first_calls(name), arm=name, batch=count)  # type: ignore[misc]
    rounds = 2 if part.small else 5
    times = measure({name: arms[name] for name in rows}, rounds, warmup=0, inner=rounds)
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        share = count / middle * pair.flops[name.split(",")[0]] / PEAK
        part.say(arm=name, batch=count, ms=round(1000 * middle, 2), low=round(1000 * min(seconds), 2),
                 high=round(1000 * max(seconds), 2), images_s=round(count / middle), mfu=round(share, 3))  # fmt: skip


def compiled(part: Part) -> None:
    """The step with compiled models."""
    step(part, "default")


def graphs(part: Part) -> None:
    """The step with CUDA graphs; on a CPU they are compiled models."""
    step(part, "reduce-overhead")


# -- the start ---------------------------------------------------------------------------------------------------------
def start(part: Part) -> None:
    """The start from the teacher's layers on the device and on the CPU: seconds, and how far their answers differ."""
    import torch

    from kd.distill.inherit import inherit_together
    from kd.distill.on_device import CPU, fitting_on
    from scripts.bench.start_cost import drawn_pair

    side, count = (32, 32) if part.small else (224, 256)
    answers = {}
    for name, place in {"device": device_of(), "cpu": CPU}.items():
        teacher, student, prepare, pictures = drawn_pair("vit_small_patch16_224", None, side, count)
        began = time.perf_counter()
        with fitting_on(place, teacher, student) as here:
            inherit_together([(student, prepare)], teacher, pictures.to(here), prepare)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            answers[name] = student(prepare(pictures[:32]))
        part.say(place=name, device=place.type, pictures=count, seconds=round(seconds, 2))
    difference = (answers["device"] - answers["cpu"]).norm() / answers["cpu"].norm()
    part.say(relative_difference_of_answers=float(difference))


PARTS: dict[str, tuple[Callable[[Part], None], int]] = {
    "step": (step, 200),
    "compile": (compiled, 240),
    "graphs": (graphs, 170),
    "start": (start, 240),
}
"""Name -> what it does, the most seconds that it may take."""


# -- all of them -------------------------------------------------------------------------------------------------------
def run_part(name: str, asked: argparse.Namespace) -> None:
    """A part in a process of its own, then a line with its status and seconds."""
    began = time.perf_counter()
    limit = PARTS[name][1] * (4 if asked.small else 1)
    command = [sys.executable, __file__, "--here", name]
    command += ["--out", str(asked.out), *["--small"] * asked.small]
    try:
        status: int | str = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        status = f"longer than {limit} s"
    part = Part(name, asked.out, asked.small)
    part.say(ended=status, s=round(time.perf_counter() - began, 1))


def main() -> None:
    """Runs the parts, each in a process of its own."""
    asked = options(__doc__, out=Path("runs/gpu"), only=list(PARTS), small=False, here="")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.here:
        return PARTS[asked.here][0](Part(asked.here, asked.out, asked.small))
    for name in asked.only:
        run_part(name, asked)
    return None


if __name__ == "__main__":
    main()
