"""The order of samples: a function of (seed, epoch) alone, the same for every number of processes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch.utils.data import Sampler

Key = tuple[int, int]
"""(index, view), with which a data set is indexed. The view is the epoch, or ``epoch % views`` with a fixed number of
views; a sample that repeats within an epoch gets another view (:data:`TURN`). Padding has view -1."""
TURN = (
    2**32
)  # added to the view for each repetition of a sample in an epoch: more than there are epochs

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: the first n multiples of it, modulo 1, are spread evenly over [0, 1) for every n."""


@dataclass(eq=False)
class TrainBatches(Sampler[list[Key]]):
    """Shuffled batches of one process; the last, incomplete global batch of an epoch is dropped.

    The order of an epoch is a permutation seeded by (seed, epoch). Global batch ``b`` is its slice ``[b * G, (b + 1) *
    G)`` with ``G = batch_size * world_size``; each rank takes its contiguous share.

    Unlabelled samples are numbered from ``length`` on. An epoch is a permutation of them alone (``ratio`` None), or all
    labelled samples and ``ratio`` times as many unlabelled ones in one shuffled order. They come from an endless
    sequence of permutations, so that all are seen equally often. With ``paired`` (mixed in pairs; needs an even batch
    size) a sample is in one pair of an epoch only, because its view may repeat: an epoch that needs more unlabelled
    samples than there are repeats whole pairs.

    With ``views``, views repeat after so many epochs (cached answers). With ``classes``, the class of each labelled
    sample, all classes are seen equally often: an epoch keeps its length, takes another part of a large class each
    time, and repeats the samples of a small one. ``repeats``: every epoch shows the first one's samples and views.

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
    epoch: int = field(default=0, init=False)
    repeats: bool = field(default=False, init=False)
    resume_at: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        given = self.classes
        self.groups = (
            [] if given is None else [np.flatnonzero(given == c) for c in np.unique(given)]
        )

    @property
    def sampler(self) -> "TrainBatches":
        """Itself: Lightning looks for ``batch_sampler.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration gives."""
        self.epoch = epoch

    def skip(self, epoch: int, samples: int) -> None:
        """Makes ``epoch`` begin after ``samples`` samples (of all processes), before the trainer sets the epoch."""
        self.resume_at = (epoch, samples)
        self.epoch = epoch

    def batches_before(self, samples: int) -> int:
        """How many batches count as done after ``samples`` samples of an epoch: all but those still to come."""
        step = self.batch_size * self.world_size
        return len(self) - (self.epoch_length() - samples) // step

    def samples_after(self, epoch: int, batches: int) -> int:
        """How many samples of ``epoch`` (of all processes) are done after ``batches`` batches."""
        step = self.batch_size * self.world_size
        if self.resume_at is None or self.resume_at[0] != epoch:
            return batches * step
        return self.resume_at[1] + (batches - self.batches_before(self.resume_at[1])) * step

    def order(self, epoch: int) -> np.ndarray:
        """Indices of an epoch's samples, of all processes: ``(epoch_length(),)``."""
        rng, view = np.random.default_rng([self.seed, epoch]), self.view(epoch)
        if self.paired and view != epoch:
            first = self.order(view)
            even = len(first) - len(first) % 2
            return np.concatenate(
                [rng.permutation(first[:even].reshape(-1, 2)).reshape(-1), first[even:]]
            )
        if not self.unlabelled:
            return rng.permutation(self._labelled(epoch))
        if self.ratio is None:
            return self.length + rng.permutation(self.unlabelled)
        more = self.epoch_length() - self.length
        labelled = self._labelled(epoch)
        if not self.paired:
            return rng.permutation(np.concatenate([labelled, self._in_turn(epoch * more, more)]))
        if more <= self.unlabelled:
            return rng.permutation(np.concatenate([labelled, self._once(epoch, more)]))
        return self._in_whole_pairs(rng, more - self.unlabelled)

    def _labelled(self, epoch: int) -> np.ndarray:
        """The labelled samples of an epoch, all of them or as many of each class."""
        if not self.groups:
            return np.arange(self.length)
        rng = np.random.default_rng([self.seed, epoch, 3])
        count, more = divmod(self.length, len(self.groups))
        turns = [(c + epoch) % len(self.groups) < more for c in range(len(self.groups))]
        shares = [
            np.resize(rng.permutation(g), count + turn)
            for g, turn in zip(self.groups, turns, strict=True)
        ]
        return np.concatenate(shares)

    def view(self, epoch: int) -> int:
        """Number of the view that an epoch shows: the epoch itself, or one of ``views`` where a cache repeats them."""
        return epoch % self.views if self.views else epoch

    def _in_turn(self, first: int, count: int) -> np.ndarray:
        """``count`` unlabelled samples from position ``first`` of the endless sequence of permutations."""
        passes = range(first // self.unlabelled, (first + count - 1) // self.unlabelled + 1)
        drawn = [
            np.random.default_rng([self.seed, i, 1]).permutation(self.unlabelled) for i in passes
        ]
        start = first % self.unlabelled
        return self.length + np.concatenate([*drawn, np.empty(0, int)])[start : start + count]

    def _once(self, epoch: int, count: int) -> np.ndarray:
        """An epoch's ``count`` unlabelled samples, leaving out repetitions."""
        drawn = self._in_turn(epoch * count, count + self.unlabelled)
        _, first = np.unique(drawn, return_index=True)
        return drawn[np.sort(first)][:count]

    def _in_whole_pairs(self, rng: np.random.Generator, repeated: int) -> np.ndarray:
        """All samples once, and pairs of unlabelled ones again, ``repeated`` (even) samples more."""
        unlabelled = self.length + rng.permutation(self.unlabelled)
        pairs = unlabelled[: self.unlabelled // 2 * 2].reshape(-1, 2)
        rest = rng.permutation(np.concatenate([np.arange(self.length), unlabelled[pairs.size :]]))
        even = len(rest) // 2 * 2
        again = np.resize(pairs, (repeated // 2, 2))
        order = rng.permutation(np.concatenate([rest[:even].reshape(-1, 2), pairs, again]))
        return np.concatenate([order.reshape(-1), rest[even:]])

    def epoch_length(self) -> int:
        """Samples of an epoch, before an incomplete global batch is dropped."""
        if not self.unlabelled:
            return self.length
        if self.ratio is None:
            return self.unlabelled
        more = round(self.ratio * self.length)
        if self.paired and more > self.unlabelled:
            repeated = (more - self.unlabelled) // 2 * 2 if self.unlabelled > 1 else 0
            more = self.unlabelled + repeated
        return self.length + more

    def __len__(self) -> int:
        return self.epoch_length() // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, shown = self.epoch, 0 if self.repeats else self.epoch
        order, view = self.order(shown), self.view(shown)
        step = self.batch_size * self.world_size
        done = self.resume_at[1] if self.resume_at and self.resume_at[0] == epoch else 0
        views = np.full(len(order), view)
        if self.views is None and (
            self.groups or self.unlabelled
        ):  # with a cache a repetition has the same view
            views += TURN * _turns(order)
        for start in range(done, self.epoch_length() - step + 1, step):
            mine = start + self.rank * self.batch_size
            there = slice(mine, mine + self.batch_size)
            yield list(zip(order[there].tolist(), views[there].tolist(), strict=True))


def _turns(order: np.ndarray) -> np.ndarray:
    """How often each sample has occurred before in an epoch's order; the shape of ``order``."""
    sorting = np.argsort(order, kind="stable")
    of_sample = order[sorting]
    turns = np.empty(len(order), int)
    turns[sorting] = np.arange(len(order)) - np.searchsorted(of_sample, of_sample)
    return turns


class EvalBatches(Sampler[list[Key]]):
    """Every sample once, in order, dealt to the ranks in turn.

    All ranks give equally many batches of the same sizes, padded with samples whose view is -1, which the data set
    marks with the index -1. With a ``limit`` (as Lightning's ``limit_val_batches``) the order is interleaved, seeded by
    ``seed``, so that the first samples are spread evenly over a set that is sorted by class.

    Args:
        length: samples in the set.
        batch_size: samples a batch of one process.
        rank: of this process.
        world_size: number of processes.
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
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size = rank, world_size
        self.used = min(
            len(self), limit if isinstance(limit, int) else max(1, int(limit * len(self)))
        )
        self.order = np.arange(length)
        if self.used < len(self):
            places = (np.random.default_rng([seed, 4]).random() + self.order * GOLDEN) % 1
            self.order = places.argsort().argsort()

    def __len__(self) -> int:
        share = -(-self.length // self.world_size)
        return -(-share // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        share = -(-self.length // self.world_size)
        mine = [self.rank + i * self.world_size for i in range(share)]
        keys = [(int(self.order[i]), 0) if i < self.length else (0, -1) for i in mine]
        for start in range(0, share, self.batch_size):
            yield keys[start : start + self.batch_size]
