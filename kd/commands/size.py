"""``kd-size``: which student for a latency budget, before training. Heavy imports wait until the line is checked."""

from functools import partial
from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.sizing.plan import SizeOptions, check_plan
from kd.run.needs import check_present
from kd.run.open import open_run
from kd.run.options import refuse_others, refuse_words
from kd.run.request import Request
from kd.run.run import Run
from kd.run.trust import made_here
from kd.storage.checkpoints import claim
from kd.storage.writing import guard

HELP = """\
kd-size: the most accurate student for a latency budget, before training.

  kd-size recipe=NAME [config=OVERLAY ...] [key=value ...] [latency_ms=3] [mb=20] [params_m=6]
  kd-size RUN_FOLDER            the latency of a trained student, compared with the budget it was chosen for

{options}

Writes sizes/<recipe>/<number>/ beside runs_dir: sizes.html, sizes.json, and student.yaml for kd-train
config=FILE. After any stop, run the same command again to resume: what was measured is read again.
"""

OPTIONS = SizeOptions


def run(request: Request, options: SizeOptions) -> int | None:
    """Looks for a student's size; of a run's folder, times its student for the search that has its size.

    Returns:
        The exit status, None to show the help.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    if request.rest and not request.recipe:
        return _compare(request.rest[0], request)
    refuse_words(request)
    if not request.recipe:
        return None
    sizes, folder = sized(request, options)
    from kd.fleet.sizing.page import show

    show(sizes)
    if sizes["choice"]:
        overlays = [
            f"config={overlay}" for overlay in (*request.overlays, f"{folder}/student.yaml")
        ]
        words = [f"recipe={request.recipe}", *overlays, *request.overrides]
        print(f"kd-train {' '.join(words)}")
    print(f"written to {folder}/sizes.html")
    return 0


def sized(request: Request, options: SizeOptions) -> tuple[dict[str, Any], Path]:
    """Searches by a command line: the content of ``sizes.json``, and the folder that it was written to.

    A teacher without weights is trained first. Prints no table.

    Args:
        request: with a recipe, without the command's own keys.
        options: these.

    Raises:
        UserError: a mistake in the command line or the settings, or a budget that no candidate meets.
    """
    check_plan(options)
    run = Run.of(request)
    run.splits = check_present(run.config)
    from kd.fleet.sizing.page import write
    from kd.fleet.sizing.search import SizeSearch
    from kd.run.train_first import train_teacher_if_missing

    train_teacher_if_missing(run)
    search = SizeSearch(run, options)
    sizes = search.measure()
    return sizes, write(sizes, claim(search.folder))


def _compare(place: str, request: Request) -> int:
    """Times a run's student under the conditions of the newest search that has its size, and adds it to that search.

    ``sizes.json`` and the page get a row of ``trained``: ``run``, ``name`` of the candidate, ``latency_ms`` (the median of a
    batch), ``score`` (the run's own best validation, else its newest, of the search's metric; None where it has none) and
    ``verdict`` (within the budget or over it; "" without a budget of latency). A row of the same run is replaced.

    Args:
        place: the run's folder, or its URL.
        request: takes settings of the data and the teacher alone.

    Returns:
        The exit status.

    Raises:
        UserError: no finished run, no search with a candidate of its size, or no export for the search's runtime.
    """
    from kd.report.records import read_run
    from kd.report.sized import candidate_of

    refuse_others(request, [], of_data=True)
    opened = open_run(place, request)
    known = candidate_of(opened.folder, opened.config)
    if known is None:
        raise UserError(
            f"{opened.folder}: no search (kd-size recipe=...) has a candidate of the size of its student"
        )
    from kd.fleet.sizing.page import write
    from kd.ship.latency import measure
    from kd.ship.timed_exports import runtimes_of

    # its latency now, under the conditions of the search
    file, sizes, candidate = known
    conditions = sizes["conditions"]
    runtime = conditions["runtime"]
    if conditions["int8"]:
        runtime += "_int8"
    runtimes = runtimes_of(
        opened.folder, runtime, lambda export: "trust" in request.flags or made_here(export)
    )
    timed = measure(
        opened,
        partial(open_run, place, request),
        runtimes,
        [conditions["batch"]],
        [conditions["threads"]],
        1.0,
    )
    ms = next(row["median_ms"] for row in timed["rows"] if row["model"] == "student")

    # beside its score and the budget, on the search's page
    summary = read_run(opened.folder).summary.get("student") or {}
    values = summary.get("best_val") or summary.get("val") or {}
    budget = sizes["budget"].get("latency_ms")
    text = f"{candidate['name']}: {ms:g} ms ({candidate['latency_ms']:g} ms before training)"
    verdict = ""
    if budget is not None:
        verdict = "within the budget" if ms <= budget else "over the budget"
        text += f", {verdict} of {budget:g} ms"
    trained = {
        "run": str(opened.folder),
        "name": candidate["name"],
        "latency_ms": ms,
        "score": values.get(sizes["metric"]),
        "verdict": verdict,
    }
    others = [row for row in sizes.get("trained", []) if row["run"] != trained["run"]]
    sizes["trained"] = [*others, trained]
    guard(file.parent, within=file.parents[2])
    write(sizes, file.parent)
    print(text)
    print(f"written to {file.with_name('sizes.html')}")
    return 0
