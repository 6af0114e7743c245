"""The ten journeys of a new user: each from an empty folder, with the commands of an installed package.

    python scripts/bench/journeys.py --bin VENV/bin --write

A journey is the commands that a user types, on four classes of drawn pictures with models of 0.3 M parameters: what is
timed is the way, not the learning. ``--only 5`` runs one of them (its run folders come from the first).
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import options, write

SMALL = "data.img_size=64 data.batch_size=16 data.num_workers=0 trainer.max_epochs=4"
STUDENT = f"{SMALL} model.student.img_size=64"
VIT = f"{STUDENT} model.student.arch=test_vit model.student.kwargs.depth=3"
GROCERY = "kd-train recipe=grocery_vit data.source.root=pics"
OWN_MODEL = """
import torch
from pytorch_lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import kd

def cnn(width):
    layers = nn.Conv2d(3, width, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)
    return nn.Sequential(*layers)

pictures, labels = torch.rand(64, 3, 32, 32), torch.arange(64) % 4
loader = DataLoader(TensorDataset(pictures, labels), batch_size=16)
module = kd.DistillationModule(cnn(8), cnn(32), task=kd.Classification(4), losses={"kd": kd.KDLoss(temperature=4.0)})
Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_model_summary=False).fit(module, loader, loader)
kd.save_student(module, "student.safetensors")
"""
OWN_FILE = """
import timm, torch
from safetensors.torch import load_file
model = timm.create_model("test_vit", num_classes=4, img_size=64)
model.load_state_dict(load_file("runs/finetune/teacher/student.safetensors"))
torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}}, "my_teacher.pth")
"""


class Failed(Exception):
    """A command that did not do what a user expects."""


class Home:
    """An empty folder and an installed ``kd``.

    Args:
        folder: empty.
        bin: where ``kd-train`` and ``python`` are.
    """

    def __init__(self, folder: Path, bin: Path) -> None:
        self.folder, self.bin = folder, bin
        self.env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.env |= {"PATH": f"{bin}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}

    def start(self, command: str) -> subprocess.Popen[str]:
        """Starts a command."""
        program, *items = shlex.split(command)
        return subprocess.Popen([self.bin / program, *items], cwd=self.folder, env=self.env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def run(self, command: str, status: int = 0) -> str:
        """Runs a command to its end; its output.

        Raises:
            Failed: another status than wanted.
        """
        process = self.start(command)
        return self.ended(process, command, status)

    def ended(self, process: subprocess.Popen[str], command: str, status: int) -> str:
        """Waits for a command's end; its output."""
        out, _ = process.communicate()
        if process.returncode != status:
            raise Failed(f"{command}\nended with status {process.returncode}:\n{out[-2000:]}")
        return out

    def python(self, code: str) -> str:
        """Runs a program of the user's own."""
        (self.folder / "own.py").write_text(code)
        return self.run("python own.py")

    def draw(self) -> None:
        """``pics/{train,val}/<class>/*.jpg``, ``more/*.jpg`` without labels, and ``train.csv``."""
        rng, rows = np.random.RandomState(0), ["path,label"]
        for split, count in (("pics/train", 24), ("pics/val", 8), ("more", 8)):
            for c, name in enumerate(("apple", "bread", "cake", "dates")):
                folder = self.folder / split / ("" if split == "more" else name)
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    pixels = np.array([60 * c, 255 - 60 * c, 128]) + rng.normal(0, 30, (72, 80, 3))
                    file = folder / f"{name}{i:02d}.jpg"
                    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
                    rows += [f"{file.relative_to(self.folder)},{name}"] if split == "pics/train" else []
        (self.folder / "train.csv").write_text("\n".join(rows) + "\n")


def need(text: str, out: str) -> None:
    """Raises Failed where an output lacks what a user looks for."""
    if text not in out:
        raise Failed(f"nothing says '{text}':\n{out[-2000:]}")


def vit(home: Home) -> None:
    home.run("kd-train recipe=finetune data.source.root=pics name=teacher model.student.arch=test_vit "
             f"model.student.pretrained=false optim.lr=1e-3 {STUDENT} trainer.max_epochs=10")  # fmt: skip
    out = home.run(f"{GROCERY} model.teacher.checkpoint=runs/finetune/teacher name=vit {VIT}")
    need("preflight: teacher test_vit is right on", out)


def cnn(home: Home) -> None:
    home.run(
        f"{GROCERY} model.teacher.checkpoint=runs/finetune/teacher name=cnn model.student.arch=test_resnet {STUDENT}"
    )


def own_file(home: Home) -> None:
    home.python(OWN_FILE)
    teacher = "model.teacher.checkpoint=my_teacher.pth model.teacher.arch=test_vit model.teacher.img_size=64"
    need("the weights below 'model' are taken", home.run(f"{GROCERY} {teacher} {VIT}"))


def csv_labels(home: Home) -> None:
    out = home.run("kd-train recipe=grocery_vit data.source=Manifest data.source.train=train.csv "
                   f"data.val_fraction=0.25 model.teacher.checkpoint=runs/finetune/teacher {VIT}")  # fmt: skip
    need("held out for validation", out)


def stop_and_resume(home: Home) -> None:
    command = f"{GROCERY} model.teacher.checkpoint=runs/finetune/teacher name=stopped {VIT} trainer.max_epochs=400"
    process = home.start(command)
    while not (home.folder / "runs/grocery_vit/stopped/checkpoints/last.ckpt").is_file():
        if process.poll() is not None:
            home.ended(process, command, -1)
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    need("to resume: kd-train resume=", home.ended(process, command, 143))
    home.run("kd-train resume=runs/grocery_vit/stopped trainer.max_epochs=40")


def torchrun(home: Home) -> None:
    kd_train = home.bin / "kd-train"
    out = home.run(f"torchrun --nproc-per-node=2 {kd_train} {GROCERY.split(' ', 1)[1]} name=two trainer.devices=2 "
                   f"trainer.accelerator=cpu model.teacher.checkpoint=runs/finetune/teacher {VIT}")  # fmt: skip
    need("2 process(es)", out)


def ship(home: Home) -> None:
    home.run("kd-predict runs/grocery_vit/vit pics/val out=labels.csv")
    home.run("kd-export runs/grocery_vit/vit to=onnx")
    server = home.start("kd-serve runs/grocery_vit/vit port=8765")
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen("http://127.0.0.1:8765/readyz") as answer:
                    answer.read()
                break
            except OSError:
                if server.poll() is not None:
                    home.ended(server, "kd-serve", 0)
                time.sleep(0.2)
    finally:
        server.terminate()
    home.ended(server, "kd-serve", 0)


def compare(home: Home) -> None:
    need("alone is right on", home.run("kd-eval runs/grocery_vit/vit runs/grocery_vit/cnn"))
    home.run("kd-report runs/grocery_vit/vit runs/grocery_vit/cnn")


def unlabelled(home: Home) -> None:
    teacher = "{arch: test_vit, img_size: 64, checkpoint: runs/finetune/teacher, head: false}"
    home.run(f"kd-train recipe=foundation_vit data.source.root=more 'model.teachers.dino={teacher}' {VIT}")


def own_model(home: Home) -> None:
    home.python(OWN_MODEL)


JOURNEYS: dict[str, Callable[[Home], None]] = {
    "a labelled folder: teacher, then a ViT student": vit,
    "the same with a CNN student": cnn,
    "a teacher's file of one's own (.pth, wrapped)": own_file,
    "labels in a CSV, no validation list": csv_labels,
    "SIGTERM to the group, then resume": stop_and_resume,
    "torchrun, two processes": torchrun,
    "predict, export, serve": ship,
    "two runs compared": compare,
    "a folder without labels": unlabelled,
    "a Python model and loader of one's own": own_model,
}


def main() -> None:
    """Runs them in turn; ends with status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent)
    parser.add_argument("--only", type=int, help="this one, after the first two, which it may go on from")
    asked = options(parser)
    lines, failed = ["| | journey | s | |", "|---|---|---|---|"], False
    with tempfile.TemporaryDirectory(prefix="kd-journeys-") as made:
        home = Home(Path(made), asked.bin.resolve())
        home.draw()
        where = home.run("python -c 'import kd; print(kd.__file__)'").strip()
        for number, (name, journey) in enumerate(JOURNEYS.items(), 1):
            if asked.only and number > 2 and number != asked.only:
                continue
            began, ending = time.monotonic(), "done"
            try:
                journey(home)
            except Failed as error:
                failed, ending = True, "FAILED"
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            lines.append(f"| {number} | {name} | {time.monotonic() - began:.0f} | {ending} |")
            print(lines[-1], flush=True)
    lines += ["", f"`kd` is {where}; four classes of 24 drawn pictures, models of 0.3 M parameters, 4 epochs."]
    write("journeys", asked.hardware, asked.date, "Ten journeys of a new user", lines, asked.write)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
