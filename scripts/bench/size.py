"""Do scores before training rank the sizes of students? Spearman's rank correlation with what training makes of them.

    python scripts/bench/size.py recipe=grocery_vit data.source.root=DIR model.teacher.checkpoint=TEACHER \
        [candidates=12] [sizes=w192d12h3,...] [epochs=5]

Each size is scored right after inheriting, as ``kd-size`` does on held-out training pictures, then trained with the
recipe for some epochs from a fresh start, and validated. Printed: all figures, rho of the score with the result, and how
much worse the size with the best score is than the best in hindsight. ``sizes=``
takes these of the grid, beside the recipe's own student, instead of the default ones.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from torchmetrics.functional import spearman_corrcoef

sys.path.insert(0, str(Path(__file__).parents[2]))

import kd
from kd.fleet.sizing import search
from kd.fleet.sizing.candidates import candidates

OWN = {"candidates": 12, "epochs": 5}


def main(words: list[str]) -> None:
    """Runs the comparison for a recipe and prints it as Markdown."""
    given = dict(word.split("=", 1) for word in words)
    own = {key: int(given.pop(key, default)) for key, default in OWN.items()}
    recipe, named = given.pop("recipe"), given.pop("sizes", "")
    if named:
        search.candidates = lambda *words: [
            one
            for one in candidates(*words[:4], 1000)
            if one.of_recipe or one.name in named.split(",")
        ]
    settings = {"runs_dir": tempfile.mkdtemp(prefix="kd-bench-") + "/runs", **given}
    start = time.process_time()
    rows, _ = kd.size(recipe, {**settings, "candidates": own["candidates"]})
    searched = time.process_time() - start
    for row in rows:
        student = {
            f"model.student.{key}": row[key] for key in ("arch", "img_size", "kwargs", "inherit")
        }
        result = kd.train(recipe, {**settings, **student, "trainer.max_epochs": own["epochs"]})
        row["trained"] = result.summary["student"]["val"][METRIC]
    show(rows, own, searched)


METRIC = "acc1"


def show(rows: list[dict], own: dict[str, int], seconds: float) -> None:
    """Prints the table and what follows from it."""
    print(f"\n| size | parameters (M) | ms | before | val after {own['epochs']} epochs |")
    print("|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["params"]):
        print(f"| {row['name']} | {row['params_m']:.3f} | {row['latency_ms']:.2f} | {row['before']:.1%} | "
              f"{row['trained']:.1%} |")  # fmt: skip
    trained = torch.tensor([row["trained"] for row in rows])
    for key in ("before", "params_m"):
        score = torch.tensor([float(row[key]) for row in rows])
        lost = float(trained.max() - trained[score.argmax()])
        print(f"\n{key}: rho {float(spearman_corrcoef(score, trained)):.3f} over {len(rows)} sizes; its best is "
              f"{100 * lost:.1f} points below the best in hindsight")  # fmt: skip
    print(f"\nkd-size took {seconds:.0f} s of CPU time")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not any(re.match("recipe=", word) for word in sys.argv[1:]):
        sys.exit(__doc__)
    main(sys.argv[1:])
