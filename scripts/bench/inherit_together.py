"""Twelve students that inherit from one teacher together, against one: CPU time, and whether a change keeps the bits.

    python scripts/bench/inherit_together.py [pictures=48] [blocks=12]

A ViT-S/14 at 112 px with drawn weights gives its layers to a ViT-Ti/16, then to twelve students (widths 96, 192, 384;
a third, half, two thirds and all of the blocks). One thread. The hash is of all weights that were made: equal on both
sides of a change that keeps what is inherited. The inheriting itself is timed, models are built before.
"""

import hashlib
import sys
import time

import timm
import torch

from kd.distill.inherit import inherit_together
from kd.models import Preprocess

PREPARE = Preprocess(112, (0.5,) * 3, (0.5,) * 3)


def model(arch: str, **kwargs: int) -> torch.nn.Module:
    torch.manual_seed(1)
    return timm.create_model(arch, num_classes=81, img_size=112, **kwargs).eval()


def main(pictures: int = 48, blocks: int = 12) -> None:
    """Prints CPU seconds of one and of twelve, and their ratio."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sample = torch.randint(0, 256, (pictures, 3, 112, 112), dtype=torch.uint8)
    teacher = model("vit_small_patch14_dinov2", depth=blocks)
    heads, depths = {96: 3, 192: 3, 384: 6}, [blocks * part // 12 for part in (4, 6, 8, 12)]
    took = []
    for shapes in ([(192, blocks)], [(width, depth) for depth in depths for width in heads]):
        students = [model("vit_tiny_patch16_224", embed_dim=w, depth=d, num_heads=heads[w]) for w, d in shapes]
        start = time.process_time()
        inherit_together([(student, PREPARE) for student in students], teacher, sample, PREPARE)
        took.append(time.process_time() - start)
        weights = b"".join(p.detach().numpy().tobytes() for student in students for p in student.parameters())
        print(f"{len(students)} of {pictures} pictures, {blocks} blocks: {took[-1]:.1f} s of CPU time, "
              f"{hashlib.sha256(weights).hexdigest()[:12]}", flush=True)  # fmt: skip
    print(f"ratio {took[1] / took[0]:.2f}")


if __name__ == "__main__":
    main(**{key: int(value) for key, value in (word.split("=") for word in sys.argv[1:])})
