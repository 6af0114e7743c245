"""Images a second of the data tier: loader processes here, the tier on as many cores, the tier on more of them.

    OMP_NUM_THREADS=1 python scripts/bench/tier.py --cores 1 --more 2 --rounds 7 --write
    OMP_NUM_THREADS=1 python scripts/bench/tier.py --address HEAD:6379 --cores 8 --more 32 --folder DIR

Without an address a Ray of its own on this machine makes the batches: "more" then can't exceed the machine's cores. The
arms take the same pictures in turn (A B C A B C ...) within one process, each for a pass of ``--batches`` batches after
its first ones; nothing trains. The overhead a batch is what the tier takes beyond making it: the time a batch over the
tier less that with as many loader processes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.settings import TierSpec
from scripts.bench.harness import options, spread, write
from scripts.bench.input import drawn

WARM = 4  # batches a pass before the clock starts, and at least all that waits ready


def folder_of(count: int, height: int, width: int) -> Path:
    """Drawn pictures on the disk, as two classes."""
    root = Path(tempfile.mkdtemp(prefix="kd-bench-"))
    for i, data in enumerate(drawn(count, height, width)):
        for split in ("train", "val"):
            file = root / split / f"class{i % 2}" / f"{i:05d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    return root


def endless(data: DistillationDataModule, batches: int, warm: int) -> Callable[[], float]:
    """A pass over so many batches; ms a batch."""

    def run() -> float:
        loader = data.trial_loader(warm + batches)
        found = iter(loader)
        for _ in range(warm):
            next(found)
        start = time.perf_counter()
        for batch in found:
            assert batch["image"].dtype == torch.uint8
        return 1000 * (time.perf_counter() - start) / batches

    return run


def main() -> None:
    """Runs the arms in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of the Ray cluster; default: one on this machine")
    parser.add_argument(
        "--folder", type=Path, help="pictures as an ImageFolder; default: drawn ones"
    )
    parser.add_argument(
        "--cores", type=int, default=1, help="loader processes here, makers in the tier"
    )
    parser.add_argument("--more", type=int, default=2, help="makers of the larger tier")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument(
        "--picture",
        type=int,
        nargs=2,
        default=[427, 640],
        help="height and width of the drawn ones",
    )
    parser.add_argument("--rounds", type=int, default=5)
    asked = options(parser)
    root = asked.folder or folder_of(4 * asked.batch, *asked.picture)

    def module(engine: str, workers: int) -> DistillationDataModule:
        tier = TierSpec(asked.address) if engine == "ray" else None
        data = DistillationDataModule(
            ImageFolder(str(root)),
            img_size=asked.size,
            batch_size=asked.batch,
            num_workers=workers,
            engine=engine,
            tier=tier,
            check="off",
        )
        data.prepare_data()
        return data

    # One arm's makers must not run beside another's: each arm is opened for its turn, and closed after it.
    arms = {
        f"{asked.cores} loader process(es) here": ("torch", asked.cores),
        f"tier, {asked.cores} maker(s)": ("ray", asked.cores),
        f"tier, {asked.more} makers": ("ray", asked.more),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(asked.rounds):
        for name, (engine, workers) in arms.items():
            data = module(engine, workers)
            times[name].append(endless(data, asked.batches, WARM + 2 * workers + 2)())
            data.teardown("fit")
    here, same, more = (statistics.median(found) for found in times.values())
    lines = [
        f"Batches of {asked.batch} pictures, {asked.folder or 'drawn, ' + ' x '.join(map(str, asked.picture))} -> "
        f"{asked.size} px; {asked.batches} batches a turn, {asked.rounds} turns of each in turn; "
        f"{'a cluster' if asked.address else 'Ray on this machine'}.",
        "",
        "| | ms a batch: median (least to most) | images/s | of the first |",
        "|---|---|---|---|",
        *(
            f"| {name} | {spread(found)} | {1000 * asked.batch / statistics.median(found):,.0f} | "
            f"{here / statistics.median(found):.2f} |"
            for name, found in times.items()
        ),
        "",
        f"Overhead of the tier: {same - here:+.1f} ms a batch ({(same - here) / here:+.0%}) with as many cores; with "
        f"{asked.more / asked.cores:g} times the cores {same / more:.2f} times as fast.",
    ]
    write("tier", asked.hardware, asked.date, "Batches from the data tier", lines, asked.write)


if __name__ == "__main__":
    main()
