"""``kd-tune``: searches for a better run."""

import errno
from dataclasses import replace

from kd.errors import UserError
from kd.run.own_keys import refuse_words
from kd.run.request import Request

HELP = """\
kd-tune: searches for a better run: learning rate, losses, temperature, views, whatever has a key.

  kd-tune recipe=NAME [config=OVERLAY ...] [key=value ...] search.KEY=SPACE ... trials=N

  search.KEY=SPACE   [a, b, c] a choice, 1..8 integers, 0.1..0.9 numbers, log:1e-5..1e-3 numbers on a log scale;
                     a key below another searched key applies only to the choices that have it:
                     'search.model.distill_losses.kd=[KDLoss, DKDLoss]' search.model.distill_losses.kd.beta=1..8
  tune=FILE          settings of the search and, under search:, its spaces, as YAML
  trials=N           number of trials in all (20)
  jobs=K             trials at a time (1); they share out the machine's cores and GPUs
  hours=H            at most; trial_hours=H: a trial that takes longer has failed
  objective=NAME     val/acc1, latency_ms, params, ...: less of a cost or loss is better, more of any other number;
                     - before it: less is better, +: more is; several with commas
  sampler=NAME       tpe (default), random, grid
  pruner=NAME        asha (default for one objective), hyperband, median, none: stops poor trials after an epoch
  confirm=N          the winner and the recipe as it was, each again on N fresh seeds
  name=NAME          of the search, several for one recipe (search)

A trial is a kd-train process with a run folder of its own. The search is in runs/<recipe>/tune/<name>/: best.yaml
repeats the best run, journal.log is Optuna's: optuna-dashboard, a package of its own, shows it. After any stop or
kill, run the same command again to resume; given on several machines that share the folder, they search together.
"""


def run(request: Request) -> int | None:
    """Searches, and with ``confirm=`` trains the winner again on fresh seeds.

    Returns:
        The exit status, 1 where no trial has ended well; None to show the help.

    Raises:
        UserError: a mistake in the command line or the settings, or a folder of the search that can't be written.
    """
    if "help" in request.flags or not request.recipe:
        return None
    refuse_words(request, hint="spaces search.KEY=SPACE")
    replace(request, overrides=[]).resolved()  # reports a wrong name before torch is imported
    import kd.fleet.tuning.study  # noqa: F401 - reports a missing extra before torch is imported
    from kd.fleet.tuning.plan import plan

    search_plan = plan(request)
    from kd.fleet.tuning.confirm import search_and_confirm

    try:
        return search_and_confirm(search_plan)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise UserError(
            f"runs_dir: {search_plan.folder} can't be written: {error.strerror}"
        ) from error
