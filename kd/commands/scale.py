"""``kd-scale``: how a recipe scales, measured here and predicted for more processes."""

from dataclasses import field
from typing import Annotated, Any, Literal

from kd.config.kinds import Range
from kd.errors import UserError
from kd.fleet.scaling.measure import ScalingPlan, reading
from kd.machine import cores
from kd.report.tables import Result
from kd.run.needs import check_present
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.run.run import Run
from kd.settings import teachers_in
from kd.storage.checkpoints import claim
from kd.storage.run_urls import folder_of_recipe, folder_of_runs
from kd.storage.writing import guard, write_json

HELP = """\
  kd-scale recipe=NAME [config=OVERLAY ...] [key=value ...] [processes=1,2,4] [strategies=ddp,zero,fsdp] [gpus=32]
           [--json]

{options}

Measures weak scaling (the batch of a process stays) and strong scaling (the batch of all together stays): images/s,
efficiency, time of teacher and student, memory of each strategy, and all-reduces of several sizes. Predicts ddp by the
formula of kd-report --what-if, with what that assumes. Writes runs/<recipe>/scale/<number>/scale.json.
"""


class ScaleOptions(CommandOptions):
    """What ``kd-scale`` is given beside the settings of a run."""

    OTHERS = "run"
    processes: Annotated[list[int], Range("> 0")] = field(default_factory=lambda: [1, 2])
    """Training processes to measure with, each with a GPU of its own, or on CPUs."""
    strategies: list[Literal["ddp", "zero", "fsdp"]] = field(default_factory=lambda: ["ddp"])
    """ddp, zero (optim.zero), fsdp; ddp is measured in any case: only its waits are timed apart."""
    steps: Annotated[int, Range(">= 5")] = 30
    """Of each short run."""
    gpus: Annotated[int, Range(">= 1")] | None = None
    """Training processes to predict, of all machines together; default: twice the most that are measured."""


OPTIONS = ScaleOptions
FLAGS = ("--json",)
"""Options that take no value."""


def run(request: Request, options: ScaleOptions) -> Result:
    """Measures, predicts, and writes ``scale.json``.

    A teacher without weights is trained first. One process is measured in any case, as all others are compared with it.

    Raises:
        UserError: a mistake in the command line or the settings, or a short run that fails.
    """
    processes = sorted({1, *options.processes})
    if len(processes) < 2:
        raise UserError("processes: must name more than one number, as in processes=1,2,4")
    strategies: list[str] = list(dict.fromkeys(["ddp", *options.strategies]))
    wanted = options.gpus or 2 * processes[-1]
    run = Run.of(request)
    check_present(run.config)
    config = run.config
    batch = _batch(config, processes)
    _check_gpus(config, processes[-1])
    from kd.run.train_first import train_teacher_if_missing

    items = [*request.named(), *train_teacher_if_missing(run)]
    runs_dir = folder_of_runs(config["runs_dir"], "kd-scale")
    of_recipe = folder_of_recipe(runs_dir, config["recipe"])
    folder = claim(guard(of_recipe / "scale", within=of_recipe))
    threads = max(1, cores() // processes[-1])
    plan = ScalingPlan(
        items, config["recipe"], folder, processes, strategies, batch, options.steps, threads
    )
    return _measure(config, plan, wanted)


def _measure(config: dict[str, Any], plan: ScalingPlan, wanted: int) -> Result:
    """Runs all cases, predicts and writes ``scale.json``.

    Args:
        config: all settings of the recipe.
        plan: which cases are run, where; settings that all have in common are added to it.
        wanted: training processes to predict.

    Raises:
        UserError: a short run has failed.
    """
    from kd.fit_to_machine.precision import choose_precision
    from kd.fleet.scaling.results import content, tables

    # what all short runs have in common: no cache, one precision, no start that takes longer than the run
    model = config["model"]
    plan.items += [f"{key}.cache=off" for key in teachers_in(model)]
    if not config["trainer"]["precision"]:
        precision, _ = choose_precision(str(config["trainer"]["accelerator"]))
        plan.items.append(f"trainer.precision={precision}")
    if (model.get("student") or {}).get("inherit"):
        plan.items.append("model.student.inherit=false")

    measured = []
    for case in plan.cases():
        run = plan.run(case)
        print(f"{case.name}: {reading(case, run)['step_ms']:.1f} ms a step", flush=True)
        measured.append((case, run))
    scale = content(config["recipe"], measured, wanted)
    file = plan.folder / "scale.json"
    write_json(file, scale)
    result = Result(scale, tables(scale), files=[file])
    most = plan.processes[-1]
    header = next(iter(measured[0][1].headers.values()), {})
    if header.get("device") == "cpu" and most > cores():
        result.notes = [f"{most} processes share {cores()} cores: each has less than a core"]
    return result


def _batch(config: dict[str, Any], processes: list[int]) -> int:
    """Pictures of a process's batch; a user's error for ``auto``, and unless all numbers of ``processes`` divide it."""
    batch = config["data"]["batch_size"]
    if batch == "auto":
        raise UserError("data.batch_size: kd-scale needs a number, got auto")
    for count in processes:
        if batch % count:
            raise UserError(
                f"processes: {count} must divide data.batch_size={batch}, which strong scaling shares out"
            )
    return int(batch)


def _check_gpus(config: dict[str, Any], processes: int) -> None:
    """Refuses more ``processes`` than the machine has GPUs, where it has some and the run uses them."""
    import torch

    gpus = 0
    if config["trainer"].get("accelerator") != "cpu":
        gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise UserError(
            f"processes: {processes}, but there are {gpus} GPUs (trainer.accelerator=cpu measures on CPUs)"
        )
