"""What a training checkpoint costs: how long training stands still, written at once or asynchronously.

``python scripts/bench/checkpoints.py [--arch vit_small_patch16_224] [--out FILE]``: the state of the model and of AdamW
(three times the weights) is saved in turn by torch.save alone, by CheckpointFiles (fsync, rotation), and by Lightning's
AsyncCheckpointIO around it; and the time to check a file's checksums before a resume.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from kd.storage.checkpoints import damage
from kd.strategies.checkpoint_files import CheckpointFiles


def state_of(arch: str) -> dict:
    """Weights and AdamW's two moments, as a run saves them."""
    weights = timm.create_model(arch).state_dict()
    moments = {
        i: {"exp_avg": v.clone(), "exp_avg_sq": v.clone()} for i, v in enumerate(weights.values())
    }
    return {"state_dict": weights, "optimizer_states": [{"state": moments}]}


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--arch", default="vit_small_patch16_224")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    state = state_of(asked.arch)
    found: dict[str, list[float]] = {
        k: [] for k in ("torch.save", "at once", "asynchronous", "its rest", "check")
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "last.ckpt"
        for _ in range(asked.repeats):
            found["torch.save"].append(
                seconds(lambda: torch.save(state, Path(folder) / "plain.ckpt"))
            )
            found["at once"].append(seconds(lambda: CheckpointFiles().save_checkpoint(state, file)))
            later = AsyncCheckpointIO(CheckpointFiles())
            found["asynchronous"].append(seconds(lambda io=later: io.save_checkpoint(state, file)))
            found["its rest"].append(seconds(later.teardown))
            found["check"].append(seconds(lambda: damage(file)))
        size = file.stat().st_size
    result = {
        "arch": asked.arch, "file_mb": round(size / 1e6, 1), "torch": torch.__version__, "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "load_before": os.getloadavg()[0],
        "median_ms": {k: round(1000 * statistics.median(v), 1) for k, v in found.items()},
        "spread_ms": {k: [round(1000 * min(v), 1), round(1000 * max(v), 1)] for k, v in found.items()},
    }  # fmt: skip
    text = json.dumps(result, indent=2)
    if asked.out:
        asked.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
