"""From a recipe and a budget to the front of sizes and the choice. What was measured before is read again."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kd.errors import UserError
from kd.fleet.sizing.candidates import SAME, Candidate, candidates
from kd.fleet.sizing.plan import BUDGETS, SizeOptions
from kd.fleet.sizing.scores import TEACHER, fitted_on, hold_out, score, scoring_split
from kd.fleet.sizing.timing import latencies
from kd.machine import processor
from kd.models import StudentSpec, count_parameters
from kd.report.metric import less_is_better
from kd.run.build import build
from kd.run.run import Run
from kd.storage.checkpoints import check_writable
from kd.storage.elsewhere import mapping_of
from kd.storage.run_urls import folder_of_runs
from kd.storage.writing import write_json

RESULTS = "results.json"
"""File of all measurements, across searches of a recipe."""
Row = dict[str, Any]
"""A candidate as ``sizes.json`` has it: its settings, and what is known of it by name; a number that is not known is
missing."""


def measurement_key(*parts: object) -> str:
    """The key of ``results.json`` for what a measurement depends on: a hash, equal for equal parts."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class SizeSearch:
    """A search for a size: builds the candidates, times them, scores those within the budget, chooses."""

    def __init__(self, run: Run, plan: SizeOptions) -> None:
        """Builds the recipe's student and teacher, the candidates, and the held-out pictures they are scored with.

        Args:
            run: the recipe's, not built yet; it is built here, and again for each group of candidates that is scored.
            plan: the command line of ``kd-size``.

        Raises:
            UserError: a recipe whose sizes can't be compared (no teacher, nothing to score by), or
                folders that can't be written; it names the key.
        """
        self.run = run
        self.plan = plan
        self.began = time.monotonic()
        config = run.config
        if not (config["model"].get("teacher") or config["model"].get("teachers")):
            raise UserError(
                "model.teacher: the sizes are those of a teacher's students, and the recipe has no teacher"
            )
        runs_dir = folder_of_runs(config["runs_dir"], "kd-size")
        recipe = config["recipe"]
        self.folder = runs_dir.parent / "sizes" / recipe
        check_writable(self.folder)
        build(run)
        self.student = run.module.student
        self.teacher = run.module.teacher
        if self.student.gives_features and not run.data.info.probed:
            raise UserError(
                "data.probe.root: sizes of students without a classifier are compared by labelled pictures"
            )
        assert self.teacher is not None
        self.candidates = candidates(self.student, self.teacher, plan.candidates)
        self.data = hold_out(run.module, run.data)
        self.metric = self.student.task.primary
        self.sign = -1 if less_is_better(self.metric) else 1
        # what was measured, by measurement_key() of what it depends on
        self.known = mapping_of(self.folder / RESULTS)

    def measure(self) -> dict[str, Any]:
        """Times the candidates, and scores those within the budget; what an earlier search has measured is read again.

        Returns:
            The content of ``sizes.json``.

        Raises:
            UserError: no candidate is within the budget: by parameters and the MB of the weights before anything is
                timed, then by the latencies.
        """
        budget = self.plan.budget
        teacher_size = self._teacher_size()
        rows = {size.name: self._row(size) for size in (*self.candidates, *teacher_size)}

        check_budget([rows[candidate.name] for candidate in self.candidates], budget)
        to_time = [
            candidate
            for candidate in self.candidates
            if candidate.of_recipe or not exceeded(rows[candidate.name], budget)
        ]
        for name, numbers in self._times([*to_time, *teacher_size]).items():
            rows[name].update(numbers)
        teacher_row = rows.pop(TEACHER, {})
        check_budget(list(rows.values()), budget)
        self._save()  # not before: a refused budget leaves nothing behind

        to_score = []
        for candidate in self.candidates:
            if candidate.inherits and not exceeded(rows[candidate.name], budget):
                to_score.append(candidate)
        self._score(to_score, rows)
        choice = choose_size(list(rows.values()), budget, self.sign)

        return {
            "recipe": self.run.config["recipe"],
            "metric": self.metric,
            "budget": budget,
            "conditions": asdict(self.plan.conditions),
            "machine": processor(),
            # pictures that score the candidates
            "held_out": len(self.data.split(scoring_split(self.student)).targets),
            # as a candidate, where it can be timed, with ``before``, where it was scored
            "teacher": teacher_row
            | self.known.get(measurement_key("score", TEACHER, self._basis()), {}),
            "candidates": sorted(rows.values(), key=lambda row: row["params"]),
            "choice": choice,
            "took_s": round(time.monotonic() - self.began, 1),
        }

    def _row(self, candidate: Candidate) -> Row:
        """The row of a candidate before anything is measured; its ``mb`` are the weights alone, the least that a file can
        take.
        """
        bytes_a_weight = 4
        if self.plan.conditions.int8:
            bytes_a_weight = 1
        return {
            "name": candidate.name,
            **candidate.settings(),
            "inherits": candidate.inherits,
            "own": candidate.of_recipe,
            "params": candidate.params,
            "params_m": round(candidate.params / 1e6, 3),
            "mb": round(1e-6 * bytes_a_weight * candidate.params, 3),
        }

    def _teacher_size(self) -> list[Candidate]:
        """A single teacher as a size to be timed, in a list.

        [] where there are several, or where its layers can't be read or a builder has made it.
        """
        if self.teacher is None or len(self.teacher.members) != 1:
            return []
        (member,) = self.teacher.members.values()
        if member.closed or member.spec.builder is not None:
            return []
        spec = StudentSpec(
            arch=member.spec.arch, img_size=member.prepare.size, kwargs=member.spec.kwargs
        )
        size = Candidate(
            name=TEACHER,
            run_spec=spec,
            spec=spec,
            params=count_parameters(member.model),
            cost=0,
            inherits=False,
        )
        return [size]

    def _times(self, timed: Sequence[Candidate]) -> dict[str, dict[str, float]]:
        """Latencies and files' sizes.

        Args:
            timed: candidates; those that an earlier search has timed are read, all others measured together, in turns, and
                added to :attr:`known`, which the caller saves.

        Returns:
            Numbers of :func:`kd.fleet.sizing.timing.latencies` by candidate's name.
        """
        conditions = self.plan.conditions
        basis = [
            self.student.task.answers,
            len(self.student.classes),
            self.data.size,
            asdict(conditions),
            processor(),
        ]
        keys = {}
        for candidate in timed:
            settings = [getattr(candidate.spec, name) for name in SAME]
            keys[candidate.name] = measurement_key("latency", settings, basis)
        missing = [candidate for candidate in timed if not self.known.get(keys[candidate.name])]
        if missing:
            measured = latencies(missing, self.student, self.data, conditions)
            for name, numbers in measured.items():
                self.known[keys[name]] = numbers
        return {name: self.known[key] for name, key in keys.items()}

    def _save(self) -> None:
        """Saves all results, for a later search in this folder."""
        write_json(self.folder / RESULTS, self.known)

    def _basis(self) -> dict[str, Any]:
        """What a score depends on beside the candidate, as plain values: a part of the score's key in ``results.json``.
        Where one of them differs, candidates are scored anew.
        """
        config = self.run.config
        of_models = ("student", "teacher", "teachers")
        return {
            "teacher": self.teacher.identity() if self.teacher is not None else None,
            "data": self.data.samples_identity,
            "shown": {**config["data"], "num_workers": 0},
            "learnt": {
                key: value for key, value in config["model"].items() if key not in of_models
            },
            "optim": config["optim"],
            "sample": fitted_on(self.student),
        }

    def _score(self, scored: Sequence[Candidate], rows: Mapping[str, Row]) -> None:
        """Adds ``score`` to the rows, and the same as ``before``.

        Scores of earlier searches are read from the results; only the others are measured.

        Args:
            scored: candidates within the budget, which inherit.
            rows: of all candidates, by name; changed in place.
        """
        basis = self._basis()
        # the teacher is scored along with each group of candidates
        keys = {TEACHER: measurement_key("score", TEACHER, basis)}
        for candidate in scored:
            keys[candidate.name] = measurement_key("score", candidate.settings(), basis)

        def keep(scores: dict[str, float]) -> None:
            """Writes scores by candidate's name to ``results.json`` at once: an interrupted search loses none."""
            for name, value in scores.items():
                self.known[keys[name]] = {"before": value}
            self._save()

        missing = [one for one in scored if not self.known.get(keys[one.name])]
        score(self.run, missing, keep)
        for candidate in scored:
            value = self.known[keys[candidate.name]]["before"]
            rows[candidate.name].update(before=value, score=value)


def exceeded(row: Row, budget: Mapping[str, float]) -> list[str]:
    """The budget's keys that a candidate exceeds; a number that it lacks, as it was not measured, counts as 0."""
    return [key for key, most in budget.items() if row.get(key, 0) > most]


def check_budget(rows: Sequence[Row], budget: Mapping[str, float]) -> None:
    """Refuses a budget that no candidate meets.

    Args:
        rows: of the candidates, as in ``sizes.json``.
        budget: the largest allowed value by column, such as ``latency_ms``.

    Raises:
        UserError: begins with a budget that even the least candidate exceeds, if there is one; gives the least figure of
            any candidate for each budget.
    """
    if any(not exceeded(row, budget) for row in rows):
        return
    words = []
    least = []
    narrow = list(budget)
    for key, most in budget.items():
        words.append(f"{key}={most:g}")
        values = [row[key] for row in rows if key in row]
        if not values:
            continue
        value = min(values)
        least.append(f"{value:.4g} {BUDGETS[key]}")
        if value > most:
            narrow.insert(0, key)
    asked = " ".join(words)
    known = ", ".join(least)
    raise UserError(f"{narrow[0]}: no candidate is within {asked}; the least are {known}")


def choose_size(rows: Sequence[Row], budget: Mapping[str, float], sign: int) -> str | None:
    """Sets ``within`` (the budget) and ``front`` in each row, and chooses one. On the front is a scored row that no other
    row beats: as good or better in both score and latency, and better in one.

    Args:
        rows: of the candidates; only those with a ``score`` can be on the front.
        budget: upper bounds by key of :data:`kd.fleet.sizing.plan.BUDGETS`; candidates beyond them have no ``score``.
        sign: 1 where a larger score is better, -1 where a smaller one is.

    Returns:
        The name of the row with the best score, of equal ones the fastest; None where none is scored.
    """
    merits = {}  # both parts: more is better
    for row in rows:
        if "score" in row:
            merits[row["name"]] = (sign * row["score"], -row["latency_ms"])
    for row in rows:
        mine = merits.get(row["name"])
        row["within"] = not exceeded(row, budget)
        row["front"] = mine is not None
        if mine is None:
            continue
        for other in merits.values():
            if other != mine and other[0] >= mine[0] and other[1] >= mine[1]:
                row["front"] = False
    return max(merits, key=lambda name: merits[name], default=None)
