"""Does a refactoring change what is learnt? Trains one small run of each kind; compares every step to the last bit.

    python scripts/guard.py check                              # this tree against scripts/guard.json
    python scripts/guard.py run before.json --repo FOLDER_OF_THE_COMMIT_BEFORE
    python scripts/guard.py run after.json
    python scripts/guard.py compare before.json after.json     # names the first row that differs

A kind (a row of ``scripts/guard.yaml``) trains tiny pairs on drawn pictures with the commands of a checkout. Its results
are the logged values (every step's losses, every validation), the exported students, and all tensors of the last
checkpoint whatever their names. ``scripts/guard.json`` has their hashes, and the versions and the kind of CPU that they
are from. Other processors round otherwise: there ``check`` refuses, and both sides must be run. ``keep after.json``
renews the hashes of the kinds that are in the file. Two kinds train at once; all take two minutes of CPU time.
"""

import argparse
import csv
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import timm
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests._helpers import ARCH, TINY, draw_folder, save_teacher, write_recipe  # noqa: E402
from tests._scenes import NAMES  # noqa: E402
from tests._scenes import draw as draw_masks  # noqa: E402

KEPT = Path(__file__).with_suffix(".json")
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
KINDS = TABLE["kinds"]
PARTS = ("logged", "students", "weights", "optimizer")


def draw(folder: Path) -> None:
    """Pictures, lists of them, teachers and recipes, which all kinds read."""
    pictures = draw_folder(folder / "pictures")
    draw_folder(folder / "more", 5, 1, classes=("any",))
    for split in ("train", "val"):
        rows = ["path,label,red,green"]
        for i, path in enumerate(sorted((pictures / split).rglob("*.jpg"))):
            red, green, _ = np.asarray(Image.open(path)).reshape(-1, 3).mean(0)
            labels = path.parent.name + ";third" * (i % 3 == 0)
            rows.append(f"{path.relative_to(pictures)},{labels},{red},{green if i % 4 else ''}")
        (pictures / f"{split}.csv").write_text("\n".join(rows))
    for seed, name in enumerate("ab", 1):
        save_teacher(folder / f"{name}.safetensors", seed=seed)
    tiny = write_recipe(folder / "tiny.yaml", pictures, folder / "a.safetensors")
    for name, (arch, theirs, ours) in TABLE["teachers"].items():
        torch.manual_seed(0)
        size = {"img_size": 32} if arch.startswith("vit") else {}
        model = timm.create_model(arch, num_classes=4, **size, **theirs)
        for parameter in model.parameters():  # timm's start is near zero: make every layer matter
            parameter.data += 0.05 * torch.randn_like(parameter)
        file = folder / f"{name}.safetensors"
        save_file(model.state_dict(), file)
        recipe = yaml.safe_load(tiny.read_text())
        spec = {"arch": arch, "img_size": 32}
        recipe["model"]["teacher"] = {**spec, "kwargs": theirs, "checkpoint": str(file)}
        recipe["model"]["student"] = {**spec, "kwargs": ours, "inherit": True}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    scenes = {"root": str(draw_masks(folder / "scenes")), "class_names": NAMES, "ignore_index": 9}
    model = {"arch": ARCH, "img_size": [24, 32], "kwargs": TINY}
    write_recipe(
        folder / "dense.yaml", pictures, None, recipe="dense", data__img_size=[24, 32], data__batch_size=4,
        data__crop_ratio=1.0, data__source={"class_path": "SegmentationFolder", "init_args": scenes},
        model__task={"class_path": "Segmentation"}, model__teacher=model, model__student=model,
    )  # fmt: skip


def commands(kind: str, folder: Path) -> list[list[str]]:
    """The words of each command of a kind, in their order."""
    known = {"folder": str(folder), "runs": str(folder / kind)}
    for name, text in TABLE["words"].items():
        known[name] = Template(text).substitute(known)
    return [shlex.split(Template(text).substitute(known)) for text in KINDS[kind]]


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


def digest(content: Any) -> str:
    """Of a tensor's shape and bits, or of what JSON writes."""
    if isinstance(content, torch.Tensor):
        data = f"{tuple(content.shape)}".encode() + content.contiguous().numpy().tobytes()
    else:
        data = json.dumps(content).encode()
    return hashlib.sha256(data).hexdigest()[:12]


def result_of(run: Path) -> dict[str, Any]:
    """What a run folder holds of what was learnt: the logged rows, and a hash of each of :data:`PARTS`."""
    rows = {
        str(file.parent.relative_to(run)): logged(file) for file in sorted(run.rglob("metrics.csv"))
    }
    students = []
    for file in sorted(run.rglob("student.safetensors")):
        with safe_open(file, "pt") as opened:
            students.append(
                {name: digest(opened.get_tensor(name)) for name in sorted(opened.keys())}
            )
    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    # by content, not by name: a refactoring may rename what holds a tensor, and old names are tested elsewhere
    weights, optimizer = (
        sorted(map(digest, tensors(state[key]))) for key in ("state_dict", "optimizer_states")
    )
    hashes = map(digest, (rows, students, weights, optimizer))
    return {**dict(zip(PARTS, hashes, strict=True)), "rows": rows}


def results_of(repo: Path, chosen: list[str]) -> dict[str, Any]:
    """What each run of each kind gave."""
    env = {**os.environ, "PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder)
        start = [sys.executable, str(ROOT / "scripts" / "guard_runs.py"), name]
        started = []
        for half in (chosen[::2], chosen[1::2]):
            process = subprocess.Popen(start, cwd=repo, env=env, stdin=subprocess.PIPE, text=True)
            assert process.stdin
            with process.stdin as stdin:
                json.dump({kind: commands(kind, folder) for kind in half}, stdin)
            started.append(process)
        if any([process.wait() for process in started]):
            sys.exit(1)
        kinds = {}
        for kind in chosen:
            files = sorted((folder / kind).glob("*/[0-9]*/*/last.ckpt"))
            kinds[kind] = [result_of(file.parent.parent) for file in files]
    return {"machine": machine(), "kinds": kinds}


def compare(before: dict[str, Any], after: dict[str, Any], kinds: list[str]) -> bool:
    """Prints a table, and the first row that differs where both have rows; whether all is equal, and nothing missing."""
    if before["machine"] != after["machine"]:
        sys.exit(
            f"not of one machine, run both sides here: {before['machine']}, {after['machine']}"
        )
    print(f"{'kind':<20} runs  " + " ".join(f"{part:>9}" for part in PARTS))
    all_equal = True
    for kind in kinds:
        old, new = (side["kinds"].get(kind, []) for side in (before, after))
        same = [bool(old) and [r[part] for r in old] == [r[part] for r in new] for part in PARTS]
        marks = " ".join(f"{'equal' if part else 'DIFFER':>9}" for part in same)
        print(f"{kind:<20} {len(old):>4}  {marks}")
        all_equal &= all(same)
        for number, (a, b) in enumerate(zip(old, new, strict=False)):
            for folder, rows in a.get("rows", {}).items():
                pairs = zip(rows, b.get("rows", {}).get(folder, []), strict=False)
                changed = ((row, x, y) for row, (x, y) in enumerate(pairs) if x != y)
                for row, x, y in itertools.islice(changed, 1):
                    values = {k: (x.get(k), y.get(k)) for k in {*x, *y} if x.get(k) != y.get(k)}
                    print(f"  run {number} {folder} row {row}: {values}")
    return all_equal


def machine() -> dict[str, Any]:
    """On what the bits of a result depend: versions, the kind of CPU, the number of threads."""
    names = ("timm", "pytorch-lightning", "torchvision")
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in lines}
    instructions = {*cpu["flags"].split()} & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    versions = {name: version(name) for name in names}
    return {
        "torch": torch.__version__,
        **versions,
        "cpu": cpu["model name"],
        "instructions": sorted(instructions),
        "threads": 1,
    }


def keep(found: dict[str, Any]) -> None:
    """Puts the hashes of some or all kinds into :data:`KEPT`, one row a kind."""
    kept = json.loads(KEPT.read_text())
    kept = kept["kinds"] if kept["machine"] == found["machine"] else {}
    for kind, runs in found["kinds"].items():
        kept[kind] = [{part: run[part] for part in PARTS} for run in runs]
    rows = ",\n".join(
        f" {json.dumps(kind)}: {json.dumps(kept[kind])}" for kind in KINDS if kind in kept
    )
    KEPT.write_text(f'{{"machine": {json.dumps(found["machine"])}, "kinds": {{\n{rows}\n}}}}\n')


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checked, ran, compared, kept = (
        commands.add_parser(name) for name in ("check", "run", "compare", "keep")
    )
    for one in (checked, ran):
        one.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    ran.add_argument("out", type=Path)
    ran.add_argument("--repo", type=Path, default=ROOT)
    for one, names in ((compared, ("before", "after")), (kept, ("found",))):
        for name in names:
            one.add_argument(name, type=lambda file: json.loads(Path(file).read_text()))
    args = parser.parse_args()
    if args.command == "keep":
        keep(args.found)
        return 0
    if args.command == "compare":
        names = list({**args.before["kinds"], **args.after["kinds"]})
        return 0 if compare(args.before, args.after, names) else 1
    if args.command == "run":
        args.out.write_text(json.dumps(results_of(args.repo.resolve(), args.only)) + "\n")
        return 0
    before = json.loads(KEPT.read_text())
    compare(before, {"machine": machine(), "kinds": {}}, [])  # before anything is trained
    return 0 if compare(before, results_of(ROOT, args.only), args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
