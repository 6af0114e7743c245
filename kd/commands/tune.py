"""``kd-tune``: searches for a better run."""

from dataclasses import replace

from kd.fleet.tuning.plan import TuneOptions, plan
from kd.run.options import refuse_words
from kd.run.request import Request

HELP = """\
  kd-tune recipe=NAME [config=OVERLAY ...] [key=value ...] search.KEY=SPACE ... trials=N

  search.KEY=SPACE   [a, b, c] a choice, 1..8 integers, 0.1..0.9 numbers, log:1e-5..1e-3 numbers on a log scale;
                     a key below another searched key applies only to the choices that have it:
                     'search.model.distill_losses.kd=[KDLoss, DKDLoss]' search.model.distill_losses.kd.beta=1..8
{options}

A trial is a kd-train process with a run folder of its own. The search is in runs/<recipe>/tune/<name>/: best.yaml
repeats the best run, journal.log is Optuna's: optuna-dashboard, a package of its own, shows it. After any stop or
kill, run the same command again to resume; given on several machines that share the folder, they search together.
"""


OPTIONS = TuneOptions


def run(request: Request) -> int | None:
    """Searches, and with ``confirm=`` trains the winner again on fresh seeds.

    Returns:
        The exit status, 1 where no trial has ended well; None without a recipe.

    Raises:
        UserError: a mistake in the command line or the settings, or a folder of the search that can't be written.
    """
    if not request.recipe:
        return None
    refuse_words(request, hint="spaces search.KEY=SPACE")
    replace(request, overrides=[]).resolved()  # reports a wrong name before torch is imported
    import kd.fleet.tuning.study  # noqa: F401 - reports a missing extra before torch is imported

    search_plan = plan(request)
    from kd.fleet.tuning.confirm import search_and_confirm

    return search_and_confirm(search_plan)
