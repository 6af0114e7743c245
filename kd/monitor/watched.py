"""What a monitor reads of the training that it watches: of any that Lightning's Trainer runs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from kd.storage.elsewhere import Json


class Watched:
    """A training with any module, data and strategy; what can't be known of it is left out.

    kd's own runs, of which more is known, are :class:`kd.monitor.own_run.OwnRun`.

    Args:
        folder: where the records go, below ``records``.
    """

    step_phase = "forward"
    """The phase of ``training_step`` without the phases inside it."""
    rest_phase = "logging"
    """The phase of what no other claims: callbacks, loggers, the trainer's own loop."""

    program = "kd.Monitor"
    """Who speaks, in messages."""
    resume = "train on from its checkpoint with more of it"
    """What to do where the time or the budget of the training is spent."""
    keys = ""
    """What precedes a setting's name in messages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, trainer: Trainer) -> Path:
        """The run's folder."""
        return self._folder

    def report(self, problem: object, setting: str = "") -> None:
        """Prints a problem that ends nothing.

        Args:
            problem: in one line.
            setting: which of the monitor's settings it is about, as ``otlp``; "": none.
        """
        about = f"{self.keys}{setting}: " if setting else ""
        tqdm.write(f"{self.program}: {about}{problem}", file=sys.stderr)

    def parts(self) -> list[Callback]:
        """Further callbacks that record what such trainings alone have."""
        return []

    def header(self, trainer: Trainer) -> Json:
        """What the records of the steps begin with, beside the machine: the loader's ``batch_size`` (of one process) and its
        ``num_workers``, where the loader is torch's; ``of_kd``, whether the run is kd's own.
        """
        facts: Json = {"of_kd": False}
        loader = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return facts  # a loader of the user's own: its batches show their size
        facts["num_workers"] = loader.num_workers
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(batch_size, int):
            facts["batch_size"] = batch_size
        return facts

    def rows(self, batch: object) -> int:
        """How many pictures a batch has: the length of its first tensor; 0 where it has none."""
        for tensor in tensors_of(batch):
            if tensor.ndim:
                return len(tensor)
        return 0

    def model(self, trainer: Trainer) -> nn.Module | None:
        """The model whose gradients, weights and activations are read; None in a plain loop."""
        return trainer.lightning_module

    def trained(self, trainer: Trainer) -> Sequence[Tensor]:
        """The trained parameters of :meth:`model`."""
        return list(trainer.lightning_module.parameters())

    def pictures(self, batch: object) -> Tensor | None:
        """The pictures ``(N, 1 or 3, H, W)`` of a batch: its first tensor of that shape; None without one."""
        for tensor in tensors_of(batch):
            if tensor.ndim == 4 and tensor.shape[1] in (1, 3):
                return tensor
        return None

    def class_counts(self, trainer: Trainer) -> dict[str, list[int]]:
        """How many pictures each class has, by split; {} where that is not known."""
        return {}

    def answers(self, trainer: Trainer, outputs: object, answer: Tensor | None) -> Json:
        """What the model's answer to a training batch says, as scalars on the device.

        Args:
            trainer: of the run.
            outputs: what the training step returned.
            answer: the model's logits ``(N, C, ...)``; None where it gave none.

        Returns:
            ``teacher_entropy`` and ``agreement`` where there is a teacher, ``terms`` of the loss by name.
        """
        return {"terms": {}}

    def loss_shares(self, trainer: Trainer, terms: Mapping[str, float]) -> dict[str, float]:
        """The shares, 0 to 1, that weighted terms have of the loss; {} without terms."""
        return {}


class WatchedLoop(Watched):
    """A plain loop: what its body gives no name is the rest of the step."""

    rest_phase = "rest"


def tensors_of(tree: object) -> Iterator[Tensor]:
    """The tensors of a batch, in order; of nested mappings and sequences too."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def float_logits(out: object) -> Tensor | None:
    """A model's output as float32 logits ``(N, C, ...)`` without a gradient.

    None for anything but a tensor of two axes or more, such as the largest logits that a cache keeps.
    """
    if isinstance(out, Tensor) and out.ndim >= 2:
        return out.detach().float()
    return None


def device_of(trainer: Trainer) -> torch.device:
    """The device that a process trains on."""
    return trainer.strategy.root_device
