"""Which models of a run are compiled, where ``compile=auto`` leaves it to the machine."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from kd.clock import part_of_the_start
from kd.data.datamodule import DistillationDataModule
from kd.distill.sharding import Sharding
from kd.distill.student import Student
from kd.errors import UserError
from kd.fit_to_machine.measure import (
    NEAR,
    AttachedModule,
    a_batch,
    batches_of,
    clock,
    learner,
    median_ms,
)
from kd.models.compiled import compile_in_place
from kd.processes import by_first
from kd.progress import part_begins
from kd.teachers import FrozenTeacher

PLAIN = "default"
GRAPHS = "reduce-overhead"
"""Modes of ``torch.compile``; the second one replays CUDA graphs, which the host launches at once."""
STUDENT = "model.student"
AS_WRITTEN = ""
"""Stands for a model that is not compiled."""
WORTH_TRYING_S = 300.0
"""Seconds that a model computes over the whole run, from which compiling is tried: that takes about a minute."""
LAUNCHING = 0.9  # share of a call's time for the host's launches, from which the GPU counts as waiting for the host


def choose_compilation(
    run: AttachedModule, data: DistillationDataModule, live: bool
) -> dict[str, str]:
    """Times the models that ``compile=auto`` leaves to the machine: as they are written, and compiled where they compute for
    :data:`WORTH_TRYING_S` and more.

    Only on a GPU, and not where ``trainer.deterministic`` asks for equal numbers from run to run: which mode is faster may
    differ between two runs. Rank 0 times them, on a batch of training pictures, and prints a line for each; every rank must
    call this. The models stay as they are.

    Args:
        run: the module, attached to its trainer; its models are on their devices.
        data: of the run; its batch size is set.
        live: whether the teacher answers in each epoch; one behind a cache is not compiled.

    Returns:
        A mode, or :data:`AS_WRITTEN`, by the model's key: ``model.student``, ``model.teacher``, ``model.teachers.NAME``;
        {} where nothing is to be timed.
    """
    if not may_compile(run.trainer):
        return {}
    keys = [key for key, _ in _left_to_the_machine(run) if live or key == STUDENT]
    if not keys:
        return {}
    chosen = by_first(run.trainer.strategy, partial(_fastest_modes, run, data, keys))
    if run.trainer.is_global_zero:
        for key, (_, why) in chosen.items():
            print(f"{key}.compile: {why}", flush=True)
    return {key: mode for key, (mode, _) in chosen.items()}


def compile_chosen(run: AttachedModule, chosen: Mapping[str, object]) -> dict[str, str]:
    """Compiles in place, in its chosen mode, each model that ``compile=auto`` leaves to the machine; one without a mode runs
    as it is written. Nothing is done where :func:`may_compile` is False.

    What a compiler refuses in training runs as it is written, and torch says so: where a model is compiled, torch's
    ``suppress_errors`` is set, for the whole process.

    Args:
        run: the module, attached to its trainer.
        chosen: by :func:`choose_compilation`, now or in the run that this one resumes.

    Raises:
        UserError: a mode other than :data:`PLAIN`, :data:`GRAPHS` and :data:`AS_WRITTEN`.

    Returns:
        The modes of the models that are compiled, by key; {} for none.
    """
    if not may_compile(run.trainer):
        return {}
    compiled = {}
    for key, owner in _left_to_the_machine(run):
        mode = chosen.get(key, AS_WRITTEN)
        if mode not in (AS_WRITTEN, PLAIN, GRAPHS):
            raise UserError(
                f"resume: the checkpoint's {key}.compile must be {PLAIN} or {GRAPHS}, got {mode!r:.60}"
            )
        compile_in_place(owner.model, mode or False)
        if mode:
            compiled[key] = mode
            torch._dynamo.config.suppress_errors = True
    return compiled


def may_compile(trainer: Trainer) -> bool:
    """Whether ``auto`` compiles anything: on a GPU, where numbers need not be equal from run to run."""
    is_gpu = trainer.strategy.root_device.type == "cuda"
    return is_gpu and not torch.are_deterministic_algorithms_enabled()


def _left_to_the_machine(run: AttachedModule) -> Iterator[tuple[str, Student | FrozenTeacher]]:
    """The key and the owner of each model with ``compile=auto``, student first; models in shards are left out."""
    student = run.student
    is_cut = isinstance(run.trainer.strategy, Sharding)
    if student.spec is not None and student.spec.compile == "auto" and not is_cut:
        yield STUDENT, student
    if run.teacher is None:
        return
    for member in run.teacher.members.values():
        is_left = isinstance(member, FrozenTeacher) and member.spec.compile == "auto"
        if is_left and not member.is_shared_out:
            yield member.key, member


@part_of_the_start("choice of compilation")
def _fastest_modes(
    run: AttachedModule, data: DistillationDataModule, keys: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """The fastest mode of each model in ``keys``, and a line that says why; called by the first process alone."""
    device = run.trainer.strategy.root_device
    images = a_batch(data).to(device)
    batches = batches_of(run.trainer, data)
    alone = run.trainer.world_size == 1 and run.trainer.accumulate_grad_batches == 1
    chosen = {}
    for key, owner in _left_to_the_machine(run):
        if key not in keys:
            continue
        part_begins(f"{key}: measuring whether compiling pays")
        ready = partial(_part_of_a_step, run, owner, images)
        chosen[key] = fastest_mode(ready, batches, device, graphs=alone)
    return chosen


def _part_of_a_step(
    run: AttachedModule, owner: Student | FrozenTeacher, images: Tensor, mode: str
) -> Callable[[], object]:
    """A function without arguments that runs ``images`` through a copy of the owner's model, compiled in ``mode``.

    A student runs forward and backward, a teacher forward alone.
    """
    if isinstance(owner, Student):
        return partial(learner(run, images.device, mode or False), images)
    teacher = copy.copy(owner)
    teacher.model = copy.deepcopy(owner.model)
    compile_in_place(teacher.model, mode or False)
    return partial(teacher, images)


def fastest_mode(
    ready: Callable[[str], Callable[[], object]],
    batches: int,
    device: torch.device,
    graphs: bool,
) -> tuple[str, str]:
    """The mode in which a model is fastest over a run, and the reason, which begins with the setting's value.

    :data:`AS_WRITTEN` where the model computes for less than :data:`WORTH_TRYING_S`, or no mode is :data:`NEAR` times as
    fast. A mode that fails is left out, with its error in the reason. The time of compiling itself decides nothing.

    Args:
        ready: takes a mode, and returns a function that runs the model, in this mode, on a batch.
        batches: how many the run has.
        device: of the model.
        graphs: whether CUDA graphs may be tried, where the host's launches take the time.
    """
    as_written = ready(AS_WRITTEN)
    best, best_ms = AS_WRITTEN, median_ms(as_written, device)
    computing_s = batches * best_ms / 1000
    times = [f"{best_ms:.1f} ms a batch as it is written"]
    if computing_s < WORTH_TRYING_S:
        return best, f"false: the run's {batches:,} batches take {computing_s:.0f} s of it"
    modes = [PLAIN]
    if graphs and _launching_share(as_written, device) >= LAUNCHING:
        modes.append(GRAPHS)
    for mode in modes:
        begin = clock(device)
        try:
            call = ready(mode)
            call()
            made_s = clock(device) - begin
            ms = median_ms(call, device)
        except Exception as error:  # whatever a compiler, or the memory, refuses
            reason = str(error).strip().splitlines() or [type(error).__name__]
            times.append(f"{mode} fails ({reason[0]:.120})")
            continue
        finally:
            torch._dynamo.reset()
        times.append(f"{ms:.1f} ms {mode} (compiled in {made_s:.0f} s)")
        if ms * NEAR < best_ms:
            best, best_ms = mode, ms
    return best, f"{best or 'false'}: {', '.join(times)}"


def _launching_share(call: Callable[[], Any], device: torch.device) -> float:
    """Share of a call's time, in 0..1, that the host takes to launch its work; near 1 the GPU waits for the host."""
    begin = clock(device)
    call()
    launched = clock(torch.device("cpu")) - begin
    return launched / (clock(device) - begin)
