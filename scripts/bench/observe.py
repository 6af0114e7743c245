"""What does watching cost? The same run with and without ``monitor``, in turn; medians of the median step.

    python scripts/bench/observe.py --out scripts/bench/observe_cpu_2026-11-21.md
    python scripts/bench/observe.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

Without a recipe a small pair of vision transformers learns drawn pictures: 100 steps of batch 16 a run, some minutes in
all on one core. The step time is the summary's, from a clock of its own that runs in both arms. Needs a machine to
itself.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a script: tests._helpers draws the pictures

ARMS = {"off": ["monitor.enabled=false"], "on": []}


def step_ms(recipe: str, items: list[str], place: Path) -> float:
    """Median step of one run."""
    runs = tempfile.mkdtemp(dir=place)
    command = [sys.executable, "-m", "kd.cli", f"recipe={recipe}", f"runs_dir={runs}", *items]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return json.loads(next(Path(runs).glob("*/000/summary.json")).read_text())["step_ms_median"]


def small_pair(place: Path) -> str:
    """A recipe of its own: drawn pictures, an untrained teacher (what it knows costs nothing)."""
    from tests._helpers import ARCH, draw_folder, save_teacher, write_recipe

    sizes = {"patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4}
    teacher = save_teacher(place / "teacher.safetensors", **sizes)
    pictures = draw_folder(place / "pictures", train=200, val=8)
    spec = {"arch": ARCH, "img_size": 32, "kwargs": sizes, "checkpoint": str(teacher)}
    student = {"arch": ARCH, "img_size": 32, "kwargs": {**sizes, "depth": 3}}
    recipe = write_recipe(place / "pair.yaml", pictures, teacher, model__teacher=spec, model__student=student,
                          data__batch_size=16, trainer__max_epochs=2, trainer__log_every_n_steps=10)  # fmt: skip
    return str(recipe)


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as place:
        recipe = arguments.recipe or small_pair(Path(place))
        for number in range(arguments.rounds):
            for arm in list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]:
                found[arm].append(step_ms(recipe, [*arguments.set, *ARMS[arm]], Path(place)))
                print(f"{number + 1}/{arguments.rounds} {arm}: {found[arm][-1]:.2f} ms", flush=True)
    rows = [f"| {arm} | {statistics.median(ms):.2f} | {min(ms):.2f} to {max(ms):.2f} |" for arm, ms in found.items()]
    pairs = [on / off - 1 for on, off in zip(found["on"], found["off"], strict=True)]
    text = (
        f"# Cost of watching, {platform.machine()}, {os.cpu_count()} cores\n\n"
        f"`{arguments.recipe or 'small pair'}` {' '.join(arguments.set)}, {arguments.rounds} rounds, in turn.\n\n"
        "| monitor | step ms (median of medians) | spread |\n|---|---:|---|\n" + "\n".join(rows) + "\n\n"
        f"Cost: {statistics.median(pairs):+.2%} of a step "
        f"(median of the pairs; {min(pairs):+.2%} to {max(pairs):+.2%}).\n"
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
