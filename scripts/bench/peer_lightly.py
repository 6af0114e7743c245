"""LightlyTrain's distillation beside ``arms/label_free.yaml``: the same teacher, student, pictures, epochs, batch, size.

    python scripts/bench/peer_lightly.py --data DIR --backbone DINOV2.safetensors --lightly PYTHON --out weights.pth
    python scripts/bench/arms.py label_free_peer --give data=DIR dino=DINOV2.safetensors weights=weights.pth

``PYTHON`` runs in an environment that has lightly-train 0.18. It begins at random, or (``--start``) with the student of
kd's row "inherited, untrained", its own optimizer or (``--lr``) AdamW. Each trainer augments in its own way.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

STUDENT, TEACHER, SIDE, BATCH = "vit_tiny_patch16_224", "vit_small_patch14_dinov2", 112, 64
LIGHTLY = """
import json, sys, torch, timm, lightly_train
from safetensors.torch import load_file
asked = json.loads(sys.argv[1])
teacher = timm.create_model(asked["teacher"], img_size=asked["side"], num_classes=0)
given = load_file(asked["weights"])
grid = given["pos_embed"]
if grid.shape != teacher.pos_embed.shape:
    given["pos_embed"] = timm.layers.resample_abs_pos_embed(grid, teacher.patch_embed.grid_size, num_prefix_tokens=1)
teacher.load_state_dict(given)
student = timm.create_model(asked["student"], img_size=asked["side"], num_classes=0)
optimizer = {}
normalize = {}
if asked["start"]:
    student.load_state_dict(load_file(asked["start"]))
    normalize = {"normalize": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}}  # as the start was fitted
if asked["lr"]:
    optimizer = {"optim": "adamw", "optim_args": {"lr": asked["lr"]}}
lightly_train.pretrain(
    out=asked["out"], data=asked["data"], model=student, method="distillation", epochs=asked["epochs"],
    batch_size=asked["batch"], num_workers=1, seed=asked["seed"], precision="bf16-mixed", overwrite=True,
    method_args={"teacher": teacher},
    transform_args={"image_size": (asked["side"], asked["side"]), **normalize},
    **optimizer,
)
torch.save({name: value for name, value in student.state_dict().items()}, asked["file"])
"""


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Runs a process: seconds, and GB of the largest among it and its children."""
    start = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Trains it; prints seconds and memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of train/ and val/")
    parser.add_argument(
        "--backbone", type=Path, required=True, help="DINOv2's ViT-S/14, a file in timm's names"
    )
    parser.add_argument("--lightly", required=True, help="a Python with lightly-train 0.18")
    parser.add_argument("--out", type=Path, required=True, help="weights to write")
    parser.add_argument("--start", type=Path, help="weights that it begins with")
    parser.add_argument("--lr", type=float, help="of AdamW; else its own optimizer and rate")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    out = asked.out.resolve()
    given = {
        "teacher": TEACHER, "student": STUDENT, "side": SIDE, "batch": BATCH, "epochs": asked.epochs,
        "seed": asked.seed, "weights": str(asked.backbone.resolve()), "out": str(out.with_suffix("")), "file": str(out),
        "data": str((asked.data / "train").resolve()), "start": asked.start and str(asked.start.resolve()),
        "lr": asked.lr,
    }  # fmt: skip
    seconds, peak = timed([asked.lightly, "-c", LIGHTLY, json.dumps(given)])
    print(f"{seconds / 60:.1f} minutes, {peak:.1f} GB of the largest process")


if __name__ == "__main__":
    main()
