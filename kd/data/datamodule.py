"""The LightningDataModule: a source's pictures as batches ``{"image", "target", "index"}``."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import cycle, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from pytorch_lightning import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from kd.clock import part_of_the_start
from kd.data.batch import Batch
from kd.data.class_facts import ClassFacts, read_class_facts
from kd.data.info import DataInfo, Target
from kd.data.loader import Loader, Shared, listen_to_parent
from kd.data.own_transform import described
from kd.data.sampler import EvalBatches, Key, TrainBatches, draw_by
from kd.data.samples import Collate, PictureSet
from kd.data.sources import FoodTagMini, Source, Split
from kd.data.sources.files import UNLABELLED
from kd.data.splits import DataSpec, Splits, check_global_batch
from kd.data.transforms import EvalView, MixPairs, train_transform
from kd.data.windows import WindowedLoader
from kd.errors import UserError
from kd.lightning_internals import make_loader_again
from kd.machine import cores
from kd.progress import bar_at_start
from kd.settings import Augment, TierSpec, height_width

if TYPE_CHECKING:
    from kd.data.tier.loader import Tier


Present: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""(view, indices ``(N,)``) -> bool ``(N,)``: which training pictures have their answers in the caches."""
Loaded: TypeAlias = tuple[Dataset[Any], Callable[..., Any]]
"""Samples, and the function that collates them."""
Reading: TypeAlias = Callable[[Dataset[Any], Callable[..., Batch]], Loaded]
"""Adds a cache's answers to both."""


def _progress(trainer: Trainer) -> tuple[int, float]:
    """How many batches of the present epoch the trainer has taken, and how many it takes; infinite for a loader without a
    length.
    """
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.num_training_batches


class DistillationDataModule(LightningDataModule):
    """Pictures for distillation.

    Args:
        source: where pictures and labels come from; default: FoodTag-mini.
        settings: the fields of :class:`kd.settings.DataSettings` by name, all with a default.

    Raises:
        ValueError: a setting out of its range.
        UserError: settings that do not fit each other or the source.
    """

    def __init__(self, source: Source | None = None, **settings: Any) -> None:
        """Builds source, splits and views from settings; no picture is read yet.

        Args:
            source: of the pictures; None: FoodTag-mini.
            settings: the other fields of :class:`~kd.settings.DataSettings`, by name.

        Raises:
            UserError: settings that contradict each other.
        """
        super().__init__()
        self.given = given = DataSpec(source=source, **settings)

        # The loader. A run measures what is "auto"; until then these numbers hold.
        self.auto = {
            name for name in ("batch_size", "num_workers") if getattr(given, name) == "auto"
        }
        self.batch_size = 64 if isinstance(given.batch_size, str) else given.batch_size
        workers = None if isinstance(given.num_workers, str) else given.num_workers
        self.num_workers = max(0, cores() - 1) if workers is None else workers
        self.tier: Tier | None = None
        if given.engine == "ray":
            loader = import_module("kd.data.tier.loader")
            self.tier = loader.Tier(given.tier or TierSpec(), workers, self._rank)
            self.auto -= {"num_workers"}
            self.num_workers = 0  # the tier's machines load, none of this machine's processes

        # Pictures and labels.
        self.source = source or FoodTagMini()
        self.splits = Splits(self.source, given)
        self.probe = self.splits.probe
        self.resumed_at: tuple[int, int] | None = None
        """(epoch, samples of all processes that are done in it) at which a resumed run starts."""
        self._order: object = None  # of that epoch, as the checkpoint's run had it; None: not known
        self._trained_on: TrainBatches | None = None

        # Views.
        self.size = height_width(given.img_size)
        self.augment = given.augment or Augment()
        self.seed = given.seed
        self.engine = given.engine
        if self._engine is not None:
            self._engine.check(self.augment)
        self._finish: Callable[[Batch], Batch] | None = None  # what is left to the device

        # Set where a teacher's answers are cached.
        self.views: int | None = None  # view = epoch % views
        self.reading: Reading | None = None  # loaders read the caches
        self._filling: Loaded | None = None

    def prepare_data(self) -> None:
        """Checks the pictures of ``train``, ``val`` and ``probe``, and joins the data tier; called in every process.

        A run may have no ``probe`` and no tier.

        On each machine one process checks, and the others read its result (:func:`kd.data.scan.scan`). A second call, by
        Lightning, finds all of it done.

        Raises:
            UserError: missing data, or damaged pictures (unless they are left out); no tier.
        """
        with part_of_the_start("check of the pictures"):
            self.splits.prepare()
        if self.tier is not None:
            self.tier.connect()

    def teardown(self, stage: str) -> None:
        """Closes the data tier after training."""
        if self.tier is not None and stage == "fit":
            self.tier.close()

    def on_exception(self, exception: BaseException) -> None:
        """Closes the data tier when a run has failed."""
        self.teardown("fit")

    @property
    def info(self) -> DataInfo:
        """Classes and sizes, made anew at each call. Lists the sources; reads no picture, unless damaged ones are to be left
        out (then the first call checks them).

        Raises:
            UserError: missing data, or settings that do not fit each other or the source.
        """
        info = self.splits.info()
        if self.given.class_facts is None:
            return info
        return replace(info, facts=self._facts)

    @cached_property
    def _facts(self) -> ClassFacts:
        """The numbers about classes in ``data.class_facts``."""
        return read_class_facts(str(self.given.class_facts), self.splits.info())

    def split(self, name: str) -> Split:
        """As :meth:`Splits.split`: without damaged pictures; the first call for a split checks them."""
        return self.splits.split(name)

    def _rank(self) -> tuple[int, int]:
        """Number of this training process, and how many there are; (0, 1) before a trainer is attached."""
        if self.trainer:
            return (self.trainer.global_rank, self.trainer.world_size)
        return (0, 1)

    def train_dataloader(self) -> DataLoader:
        """Shuffled, augmented batches of this process, from the position that was restored.

        The loader is wrapped where targets of accumulation windows are added, and where DALI begins a batch early.

        Raises:
            UserError: a global batch larger than the training set, or than an epoch; or a run that resumes within an epoch
                has its samples in another order.
        """
        batches = self._checked_batches()
        if self.resumed_at:
            batches.skip(*self.resumed_at)
            if self._order not in (None, batches.decides_order(batches.epoch)):
                raise UserError(
                    "resume: the epoch under way would go on in another order: data.augment.mixup and cutmix (with "
                    "data.unlabeled), and a teacher's cache beside them, must stay on or off to the epoch's end"
                )
        self._trained_on = batches
        loader: Any = self._loader(*self._training(), batches)
        trainer: Any = self.trainer
        accumulate = 1
        if trainer is not None:
            accumulate = trainer.accumulate_grad_batches
        if accumulate > 1 and self.windows_are_known:
            loader = WindowedLoader(loader, accumulate, partial(_progress, trainer))
        if trainer is not None and self.engine == "dali":
            loader = self._engine.OneAhead(loader, self._finish, trainer.strategy.root_device)  # type: ignore[union-attr]
        return loader

    @property
    def windows_are_known(self) -> bool:
        """Whether batches can come with the targets of their accumulation window: where labels may be missing.

        Not where a device makes the views (``data.engine``): it mixes labels there, after the loader.
        """
        return self.info.lacks_labels and self._engine is None

    def trial_loader(self, count: int) -> DataLoader:
        """``count`` training batches of this process for a measurement, of epoch 0, repeated where it is shorter.

        Raises:
            UserError: a global batch larger than the training set, or than an epoch.
        """
        batches = list(islice(cycle(self._checked_batches()), count))
        pictures, collate = self._training()
        return self._loader(pictures, collate, batches)

    def _checked_batches(self) -> TrainBatches:
        """This process's training batches.

        Raises:
            UserError: a global batch larger than the training set, or than an epoch.
        """
        rank, world_size = self._rank()
        batches = self._batches(rank=rank, world_size=world_size)
        pictures = self.info.train
        check_global_batch(
            self.batch_size, world_size, pictures, f"the {pictures} training pictures"
        )
        in_epoch = batches.epoch_length()
        check_global_batch(self.batch_size, world_size, in_epoch, f"an epoch's {in_epoch} pictures")
        batches.repeats = bool(self.trainer and self.trainer.overfit_batches)  # type: ignore[attr-defined]
        return batches

    def _batches(self, rank: int, world_size: int) -> TrainBatches:
        """The training batches of process ``rank`` of ``world_size``, as keys; made anew at each call, at epoch 0."""
        targets = self.split("train").targets
        unlabelled = self.splits.unlabelled()
        labelled = len(targets) - unlabelled
        classes = draw = None
        if self.given.balance_classes:
            classes = np.asarray(targets[:labelled])
        if self.given.sampler is not None:
            draw = draw_by(self.given.sampler, targets[:labelled])
        return TrainBatches(
            labelled,
            self.batch_size,
            self.seed,
            rank,
            world_size,
            unlabelled=unlabelled,
            ratio=self.given.unlabeled_ratio,
            views=self.views,
            paired=self.augment.mixes,
            classes=classes,
            draw=draw,
        )

    @property
    def _engine(self) -> ModuleType | None:
        """The module of an engine that leaves work to the device (``device``, ``dali``); None for ``torch`` and ``ray``."""
        if self.engine in ("torch", "ray"):
            return None
        return import_module(f"kd.data.engines.{self.engine}")

    def _training(self) -> Loaded:
        """Samples of random views, and their collate function.

        With an engine that leaves work to the device it also sets :attr:`_finish`, which makes the views there. With a
        cache of the teacher's answers both are wrapped by :attr:`reading`, but not for a data tier.
        """
        split = self.split("train")
        kind = self.source.kind
        classes = len(self.source.classes)
        mix = MixPairs(self.augment, max(1, classes), self.seed)
        engine = self._engine
        pictures: Dataset[Any]
        collate: Callable[..., Any]
        if engine is None:
            pictures = self._pictures(split, train_transform(self.size, self.augment), self.source)
            collate = Collate(mix, kind, classes)
        else:
            pictures = engine.SAMPLES(
                split, self.size, self.augment, self.seed, self.splits.max_pixels, self.source
            )
            stack = partial(kind.stack, classes=classes)
            collate = partial(engine.pack, stack, mix, self.size)
            self._finish = engine.VIEWS(self.size, self.augment, mix)
        if self.reading is None or self.tier is not None:  # a tier's machines don't have the caches
            return pictures, collate
        return self.reading(pictures, collate)

    def _evaluation(self, split: Split, of_source: bool = True) -> tuple[PictureSet, Collate]:
        """Samples as centre crops, and their collate function.

        Args:
            split: the pictures.
            of_source: whether their targets are of the source's kind; else (``data.probe``) they are class ids.
        """
        view = EvalView(self.size, self.given.crop_ratio, self.splits.max_pixels)
        if not of_source:
            return self._pictures(split, view, Source()), Collate()
        classes = len(self.source.classes)
        collate = Collate(None, self.source.kind, classes)
        return self._pictures(split, view, self.source), collate

    def _pictures(self, split: Split, transform: v2.Transform, source: Source) -> PictureSet:
        """The samples of a split of a source; ``transform`` makes the view when a sample is read."""
        return PictureSet(split, transform, self.seed, source, self.splits.max_pixels, self.size)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Makes the views of a training batch that came without them (``engine=device``, ``dali``), on the batch's device.

        Lightning calls it once a batch is there; any other batch is returned as it is.
        """
        if self._finish is None or "plan" not in batch:
            return batch
        return self._finish(batch)

    def fill_batches(
        self, view: int, present: Present, rank: int, world_size: int
    ) -> list[list[Key]]:
        """This process's batches of one view in which a picture lacks its answer, to fill a teacher's cache.

        All batches of the training pictures, a last smaller one too, are dealt to the processes in turn; then those that
        are complete are left out.

        Args:
            view: number of the view.
            present: which pictures have their answers.
            rank: of this process.
            world_size: number of processes.

        Returns:
            The keys (index, view) of each batch.
        """
        if self.augment.mixes:  # pairs that are mixed stay together
            order = self._batches(rank=0, world_size=1).order(view)
        else:
            order = np.arange(len(self.split("train").targets))
        starts = range(0, len(order), self.batch_size)
        batches = []
        for start in starts[rank::world_size]:
            indices = order[start : start + self.batch_size]
            if not present(view, indices).all():
                batches.append([(int(i), view) for i in indices])
        return batches

    def fill_dataloader(self, batches: list[list[Key]]) -> DataLoader:
        """Loads :meth:`fill_batches`."""
        if self._filling is None:  # one for all views: a data tier receives it once
            self._filling = self._training()
        pictures, collate = self._filling
        return self._loader(pictures, collate, batches)

    def val_dataloader(self) -> DataLoader:
        """Validation batches of this process, in the order of :meth:`eval_batches`."""
        return self.eval_dataloader("val")

    def eval_batches(self, split: str) -> EvalBatches:
        """The keys of each batch that :meth:`eval_dataloader` loads, on this process.

        ``trainer.limit_val_batches`` holds for the split ``val`` alone.
        """
        limit = 1.0
        if self.trainer and split == "val":
            limit = self.trainer.limit_val_batches
        rank, world_size = self._rank()
        count = len(self.split(split).targets)
        return EvalBatches(count, self.batch_size, rank, world_size, limit, self.seed)

    def eval_dataloader(self, split: str) -> DataLoader:
        """Centre crops of any split, in the order of :meth:`eval_batches`; of ``probe`` its folder's training part first."""
        data, collate = self._evaluation(self.split(split), split != "probe")
        return self._loader(data, collate, self.eval_batches(split))

    def _loader(
        self, data: Dataset[Any], collate: Callable[..., Any], batches: Iterable[list[Key]]
    ) -> DataLoader:
        """A loader of any split: of the tier, or of worker processes here, its memory pinned where a GPU trains.

        Args:
            data: samples by key.
            collate: samples -> a batch.
            batches: the keys of each batch.
        """
        if self.tier is not None:
            return self.tier.loader(data, batches, collate)
        strategy = getattr(self.trainer, "strategy", None)
        pinned = torch.cuda.is_available()
        if strategy is not None and strategy.root_device.type != "cuda":
            pinned = False
        return Loader(
            data,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=Shared(collate),
            pin_memory=pinned,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=listen_to_parent,
        )

    def sample_pictures(self, count: int, label: str = "training pictures") -> Tensor:
        """The pictures of :meth:`sample` alone: uint8 ``(N, 3, H, W)``; this process decodes them.

        Args:
            count: how many at most.
            label: of the progress bar, which the first process shows.
        """
        chosen = bar_at_start(self.sample(count), label=label)
        return torch.stack([picture for picture, _ in chosen])

    def sample(self, count: int, labelled: bool = False) -> "SampledPictures":
        """The first training pictures of a shuffle by the run's seed, unlabelled ones among them, as validation shows them.

        Args:
            count: how many at most.
            labelled: take those with a class id, labels or numbers alone.

        Returns:
            As many as there are, at most ``count``.
        """
        split = self.split("train")
        targets = split.targets
        pictures, _ = self._evaluation(split)
        batches = TrainBatches(len(targets), 1, self.seed)
        shuffled = batches.order(0)
        numbers = iter(shuffled.tolist())
        if labelled:
            numbers = filter(lambda i: targets[i] != UNLABELLED, numbers)
        first = list(islice(numbers, count))
        classes = len(self.source.classes)
        stack = partial(self.source.kind.stack, classes=classes)
        return SampledPictures(pictures, targets, first, stack)

    @classmethod
    def load_from_checkpoint(cls, *_: object, **__: object) -> "DistillationDataModule":
        """Refused, by a UserError: Lightning's own would take arguments, and names of functions, from the file."""
        raise UserError(
            "load_from_checkpoint: make the data module from its arguments; trainer.fit(..., ckpt_path=FILE) resumes "
            "at the file's place in the samples"
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, for each checkpoint: "epoch", "samples" of all processes that are done in it, and what decides
        the "order" of all that it has; after an epoch's last batch, and between epochs, the next epoch and 0. {} without a
        trainer or batches.
        """
        trainer = self.trainer
        if trainer is None or self._trained_on is None:
            return {}
        epochs: Any = trainer.fit_loop.epoch_progress.current
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_between_epochs = epochs.started == epochs.completed
        if is_between_epochs:  # the batches are still those of the last one
            return {"epoch": epochs.completed, "samples": 0}
        epoch = trainer.current_epoch
        done = batches.processed
        if done >= trainer.num_training_batches:
            return {"epoch": epoch + 1, "samples": 0}
        samples = self._trained_on.samples_after(epoch, done)
        return {"epoch": epoch, "samples": samples, "order": self._trained_on.decides_order(epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the samples that a checkpoint's run had seen; Lightning calls it in each process. A loader that was
        already made is made again, at that place. An empty ``state`` changes nothing.

        Raises:
            UserError: ``epoch`` and ``samples`` are not two whole numbers from 0 on.
        """
        if not state:
            return
        place = (state.get("epoch"), state.get("samples"))
        for number in place:
            if type(number) is not int or not 0 <= number < 2**53:
                raise UserError(
                    f"resume: the checkpoint's place in the samples must be two numbers, got {place!r:.80}"
                )
        self.resumed_at = (state["epoch"], state["samples"])
        self._order = state.get("order")
        if self.trainer is not None and self._trained_on is not None:
            # A sharded strategy reads the checkpoint after the loader was made.
            make_loader_again(self.trainer)

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch, of all processes together, before an incomplete global batch is dropped."""
        return self._batches(rank=0, world_size=1).epoch_length()

    def batches_before(self, samples: int) -> int:
        """How many of this process's batches count as done after ``samples`` samples (of all processes) of an epoch."""
        return self._batches(*self._rank()).batches_before(samples)

    @cached_property
    def samples_identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run before, to see each sample once with the same label.

        A checkpoint stores it, and :func:`check_same_samples` compares it: settings by name, "train", the number of
        training pictures, and "content", a hash of their names, sizes and labels.
        """
        split = self.split("train")
        return {
            "seed": self.seed,
            "unlabeled_ratio": self.given.unlabeled_ratio,
            "balance_classes": self.given.balance_classes,
            "sampler": described(self.given.sampler),
            "train": len(split.targets),
            "content": self.splits.facts("train").identity,
        }


def _as_text(value: object) -> str:
    """A setting as text, without the addresses that Python shows of some objects in a sampler (a generator of NumPy)."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


def check_same_samples(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to resume with other samples, labels or order than the checkpoint's run had.

    Args:
        before: :attr:`DistillationDataModule.samples_identity` of that run; what is missing is not compared.
        now: of this run.

    Raises:
        UserError: names the key.
    """
    for name in ("seed", "unlabeled_ratio", "balance_classes", "sampler"):
        if name not in now:
            continue
        then = before.get(name, now[name])
        if _as_text(then) != _as_text(now[name]):
            key = "seed"
            if name != "seed":
                key = f"data.{name}"
            raise UserError(
                f"{key}: must stay {then} in a resumed run, got {now[name]}: it orders the samples"
            )
    if before.get("content", now["content"]) != now["content"]:
        raise UserError(
            f"data.source: these are not the training pictures and labels of the resumed run ({before['train']:,}, "
            f"now {now['train']:,}); with other data start a new run from its student: model.student.checkpoint=RUN"
        )


@dataclass(eq=False)
class SampledPictures:
    """Some pictures of a split with their targets: pairs of uint8 ``(3, H, W)`` and the target as ``split.targets`` has it.

    A picture is decoded when its pair is taken, in each pass again.
    """

    pictures: Dataset[Any]
    """The split's samples, as validation shows them."""
    targets: Sequence[Target]
    """Of all pictures in the split."""
    numbers: Sequence[int]
    """Of the pictures that are taken."""
    stack: Callable[[Sequence[Any]], Tensor]
    """Makes one tensor of targets, as a batch has them."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[tuple[Tensor, Target]]:
        """Decodes one picture after another, in this process."""
        for number in self.numbers:
            picture, *_ = self.pictures[number, 0]
            yield picture, self.targets[number]
