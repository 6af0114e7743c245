"""Trains a run; reports in one line how a failed run is resumed."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from kd.callbacks.preemption import RunStopped
from kd.data.sources import printable, said
from kd.errors import RunError, UserError, cause_of_kind, plain, reason
from kd.launch import sagemaker
from kd.launch.child import end_with_starter, leave_starter, trains_teacher
from kd.launch.cluster import is_rank_zero
from kd.launch.loopback import meet_on_loopback
from kd.report.terminal import print_summary
from kd.run.labels_alone import compare_with_labels_alone
from kd.run.place import finished_before
from kd.run.run import Run
from kd.storage.checkpoints import LAST


def fit(run: Run) -> int:
    """Trains a run that was built, in each of its processes; its mirror and its folder's lock are closed whatever happens.

    After a training that has ended well the first process compares it with labels alone, where the settings say so.

    Returns:
        The exit status of :func:`_fit`; 1 in place of 0 where the mirror could not be completed.

    Raises:
        UserError: as of :func:`_fit`, or of :func:`kd.run.labels_alone.compare_with_labels_alone`.
        Stopped: as of the latter.
    """
    status = 1
    end_with_starter()
    try:
        status = _fit(run, run.place.checkpoint)
        if status == 0 and run.trainer.is_global_zero and run.folder.path is not None:
            compare_with_labels_alone(run, run.folder.path)
    finally:
        try:
            if run.folder.mirror is not None and not run.folder.mirror.close():
                status = status or 1
        finally:
            run.folder.release()
            leave_starter()
    return status


def _say_data(run: Run, say: Callable[..., None]) -> None:
    """Reports the data: pictures, classes, what is left out, held out or shared between splits, and limited epochs.

    ``say`` is ``print`` on the first process and does nothing on others; all call this, as lists are read together.
    """
    info = run.data.info
    splits = run.data.splits
    say(f"data: {run.data.source.describe()}", flush=True)
    without = f" ({info.unlabeled} without a label)" if info.unlabeled else ""
    labels = "no labels"
    if info.classes:
        labels = f"{len(info.classes)} {run.data.source.kind.counted}"
    left_out = ""
    if splits.skipped:
        examples = "; ".join(splits.skipped[:3])
        left_out = f", {len(splits.skipped)} damaged left out ({examples})"
    notes = [
        f"{info.train} training{without} and {info.val} validation pictures, {labels}{left_out}"
        f"{said(splits.left_out)}",
        *run.data.source.notes,
    ]
    if splits.holds_out:
        notes.append(
            f"no validation pictures found: {info.val} training pictures are held out (data.val_fraction)"
        )
    if splits.shared:
        held_out, trained = map(printable, splits.shared[0])
        same = "" if held_out == trained else f" ({trained})"
        notes.append(
            f"warning: {len(splits.shared)} of {info.val} validation pictures are training pictures too, "
            f"for example {held_out}{same}"
        )
    notes.append(run.module.task.note_on_labels(info.labels))
    short = []
    for name in ("limit_train_batches", "limit_val_batches"):
        limit = getattr(run.trainer, name)
        if limit != 1.0 or isinstance(limit, int):  # 1.0 is all batches, 1 a single one
            short.append(f"trainer.{name}={limit}")
    if short:
        notes.append(f"an epoch is limited: {', '.join(short)}")
    for note in filter(None, notes):
        say(f"      {note}")


def _all_done(run: Run) -> str:
    """A message for a resumed run that has no step left to make; "" where it has one.

    With a message, the run's folder and summary become those of the finished run.
    """
    folder = run.folder.resume
    finished = finished_before(folder, run.config["trainer"]) if folder else None
    if finished is None:
        return ""
    run.folder.path = folder
    run.summary.content = finished.summary
    return finished.message


def _fit(run: Run, resume_from: Path | None) -> int:
    """Trains, from a checkpoint where one is given; returns the exit code.

    Returns:
        0 when trained or when no step was left; 130 or 143 after a signal outside kd's training steps; that of
        :func:`_ended_by` after an error, a signal in a step, or a stop by a rule of the monitor.

    Raises:
        UserError: a user's mistake, or a checkpoint that can't be loaded. Another error before the run's folder has
            begun is raised as it is.
    """
    say = print if is_rank_zero() else lambda *_, **__: None
    if resume_from and resume_from.name == LAST and (done := _all_done(run)):
        say(done, flush=True)
        if is_rank_zero():
            run.folder.follow()  # sends what the store lacks
        return 0
    run.data.prepare_data()  # in each process, before a trainer that would wait for the others
    _say_data(run, say)
    if run.precision_note:
        say(run.precision_note)
    run.module.resumed = resume_from is not None
    try:
        if resume_from and is_rank_zero():
            run.folder.lock()
        meet_on_loopback(run.trainer)
        run.trainer.fit(run.module, datamodule=run.data, ckpt_path=resume_from, weights_only=True)
    except SystemExit as stop:  # Lightning's answer to a signal outside our own training steps
        say("kd-train: interrupted", file=sys.stderr)
        if type(stop).__name__ == "SIGTERMException":
            return 143
        return 130
    except UserError:
        raise
    except Exception as error:
        return _ended_by(run, error, resume_from, say)
    if run.trainer.is_global_zero and run.folder.path is not None:
        print_summary(run.summary.content, run.folder.path, of_teacher=trains_teacher())
    return 0


def _ended_by(
    run: Run, error: Exception, resume_from: Path | None, say: Callable[..., None]
) -> int:
    """Reports why a run ended before its time, and how it is resumed; returns the exit status.

    Args:
        run: the training.
        error: that ended it.
        resume_from: the checkpoint that it was resumed from; None: it began anew.
        say: prints a line, on the first process alone.

    Returns:
        0 after a stop by a rule of the monitor, that of :func:`_status_of_stop` after a signal, 1 after a failure.

    Raises:
        UserError: a checkpoint that can't be loaded, or what the Trainer has against an argument; the run has no folder.
        Exception: ``error`` itself, where nothing is known of it and the run has no folder.
    """
    stop = run.summary.preemption.interruption(error)
    known = cause_of_kind(error, RunError)
    if stop is not None:
        kept = stop.checkpoint.is_file()
        where = f"checkpoint: {stop.checkpoint}" if kept else "no checkpoint yet"
        whose = "the teacher's training was " if trains_teacher() else ""
        say(f"\nkd-train: {whose}{stop} at step {run.trainer.global_step}; {where}")
        by_rule = isinstance(stop, RunStopped)
        if by_rule and run.trainer.is_global_zero and run.folder.path is not None:
            print_summary(run.summary.content, run.folder.path)
        if kept and not trains_teacher():  # else the run that needs the teacher says how
            say(f"kd-train: to resume: kd-train resume={run.folder.path}")
        return 0 if by_rule else _status_of_stop(stop.signal_number)
    if run.folder.begun or known is not None:
        _tell_failure(run, known or error)
    elif resume_from:
        raise UserError(f"resume: {resume_from} can't be loaded: {plain(error)}") from error
    elif str(error).lstrip().startswith("`"):  # Lightning's, about an argument of its trainer
        raise UserError(f"trainer: {plain(error)}") from error
    else:
        raise error
    return 1


def _tell_failure(run: Run, error: Exception) -> None:
    """Reports a failure on standard error, and to SageMaker, with the file of its traceback where the folder has begun, and
    on rank 0 how to resume.

    Each rank reports its own: rank 0 may be the one that is gone.
    """
    rank = run.trainer.global_rank
    who = "kd-train"
    file = "error.txt"
    if rank:
        who = f"kd-train: rank {rank}"
        file = f"error.rank{rank}.txt"
    folder = run.folder.path
    print(f"{who}: failed: {reason(error)}", file=sys.stderr)
    sagemaker.tell_failure(reason(error))
    if folder is None or not run.folder.begun:
        return
    if (folder / file).is_file():  # a full disk has none
        print(f"{who}: the traceback is in {folder / file}", file=sys.stderr)
    last = folder / "checkpoints" / LAST
    if rank == 0 and last.is_file() and not trains_teacher():
        how = f"kd-train resume={folder}"
        print(f"{who}: to resume from the last checkpoint: {how}", file=sys.stderr, flush=True)


def _status_of_stop(signal_number: int) -> int:
    """128 + signal; but 0 on Lightning's child processes, whose parent takes any other for a crash."""
    # launchers that have started each process: then none is Lightning's child
    others = {"TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}
    is_child = os.environ.get("LOCAL_RANK", "0") != "0" and not others & os.environ.keys()
    return 0 if is_child else 128 + signal_number
