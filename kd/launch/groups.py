"""The machines of a SageMaker job and what each of them is for, from its description of the cluster."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kd.errors import UserError
from kd.storage.elsewhere import json_of, text_of

T = TypeVar("T", dict, list)
RESOURCE_FILE = "input/config/resourceconfig.json"  # below base()
OUTSIDE = "KD_OUTSIDE_JOB"
"""Set in a child that trains on its own machine alone (:func:`kd.launch.child.start_kd_train`): SageMaker's files, which
describe the job to every process of the machine, are not about it."""
# what the words in the name of a group of machines say that it is for
_WORDS = {"train": {"train", "training", "trainer", "dnn", "gpu", "gpus"},
          "data": {"data", "cpu", "cpus", "preprocess", "preprocessing"}}  # fmt: skip


def base(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of SageMaker's files in its containers, which exists nowhere else: ``/opt/ml``, or
    ``SAGEMAKER_BASE_DIR``, by which SageMaker's own toolkit moves it.
    """
    return Path(env.get("SAGEMAKER_BASE_DIR", "/opt/ml"))


def job_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder in which SageMaker describes the job that this process belongs to; None elsewhere, and in a child that
    is no process of the job.
    """
    folder = base(env) / "input" / "config"
    if OUTSIDE in env or not folder.is_dir():
        return None
    return folder


@dataclass(frozen=True)
class MachineNames:
    """A job's machines by name."""

    here: str
    """Name of this machine."""
    train: list[str]
    """Machines that train, sorted."""
    data: list[str]
    """Machines that prepare data, sorted."""
    interface: str | None
    """The network interface between them (``eth0``); None: SageMaker does not say."""


def machines(env: Mapping[str, str], resource_file: Path) -> MachineNames | None:
    """The machines of a SageMaker job; None outside such a job, and in a child that is no process of it. Of several instance
    groups one trains, the others prepare data.

    Where both say something, the environment counts before the file; the hosts must be the same in both.

    Args:
        env: the environment, with what SageMaker's toolkits set.
        resource_file: SageMaker's description of the cluster; it may be missing.

    Raises:
        UserError: environment and file name different hosts, or no host; this machine is not one of them; the groups' hosts
            are not the job's; this machine's group is named otherwise than it is listed; not exactly one group is found to
            train, or it has no GPUs while another has.
    """
    if OUTSIDE in env:
        return None
    from_file: dict[str, Any] = {}
    if resource_file.is_file():
        from_file = read_json(text_of(resource_file), str(resource_file), dict)
    hosts = from_file.get("hosts")
    if "SM_HOSTS" in env:
        hosts = read_json(env["SM_HOSTS"], "SM_HOSTS", list)
    if hosts is None:
        return None
    if not hosts:
        raise UserError("SM_HOSTS: names no machine")
    if sorted(from_file.get("hosts", hosts)) != sorted(hosts):
        raise UserError(
            f"SM_HOSTS: {', '.join(hosts)}, but {resource_file} has {', '.join(from_file['hosts'])}"
        )
    here = env.get("SM_CURRENT_HOST", from_file.get("current_host", ""))
    if here not in hosts:
        raise UserError(
            f"SM_CURRENT_HOST: '{here}' is none of the job's hosts {', '.join(sorted(hosts))}"
        )
    interface = env.get("SM_NETWORK_INTERFACE_NAME", from_file.get("network_interface_name"))
    listed = from_file.get("instance_groups") or []
    if "SM_INSTANCE_GROUPS_DICT" in env:
        by_name = read_json(env["SM_INSTANCE_GROUPS_DICT"], "SM_INSTANCE_GROUPS_DICT", dict)
        listed = list(by_name.values())
    groups = {group["instance_group_name"]: sorted(group["hosts"]) for group in listed}
    if not groups:
        groups = {"train": sorted(hosts)}
    grouped = sorted(host for names in groups.values() for host in names)
    if grouped != sorted(hosts):
        raise UserError(
            f"instance_groups: their hosts are {', '.join(grouped)}, the job's {', '.join(sorted(hosts))}"
        )
    current = _group_of_this_machine(env, from_file, groups, here)
    train = groups[_training_group(groups, current, env.get("KD_ROLE"))]
    _check_types(listed, train)
    return MachineNames(here, train, sorted(set(hosts) - set(train)), interface)


def read_json(text: str, where: str, kind: type[T]) -> T:
    """The list or mapping in a JSON text that SageMaker, or ``kd-launch``, has written.

    Args:
        text: JSON.
        where: the file or variable that it is from, for the message.
        kind: ``dict`` or ``list``, which it must be.

    Raises:
        UserError: it is not JSON, or of another kind.
    """
    try:
        content = json_of(text)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from error
    if not isinstance(content, kind):
        expected = "list" if kind is list else "mapping"
        raise UserError(f"{where}: must be a {expected}, got {text[:100]}")
    return content


def _group_of_this_machine(
    env: Mapping[str, str], from_file: Mapping[str, Any], groups: Mapping[str, list[str]], here: str
) -> str:
    """The name of this machine's group: the one that lists it. Variables and file must not name another.

    Args:
        env: the process's environment.
        from_file: SageMaker's ``resourceconfig.json``.
        groups: host names by group.
        here: this machine's host name, in one of the groups.

    Raises:
        UserError: there are several groups, and a variable or the file names another one than the one that has ``here``.
    """
    group = next(name for name, hosts in groups.items() if here in hosts)
    names = {
        from_file.get("current_group_name"),
        from_file.get("current_instance_group"),
        env.get("SM_CURRENT_INSTANCE_GROUP"),
    }
    wrong = names - {None, "", group}
    if wrong and len(groups) > 1:
        raise UserError(
            f"current_group_name: {', '.join(map(str, wrong))}, but {here} is listed in '{group}'"
        )
    return group


def _training_group(groups: Mapping[str, list[str]], current: str, role: str | None) -> str:
    """The name of the group that trains.

    A single group trains, whatever its name. Of several it is the one whose name has a word for training; for this machine's
    group ``KD_ROLE`` decides instead of its name. Without such a group, it is the only one whose name says nothing.

    Args:
        groups: host names by group.
        current: this machine's group.
        role: its ``KD_ROLE``; None: not set.

    Raises:
        UserError: none of them (also a single group with the role ``data``), or more than one.
    """
    roles = {name: _role_by_name(name) for name in groups}
    if len(groups) == 1:
        roles = {current: "train"}
    if role:
        roles[current] = role
    training = [name for name in roles if roles[name] == "train"]
    if not training:
        training = [name for name in roles if roles[name] is None]
    if len(training) != 1:
        what = "none of them trains"
        if training:
            what = f"'{', '.join(training)}' would train"
        raise UserError(
            f"instance_groups: {', '.join(groups)}: {what}; one must, and it alone: name it train and the "
            "others data, or set KD_ROLE=train or data on each machine"
        )
    return training[0]


def _role_by_name(group: str) -> str | None:
    """What the words in a group's name say that it is for, ``train`` or ``data``; None where they say nothing, or both.

    ``gpu-group-1`` trains; ``mygpus`` says nothing, as it is another word.
    """
    words = set(re.split(r"[^a-z]+", group.lower()))
    roles = [role for role in _WORDS if _WORDS[role] & words]
    if len(roles) == 1:
        return roles[0]
    return None


def _check_types(groups: list[dict[str, Any]], train: list[str]) -> None:
    """Refuses to train on machines without GPUs while others have some.

    Args:
        groups: as SageMaker lists them, with ``instance_group_name``, ``instance_type`` and ``hosts``; [] without groups.
        train: host names of the machines that train: all of one group, sorted.

    Raises:
        UserError: the training group's type has no GPU and another's has; what is no name of an AWS type passes.
    """
    with_gpus = []
    training: dict[str, Any] = {}
    for group in groups:
        if has_gpus(group.get("instance_type", "")):
            with_gpus.append(group["instance_group_name"])
        if sorted(group["hosts"]) == train:
            training = group
    if with_gpus and has_gpus(training.get("instance_type", "")) is False:
        raise UserError(
            f"instance_groups: '{training['instance_group_name']}' would train on "
            f"{training['instance_type']}, which has no GPU, while {', '.join(with_gpus)} has"
        )


def has_gpus(instance_type: str) -> bool | None:
    """Whether an instance of AWS has NVIDIA GPUs, by its family; None for what is no such name.

    Families of the letters p, g and gr have them, but for g4ad, which has AMD's.

    Args:
        instance_type: ``p4d.24xlarge``, or as SageMaker writes it, ``ml.p4d.24xlarge``.

    >>> has_gpus("ml.p5.48xlarge"), has_gpus("ml.g6e.xlarge"), has_gpus("ml.m7i.large"), has_gpus("ml.trn1.2xlarge")
    (True, True, False, False)
    >>> has_gpus("my-machine") is None
    True
    """
    size = r"(?:\d*x?large|medium|small|micro|nano|metal[\w-]*)"
    match = re.fullmatch(rf"(?:ml\.)?([a-z]+)\d[\w-]*\.{size}", instance_type)
    is_amd = "g4ad." in instance_type
    if match:
        return match[1] in ("p", "g", "gr") and not is_amd
    return None


# GPUs that the newest torch has no code for, by AWS's families and by name
TOO_OLD = {"p2": "K80", "g2": "K520", "g3": "M60", "g3s": "M60", "p3": "V100", "p3dn": "V100"}
TOO_OLD_NAMES = ("K80", "K520", "M60", "M40", "P4", "P40", "P100", "V100", "V100-32GB")
WHY_TOO_OLD = (
    "torch 2.11 and newer have no code for GPUs before Turing (T4: compute capability 7.5)"
)


def too_old(machine: str) -> str:
    """The GPU of an instance type (``ml.p3.2xlarge``) or of a name (``V100``) that no new torch supports; "" if none."""
    if machine.upper() in TOO_OLD_NAMES:
        return machine
    if not has_gpus(machine):  # no instance type of AWS's: "p3" alone may be anybody's machine
        return ""
    family = machine.removeprefix("ml.").partition(".")[0]
    return TOO_OLD.get(family, "")


def gpus_in(instance_type: str) -> int | None:
    """How many NVIDIA GPUs an instance type of AWS has (``ml.g5.12xlarge``: 4).

    0 without any; None where the type, or the number of its family's GPUs, is not known here.

    >>> gpus_in("ml.p4d.24xlarge"), gpus_in("ml.g5.12xlarge"), gpus_in("g5.16xlarge"), gpus_in("ml.c5.large")
    (8, 4, 1, 0)
    >>> gpus_in("ml.g7.48xlarge"), gpus_in("local")
    (None, None)
    """
    if not has_gpus(instance_type):
        return 0 if has_gpus(instance_type) is False else None
    family, _, size = instance_type.removeprefix("ml.").partition(".")
    if family in ("g4dn", "g5", "g6", "g6e"):
        return {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8, "metal": 8}.get(size, 1)
    if family in ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300"):
        return {"24xlarge": 8, "48xlarge": 8}.get(size, 1)
    return None
