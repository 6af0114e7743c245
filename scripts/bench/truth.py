"""Does the verdict tell the truth? Plants a bottleneck, reads the verdict, follows its advice, measures the gain.

    python scripts/bench/truth.py --out scripts/bench/truth_cpu_2026-11-22.md
    python scripts/bench/truth.py --only "slow optimizer"
    python scripts/bench/truth.py --foreign                # the plants in a training that is not kd's: foreign.py

Each plant is a short run of a tiny pair on drawn pictures; "reached" is images/s of the run that follows the advice
over images/s of the planted one (after the first step, validation left out). Both are repeated in turn, and the median
round counts. Needs a machine to itself: rounds during which other processes took a core are left out, and a row that
has no others is marked: its figures say little.
"""

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[2]))  # started as a script

from kd.report.facts import Facts
from kd.report.limits import Limit
from kd.report.records import RunRecords, read_run
from kd.report.rules import Explained, sentence
from scripts.bench.harness import HERE, ROOT, command_of, environment, options, table

QUIET = 0.25  # cores that other processes may use, on average


def callback(name: str, **arguments: Any) -> str:
    """An item that adds one of our plants."""
    return "trainer.callbacks+=" + json.dumps(
        {"class_path": f"scripts.bench.plants.{name}", "init_args": arguments}
    )  # fmt: skip


@dataclass
class Plant:
    """A bottleneck, a row of ``truth.yaml``.

    Attributes:
        name: for people.
        words: what ``$NAME`` stands for.
        bound: what the verdict must say (one of these).
        mention: a word that the verdict's sentence must hold.
        planted: the words of the command line that plant it.
        followed: those of a run that follows the advice.
        cores: that the run may use; default: all of the machine's.
        neighbours: processes that compute on these cores meanwhile; to follow the advice is to run without them.
    """

    name: str
    words: dict[str, str]
    bound: list[str]
    mention: str
    planted: str = ""
    followed: str = ""
    cores: int | None = None
    neighbours: int = 0

    @property
    def items(self) -> list[str]:
        """The words that plant it, one by one."""
        return Template(self.planted).substitute(self.words).split()

    def follow(self, run: RunRecords) -> list[str]:
        """The words of a run that follows the advice that the planted one was given."""
        lever = own_limit(run).lever
        workers = " ".join(re.findall(r"(?:data\.)?num_workers=\d+", lever))
        advised = {
            "workers": workers,
            "some_workers": workers or self.words["one"],
            "busy_or_cheaper": "" if "cheaper" in lever else self.words["busy"],
        }
        return Template(self.followed).substitute(self.words | advised).split()

    def limit(self, run: RunRecords) -> Limit:
        """What limits the planted run first; other processes of the machine aside, unless they are the plant."""
        if not self.neighbours:
            return own_limit(run)
        limits = Explained(run).limits
        # beside them the short run starts slowly
        return next(limit for limit in limits if limit.bound != "startup")


def plants(pictures: Path) -> list[Plant]:
    """Those of a training of kd on these pictures."""
    return _read("kd", pictures)


def foreign_plants() -> list[Plant]:
    """Those of a training that is not kd's; the items are words of ``foreign.py``."""
    return _read("foreign", Path())


def _read(kind: str, pictures: Path) -> list[Plant]:
    text = (HERE / "truth.yaml").read_text().replace("$pictures", str(pictures))
    table = yaml.safe_load(text)[kind]
    return [Plant(name, table["words"], **row) for name, row in table["plants"].items()]


def train(
    recipe: Path, items: list[str], cores: int | None = None, neighbours: int = 0
) -> RunRecords:
    """One run in a process of its own, one compute thread, on the first ``cores`` cores, beside others that compute.

    Args:
        recipe: of kd-train, or a copy of ``foreign.py``.
        items: settings, or words of ``foreign.py``.
        cores: that it may use; default: all.
        neighbours: processes that compute on them meanwhile.
    """
    root = Path(tempfile.mkdtemp(dir=recipe.parent))
    command = command_of(f"recipe={recipe}", f"runs_dir={root}", *items)
    if recipe.suffix == ".py":
        command = [sys.executable, str(recipe), str(root), *items]
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:cores]))  # the processes inherit it
    try:
        spin = [sys.executable, "-c", "while True: pass"]
        beside = [subprocess.Popen(spin) for _ in range(neighbours)]
        env = environment(OMP_NUM_THREADS="1")
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    finally:
        os.sched_setaffinity(0, allowed)
        for process in beside:
            process.kill()
            process.wait()
    if done.returncode:
        raise RuntimeError(f"{' '.join(items)}: {done.stderr[-2000:]}")
    return read_run(next(root.glob("*/000")))


def prepare(place: Path, per_class: int = 48) -> tuple[Path, Path]:
    """Pictures, and the recipe of a tiny pair whose teacher knows them."""
    from tests._helpers import draw_folder, write_recipe

    pictures = draw_folder(place / "pictures", train=per_class, val=8)
    alone = write_recipe(place / "teacher.yaml", pictures, None, model__student={
        "arch": "vit_tiny_patch16_224", "img_size": 32,
        "kwargs": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}})  # fmt: skip
    teacher = train(alone, ["trainer.max_epochs=4", "optim.lr=0.003"]).folder
    # a step of some 30 ms: what remains of one of 8 ms, when all else is gone, is the bookkeeping around it
    kwargs = {"patch_size": 8, "embed_dim": 192, "depth": 4, "num_heads": 3}
    recipe = write_recipe(
        place / "tiny.yaml", pictures, teacher / "student.safetensors", trainer__log_every_n_steps=5,
        model__student={"arch": "vit_tiny_patch16_224", "img_size": 32, "kwargs": kwargs},
    )  # fmt: skip
    return pictures, recipe


def own_limit(run: RunRecords) -> Limit:
    """What limits a run first, other processes of the machine left aside: they are no doing of the run's."""
    own = (limit for limit in Explained(run).limits if "other processes use" not in limit.text)
    return next(own, Limit("none", "no part of the step stands out", "", None))


@dataclass
class Round:
    """A planted run and the one that follows its advice.

    Attributes:
        limit: what the planted run is bound by.
        reached: the speed-up.
        others: cores that other processes took meanwhile.
    """

    limit: Limit
    reached: float
    others: float


def play(plant: Plant, recipe: Path, items: list[str]) -> Round:
    """One round of a plant."""
    planted = train(recipe, [*plant.items, *items], plant.cores, plant.neighbours)
    after = train(recipe, [*plant.follow(planted), *items], plant.cores)
    reached = (Facts(after).images_per_s or 0) / (Facts(planted).images_per_s or 1)
    others = (
        Facts(after).other_cores
        if plant.neighbours
        else max(Facts(r).other_cores for r in (planted, after))
    )
    return Round(plant.limit(planted), reached, others)


def quiet_ones(rounds: list[Round]) -> list[Round]:
    """Those during which no other process took a core."""
    return [r for r in rounds if r.others <= QUIET]


def prediction(rounds: list[Round]) -> tuple[float, float]:
    """Predicted and reached speed-up, medians."""
    return statistics.median(r.limit.gain or 1.0 for r in rounds), statistics.median(
        r.reached for r in rounds
    )


def row(plant: Plant, rounds: list[Round]) -> list[str]:
    """A line of the table: the quiet rounds', or all with a mark where there are none."""
    quiet = quiet_ones(rounds)
    used = quiet or rounds
    named = sum(r.limit.bound in plant.bound and plant.mention in sentence(r.limit) for r in used)
    middle = sorted(used, key=lambda r: r.reached)[(len(used) - 1) // 2]
    predicted, reached = prediction(used)
    others = f"{statistics.median(r.others for r in used):.1f}{'' if quiet else ' (not quiet)'}"
    return [
        plant.name,
        f"{named} of {len(used)}",
        sentence(middle.limit),
        f"{predicted:.2f}",
        f"{reached:.2f}",
        f"{predicted / reached - 1:+.0%}",
        others,
    ]


def main() -> None:
    """Writes the table."""
    asked = options(__doc__, only=None, foreign=False, out=None, epochs=3, rounds=3)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        if asked.foreign:
            recipe = Path(shutil.copy(HERE / "foreign.py", place))
            items, one_worker = [f"epochs={asked.epochs}"], "num_workers=1"
            planted = foreign_plants()
        else:
            pictures, recipe = prepare(Path(place))
            items, one_worker = [f"trainer.max_epochs={asked.epochs}"], "data.num_workers=1"
            planted = plants(pictures)
        for plant in planted:
            if asked.only in (None, plant.name):
                rounds = [play(plant, recipe, items) for _ in range(asked.rounds)]
                rows.append(row(plant, rounds))
                print(rows[-1], flush=True)
        healthy = train(recipe, [*items, one_worker])
        alarms = ", ".join(finding["rule"] for finding in healthy.summary["findings"]) or "none"
        text = f"{sentence(own_limit(healthy))}; rules: {alarms}"
        rows.append(["nothing", "", text, "", "", "", f"{Facts(healthy).other_cores:.1f}"])
    columns = ["planted", "named", "the verdict", "predicted", "reached", "error"]
    lines = [
        f"# Planted bottlenecks, {platform.machine()}, {os.cpu_count()} cores",
        "",
        f"`python scripts/bench/truth.py {' '.join(sys.argv[1:])}`; batch 8, one compute thread; medians of the rounds in "
        f"which other processes took {QUIET} cores or less.",
        "",
        *table([*columns, "cores that others took"], rows),
    ]
    print("\n".join(lines))
    if asked.out:
        Path(asked.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
