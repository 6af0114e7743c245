"""What is left to the machine (``auto``): measured before training."""

from functools import partial

from kd.clock import part_of_the_start
from kd.data.datamodule import DistillationDataModule
from kd.distill.fitting import check_batch
from kd.errors import UserError
from kd.fit_to_machine.measure import (
    cache_pays,
    fastest_num_workers,
    largest_batch_size,
)
from kd.fit_to_machine.memory import AttachedModule, Memory
from kd.processes import by_first, from_first
from kd.progress import part_begins
from kd.teachers import RunTeacher, caches_of, open_cache, reading_of

__all__ = ["Memory", "apply_auto", "restore_auto"]


def apply_auto(run: AttachedModule, data: DistillationDataModule) -> RunTeacher | None:
    """Measures and sets what the settings leave to ``auto``: batch size, loader processes, and whether a cache pays.

    The module's ``setup`` calls it before training, on every rank. The order matters: how long loading takes, and so
    whether a cache pays, depends on the batch size and the loader processes.

    Args:
        run: the module, attached to its trainer; its teacher is in place, and its losses are settled unless it resumes.
        data: gets the batch size and workers that were measured, and what :func:`_follow` sets.

    Raises:
        UserError: a batch too small for a loss that compares its samples, or larger than the training set; ``auto`` where
            it can't be measured; ``data.batch_size=auto`` without ``optim.lr_batch``; a cache beside a teacher in shards, or
            one that can't be opened.

    Returns:
        The teacher that answers in training: behind a cache of its answers where a loss reads it and a cache is set, or
        ``auto`` finds that one pays; else the teacher itself. None without a teacher.
    """
    _tune(run, data)
    check_batch(run.student.objective.active, data.batch_size, run.trainer.world_size)
    answering_teacher = run.teacher
    if answering_teacher and run.student.objective.wanted:
        answering_teacher = _choose_cache(run, answering_teacher, data)
    _follow(data, answering_teacher)
    return answering_teacher


def _follow(data: DistillationDataModule, answering_teacher: RunTeacher | None) -> None:
    """Sets ``data.views`` and ``data.reading`` as the teacher's cache needs them; without a cache both become None.

    With a cache the data repeats the views that the cache has answers for, and the loaders read what it keeps. Without one
    each epoch has new views, and pictures are decoded.

    Args:
        data: its ``views`` (how many views of a picture before they repeat; None: they never do) and ``reading`` (how
            loaders read the caches) are set.
        answering_teacher: behind a cache or not; None without a teacher.
    """
    views = [cache.views for cache in caches_of(answering_teacher).values()]
    data.views = next((count for count in views if count is not None), None)
    data.reading = reading_of(answering_teacher)


@part_of_the_start("choice of batch size and loader processes")
def _tune(run: AttachedModule, data: DistillationDataModule) -> None:
    """Measures what ``data`` leaves open, and sets it there on every rank: the batch size, which rank 0 alone measures, and
    the number of loader processes, which all ranks measure at once.

    The batch size comes first: how long a step takes, and so how many loader processes it needs, depends on it. Rank 0
    prints the reason of each choice.

    Raises:
        UserError: a batch size that the learning rate does not follow (``optim.lr_batch`` not given), or one that
            would be tried beside a teacher in shards.
    """
    if "batch_size" in data.auto and run.student.optim.lr_batch is None:
        raise UserError(
            f"optim.lr_batch: say which global batch optim.lr={run.student.optim.lr:g} is meant for; "
            "data.batch_size=auto changes the batch"
        )
    if "batch_size" in data.auto and run.teacher is not None and run.teacher.is_shared_out:
        raise UserError(
            "data.batch_size: auto is not available beside placement=shard (one process tries batches, all hold the "
            "teacher together); give a number"
        )
    for name, measure in (("batch_size", largest_batch_size), ("num_workers", fastest_num_workers)):
        if name not in data.auto:
            continue
        if run.trainer.is_global_zero:
            part_begins(f"measuring data.{name}")
        if name == "num_workers":  # all processes load at once
            value, why = from_first(run.trainer.strategy, measure(run, data))
        else:
            value, why = by_first(run.trainer.strategy, partial(measure, run, data))
        if run.trainer.is_global_zero:
            print(why, flush=True)
        setattr(data, name, value)


@part_of_the_start("choice of the teacher's cache")
def _choose_cache(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule
) -> RunTeacher:
    """The teacher behind its cache where ``cache`` is ``on`` or ``only``, or is ``auto`` and a cache pays; else the
    teacher itself.

    Of several teachers each one whose ``cache`` is ``off`` answers live. For ``auto`` rank 0 measures and prints the reason.

    Raises:
        UserError: a teacher in shards, ``auto`` for some of several teachers only, or a cache that can't be opened; it
            names the key.
    """
    modes = teacher.cache_modes
    if modes == {"off"}:
        return teacher
    if teacher.is_shared_out:
        raise UserError(
            "model.teacher.cache: is not available beside placement=shard (a miss asks one process)"
        )
    if "auto" in modes and len(modes) > 1:
        raise UserError(
            "model.teachers: cache=auto measures all teachers together; give it to all of them or to none"
        )
    on_rank_zero = run.trainer.is_global_zero
    if modes == {"auto"}:
        if on_rank_zero:
            part_begins("cache: measuring whether it pays")
        pays, why = by_first(run.trainer.strategy, partial(cache_pays, run, teacher, data))
        if on_rank_zero:
            print(f"cache: {why}", flush=True)
        if not pays:
            return teacher
    return _behind_cache(run, teacher, data, announce=on_rank_zero)


def restore_auto(
    run: AttachedModule,
    answering_teacher: RunTeacher | None,
    data: DistillationDataModule,
    before: bool,
) -> RunTeacher | None:
    """Where ``cache=auto`` chose: the teacher with a cache if the interrupted run had one, else without.

    A cache repeats its views, so with another choice the resumed run would see other pictures than the interrupted one. The
    module calls this on every rank when a checkpoint is loaded; in a fit :func:`apply_auto` has chosen anew before. Rank 0
    prints a change of that choice.

    Args:
        run: the module, attached to its trainer.
        answering_teacher: the run's teacher, or the cache before it that :func:`apply_auto` has chosen.
        data: where the choice changes, its ``views`` and ``reading`` are set to suit.
        before: whether the interrupted run had a cache.

    Returns:
        The teacher that answers in training; ``answering_teacher`` itself where nothing is to change.

    Raises:
        UserError: the cache can't be opened.
    """
    teacher = run.teacher
    now = answering_teacher is not teacher
    if teacher is None or before == now or teacher.cache_modes != {"auto"}:
        return answering_teacher
    if run.trainer.is_global_zero:
        print(f"cache: {'on' if before else 'off'} nevertheless, as in the resumed run", flush=True)
    as_before = teacher
    if before:
        as_before = _behind_cache(run, teacher, data)
    _follow(data, as_before)
    return as_before


def _behind_cache(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule, announce: bool = False
) -> RunTeacher:
    """The teacher behind a cache of its answers, which also keeps the pixels of views where the settings want that.

    Args:
        run: the module, attached to its trainer.
        teacher: the live one.
        data: the training pictures and views; :func:`_follow` makes it repeat the cache's.
        announce: whether a line about the cache's size is printed before anything is written.

    Raises:
        UserError: the cache can't be opened.
    """
    wanted = run.student.objective.wanted
    return open_cache(teacher, data, wanted, announce=announce)
