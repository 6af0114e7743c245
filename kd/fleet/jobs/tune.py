"""A search in SageMaker: the spaces and the objective of ``kd-tune`` as one tuning job."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from kd.config.kinds import Range
from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.places import sagemaker
from kd.fleet.tuning.plan import SearchPlan, plan
from kd.fleet.tuning.space import Space, item
from kd.run.options import option, take
from kd.run.request import Request

NOT_THERE = ("pruner=", "confirm=", "name=", "trial_hours=")
"""Settings of a search that SageMaker's own has nothing for."""
STRATEGIES = {"tpe": "Bayesian", "random": "Random", "grid": "Grid"}
"""kd's samplers by SageMaker's names."""


def planned(request: Request) -> tuple[SearchPlan, int]:
    """Checks a search; leaves ``request`` with what each trial has in common (``jobs`` and the search's keys go).

    Called before the job is read, in place of ``kd-tune``'s own start; nothing is written.

    Returns:
        The search, and how many trials run at a time (1 to 100; default 1).

    Raises:
        UserError: a mistake in it, or what SageMaker's tuning does not have: a setting of :data:`NOT_THERE`, several
            objectives or another one than a validation metric, conditional keys, ranges or a number of trials in a grid.
    """
    foreign = next((item for item in request.overrides if item.startswith(NOT_THERE)), None)
    if foreign:
        raise UserError(
            f"{foreign.split('=')[0]}: not supported by SageMaker's tuning; kd-tune takes it"
        )
    jobs = option(take(request, "jobs"), "jobs", Annotated[int, Range(">= 1 and <= 100")], 1)
    has_trials = request.value_of("trials") is not None
    request.here = False
    search = plan(request)
    if len(search.objectives) > 1 or not search.objectives[0].name.startswith("val/"):
        raise UserError(
            "objective: SageMaker reads one of the lines that a run prints: val/acc1, val/miou, ..."
        )
    is_grid = search.sampler == "grid"
    for space in search.space:
        if space.above:
            raise UserError(
                f"search.{space.key}: SageMaker varies every key in every trial; some choices don't have this one"
            )
        if is_grid and space.choices is None:
            raise UserError(
                f"search.{space.key}: SageMaker's grid takes choices alone ([1, 2, 3]), got {space.text()}"
            )
    if is_grid and has_trials:
        raise UserError("trials: SageMaker's grid runs every combination; leave it out")
    return search, jobs


class SageMakerSearch(sagemaker.SageMaker):
    """A SageMaker tuning job, one request of CreateHyperParameterTuningJob. It is not waited for.

    Args:
        search: what is searched.
        jobs: trials at a time.
    """

    operation = "create_hyper_parameter_tuning_job"
    shown_by = (
        "its best trial, whose run kd-launch sagemaker job=TRIAL fetches: aws sagemaker "
        "describe-hyper-parameter-tuning-job --query BestTrainingJob --hyper-parameter-tuning-job-name"
    )

    def __init__(self, search: SearchPlan, jobs: int) -> None:
        self.search = search
        self.jobs = jobs

    def wait(self, job: Job, files: Mapping[str, str]) -> int:
        """Returns 0 at once."""
        return 0

    def write(self, job: Job) -> dict[str, str]:
        """``request.json``: the request; prints how the objective is read from the log.

        In the container its parameters become settings of ``kd-train`` by their names (:mod:`kd.launch.sagemaker`), so
        each range is named as the run's key. Trials are started without a command, as SageMaker starts tuned containers.

        Raises:
            UserError: a name of more than 32 characters, or what the service does not take.
        """
        if len(job.name) > 32:
            raise UserError(f"job: 32 characters at most for a search, got '{job.name}'")
        objective = self.search.objectives[0]
        metric = {"Name": objective.name, "Regex": sagemaker.METRIC.format(name=objective.name)}
        definition = sagemaker.common(job)
        tags = {"Tags": definition.pop("Tags")} if "Tags" in definition else {}
        definition["AlgorithmSpecification"]["MetricDefinitions"] = [metric]
        definition["StaticHyperParameters"] = sagemaker.settings_of(job)
        ranges: dict[str, list[dict[str, Any]]] = {}
        for space in self.search.space:
            kind, entry = _range(space)
            ranges.setdefault(f"{kind}ParameterRanges", []).append(entry)
        limits = {"MaxParallelTrainingJobs": self.jobs}
        if self.search.sampler != "grid":  # a grid has as many as there are combinations
            limits["MaxNumberOfTrainingJobs"] = self.search.trials
        print(
            f"kd-launch: the objective is read from lines like 'epoch   1  train/loss 0.608  {objective.name} 0.500' by "
            f"{metric['Regex']}",
            file=sys.stderr,
        )
        request = {
            "HyperParameterTuningJobName": job.name,
            **tags,
            "HyperParameterTuningJobConfig": {
                "Strategy": STRATEGIES[self.search.sampler],
                "HyperParameterTuningJobObjective": {
                    "Type": objective.direction.capitalize(),
                    "MetricName": objective.name,
                },
                "ResourceLimits": limits,
                "ParameterRanges": ranges,
            },
            "TrainingJobDefinition": definition,
        }
        return sagemaker.request_file("CreateHyperParameterTuningJob", request)


def _range(space: Space) -> tuple[str, dict[str, Any]]:
    """A searched key as SageMaker's ``ParameterRanges`` have it: the kind of its list, and the item in it.

    All values are text. Choices are as they would be typed on ``kd-train``'s command line.
    """
    if space.choices is not None:
        values = [item(space.key, choice).partition("=")[2] for choice in space.choices]
        return "Categorical", {"Name": space.key, "Values": values}
    ends = {
        "Name": space.key,
        "MinValue": str(space.low),
        "MaxValue": str(space.high),
        "ScalingType": "Logarithmic" if space.log else "Linear",
    }
    if space.integer:
        return "Integer", ends
    return "Continuous", ends
