"""Runs commands for scripts/guard.py, each in a fork of this process, which has imported the libraries once.

PYTHONPATH=CHECKOUT python scripts/guard_runs.py FOLDER < KINDS.json
"""

import csv
import json
import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

import pytorch_lightning  # noqa: F401 (so that no fork imports it anew, as the rest)
import timm
import torch
from safetensors.torch import save_file
from torchvision.transforms import v2  # noqa: F401


def own_loop(folder: Path) -> None:
    """Twelve steps of ``kd.Distillation`` from a small ResNet to a small ViT; writes what a run would write."""
    import kd

    torch.manual_seed(0)
    teacher = timm.create_model("resnet18", num_classes=4, channels=(16, 16, 24, 32))
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    student = timm.create_model("vit_tiny_patch16_224", num_classes=4, **shape)
    step = kd.Distillation(
        student,
        teacher,
        task=kd.Classification(4),
        losses={"kd": kd.KDLoss(4.0), "hint": kd.losses.HintLoss(weight=0.5)},
        taps={"hint": kd.TapSpec(student="blocks.0", teacher="layer2")},
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    rows = []
    for _ in range(12):
        terms = step(images, torch.arange(8) % 4)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        rows.append({f"train/{name}": value.item() for name, value in terms.named.items()})
    (folder / "checkpoints").mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    save_file(student.state_dict(), folder / "student.safetensors")
    state = {"state_dict": step.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(state, folder / "checkpoints" / "last.ckpt")


def command(program: str, *items: str) -> int:
    """A command's exit status, in this process."""
    if program == "own-loop":
        own_loop(Path(*items))
        return 0
    from kd.cli import main

    sys.modules["__main__"].__spec__ = find_spec(
        "kd.cli"
    )  # so Lightning starts a run's other ranks
    sys.argv = [program, *items]
    return main(program.removeprefix("kd-"), items)


def forked(folder: Path, words: list[str]) -> int:
    """The status of a command with a cache and a log of its own in ``folder``."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 99
    try:
        os.environ["KD_CACHE"] = str(folder / "cache")
        with (folder / "log").open("ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        status = command(*words)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def main() -> None:
    """Runs each kind's commands in turn; ends at the first that fails."""
    for kind, commands in json.load(sys.stdin).items():
        folder = Path(sys.argv[1]) / kind
        folder.mkdir()
        for words in commands:
            status = forked(folder, words)
            stops = any("tests._stop" in word for word in words)
            if status != (143 if stops else 0):
                log = (folder / "log").read_text()[-2000:]
                sys.exit(f"{kind} failed ({status}): {' '.join(words)}\n{log}")
        print(f"{kind}: done", flush=True)


if __name__ == "__main__":
    main()
