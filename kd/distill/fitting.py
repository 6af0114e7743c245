"""Whether losses, task, data and teachers fit each other; what does not fit is reported by its key."""

from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from kd.data.info import DataInfo
from kd.data.targets import other_targets
from kd.errors import UserError, among
from kd.losses import DistillLoss, LogitLoss
from kd.losses.base import class_name
from kd.tasks import Task
from kd.teachers import RunTeacher
from kd.teachers.answer import ALL


def check_apart(student: nn.Module, teacher: RunTeacher | None) -> None:
    """Checks that a student has its parameters and buffers for itself: training them would change the teacher.

    Raises:
        UserError: it shares some with a teacher's model.
    """
    places = set()
    if teacher is not None:
        for member in teacher.members.values():
            places |= set(_places(member.model).values())
    shared = [name for name, place in _places(student).items() if place in places]
    if shared:
        raise UserError(
            f"student: shares {len(shared)} of its parameters and buffers with the teacher ({', '.join(shared[:3])}"
            f"{', ...' if len(shared) > 3 else ''}), which training would change: give it its own by copy.deepcopy"
        )


def _places(model: nn.Module) -> dict[str, int]:
    """Where a model's parameters and buffers are in memory, by name; without those that have none yet."""
    places = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.numel() and tensor.data_ptr():
            places[name] = tensor.data_ptr()
    return places


def check_task(task: Task, data: DataInfo) -> None:
    """Checks that the data's targets are those that the task needs.

    Raises:
        UserError: they are of another kind.
    """
    if not task.learns_from(data.kind):
        raise other_targets(type(task).__name__, task.kind, data.kind)


def check_listeners(
    teacher_of: Mapping[str, str], losses: nn.ModuleDict, teacher: RunTeacher | None
) -> None:
    """Checks ``model.teacher_of``: losses and the teachers that they read.

    Args:
        teacher_of: the name of a teacher by the name of a loss.
        losses: of the student, by name, also those of weight 0.
        teacher: of the run; None: there is none, so none can be named.

    Raises:
        UserError: a loss or a teacher that does not exist.
    """
    members = []
    if teacher is not None:
        members = list(teacher.members)
    for name, member in teacher_of.items():
        if name not in losses:
            raise UserError(f"model.teacher_of.{name}: loss '{name}' not found{among(losses)}")
        if member not in members or member == ALL:
            raise UserError(
                f"model.teacher_of.{name}: teacher '{member}' not found in model.teachers"
                f"{among([m for m in members if m])}"
            )


def check_loss(
    key: str, loss: DistillLoss, task: Task, data: DataInfo, teacher: RunTeacher | None
) -> None:
    """Checks that a loss is defined for the task, the data's labels and the teacher.

    Args:
        key: the loss's setting, which begins the message.
        loss: of the student.
        task: may refuse losses over logits.
        data: says whether pictures have labels, and whether these are mixed.
        teacher: must have a classifier for losses over logits; None: not checked here (:meth:`Objective.bind`
            refuses losses without a teacher).

    Raises:
        UserError: the task refuses it, the labels are not those that it reads, or the teacher has no classifier.
    """
    kind = class_name(loss)
    if isinstance(loss, LogitLoss) and (refused := task.refuses(loss)):
        raise UserError(f"{key}: {kind} {refused}")
    _check_labels(key, loss, task, data)
    if isinstance(loss, LogitLoss) and teacher is not None and not teacher.has_head:
        raise UserError(
            f"{key}: needs a teacher with a classifier, and model.teacher.head=false has none"
        )


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
        if getattr(loss, "gather", False):
            pictures = batch_size * processes
        if pictures < loss.least_batch:
            wants = f"must give {class_name(loss)} (model.distill_losses.{name}) {loss.least_batch} pictures"
            raise UserError(f"data.batch_size: {wants} at least, got {pictures}")


def _check_labels(key: str, loss: DistillLoss, task: Task, data: DataInfo) -> None:
    """Checks that the data's pictures have the labels that a loss reads; raises a UserError.

    Args:
        key: of the loss's settings, for the message.
        loss: of a student.
        task: says whether pictures have class ids.
        data: says whether they have labels.
    """
    if loss.needs_class_ids:
        needed = "a class id"
    elif loss.needs_labels:
        needed = "a label"
    else:
        return
    if loss.needs_class_ids and data.soft_targets:
        reason = "mixes labels (data.augment.mixup=0 data.augment.cutmix=0)"
    elif task.no_class_id:
        reason = task.no_class_id
    elif not data.labels or data.unlabeled:
        reason = "has pictures without a label"
    else:
        return
    raise UserError(f"{key}: {class_name(loss)} needs {needed} for each picture, the data {reason}")
