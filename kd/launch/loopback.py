"""The meeting point of processes that all run on one machine, open to that machine alone.

The store that ``torch.distributed`` starts for them listens on every interface and trusts whoever connects. Here it is
started before the processes, on a socket of the loopback interface, and all of them join it, as under ``torchrun``.
"""

import os
import socket

import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning import Trainer

from kd.launch.child import name_starter

_stores: list[torch.distributed.TCPStore] = []  # they live as long as the process


def meet_on_loopback(trainer: Trainer) -> None:
    """Starts the store of a trainer whose processes this one will start, all on this machine.

    The processes find it through ``MASTER_ADDR``, ``MASTER_PORT`` and ``TORCHELASTIC_*``, and end when this one ends
    (:func:`kd.launch.child.name_starter`). With several machines no store is started here; the processes only end
    with this one. For any other trainer nothing is done.

    Args:
        trainer: Lightning's, before its fit or validation.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, LightningEnvironment) or trainer.world_size == 1:
        return
    if environment.creates_processes_externally:
        return
    name_starter()
    if trainer.num_nodes > 1:
        return
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    store = torch.distributed.TCPStore(
        "127.0.0.1",
        port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    _stores.append(store)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
