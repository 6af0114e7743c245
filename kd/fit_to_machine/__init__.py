"""What is left to the machine (``auto``): measured before training."""

from kd.clock import part_of_the_start
from kd.data.datamodule import DistillationDataModule
from kd.distill.fitting import check_batch
from kd.errors import UserError
from kd.fit_to_machine.measure import (
    cache_pays,
    fastest_num_workers,
    largest_batch_size,
    pixels_pay,
)
from kd.fit_to_machine.memory import AttachedModule, Memory
from kd.processes import from_first
from kd.teachers import RunTeacher, caches_of, open_cache, reading_of

__all__ = ["Memory", "apply_auto", "restore_auto"]


def apply_auto(run: AttachedModule, data: DistillationDataModule) -> RunTeacher | None:
    """Measures what the settings leave to it; the teacher, behind a cache of its answers where that is set, or pays."""
    _tune(run, data)
    for student in run.students.named().values():
        check_batch(student.objective.active, data.batch_size, run.trainer.world_size)
    return _in_view(
        _choose_cache(run, run.teacher, data)
        if run.teacher and run.students.wanted
        else run.teacher,
        data,
    )


def _in_view(
    answering_teacher: RunTeacher | None, data: DistillationDataModule
) -> RunTeacher | None:
    """Only a cache wants to see the same views again."""
    data.views = next((cache.views for cache in caches_of(answering_teacher).values()), None)
    data.reading = reading_of(answering_teacher)
    return answering_teacher


@part_of_the_start("choice of batch size and loader processes")
def _tune(run: AttachedModule, data: DistillationDataModule) -> None:
    """Sets what ``data`` leaves to be measured: the batch size on rank 0, loader processes on all ranks at once.

    Raises:
        UserError: a batch size that the learning rate does not follow.
    """
    for name, student in run.students.named().items():
        if "batch_size" in data.auto and student.optim.lr_batch is None:
            of = f" of {name}" if name else ""
            raise UserError(
                f"optim.lr_batch{of}: say which global batch optim.lr={student.optim.lr:g} is meant for; "
                "data.batch_size=auto changes the batch"
            )
    for name, measure in (("batch_size", largest_batch_size), ("num_workers", fastest_num_workers)):
        if name not in data.auto:
            continue
        value = getattr(data, name)
        if run.trainer.is_global_zero or name == "num_workers":
            value, why = measure(run, data)
            if run.trainer.is_global_zero:
                print(why, flush=True)
        setattr(data, name, from_first(run.trainer.strategy, value))


@part_of_the_start("choice of the teacher's cache")
def _choose_cache(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule
) -> RunTeacher:
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
    if modes == {"auto"}:
        answer = cache_pays(run, teacher, data) if run.trainer.is_global_zero else (False, "")
        pays, why = from_first(run.trainer.strategy, answer)
        if run.trainer.is_global_zero:
            print(f"cache: {why}", flush=True)
        if not pays:
            return teacher
    return _cache(run, teacher, data, announce=run.trainer.is_global_zero)


def restore_auto(
    run: AttachedModule,
    answering_teacher: RunTeacher | None,
    data: DistillationDataModule,
    before: bool,
) -> RunTeacher | None:
    """The teacher with or without a cache as the resumed run began (``before``), where ``cache=auto`` chose."""
    teacher, now = run.teacher, answering_teacher is not run.teacher
    if teacher is None or before == now or teacher.cache_modes != {"auto"}:
        return answering_teacher
    if run.trainer.is_global_zero:
        print(f"cache: {'on' if before else 'off'} nevertheless, as in the resumed run", flush=True)
    return _in_view(_cache(run, teacher, data) if before else teacher, data)


def _cache(
    run: AttachedModule, teacher: RunTeacher, data: DistillationDataModule, announce: bool = False
) -> RunTeacher:
    pixels = False
    if "auto" in {member.spec.cache_pixels for member in teacher.members.values()}:
        answer = pixels_pay(run, teacher, data) if run.trainer.is_global_zero else (False, "")
        pixels, why = from_first(run.trainer.strategy, answer)
        if run.trainer.is_global_zero:
            print(f"cache: pixels {why}", flush=True)
    return open_cache(teacher, data, run.students.wanted, announce=announce, auto_pixels=pixels)
