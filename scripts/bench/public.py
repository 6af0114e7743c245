"""kd beside its peers on pictures that the field knows: one teacher, one student, the same pictures, epochs and views.

    python scripts/bench/public.py --shrink ARCHIVE/imagewoof2 data/imagewoof2-160
    python scripts/bench/public.py --data data/imagewoof2-160 --backbone DINOV2.safetensors --timm TIMM --write

``--data`` is a folder of classes (``train/``, ``val/``): Imagewoof2 and CIFAR-100's PNG files come as one; ``--shrink``
copies it with the shorter side 160, as fast.ai's own smaller archives are. ``TIMM`` is a checkout of
pytorch-image-models, whose ``train.py`` is the peer. The teacher, DINOv2's ViT-S/14 at 112 px, is fine-tuned by
``recipe=photos_teacher``. Each row is a process of its own; its accuracy after the last epoch and its seconds, start
and teacher's answers included, are kept in ``--runs`` and read again.
"""

import argparse
import csv
import hashlib
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import timm
import torch
import yaml
from harness import options, write
from PIL import Image
from safetensors.torch import load_file, save_file

# as recipe=grocery_vit with AdamW, but for the peer's weight of the labels, which the recipe's row does not have
STUDENT, SIDE = "vit_tiny_patch16_224", 112
BATCH, LR, LR_SCRATCH, DECAY, WARMUP, TEMPERATURE, LABELS = 64, 5e-5, 1e-3, 0.05, 1, 2.0, 0.1
LR_PEER = 2.5e-4  # of timm's script: above 1e-4, level with 5e-4 after three epochs; above 1e-3 after twenty


def adamw(lr: float) -> list[str]:
    """Settings of rows that stand for other methods: AdamW, as their authors; the recipe's own optimizer is Muon."""
    return ["optim.name=adamw", f"optim.lr={lr}"]


SELECTED = ["model.student.inherit=false", "model.student.checkpoint=SELECTED"]
ONLY_LABELS = ["model.task_loss_weight=1", "model.distill_losses={}", "model.taps={}"]
KD_ROWS: dict[str, list[str]] = {
    "labels alone, from scratch": ["config=no_teacher", *adamw(LR_SCRATCH)],
    "kd, from scratch": ["model.student.inherit=false", *adamw(LR_SCRATCH)],
    "kd, weight selection (Xu et al., 2024), lr 1e-3": [*SELECTED, *adamw(1e-3)],
    "kd, weight selection, lr 2e-3": [*SELECTED, *adamw(2e-3)],
    "kd, weight selection, lr 2.5e-4": [*SELECTED, *adamw(2.5e-4)],
    "kd, weight selection, lr 5e-5": [*SELECTED, *adamw(5e-5)],
    "labels alone, from the inherited start": [*ONLY_LABELS, *adamw(LR)],
    "kd as its recipe does it": [],
}
PEER = "timm's train.py --kd-distill-type logit, from scratch"


def shrink(source: Path, target: Path, side: int = 160) -> None:
    """Copies a folder of pictures, the shorter side of each at most ``side`` pixels (JPEG, quality 95)."""
    files = [
        file
        for file in sorted(source.rglob("*"))
        if file.suffix.lower() in (".jpeg", ".jpg", ".png")
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_shrink, source, target, side), files, chunksize=64))


def _shrink(source: Path, target: Path, side: int, file: Path) -> None:
    picture = Image.open(file).convert("RGB")
    factor = min(1.0, side / min(picture.size))
    place = (target / file.relative_to(source)).with_suffix(".jpg")
    place.parent.mkdir(parents=True, exist_ok=True)
    small = picture.resize(
        [max(1, round(edge * factor)) for edge in picture.size], Image.Resampling.BICUBIC
    )
    small.save(place, quality=95)


def select_weights(teacher: Path, arch: str, file: Path) -> None:
    """The student's weights picked from the teacher's: its first blocks, evenly spaced channels of each tensor.

    Source: Xu et al., Initializing Models with Larger Ones, ICLR 2024 (uniform selection of the first layers). What
    has another number of axes or pixels (the patch embedding's, positions) keeps its random start.
    """
    given = load_file(teacher)
    torch.manual_seed(0)
    student = timm.create_model(arch, img_size=SIDE, num_classes=len(given["head.bias"]))
    chosen = {}
    for name, own in student.state_dict().items():
        big = given.get(name)
        if big is None or big.ndim != own.ndim or name in ("patch_embed.proj.weight", "pos_embed"):
            chosen[name] = own
            continue
        for axis, length in enumerate(own.shape):
            big = big.index_select(
                axis, torch.linspace(0, big.shape[axis] - 1, length).round().long()
            )
        chosen[name] = big
    save_file({name: tensor.contiguous() for name, tensor in chosen.items()}, file)


def kd_train(items: list[str], folder: Path) -> tuple[float, float]:
    """A run of ``kd-train``: accuracy after the last epoch, seconds."""
    start = time.perf_counter()
    where = [f"runs_dir={folder.parent}", f"name={folder.name}"]
    subprocess.run([sys.executable, "-m", "kd.cli", *items, *where], check=True)
    seconds = time.perf_counter() - start
    summary = json.loads(next(folder.parent.glob(f"*/{folder.name}/summary.json")).read_text())
    return 100 * summary["student"]["val"]["acc1"], seconds


def timm_train(
    checkout: Path, data: Path, teacher: Path, epochs: int, seed: int, folder: Path
) -> tuple[float, float]:
    """timm's own script with the same student, views and optimizer: accuracy after the last epoch, seconds."""
    classes = len(list((data / "train").iterdir()))
    cuda = torch.cuda.is_available()
    command = f"""train.py {data.resolve()} --model {STUDENT} --model-kwargs img_size={SIDE} --num-classes {classes}
        --img-size {SIDE}
        --kd-model-name local-dir:{teacher.resolve()} --kd-distill-type logit --kd-temperature {TEMPERATURE}
        --distill-loss-weight {1 - LABELS} --task-loss-weight {LABELS} --epochs {epochs} --seed {seed} -b {BATCH} -j 1
        --opt adamw --lr {LR_PEER} --weight-decay {DECAY} --clip-grad 1 --sched cosine --sched-on-updates --min-lr 0
        --warmup-epochs {min(WARMUP, epochs - 1)} --warmup-lr 1e-5 --cooldown-epochs 0 --reprob 0 --smoothing 0
        --val-interval {epochs} --torchcompile
        --scale 0.35 1 --ratio 0.75 1.3333 --hflip 0.5 --color-jitter 0.2 --mixup 0.8 --cutmix 1 --mixup-prob 1
        --mixup-mode elem --interpolation bilinear --train-interpolation bilinear --crop-pct 0.875
        --mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --amp --amp-dtype bfloat16
        --device {"cuda" if cuda else "cpu"} --output {folder.parent.resolve()} --experiment {folder.name}"""
    start = time.perf_counter()
    subprocess.run([sys.executable, *command.split()], check=True, cwd=checkout)
    seconds = time.perf_counter() - start
    with (folder / "summary.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]), seconds


Row = Callable[
    [int, int, Path], tuple[float, float]
]  # epochs, seed, folder -> accuracy in per cent, seconds


def rows(asked: argparse.Namespace, teacher: Path, selected: Path) -> dict[str, Row]:
    """By name what trains it, given epochs, seed and folder."""
    common = [
        "recipe=grocery_vit",
        f"data.source.root={asked.data}",
        "model.task.label_smoothing=0",
    ]
    common += [
        "model.student.kwargs={}"
    ]  # patches of 16 pixels in all rows, as the peers' student has
    taught = [f"model.teacher.checkpoint={teacher}", *asked.set]

    def of_kd(items: list[str], epochs: int, seed: int, folder: Path) -> tuple[float, float]:
        own = [] if "config=no_teacher" in items else taught
        own = own + [item.replace("SELECTED", str(selected)) for item in items]
        length = [f"trainer.max_epochs={epochs}", f"optim.warmup_epochs={min(WARMUP, epochs - 1)}"]
        return kd_train([*common, f"seed={seed}", *length, *own], folder)

    found: dict[str, Row] = {name: partial(of_kd, items) for name, items in KD_ROWS.items()}
    if asked.timm:
        found[PEER] = lambda epochs, seed, folder: timm_train(
            asked.timm, asked.data, teacher, epochs, seed, folder
        )
    return {
        name: call
        for name, call in found.items()
        if not asked.row or any(part in name for part in asked.row)
    }


def made(name: str, asked: argparse.Namespace) -> str:
    """A digest of what a row is trained by: rows of other settings are not read again."""
    recipe = yaml.safe_load(
        (Path(__file__).parents[2] / "recipes" / "grocery_vit.yaml").read_text()
    )
    by_hand = [STUDENT, SIDE, BATCH, LR_SCRATCH, DECAY, WARMUP, TEMPERATURE, LABELS]
    of_peer = [inspect.getsource(timm_train), LR_PEER]
    of_kd = [inspect.getsource(rows), recipe, KD_ROWS.get(name), asked.set]
    text = json.dumps([by_hand, *(of_peer if name == PEER else of_kd)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def main() -> None:
    """Trains what is not there yet and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shrink", nargs=2, type=Path, metavar=("FROM", "TO"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--backbone", help="DINOv2's ViT-S/14, a file; default: downloaded")
    parser.add_argument("--teacher-epochs", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--row", nargs="*", default=[], help="rows with one of these words alone")
    parser.add_argument(
        "--set", nargs="*", default=[], help="settings for kd's rows with a teacher"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/public"))
    asked = options(parser)
    if asked.shrink:
        shrink(*asked.shrink)
        return
    asked.runs.mkdir(parents=True, exist_ok=True)
    done = asked.runs / "rows.jsonl"
    backbone = (
        [f"model.student.checkpoint={asked.backbone}", "model.student.pretrained=false"]
        if asked.backbone
        else []
    )
    teach = [
        "recipe=photos_teacher",
        f"data.source.root={asked.data}",
        f"trainer.max_epochs={asked.teacher_epochs}",
    ]
    folder = asked.runs / "photos_teacher" / "teacher"
    if not (folder / "summary.json").is_file():
        kd_train([*teach, *(backbone if asked.backbone else [])], asked.runs / "teacher")
    teacher_acc = (
        100 * json.loads((folder / "summary.json").read_text())["student"]["best_val"]["acc1"]
    )
    teacher = folder / "student"
    select_weights(teacher / "model.safetensors", STUDENT, asked.runs / "selected.safetensors")
    known = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    calls = rows(asked, teacher, asked.runs / "selected.safetensors")
    digests = {name: made(name, asked) for name in calls}
    known = [row for row in known if row.get("made") == digests.get(row["name"])]
    table = {
        (row["name"], row["epochs"], row["seed"]): (row["acc1"], row["seconds"]) for row in known
    }
    for epochs in asked.epochs:
        for seed in asked.seeds:
            for name, train in calls.items():
                if (name, epochs, seed) in table:
                    continue
                trainer = "timm" if name == PEER else f"kd{list(KD_ROWS).index(name)}"
                short = f"{trainer}-{epochs}-{seed}-{digests[name]}"
                acc1, seconds = table[name, epochs, seed] = train(epochs, seed, asked.runs / short)
                line = {
                    "name": name,
                    "epochs": epochs,
                    "seed": seed,
                    "acc1": acc1,
                    "seconds": seconds,
                    "made": digests[name],
                }
                with done.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    lines = [
        f"{asked.data.name}; teacher: ViT-S/14 (DINOv2), {asked.teacher_epochs} epochs, {teacher_acc:.1f} %; student: "
        f"{STUDENT} at {SIDE} px, batch {BATCH}; seeds {', '.join(map(str, asked.seeds))}. Accuracy after the last "
        "epoch in per cent (mean over seeds); minutes of the whole process. All rows augment alike (crops from 0.35, "
        f"flips, colours, all pairs mixed). With a teacher: {' '.join(asked.set) or 'nothing else set'}.",
        "",
        "| | " + " | ".join(f"{n} epoch{'s' * (n > 1)}" for n in asked.epochs) + " |",
        "|---|" + "---|" * len(asked.epochs),
    ]
    for name in calls:
        cells = [[table[name, epochs, seed] for seed in asked.seeds] for epochs in asked.epochs]
        shown = (
            f"{statistics.mean(a for a, _ in c):.1f} % ({statistics.mean(s for _, s in c) / 60:.1f} min)"
            for c in cells
        )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    write(
        "public",
        asked.hardware,
        asked.date,
        f"Beside peers on {asked.data.name}",
        lines,
        asked.write,
    )


if __name__ == "__main__":
    main()
