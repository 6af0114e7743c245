"""Does a refactoring change what is learnt? Runs one small run of each kind; compares every step to the last bit.

    python scripts/guard.py run before.json --repo FOLDER_OF_THE_COMMIT_BEFORE
    python scripts/guard.py run after.json
    python scripts/guard.py compare before.json after.json

``run`` trains tiny pairs on drawn pictures through the command line of a checkout, and writes each run's logged
values (every step's losses, every validation) and the hashes of its final weights: the exported student, and all
tensors of the last checkpoint whatever their names. ``compare`` prints a table and exits with 1 where one differs.
Both sides must run on one machine: other processors round otherwise. About 6 minutes on one core.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests._helpers import ARCH, TINY, draw_folder, save_teacher, write_recipe  # noqa: E402
from tests._scenes import draw as draw_masks  # noqa: E402

TAPS = {
    "hint": ("blocks.0", "blocks.1"),
    "at": ("blocks.0", "blocks.0"),
    "rkd": ("prelogits", "prelogits"),
}
STUDENTS: dict[str, dict[str, Any]] = {
    "base": {},
    "labels": {
        "model.distill_losses.kd.weight": 0,
        "model.task_loss_weight": 1.0,
        "optim.lr": 0.003,
    },
    "dropped": {
        "model.student.kwargs.proj_drop_rate": 0.5,
        "model.ema_decay": 0.9,
        "optim.name": "sgd",
    },
}


def features(*names: str) -> list[str]:
    """Feature losses beside KD, by the class names below."""
    classes = {"hint": "HintLoss", "at": "ATLoss", "rkd": "RKDLoss", "crd": "CRDLoss"}
    items = [f"model.distill_losses.{name}={classes[name]}" for name in names]
    taps = {
        name: dict(zip(("student", "teacher"), TAPS[name], strict=True))
        for name in names
        if name in TAPS
    }
    return [*items, f"model.taps={json.dumps(taps)}"]


class Runs:
    """The scenarios, each a list of command lines that share a folder.

    Args:
        folder: where pictures, teachers and runs go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictures = draw_folder(folder / "pictures")
        self.teachers = [save_teacher(folder / f"teacher{i}.safetensors", seed=i) for i in (1, 2)]
        self.recipe = write_recipe(folder / "tiny.yaml", self.pictures, self.teachers[0])
        self.scenes = self._segmentation(draw_masks(folder / "scenes"))
        self.unlabelled = draw_folder(folder / "unlabelled", 5, 1, classes=("any",)) / "train"

    def _segmentation(self, root: Path) -> Path:
        names = ["left", "right", "never"]
        teacher = self.folder / "dense.safetensors"
        model = {"arch": ARCH, "img_size": [24, 32], "kwargs": TINY}
        made = write_recipe(self.folder / "seg.yaml", root, teacher)
        config = yaml.safe_load(made.read_text())
        arguments = {"root": str(root), "class_names": names, "ignore_index": 9}
        config["data"]["source"] = {"class_path": "SegmentationFolder", "init_args": arguments}
        config["data"] |= {"img_size": [24, 32], "batch_size": 4, "crop_ratio": 1.0}
        config["model"] |= {
            "task": {"class_path": "Segmentation"}, "teacher": None, "student": model, "distill_losses": {},
        }  # fmt: skip
        config["recipe"] = "dense"
        made.write_text(yaml.safe_dump(config))
        return made

    def of(self, name: str) -> list[list[str]]:
        """The command lines of a scenario; the last run's results count, and those of all before."""
        tiny, cache = (
            f"recipe={self.recipe}",
            f"model.teacher.cache_dir={self.folder / 'answers' / name}",
        )
        views = ["model.teacher.cache_views=2", cache]
        fill, only = [*views, "model.teacher.cache=on"], [*views, "model.teacher.cache=only"]
        pair = zip("ab", self.teachers, strict=True)
        teachers = {
            n: {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": str(file)}
            for n, file in pair
        }
        two = ["model.teacher=null", f"model.teachers={json.dumps(teachers)}"]
        dense = f"recipe={self.scenes}"
        runs = f"model.teacher.checkpoint={self.folder / 'runs' / 'dense' / '000'}"
        size = "model.teacher.img_size=[24,32]"
        own = f"model.student.kwargs={json.dumps({**TINY, 'depth': 1})}"  # another family leaves the recipe's
        arch = [f"model.teacher.arch={ARCH}", size, f"model.teacher.kwargs={json.dumps(TINY)}"]
        return {
            "kd_mixup_ema": [[tiny, "data.augment.mixup=0.8", "data.augment.cutmix=1.0", "model.ema_decay=0.9"]],
            "features_crd": [[tiny, *features("hint", "at", "rkd", "crd")]],
            "simkd": [[tiny, "model.task_loss_weight=0", 
                       "model.distill_losses={simkd: {class_path: kd.losses.SimKDLoss}}"]],
            "deit": [[tiny, "model.student.arch=deit_tiny_distilled_patch16_224", own]],
            "two_teachers": [[tiny, *two, "model.distill_losses.hard=HardKDLoss", "model.teacher_of.hard=b"]],
            "cache_logits": [[tiny, *fill], [tiny, *only]],
            "cache_topk": [[tiny, *fill, "model.teacher.cache_topk=2"], [tiny, *only, "model.teacher.cache_topk=2"]],
            "cache_features": [[tiny, *fill, *features("hint")], [tiny, *only, *features("hint")]],
            "three_students": [[tiny, f"students={json.dumps(STUDENTS)}"]],
            "segmentation_cwd": [[dense], [dense, *arch, runs, "model.distill_losses.cwd=CWDLoss"]],
            "unlabelled": [[tiny, f"data.unlabeled={self.unlabelled}", "data.unlabeled_ratio=0.5"]],
            "zero_2_ranks": [[tiny, "config=ddp_2cpu", "config=zero"]],
        }[name]  # fmt: skip


NAMES = ["kd_mixup_ema", "features_crd", "simkd", "deit", "two_teachers", "cache_logits", "cache_topk",
         "cache_features", "three_students", "segmentation_cwd", "unlabelled", "zero_2_ranks"]  # fmt: skip


def train(repo: Path, cache: Path, items: list[str]) -> None:
    """``kd-train`` of a checkout, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1", "KD_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "kd.cli", *items], cwd=repo, env=env, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"failed ({done.returncode}): kd-train {' '.join(items)}\n{done.stderr[-2000:]}")


def logged(file: Path) -> list[dict[str, str]]:
    """The rows of a metrics.csv: train/* and val/*, as they stand there."""
    with file.open() as opened:
        rows = [{k: v for k, v in row.items() if v and "/" in k} for row in csv.DictReader(opened)]
    return [row for row in rows if row]


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nested structure."""
    if isinstance(tree, torch.Tensor):
        yield tree
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    ):
        yield from tensors(value)


def digest(tensor: torch.Tensor) -> str:
    """Of shape and bits."""
    return hashlib.sha256(
        f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes()
    ).hexdigest()[:12]


def result_of(run: Path) -> dict[str, Any]:
    """What a run folder holds of what was learnt."""
    found: dict[str, Any] = {"logged": {}, "students": {}}
    for file in sorted(run.rglob("metrics.csv")):
        found["logged"][str(file.parent.relative_to(run))] = logged(file)
    for file in sorted(run.rglob("student.safetensors")):
        with safe_open(file, "pt") as opened:
            names = sorted(opened.keys())
            found["students"][str(file.parent.relative_to(run))] = {
                n: digest(opened.get_tensor(n)) for n in names
            }
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    # by content, not by name: a refactoring may rename what holds a tensor, and old names are tested elsewhere
    found["weights"] = sorted(digest(t) for t in tensors(state["state_dict"]))
    found["optimizer"] = sorted(digest(t) for t in tensors(state["optimizer_states"]))
    return found


def run(repo: Path, only: list[str], more: list[str]) -> dict[str, Any]:
    """All scenarios, with ``more`` settings each: name -> what each of their runs gave."""
    results: dict[str, Any] = {}
    for name in only or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(Path(folder))
            for items in runs.of(name):
                train(repo, runs.folder / "cache", [*items, "trainer.log_every_n_steps=1", *more])
            made = sorted(
                p for p in (Path(folder) / "runs").glob("*/*") if p.is_dir() and not p.is_symlink()
            )
            results[name] = [result_of(path) for path in made]
        steps = sum(len(rows) for r in results[name] for rows in r["logged"].values())
        print(f"{name}: {len(results[name])} run(s), {steps} rows", flush=True)
    return results


def compare(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Prints a table; whether all that both have is equal, and nothing is missing."""
    print(f"{'scenario':<20} {'runs':>4} {'rows':>5}  losses  students  weights  optimizer")
    equal = set(before) == set(after)
    for name in [n for n in before if n in after]:
        pairs = list(zip(before[name], after[name], strict=True))
        same = [
            all(a[part] == b[part] for a, b in pairs)
            for part in ("logged", "students", "weights", "optimizer")
        ]
        rows = sum(len(rows) for a, _ in pairs for rows in a["logged"].values())
        marks = "  ".join(f"{'equal' if s else 'DIFFER':>7}" for s in same)
        print(f"{name:<20} {len(pairs):>4} {rows:>5}  {marks}")
        equal &= all(same)
        for number, (a, b) in enumerate(pairs):
            for folder, old in a["logged"].items():
                for row, (x, y) in enumerate(zip(old, b["logged"].get(folder, []), strict=False)):
                    changed = {k: (x.get(k), y.get(k)) for k in {*x, *y} if x.get(k) != y.get(k)}
                    if changed:
                        print(f"  run {number} {folder} row {row}: {changed}")
                        break
    for name in sorted(set(before) ^ set(after)):
        print(f"{name:<20} only in one of the two")
    return equal


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("out", type=Path)
    one.add_argument("--repo", type=Path, default=ROOT)
    one.add_argument("--only", nargs="*", default=[], choices=NAMES)
    one.add_argument(
        "--set",
        nargs="*",
        default=[],
        help="settings of every run, such as trainer.precision=32-true",
    )
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        args.out.write_text(json.dumps(run(args.repo.resolve(), args.only, args.set)) + "\n")
        return 0
    return (
        0 if compare(json.loads(args.before.read_text()), json.loads(args.after.read_text())) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
