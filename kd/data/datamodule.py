"""The LightningDataModule: a source's pictures as batches ``{"image", "target", "index"}``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kd.data.batch import Batch, DataInfo, Target
from kd.data.class_facts import ClassFacts, read_class_facts
from kd.data.info import info_of
from kd.data.loader import Loader
from kd.data.position import Position
from kd.data.sampler import EvalBatches, Key, TrainBatches, ViewBatches
from kd.data.sources import FoodTagMini, Source, Split, identity
from kd.data.splits import Splits
from kd.data.targets import Targets
from kd.data.transforms import height_width
from kd.data.views import Finish, Views
from kd.errors import UserError
from kd.machine import cores
from kd.run.settings import Augment, Check, DataSettings, Probe, TierSpec

if TYPE_CHECKING:
    from kd.data.tier.loader import Tier


Present: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
Answering: TypeAlias = Callable[[Callable[..., Batch]], Callable[..., Batch]]


class Reading(Protocol):
    """Caches that the loader's processes read (:class:`kd.teachers.reading.Reading`)."""

    def of(self, pictures: Dataset[Any], collate: Callable[..., Batch]) -> tuple[Dataset[Any], Callable[..., Batch]]:
        """What a loader gets in place of pictures and what makes a batch of them."""


class DistillationDataModule(LightningDataModule):
    """Pictures for distillation; :class:`kd.run.settings.DataSettings` explains the arguments."""

    def __init__(
        self,
        source: Source | None = None,
        img_size: int | tuple[int, int] = DataSettings.img_size,
        batch_size: int | Literal["auto"] = DataSettings.batch_size,
        num_workers: int | Literal["auto"] = DataSettings.num_workers,
        crop_ratio: float = DataSettings.crop_ratio,
        augment: Augment | None = None,
        engine: Literal["torch", "device", "dali", "nvjpeg", "ray"] = DataSettings.engine,
        copy_ahead: bool = DataSettings.copy_ahead,
        on_bad_image: str = DataSettings.on_bad_image,
        check: Check | None = None,
        max_pixels: int = DataSettings.max_pixels,
        val_fraction: float = DataSettings.val_fraction,
        balance_classes: bool = DataSettings.balance_classes,
        unlabeled: str | None = None,
        unlabeled_ratio: float | None = None,
        seed: int = DataSettings.seed,
        tier: TierSpec | None = None,
        probe: Probe | None = None,
        class_facts: str | None = None,
    ) -> None:
        super().__init__()
        given = DataSettings(
            source, img_size, batch_size, num_workers, crop_ratio, augment, engine, copy_ahead, on_bad_image, check,
            max_pixels, val_fraction, balance_classes, unlabeled, unlabeled_ratio, seed, tier, probe, class_facts,
        )  # fmt: skip  # which refuses what is out of range
        settings = {"batch_size": batch_size, "num_workers": num_workers}
        self.auto = {name for name, value in settings.items() if value == "auto"}  # a run measures, others take these:
        self.batch_size: int = 64 if isinstance(batch_size, str) else batch_size
        self.num_workers: int = max(0, cores() - 1) if isinstance(num_workers, str) else num_workers
        self.source = source or FoodTagMini()
        self.unlabeled, self.unlabeled_ratio, self.balance_classes = unlabeled, unlabeled_ratio, balance_classes
        self.size, self.crop_ratio, self.augment = height_width(img_size), crop_ratio, augment or Augment()
        self.seed, self.engine, self.copy_ahead = seed, engine, copy_ahead
        self.class_facts = class_facts
        self._facts: ClassFacts | None = None  # read once the classes are known
        self.probe = probe if probe is not None and probe.root else None
        self.splits = Splits(self.source, given, self.probe)
        self.position = Position()
        self._views().check()
        self.tier = _tier(tier, engine, num_workers, self._rank)
        if self.tier is not None:
            self.auto.discard("num_workers")  # all cores of the tier: nothing is to be tried
            self.num_workers = 0  # no process of this machine loads any
        self._finish: Finish | None = None  # what is left to the device
        self._filling: tuple[Dataset[Any], Callable[..., Any]] | None = None
        self.views: int | None = None  # set where a teacher's answers are cached: view = epoch % views
        self.reading: Reading | None = None  # likewise: what loaders read of the caches
        self.wrap_loader: Callable[[DataLoader], Any] | None = None  # around the training loader
        self._identity: dict[str, Any] | None = None

    def prepare_data(self) -> None:
        """Checks the pictures of both splits; a machine's first process does it, others wait and read its answer."""
        self.splits.prepare()
        if self.tier is not None:
            self.tier.connect()

    def teardown(self, stage: str) -> None:
        if self.tier is not None and stage == "fit":
            self.tier.close()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    @property
    def info(self) -> DataInfo:
        """Classes and sizes. Lists the sources; decodes nothing, unless damaged pictures are to be left out."""
        parts, ratio = self.splits.parts("train"), self.unlabeled_ratio
        info = info_of(
            self.source, self.splits.sizes(), parts[0].targets, self.augment, self.crop_ratio, ratio,
            self.balance_classes, self.splits.is_probed())  # fmt: skip
        if self.class_facts is None:
            return info
        if info.kind != Targets.name:
            raise UserError(f"data.class_facts: needs one label a picture, data.source gives {info.kind}")
        if self._facts is None:
            self._facts = read_class_facts(self.class_facts, info.classes)
        return replace(info, facts=self._facts)

    @property
    def skipped(self) -> list[str]:
        """Damaged pictures that were left out, each with the reason."""
        return self.splits.skipped

    @property
    def holds_out(self) -> bool:
        """Whether validation is a part of the training pictures; known once a split has been listed."""
        return self.splits.holds_out

    @property
    def left_out(self) -> dict[str, int]:
        """How many files beside the pictures are of no kind that can be read, by the ending of their names."""
        return self.splits.left_out

    def split(self, name: str) -> Split:
        """A split without its damaged pictures; the first call for it checks them, see :meth:`prepare_data`."""
        return self.splits.split(name)

    def use_folder(self, folder: str, classes: Sequence[str]) -> None:
        """Makes ``folder/<class>/*.jpg`` the split ``folder``, with ids from ``classes``."""
        self.source.classes = list(classes)
        self.splits.add_folder(folder, classes)

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def train_dataloader(self) -> DataLoader:
        batches = self._own_batches()
        self.position.begin(batches)
        loader = self._train_loader(self.split("train"), batches)
        return self.wrap_loader(loader) if self.wrap_loader else loader

    def trial_loader(self, count: int) -> DataLoader:
        """``count`` training batches of this process, over and over where an epoch is shorter; to be timed."""
        return self._train_loader(self.split("train"), list(islice(cycle(self._own_batches()), count)))

    def _own_batches(self) -> TrainBatches:
        batches, total = self._batches(*self._rank()), self.info.train
        asked = f"data.batch_size: {self.batch_size} x {batches.world_size} process(es) is more than"
        if self.batch_size * batches.world_size > total:
            raise UserError(f"{asked} the {total} training pictures")
        if not len(batches):
            raise UserError(f"{asked} an epoch's {batches.epoch_length()} pictures")
        batches.repeats = bool(self.trainer and self.trainer.overfit_batches)  # type: ignore[attr-defined]
        return batches

    def _batches(self, rank: int, world_size: int) -> TrainBatches:
        split, unlabelled = self.split("train"), self.splits.unlabelled()
        return TrainBatches(
            len(split.targets) - unlabelled, self.batch_size, self.seed, rank, world_size, unlabelled,
            self.unlabeled_ratio, self.views, self.augment.mixes,
            np.asarray(split.targets[: len(split.targets) - unlabelled]) if self.balance_classes else None)  # fmt: skip

    def _views(self) -> Views:
        return Views(
            self.source, self.size, self.crop_ratio, self.augment, self.engine, self.seed, self.splits.max_pixels
        )

    def _training(self, split: Split) -> tuple[Dataset[Any], Callable[..., Any]]:
        pictures, collate, self._finish = self._views().training(split)
        if self.reading is None or self.tier is not None:  # a tier's machines don't have the caches
            return pictures, collate
        return self.reading.of(pictures, collate)

    def _train_loader(self, split: Split, batches: Iterable[list[Key]]) -> DataLoader:
        return self._loader(*self._training(split), batches)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Makes the views of a batch that came without them (``engine=device``, ``dali``, ``nvjpeg``)."""
        return self._finish(batch) if self._finish is not None and "plan" in batch else batch

    def fill_dataloader(
        self, view: int, present: Present, rank: int, world_size: int, answering: Answering | None = None
    ) -> DataLoader:
        """Batches of one view without those all ``present(view, index)``; ``answering`` wraps the collate function."""
        split = self.split("train")
        order = self._batches(0, 1).order(view) if self.augment.mixes else np.arange(len(split.targets))
        batches = ViewBatches(order, self.batch_size, view, rank, world_size)
        batches.leave_out(lambda index: bool(present(view, index).all()))
        if self._filling is None:  # for all views: a data tier learns it once
            pictures, collate = self._training(split)
            self._filling = pictures, answering(collate) if answering else collate
        return self._loader(*self._filling, batches)

    def val_dataloader(self) -> DataLoader:
        """Validation batches of this process, in order; interleaved where the trainer uses only some of them."""
        return self.eval_dataloader("val")

    def eval_batches(self, split: str) -> EvalBatches:
        """What :meth:`eval_dataloader` loads."""
        limit = self.trainer.limit_val_batches if self.trainer and split == "val" else 1.0
        return EvalBatches(len(self.split(split).targets), self.batch_size, *self._rank(), limit, self.seed)

    def eval_dataloader(self, split: str) -> DataLoader:
        """Centre crops of any split, in order. ``probe``: the two parts of its folder, one behind the other."""
        data, collate = self._views().evaluation(self.split(split), split != "probe")
        return self._loader(data, collate, self.eval_batches(split))

    def _loader(self, data: Dataset[Any], collate: Callable[..., Any], batches: Iterable[list[Key]]) -> DataLoader:
        if self.tier is not None:
            return self.tier.loader(data, batches, collate)
        return Loader.of(data, batches, collate, self.num_workers)

    def sample_pictures(self, count: int) -> Tensor:
        """The pictures of :meth:`sample` alone: uint8 ``(N, 3, H, W)``."""
        return torch.stack([picture for picture, _ in self.sample(count)])

    def sample(self, count: int, labelled: bool = False) -> Iterator[tuple[Tensor, Target]]:
        """The first ``count`` of all training pictures in a fixed order, or of those with a class id; as validation."""
        return self._views().sample(self.split("train"), count, labelled)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is in its epoch, counted in samples of all processes."""
        return self.position.state(self.trainer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the samples that a checkpoint's run had seen."""
        self.position.load(state, self.trainer)

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch, of all processes together, before an incomplete global batch is dropped."""
        return self._batches(0, 1).epoch_length()

    def batches_before(self, samples: int) -> int:
        """How many of this run's batches count as done after ``samples`` samples of an epoch."""
        return self._batches(*self._rank()).batches_before(samples)

    def samples_identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run before, to see each sample once with the same label."""
        if self._identity is None:
            self._identity = {
                "seed": self.seed,
                "unlabeled_ratio": self.unlabeled_ratio,
                "balance_classes": self.balance_classes,
                "train": len(self.split("train").targets),
                "content": identity(self.split("train")),
            }
        return self._identity


def _tier(spec: TierSpec | None, engine: str, makers: int | str, rank: Callable[[], tuple[int, int]]) -> "Tier | None":
    """The machines that make the batches, where others do."""
    if engine != "ray":
        if spec is not None:
            raise UserError(f"data.tier: is for data.engine=ray, got {engine}; data.tier=null")
        return None
    from kd.data.tier.loader import Tier

    if makers == 0:
        raise ValueError("num_workers must be auto or >= 1 with engine=ray, got 0")
    return Tier(spec or TierSpec(), None if isinstance(makers, str) else makers, rank)
