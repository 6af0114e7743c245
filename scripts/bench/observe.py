"""What does watching cost? The same run with and without ``monitor``, in turn; medians of the median step.

    python scripts/bench/observe.py foodtag_vit --rounds 7 --out scripts/bench/observe_cpu_2026-11-21.md
    python scripts/bench/observe.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

The step time is the summary's, from a clock of its own that runs in both arms. Needs a machine to itself.
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

ARMS = {"off": ["monitor.enabled=false"], "on": []}


def step_ms(recipe: str, items: list[str], place: Path) -> float:
    """Median step of one run."""
    runs = tempfile.mkdtemp(dir=place)
    command = [sys.executable, "-m", "kd.cli", f"recipe={recipe}", f"runs_dir={runs}", *items]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(next(Path(runs).glob("*/000/summary.json")).read_text())["step_ms_median"]


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=["trainer.max_epochs=1"], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as place:
        for number in range(arguments.rounds):
            for arm in list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]:
                found[arm].append(step_ms(arguments.recipe, [*arguments.set, *ARMS[arm]], Path(place)))
                print(f"{number + 1}/{arguments.rounds} {arm}: {found[arm][-1]:.2f} ms", flush=True)
    rows = [f"| {arm} | {statistics.median(ms):.2f} | {min(ms):.2f} to {max(ms):.2f} |" for arm, ms in found.items()]
    pairs = [on / off - 1 for on, off in zip(found["on"], found["off"], strict=True)]
    text = (
        f"# Cost of watching, {platform.machine()}, {os.cpu_count()} cores\n\n"
        f"`{arguments.recipe}` {' '.join(arguments.set)}, {arguments.rounds} rounds, in turn.\n\n"
        "| monitor | step ms (median of medians) | spread |\n|---|---:|---|\n" + "\n".join(rows) + "\n\n"
        f"Cost: {statistics.median(pairs):+.2%} of a step "
        f"(median of the pairs; {min(pairs):+.2%} to {max(pairs):+.2%}).\n"
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
