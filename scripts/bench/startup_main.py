"""README's main job from nothing: where the seconds of `kd-train recipe=foodtag_vit` go, pictures drawn anew each time.

python scripts/bench/startup_main.py --rounds 3 --against FOLDER_OF_THE_COMMIT_BEFORE --write
ONEDNN_MAX_CPU_ISA=AVX512_CORE python scripts/bench/startup_main.py    # as on a CPU without bfloat16 instructions
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.machine import processor
from kd.report.facts import Facts
from kd.report.records import read_run
from scripts.bench.harness import options, spread, write

PARTS = (
    "drawing",
    "imports, checks, models",
    "training steps",
    "validation",
    "the end",
    "wall",
    "CPU, all processes",
)


def cpu_s() -> float:
    """CPU seconds of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def job(code: Path, items: list[str]) -> tuple[dict[str, float], str]:
    """One run in a user's empty cache; seconds by part, and what came of it."""
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, "PYTHONPATH": str(code), "KD_CACHE": f"{place}/cache"}
        command = [
            sys.executable,
            "-m",
            "kd.cli",
            "recipe=foodtag_vit",
            f"runs_dir={place}/runs",
            *items,
        ]
        began, before = time.time(), cpu_s()
        done = subprocess.run(command, env=env, cwd=code, capture_output=True, text=True)
        wall, cpu = time.time() - began, cpu_s() - before
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        drawn = [file.stat().st_mtime for file in Path(place, "cache").rglob("*.jpg")]
        facts = Facts(read_run(next(Path(place, "runs").glob("*/000"))))
    steps = facts.total["steps"]
    phases = {name: ms * steps / 1000 for name, ms in facts.phases.items()}
    validation = phases.pop("validation", 0.0)
    drawing, training = max(drawn) - min(drawn), facts.step_ms * steps / 1000
    start = facts.startup["s"] - drawing
    values = (
        drawing,
        start,
        training,
        validation,
        wall - drawing - start - training - validation,
        wall,
        cpu,
    )
    summary = facts.run.summary
    came = f"{summary['precision']}, acc1 {summary['student']['val']['acc1']:.3f}"
    return dict(
        zip(PARTS, values, strict=True)
    ), f"{came}, other processes used {facts.other_cores:.1f} cores"


def main() -> None:
    """Runs all, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="a checkout of the commit before")
    parser.add_argument("items", nargs="*", help="settings of the run")
    asked = options(parser)
    arms = {"before": asked.against.resolve()} if asked.against else {}
    arms["now"] = Path(__file__).parents[2]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    told: dict[str, str] = {}
    for _ in range(asked.rounds):
        for name, code in arms.items():
            seconds, told[name] = job(code, asked.items)
            found[name].append(seconds)
            print(name, told[name], {part: round(s, 1) for part, s in seconds.items()}, flush=True)
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all its instructions")
    lines = [
        f"{processor()}, {os.cpu_count()} cores, oneDNN with {isa}; {asked.rounds} rounds in turn. "
        + "; ".join(f"{name}: {text}" for name, text in told.items()) + ".",
        "",
        f"| seconds: median (least to most) | {' | '.join(arms)} |",
        f"|---|{'---|' * len(arms)}",
        *(f"| {part} | {' | '.join(spread([s[part] for s in found[name]]) for name in arms)} |" for part in PARTS),
    ]  # fmt: skip
    write(
        "startup_main",
        asked.hardware,
        asked.date,
        "README's main job from nothing",
        lines,
        asked.write,
    )


if __name__ == "__main__":
    main()
