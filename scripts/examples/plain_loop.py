"""Distillation in a loop of your own: no Lightning, no settings files.

    python scripts/examples/plain_loop.py

``kd.Distillation`` is an ``nn.Module``: put it under ``torch.compile`` or DistributedDataParallel as any other.
"""

import timm
import torch

import kd
from kd.losses import HintLoss

CLASSES = 4


def main() -> list[float]:
    """15 steps of a small timm pair with a loss over logits and one over a layer; prints and returns the losses."""
    torch.manual_seed(0)
    teacher = timm.create_model("resnet10t", num_classes=CLASSES)
    student = timm.create_model("test_resnet", num_classes=CLASSES)
    size = timm.data.resolve_model_data_config(student)["input_size"][1:]
    step = kd.Distillation(
        student, teacher, task=kd.Classification(CLASSES), losses={"kd": kd.KDLoss(4.0), "hint": HintLoss(weight=0.5)},
        taps={"hint": kd.TapSpec(student="layer3", teacher="layer3")},
    )  # fmt: skip
    optimizer = torch.optim.AdamW(
        step.parameters(), lr=1e-3
    )  # the student's, and those of the hint's projection
    images, targets = torch.randint(0, 256, (4, 3, *size), dtype=torch.uint8), torch.arange(4)
    losses = []
    for _ in range(15):
        terms = step(
            images, targets
        )  # uint8 is prepared for each model by its own size, mean and std
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(float(terms.named["loss"]))
    print(
        f"first {losses[0]:.3f}, last {losses[-1]:.3f}: "
        + ", ".join(f"{k} {v:.3f}" for k, v in terms.named.items())
    )
    return losses


if __name__ == "__main__":
    main()
