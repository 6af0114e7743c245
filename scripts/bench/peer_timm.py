"""timm's ``train.py --kd-*`` beside ``arms/public.yaml``: the same teacher, student, pictures, views and epochs.

    python scripts/bench/peer_timm.py select --data DIR --teacher FOLDER --out selected.safetensors
    python scripts/bench/peer_timm.py train --data DIR --teacher FOLDER --timm CHECKOUT --epochs 20 --seeds 0 1 2 --write
    python scripts/bench/peer_timm.py train ... --start RUN/student.safetensors --lr 2e-5

``select`` writes weights that a student of public.yaml begins with (Xu et al., 2024). RUN is that of its arm "kd's start,
untrained". ``CHECKOUT`` is one of pytorch-image-models. The rates 2.5e-4 from scratch and 2e-5 from kd's start are the
best of four, of the first after three epochs, of the second after five on a held-out tenth of the training pictures.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from harness import options, spread, write
from safetensors.torch import load_file, save_file

from kd.fit_to_machine.precision import choose_precision

# as recipe=grocery_vit with AdamW, but for the weight of the labels, which the recipe's row does not have
STUDENT = "vit_tiny_patch16_224"
BATCH, DECAY, WARMUP, TEMPERATURE, LABELS = 64, 0.05, 1, 2.0, 0.1


def select_weights(teacher: Path, student: Any, file: Path) -> None:
    """The student's weights picked from the teacher's: its first blocks, evenly spaced channels of each tensor.

    Source: Xu et al., Initializing Models with Larger Ones, ICLR 2024 (uniform selection of the first layers). A patch
    embedding of other pixels and the positions keep their random start, and so does what has another number of axes.

    Args:
        teacher: its weights, safetensors.
        student: timm's model.
        file: to write, safetensors.
    """
    teacher_weights = load_file(teacher)
    chosen = {}
    for name, own in student.state_dict().items():
        picked = teacher_weights.get(name)
        is_of_pixels = name in ("patch_embed.proj.weight", "pos_embed")
        if picked is None or picked.ndim != own.ndim or is_of_pixels:
            chosen[name] = own
            continue
        for axis, length in enumerate(own.shape):
            places = torch.linspace(0, picked.shape[axis] - 1, length).round().long()
            picked = picked.index_select(axis, places)
        chosen[name] = picked
    save_file({name: tensor.contiguous() for name, tensor in chosen.items()}, file)


def timm_train(asked: argparse.Namespace, seed: int) -> tuple[float, float]:
    """timm's own script with the same student, views and optimizer: accuracy after the last epoch, seconds.

    Args:
        asked: the command line.
        seed: of its random numbers.
    """
    folder = asked.out.resolve() / f"timm-{asked.epochs}-{seed}"
    classes = len(list((asked.data / "train").iterdir()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # kd's student is fitted to pictures as its own weights take them, with mean and deviation 0.5
    statistics_ = "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225"
    if asked.start is not None:
        statistics_ = (
            f"--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --initial-checkpoint {asked.start.resolve()}"
        )
    precision = ""
    if device == "cuda" or choose_precision("cpu")[0] == "bf16-mixed":
        precision = "--amp --amp-dtype bfloat16"
    compiled = (
        "--torchcompile" if device == "cpu" else ""
    )  # takes longer than these few epochs on a GPU
    command = f"""train.py {asked.data.resolve()} --model {STUDENT} --num-classes {classes}
        --model-kwargs img_size={asked.side} patch_size={asked.patch} --img-size {asked.side}
        --kd-model-name local-dir:{asked.teacher.resolve()} --kd-distill-type logit --kd-temperature {TEMPERATURE}
        --distill-loss-weight {1 - LABELS} --task-loss-weight {LABELS} --epochs {asked.epochs} --seed {seed}
        -b {BATCH} -j {asked.loaders} --opt adamw --lr {asked.lr} --weight-decay {DECAY} --clip-grad 1
        --sched cosine --sched-on-updates --min-lr 0
        --warmup-epochs {min(WARMUP, asked.epochs - 1)} --warmup-lr 1e-5 --cooldown-epochs 0 --reprob 0 --smoothing 0
        --val-interval {asked.epochs} {compiled}
        --scale 0.35 1 --ratio 0.75 1.3333 --hflip 0.5 --color-jitter 0.2 --mixup 0.8 --cutmix 1 --mixup-prob 1
        --mixup-mode elem --interpolation bilinear --train-interpolation bilinear --crop-pct 0.875
        {statistics_} {precision}
        --device {device} --output {folder.parent} --experiment {folder.name}"""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command.split()], check=True, cwd=asked.timm)
    seconds = time.perf_counter() - began
    with (folder / "summary.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return float(last["eval_top1"]), seconds


def write_selected(asked: argparse.Namespace) -> None:
    """The file that the rows of selected weights begin with."""
    torch.manual_seed(0)
    classes = len(list((asked.data / "train").iterdir()))
    student = timm.create_model(
        STUDENT, img_size=asked.side, patch_size=asked.patch, num_classes=classes
    )
    select_weights(asked.teacher / "model.safetensors", student, asked.out)


def main() -> None:
    """Writes selected weights, or trains and writes a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["select", "train"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True, help="timm's folder of it")
    parser.add_argument("--out", type=Path, default=Path("runs/peer_timm"), help="folder, or file")
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--start", type=Path, help="weights that it begins with; else random ones")
    parser.add_argument("--side", type=int, default=112, help="of the pictures, in pixels")
    parser.add_argument("--patch", type=int, default=16, help="of the student, in pixels")
    parser.add_argument("--lr", type=float, default=2.5e-4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--loaders", type=int, default=1, help="processes that load")
    asked = options(parser)
    if asked.what == "select":
        write_selected(asked)
        return
    rows = [timm_train(asked, seed) for seed in asked.seeds]
    accuracies = [acc1 for acc1, _ in rows]
    minutes = statistics.mean(seconds for _, seconds in rows) / 60
    lines = [
        f"{asked.data.name}, {asked.side} px, patches of {asked.patch}, {asked.epochs} epochs, rate {asked.lr}, start "
        f"{asked.start.name if asked.start else 'random'}, seeds {asked.seeds}: accuracy after the last epoch "
        f"{spread(accuracies)} %, {minutes:.1f} minutes each.",
    ]
    write("peer_timm", asked.hardware, asked.date, "timm's train.py distils", lines, asked.write)


if __name__ == "__main__":
    main()
