"""From a recipe and a budget to the front of sizes and the choice. What was measured before is read again."""

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kd.distill.headless import HeadlessStudent
from kd.errors import UserError
from kd.fleet.sizing.candidates import Candidate, candidates, smallest
from kd.fleet.sizing.plan import BUDGETS, SizingPlan
from kd.fleet.sizing.scores import TEACHER, fitted_on, hold_out, score, split_of
from kd.fleet.sizing.timing import latencies
from kd.machine import processor
from kd.models import StudentSpec, count_parameters
from kd.report.facts import Facts
from kd.report.metric import less_is_better
from kd.report.records import read_results
from kd.report.sized import SAME, folder_of_sizes
from kd.run.run import Run
from kd.storage.checkpoints import check_writable
from kd.storage.elsewhere import mapping_of
from kd.storage.run_urls import folder_of_runs
from kd.storage.writing import write_json

Row = dict[str, Any]
EVIDENCE = 3  # runs of the recipe with other sizes, before anything is predicted from them


class Results:
    """What was measured, by what it depends on; written whole after each measurement."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, Any] = mapping_of(file)

    def of(self, *parts: object) -> dict[str, float]:
        """What was measured under these parts of a key; {} for nothing."""
        return self.known.get(_key(parts), {})

    def keep(self, found: Mapping[str, float], *parts: object) -> None:
        """Remembers numbers under these parts of a key, until :meth:`write` saves them."""
        self.known[_key(parts)] = dict(found)

    def write(self) -> None:
        """Saves all results, for a later search in this folder."""
        write_json(self.file, self.known)


def _key(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class SizeSearch:
    """A search for a size: builds the candidates, times them, scores those within the budget, chooses."""

    def __init__(self, run: Run, plan: SizingPlan) -> None:
        self.run, self.plan, self.began = run, plan, time.monotonic()
        config = run.config
        if config["students"]:
            raise UserError("students: kd-size makes the students itself; set students=null")
        if not (config["model"].get("teacher") or config["model"].get("teachers")):
            raise UserError(
                "model.teacher: the sizes are those of a teacher's students, and the recipe has no teacher"
            )
        runs = folder_of_runs(config["runs_dir"], "kd-size")
        self.runs, self.folder = runs / config["recipe"], folder_of_sizes(runs, config["recipe"])
        check_writable(self.folder)
        run.cli.build()
        self.student, self.teacher = run.cli.model.student_of_one, run.cli.model.teacher
        if isinstance(self.student, HeadlessStudent) and not run.cli.datamodule.info.probed:
            raise UserError(
                "data.probe.root: sizes of students without a classifier are compared by labelled pictures"
            )
        assert self.teacher is not None
        self.candidates = candidates(self.student, self.teacher, plan.archs, plan.sizes, plan.count)
        self.data = hold_out(run.cli.model, run.cli.datamodule)
        self.metric = self.student.task.primary
        self.sign = -1 if less_is_better(self.metric) else 1
        self.results = Results(self.folder / "results.json")

    def found(self) -> dict[str, Any]:
        """Measures what is not known yet; what ``sizes.json`` holds. A budget that no candidate meets is refused."""
        plan, teacher = self.plan, self._teacher()
        least = (
            1e-6 if plan.conditions.int8 else 4e-6
        )  # MB of a weight, without what else a file holds
        rows = {
            one.name: {
                "name": one.name,
                **one.settings(),
                "inherits": one.inherits,
                "own": one.own,
                "params": one.params,
                "params_m": round(one.params / 1e6, 3),
                "mb": round(least * one.params, 3),
            }
            for one in (*self.candidates, *teacher)
        }
        check([rows[one.name] for one in self.candidates], plan.budget)
        light = [
            one for one in self.candidates if one.own or not exceeded(rows[one.name], plan.budget)
        ]
        if plan.budget.keys() - {
            "params_m"
        }:  # by the best round of the smallest: the others would be timed in vain
            times = self._times(smallest(light))
            check(
                [rows[k] | v | {"latency_ms": v["fastest_round_ms"]} for k, v in times.items()],
                plan.budget,
            )
        for name, numbers in self._times([*light, *teacher], keep=True).items():
            rows[name].update(numbers)
        big = rows.pop(TEACHER, {})
        check(list(rows.values()), plan.budget)
        self.results.write()  # not before: a refused budget leaves nothing behind
        within = [one for one in self.candidates if not exceeded(rows[one.name], plan.budget)]
        self._score([one for one in within if one.inherits or plan.steps], rows)
        scored = [row for row in rows.values() if "score" in row]
        evidence = predict(scored, {row["name"]: self._reached(row) for row in scored})
        best = choose(list(rows.values()), plan.budget, self.sign)
        return {
            "recipe": self.run.config["recipe"],
            "metric": self.metric,
            "budget": plan.budget,
            "conditions": asdict(plan.conditions),
            "machine": processor(),
            "steps": plan.steps,
            "held_out": len(self.data.split(split_of(self.student)).targets),
            "evidence": evidence,
            "fitted_on": fitted_on(self.student),
            "teacher": big | self.results.of("score", TEACHER, self._basis()),
            "candidates": sorted(rows.values(), key=lambda row: row["params"]),
            "choice": best,
            "took_s": round(time.monotonic() - self.began, 1),
        }

    def _teacher(self) -> list[Candidate]:
        """The teacher as a size to be timed, where it is a model of timm's."""
        members = [*self.teacher.members.values()] if self.teacher is not None else []
        if len(members) != 1 or members[0].closed or members[0].spec.builder is not None:
            return []
        spec = members[0].spec
        made = StudentSpec(arch=spec.arch, img_size=members[0].prepare.size, kwargs=spec.kwargs)
        return [Candidate(TEACHER, made, made, count_parameters(members[0].model), 0, False)]

    def _times(
        self, wanted: Sequence[Candidate], keep: bool = False
    ) -> dict[str, dict[str, float]]:
        """Latencies and files' sizes by name: those of earlier searches, and all others in turns."""
        student, given = self.student, self.plan.conditions
        basis = [
            student.task.answers,
            len(student.classes),
            self.data.size,
            asdict(given),
            processor(),
        ]
        keys = {
            one.name: ("latency", [getattr(one.spec, key) for key in SAME], basis) for one in wanted
        }
        known = {name: self.results.of(*key) for name, key in keys.items()}
        missing = [one for one in wanted if not known[one.name]]
        found = latencies(missing, student, self.data, given) if missing else {}
        for name in found if keep else ():
            self.results.keep(found[name], *keys[name])
        return known | found

    def _basis(self) -> dict[str, Any]:
        """What a score depends on beside the candidate."""
        config, teacher = self.run.config, self.teacher
        learnt = {
            key: value
            for key, value in config["model"].items()
            if key not in ("student", "teacher", "teachers")
        }
        return {
            "teacher": teacher.identity() if teacher is not None else None,
            "data": self.data.samples_identity,
            "shown": {**config["data"], "num_workers": 0},
            "learnt": learnt,
            "optim": config["optim"],
            "sample": fitted_on(self.student),
            "steps": self.plan.steps,
        }

    def _score(self, candidates: Sequence[Candidate], rows: Mapping[str, Row]) -> None:
        basis, wanted = self._basis(), "after" if self.plan.steps else "before"
        by_name = {one.name: one for one in candidates}

        def keep(found: dict[str, dict[str, float]]) -> None:
            for name, values in found.items():
                which = by_name[name].settings() if name in by_name else name
                self.results.keep(values, "score", which, basis)
            self.results.write()

        missing = [
            one
            for one in candidates
            if wanted not in self.results.of("score", one.settings(), basis)
        ]
        score(self.run, missing, self.plan.steps, keep)
        for name, one in by_name.items():
            known = self.results.of("score", one.settings(), basis)
            rows[name].update(known, score=known[wanted])

    def _reached(self, row: Row) -> float | None:
        """The best metric of a finished run of the recipe with this size, the same data and the same teacher."""
        found = []
        for folder in sorted(file.parent for file in self.runs.glob("*/summary.json")):
            run = read_results(folder)
            model, data = run.config.get("model") or {}, run.config.get("data") or {}
            known, given = (data.get("source"), model.get("teacher")), self.run.config
            student = model.get("student") or {}
            same = (
                known == (given["data"]["source"], given["model"]["teacher"])
                and run.primary == self.metric
            )
            ours = all(student.get(key) == row[key] for key in SAME) and not folder.is_symlink()
            value = (
                Facts(run).best_val()
                if same and ours and run.summary.get("status") == "done"
                else None
            )
            found += [value] if value is not None else []
        return max(found, key=lambda value: self.sign * value, default=None)


def exceeded(row: Row, budget: Mapping[str, float]) -> list[str]:
    """The budget's keys that a candidate exceeds; a number that it lacks counts as 0."""
    return [key for key, most in budget.items() if row.get(key, 0) > most]


def check(rows: Sequence[Row], budget: Mapping[str, float]) -> None:
    """Raises a UserError where no candidate is within the budget, with the smallest one's figure."""
    if any(not exceeded(row, budget) for row in rows):
        return
    for key, most in budget.items():
        least = min((row for row in rows if key in row), key=lambda row: row[key], default=None)
        if least and least[key] > most:
            raise UserError(
                f"{key}: no candidate is within {most:g}: the smallest is {least['name']} with "
                f"{least[key]:.4g} {BUDGETS[key]}"
            )
    budgets = " ".join(f"{key}={value:g}" for key, value in budget.items())
    raise UserError(
        f"{next(iter(budget))}: no candidate is within {budgets} at once (candidates=N takes more)"
    )


def predict(scored: Sequence[Row], reached: Mapping[str, float | None]) -> int:
    """Adds the gains of finished runs over their scores (median, least, most) to each score; returns their number."""
    gains = [value - row["score"] for row in scored if (value := reached[row["name"]]) is not None]
    if len(gains) >= EVIDENCE:
        for row in scored:
            row["predicted"] = [
                row["score"] + gain for gain in (statistics.median(gains), min(gains), max(gains))
            ]
    return len(gains)


def choose(rows: Sequence[Row], budget: Mapping[str, float], sign: int) -> str | None:
    """Marks what is within the budget and on the front of score and latency; the best name of these, if any."""
    found = {
        row["name"]: (sign * row["score"], -row["latency_ms"]) for row in rows if "score" in row
    }
    for row in rows:
        row["within"], mine = not exceeded(row, budget), found.get(row["name"])
        row["front"] = mine is not None and all(
            v == mine or v[0] < mine[0] or v[1] < mine[1] for v in found.values()
        )
    return max(found, key=lambda name: found[name], default=None)
