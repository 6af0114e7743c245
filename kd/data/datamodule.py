"""The LightningDataModule: a source's pictures as batches ``{"image", "target", "index"}``."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from kd.data.batch import Batch, DataInfo
from kd.data.engines.tier import TierSpec
from kd.data.held_out import held_out
from kd.data.loader import Loader, Shared, listen_to_parent
from kd.data.pictures import MAX_PIXELS, decode
from kd.data.sampler import EvalBatches, Key, TrainBatches, ViewBatches
from kd.data.scan import ALL_UP_TO, Check, damaged
from kd.data.sources import FoodTagMini, Source, Split, Subset, identity, labelled_folder, printable
from kd.data.sources.unlabelled import Joined, unlabelled_folder, unlabelled_mask
from kd.data.transforms import Augment, MixPairs, eval_transform, height_width, seeded, train_transform
from kd.errors import UserError
from kd.lightning_internals import make_loader_again
from kd.machine import cores

if TYPE_CHECKING:
    from kd.data.engines.remote import Tier

Sample = tuple[Tensor, Any, Key]
"""Picture, target (id, ids, or mask), (index, epoch)."""


class PictureSet(Dataset[Sample]):
    """One split, decoded and transformed; a view depends on (seed, index, epoch) alone."""

    def __init__(
        self,
        split: Split,
        transform: v2.Transform,
        seed: int,
        source: Source | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.split, self.transform, self.seed, self.max_pixels = split, transform, seed, max_pixels
        self.masks = source is not None and source.masks
        self.ignore_index = source.ignore_index if source else None

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitem__(self, key: Key) -> Sample:
        index, epoch = key
        try:
            picture, target = decode(self.split.read(index), self.max_pixels), self.split.target(index)
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{printable(self.split.name(index))} can't be read: {error}") from error
        with seeded(self.seed, index, epoch):
            if not self.masks:
                return self.transform(picture), target, key
            if isinstance(target, int):
                target = unlabelled_mask(picture.shape[1], picture.shape[2], self.ignore_index)
            return (*self.transform(picture, target), key)


class Collate:
    """Samples -> a batch; mixes pairs where the augmentation says so. Runs in the loader's workers."""

    def __init__(self, mix: MixPairs | None = None, labels: int = 0) -> None:
        self.mix, self.labels = mix, labels

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        images = torch.stack([image for image, _, _ in samples])
        targets = self.targets([target for _, target, _ in samples])
        keys = [key for _, _, key in samples]
        index = torch.tensor([-1 if epoch < 0 else i for i, epoch in keys])
        if self.mix:
            images, targets = self.mix(images, targets, keys)
        batch: Batch = {"image": images, "target": targets, "index": index}
        return batch if self.mix is None else {**batch, "view": keys[0][1]}

    def targets(self, targets: Sequence[Any]) -> Tensor:
        """Targets of samples -> the batch's."""
        if isinstance(targets[0], Tensor):
            return torch.cat([t.as_subclass(Tensor) for t in targets])
        if not self.labels:
            return torch.tensor(targets)
        rows = torch.zeros(len(targets), self.labels)
        for row, ids in zip(rows, targets, strict=True):
            if isinstance(ids, list):
                row[ids] = 1.0
            else:  # the -1 of a picture without labels
                row.fill_(float("nan"))
        return rows


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
            default: all up to 50,000 pictures of a split, headers above.
        max_pixels: a picture whose header claims more is not decoded and counts as damaged.
        val_fraction: this share of the training pictures, of each class, is held out for validation where the source
            has no validation pictures; drawn by the seed.
        balance_classes: training sees all classes equally often, whatever their numbers of pictures.
        unlabeled: a folder of pictures without labels (at any depth), to learn from the teacher's answers alone.
        unlabeled_ratio: that many unlabelled pictures to each labelled one in an epoch; without it the unlabelled
            ones are all that is trained on.
        seed: orders and augments; follows the run's ``seed``.
        tier: the machines of ``engine=ray``.
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
    ) -> None:
        super().__init__()
        settings = {"batch_size": batch_size, "num_workers": num_workers}
        self.auto = {name for name, value in settings.items() if value == "auto"}  # a run measures, others take these:
        self.batch_size: int = 64 if isinstance(batch_size, str) else batch_size
        self.num_workers: int = max(0, cores() - 1) if isinstance(num_workers, str) else num_workers
        for name, value, low in (
            ("img_size", min(height_width(img_size)), 1),
            ("batch_size", self.batch_size, 1),
            ("num_workers", self.num_workers, 0),
            ("max_pixels", max_pixels, 1),
        ):
            if value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if not 0 < crop_ratio <= 1:
            raise ValueError(f"crop_ratio must be > 0 and <= 1, got {crop_ratio}")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction must be > 0 and < 1, got {val_fraction}")
        if on_bad_image not in ("stop", "skip"):
            raise ValueError(f"on_bad_image must be stop or skip, got '{on_bad_image}'")
        if unlabeled_ratio is not None and not unlabeled_ratio > 0:
            raise ValueError(f"unlabeled_ratio must be > 0, got {unlabeled_ratio}")
        if unlabeled_ratio is not None and unlabeled is None:
            raise ValueError(f"unlabeled_ratio must come with data.unlabeled, got {unlabeled_ratio} alone")
        self.source = source or FoodTagMini()
        self.unlabeled, self.unlabeled_ratio = unlabeled, unlabeled_ratio
        self.size, self.crop_ratio, self.augment = height_width(img_size), crop_ratio, augment or Augment()
        self.on_bad_image, self.seed, self.engine = on_bad_image, seed, engine
        self.check, self.max_pixels, self.val_fraction = check, max_pixels, val_fraction
        self.balance_classes = balance_classes
        self.holds_out = False  # known once the source has been listed
        self._engine = None if engine in ("torch", "ray") else import_module(f"kd.data.engines.{engine}")
        if self._engine is not None:
            self._engine.check(self.augment, self.source)
        if tier is not None and engine != "ray":
            raise UserError(f"data.tier: is for data.engine=ray, got {engine}")
        self.tier = self._tier(tier or TierSpec(), num_workers) if engine == "ray" else None
        self._make_views: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # what is left to the device
        self.views: int | None = None  # set where a teacher's answers are cached: view = epoch % views
        self.skipped: list[str] = []
        self._listed: dict[str, list[Split]] = {}
        self._splits: dict[str, Split] = {}
        self._resume_at: tuple[int, int] | None = None
        self._identity: dict[str, Any] | None = None
        self._train_batches: TrainBatches | None = None

    def _tier(self, spec: TierSpec, makers: int | str) -> "Tier":
        """The machines that make the batches; no process of this machine loads any."""
        from kd.data.engines.remote import Tier

        if makers == 0:
            raise ValueError("num_workers must be auto or >= 1 with engine=ray, got 0")
        self.auto.discard("num_workers")  # all cores of the tier: nothing is to be tried
        self.num_workers = 0
        return Tier(spec, None if isinstance(makers, str) else makers, self._rank)

    def prepare_data(self) -> None:
        """Checks the pictures of both splits; the first process of a machine does it, others wait and read its answer.

        Raises:
            UserError: missing data, or damaged pictures (unless they are left out).
        """
        for name in ("train", "val"):
            self.split(name)
        if self.tier is not None:
            self.tier.connect()

    def teardown(self, stage: str) -> None:
        """Ends the data tier with the training."""
        if self.tier is not None and stage == "fit":
            self.tier.close()

    def on_exception(self, exception: BaseException) -> None:
        """Ends the data tier with the training."""
        if self.tier is not None:
            self.tier.close()

    @property
    def info(self) -> DataInfo:
        """Classes and sizes. Lists the sources; decodes nothing, unless damaged pictures are to be left out.

        Raises:
            UserError: missing data.
        """
        sizes = {name: sum(len(part.targets) for part in self._parts(name)) for name in ("train", "val")}
        self._check_augment()
        self._check_balance()
        source, augment = self.source, self.augment
        if source.classes == [] and self.unlabeled:
            raise UserError("data.unlabeled: stands beside labelled pictures, and data.source has none; leave it out")
        if len(source.classes) == 1 and not source.masks and not source.multi_label:
            raise UserError(
                f"data.source: one class ('{source.classes[0]}') leaves nothing to tell apart; two are needed"
            )
        return DataInfo(
            list(source.classes), sizes["train"], sizes["val"],
            unlabeled=self._unlabelled_count() if source.classes else sizes["train"],
            labels=bool(source.classes) and (not self.unlabeled or self.unlabeled_ratio is not None),
            soft_targets=bool(augment.mixup or augment.cutmix), masks=source.masks, multi_label=source.multi_label,
            ignore_index=source.ignore_index, crop_ratio=self.crop_ratio, counts=self._counts(),
        )  # fmt: skip

    def _counts(self) -> list[int] | None:
        """Training pictures of each class, where a picture has one label and classes are not balanced by sampling."""
        source = self.source
        if not source.classes or source.masks or source.multi_label or self.balance_classes:
            return None
        targets = np.asarray(self._parts("train")[0].targets)
        return np.bincount(targets[targets >= 0], minlength=len(source.classes)).tolist()

    @property
    def left_out(self) -> dict[str, int]:
        """How many files beside the pictures are of no kind that can be read, by the ending of their names."""
        found: Counter[str] = Counter()
        for parts in self._listed.values():
            for part in parts:
                found.update(getattr(part, "left_out", {}))
        return dict(found)

    def _list(self, name: str) -> list[Split]:
        """A split as its source gives it, and behind it the unlabelled pictures; nothing is checked."""
        if name not in self._listed:
            self.holds_out = not self.source.has("val")
            parts = [self._part(name) if self.holds_out and name in ("train", "val") else self.source.load(name)]
            if name == "train" and self.unlabeled:
                parts.append(unlabelled_folder(self.unlabeled))
            self._listed[name] = parts
        return self._listed[name]

    def _part(self, name: str) -> Split:
        """Train or val of a source that has training pictures alone."""
        if "whole" not in self._listed:
            self._listed["whole"] = [self.source.load("train")]
        (whole,) = self._listed["whole"]
        if len(whole.targets) < 2:
            raise UserError("data.source: one picture can't be both trained on and validated with")
        chosen = held_out(whole.targets, self.val_fraction, self.seed)
        keep = chosen if name == "val" else np.setdiff1d(np.arange(len(whole.targets)), chosen)
        return Subset(whole, keep.tolist())

    def _parts(self, name: str) -> Sequence[Split]:
        """The listed splits, or what is left of them where damaged pictures are left out."""
        if self.on_bad_image == "stop":
            return self._list(name)
        split = self.split(name)
        return split.parts if isinstance(split, Joined) else [split]

    def _check_augment(self) -> None:
        undefined: tuple[str, ...] = ("mixup", "cutmix") if self.source.masks or self.source.multi_label else ()
        if self.source.masks:
            undefined += ("rand_augment", "random_erasing")
        for name in undefined:
            if getattr(self.augment, name):
                kind = "masks" if self.source.masks else "several labels a picture"
                raise UserError(f"data.augment.{name}: is not defined for {kind}, set it to 0")

    def _check_balance(self) -> None:
        if not self.balance_classes:
            return
        source = self.source
        several = source.masks or source.multi_label
        if several or not source.classes or (self.unlabeled and self.unlabeled_ratio is None):
            raise UserError("data.balance_classes: needs one label a picture to train on")
        if self.unlabeled and self.augment.mixes:
            raise UserError("data.balance_classes: is not defined for labelled and unlabelled pictures mixed in pairs")

    def _unlabelled_count(self) -> int:
        return len(self._parts("train")[1].targets) if self.unlabeled else 0

    def split(self, name: str) -> Split:
        """A split without its damaged pictures; the first call for it checks them, see :meth:`prepare_data`."""
        if name not in self._splits:
            labels = [name, "unlabeled"]
            whole = [self._checked(part, label) for part, label in zip(self._list(name), labels, strict=False)]
            self._splits[name] = Joined(*whole) if len(whole) > 1 else whole[0]
        return self._splits[name]

    def _checked(self, split: Split, name: str) -> Split:
        check = self.check or getattr(split, "check", None) or ("all" if len(split.targets) <= ALL_UP_TO else "headers")
        bad = damaged(split, name, check, self.max_pixels)
        if not bad:
            return split
        listed = [f"{printable(split.name(i))} ({reason})" for i, reason in bad.items()]
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
        self._listed["folder"] = [labelled_folder(Path(folder), classes, "folder")]
        self.split("folder")

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
        batches = self._batches(rank, world_size)
        if not len(batches):
            raise UserError(f"data.batch_size: {self.batch_size} x {world_size} process(es) is more than an epoch's "
                            f"{batches.epoch_length()} pictures")  # fmt: skip
        if self._resume_at:
            batches.skip(*self._resume_at)
        self._train_batches = batches
        return self._train_loader(split, batches)

    def trial_loader(self, count: int) -> DataLoader:
        """``count`` training batches of this process, over and over where an epoch is shorter; to be timed.

        Raises:
            UserError: a global batch larger than the training set.
        """
        rank, world_size = self._rank()
        self.check_batch_size(world_size)
        batches = list(islice(cycle(self._batches(rank, world_size)), count))
        return self._train_loader(self.split("train"), batches)

    def _batches(self, rank: int, world_size: int) -> TrainBatches:
        split, unlabelled = self.split("train"), self._unlabelled_count()
        return TrainBatches(
            len(split.targets) - unlabelled, self.batch_size, self.seed, rank, world_size, unlabelled,
            self.unlabeled_ratio, self.views, self.augment.mixes,
            np.asarray(split.targets[: len(split.targets) - unlabelled]) if self.balance_classes else None,
        )  # fmt: skip

    def _train_loader(self, split: Split, batches: Iterable[list[Key]]) -> DataLoader:
        mix = MixPairs(self.augment, max(1, len(self.source.classes)), self.seed)
        collate = self._collate(mix)
        if self._engine is None:
            transform = train_transform(self.size, self.augment)
            return self._loader(self._pictures(split, transform), batches, collate)
        self._make_views = self._engine.DeviceViews(self.size, self.augment, mix)
        pictures = self._engine.CutSet(split, self.size, self.augment, self.seed, self.max_pixels)
        return self._loader(pictures, batches, partial(self._engine.pack, collate.targets))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Makes the views of a batch that came without them (``engine=device`` or ``dali``)."""
        return self._make_views(batch) if self._make_views is not None and "plan" in batch else batch

    def fill_dataloader(
        self, view: int, present: Callable[[int, np.ndarray], np.ndarray], rank: int, world_size: int
    ) -> DataLoader:
        """Training batches of one view without those whose samples are all ``present(view, index)``."""
        split = self.split("train")
        order = self._batches(0, 1).order(view) if self.augment.mixes else np.arange(len(split.targets))
        batches = ViewBatches(order, self.batch_size, view, rank, world_size)
        batches.leave_out(lambda index: bool(present(view, index).all()))
        return self._train_loader(split, batches)

    def _collate(self, mix: MixPairs | None = None) -> Collate:
        return Collate(mix, len(self.source.classes) if self.source.multi_label else 0)

    def val_dataloader(self) -> DataLoader:
        """Validation batches of this process, in order."""
        return self.eval_dataloader("val")

    def eval_dataloader(self, split: str) -> DataLoader:
        """Batches of any split as validation sees them: centre crops, in order."""
        rank, world_size = self._rank()
        pictures = self.split(split)
        batches = EvalBatches(len(pictures.targets), self.batch_size, rank, world_size)
        transform = eval_transform(self.size, self.crop_ratio)
        return self._loader(self._pictures(pictures, transform), batches, self._collate())

    def _pictures(self, split: Split, transform: v2.Transform) -> PictureSet:
        return PictureSet(split, transform, self.seed, self.source, self.max_pixels)

    def _loader(self, data: Dataset[Any], batches: Iterable[list[Key]], collate: Callable[..., Any]) -> DataLoader:
        if self.tier is not None:
            return self.tier.loader(data, batches, collate)
        return Loader(
            data,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=Shared(collate),
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            worker_init_fn=listen_to_parent,
        )

    def sample_pictures(self, count: int) -> Tensor:
        """The first ``count`` training pictures of a fixed shuffle, as validation sees them: uint8 ``(N, 3, H, W)``."""
        split = self.split("train")
        data = self._pictures(split, eval_transform(self.size, self.crop_ratio))
        order = TrainBatches(len(split.targets), 1, self.seed).order(0)[:count]
        return torch.stack([data[int(i), 0][0] for i in order])

    def state_dict(self) -> dict[str, Any]:
        """Where the run is in its epoch, counted in samples of all processes."""
        if self.trainer is None or self._train_batches is None:
            return {}
        epoch, done = self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done >= self.trainer.num_training_batches:
            return {"epoch": epoch + 1, "samples": 0}
        return {"epoch": epoch, "samples": self._train_batches.samples_after(epoch, done)}

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch, of all processes together, before an incomplete global batch is dropped."""
        return self._batches(0, 1).epoch_length()

    def batches_before(self, samples: int) -> int:
        """How many of this run's batches count as done after ``samples`` samples of an epoch."""
        return self._batches(*self._rank()).batches_before(samples)

    @property
    def resume_at(self) -> tuple[int, int] | None:
        """Epoch and samples of it that a resumed run goes on behind; None for a new one."""
        return self._resume_at

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

    def check_resumed(self, before: dict[str, Any]) -> None:
        """Refuses to go on with other samples, labels or order than a checkpoint's run had.

        Raises:
            UserError: names the key.
        """
        now = self.samples_identity()
        for name in ("seed", "unlabeled_ratio", "balance_classes"):
            if before.get(name, now[name]) != now[name]:
                key = "seed" if name == "seed" else f"data.{name}"
                raise UserError(
                    f"{key}: a resumed run keeps it ({before[name]}, given {now[name]}): it orders the samples"
                )
        if before.get("content", now["content"]) != now["content"]:
            raise UserError(
                f"data.source: these are not the training pictures and labels of the resumed run ({before['train']:,}, "
                f"now {now['train']:,}); with other data start a new run from its student: model.student.checkpoint=RUN"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the samples that a checkpoint's run had seen."""
        if state:
            self._resume_at = (state["epoch"], state["samples"])
        if state and self.trainer and self._train_batches is not None:
            # a sharded strategy reads the checkpoint after the loader was made: it must be made again
            make_loader_again(self.trainer)
