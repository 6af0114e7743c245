"""Times all-reduces between the run's processes before its first step."""

import time

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer

from kd.callbacks.context import RunContext
from kd.report.records import Writer

SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)  # bytes
REPEATS = 12  # all-reduces of each size


class Ring(Callback):
    """Writes the event ``ring`` to ``records/ring.jsonl``: ``times``, pairs of bytes and median seconds."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Times all-reduces of several sizes on all ranks; rank 0 writes them. A single process does nothing."""
        if trainer.world_size == 1:
            return
        run = RunContext.of(trainer)
        times = [(size, _median_s(size, run.device)) for size in SIZES]
        if trainer.is_global_zero:
            writer = Writer(run.folder / "records" / "ring.jsonl", {"of": "ring"})
            writer.write(
                {"kind": "event", "name": "ring", "processes": trainer.world_size, "times": times}
            )
            writer.close()


def _median_s(size: int, device: torch.device) -> float:
    """Median seconds (the upper one) of :data:`REPEATS` all-reduces of ``size`` bytes in float32; all must call it."""
    data = torch.zeros(size // 4, device=device)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[REPEATS // 2]
