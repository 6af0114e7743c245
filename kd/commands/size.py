"""``kd-size``: which student for a latency budget, before training. Heavy imports wait until the line is checked."""

from functools import partial
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.sizing.plan import plan
from kd.run.own_keys import take_all
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import made_here
from kd.storage.checkpoints import claim

HELP = """\
kd-size: the most accurate student for a latency budget, before training.

  kd-size recipe=NAME [config=OVERLAY ...] [key=value ...] [latency_ms=3] [mb=20] [params_m=6]
  kd-size RUN_FOLDER            the latency of a trained student, compared with the budget it was chosen for

  latency_ms=, mb=, params_m=   budgets, one or several: milliseconds a batch, MB of the exported file, million
                                parameters; without any the front alone
  runtime=torch                 or onnx, openvino; int8=true
  threads=1 batch=1             what latency is measured with
  candidates=24                 in all: sizes that can start from the teacher's layers, and the recipe's own student
  archs=NAME,...                models of timm's beside them; what can't inherit is scored by the distillation alone
  img_sizes=96,112              sides of the students' input; default: the recipe's
  steps=N                       of a short distillation of all that meet the budgets, which then decides; default: 0,
                                with archs= 60

Writes sizes/<recipe>/<number>/ beside runs_dir: sizes.html, sizes.json, and student.yaml for kd-train
config=FILE. After any stop, run the same command again to resume: what was measured is read again.
"""


def run(request: Request) -> int | None:
    """Looks for a student's size, or compares an earlier search with its runs; returns the exit status, None for the
    help.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    if "help" in request.flags or not (request.recipe or request.rest):
        return None
    if len(request.rest) > bool(not request.recipe):
        raise UserError(
            f"what is '{request.rest[-1]}'? Settings are key=value, recipes recipe=NAME"
        )
    if request.rest:
        return _compare(request.rest[0], request)
    found, folder = sized(request)
    from kd.fleet.sizing.page import show

    show(found)
    words = [f"recipe={request.recipe}", *(f"config={c}" for c in request.overlays)]
    if found["choice"]:
        print(f"kd-train {' '.join([*words, f'config={folder}/student.yaml', *request.overrides])}")
    print(f"written to {folder}/sizes.html")
    return 0


def sized(request: Request) -> tuple[dict[str, Any], Path]:
    """Searches by a command line: the content of ``sizes.json``, and the folder that it was written to.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    planned = plan(request)
    run = Run.of(request)
    run.with_teacher()
    from kd.fleet.sizing.page import write
    from kd.fleet.sizing.search import SizeSearch

    search = SizeSearch(run, planned)
    found = search.measure()
    return found, write(found, claim(search.folder))


def _compare(place: str, request: Request) -> int:
    """Times a run's student under the conditions of the search that has its size, and adds it to the search's page."""
    from kd.report.records import read_run
    from kd.report.sized import candidate_of

    take_all(request)
    opened = Run.open(place, request)
    known = candidate_of(opened.folder, opened.config)
    if known is None:
        raise UserError(
            f"{opened.folder}: no search (kd-size recipe=...) has a candidate of the size of its student"
        )
    from kd.fleet.sizing.page import write
    from kd.ship.latency import measure, runtimes_of

    file, found, row = known
    given, budget = found["conditions"], found["budget"].get("latency_ms")
    name = given["runtime"] + "_int8" * given["int8"]
    runtimes = runtimes_of(
        opened.folder, name, lambda export: "trust" in request.flags or made_here(export)
    )
    timed = measure(
        opened,
        partial(Run.open, place, request),
        runtimes,
        [given["batch"]],
        [given["threads"]],
        1.0,
    )
    ms = next(one["median_ms"] for one in timed["rows"] if one["model"] == "student")
    summary = read_run(opened.folder).summary.get("student") or {}
    score = (summary.get("best_val") or summary.get("val") or {}).get(found["metric"])
    meets = "" if budget is None else "within the budget" if ms <= budget else "over the budget"
    mine = {
        "run": str(opened.folder),
        "name": row["name"],
        "latency_ms": ms,
        "score": score,
        "verdict": meets,
    }
    found["trained"] = [
        *(one for one in found.get("trained", []) if one["run"] != mine["run"]),
        mine,
    ]
    write(found, file.parent)
    before = f"{row['latency_ms']:g} ms before training"
    print(f"{row['name']}: {ms:g} ms ({before}){f', {meets} of {budget:g} ms' if meets else ''}")
    print(f"written to {file.with_name('sizes.html')}")
    return 0
