"""torchdistill's whole training, a runner of ``peer_timm.py race``: its box, losses and epochs as in its own example.

    python scripts/bench/peer_torchdistill.py --data DIR --teacher FOLDER --epochs 3

Its example (``image_classification.py``) reads folders of classes by torchvision; views, mixing, optimizer and precision
are those of the race. It has no autocast of its own but accelerate's: here the step is inside torch's.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.fit_to_machine.precision import choose_precision
from scripts.bench.harness import options

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(data: Path, side: int) -> dict[str, ImageFolder]:
    """Training and validation pictures, with the race's views."""
    ends = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    views = [
        v2.RandomResizedCrop(side, scale=(0.35, 1)),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.2, 0.2, 0.2),
    ]
    whole = [v2.Resize(round(side / 0.875)), v2.CenterCrop(side)]
    return {
        "train": ImageFolder(str(data / "train"), v2.Compose([*views, *ends])),
        "val": ImageFolder(str(data / "val"), v2.Compose([*whole, *ends])),
    }


def settings(asked: argparse.Namespace, steps: int) -> dict[str, Any]:
    """torchdistill's settings of one stage, as its YAML would have them; ``steps`` are those of the run."""
    head = {"requires_grad": True, "sequential": [], "forward_proc": "forward_batch_only",
            "forward_hook": {"input": [], "output": ["head"]}}  # fmt: skip
    loader = {"num_workers": asked.loaders, "batch_size": asked.batch}
    kd = {"student_module_path": "head", "student_module_io": "output", "teacher_module_path": "head",
          "teacher_module_io": "output", "temperature": asked.temperature, "alpha": asked.labels}  # fmt: skip
    term = {"criterion": {"key": "KDLoss", "kwargs": kd}, "weight": 1.0}
    samplers = {"train": RandomSampler, "val": SequentialSampler}
    of_split = {
        f"{split}_data_loader": {
            "dataset_id": split,
            "sampler": {"class_or_func": sampler},
            "kwargs": dict(loader),
        }
        for split, sampler in samplers.items()
    }
    return {
        **of_split,
        "num_epochs": asked.epochs,
        "teacher": {**head, "requires_grad": False},
        "student": head,
        "criterion": {"key": "WeightedSumLoss", "kwargs": {"sub_terms": {"kd": term}}},
        "optimizer": {
            "key": "AdamW",
            "kwargs": {"lr": asked.lr, "weight_decay": asked.decay},
            "max_grad_norm": 1.0,
        },
        "scheduler": {
            "key": "CosineAnnealingLR",
            "kwargs": {"T_max": steps},
            "scheduling_step": 1,
        },
    }


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """The share of validation pictures whose class is the likeliest."""
    model.eval()
    right = [model(x.to(device)).argmax(1).cpu() == y for x, y, *_ in loader]
    return float(torch.cat(right).float().mean())


def main() -> None:
    """Trains, and prints the accuracy after the last epoch."""
    from torchdistill.core.distillation import get_distillation_box

    asked = options(
        __doc__,
        data=Path,
        teacher=Path,
        student="vit_tiny_patch16_224",
        side=112,
        patch=16,
        lr=2.5e-4,
        decay=0.05,
        temperature=2.0,
        labels=0.1,
        epochs=3,
        batch=64,
        loaders=1,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = pictures(asked.data, asked.side)
    classes = len(data["train"].classes)
    teacher = timm.create_model(f"local-dir:{asked.teacher.resolve()}", pretrained=True)
    student = timm.create_model(
        asked.student, num_classes=classes, img_size=asked.side, patch_size=asked.patch
    )
    steps = asked.epochs * -(-len(data["train"]) // asked.batch)
    box = get_distillation_box(
        teacher.to(device), student.to(device), data, settings(asked, steps), device, [0], False, 1
    )
    mixes = v2.RandomChoice(
        [v2.MixUp(alpha=0.8, num_classes=classes), v2.CutMix(num_classes=classes)]
    )
    low = device.type == "cuda" or choose_precision("cpu")[0] == "bf16-mixed"
    for epoch in range(box.num_epochs):
        box.pre_epoch_process(epoch=epoch)
        for images, targets, supplement in box.train_data_loader:
            images, targets = mixes(images.to(device), targets.to(device))
            box.pre_forward_process()
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                loss = box.forward_process(images, targets=targets, supp_dict=supplement)
            box.post_forward_process(loss=loss)
        box.post_epoch_process()
    print(f"acc1 {accuracy(box.student_model, box.val_data_loader, device):.4f}")


if __name__ == "__main__":
    main()
