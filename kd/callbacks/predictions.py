"""Coloured predictions of a dense task, beside the picture and the truth."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kd.callbacks.context import RunContext
from kd.callbacks.run_folder import RunFolder
from kd.data.sources.segmentation import colours
from kd.tasks import Task

PICTURES = 8
GAP = 4
BAND = 16


class Predictions(Callback):
    """Writes ``predictions/<number>.png`` for the first validation pictures at the end of training.

    Each holds the picture, the truth, the student's and the teacher's classes side by side, at the size of the targets,
    with the names of the classes that occur below. Ignored pixels are black.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the files on rank 0; all ranks ask the models, which may be in shards."""
        run = RunContext.of(trainer)
        if not run.module.task.dense:
            return
        data, info = run.data, run.students.data_info
        batch = next(iter(data.eval_dataloader("val")))
        images, targets = batch["image"][:PICTURES].to(run.device), batch["target"][:PICTURES]
        columns: dict[str, Tensor] = {"truth": targets}
        for name, student in run.students.named().items():
            student.final.eval()
            columns[name or "student"] = _classes(run.module.task, student.logits(images), targets)
            student.final.train()
        if run.module.teacher is not None and run.module.teacher.has_head:
            columns["teacher"] = _classes(run.module.task, run.module.teacher(images), targets)
        if not trainer.is_global_zero:
            return
        for i, picture in enumerate(images.cpu()):
            maps = {name: column[i].numpy() for name, column in columns.items()}
            for model in set(maps) - {"truth"}:
                maps[model] = np.where(targets[i] < len(info.classes), maps[model], 255)
            file = self.folder.student_path("") / "predictions" / f"{int(batch['index'][i]):04d}.png"
            file.parent.mkdir(exist_ok=True)
            side_by_side(picture.permute(1, 2, 0).numpy(), maps, info.classes).save(file)


def _classes(task: Task, logits: Tensor, targets: Tensor) -> Tensor:
    return task.decide(task.fit(logits.cpu().float(), targets))


def side_by_side(picture: np.ndarray, maps: dict[str, np.ndarray], classes: list[str]) -> Image.Image:
    """A picture ``(H, W, 3)`` and class maps ``(H, W)`` in a row, each under its name, the colours' names below."""
    palette = colours(len(classes))
    panels = {"picture": picture} | {name: palette[ids] for name, ids in maps.items()}
    height, width = picture.shape[:2]
    total = len(panels) * (width + GAP) - GAP
    occurring = [i for i in range(len(classes)) if any((ids == i).any() for ids in maps.values())]
    rows = _legend_rows([classes[i] for i in occurring], total)
    sheet = Image.new("RGB", (total, BAND + height + BAND * (max((row for row, _ in rows), default=0) + 1)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (name, panel) in enumerate(panels.items()):
        left = place * (width + GAP)
        draw.text((left + 2, 2), name, fill="black")
        sheet.paste(Image.fromarray(panel.astype(np.uint8)), (left, BAND))
    for i, (row, left) in zip(occurring, rows, strict=True):
        top = BAND + height + row * BAND
        draw.rectangle((left, top + 3, left + 10, top + 13), fill=tuple(int(v) for v in palette[i]), outline="black")
        draw.text((left + 14, top + 2), classes[i], fill="black")
    return sheet


def _legend_rows(names: list[str], width: int) -> list[tuple[int, int]]:
    """Row and left edge of each legend entry."""
    places, row, left = [], 0, 2
    for name in names:
        needed = 26 + 7 * len(name)
        if left + needed > width and left > 2:
            row, left = row + 1, 2
        places.append((row, left))
        left += needed
    return places
