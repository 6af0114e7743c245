"""AWS for jobs and endpoints: its session, errors of one line, requests by the service's own model, its waiters."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kd.config.suggest import near
from kd.errors import UserError, needs_extra
from kd.fleet.jobs.job import Machines

if TYPE_CHECKING:
    from boto3 import Session
    from botocore.client import BaseClient
    from botocore.model import ServiceModel

WAITERS = {
    "training_job": "training_job_completed_or_stopped",
    "transform_job": "transform_job_completed_or_stopped",
    "endpoint": "endpoint_in_service",
}
"""boto3's waiters, by the word in the names of its methods."""
ROLE = "arn:aws:iam::ACCOUNT:role/NAME"
IMAGE = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/kd:TAG"
"""Examples, which a dry run shows."""
MONTH = {"Delay": 30, "MaxAttempts": 86_400}
"""Of boto3's waiters: a look each 30 seconds, for 30 days at most."""
WRITABLE = (
    "it must be s3://BUCKET[/FOLDER] that the AWS credentials here may write to (s3:PutObject)"
)
"""What the place of uploads must be, for messages."""


def aws_session() -> "Session":
    """The user's session with AWS.

    Raises:
        UserError: no credentials, no region, or no boto3.
    """
    try:
        session = import_module("boto3").Session()
    except ImportError as error:
        raise UserError(f"sagemaker: {needs_extra('aws')}") from error
    if session.get_credentials() is None:
        raise UserError("sagemaker: no AWS credentials (aws configure, or AWS_PROFILE)")
    if session.region_name is None:
        raise UserError("sagemaker: no AWS region (AWS_DEFAULT_REGION)")
    return session


@contextmanager
def boto_errors(problem: str = "sagemaker", allowed: str = "") -> Iterator[None]:
    """Inside, errors of boto3 become a UserError of one line; needs boto3, which :func:`aws_session` checks.

    Args:
        problem: begins the message; AWS's reason follows.
        allowed: what the setting may be, at the end of the message; "": nothing is said of it.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error) as error:
        reason = " ".join(str(error).split())[:300]
        remedy = f"; {allowed}" if allowed else ""
        raise UserError(f"{problem}: {reason}{remedy}") from error


def bucket_and_path(url: str) -> tuple[str, str]:
    """``s3://BUCKET/FOLDER`` -> its bucket, and the path in it ("" without one)."""
    bucket, _, path = url.removeprefix("s3://").partition("/")
    return bucket, path


@contextmanager
def uploaded(s3: "BaseClient", files: Mapping[str, Path]) -> Iterator[None]:
    """Uploads files; where the block fails they are deleted, if AWS lets them be.

    Args:
        s3: boto3's client.
        files: of this machine, by their URLs.

    Raises:
        UserError: an upload was refused; it names ``bucket``.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    sent = []
    try:
        for url, path in files.items():
            bucket, key = bucket_and_path(url)
            with boto_errors(f"bucket: can't upload {path.name} to {url}", WRITABLE):
                s3.upload_file(str(path), bucket, key)
            sent.append(url)
        yield
    except BaseException:
        for url in sent:
            bucket, key = bucket_and_path(url)
            with suppress(BotoCoreError, ClientError):
                s3.delete_object(Bucket=bucket, Key=key)
        raise


def waited(kind: str, name: str) -> dict[str, Any]:
    """Waits until a job or an endpoint is done, or has failed, for 30 days at most.

    Args:
        kind: one of :data:`WAITERS`.
        name: of it.

    Returns:
        The service's description, and under ``text`` its word for the state, with the reason of a failure.

    Raises:
        UserError: SageMaker has none of this name, or can't be reached.
    """
    client = aws_session().client("sagemaker")
    from botocore.exceptions import WaiterError

    word = kind.title().replace("_", "")
    named = {f"{word}Name": name}
    with boto_errors():
        with suppress(WaiterError):  # what has failed says why when it is described
            waiter = client.get_waiter(WAITERS[kind])
            waiter.wait(**named, WaiterConfig=MONTH)
        answer = getattr(client, f"describe_{kind}")(**named)
    state = answer[f"{word}Status"]
    reason = answer.get("FailureReason", "")
    return {**answer, "text": f"{state}: {reason}".rstrip(": ")}


def check_type(key: str, machines: Machines, kind: str = "TrainingInstanceType") -> None:
    """Checks an instance type against boto3's model of the service; without boto3 only that it begins with ``ml.``.

    Args:
        key: named in the message.
        machines: of that type.
        kind: the shape in the service's model that lists the types.

    Raises:
        UserError: unknown type; the message has the nearest one, or examples.
    """
    model = _model()
    known: list[str] = []
    if model is not None:
        known = model.shape_for(kind).enum
    elif machines.type.startswith("ml."):
        return
    if machines.type in known:
        return
    hint = near(machines.type, known) or " (ml.p4d.24xlarge, ml.g5.xlarge, ...)"
    raise UserError(f"{key}: SageMaker has no '{machines.type}'{hint}")


def _model() -> "ServiceModel | None":
    """boto3's description of the service; None without boto3, which a dry run does not need."""
    try:
        get_session = import_module("botocore.session").get_session
    except ImportError:
        return None
    return _described(get_session)


@cache
def _described(get_session: Callable[[], Any]) -> "ServiceModel":
    """boto3's description of the service: a file of megabytes, read once for all requests of a command."""
    return cast("ServiceModel", get_session().get_service_model("sagemaker"))


def check_request(operation: str, request: dict[str, Any]) -> None:
    """Validates a request against the service's own model; without boto3 it prints that it did not.

    Args:
        operation: of the service, ``CreateTrainingJob``.
        request: its arguments.

    Raises:
        UserError: SageMaker would refuse it.
    """
    model = _model()
    if model is None:
        unchecked = "kd-launch: the request is not held against SageMaker's own model"
        print(f"{unchecked}: {needs_extra('aws')}", file=sys.stderr)
        return
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, model.operation_model(operation).input_shape)
    if report.has_errors():
        problems = " ".join(report.generate_report().split())
        raise UserError(f"SageMaker would refuse the request: {problems[:300]}")
