"""The order of samples: a function of (seed, epoch) alone, the same for every number of processes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from kd.data.sources.arrays import by_value
from kd.data.splits import unlabelled_in_epoch
from kd.errors import UserError

Key = tuple[int, int]
"""(index, view), with which a data set is indexed. The view is the epoch; a sample that repeats within an epoch gets another
view then (:data:`TURN`). With a fixed number of views it is ``epoch % views`` for all samples. Padding has view -1."""
TURN = 2**32
"""Added to the view for each repetition of a sample in an epoch: more than there are epochs."""

Draw = Callable[[int, np.random.Generator], np.ndarray]
"""An epoch's number and a generator that is seeded by it -> numbers of labelled samples, with repetitions."""
GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: the first n multiples of it, modulo 1, are spread evenly over [0, 1) for every n."""


@dataclass(eq=False)
class TrainBatches(Sampler[list[Key]]):
    """Shuffled batches of one process; the last, incomplete global batch of an epoch is dropped.

    The order of an epoch is a permutation seeded by (seed, epoch). Global batch ``b`` is its slice ``[b * G, (b + 1) *
    G)`` with ``G = batch_size * world_size``; each rank takes its contiguous share.

    Unlabelled samples are numbered from ``length`` on. An epoch is a permutation of them alone (``ratio`` None), or all
    labelled samples and ``ratio`` times as many unlabelled ones in one shuffled order. They come from an endless
    sequence of permutations, so that all are seen equally often (with ``paired`` nearly so).

    With ``paired`` (mixed in pairs; needs an even batch size) a sample is in one pair of an epoch only, because its view
    may repeat: an epoch takes each unlabelled sample once at most (:func:`kd.data.splits.check_ratio`).

    With ``views``, views repeat after so many epochs (cached answers). With ``classes``, the class of each labelled
    sample, all classes are seen equally often: an epoch keeps its length, takes another part of a large class each
    time, and repeats the samples of a small one.

    Args:
        length: labelled samples in the set.
        batch_size: samples a batch of one process.
        seed: of the run.
        rank: of this process.
        world_size: number of processes.
        unlabelled: unlabelled samples, numbered from ``length`` on.
        ratio: unlabelled samples to each labelled one in an epoch; None: the unlabelled ones alone.
        views: after this many epochs the views of the pictures repeat (cached answers); default: never.
        paired: neighbours stay together whenever a view repeats, as they are mixed with each other. Needs an even batch
            size.
        classes: the class of each labelled sample, ``(length,)``, to see all classes equally often: an epoch is as long
            as without, takes another part of a large class each time, and repeats the samples of a small one.
        draw: chooses the labelled samples of each epoch, in place of each once.

    Attributes:
        epoch: whose batches the next iteration gives; Lightning sets it.
        repeats: whether every epoch shows the first one's samples and views (``trainer.overfit_batches``).
        resume_at: of a resumed run the samples of all processes that were seen in an epoch, by its number; {}: from the
            beginning.
    """

    length: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    unlabelled: int = 0
    ratio: float | None = None
    views: int | None = None
    paired: bool = False
    classes: np.ndarray | None = None
    draw: "Draw | None" = None
    epoch: int = field(default=0, init=False)
    repeats: bool = field(default=False, init=False)
    resume_at: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Finds the samples of each class, where ``classes`` are given, for epochs in which all classes come equally
        often.
        """
        self.groups = [] if self.classes is None else by_value(self.classes)
        """The labelled samples of each class."""

    @property
    def sampler(self) -> "TrainBatches":
        """Itself: Lightning looks for ``batch_sampler.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration gives; Lightning calls it before each epoch."""
        self.epoch = epoch

    def skip(self, epoch: int, samples: int) -> None:
        """Makes ``epoch`` begin after ``samples`` samples (of all processes), before the trainer sets the epoch."""
        self.resume_at = {epoch: samples}
        self.epoch = epoch

    def batches_before(self, samples: int) -> int:
        """How many batches of this process count as done after ``samples`` samples (of all processes) of an epoch: all but
        those to come.

        The run that was stopped may have had batches of another size.
        """
        global_batch = self.batch_size * self.world_size
        batches_to_come = (self.epoch_length() - samples) // global_batch
        return len(self) - batches_to_come

    def samples_after(self, epoch: int, batches: int) -> int:
        """How many samples of ``epoch`` (of all processes) are done after ``batches`` batches of this process.

        In the epoch in which a run was resumed the batches that :meth:`batches_before` counts as done are among them.
        """
        global_batch = self.batch_size * self.world_size
        samples_before = self.resume_at.get(epoch, 0)
        batches_since = batches - self.batches_before(samples_before)
        return samples_before + batches_since * global_batch

    def order(self, epoch: int) -> np.ndarray:
        """Indices of an epoch's samples, of all processes: ``(epoch_length(),)``, from (seed, epoch) alone.

        Indices from ``length`` on are unlabelled. A change of the order changes every run.
        """
        rng = np.random.default_rng([self.seed, epoch])
        view = self.view(epoch)

        # A view that repeats keeps its pairs: they are shuffled as pairs.
        if self.paired and view != epoch:
            pairs, last = _pairs(self.order(view))
            shuffled = rng.permutation(pairs)
            return np.concatenate([shuffled.reshape(-1), last])

        # Samples of one kind alone.
        if not self.unlabelled:
            return rng.permutation(self._labelled(epoch))
        if self.ratio is None:
            return self.length + rng.permutation(self.unlabelled)

        # Labelled and unlabelled samples in one shuffled order.
        count = self.epoch_length() - self.length  # of unlabelled samples in an epoch
        if self.paired:
            unlabelled = self._once(epoch, count)
        else:
            unlabelled = self._in_turn(epoch * count, count)
        samples = np.concatenate([self._labelled(epoch), unlabelled])
        return rng.permutation(samples)

    def decides_order(self, epoch: int) -> list[int]:
        """What decides an epoch's order beside seed, epoch and samples: the epoch whose pairs it repeats, and whether each
        unlabelled sample comes once at most.
        """
        repeated = self.view(epoch) if self.paired else epoch
        are_once = self.paired and self.ratio is not None and self.unlabelled > 0
        return [repeated, int(are_once)]

    def _labelled(self, epoch: int) -> np.ndarray:
        """The labelled samples of an epoch, ``(length,)``, not in the epoch's order yet.

        They are those that the user's sampler draws (repeated or cut to that length), or equally many of each class
        (``classes``); without either each once.
        """
        if self.draw is not None:
            rng = np.random.default_rng([self.seed, epoch, 5])
            drawn = self.draw(epoch, rng)
            # Shuffled before they are cut: what the sampler has sorted would lose its end.
            return np.resize(rng.permutation(drawn), self.length)
        if not self.groups:
            return np.arange(self.length)
        rng = np.random.default_rng([self.seed, epoch, 3])
        # The samples that don't divide evenly go to ``remainder`` of the classes, to others in each epoch.
        classes = len(self.groups)
        count, remainder = divmod(self.length, classes)
        samples = []
        for class_number, group in enumerate(self.groups):
            turn = (class_number + epoch) % classes
            has_one_more = turn < remainder
            # np.resize cuts a large class, and repeats a small one.
            shuffled = rng.permutation(group)
            samples.append(np.resize(shuffled, count + has_one_more))
        return np.concatenate(samples)

    def view(self, epoch: int) -> int:
        """Number of the view that an epoch shows: the epoch itself, or one of ``views`` where a cache repeats them."""
        if self.views:
            return epoch % self.views
        return epoch

    def _in_turn(self, first: int, count: int) -> np.ndarray:
        """``count`` unlabelled samples, ``(count,)``, from position ``first`` of the endless sequence of permutations."""
        last = first + count - 1
        first_pass = first // self.unlabelled
        last_pass = last // self.unlabelled
        permutations = [np.empty(0, int)]
        for number in range(first_pass, last_pass + 1):
            rng = np.random.default_rng([self.seed, number, 1])
            permutations.append(rng.permutation(self.unlabelled))
        sequence = np.concatenate(permutations)
        start = first % self.unlabelled
        return self.length + sequence[start : start + count]

    def _once(self, epoch: int, count: int) -> np.ndarray:
        """An epoch's ``count`` unlabelled samples, each once, ``(count,)``; ``count`` is at most all of them.

        In the order of the endless sequence from the epoch's place on, without the samples that repeat there. ``count`` and
        one more permutation always hold so many different ones.
        """
        samples = self._in_turn(epoch * count, count + self.unlabelled)
        _, first_places = np.unique(samples, return_index=True)
        return samples[np.sort(first_places)][:count]

    def epoch_length(self) -> int:
        """Samples of an epoch, of all processes, before an incomplete global batch is dropped."""
        if not self.unlabelled:
            return self.length
        if self.ratio is None:
            return self.unlabelled
        return self.length + unlabelled_in_epoch(self.ratio, self.length)

    def __len__(self) -> int:
        return self.epoch_length() // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        """The keys (index, view) of each batch of this process; an epoch that was broken off begins at ``resume_at``.

        With ``repeats`` they are those of epoch 0. Samples that don't fill a batch of all processes are left out. Each
        process draws the whole order and takes its share.
        """
        shown_epoch = 0
        if not self.repeats:
            shown_epoch = self.epoch
        order = self.order(shown_epoch)
        views = np.full(len(order), self.view(shown_epoch))
        may_repeat = bool(self.groups or self.unlabelled or self.draw)
        if may_repeat and self.views is None:  # with a cache a repetition has the same view
            views += TURN * _turns(order)

        done = self.resume_at.get(self.epoch, 0)  # samples of this epoch, of all processes
        global_batch = self.batch_size * self.world_size
        last_start = self.epoch_length() - global_batch
        for start in range(done, last_start + 1, global_batch):
            first = start + self.rank * self.batch_size
            share = slice(first, first + self.batch_size)
            samples = order[share].tolist()
            views_of_samples = views[share].tolist()
            yield list(zip(samples, views_of_samples, strict=True))


def draw_by(sampler: Any, targets: Sequence[Any]) -> Draw:
    """The function that chooses the labelled samples of an epoch by a class of the user's, and checks what that draws.

    Args:
        sampler: has ``draw(targets, epoch, rng)``, which returns numbers of samples, each from 0 to ``len(targets) - 1``,
            in any order and number; an epoch repeats or cuts them to its own length, and shuffles them. Every process
            calls it: the same arguments must give the same numbers.
        targets: of the labelled samples, as the source has them.

    Raises:
        UserError: it has no such method. The returned function raises one where ``draw`` returns anything else.
    """
    name = type(sampler).__name__
    if not hasattr(sampler, "draw"):
        needs = "draw(self, targets, epoch, rng), which returns the numbers of an epoch's pictures"
        raise UserError(f"data.sampler: {name} needs the method {needs}")

    count = len(targets)

    def draw(epoch: int, rng: np.random.Generator) -> np.ndarray:
        """The sampler's indices of an epoch, checked: whole numbers of samples, any number of times each."""
        numbers = np.asarray(sampler.draw(targets, epoch, rng))
        are_whole = np.issubdtype(numbers.dtype, np.integer)
        is_list = numbers.ndim == 1 and len(numbers) > 0
        if not (is_list and are_whole and numbers.min() >= 0 and numbers.max() < count):
            wanted = f"a list of whole numbers from 0 to {count - 1}"
            raise UserError(f"data.sampler: {name}.draw must return {wanted}")
        return numbers

    return draw


def _pairs(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples ``(L,)`` in pairs ``(L // 2, 2)``, and the last one where their number is odd, ``(0,)`` or ``(1,)``."""
    even = len(samples) // 2 * 2
    return samples[:even].reshape(-1, 2), samples[even:]


def _turns(order: np.ndarray) -> np.ndarray:
    """How often each sample has occurred before in an epoch's order; the shape of ``order``."""
    sorting = np.argsort(order, kind="stable")
    sorted_samples = order[sorting]
    # A sample's place in the sorted order, less the place of its first occurrence there.
    first_places = np.searchsorted(sorted_samples, sorted_samples)
    turns = np.empty(len(order), int)
    turns[sorting] = np.arange(len(order)) - first_places
    return turns


class EvalBatches(Sampler[list[Key]]):
    """Every sample once, in order, dealt to the ranks in turn.

    All ranks give equally many batches of the same sizes, padded with samples whose view is -1, which :class:`Collate`
    marks with the index -1. With a ``limit`` (as Lightning's ``limit_val_batches``) the order is interleaved, seeded by
    ``seed``, so that the first samples are spread evenly over a set that is sorted by class. All batches are given: the
    reader stops after ``used`` of them.

    Args:
        length: samples in the set.
        batch_size: samples a batch of one process.
        rank: of this process.
        world_size: number of processes.
        limit: batches that each process will use: a number (int), or a fraction of all (float).
        seed: orders the samples where not all batches are used.

    Attributes:
        used: batches that each process uses.
        order: ``(length,)``, the samples in the order in which they are dealt.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        limit: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Orders the samples: as they are, or spread evenly over the split where ``limit`` allows only some.

        The arguments are the class's.
        """
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.share = math.ceil(length / world_size)  # samples of each rank, with padding
        if not isinstance(limit, int):
            limit = max(1, int(limit * len(self)))
        self.used = min(len(self), limit)
        self.order = np.arange(length)
        if self.used < len(self):
            # The fractions of start + n GOLDEN are spread evenly, so their ranks are a spread order of the samples.
            start = np.random.default_rng([seed, 4]).random()
            places = (start + self.order * GOLDEN) % 1
            self.order = places.argsort().argsort()

    def __len__(self) -> int:
        return math.ceil(self.share / self.batch_size)

    @property
    def pictures(self) -> int:
        """Samples of the batches that are used, over all ranks, without padding."""
        return min(self.length, self.used * self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        """The keys of each batch of this process: every ``world_size``-th sample; padding (view -1) comes last."""
        padding = (0, -1)
        for start in range(0, self.share, self.batch_size):
            end = min(self.share, start + self.batch_size)
            first = self.rank + start * self.world_size
            last = end * self.world_size
            keys = []
            for number in range(first, last, self.world_size):
                key = padding
                if number < self.length:
                    key = (int(self.order[number]), 0)
                keys.append(key)
            yield keys
