"""Does the teacher help? Trains a recipe's student with and without it over several seeds, and writes a table.

    python scripts/bench/seeds.py foodtag_vit --seeds 0 1 2 --out scripts/bench/foodtag_seeds_cpu_2026-11-21.md
    python scripts/bench/seeds.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

An arm is a set of changes to the recipe; the arm "alone" is the overlay no_teacher.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ARMS = {"distilled": [], "alone": ["config=no_teacher"]}


def run(recipe: str, arm: str, items: list[str], seed: int, runs: Path) -> dict:
    """One run; reuses a finished one of the same name."""
    folder = runs / f"{recipe}-{arm}-{seed}"
    summary = folder / recipe / "000" / "summary.json"
    if not summary.is_file():
        command = [
            sys.executable,
            "-m",
            "kd.cli",
            f"recipe={recipe}",
            f"seed={seed}",
            f"runs_dir={folder}",
            *items,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def row(arm: str, summaries: list[dict]) -> str:
    """Mean and spread of an arm's final accuracy, in per cent."""
    accuracy = [100 * s["student"]["val"]["acc1"] for s in summaries]
    error = statistics.stdev(accuracy) / len(accuracy) ** 0.5 if len(accuracy) > 1 else float("nan")
    agreement = [100 * s["student"]["val"].get("agreement", float("nan")) for s in summaries]
    minutes = statistics.median(s["wall_s"] for s in summaries) / 60
    each = ", ".join(f"{a:.1f}" for a in accuracy)
    return (
        f"| {arm} | {statistics.mean(accuracy):.1f} ± {error:.1f} | {each} | {statistics.mean(agreement):.1f} | "
        f"{statistics.median(s['images_per_s'] for s in summaries):.0f} | {minutes:.1f} |"
    )


def main() -> None:
    """Runs all arms over all seeds, seeds outermost, so that drift of the machine meets all arms alike."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="settings for all arms")
    parser.add_argument(
        "--arm", action="append", default=[], help="a further arm: NAME:key=value,key=value"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/bench"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arms = dict(ARMS)
    for text in options.arm:
        name, _, changes = text.partition(":")
        arms[name] = changes.split(",")
    found: dict[str, list[dict]] = {arm: [] for arm in arms}
    for seed in options.seeds:
        for arm, changes in arms.items():
            kept = [
                s
                for s in options.set
                if "config=no_teacher" not in changes or not s.startswith("model.teacher")
            ]
            found[arm].append(run(options.recipe, arm, [*kept, *changes], seed, options.runs))
            print(arm, seed, found[arm][-1]["student"]["val"], flush=True)
    first = found["distilled"][0]
    lines = [
        f"# {options.recipe}: with and without the teacher",
        "",
        f"Seeds {options.seeds}; {first['data']['train']} training and {first['data']['val']} validation pictures; "
        f"{first['epochs']} epochs; {first['device']}, {os.cpu_count()} cores, {first['precision']}, "
        f"Python {platform.python_version()}. Accuracy of the last epoch, no selection; ± is the standard error "
        "over seeds.",
        "",
        f"Teacher: {first['teacher']['arch']}, {first['teacher']['params'] / 1e6:.2f} M parameters, "
        f"{100 * first['teacher']['val']['acc1']:.1f} %. "
        f"Student: {first['student']['arch']}, {first['student']['params'] / 1e6:.2f} M.",
        "",
        "| student | val acc1 % | each seed | agreement % | images/s | minutes |",
        "|---|---|---|---|---|---|",
        *(row(arm, summaries) for arm, summaries in found.items()),
        "",
    ]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
