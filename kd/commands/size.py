"""``kd-size``: which student for a latency budget, before training. Heavy imports wait until the line is checked."""

from dataclasses import replace

from kd.errors import UserError
from kd.fleet.sizing.plan import SizeOptions, check_plan
from kd.report.tables import Result
from kd.run.needs import check_present
from kd.run.options import take
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.checkpoints import claim
from kd.storage.writing import guard

HELP = """\
  kd-size recipe=NAME [config=OVERLAY ...] [key=value ...] [latency_ms=3] [mb=20] [params_m=6] [--json]

{options}

Writes sizes/<recipe>/<number>/ beside runs_dir: sizes.json, and student.yaml for kd-train config=FILE;
kd-latency times what it has trained. After any stop, run the same command again to resume: what was measured is read again.
"""

OPTIONS = SizeOptions
FLAGS = ("--json",)
"""Options that take no value."""


def run(request: Request, options: SizeOptions) -> Result:
    """Looks for a student's size: the content of ``sizes.json``, and the command that trains it.

    A teacher without weights is trained first.

    Args:
        request: with a recipe, without the command's own keys.
        options: these.

    Raises:
        UserError: a mistake in the command line or the settings, or a budget that no candidate meets.
    """
    check_plan(options)
    if take(request, "steps"):
        raise UserError("no key 'steps': sizes are scored as they inherit; kd-tune trains others")
    run = Run.of(request)
    run.splits = check_present(run.config)
    from kd.fleet.sizing.results import STUDENT, sizes_table, write_sizes
    from kd.fleet.sizing.search import SizeSearch
    from kd.run.train_first import train_teacher_if_missing

    train_teacher_if_missing(run)
    search = SizeSearch(run, options)
    sizes = search.measure()
    folder = write_sizes(sizes, claim(guard(search.folder, within=search.folder.parent)))
    result = Result(sizes, [sizes_table(sizes)], files=[folder])
    if sizes["choice"]:
        words = replace(request, overlays=[*request.overlays, str(folder / STUDENT)]).named()
        result.notes.append(f"kd-train {' '.join(words)}")
    return result
