"""The LightningDataModule: a source's pictures as batches ``{"image", "target", "index"}``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from kd.data.sampler import EvalBatches, Key, TrainBatches, ViewBatches
from kd.data.scan import damaged
from kd.data.sources import FoodTagMini, Source, Split, Subset, labelled_folder
from kd.data.transforms import Augment, MixPairs, decode, eval_transform, seeded, train_transform
from kd.errors import UserError
from kd.memory import cores

Batch = dict[str, Tensor]
"""``image``: uint8 (N, 3, H, W); ``target``: ids (N,) or probabilities (N, C); ``index``: (N,), -1 for padding."""


@dataclass
class DataInfo:
    """What a model needs to know of the data."""

    classes: list[str]
    train: int
    val: int


class PictureSet(Dataset[tuple[Tensor, int, Key]]):
    """One split, decoded and transformed; a view depends on (seed, index, epoch) alone."""

    def __init__(self, split: Split, transform: v2.Transform, seed: int) -> None:
        self.split, self.transform, self.seed = split, transform, seed

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, Key]:
        index, epoch = key
        try:
            picture = decode(self.split.read(index))
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{self.split.name(index)} can't be read: {error}") from error
        with seeded(self.seed, index, epoch):
            return self.transform(picture), self.split.targets[index], key


class Collate:
    """Samples -> a batch; mixes pairs where the augmentation says so. Runs in the loader's workers."""

    def __init__(self, mix: MixPairs | None = None) -> None:
        self.mix = mix

    def __call__(self, samples: Sequence[tuple[Tensor, int, Key]]) -> Batch:
        images = torch.stack([image for image, _, _ in samples])
        targets = torch.tensor([target for _, target, _ in samples])
        keys = [key for _, _, key in samples]
        index = torch.tensor([-1 if epoch < 0 else i for i, epoch in keys])
        if self.mix:
            images, targets = self.mix(images, targets, keys)
        return {"image": images, "target": targets, "index": index}


class DistillationDataModule(LightningDataModule):
    """Pictures for distillation.

    Args:
        source: where pictures and labels come from, by class name: ``FoodTagMini``, ``ImageFolder``, ``Food101``,
            ``Manifest``, ``HuggingFace``, ``Shards``.
        img_size: side of a view in pixels; teacher and student resize it to their own size on the device.
        batch_size: pictures a step and process; ``auto`` takes the largest that fits (see ``optim.lr_batch``).
        num_workers: loader processes of each training process; 0 loads in the training process; ``auto`` measures how
            many keep up, within the cores that the process was given.
        crop_ratio: validation crops the centre out of a picture whose shorter side is ``img_size / crop_ratio``.
        augment: the training views.
        engine: who makes the training views: ``torch`` (the loader's processes), ``device`` (all but decoding on the
            device), ``dali`` (NVIDIA DALI decodes too; extra ``dali``). The views are the same up to rounding.
        on_bad_image: a picture that can't be decoded stops the run before training (``stop``), or is left out
            (``skip``).
        seed: orders and augments; follows the run's ``seed``.
    """

    def __init__(
        self,
        source: Source | None = None,
        img_size: int = 224,
        batch_size: int | Literal["auto"] = 64,
        num_workers: int | Literal["auto"] = 1,
        crop_ratio: float = 0.875,
        augment: Augment | None = None,
        engine: Literal["torch", "device", "dali"] = "torch",
        on_bad_image: str = "stop",
        seed: int = 0,
    ) -> None:
        super().__init__()
        settings = {"batch_size": batch_size, "num_workers": num_workers}
        self.auto = {name for name, value in settings.items() if value == "auto"}  # a run measures, others take these:
        self.batch_size: int = 64 if isinstance(batch_size, str) else batch_size
        self.num_workers: int = max(0, cores() - 1) if isinstance(num_workers, str) else num_workers
        for name, value, low in (
            ("img_size", img_size, 1),
            ("batch_size", self.batch_size, 1),
            ("num_workers", self.num_workers, 0),
        ):
            if value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if not 0 < crop_ratio <= 1:
            raise ValueError(f"crop_ratio must be > 0 and <= 1, got {crop_ratio}")
        if on_bad_image not in ("stop", "skip"):
            raise ValueError(f"on_bad_image must be stop or skip, got '{on_bad_image}'")
        self.source = source or FoodTagMini()
        self.img_size, self.crop_ratio, self.augment = img_size, crop_ratio, augment or Augment()
        self.on_bad_image, self.seed, self.engine = on_bad_image, seed, engine
        self._engine = None if engine == "torch" else import_module(f"kd.data.{engine}")
        if self._engine is not None:
            self._engine.check(self.augment)
        self._make_views: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # what is left to the device
        self.views: int | None = None  # set where a teacher's answers are cached: view = epoch % views
        self.skipped: list[str] = []
        self._splits: dict[str, Split] = {}
        self._resume_at: tuple[int, int] | None = None
        self._train_batches: TrainBatches | None = None

    @property
    def info(self) -> DataInfo:
        """Classes and sizes; loads and checks both splits on first use.

        Raises:
            UserError: missing data, damaged pictures (unless skipped), or a batch larger than the set.
        """
        sizes = {split: len(self.split(split).targets) for split in ("train", "val")}
        return DataInfo(list(self.source.classes), sizes["train"], sizes["val"])

    def split(self, name: str) -> Split:
        """A split without its damaged pictures."""
        if name not in self._splits:
            self._splits[name] = self._checked(self.source.load(name), name)
        return self._splits[name]

    def _checked(self, split: Split, name: str) -> Split:
        if getattr(split, "checked", False):
            return split
        bad = damaged(split, name)
        if not bad:
            return split
        listed = [f"{split.name(i)} ({reason})" for i, reason in bad.items()]
        if self.on_bad_image == "stop":
            more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
            raise UserError(
                f"data.source: {len(listed)} damaged picture{'s' * (len(listed) > 1)}: {', '.join(listed[:10])}{more}; "
                "mend them, or leave them out with data.on_bad_image=skip"
            )
        self.skipped += listed
        keep = [i for i in range(len(split.targets)) if i not in bad]
        if not keep:
            raise UserError(f"data.source: all {len(listed)} pictures of {name} are damaged, the first is {listed[0]}")
        return Subset(split, keep)

    def use_folder(self, folder: str, classes: Sequence[str]) -> None:
        """Makes ``folder/<class>/*.jpg`` the split ``folder``, with ids from ``classes``."""
        self.source.classes = list(classes)
        self._splits["folder"] = self._checked(labelled_folder(Path(folder), classes, "folder"), "folder")

    def check_batch_size(self, world_size: int) -> None:
        """Raises a UserError where one global batch is larger than the training set."""
        if self.batch_size * world_size > self.info.train:
            raise UserError(
                f"data.batch_size: {self.batch_size} x {world_size} process(es) is more than the "
                f"{self.info.train} training pictures"
            )

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def train_dataloader(self) -> DataLoader:
        """Shuffled, augmented batches of this process."""
        rank, world_size = self._rank()
        self.check_batch_size(world_size)
        split = self.split("train")
        batches = TrainBatches(
            len(split.targets), self.batch_size, self.seed, rank, world_size, self.views, self.augment.mixes
        )
        if self._resume_at:
            batches.skip(*self._resume_at)
        self._train_batches = batches
        return self._train_loader(split, batches)

    def _train_loader(self, split: Split, batches: TrainBatches | ViewBatches) -> DataLoader:
        mix = MixPairs(self.augment, len(self.source.classes), self.seed)
        if self._engine is None:
            pictures = PictureSet(split, train_transform(self.img_size, self.augment), self.seed)
            return self._loader(pictures, batches, Collate(mix))
        self._make_views = self._engine.DeviceViews(self.img_size, self.augment, mix)
        pictures = self._engine.CutSet(split, self.img_size, self.augment, self.seed)
        return self._loader(pictures, batches, self._engine.pack)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Makes the views of a batch that came without them (``engine=device`` or ``dali``)."""
        return self._make_views(batch) if self._make_views is not None and "plan" in batch else batch

    def fill_dataloader(
        self, view: int, present: Callable[[int, np.ndarray], np.ndarray], rank: int, world_size: int
    ) -> DataLoader:
        """Training batches of one view without those whose samples are all ``present(view, index)``."""
        split = self.split("train")
        batches = ViewBatches(len(split.targets), self.batch_size, self.seed, view, rank, world_size)
        batches.leave_out(lambda index: bool(present(view, index).all()))
        return self._train_loader(split, batches)

    def val_dataloader(self) -> DataLoader:
        """Validation batches of this process, in order."""
        return self.eval_dataloader("val")

    def eval_dataloader(self, split: str) -> DataLoader:
        """Batches of any split as validation sees them: centre crops, in order."""
        rank, world_size = self._rank()
        pictures = self.split(split)
        batches = EvalBatches(len(pictures.targets), self.batch_size, rank, world_size)
        transform = eval_transform(self.img_size, self.crop_ratio)
        return self._loader(PictureSet(pictures, transform, self.seed), batches, Collate())

    def _loader(
        self, data: PictureSet, batches: TrainBatches | EvalBatches | ViewBatches, collate: Collate
    ) -> DataLoader:
        return DataLoader(
            data,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )

    def sample_pictures(self, count: int) -> Tensor:
        """The first ``count`` training pictures of a fixed shuffle, as validation sees them: uint8 ``(N, 3, H, W)``."""
        split = self.split("train")
        data = PictureSet(split, eval_transform(self.img_size, self.crop_ratio), self.seed)
        order = TrainBatches(len(split.targets), 1, self.seed).order(0)[:count]
        return torch.stack([data[int(i), 0][0] for i in order])

    def state_dict(self) -> dict[str, Any]:
        """Where the run is in its epoch, counted in samples of all processes."""
        if self.trainer is None or self._train_batches is None:
            return {}
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {
            "epoch": self.trainer.current_epoch,
            "samples": done * self.batch_size * self.trainer.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the samples that a checkpoint's run had seen."""
        if state:
            self._resume_at = (state["epoch"], state["samples"])
