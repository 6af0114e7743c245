"""What does the phase ``communication`` cost? Steps of DDP with and without kd's hook on each bucket, in turn.

    python scripts/bench/ddp_hook.py --write

Two processes over gloo train 40 small linear layers in many buckets, with `monitor.communication` and without: two
copies of DDP around one model, steps in turn. What a bucket's call of Python takes shows in the difference over their
number; over NCCL the call is the same, and the transport is another.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import options, spread, write

WIDTH, LAYERS = 64, 40


def parted(hook: bool) -> tuple[DistributedDataParallel, list[int]]:
    """A model under DDP, with the monitor's hook or without; how many buckets a step had, one number a step."""
    from kd.monitor.phases import Phases
    from kd.monitor.watched import Watched

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), bucket_cap_mb=0.02
    )
    buckets: list[int] = []
    if hook:
        from kd.clock import Clock

        phases = Phases(Watched(Path()))
        phases.clock = Clock()

        def counted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buckets.append(bucket.index())
            return phases._all_reduce(state, bucket)

        model.register_comm_hook(None, counted)
    return model, buckets


def ms_of_step(model: nn.Module, pictures: Tensor) -> float:
    """CPU time of forward and backward, of all threads of this process: what others take of the cores is left out."""
    began = time.process_time()
    model(pictures).sum().backward()
    return 1000 * (time.process_time() - began)


def rank(number: int, rounds: int, port: int, results: Any) -> None:
    """One of two processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=2)
    arms = {"without": parted(False)[0]}
    arms["with"], buckets = parted(True)
    pictures = torch.rand(8, WIDTH)
    for model in arms.values():  # after the first step the buckets are ordered anew
        for _ in range(5):
            ms_of_step(model, pictures)
    buckets.clear()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, model in arms.items():
            times[name].append(ms_of_step(model, pictures))
    if number == 0:
        results.put((times, len(buckets) / rounds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--port", type=int, default=29541)
    asked = options(parser)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=rank, args=(number, asked.rounds, asked.port, results))
        for number in range(2)
    ]
    for process in processes:
        process.start()
    times, buckets = results.get()
    for process in processes:
        process.join()
    pairs = [with_ms - ms for ms, with_ms in zip(times["without"], times["with"], strict=True)]
    quarters = statistics.quantiles(pairs, n=4)
    lines = [
        f"{LAYERS} linear layers of {WIDTH} x {WIDTH} under DDP, {buckets:.0f} buckets a step, two processes over gloo; "
        f"{asked.rounds} steps of each in turn.",
        "",
        "| kd's hook | ms of CPU time a step: median (least to most) |",
        "|---|---|",
        *(f"| {name} | {spread(values, 2)} |" for name, values in times.items()),
        "",
        f"Cost: **{statistics.median(pairs):+.3f} ms** a step (median of the pairs; the middle half lies between "
        f"{quarters[0]:+.3f} and {quarters[2]:+.3f}), {1000 * statistics.median(pairs) / buckets:+.0f} us a bucket. "
        "`monitor.communication=false` leaves it out.",
    ]
    write("ddp_hook", asked.hardware, asked.date, "Cost of DDP's hook", lines, asked.write)


if __name__ == "__main__":
    main()
