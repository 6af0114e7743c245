"""Does kd-report say the same of 3,000 drawn runs? Compares limits, findings, what-if and pages with those that are kept.

    python scripts/reports_equal.py [--repo FOLDER_OF_A_CHECKOUT]     compares with reports_equal.txt, beside this file
    python scripts/reports_equal.py --show 17 [--repo ...]            all that is said of run 17
    python scripts/reports_equal.py --write                           keeps what this checkout says

Each run is a folder as kd-train writes it, drawn by its number: GPUs or CPUs, one to four ranks, a data tier, a data set
without an end, a teacher's cache, answers from elsewhere, trainings that are not kd's. The kept file has a line a run: its
headline, the rules that fire (the file's head names and counts them), and hashes of its limits, of its findings, of its
what-if and of its page (names and numbers), and of all words. Differences in words alone are counted apart. Exits with 1
where anything differs. One minute on one core; a test compares the first hundred. :func:`explain` is the only code that
knows kd.
"""

import argparse
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

RUNS = 3000
KEPT = Path(__file__).with_suffix(".txt")
NOW = 1_800_000_000.0  # the clock while a run is explained
PARTS = ("limits", "findings", "what_if", "page", "words")
Drawn = dict[str, Any]


def explain(folder: Path, change: list[str]) -> dict[str, Any]:
    """What kd says of a run's folder, and of it with a change: the words of ``kd-report RUN --what-if``.

    Returns:
        ``limits``: (bound, gain or None, text) of each, the headline first; ``findings``: (rule, text) of each;
        ``what_if``: lines; ``page``: the page's sections; ``notes``: what could not be read or worked out.
    """
    from kd.commands.report import WhatIf
    from kd.errors import UserError
    from kd.report.costs import outlook_table
    from kd.report.html import finite
    from kd.report.records import read_run
    from kd.report.rules import Explained
    from kd.report.sections import report
    from kd.run.options import options_of

    explained = Explained(read_run(folder))
    limits = [(x.bound, x.gain, f"{x.text}; {x.lever}") for x in explained.limits]
    findings = [(x.rule, f"{x.text}; {x.lever}") for x in explained.findings]
    try:
        wanted = options_of(WhatIf, dict(word.split("=", 1) for word in change))
        what_if = [*map(str, outlook_table(explained.facts, wanted).rows)]
    except UserError as error:
        what_if = [str(error)]
    page = [finite(x if isinstance(x, dict) else asdict(x)) for x in report(explained)]
    notes = [explained.verdict["text"], *explained.run.notes, *explained.failures]
    return {
        "limits": limits,
        "findings": sorted(findings),
        "what_if": what_if,
        "page": page,
        "notes": notes,
    }


# -- drawing a run -----------------------------------------------------------------------------------------------------
class Draw:
    """A run by its number: what it has, and its files, each by a method.

    Attributes:
        has: what it has, in words.
        begun: Unix time of its start.
    """

    def __init__(self, number: int) -> None:
        self._random = random.Random(str(number))
        self.uniform = self._random.uniform
        self.one_of = self._random.choice
        self.gpu = self.often(0.5)
        self.of_kd = self.often(0.9)
        self.ranks = self.one_of((1, 1, 1, 2, 4))
        self.nodes = self.one_of((1, 2)) if self.ranks > 1 else 1
        self.tier = self.of_kd and self.often(0.2)
        self.elsewhere = self.of_kd and self.often(0.1)
        self.cached = self.often(0.3)
        self.cores = self.one_of((1, 2, 4, 16))
        self.workers = self.one_of((0, 1, 2, 4, 8))
        self.batches = self.one_of((0, 5, 50, 50, 400, 400))
        self.epochs = self.one_of((1, 2, 10, 100))
        self.metric = self.one_of(("acc1", "acc1", "acc1", "rmse"))
        self.begun = NOW - self.one_of((600.0, 4000.0, 90000.0))
        # one in most samples: of two in equally many either may be named
        self.threads = self.one_of((("pt_main", "pt_main", "grad"), ("grad", "grad", "pt_main")))
        self.thresholds = self._thresholds() if self.often(0.5) else {}
        names = {"GPU": self.gpu, "CPU": not self.gpu, "ranks": self.ranks > 1, "tier": self.tier}
        names |= {"elsewhere": self.elsewhere, "not kd's": not self.of_kd}
        self.has = ", ".join(name for name, there in names.items() if there)

    # -- numbers --
    def often(self, share: float) -> bool:
        """True in ``share`` of the draws."""
        return self._random.random() < share

    def small(self, most: float) -> float:
        """Mostly much less than ``most``."""
        return float(self._random.random() ** 3 * most)

    def series(self, count: int, low: float, high: float) -> list[float]:
        """Numbers near a level or a slope, with a spread, within ``low`` and ``high``."""
        level = self.uniform(low, high)
        spread = self.one_of((0.02, 0.2, 1.0)) * (high - low)
        slope = self.one_of((0.0, 0.0, 1.0, -1.0)) * (high - low)
        values = []
        for i in range(count):
            value = level + slope * i / count + self.uniform(-spread, spread) / 2
            values.append(round(min(high, max(low, value)), 4))
        return values

    def some(self, **values: Callable[[], Any]) -> Drawn:
        """Each value in half of the draws."""
        return {name: draw() for name, draw in values.items() if self.often(0.5)}

    def head(self, of: str, **more: Any) -> Drawn:
        """The header of a file of records."""
        return {"kind": "header", "schema": 1, "of": of, **more}

    # -- files --
    def files(self) -> Drawn:
        """Text, or the records of a ``.jsonl``, by name."""
        files: Drawn = {"records/health.jsonl": self._health()}
        files["fidelity.json"] = json.dumps(self._fidelity())
        header, phases = self._header(), self._phases()
        slow = self.often(0.04)  # some of many steps
        for rank in range(self.ranks):
            steps = self._steps(rank, header, phases, slow)
            files[f"records/phases.rank{rank}.jsonl"] = steps
            if self.tier:
                files[f"records/tier.rank{rank}.jsonl"] = self._tier_of(rank)
        for node in range(self.nodes):
            files[f"records/system.node{node}.jsonl"] = self._samples(node)
        rows = self._metrics()
        files["metrics.csv"] = _csv(rows)
        if self.often(0.2):
            near = self.one_of((0.0, 1e-8, 1e-2))
            other = [{**row, "train/loss": row["train/loss"] + near} for row in rows]
            files["../other/metrics.csv"] = _csv(other)
        files["config.yaml"] = json.dumps(self._config())
        files["summary.json"] = json.dumps(self._summary())
        if self.often(0.1):
            machines = self.one_of(("4 x c5", "some"))
            group = {"name": "data", "machines": machines, "price_per_hour": 2.0}
            files["job.json"] = json.dumps({"groups": [group]})
        return files

    def change(self) -> list[str]:
        """The words of a what-if; some contradict each other or the run."""
        values = {
            "cache": ("on", "off"), "pixels": ("on", "off"), "workers": (0, 1, 4, 16), "gpus": (1, 2, 8), "epochs": (1, 20),
            "price": (2.5,), "machines": (2, 4),
        }  # fmt: skip
        keys = self._random.sample(list(values), self.one_of((0, 1, 1, 2, 3)))
        words = [f"{key}={self.one_of(values[key])}" for key in keys]
        return [word for word in words if not word.startswith("pixels=")]  # drawn, and gone since

    def _thresholds(self) -> Drawn:
        """Those that let short series count, as a user may set them."""
        few = {"skip": 5, "window": 30}
        return {
            "CPUBottleneck.skip": 5, "IOBottleneck": {"skip": 5}, "LowGPUUtilization": few, "BatchSize.skip": 5,
            "GPUMemoryIncrease": {"skip": 0}, "StepOutlier": {"sigma": 2, "ignore": 1},
            **self.some(**{"Overtraining.patience": lambda: 4, "TemperatureTooLow.low": lambda: 0.1}),
        }  # fmt: skip

    def _header(self) -> Drawn:
        """Of the steps of all ranks."""
        header = self.head(
            "steps", t=self.begun, device="cuda" if self.gpu else "cpu", cores=self.cores, threads=self.one_of((1, 2)),
            processes=self.ranks // self.nodes, batch_size=self.one_of((8, 64)), world_size=self.ranks,
            max_epochs=self.one_of((self.epochs, -1)), max_steps=self.one_of((-1, 300)), of_kd=self.of_kd,
            precision=self.one_of(("32-true", "bf16-mixed")), val=self.one_of((40, 400)), primary=self.metric,
        )  # fmt: skip
        header |= self.some(
            cacheable=lambda: self.often(0.7), cached=lambda: self.cached, pixels=lambda: self.cached and self.often(0.5),
            feature_bytes=lambda: 768, accumulate=lambda: 2, price_per_hour=lambda: round(self.uniform(1, 40), 2),
            input_machines=lambda: {"c5": {"vcpus": 16, "price": 0.7}, "p4d": {"vcpus": 96, "price": 32.0, "gpus": 8}},
        )  # fmt: skip
        if self.batches:
            header["batches_per_epoch"] = self.batches
        if self.of_kd or self.often(0.5):
            header["num_workers"] = self.workers
        if not self.gpu:
            header["bfloat16_time"] = self.one_of((None, 0.5, 1.0, 3.0, 20.0))
        if self.often(0.3):
            header["more_fit"] = self.one_of((0, 40, 400))
            header |= {"more_by_zero": self.one_of((0, 16)), "more_by_fsdp": self.one_of((0, 32))}
        if self.nodes > 1:
            header["efa_network"] = self.one_of(("", "Socket", "Libfabric"))
        if self.elsewhere:
            header["teacher_elsewhere"] = self.one_of(("address", "file"))
        return header

    def _phases(self) -> dict[str, float]:
        """Milliseconds of a step, by phase."""
        phases = {"data": self.small(200), "h2d": self.small(5), "optimizer": self.small(60)}
        phases |= {"backward": self.uniform(10, 100), "logging": self.small(40)}
        phases["checkpoint"] = self.small(60)
        if self.ranks > 1:
            phases["communication"] = self.uniform(0, 90)
        if self.of_kd:
            return {
                **phases,
                "teacher": self.small(200),
                "student": self.uniform(5, 60),
                "loss": 1.0,
            }
        return {**phases, "forward": self.uniform(5, 60), "rest": self.small(10)}

    def _steps(self, rank: int, header: Drawn, phases: dict[str, float], slow: bool) -> list[Drawn]:
        """Steps of a rank, its totals, and the start of the first one."""
        first_core = self.cores * rank if self.often(0.1) else 0  # cores of its own
        of_rank = {"rank": rank, "host": f"host{rank * self.nodes // self.ranks}"}
        lines = [
            {**header, **of_rank, "core_ids": list(range(first_core, first_core + self.cores))}
        ]
        times, swings = self.one_of((1.0, 1.0, 1.05, 1.4)), self.one_of((0.02, 0.2, 2.0))
        count = 340 if slow else self.one_of((3, 15, 30, 60))
        sums: Counter[str] = Counter()
        for i in range(count):
            p = {k: round(ms * times * self.uniform(1, 1 + swings), 3) for k, ms in phases.items()}
            if slow and i % 28 == 5:
                p["data"] += 20_000
            sums.update(p)
            epoch, batch = divmod(i, self.batches or 400)
            step = {"kind": "step", "step": i, "epoch": epoch, "t": self.begun + i, "p": p}
            lines.append({**step, "ms": sum(p.values()), **({} if batch else {"first": True})})
        ms = sum(sums.values())
        if self.often(0.5):
            sums["validation"] = self.small(100) * count
        callbacks = {"EMA": self.uniform(0, 1) * sums["logging"], "Log": 0.1 * sums["logging"]}
        if self.often(0.9):
            lines.append({
                "kind": "total", "steps": count, "ms": ms, "p": dict(sums), "t": self.begun + self.uniform(60, 6000),
                "ready_ms": self.small(0.6) * ms, "data_ready_ms": self.small(0.5) * sums["data"],
                "data_cpu_ms": self.uniform(0, 1) * sums["data"], "launch_ms": ms * self.one_of((0.3, 0.95)),
                "callbacks": self.one_of(({}, callbacks)),
            })  # fmt: skip
        if rank == 0:
            start_s = self.one_of((5.0, 5.0, 70.0, 120.0, 2000.0))
            parts = {"teacher": 0.3 * start_s, "first step": 0.05 * start_s}
            parts["fit of the inherited start"] = self.uniform(0, 0.6) * start_s
            start = {"kind": "event", "name": "startup", "s": start_s}
            lines.append({**start, "parts": self.one_of(({}, parts))})
        return lines

    def _samples(self, node: int) -> list[Drawn]:
        """Readings of one machine; many only where the rules' own thresholds hold."""
        many = not self.thresholds and self.often(0.05)
        count = self.one_of((150, 1200)) if many else self.one_of((0, 25, 60))
        gpus = range(self.one_of((1, 2)) if self.gpu else 0)
        cores = [self.series(count, 0, 100) for _ in range(self.cores)]
        most = self.one_of((0, 8, 60, 100))
        if self.cores > 2 and self.often(0.2):  # a few are full
            cores = [[100.0] * count, *(self.series(count, 0, 40) for _ in cores[1:])]
        elif self.gpu and self.often(0.15):
            cores, most = [self.series(count, 88, 100) for _ in cores], 8
        util = [self.series(count, 0, self.one_of((most, most, 100))) for _ in gpus]
        memory = [self.series(count, 5, self.one_of((50, 90))) for _ in gpus]
        series = {"swap_mb": self.series(count, 0, 500), "rss_mb": self.series(count, 900, 2000)}
        series["iowait"] = self.series(count, 0, 100)
        known = {name for name in (*series, "main", "wait", "util") if self.often(0.7)}
        wait, main, hot = (
            self.one_of((0.0, 6.0, 80.0)),
            self.one_of((10, 100)),
            self.one_of((0, 0, 0.2)),
        )
        lines = [self.head("system", node=f"node{node}", core_ids=list(range(self.cores)))]
        for i in range(count):
            sample = {name: series[name][i] for name in sorted(known & set(series))}
            if "main" in known:
                busy = [self.uniform(20, 100) for _ in range(self.workers)]
                sample |= {"main": self.uniform(0, main), "workers": busy}
            if "wait" in known:
                sample |= {
                    "thread": self.threads[i % 3],
                    "thread_wait": [self.uniform(0, wait)],
                }
                sample["loader_wait"] = [self.uniform(0, wait)] * min(1, self.workers)
            readings = []
            for gpu in gpus:
                reading = {"mem": memory[gpu][i], "throttle": ["heat"] if self.often(hot) else []}
                readings.append({**reading, **({"util": util[gpu][i]} if "util" in known else {})})
            if readings and not self.often(0.02):
                sample["gpu"] = readings
            use = [core[i] for core in cores]
            lines.append({"kind": "sample", "t": self.begun + i, "cpu": use, "mem": 40.0, **sample})
        return lines

    def _tier_of(self, rank: int) -> list[Drawn]:
        """Readings of one or two data machines, one of which may leave."""
        lines = [self.head("tier", rank=rank)]
        nodes = self.one_of((["d0"], ["d0", "d1"]))
        rate, busy, leaves = self.uniform(1, 40), self.uniform(0.2, 1), self.often(0.2)
        for i in range(self.one_of((1, 3, 5))):
            made = {
                "cores": 8,
                "makers": 4,
                "batches": int(rate * i * 10),
                "busy_s": busy * i * 40,
                "mb": 30 * i,
            }
            machines = [
                {"node": n, "name": n, "gone": leaves and n == "d1" and i == 4, **made}
                for n in nodes
            ]
            lines.append({"kind": "tier", "t": self.begun + 10 * i, "machines": machines, "ready": self.uniform(0, 8),
                          "may_ask": self.one_of((2, 40)), "made_again": i, "made_twice": 0})  # fmt: skip
        return lines

    def _health(self) -> list[Drawn]:
        """Readings of a student's gradients, layers and pictures."""
        pictures = {"train": (3, 50, 60), "val": (5, 40, 60)}
        counts = {
            split: [self.one_of(sizes) for _ in range(4)] for split, sizes in pictures.items()
        }
        lines = [self.head("health", counts=counts)]
        norm, update, entropy = (
            10 ** self.uniform(-9, 2),
            10 ** self.uniform(-9, 0),
            self.one_of((0.01, 0.5, 0.99)),
        )
        size, width = self.one_of((1e-7, 0.1, 1.0, 1e4)), self.one_of((1.0, 5.0))
        later = self.one_of((norm, norm, norm, norm, norm, 500 * norm, None))
        frozen, are_bytes = self.often(0.1), self.often(0.8)
        for i in range(self.one_of((0, 2, 6))):
            lines.append({
                "kind": "health", "step": 50 * i, "grad_norm": later if i == 4 else norm, "update_ratio": update,
                "teacher_entropy": entropy + self.uniform(-0.01, 0.01), "unchanged": ["w"] if frozen else [],
                "spread": {layer: size * 10 ** self.uniform(-width, width) for layer in "abc"},
                "zeros": {"a": 0.2, "c": self.one_of((0.1, 0.4, 1.0))}, "dead": {layer: self.small(1) for layer in "abc"},
                "saturated": {layer: self.small(1) for layer in "abc"},
                "inputs": {"constant": self.small(0.3), "duplicated": self.small(0.5), "low": 0.0, "bytes": are_bytes,
                           "high": self.one_of((1.0, 255.0, 255.0))},
                "loss_shares": {"kd": self.uniform(0, 1), "task": self.small(0.2)},
            })  # fmt: skip
        return lines

    def _fidelity(self) -> Drawn:
        """Mistakes among four classes."""
        bees = {"is": "ant", "called": "bee", "student": self.one_of((2, 12, 30))}
        dogs = {"is": "cat", "called": "dog", "student": self.one_of((1, 11))}
        counts = {"ant": self.one_of((5, 40)), "bee": 40, "cat": self.one_of((5, 30)), "dog": 40}
        rows = [{"name": name, "count": count} for name, count in counts.items()]
        return {"kind": "classification", "per_class": rows, "confusions": [bees, dogs]}

    def _metrics(self) -> list[dict[str, float]]:
        """Rows of ``metrics.csv``: two steps and a validation an epoch; flat, rising or falling."""
        epochs = self.one_of((2, 6, 15))
        loss = self.series(2 * epochs, *self.one_of(((0.1, 0.4), (2.0, 2.01), (0.1, 9.0))))
        kd = self.series(epochs, *self.one_of(((1.0, 1.004), (0.2, 3.0))))
        score = self.series(epochs, *self.one_of(((0.5, 0.502), (0.1, 0.9))))
        agreement = self.series(epochs, *self.one_of(((0.5, 0.503), (0.2, 0.95))))
        kl, rankme = (
            self.series(epochs, *self.one_of(((0.5, 0.5005), (0.1, 2)))),
            self.uniform(3, 60),
        )
        rows: list[dict[str, float]] = []
        for epoch in range(epochs):
            for i in (2 * epoch, 2 * epoch + 1):
                rows.append(
                    {
                        "epoch": epoch,
                        "step": 10 * i,
                        "train/loss": loss[i],
                        "train/kd_loss": kd[epoch],
                    }
                )
            rows[-1] |= {f"val/{self.metric}": score[epoch], "val/kl": kl[epoch], "val/agreement": agreement[epoch],
                         "val/rankme": rankme}  # fmt: skip
        return rows

    def _config(self) -> Drawn:
        """``config.yaml``."""
        cache = "on" if self.cached else self.one_of(("off", "auto"))
        views = self.one_of((1, 4, 8))
        teacher = self.some(cache=lambda: cache, cache_views=lambda: views, cache_topk=lambda: 10)
        if self.elsewhere:
            teacher["builder"] = {"init_args": self.some(rate=lambda: 20.0)}
        model = {"teacher": teacher, "distill_losses": self.one_of(({}, {"kd": "KDLoss"}))}
        model["task_loss_weight"] = self.one_of((0, 0.5))
        data = {"balance_classes": self.often(0.3), **self.some(num_workers=lambda: "auto")}
        monitor = self.some(price_per_hour=lambda: 3.5, instances=lambda: ["2*c5", "p4d:on_demand"])
        monitor["thresholds"] = self.thresholds
        return {
            "model": model,
            "data": data,
            "trainer": {"max_epochs": self.epochs},
            "monitor": monitor,
        }

    def _summary(self) -> Drawn:
        """``summary.json``; a run without a status still trains, or was killed."""
        scores = [round(self.uniform(0.1, 0.9), 3) for _ in range(3)]
        best = {self.metric: scores[0], "epoch": self.one_of((0, 3))}
        student = self.some(best_val=lambda: best, start_val=lambda: {self.metric: scores[1]})
        student |= {
            "val": {self.metric: scores[2]},
            "lr": 1e-3,
            "start": self.one_of(("scratch", "inherited")),
        }
        teacher = self.some(
            pictures=lambda: self.one_of((8, 150)), remedy=lambda: "model.teacher.classes=FILE"
        )
        teacher |= {"arch": "vit", "val": {"acc1": self.one_of((0.2, 0.4, 0.9))}}
        answers = {
            "answers_read": self.one_of((0, 1000, 4000)),
            "answers_computed": self.one_of((0, 100, 3000)),
        }
        summary = self.some(
            epochs=lambda: self.one_of((1, self.epochs)), wall_s=lambda: self.uniform(60, 9000), cache=lambda: answers,
            data=lambda: {"classes": 100, "train": 5000},
        )  # fmt: skip
        ended = self.one_of(({"status": "done"}, {"status": "done"}, {"status": "interrupted"}, {}))
        return {**summary, **ended, "student": student, "teacher": teacher}


def _csv(rows: list[dict[str, float]]) -> str:
    columns = sorted({column for row in rows for column in row})
    lines = [",".join(str(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join([",".join(columns), *lines]) + "\n"


def write(files: Drawn, folder: Path) -> None:
    """Writes a drawn run's files, all of one time."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        file.write_text(content)
        os.utime(file, (NOW, NOW))


# -- what is said of it ------------------------------------------------------------------------------------------------
def said_of(number: int) -> tuple[str, dict[str, Any]]:
    """What a run has, with the words of its change, and what is said of it."""
    drawn = Draw(number)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "recipe", "run")
        folder.mkdir(parents=True)
        write(drawn.files(), folder)
        change = drawn.change()
        said = explain(folder, change)
        text = json.dumps(said).replace(str(folder), "RUN")
    return f"{drawn.has}; what if {' '.join(change)}", json.loads(text)


def figures(texts: list[str]) -> list[str]:
    """The numbers and settings in texts: they stay where words change."""
    pattern = r"[\w.]+=[\w.:]*\w|\d+(?:[.,]\d+)*"
    return [found for text in texts for found in re.findall(pattern, text)]


def digest(content: Any) -> str:
    """Six characters; gains to six digits, as sums may be taken in another order."""
    text = re.sub(r"\d+\.\d{7,}", lambda m: f"{float(m[0]):.6g}", json.dumps(content))
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def line_of(number: int, said: dict[str, Any], codes: dict[str, str]) -> str:
    """A run's line of the kept file: its headline, the codes of the rules that fire, and hashes of :data:`PARTS`."""
    limits = [[bound, gain, figures([text])] for bound, gain, text in said["limits"]]
    findings = [[rule, figures([text])] for rule, text in said["findings"]]
    headline = limits[0][0] if limits else "-"
    rules = ",".join(codes.get(rule, rule) for rule in rules_of(said)) or "-"
    what_if = figures(said["what_if"])
    page = figures([json.dumps(said["page"])])
    hashes = [digest(part) for part in (limits, findings, what_if, page, said)]
    return f"{number} {headline} {rules} {' '.join(hashes)}"


def rules_of(said: dict[str, Any]) -> list[str]:
    """The rules that fire, by name."""
    return sorted({rule for rule, _ in said["findings"]})


def read_kept() -> tuple[dict[str, str], dict[str, str]]:
    """The kept file: a line by the run's number, and the rules' codes by name."""
    kept = {}
    codes = {}
    for line in KEPT.read_text().splitlines():
        first, second, third, *_ = line.split(" ")
        if first == "#":
            codes[third] = second
        else:
            kept[first] = line
    return kept, codes


def differences(
    kept: dict[str, str], found: list[str], codes: dict[str, str]
) -> Iterator[tuple[str, bool]]:
    """Of each run of which something else is said: what, in words, and whether it is the words alone."""
    names = {code: rule for rule, code in codes.items()}
    for line in found:
        number, headline, rules, *hashes = line.split(" ")
        before = kept[number]
        if before == line:
            continue
        _, headline_before, rules_before, *hashes_before = before.split(" ")
        parts = []
        for part, now, then in zip(PARTS, hashes, hashes_before, strict=True):
            if now != then:
                parts.append(part)
        only_words = parts == ["words"]
        if headline != headline_before:
            parts.append(f"{headline_before} is {headline} now")
        fire, fired = set(rules.split(",")), set(rules_before.split(","))
        for code in sorted((fire ^ fired) - {"-"}):
            parts.append(f"{names.get(code, code)} {'fires' if code in fire else 'no longer'}")
        yield f"{number} ({Draw(int(number)).has}): {', '.join(parts)}", only_words


def main() -> int:
    """Runs the command; the exit status is 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repo", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--show", type=int, help="all that is said of this run")
    parser.add_argument("--write", action="store_true", help="keep what is said")
    options = parser.parse_args()
    sys.path.insert(0, str(options.repo.resolve()))
    time.time = lambda: NOW  # rules compare it with the records'
    import kd

    assert Path(kd.__file__).is_relative_to(options.repo.resolve()), kd.__file__
    if options.show is not None:
        has, said = said_of(options.show)
        print(has, json.dumps(said, indent=1), sep="\n")
        return 0

    said_of_all = [said_of(number)[1] for number in range(RUNS)]
    counts = Counter(rule for said in said_of_all for rule in rules_of(said))
    if options.write:
        codes = {rule: str(code) for code, rule in enumerate(sorted(counts))}
        head = [f"# {codes[rule]} {rule} fires in {counts[rule]} runs" for rule in sorted(counts)]
        lines = [line_of(number, said, codes) for number, said in enumerate(said_of_all)]
        KEPT.write_text("\n".join([*head, *lines]) + "\n")
        print("kept in", KEPT)
        return 0

    kept, codes = read_kept()
    found = [line_of(number, said, codes) for number, said in enumerate(said_of_all)]
    different = list(differences(kept, found, codes))
    print(*(text for text, _ in different[:40]), sep="\n")
    of_words = sum(only_words for _, only_words in different)
    print(f"{len(different)} of {len(found)} runs differ, {of_words} of them in words alone")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
