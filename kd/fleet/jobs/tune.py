"""A search in SageMaker: the spaces and the objective of ``kd-tune`` as one tuning job."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.errors import UserError
from kd.fleet.jobs import sagemaker
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.target import Outcome, followed
from kd.fleet.tuning.plan import SearchPlan, plan
from kd.fleet.tuning.space import Space, item
from kd.run.own_keys import take, whole_number
from kd.run.request import Request

if TYPE_CHECKING:
    from botocore.client import BaseClient

POLL_S = 30
"""Seconds between two questions for the search's state."""
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
    jobs = whole_number(take(request, "jobs"), "jobs", 1, high=100)
    has_trials = request.value_of("trials") is not None
    request.here = False
    search = plan(request)
    if len(search.objectives) > 1 or not search.objectives[0].name.startswith("val/"):
        raise UserError(
            "objective: SageMaker reads one of the lines that a run prints: val/acc1, val/miou, ..."
        )
    for space in search.space:
        if space.above:
            raise UserError(
                f"search.{space.key}: SageMaker varies every key in every trial; some choices don't have this one"
            )
    if search.sampler == "grid":
        _check_grid(search, has_trials)
    return search, jobs


def _check_grid(search: SearchPlan, has_trials: bool) -> None:
    """Refuses what SageMaker's strategy ``Grid`` does not take: ranges, and another number of trials than it has.

    Args:
        search: a grid.
        has_trials: whether the user has given ``trials``.
    """
    for space in search.space:
        if space.choices is None:
            raise UserError(
                f"search.{space.key}: SageMaker's grid takes choices alone ([1, 2, 3]), got {space.text()}"
            )
    if has_trials:
        raise UserError("trials: SageMaker's grid runs every combination; leave it out")


class SageMakerSearch(sagemaker.SageMaker):
    """A SageMaker tuning job, one request of CreateHyperParameterTuningJob.

    Args:
        search: what is searched; None to follow one that was sent before.
        jobs: trials at a time.
    """

    def __init__(self, search: SearchPlan | None = None, jobs: int = 1) -> None:
        self.search = search
        self.jobs = jobs

    def write(self, job: Job) -> dict[str, str]:
        """``request.json``: the request; prints how the objective is read from the log.

        Raises:
            UserError: a name of more than 32 characters, or what the service does not take.
        """
        assert self.search is not None
        if len(job.name) > 32:
            raise UserError(f"job: 32 characters at most for a search, got '{job.name}'")
        request = tuning_job(job, self.search, self.jobs)
        sagemaker.check_request("CreateHyperParameterTuningJob", request)
        objective = self.search.objectives[0].name
        print(
            f"kd-launch: the objective is read from lines like 'epoch   1  train/loss 0.608  {objective} 0.500' by "
            f"{sagemaker.METRIC.format(name=objective)}",
            file=sys.stderr,
        )
        return {"request.json": json.dumps(request, indent=2) + "\n"}

    def submit(self, job: Job, folder: Path) -> str:
        """Uploads the job's files and creates the tuning job of ``request.json`` in ``folder``; returns its name."""
        with sagemaker.uploaded(job) as session:
            session.client("sagemaker").create_hyper_parameter_tuning_job(
                **sagemaker.read_request(folder)
            )
        return job.name

    def follow(self, handle: str, folder: Path) -> Outcome:
        """Prints how many trials are in which state until the end; the outcome names the best one.

        Args:
            handle: the tuning job's name.
            folder: of the job here; not read.
        """
        client = sagemaker.aws_session().client("sagemaker")

        def poll() -> tuple[str, Outcome | None]:
            """One look at the search: its status and trials by state, and the outcome once it has ended."""
            with sagemaker.boto_errors():
                answer = client.describe_hyper_parameter_tuning_job(
                    HyperParameterTuningJobName=handle
                )
            status = answer["HyperParameterTuningJobStatus"]
            text = status
            for state, count in answer.get("TrainingJobStatusCounters", {}).items():
                if count:
                    text += f", {count} {state}"
            if status in ("Completed", "Failed", "Stopped"):
                return text, self._outcome(client, answer)
            return text, None

        return followed(handle, poll, POLL_S)

    def _outcome(self, client: "BaseClient", answer: Mapping[str, Any]) -> Outcome:
        """How a tuning job has ended: its best trial, that trial's metric and values, and where its model is in S3.

        It counts as done where any trial has a result, also when the job was stopped or has failed: the best trial's
        run is what is fetched.

        Args:
            client: SageMaker's.
            answer: of ``DescribeHyperParameterTuningJob``.
        """
        best = answer.get("BestTrainingJob")
        if not best:
            status = answer["HyperParameterTuningJobStatus"]
            return Outcome(False, f"{status}: {answer.get('FailureReason', 'no trial')}")
        value = best.get("FinalHyperParameterTuningJobObjectiveMetric", {})
        values = " ".join(
            f"{key}={text}" for key, text in best.get("TunedHyperParameters", {}).items()
        )
        with sagemaker.boto_errors():
            trained = client.describe_training_job(TrainingJobName=best["TrainingJobName"])
        where = (trained.get("ModelArtifacts") or {}).get("S3ModelArtifacts", "")
        text = f"best of {best['TrainingJobName']}: {value.get('MetricName')} {value.get('Value')} with {values}"
        return Outcome(True, text, where=where)


def tuning_job(job: Job, search: SearchPlan, jobs: int) -> dict[str, Any]:
    """The request of a search; trials are started without a command, as SageMaker starts tuned containers.

    Args:
        job: what each trial has in common.
        search: spaces, objective and sampler.
        jobs: trials at a time.

    Returns:
        The request. In the container its parameters become settings of ``kd-train`` by their names
        (:mod:`kd.launch.sagemaker`), so each range is named as the run's key.
    """
    objective = search.objectives[0]
    definition = sagemaker.common(job)
    metric = {"Name": objective.name, "Regex": sagemaker.METRIC.format(name=objective.name)}
    definition["AlgorithmSpecification"]["MetricDefinitions"] = [metric]
    direction = objective.direction.capitalize()
    ranges: dict[str, list[dict[str, Any]]] = {}
    for space in search.space:
        kind, entry = _range(space)
        ranges.setdefault(kind, []).append(entry)
    limits = {"MaxParallelTrainingJobs": jobs}
    if search.sampler != "grid":  # a grid has as many as there are combinations
        limits["MaxNumberOfTrainingJobs"] = search.trials
    return {
        "HyperParameterTuningJobName": job.name,
        **sagemaker.tags(job),
        "HyperParameterTuningJobConfig": {
            "Strategy": STRATEGIES[search.sampler],
            "HyperParameterTuningJobObjective": {"Type": direction, "MetricName": objective.name},
            "ResourceLimits": limits,
            "ParameterRanges": ranges,
        },
        "TrainingJobDefinition": {
            **definition,
            "StaticHyperParameters": sagemaker.hyperparameters(job),
        },
    }


def _range(space: Space) -> tuple[str, dict[str, Any]]:
    """A searched key as SageMaker's ``ParameterRanges`` have it: the name of its list, and the item in it.

    All values are text. Choices are as they would be typed on ``kd-train``'s command line.
    """
    if space.choices is not None:
        values = [item(space.key, choice).partition("=")[2] for choice in space.choices]
        return "CategoricalParameterRanges", {"Name": space.key, "Values": values}
    scaling = "Logarithmic" if space.log else "Linear"
    ends = {
        "Name": space.key,
        "MinValue": str(space.low),
        "MaxValue": str(space.high),
        "ScalingType": scaling,
    }
    return f"{'Integer' if space.integer else 'Continuous'}ParameterRanges", ends
