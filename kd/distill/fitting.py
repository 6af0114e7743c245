"""Whether losses, task, data and teachers fit each other; what does not fit is reported by its key."""

from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from kd.data.info import DataInfo
from kd.data.targets import other_targets
from kd.errors import UserError, among
from kd.losses import DistillLoss, LogitLoss
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL


def check_fit(
    task: Task,
    losses: Mapping[str, DistillLoss],
    teacher_of: Mapping[str, str],
    data: DataInfo,
    teacher: RunTeacher | None,
) -> None:
    """Checks that the data's targets are the task's, and that each loss is defined for task, labels and teacher.

    Args:
        task: may refuse losses over logits.
        losses: of the student, by name, also those of weight 0.
        teacher_of: the name of a teacher by the name of the loss that reads it (``model.teacher_of``).
        data: says whether pictures have labels, and whether these are mixed.
        teacher: of the run; None: there is none, so none can be named. Losses over logits need its classifier.

    Raises:
        UserError: the first thing that does not fit, by its key.
    """
    if not task.learns_from(data.kind):
        raise other_targets(type(task).__name__, task.kind, data.kind)
    teachers = teacher.members if teacher is not None else {}
    members = [name for name in teachers if name != ALL]
    for name, member in teacher_of.items():
        if name not in losses:
            raise UserError(f"model.teacher_of.{name}: loss '{name}' not found{among(losses)}")
        if member not in members:
            raise UserError(
                f"model.teacher_of.{name}: teacher '{member}' not found in model.teachers{among(members)}"
            )
    for name, loss in losses.items():
        refused = ""
        if isinstance(loss, LogitLoss):
            refused = task.refuses(loss)
            read = teacher_of.get(name, ALL)  # one of several, or the mean of all
            for member, model in teachers.items():
                if not refused and read in (ALL, member) and not model.has_head:
                    refused = (
                        f"needs a teacher with a classifier, and {model.key}.head=false has none"
                    )
        refused = refused or _lacking_labels(loss, task, data)
        if refused:
            raise UserError(f"model.distill_losses.{name}: {type(loss).__name__} {refused}")


def _lacking_labels(loss: DistillLoss, task: Task, data: DataInfo) -> str:
    """Why the data's labels do not suffice for a loss: the end of a message, after the loss's name; "" where they do."""
    if not (loss.needs_labels or loss.needs_class_ids):
        return ""
    reason = task.no_class_id
    if loss.needs_class_ids and data.soft_targets:
        reason = "mixes labels (data.augment.mixup=0 data.augment.cutmix=0)"
    elif not reason and (not data.labels or data.unlabeled):
        reason = "has pictures without a label"
    if not reason:
        return ""
    needed = "a class id" if loss.needs_class_ids else "a label"
    return f"needs {needed} for each picture, the data {reason}"


def check_apart(student: nn.Module, teacher: RunTeacher | None) -> None:
    """Checks that a student has its parameters and buffers for itself: training them would change the teacher.

    Raises:
        UserError: it shares some with a teacher's model.
    """
    if teacher is None:
        return
    theirs = _names_by_memory(teacher.model)
    shared = [name for place, name in _names_by_memory(student).items() if place in theirs]
    if shared:
        raise UserError(
            f"student: shares {len(shared)} of its parameters and buffers with the teacher ({shared[0]} is the first), "
            "which training would change: give it its own by copy.deepcopy"
        )


def _names_by_memory(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters and buffers by their address in memory; those without memory yet are left out."""
    names = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.numel():
            names[tensor.data_ptr()] = name
    names.pop(0, None)
    return names


def check_batch(losses: Mapping[str, DistillLoss], batch_size: int, processes: int) -> None:
    """Checks that a batch is large enough for losses that compare its samples, over all processes where they gather.

    Args:
        losses: those with a weight, by name.
        batch_size: pictures of one process's batch.
        processes: that train.

    Raises:
        UserError: a loss needs more pictures than it gets.
    """
    for name, loss in losses.items():
        pictures = batch_size
        if loss.gather:
            pictures = batch_size * processes
        if pictures < loss.least_batch:
            kind = type(loss).__name__
            wants = f"must give {kind} (model.distill_losses.{name}) {loss.least_batch} pictures"
            raise UserError(f"data.batch_size: {wants} at least, got {pictures}")
