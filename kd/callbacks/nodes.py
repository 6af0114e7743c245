"""Prints once which processes take part and where they run, and gives all of them the first one's precision."""

import os
import socket

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from kd.fit_to_machine.precision import take_the_first
from kd.processes import of_all_processes


class Nodes(Callback):
    """One line by rank 0 where there are several processes: their number, machines, addresses and ranks.

    Args:
        launcher: who started them, for the line; None: not named in it.
    """

    def __init__(self, launcher: str | None = None) -> None:
        self.launcher = launcher

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gathers addresses and precisions of all ranks: all take the first one's precision, rank 0 prints the addresses.

        Every rank must call it; in a run of one process nothing happens.

        Raises:
            UserError: the machines have chosen precisions that kd can't make equal.
        """
        if trainer.world_size == 1:
            return
        each = of_all_processes((own_address(), str(trainer.precision)))
        take_the_first(trainer, [precision for _, precision in each])
        if not trainer.is_global_zero:
            return
        machines: dict[str, list[int]] = {}
        for rank, (address, _) in enumerate(each):
            machines.setdefault(address, []).append(rank)
        where = "; ".join(f"{address}: rank {_span(ranks)}" for address, ranks in machines.items())
        by = ""
        if self.launcher:
            by = f" (started by {self.launcher})"
        main = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(
            f"processes: {trainer.world_size} on {len(machines)} machine{'s' * (len(machines) > 1)}{by}, "
            f"{dist.get_backend()}, meeting at {main}; {where}",
            flush=True,
        )


def own_address() -> str:
    """This machine's name, and in parentheses its address in the network of the main one (``MASTER_ADDR``).

    Nothing is sent: a datagram socket only chooses its interface. The name alone where no way leads to the main one.
    """
    main = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, _, _, _, target = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return f"{socket.gethostname()} ({probe.getsockname()[0]})"
    except OSError:
        return socket.gethostname()


def _span(ranks: list[int]) -> str:
    """Ascending ranks in short: ``3``; ``4-6``; ``0, 2`` where a scheduler deals them to the machines in turn."""
    first = ranks[0]
    last = ranks[-1]
    without_gaps = last - first == len(ranks) - 1
    if len(ranks) > 1 and without_gaps:
        return f"{first}-{last}"
    return ", ".join(map(str, ranks))
