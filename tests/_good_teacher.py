"""A small teacher that knows the pictures of :func:`tests._helpers.draw_folder`, without any training."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.models import preprocess_for
from tests._helpers import CLASSES, draw_folder, tiny_vit, write_recipe


def recipe_of_a_good_teacher(
    home: Path, order: Sequence[int] = range(len(CLASSES)), **metadata: str
) -> Path:
    """A recipe beside its data and its teacher ``teacher.safetensors``: a ridge regression on random features.

    Args:
        home: folder for all of it.
        order: the class of each of the teacher's columns.
        metadata: what the teacher's file says of itself.
    """
    data = draw_folder(home / "data", train=24, val=24)
    model = tiny_vit(seed=1)
    source = DistillationDataModule(
        ImageFolder(str(data)), img_size=32, batch_size=96, num_workers=0
    )
    (batch,) = source.eval_dataloader("train")
    with torch.no_grad():
        pictures = preprocess_for(model, 32)(batch["image"])
        x = model.eval().forward_head(model.forward_features(pictures), True)  # (N, D)
        y = torch.nn.functional.one_hot(batch["target"], len(CLASSES))[:, list(order)].float()
        gram = torch.cov(x.T, correction=0)
        damped = gram + 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
        weight = torch.linalg.solve(damped, (x - x.mean(0)).T @ (y - y.mean(0)) / len(x)).T
        model.head.weight.copy_(20 * weight)
        model.head.bias.copy_(20 * (y.mean(0) - weight @ x.mean(0)))
    checkpoint = home / "teacher.safetensors"
    save_file(model.state_dict(), checkpoint, metadata)
    return write_recipe(home / "tiny.yaml", data, checkpoint, preflight="stop")
