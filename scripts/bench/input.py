"""Pictures a second and core, from encoded bytes to a training view: our engines, their limit, and other libraries.

    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench/input.py --rounds 7 --write
    python scripts/bench/input.py --folder DIR --size 224

Every arm takes the same bytes in memory, one thread, and gives a uint8 batch: random resized crop and flip. "decode"
is the limit: libjpeg-turbo alone, nothing else. DALI and SPDL (which needs the shared libraries of FFmpeg) are measured
where they are installed.
"""

import argparse
import io
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.data.engines import dali, device
from kd.data.pictures import decode
from kd.data.sources import FileSplit
from kd.data.transforms import MixPairs, seeded, train_transform
from kd.settings import Augment
from scripts.bench.harness import measure, options, spread, write


def drawn(count: int, height: int, width: int) -> list[bytes]:
    """JPEG pictures with the detail of photographs: noise over several scales."""
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        layers = [
            np.asarray(Image.fromarray(rng.integers(0, 255, (height // s + 1, width // s + 1, 3), dtype=np.uint8))
                       .resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
            for s in (4, 16, 64)
        ]  # fmt: skip
        file = io.BytesIO()
        Image.fromarray(
            (0.2 * layers[0] + 0.3 * layers[1] + 0.5 * layers[2]).astype(np.uint8)
        ).save(file, "JPEG")
        found.append(file.getvalue())
    return found


class InMemory(FileSplit):
    """A split whose pictures are in memory."""

    def __init__(self, pictures: list[bytes]) -> None:
        super().__init__([str(i) for i in range(len(pictures))], [0] * len(pictures))
        self.pictures = pictures

    def read(self, i: int) -> bytes:
        """The encoded picture."""
        return self.pictures[i]


def pil(pictures: list[bytes], size: int) -> Callable[[], Any]:
    """PIL to decode and resize, torchvision's transforms on PIL pictures."""
    steps = v2.Compose(
        [v2.RandomResizedCrop(size, scale=(0.35, 1)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    return lambda: torch.stack([steps(Image.open(io.BytesIO(p)).convert("RGB")) for p in pictures])


def engine_torch(pictures: list[bytes], size: int) -> Callable[[], Any]:
    """data.engine=torch."""
    steps = train_transform((size, size), Augment())

    def run() -> Any:
        made = []
        for i, picture in enumerate(pictures):
            with seeded(0, i, 0):
                made.append(steps(decode(picture)))
        return torch.stack(made)

    return run


def engine(module: Any, pictures: list[bytes], size: int) -> Callable[[], Any]:
    """data.engine=device or dali: the loader's part and the device's, here on the same core."""
    augment, target = Augment(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = module.SAMPLES(InMemory(pictures), (size, size), augment, 0)
    mix = MixPairs(augment, 2, 0)
    views = module.VIEWS((size, size), augment, mix)
    draw_mixes = partial(mix.draw, size=(size, size))

    def run() -> Any:
        samples = [data[i, 0] for i in range(len(pictures))]
        batch = module.pack(torch.tensor, draw_mixes, samples)
        return views(
            {k: v.to(target) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        )

    return run


def spdl(pictures: list[bytes], size: int) -> Callable[[], Any]:
    """SPDL's decoder with its own scaling to the view (no random crop: it has none on the CPU)."""
    import spdl.io

    scale = spdl.io.get_video_filter_desc(scale_width=size, scale_height=size, pix_fmt="rgb24")

    def run() -> Any:
        frames = [
            spdl.io.decode_packets(spdl.io.demux_image(p), filter_desc=scale) for p in pictures
        ]
        return spdl.io.to_torch(spdl.io.convert_frames(frames))

    return run


def main() -> None:
    """Runs all that are there, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="pictures; default: drawn ones")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument(
        "--picture",
        type=int,
        nargs=2,
        default=[427, 640],
        help="height and width of the drawn ones",
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    asked = options(parser)
    if asked.folder:
        files = sorted(p for p in asked.folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
        pictures = [
            p.read_bytes() for p in random.Random(0).sample(files, min(asked.count, len(files)))
        ]
    else:
        pictures = drawn(asked.count, *asked.picture)
    arms: dict[str, Callable[[], Any]] = {
        "decode alone (the limit)": lambda: [decode(p) for p in pictures]
    }
    missing = []
    for name, make in {
        "PIL": lambda: pil(pictures, asked.size),
        "engine=torch": lambda: engine_torch(pictures, asked.size),
        "engine=device": lambda: engine(device, pictures, asked.size),
        "engine=dali": lambda: engine(dali, pictures, asked.size),
        "SPDL (decode and scale)": lambda: spdl(pictures, asked.size),
    }.items():
        try:
            call = make()
            call()
            arms[name] = call
        except (
            ImportError,
            RuntimeError,
        ) as error:  # SPDL without FFmpeg's libraries gives the latter
            missing.append(f"{name} ({str(error)[:80]})")
    rates = {
        name: [len(pictures) / s for s in times]
        for name, times in measure(arms, asked.rounds).items()
    }
    limit = statistics.median(rates["decode alone (the limit)"])
    sizes = f"{sum(map(len, pictures)) / len(pictures) / 1000:.0f} kB"
    lines = [
        f"{len(pictures)} JPEG pictures ({asked.folder or 'drawn, ' + ' x '.join(map(str, asked.picture))}; {sizes} in "
        f"the mean) -> {asked.size} px; {asked.rounds} turns. Left out: {', '.join(missing) or 'none'}.",
        "",
        "| | images/s: median (least to most) | share of the decode limit |",
        "|---|---|---|",
        *(
            f"| {name} | {spread(v, 0)} | {statistics.median(v) / limit:.0%} |"
            for name, v in rates.items()
        ),
    ]
    write("input", asked.hardware, asked.date, "From encoded bytes to views", lines, asked.write)


if __name__ == "__main__":
    main()
