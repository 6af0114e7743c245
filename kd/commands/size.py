"""``kd-size``: which student for a latency budget, before training. Heavy imports wait until the line is checked."""

from pathlib import Path
from typing import Any

from kd.errors import UserError
from kd.fleet.sizing.plan import SizeOptions, check_plan
from kd.run.needs import check_present
from kd.run.options import refuse_words, take
from kd.run.request import Request
from kd.run.run import Run
from kd.storage.checkpoints import claim

HELP = """\
kd-size: the most accurate student for a latency budget, before training.

  kd-size recipe=NAME [config=OVERLAY ...] [key=value ...] [latency_ms=3] [mb=20] [params_m=6]

{options}

Writes sizes/<recipe>/<number>/ beside runs_dir: sizes.json, and student.yaml for kd-train config=FILE;
kd-latency times what it has trained. After any stop, run the same command again to resume: what was measured is read again.
"""

OPTIONS = SizeOptions


def run(request: Request, options: SizeOptions) -> int | None:
    """Looks for a student's size, and prints its table.

    Returns:
        The exit status, None to show the help.

    Raises:
        UserError: a mistake in the command line or the settings.
    """
    refuse_words(request, hint="kd-latency RUN times a trained student")
    if not request.recipe:
        return None
    sizes, folder = sized(request, options)
    from kd.fleet.sizing.results import STUDENT, sizes_table
    from kd.report.terminal import print_parts

    print_parts([sizes_table(sizes)])
    if sizes["choice"]:
        overlays = [f"config={overlay}" for overlay in (*request.overlays, folder / STUDENT)]
        words = [f"recipe={request.recipe}", *overlays, *request.overrides]
        print(f"kd-train {' '.join(words)}")
    print(f"written to {folder}")
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
    if take(request, "steps"):
        raise UserError("no key 'steps': sizes are scored as they inherit; kd-tune trains others")
    run = Run.of(request)
    run.splits = check_present(run.config)
    from kd.fleet.sizing.results import write_sizes
    from kd.fleet.sizing.search import SizeSearch
    from kd.run.train_first import train_teacher_if_missing

    train_teacher_if_missing(run)
    search = SizeSearch(run, options)
    sizes = search.measure()
    return sizes, write_sizes(sizes, claim(search.folder))
