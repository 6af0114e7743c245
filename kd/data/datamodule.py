"""The LightningDataModule: a source's pictures as batches ``{"image", "target", "index"}``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kd.data.batch import Batch, DataInfo, Target
from kd.data.info import info_of
from kd.data.loader import Loader
from kd.data.pictures import MAX_PIXELS
from kd.data.position import Position
from kd.data.probe import Probe
from kd.data.sampler import EvalBatches, Key, TrainBatches, ViewBatches
from kd.data.scan import Check
from kd.data.sources import FoodTagMini, Source, Split, identity
from kd.data.splits import Splits
from kd.data.tier.schedule import TierSpec
from kd.data.transforms import Augment, height_width
from kd.data.views import Finish, Views
from kd.errors import UserError
from kd.machine import cores

if TYPE_CHECKING:
    from kd.data.tier.loader import Tier


Present: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
Answering: TypeAlias = Callable[[Callable[..., Batch]], Callable[..., Batch]]


class DistillationDataModule(LightningDataModule):
    """Pictures for distillation.

    Args:
        source: where pictures and labels come from, by class name: ``FoodTagMini``, ``ImageFolder``, ``Food101``,
            ``Manifest``, ``HuggingFace``, ``SegmentationFolder``, ``Shards``, ``WebDataset``.
        img_size: side of a view in pixels, or height and width; teacher and student resize it to their own size on the
            device.
        batch_size: pictures a step and process; ``auto`` takes the largest that fits (see ``optim.lr_batch``).
        num_workers: loader processes of each training process; 0 loads in the training process; ``auto`` tries 0,
            1, 2, ... under the real step on all processes at once, and takes the fewest that make it fastest.
        crop_ratio: validation crops the centre out of a picture whose shorter side is ``img_size / crop_ratio``.
        augment: the training views.
        engine: who makes the training views: ``torch`` (the loader's processes), ``device`` (all but decoding on the
            device), ``dali`` (NVIDIA DALI decodes too; extra ``dali``). The views are the same up to rounding.
            ``ray``: other machines make all batches (extra ``ray``), the same to the last bit; ``num_workers`` counts
            their processes for each training process, and ``auto`` takes all of their cores.
        on_bad_image: a picture that can't be decoded stops the run before training (``stop``), or is left out
            (``skip``).
        check: how pictures are looked at before training, once a machine: ``all`` are decoded, ``headers`` alone are
            read (a picture damaged further on ends the run when its turn comes, also under ``skip``), or ``off``;
            default: all up to 50,000 pictures of a split, headers above; of pictures in an object store none where
            there are more, or more than ``cache_gb`` keeps.
        max_pixels: a picture whose header claims more is not decoded and counts as damaged.
        val_fraction: this share of the training pictures, of each class, is held out for validation where the source
            has no validation pictures; drawn by the seed.
        balance_classes: training sees all classes equally often, whatever their numbers of pictures.
        unlabeled: a folder or URL of pictures without labels (at any depth), to learn from the teacher's answers alone.
        unlabeled_ratio: that many unlabelled pictures to each labelled one in an epoch; without it the unlabelled
            ones are all that is trained on.
        seed: orders and augments; follows the run's ``seed``.
        tier: the machines of ``engine=ray``.
        probe: labelled pictures to measure features on, of a student without a classifier.
    """

    def __init__(
        self,
        source: Source | None = None,
        img_size: int | tuple[int, int] = 224,
        batch_size: int | Literal["auto"] = 64,
        num_workers: int | Literal["auto"] = 1,
        crop_ratio: float = 0.875,
        augment: Augment | None = None,
        engine: Literal["torch", "device", "dali", "ray"] = "torch",
        on_bad_image: str = "stop",
        check: Check | None = None,
        max_pixels: int = MAX_PIXELS,
        val_fraction: float = 0.1,
        balance_classes: bool = False,
        unlabeled: str | None = None,
        unlabeled_ratio: float | None = None,
        seed: int = 0,
        tier: TierSpec | None = None,
        probe: Probe | None = None,
    ) -> None:
        super().__init__()
        settings = {"batch_size": batch_size, "num_workers": num_workers}
        self.auto = {name for name, value in settings.items() if value == "auto"}  # a run measures, others take these:
        self.batch_size: int = 64 if isinstance(batch_size, str) else batch_size
        self.num_workers: int = max(0, cores() - 1) if isinstance(num_workers, str) else num_workers
        _check(height_width(img_size), self.batch_size, self.num_workers, crop_ratio, unlabeled, unlabeled_ratio)
        self.source = source or FoodTagMini()
        self.unlabeled, self.unlabeled_ratio, self.balance_classes = unlabeled, unlabeled_ratio, balance_classes
        self.size, self.crop_ratio, self.augment = height_width(img_size), crop_ratio, augment or Augment()
        self.seed, self.engine = seed, engine
        self.probe = probe if probe is not None and probe.root else None
        self.splits = Splits(self.source, unlabeled, val_fraction, on_bad_image, check, max_pixels, seed, self.probe)
        self.position = Position()
        self._views().check()
        self.tier = _tier(tier, engine, num_workers, self._rank)
        if self.tier is not None:
            self.auto.discard("num_workers")  # all cores of the tier: nothing is to be tried
            self.num_workers = 0  # no process of this machine loads any
        self._finish: Finish | None = None  # what is left to the device
        self._filling: tuple[Dataset[Any], Callable[..., Any]] | None = None
        self.views: int | None = None  # set where a teacher's answers are cached: view = epoch % views
        self._identity: dict[str, Any] | None = None

    def prepare_data(self) -> None:
        """Checks the pictures of both splits; the first process of a machine does it, others wait and read its answer.

        Raises:
            UserError: missing data, damaged pictures (unless they are left out), or none to validate with.
        """
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
        """Classes and sizes. Lists the sources; decodes nothing, unless damaged pictures are to be left out.

        Raises:
            UserError: missing data.
        """
        parts, ratio = self.splits.parts("train"), self.unlabeled_ratio
        return info_of(
            self.source, self.splits.sizes(), parts[0].targets, self.augment, self.crop_ratio, ratio,
            self.balance_classes, self.splits.is_probed())  # fmt: skip

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
        return self._train_loader(self.split("train"), batches)

    def trial_loader(self, count: int) -> DataLoader:
        """``count`` training batches of this process, over and over where an epoch is shorter; to be timed.

        Raises:
            UserError: a global batch larger than the training set.
        """
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

    def _train_loader(self, split: Split, batches: Iterable[list[Key]]) -> DataLoader:
        pictures, collate, self._finish = self._views().training(split)
        return self._loader(pictures, batches, collate)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Makes the views of a batch that came without them (``engine=device`` or ``dali``)."""
        return self._finish(batch) if self._finish is not None and "plan" in batch else batch

    def fill_dataloader(
        self, view: int, present: Present, rank: int, world_size: int, answering: Answering | None = None
    ) -> DataLoader:
        """Training batches of one view without those whose samples are all ``present(view, index)``; ``answering``
        changes what is made of samples: their teachers' answers, in a data tier."""
        split = self.split("train")
        order = self._batches(0, 1).order(view) if self.augment.mixes else np.arange(len(split.targets))
        batches = ViewBatches(order, self.batch_size, view, rank, world_size)
        batches.leave_out(lambda index: bool(present(view, index).all()))
        if self._filling is None:  # for all views: a data tier learns it once
            pictures, collate, self._finish = self._views().training(split)
            self._filling = pictures, answering(collate) if answering else collate
        return self._loader(self._filling[0], batches, self._filling[1])

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
        return self._loader(data, self.eval_batches(split), collate)

    def _loader(self, data: Dataset[Any], batches: Iterable[list[Key]], collate: Callable[..., Any]) -> DataLoader:
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


def _check(
    size: tuple[int, int],
    batch_size: int,
    num_workers: int,
    crop_ratio: float,
    unlabeled: str | None,
    unlabeled_ratio: float | None,
) -> None:
    for name, value, low in (
        ("img_size", min(size), 1),
        ("batch_size", batch_size, 1),
        ("num_workers", num_workers, 0),
    ):
        if value < low:
            raise ValueError(f"{name} must be >= {low}, got {value}")
    if not 0 < crop_ratio <= 1:
        raise ValueError(f"crop_ratio must be > 0 and <= 1, got {crop_ratio}")
    if unlabeled_ratio is not None and not unlabeled_ratio > 0:
        raise ValueError(f"unlabeled_ratio must be > 0, got {unlabeled_ratio}")
    if unlabeled_ratio is not None and unlabeled is None:
        raise ValueError(f"unlabeled_ratio must come with data.unlabeled, got {unlabeled_ratio} alone")
