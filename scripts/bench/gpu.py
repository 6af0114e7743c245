"""A first hour on a GPU, in parts: each a process with a limit of its own, each result a line on the disk at once.

    python scripts/bench/gpu.py --out DIR                              # all parts, some 20 minutes
    python scripts/bench/gpu.py --out DIR --only facts step            # a command of at most 5 minutes
    python scripts/bench/gpu.py --out DIR --only smoke group --at-once 6    # does it work at all? no time counts
    python scripts/bench/gpu.py --out DIR --small                      # all parts on a CPU, to try them
    python scripts/bench/gpu.py --carry DIR --python 3.12              # the wheels that an offline machine lacks

``DIR/results.jsonl`` gets the lines, ``DIR/logs`` the output of runs that failed. A part that fails, hangs or runs out
of memory costs itself alone. Runs and pictures lie below ``--work``. On an offline machine:
``PYTHONPATH=DIR/wheels/unpacked`` after ``--carry``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
PEAK = 790e12  # dense bf16 of an H200 in practice (not measured here); the datasheet says 989
LIMITS = {
    "facts": 90,
    "step": 200,
    "smoke": 360,
    "train": 650,
    "compile": 240,
    "graphs": 170,
    "input": 150,
    "group": 480,
    "start": 240,
}
WHEELS = (
    "omegaconf",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "pycocotools",
)
CLASSES = 1000


@dataclass
class Part:
    """Where a part reads, writes and says what it found."""

    name: str
    out: Path
    work: Path
    small: bool
    at_once: int = 1
    """How many runs of ``kd-train`` go at the same time."""

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
            self.say(
                **values, error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )


def device_of() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured(
    arms: dict[str, Callable[[], object]], rounds: int = 5, inner: int = 5
) -> dict[str, list[float]]:
    """Ms of a call of each arm, in turn: A B A B ..., by the device's clock; the host does not wait inside a turn."""
    import torch

    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            if device_of().type == "cuda":
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                for _ in range(inner):
                    call()
                last.record()
                last.synchronize()
                found[name].append(first.elapsed_time(last) / inner)
                continue
            start = time.perf_counter()
            for _ in range(inner):
                call()
            found[name].append(1000 * (time.perf_counter() - start) / inner)
    return found


def ms_of(call: Callable[[], object], inner: int = 5) -> float:
    call()
    return statistics.median(measured({"": call}, inner=inner)[""])


# -- ceilings ----------------------------------------------------------------------------------------------------------


def facts(part: Part) -> None:
    """What the machine can do: products of matrices, attention, copies, launches."""
    import platform

    import torch
    import torch.nn.functional as F
    import torchvision
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device, gpu = device_of(), torch.cuda.is_available()
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    part.say(
        torch=torch.__version__,
        torchvision=torchvision.__version__,
        python=platform.python_version(),
        gpu=torch.cuda.get_device_name() if gpu else None,
        cores=len(os.sched_getaffinity(0)),
        shm_gb=round(shared.f_bavail * shared.f_frsize / 1e9, 1) if shared else None,
    )
    rows, low = (64, torch.bfloat16) if part.small else (50432, torch.bfloat16)  # 256 x 197
    for k, n in shapes(part.small):
        a, b = (torch.randn(m, k, device=device, dtype=low) for m in (rows, n))
        ms = ms_of(lambda a=a, b=b: a @ b.T)  # type: ignore[misc]
        part.say(gemm=f"{rows}x{k}x{n}", bf16_tflops=round(2 * rows * k * n / ms / 1e9, 1))
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        x, y = torch.randn(rows, 1024, device=device), torch.randn(1024, 1024, device=device)
        ms = ms_of(lambda x=x, y=y: x @ y)  # type: ignore[misc]
        part.say(fp32_matmul=precision, tflops=round(2 * rows * 1024 * 1024 / ms / 1e9, 1))
    for heads, back in ((16, False), (6, True)):
        q = torch.randn(
            2 if part.small else 256, heads, 197, 64, device=device, dtype=low, requires_grad=back
        )

        def attend(q: Any = q, back: bool = back) -> None:
            answer = F.scaled_dot_product_attention(q, q, q)
            if back:
                answer.backward(q.detach())

        kinds = [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ]
        part.tried(
            lambda: {"ms": round(ms_of(attend), 3)}, sdpa="default", heads=heads, backward=back
        )
        for kind in kinds if gpu else []:
            with sdpa_kernel(kind):
                part.tried(
                    lambda: {"ms": round(ms_of(attend), 3)},
                    sdpa=str(kind),
                    heads=heads,
                    backward=back,
                )
    one, count = torch.zeros((), device=device), 2000
    for name, call in (("launch_us", lambda: one.add_(1)), ("item_us", one.item)):
        call()
        start = time.perf_counter()
        for _ in range(count):
            call()
        part.say(**{name: round((time.perf_counter() - start) / count * 1e6, 2)})
    host = torch.empty((4 if part.small else 256) * 150528, dtype=torch.uint8)
    for kind_of, source in (("pageable", host), *([("pinned", host.pin_memory())] if gpu else [])):
        there = torch.empty_like(source, device=device)
        ms = ms_of(lambda s=source, t=there: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        part.say(copy_to_device=kind_of, gb_s=round(source.numel() / ms / 1e6, 1))


def shapes(small: bool) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of a ViT-L and a ViT-S."""
    return (
        [(64, 64)]
        if small
        else [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024), (384, 1536), (1536, 384)]
    )


# -- the pair, without an input ----------------------------------------------------------------------------------------


class Pair:
    """Teacher and student on the device; a step of ours, and one that is written by hand without any of our code."""

    def __init__(self, small: bool, mode: str | None = None) -> None:
        import timm
        import torch

        import kd
        from kd.models import preprocess_for
        from kd.optim import OptimSpec, build_optimizer

        self.device, more = device_of(), {"num_classes": CLASSES}
        names = ("vit_large_patch16_224", "vit_small_patch16_224")
        if small:
            names, more = (
                ("vit_tiny_patch16_224",) * 2,
                {**more, "depth": 2, "img_size": 32, "patch_size": 8},
            )
        self.side = 32 if small else 224
        make = [lambda name=name: timm.create_model(name, **more).to(self.device) for name in names]
        self.teacher = make[0]().eval().requires_grad_(False).to(torch.bfloat16)
        self.students = [make[1]().train() for _ in range(2)]
        self.flops = flops_of([m() for m in make], self.side)
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
        self.optimizers = [build_optimizer([self.students[0]], OptimSpec(lr=1e-4)),
                           torch.optim.AdamW(self.students[1].parameters(), 1e-4, fused=True)]  # fmt: skip
        mean, std = (
            torch.tensor(x, device=self.device).view(1, 3, 1, 1)
            for x in (prepare.mean, prepare.std)
        )
        self.scale, self.shift = 1 / (255 * std), -mean / std

    def arms(self, count: int) -> dict[str, Callable[[], object]]:
        """Calls on one batch of ``count`` pictures."""
        import torch
        import torch.nn.functional as F

        from kd.data.batch import Batch
        from kd.teachers import Answer

        images = torch.randint(
            256, (count, 3, self.side, self.side), dtype=torch.uint8, device=self.device
        )
        target = torch.randint(CLASSES, (count,), device=self.device)
        answers = torch.randn(count, CLASSES, device=self.device)
        batch: Batch = {"image": images, "target": target}

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
            return F.cross_entropy(logits, target) + 4 * F.kl_div(
                log_s, log_t, reduction="batchmean", log_target=True
            )

        cached = Answer({"": answers})
        return {
            "teacher": teacher,
            "cached": lambda: learn(0, lambda: self.step.learn(batch, cached).total),
            "cached, by hand": lambda: learn(1, lambda: by_hand(answers)),
            "live": lambda: learn(0, lambda: self.step(images, target).total),
            "live, by hand": lambda: learn(1, lambda: by_hand(teacher().clone())),
        }


def flops_of(models: list[Any], side: int) -> dict[str, float]:
    """Of a picture: the teacher's forward, and with the student's forward and backward."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for model, back in zip(models, (False, True), strict=True):
        model, x = model.to("meta"), torch.empty(2, 3, side, side, device="meta")
        with FlopCounterMode(display=False) as counter:
            given = model(x)
            if back:
                given.sum().backward()
        found.append(counter.get_total_flops() / 2)
    return {"teacher": found[0], "cached": found[1], "live": sum(found)}


def step(part: Part, mode: str | None = None) -> None:
    """Images/s, share of the peak, the host's time and memory of each arm; kd and the hand-written step in turn."""
    import torch

    gpu = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    pair = Pair(part.small, mode)
    for count in [4] if part.small else [256]:
        arms = pair.arms(count)
        rows: dict[str, dict[str, Any]] = {}
        for name, call in arms.items():
            if mode and "hand" in name:
                continue
            try:
                if gpu:
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                call()
                sync()
                rows[name] = {"first_s": round(time.perf_counter() - start, 2)}
                start = time.perf_counter()
                call()
                rows[name]["host_ms"] = round(
                    1000 * (time.perf_counter() - start), 2
                )  # until the last launch
                sync()
                rows[name]["gb"] = (
                    round(torch.cuda.max_memory_allocated() / 1e9, 1) if gpu else None
                )
            except Exception as error:
                part.say(
                    arm=name,
                    batch=count,
                    error=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                )
        times = measured({name: arms[name] for name in rows}, *((2, 1) if part.small else (5, 5)))
        for name, ms in times.items():
            middle = statistics.median(ms)
            share = 1000 * count / middle * pair.flops[name.split(",")[0]] / PEAK
            part.say(arm=name, batch=count, ms=round(middle, 2), low=round(min(ms), 2), high=round(max(ms), 2),
                     images_s=round(1000 * count / middle), mfu=round(share, 3), **rows[name])  # fmt: skip
    if mode is None and "live" in rows:
        part.tried(lambda: {"kernels": top_kernels(arms["live"])})


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def top_kernels(call: Callable[[], object]) -> list[tuple[str, float, int]]:
    """The operations that take most time on the device: name, share, calls."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        sync()
    by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda e: -getattr(e, by))
    total = sum(getattr(e, by) for e in events) or 1
    return [(e.key[:70], round(getattr(e, by) / total, 3), e.count) for e in events[:15]]


def compiled(part: Part) -> None:
    """The step with compiled models."""
    step(part, "default")


def graphs(part: Part) -> None:
    """The step with CUDA graphs; on a CPU they are compiled models."""
    step(part, "reduce-overhead")


# -- the loader, and whole runs ----------------------------------------------------------------------------------------


def feed(part: Part) -> None:
    """Pictures a second that the loader gives, nothing else working."""
    from kd.data.datamodule import DistillationDataModule
    from kd.data.sources import ImageFolder
    from kd.settings import Augment

    root, side, batch, steps = pictures_of(part), *((64, 16, 4) if part.small else (224, 256, 24))
    strong = {"rand_augment": 9, "mixup": 0.8, "cutmix": 1.0}
    for engine, augment in (("torch", {}), ("torch", strong), ("device", {})):
        for workers in [1] if part.small else [1, 4, 8, 14, 16]:

            def rate(
                engine: str = engine, augment: Any = augment, workers: int = workers
            ) -> dict[str, Any]:
                data: Any = DistillationDataModule(
                    ImageFolder(str(root)),
                    img_size=side,
                    batch_size=batch,
                    num_workers=workers,
                    augment=Augment(**augment),
                    engine=engine,  # type: ignore[arg-type]
                    check="headers",  # type: ignore[arg-type]
                )
                data.prepare_data()
                batches, count = iter(data.trial_loader(steps + 2 * workers + 1)), 0
                for _ in range(2 * workers + 1):
                    next(batches)
                start = time.perf_counter()
                for made in batches:
                    count += len(made["index"])
                return {"images_s": round(count / (time.perf_counter() - start))}

            part.tried(rate, engine=engine, augment=augment, workers=workers)


def pictures_of(part: Part) -> Path:
    """JPEGs as an ImageFolder: a few drawn ones, again and again."""
    from scripts.bench.input import drawn

    root = part.work / f"pictures{'_small' * part.small}"
    done = root / "done"
    if done.exists():
        return root
    pictures = drawn(4, 120, 160) if part.small else drawn(64, 427, 640)
    for split, count in (("train", 8 if part.small else 512), ("val", 4)):
        for c in range(4 if part.small else 16):
            folder = root / split / f"class{c:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / f"{i:04d}.jpg").write_bytes(pictures[(c * count + i) % len(pictures)])
    done.touch()
    return root


def kd_train(part: Part, name: str, limit: float, *items: str, command: str = "train") -> None:
    """One run, and its speed by its own records; or another of kd's commands, which makes no run."""
    runs, start = part.work / "runs" / f"{time.time():.0f}", time.perf_counter()
    limit *= 4 if part.small else 1  # a busy machine's cores
    env = {**os.environ, "KD_CACHE": str(part.work / "cache"),
           "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    program = [sys.executable, "-m", "kd.cli"]
    own_items = [f"runs_dir={runs}", f"name={name}", "monitor.interval_s=1"]
    if command != "train":
        entry = f"import sys; from kd.cli import main; sys.exit(main({command!r}, sys.argv[1:]))"
        program, own_items = [sys.executable, "-c", entry], []
    try:
        done = subprocess.run(
            [*program, *items, *own_items],
            cwd=REPO,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        code, output = done.returncode, (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired as error:
        code, output = -1, f"longer than {limit} s: {(error.stderr or b'').decode()}"
    if code:
        logs = part.out / "logs"
        logs.mkdir(exist_ok=True)
        (logs / f"{part.name}-{name}.log").write_text(output)
    row: dict[str, Any] = {"run": name, "rc": code, "s": round(time.perf_counter() - start, 1)}
    folder = next(iter(runs.glob(f"*/{name}")), None)
    part.tried(
        lambda: by_records(folder) if folder else {},
        **row,
        **({"tail": output[-300:]} if code else {}),
    )


def kd_trains(part: Part, limit: float, runs: dict[str, list[str]]) -> None:
    """Runs by name, as many at once as the command line says; each within ``limit`` seconds."""
    with ThreadPoolExecutor(part.at_once) as pool:
        trainings = [
            pool.submit(kd_train, part, name, limit, *items) for name, items in runs.items()
        ]
    for training in trainings:
        training.result()  # raises what went wrong around the run


def by_records(folder: Path) -> dict[str, Any]:
    """Epochs by the phases of their steps, without the first two of each."""
    lines = (folder / "records" / "phases.rank0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    header = next(r for r in records if "batch_size" in r)
    steps = [r for r in records if r.get("kind") == "step"]
    row: dict[str, Any] = {}
    for epoch in sorted({s["epoch"] for s in steps}):
        own = [s for s in steps if s["epoch"] == epoch and not s.get("first")][2:]
        if own:
            ms = statistics.median(s["ms"] for s in own)
            phases = {
                p: round(statistics.mean(s["p"].get(p, 0.0) for s in own), 2)
                for s in own
                for p in s["p"]
            }
            row[f"epoch{epoch}"] = {
                "steps": len(own),
                "ms": round(ms, 2),
                "mean": round(statistics.mean(s["ms"] for s in own), 2),
                "images_s": round(1000 * header["batch_size"] / ms),
                "phases": phases,
            }
    summary = json.loads((folder / "summary.json").read_text())
    row["val"] = (summary.get("student") or {}).get("val")
    row |= {
        key: summary.get(key) for key in ("images_per_s", "peak_memory_mb", "wall_s", "precision")
    }
    return row | {"verdict": (summary.get("verdict") or {}).get("text")}


def smoke(part: Part) -> None:
    """Does each switch work on a GPU at all? Tiny models: seconds each."""
    source = (
        '{"class_path": "FoodTagMini", "init_args": {"train_per_class": 20, "val_per_class": 4}}'
    )
    base = ["recipe=foodtag_vit", "trainer.max_epochs=2", "trainer.limit_train_batches=12",
            "trainer.limit_val_batches=2", f"data.source={source}", "preflight=warn"]  # fmt: skip
    graphs = ["model.student.compile=reduce-overhead", "model.teacher.compile=reduce-overhead"]
    switches = {
        "plain": [], "cache-pixels": ["model.teacher.cache=on", "model.teacher.cache_views=1",
                                      "model.teacher.cache_pixels=true"],
        "engine-device": ["data.engine=device", "data.augment.mixup=0.8", "data.augment.color_jitter=0.2"],
        "compile": ["model.student.compile=true", "model.teacher.compile=true"], "graphs": graphs,
        "fp16": ["trainer.precision=16-mixed"], "fp32": ["trainer.precision=32-true"],
        "batch-auto": ["data.batch_size=auto", "optim.lr_batch=64"], "workers-auto": ["data.num_workers=auto"],
        "kernels-nvtx-ema": ["monitor.kernels_at=5", "monitor.nvtx=true", "model.ema_decay=0.99"],
        "teacher-on-cpu": ["model.teacher.placement=cpu"],
        "accumulate": ["model.student.compile=true", "trainer.accumulate_grad_batches=2"],
        "accumulate-eager": ["trainer.accumulate_grad_batches=2"],
        "max-autotune": ["model.student.compile=max-autotune", "config=audit"],
    }  # fmt: skip
    chosen = list(switches.items())[: 2 if part.small else None]
    kd_trains(part, 150, {name: [*base, *items] for name, items in chosen})


def train(part: Part) -> None:
    """The real pair on JPEGs through kd-train: live, cached with and without pixels, without a teacher, compiled."""
    import timm
    import torch
    import yaml
    from safetensors.torch import save_file

    side, teacher, student = (32, *("vit_tiny_patch16_224",) * 2) if part.small else (
        224, "vit_large_patch16_224", "vit_small_patch16_224")  # fmt: skip
    more = {"depth": 2, "patch_size": 8} if part.small else {}
    weights, file = part.work / f"{teacher}.safetensors", part.work / "pair.yaml"
    torch.manual_seed(0)
    model = timm.create_model(teacher, img_size=side, num_classes=4 if part.small else 16, **more)
    save_file(model.state_dict(), weights)
    workers = 0 if part.small else max(1, len(os.sched_getaffinity(0)) - 2)
    source = {
        "class_path": "kd.data.sources.ImageFolder",
        "init_args": {"root": str(pictures_of(part))},
    }
    loss = {"class_path": "kd.losses.KDLoss", "init_args": {"temperature": 2.0}}
    file.write_text(yaml.safe_dump({
        "recipe": "pair", "preflight": "warn", "optim": {"lr": 1e-4, "warmup_epochs": 0},
        "data": {"source": source, "img_size": side, "batch_size": 8 if part.small else 256, "num_workers": workers,
                 "check": "headers"},
        "model": {"teacher": {"arch": teacher, "img_size": side, "checkpoint": str(weights), "kwargs": more},
                  "student": {"arch": student, "img_size": side, "kwargs": more}, "task_loss_weight": 0.5,
                  "distill_losses": {"kd": loss}},
        "trainer": {"max_epochs": 2, "limit_val_batches": 0}}))  # fmt: skip
    cached = ["model.teacher.cache=on", "model.teacher.cache_views=1", "trainer.max_epochs=3"]
    runs = {"pixels": [*cached, "model.teacher.cache_pixels=true"], "live": [], "cached": cached,
            "no-teacher": ["model.teacher=null", "model.distill_losses={}"],
            "live-compiled": ["model.teacher.compile=true", "model.student.compile=true"],
            "engine-device": ["data.engine=device"],
            "no-monitor": ["monitor.enabled=false"]}  # fmt: skip
    for name, items in list(runs.items())[: 1 if part.small else None]:
        kd_train(part, name, 150, f"recipe={file}", *items)


FEW_PICTURES = 'data.source={"class_path": "FoodTagMini", "init_args": {"train_per_class": 20, "val_per_class": 4}}'
TINY_PAIR = ["recipe=foodtag_vit", "trainer.max_epochs=1", "trainer.limit_train_batches=6",
             "trainer.limit_val_batches=1", FEW_PICTURES, "preflight=off"]  # fmt: skip


def group(part: Part) -> None:
    """A process group of one, over the device's backend (NCCL on a GPU): what it takes of tensors shows with one."""
    ddp = ["trainer.strategy=ddp", "trainer.devices=1"]
    fsdp = ["trainer.strategy=kd.strategies.fsdp.FSDP", "trainer.devices=1"]
    cache = [f"model.teacher.cache_dir={part.work / 'group_cache'}", "model.teacher.cache_views=1"]
    runs = {
        "ddp": ddp,
        "no-hook": [*ddp, "monitor.communication=false"],
        "zero": [*ddp, "optim.zero=true"],
        "bf16-gradients": [*ddp, "config=bf16_gradients"],
        "fsdp": fsdp,
    }
    kd_trains(part, 90, {name: [*TINY_PAIR, *items] for name, items in runs.items()})
    kd_train(part, "kd-cache", 120, *TINY_PAIR, *ddp, *cache, command="cache")
    kd_train(part, "cache-only", 90, *TINY_PAIR, *ddp, *cache, "model.teacher.cache=only")


def start(part: Part) -> None:
    """The start from the teacher's layers on the device and on the CPU: seconds, and how far their answers differ."""
    import timm
    import torch

    from kd.distill.inherit import inherit_together
    from kd.distill.on_device import CPU, fitting_on
    from kd.models import Preprocess

    side, count, depth = (32, 32, 2) if part.small else (224, 256, 12)
    sizes = {"img_size": side, "depth": depth, "num_classes": 10}
    torch.manual_seed(0)
    teacher = timm.create_model("vit_small_patch16_224", **sizes).eval()
    pictures = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    prepare = Preprocess(side, (0.5,) * 3, (0.5,) * 3)
    places = {"device": torch.device("cuda" if torch.cuda.is_available() else "cpu"), "cpu": CPU}
    answers = {}
    for name, place in places.items():
        torch.manual_seed(1)
        student = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
        began = time.perf_counter()
        with fitting_on(place, teacher, student) as here:
            inherit_together([(student, prepare)], teacher, pictures.to(here), prepare)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            answers[name] = student(prepare(pictures[:32]))
        part.say(place=name, device=place.type, pictures=count, seconds=round(seconds, 2))
    difference = (answers["device"] - answers["cpu"]).norm() / answers["cpu"].norm()
    part.say(relative_difference_of_answers=float(difference))


PARTS: dict[str, Callable[[Part], None]] = {
    "facts": facts, "step": step, "smoke": smoke, "train": train, "compile": compiled, "graphs": graphs,
    "input": feed, "group": group, "start": start,
}  # fmt: skip


# -- all of them -------------------------------------------------------------------------------------------------------


def carry(folder: Path, python: str) -> None:
    """Lists, fetches and unpacks the wheels that a machine with torch, timm and Lightning, but offline, lacks.

    Args:
        folder: for them.
        python: version of that machine's Python, ``3.12``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q"]
    fetch += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        fetch += ["--platform", f"{platform}_x86_64"]
    names = [f"{name}=={version(name)}" for name in WHEELS]
    subprocess.run([*fetch, *names], check=True)
    for wheel in sorted(folder.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder / "unpacked")
        print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.2f} MB")
    print(f"PYTHONPATH={folder / 'unpacked'}")


def run_part(name: str, asked: argparse.Namespace) -> None:
    """A part in a process of its own, then a line with its status and seconds."""
    start = time.perf_counter()
    limit = LIMITS[name] * (4 if asked.small else 1)
    command = [sys.executable, __file__, "--here", name, "--at-once", str(asked.at_once)]
    command += ["--out", str(asked.out), "--work", str(asked.work)]
    try:
        status: int | str = subprocess.run(
            [*command, *(["--small"] * asked.small)], timeout=limit
        ).returncode
    except subprocess.TimeoutExpired:
        status = f"longer than {limit} s"
    Part(name, asked.out, asked.work, asked.small).say(
        ended=status, s=round(time.perf_counter() - start, 1)
    )


def main() -> None:
    """Runs the parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), help="folder of results.jsonl"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "kd_gpu")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny models, on any machine")
    parser.add_argument(
        "--carry", type=Path, metavar="DIR", help="fetch wheels for an offline machine"
    )
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument(
        "--at-once", type=int, default=1, help="parts, and runs of each, at the same time"
    )
    parser.add_argument("--here", choices=list(PARTS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.carry:
        return carry(asked.carry, asked.python)
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.here:
        return PARTS[asked.here](
            Part(asked.here, asked.out, asked.work, asked.small, asked.at_once)
        )
    with ThreadPoolExecutor(asked.at_once) as pool:
        parts = [pool.submit(run_part, name, asked) for name in asked.only]
    for part in parts:
        part.result()
    return None


if __name__ == "__main__":
    main()
