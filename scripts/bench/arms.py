"""A comparison of trainings: a file names its arms, each is a run of ``kd-train`` for each seed, a table comes out.

    python scripts/bench/arms.py teacher --set recipe=foodtag_vit --seeds 0 1 2 --write
    python scripts/bench/arms.py foundation_features --give grocery=DIR dino=FILE --arm distilled --seeds 0 1 2

``arms/NAME.yaml`` holds::

    title: what is compared
    needs: {grocery: "folder of train/ and val/, a folder a class"}    # said by --give, stand as <grocery>
    metrics: {acc1: "val acc1 %"}       # of the student's validation; a column with % is in per cent
    shared: {recipe: grocery_vit, data.source.root: <grocery>}         # settings of all arms
    arms: {with: {}, without: {optim.name: adamw, model.teacher: null}}   # null leaves out the shared settings below

``<here>`` stands for this folder, ``<seed>`` for the seed, ``<run ARM>`` for the folder of that arm's run with the same
seed, so an arm can begin where another ended. Seeds are outermost: drift of the machine meets all arms alike. A finished
run is read again, one that was stopped resumes. Printed is the last epoch, nothing is selected. ``--set KEY=VALUE ...``: for
all arms; ``--arm WORD ...``: those alone whose name holds one of the words; ``--runs DIR``: where they are.
"""

import json
import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import HERE, mean_of, options, run_kd, table, write


@dataclass
class Comparison:
    """A file of arms, its places filled in.

    Attributes:
        title: what is compared.
        metrics: of the student's validation -> title of a column.
        arms: name -> settings, those that all share among them.
        runs: folder of the runs.
    """

    title: str
    metrics: Mapping[str, str]
    arms: Mapping[str, Mapping[str, Any]]
    runs: Path

    @classmethod
    def read(
        cls, file: Path, given: dict[str, str], more: dict[str, Any], runs: Path
    ) -> "Comparison":
        """Reads ``file``.

        Args:
            file: of arms.
            given: what the file needs.
            more: settings for all arms, in place of the file's.
            runs: folder of the runs.

        Raises:
            SystemExit: Something that it needs was not given.
        """
        text = file.read_text()
        needs = yaml.safe_load(text).get("needs", {})
        for name, what in needs.items():
            if name not in given:
                sys.exit(f"--give {name}=...: {what}")
        for name, value in (given | {"here": str(HERE)}).items():
            text = text.replace(f"<{name}>", value)
        held = yaml.safe_load(text)
        shared = held.get("shared", {}) | more
        arms = {name: merged(shared, own) for name, own in held["arms"].items()}
        return cls(held["title"], held["metrics"], arms, runs)

    def folder(self, arm: str, seed: int) -> Path:
        """Of a run, finished or not; its recipe's name is in the middle."""
        recipe = Path(str(self.arms[arm]["recipe"])).stem
        return self.runs / recipe / f"{re.sub('[^A-Za-z0-9.]+', '_', arm)}-{seed}"

    def words(self, arm: str, seed: int) -> list[str]:
        """What follows ``kd-train`` for an arm."""
        words = []
        for key, value in self.arms[arm].items():
            text = value if isinstance(value, str) else json.dumps(value)
            text = text.replace("<seed>", str(seed))
            text = re.sub("<run (.+?)>", lambda found: str(self.folder(found[1], seed)), text)
            words.append(f"{key}={text}")
        return words

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        """Trains one arm, or reads what it gave.

        Returns:
            The run's summary.
        """
        folder = self.folder(arm, seed)
        summary = folder / "summary.json"
        if not (summary.is_file() and json.loads(summary.read_text())["status"] == "done"):
            words = [f"resume={folder}"]
            if not (folder / "checkpoints" / "last.ckpt").is_file():
                words = [*self.words(arm, seed), f"seed={seed}", f"name={folder.name}"]
                words.append(f"runs_dir={self.runs}")
            run_kd("--trust", *words)
        return json.loads(summary.read_text())


def merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """An arm's settings over those of all; a key of the arm that is null takes the shared ones at and below it away."""
    gone = tuple(key for key, value in own.items() if value is None)
    left = {}
    for key, value in shared.items():
        is_gone = any(key == place or key.startswith(f"{place}.") for place in gone)
        if not is_gone:
            left[key] = value
    return left | {key: value for key, value in own.items() if value is not None}


def cell(values: list[float], title: str) -> str:
    """Mean and standard deviation over the seeds; in per cent where the column's title says so."""
    if "%" in title:
        return mean_of([100 * value for value in values])
    return mean_of(values, 3)


def row(name: str, scores: list[dict[str, float]], metrics: Mapping[str, str]) -> list[str]:
    """Cells of a line: each metric, empty where it was not measured."""
    cells = [name]
    for metric, title in metrics.items():
        values = [score[metric] for score in scores if metric in score]
        cells.append(cell(values, title) if values else "")
    return cells


def rows(found: dict[str, list[dict[str, Any]]], metrics: Mapping[str, str]) -> list[list[str]]:
    """Teachers, then each arm, with minutes of the whole run and pictures a second of its steps."""
    teachers = {}
    for summaries in found.values():
        teacher = summaries[0].get("teacher") or {}
        if "val" in teacher:
            teachers[f"teacher {teacher['arch']}"] = teacher["val"]
    lines = [[*row(name, [score], metrics), "", ""] for name, score in teachers.items()]
    for arm, summaries in found.items():
        cells = row(arm, [summary["student"]["val"] for summary in summaries], metrics)
        minutes = statistics.median(summary["wall_s"] for summary in summaries) / 60
        speed = statistics.median(summary["images_per_s"] for summary in summaries)
        lines.append([*cells, f"{minutes:.1f}", f"{speed:.0f}"])
    return lines


def settings_from(words: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` words as a dict."""
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    """Trains what is not there yet and writes the table."""
    asked = options(__doc__, "name", seeds=[0], arm=[], give=[], set=[], runs="runs/bench")
    file = HERE / "arms" / f"{asked.name}.yaml"
    if not file.is_file():
        file = Path(asked.name)
    more = settings_from(asked.set)
    runs = Path(asked.runs).resolve() / file.stem
    comparison = Comparison.read(file, settings_from(asked.give), more, runs)
    chosen = list(comparison.arms)
    if asked.arm:
        chosen = [arm for arm in chosen if any(word in arm for word in asked.arm)]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in chosen}
    for seed in asked.seeds:
        for arm in chosen:
            found[arm].append(comparison.run(arm, seed))
            print(arm, seed, found[arm][-1]["student"]["val"], flush=True)
    first = found[chosen[0]][0]
    lines = [
        f"Seeds {', '.join(map(str, asked.seeds))}; {first['epochs']} epochs of {first['data']['train']} training "
        f"pictures, {first['data']['val']} of validation, batch {first['batch_size']}, {first['precision']}; last epoch, "
        f"mean ± standard deviation over the seeds. Also set: {' '.join(asked.set) or 'nothing'}.",
        "",
        *table(
            ["", *comparison.metrics.values(), "minutes", "images/s"],
            rows(found, comparison.metrics),
        ),
    ]
    write(asked, file.stem, comparison.title, lines)


if __name__ == "__main__":
    main()
