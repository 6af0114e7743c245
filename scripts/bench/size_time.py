"""How long ``kd-size`` takes to score candidates against another checkout: searches of the same tiny recipe, in turn.

    git worktree add --detach DIR COMMIT
    OMP_NUM_THREADS=1 python scripts/bench/size_time.py --against DIR --candidates 6 12 --rounds 5 --write

Each checkout has a process of its own, which searches when it is its turn, each time in a new folder. Timed is the scoring
alone (start, distillation, held-out pictures); latencies are not measured. Scores must be equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = 60
"""Training pictures of each of the four classes; a fifth of them is held out."""
SIDE = 64
"""Pixels of the models' input."""
SEARCHES = """
import json, sys, time
import kd
from kd.fleet.sizing import search
score, took = search.score, {}
def timed(*arguments):
    wall, cpu = time.perf_counter(), time.process_time()
    score(*arguments)
    took.update(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
def drawn(candidates, *_):
    return {one.name: {"latency_ms": 1e-6 * one.params, "fastest_round_ms": 1, "mb": 1.0} for one in candidates}
search.score, search.latencies = timed, drawn
for line in sys.stdin:
    recipe, given = json.loads(line)
    rows, _ = kd.size(recipe, given)
    took["scores"] = {row["name"]: [row.get("before"), row.get("after")] for row in rows}
    print("RESULT" + json.dumps(took), flush=True)
"""
Search = dict[str, object]
"""Seconds ``wall`` and ``cpu`` of a scoring, and ``scores`` by candidate: before and after the distillation."""


class Checkout:
    """A checkout that searches when it is asked."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.log = (folder / "log.txt").open("w+")
        env = {**os.environ, "PYTHONPATH": str(root), "KD_CACHE": str(folder / "cache")}
        command = [sys.executable, "-c", SEARCHES]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=root, env=env, stdin=pipe, stdout=pipe, stderr=self.log, text=True
        )
        self.searches = 0

    def search(self, recipe: Path, candidates: int, steps: int) -> Search:
        """One search in a new folder."""
        self.searches += 1
        runs = self.folder / str(self.searches) / "runs"
        given = {"candidates": candidates, "steps": steps, "runs_dir": str(runs)}
        print(json.dumps([str(recipe), given]), file=self.process.stdin, flush=True)
        for line in self.process.stdout or []:
            if line.startswith("RESULT"):
                return json.loads(line.removeprefix("RESULT"))
        self.log.seek(0)
        sys.exit(f"a search has ended:\n{self.log.read()[-3000:]}")

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Searches in turn, prints seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--candidates", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--steps", type=int, default=12, help="of the distillation")
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--rounds", type=int, default=5)
    asked = options(parser)
    lines = [
        f"A ViT teacher of six blocks, 96 wide, {SIDE} px; students start from its layers (16 pictures) and are distilled "
        f"for {asked.steps} steps of 16 pictures (logits); {4 * PICTURES} training pictures, of which a fifth scores; "
        f"{asked.workers} loader processes. {asked.rounds} searches by each checkout in turn, whose order changes; one more "
        "before them is not counted. Medians (least to most); the ratio is that of each turn.",
        "",
        "| candidates | checkout | scoring, s | CPU time of its process, s | scores |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        recipe = _recipe(folder, asked.workers)
        here = Checkout(ROOT, folder / "here")
        there = Checkout(asked.against.resolve(), folder / "there")
        checkouts = {"this one": here, "the other": there}
        try:
            for checkout in checkouts.values():
                checkout.search(recipe, 1, 1)
            for candidates in asked.candidates:
                found: dict[str, list] = {name: [] for name in checkouts}
                for number in range(asked.rounds):
                    for name in list(checkouts) if number % 2 else list(reversed(checkouts)):
                        result = checkouts[name].search(recipe, candidates, asked.steps)
                        found[name].append(result)
                        print(candidates, name, result["wall"], result["cpu"], file=sys.stderr)
                lines += _rows(candidates, found)
        finally:
            here.end()
            there.end()
    title = "The time that kd-size takes to score candidates, of two checkouts"
    write("size_time", asked.hardware, asked.date, title, lines, asked.write)


def _rows(candidates: int, found: dict[str, list]) -> list[str]:
    """The table's rows of one number of candidates."""
    here, there = found.values()
    equal = all(one["scores"] == here[0]["scores"] for one in (*here, *there))
    verdict = "equal to the bit" if equal else "DIFFER"
    rows = []
    for name, results in found.items():
        wall, cpu = (spread([one[key] for one in results], 2) for key in ("wall", "cpu"))
        rows.append(f"| {candidates} | {name} | {wall} | {cpu} | {verdict} |")
    ratios = []
    for key in ("wall", "cpu"):
        ratios.append(spread([a[key] / b[key] for a, b in zip(here, there, strict=True)], 2))
    rows.append(f"| {candidates} | this one / the other | {ratios[0]} | {ratios[1]} | |")
    return rows


def _recipe(folder: Path, workers: int) -> Path:
    """The recipe, with pictures and a teacher with weights as drawn."""
    pictures = draw_folder(folder / "data", train=PICTURES, val=2, size=SIDE + 16)
    large = {**TINY, "embed_dim": 96, "depth": 6, "num_heads": 3}
    weights = save_teacher(folder / "teacher.safetensors", **large, img_size=SIDE)
    teacher = {"arch": ARCH, "img_size": SIDE, "kwargs": large, "checkpoint": str(weights)}
    settings = {
        "data__img_size": SIDE,
        "data__batch_size": 16,
        "data__num_workers": workers,
        "model__teacher": teacher,
        "model__student__img_size": SIDE,
        "model__student__inherit": "auto",
        "model__student__inherit_pictures": 16,
        "model__distill_losses": {"kd": {"class_path": "kd.losses.KDLoss"}},
        "trainer__precision": "32-true",
    }
    return write_recipe(folder / "tiny.yaml", pictures, None, **settings)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from scripts.bench.harness import options, spread, write
    from tests._helpers import ARCH, TINY, draw_folder, save_teacher, write_recipe

    main()
