"""``kd-launch endpoint``: a run's student as a SageMaker endpoint, or over pictures in S3, by ``kd-serve``."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from kd.config.kinds import Like
from kd.errors import UserError
from kd.fleet.aws import (
    IMAGE,
    ROLE,
    aws_session,
    boto_errors,
    check_request,
    check_type,
    uploaded,
    waited,
)
from kd.fleet.jobs.job import Machines, Needs, read_machines
from kd.launch.groups import has_gpus
from kd.run.open import export_of
from kd.run.options import CommandOptions, take_options
from kd.run.request import Request
from kd.storage.run_urls import finished_at

PARTS = {"endpoint": "EndpointName", "endpoint_config": "EndpointConfigName", "model": "ModelName"}
"""What an endpoint is made of at SageMaker, by kind, and the argument that names each; deleted in this order."""
NOT_FOUND = "Could not find"
"""In what SageMaker says of a part that it does not have."""
PICTURE = "application/x-image"
"""Content type of a request's picture."""
S3 = Annotated[str, Like(r"s3://.*", "must be s3://BUCKET/FOLDER")]


class EndpointOptions(CommandOptions):
    """What ``kd-launch endpoint`` is given."""

    OTHERS = "data"
    instances: str = "1xml.c5.xlarge"
    """Machines that answer."""
    role: str = ""
    """ARN of the role that the endpoint takes."""
    image: str = ""
    """The container (scripts/container/Dockerfile)."""
    bucket: str = ""
    """s3://BUCKET[/FOLDER] for the archive."""
    job: str = ""
    """Its name; default: of the run's folder."""
    batch: S3 = ""
    """s3://... of pictures: a batch transform in place of an endpoint."""
    out: S3 = ""
    """s3://... of its answers."""

    def __post_init__(self) -> None:
        """Refuses one of ``batch`` and ``out`` without the other."""
        super().__post_init__()
        if bool(self.batch) != bool(self.out):
            raise UserError(
                "out: a batch transform has one, and nothing else (batch=s3://IN out=s3://OUT)"
            )


@dataclass(frozen=True)
class Endpoint(Needs):
    """A SageMaker endpoint, or a batch transform, by its command line."""

    name: str
    """Name of the endpoint, or of the batch transform."""
    machines: Machines
    """The machines that answer."""
    options: EndpointOptions
    """Of the command line."""
    missing: dict[str, str] = field(default_factory=dict)
    """Keys that sending needs and that were not given, with an example of each; :meth:`need` adds them."""

    def requests(self) -> dict[str, dict[str, Any]]:
        """The requests by boto3's name of the call, in the order in which they are sent; each validated, if boto3 is there.

        Keys that were not given have placeholders, and are noted in :attr:`missing`.

        Raises:
            UserError: a key with a value that SageMaker does not take.
        """
        model = {
            "ModelName": self.name,
            "ExecutionRoleArn": self.need("role", self.options.role, ROLE),
            "PrimaryContainer": {
                "Image": self.need("image", self.options.image, IMAGE),
                "ModelDataUrl": f"{self.bucket_url(self.options.bucket, 's3')}/{self.name}/model.tar.gz",
            },
        }
        users = self._transform() if self.options.batch else self._endpoint()
        calls = {"create_model": model, **users}
        for operation, request in calls.items():
            check_request(operation.title().replace("_", ""), request)
        return calls

    def _endpoint(self) -> dict[str, dict[str, Any]]:
        """The two requests that make an endpoint of the model, by boto3's method."""
        check_type("instances", self.machines, "ProductionVariantInstanceType")
        variant = {
            "VariantName": "student",
            "ModelName": self.name,
            "InstanceType": self.machines.type,
            "InitialInstanceCount": self.machines.count,
        }
        names = {"EndpointConfigName": self.name}
        return {
            "create_endpoint_config": {**names, "ProductionVariants": [variant]},
            "create_endpoint": {**names, "EndpointName": self.name},
        }

    def _transform(self) -> dict[str, dict[str, Any]]:
        """The request of a batch transform, by boto3's method: pictures from S3, answers to S3."""
        check_type("instances", self.machines, "TransformInstanceType")
        source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": self.options.batch}}
        request = {
            "TransformJobName": self.name,
            "ModelName": self.name,
            "TransformInput": {"DataSource": source, "ContentType": PICTURE},
            "TransformOutput": {"S3OutputPath": self.options.out, "Accept": "application/json"},
            "TransformResources": {
                "InstanceType": self.machines.type,
                "InstanceCount": self.machines.count,
            },
        }
        return {"create_transform_job": request}


def run(request: Request) -> int:
    """Makes the endpoint or batch transform of a run and waits for it, or shows its requests (``--dry-run``), or deletes it.

    A new endpoint costs until it is deleted.

    Returns:
        The exit status: 1 where the endpoint or batch transform has failed, or where something could not be deleted.

    Raises:
        UserError: not one finished run, a wrong or missing key, or a refusal of SageMaker.
    """
    if len(request.rest) != 1:
        raise UserError(
            "endpoint: takes one run's folder (kd-launch endpoint RUN instances=1xml.c5.xlarge)"
        )
    options = take_options(EndpointOptions, request)
    folder = finished_at(request.rest[0], "config.yaml")
    endpoint = _read(folder, options)
    if "delete" in request.flags:
        if "dry-run" in request.flags:
            print(f"kd-launch: {endpoint.name}: would be removed: {', '.join(PARTS)} of this name")
            return 0
        return delete(endpoint.name)
    calls = endpoint.requests()
    dry_run = "dry-run" in request.flags
    endpoint.refuse_missing(dry_run)
    if dry_run:
        print(json.dumps(calls, indent=2))
        return 0
    aws_session()  # before torch is loaded
    _create(calls, export_of(folder, request, "sagemaker"))
    again = f"kd-launch endpoint {request.rest[0]} job={endpoint.name} --delete"
    kind = "transform_job" if options.batch else "endpoint"
    status = waited(kind, endpoint.name)["text"]
    print(
        f"kd-launch: {endpoint.name}: {status}; what is paid for is removed by: {again}",
        flush=True,
    )
    if status == "InService":
        print(
            "a picture is sent by: aws sagemaker-runtime invoke-endpoint --endpoint-name "
            f"{endpoint.name} --content-type {PICTURE} --body fileb://PICTURE answer.json"
        )
    return int(status not in ("InService", "Completed"))


def _read(folder: Path, options: EndpointOptions) -> Endpoint:
    """The endpoint of a run's folder by its options.

    Its name is ``job``, else made of the parent folder's name and the run's, of which the last 60 characters count:
    ``food-vit-003`` of ``food_vit/003``.

    Raises:
        UserError: a name that SageMaker does not take, or wrong ``instances``.
    """
    place = folder.resolve()
    words = re.sub(r"[^a-zA-Z0-9]+", "-", f"{place.parent.name}-{place.name}")
    name = options.job or words.strip("-")[-60:].lstrip("-")
    if len(name) > 63 or not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", name):
        raise UserError(f"job: must be letters, digits and dashes, 63 at most, got '{name}'")
    machines = read_machines("instances", options.instances)
    if has_gpus(machines.type):
        raise UserError(
            f"instances: kd-serve computes on the CPU: the GPUs of {machines.type} would idle"
        )
    return Endpoint(name, machines, options)


def _create(calls: Mapping[str, dict[str, Any]], archive: Path) -> None:
    """Uploads the archive and sends the requests; what was made is removed again where one fails.

    Args:
        calls: arguments by boto3's method, in order, as :meth:`Endpoint.requests` returns them.
        archive: ``model.tar.gz``.

    Raises:
        UserError: a model of this name exists (checked before the upload, which would overwrite its archive), a refused
            upload (names ``bucket``), or a refusal of SageMaker.
    """
    session = aws_session()
    client = session.client("sagemaker")
    model = calls["create_model"]
    name = model["ModelName"]
    try:
        with boto_errors():
            client.describe_model(ModelName=name)
    except UserError as error:
        if NOT_FOUND not in str(error):
            raise
    else:
        raise UserError(f"job: there is a model '{name}' already; --delete removes it")
    url = model["PrimaryContainer"]["ModelDataUrl"]
    made: list[str] = []
    with uploaded(session.client("s3"), {url: archive}):
        try:
            with boto_errors():
                for operation, request in calls.items():
                    getattr(client, operation)(**request)
                    made.append(operation.removeprefix("create_"))
        except BaseException:
            _remove(client, name, made)
            raise


def delete(name: str) -> int:
    """Removes endpoint, configuration and model, and prints what is left: the archive in S3 stays.

    Returns the exit status: 1 where a part can't be removed; one that SageMaker does not have counts as removed.

    Args:
        name: of the endpoint; its configuration and its model have the same.
    """
    left = _remove(aws_session().client("sagemaker"), name, PARTS)
    print(f"kd-launch: {name}: its archive stays in the bucket: {name}/model.tar.gz")
    return int(left)


def _remove(client: Any, name: str, parts: Collection[str]) -> bool:
    """Removes the given parts of an endpoint and prints what was removed; whether one is left. A refusal is printed."""
    left = False
    for part, key in PARTS.items():
        if part not in parts:
            continue
        try:
            with boto_errors(f"{part} is left"):
                getattr(client, f"delete_{part}")(**{key: name})
            print(f"kd-launch: {name}: {part} removed")
        except UserError as error:
            if NOT_FOUND in str(error):
                print(f"kd-launch: {name}: {part} not found")
            else:
                left = True
                print(f"kd-launch: {name}: {error}")
    return left
