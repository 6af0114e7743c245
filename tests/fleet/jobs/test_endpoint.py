"""kd-launch endpoint: requests that AWS's model takes; the container that answers, started as SageMaker does."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kd.cli import main
from kd.fleet import endpoint
from kd.fleet.aws import waited
from kd.fleet.jobs.job import read_machines
from kd.storage.archives import unpack
from tests._forks import free_port
from tests._helpers import ROOT, Command, refuses

boto3 = pytest.importorskip("boto3")
from botocore.exceptions import ClientError  # noqa: E402

PLACE = ["role=arn:aws:iam::123456789012:role/kd-endpoint", "bucket=s3://kd-test/models",
         "image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/kd:1"]  # fmt: skip

OWN = {"role": PLACE[0][5:], "image": PLACE[2][6:], "bucket": "s3://kd-test"}


@pytest.fixture()
def cloud(aws: Any) -> Any:
    """Its SageMaker."""
    return aws.client("sagemaker")


@pytest.fixture()
def run(tmp_path: Path) -> Path:
    """What a dry run needs of a finished run."""
    folder = tmp_path / "food_vit" / "003"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "student.safetensors"):
        (folder / name).touch()
    return folder


def asked(capsys: pytest.CaptureFixture[str], *items: str) -> dict[str, Any]:
    assert main("launch", ["endpoint", *items, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_requests(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, str(run), *PLACE, "instances=2xml.c5.xlarge")
    assert list(found) == ["create_model", "create_endpoint_config", "create_endpoint"]
    container = found["create_model"]["PrimaryContainer"]
    assert container["ModelDataUrl"] == "s3://kd-test/models/food-vit-003/model.tar.gz"
    (variant,) = found["create_endpoint_config"]["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.c5.xlarge", 2)
    assert found["create_endpoint"] == {
        "EndpointName": "food-vit-003",
        "EndpointConfigName": "food-vit-003",
    }
    job = asked(
        capsys,
        str(run),
        "instances=1xml.c5.xlarge",
        "batch=s3://kd-test/in",
        "out=s3://kd-test/out",
    )
    assert list(job) == ["create_model", "create_transform_job"]
    assert (
        job["create_transform_job"]["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
        == "s3://kd-test/in"
    )


def test_what_is_missing_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("launch", ["endpoint", str(run), "instances=1xml.c5.xlarge", "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert (
        "to send it, role, image, bucket: must be given (role=arn:aws:iam::ACCOUNT:role/NAME image="
        in told
    )


def test_a_part_that_can_not_be_removed_keeps_no_other(
    cloud: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: str) -> None:
        raise ClientError(
            {"Error": {"Code": "Throttling", "Message": "slow down"}}, "DeleteEndpoint"
        )

    monkeypatch.setattr(cloud, "delete_endpoint", refused)
    assert endpoint._remove(cloud, "food", endpoint.PARTS)
    told = capsys.readouterr().out
    assert "slow down" in told and "endpoint is left" in told and "food: model not found" in told


def started_as_sagemaker_does(base: Path, picture: bytes) -> bytes:
    """The archive below ``model/``, the word "serve", a port; /ping until it answers, then one /invocations."""
    file = base / "model.tar.gz"
    boto3.client("s3").download_file("kd-test", "models/food/model.tar.gz", str(file))
    unpack(file, base / "model")
    port = free_port()
    env = {**os.environ, "SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": port}
    server = subprocess.Popen([sys.executable, "-m", "kd.cli", "train", "serve"], cwd=ROOT, env=env)
    url = f"http://localhost:{port}"
    try:
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"{url}/ping") as answer:
                assert answer.status == 200
                break
            assert server.poll() is None
            time.sleep(0.2)
        headers = {
            "Content-Type": endpoint.PICTURE,
            "Accept": "application/json",
            "Host": "model.example:8080",
        }
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/invocations", picture, headers)
        ) as answer:
            return answer.read()
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_an_endpoint_from_creation_to_deletion(
    finished: Path,
    pictures: Path,
    cloud: Any,
    tmp_path: Path,
    prints: Command,
    refusal: Command,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("checkpoints"))
    base = tmp_path / "ml"
    base.mkdir()
    items = [*PLACE, "job=food", "instances=1xml.c5.xlarge"]
    told = prints("launch", ["endpoint", str(folder), *items])
    assert "kd-launch: food: InService" in told
    assert f"is removed by: kd-launch endpoint {folder} job=food --delete\n" in told
    assert "aws sagemaker-runtime invoke-endpoint --endpoint-name food --content-type " in told
    picture = next(pictures.glob("val/*/*")).read_bytes()
    (served,) = json.loads(started_as_sagemaker_does(base, picture))["predictions"]
    assert served["labels"]
    assert cloud.describe_endpoint(EndpointName="food")["EndpointStatus"] == "InService"
    assert "job: there is a model 'food' already; --delete removes it" in refusal(
        "launch", ["endpoint", str(folder), *items]
    )
    assert boto3.client("s3").head_object(Bucket="kd-test", Key="models/food/model.tar.gz")
    only_shown = ["endpoint", str(folder), "job=food", "--delete", "--dry-run"]
    assert "food: would be removed: endpoint" in prints("launch", only_shown)
    assert cloud.list_endpoints()["Endpoints"] and cloud.list_models()["Models"]
    told = prints("launch", ["endpoint", str(folder), "job=food", "--delete"])
    assert [f"food: {part} removed" in told for part in endpoint.PARTS] == [True] * 3
    assert "its archive stays in the bucket: food/model.tar.gz" in told
    assert not cloud.list_endpoints()["Endpoints"] and not cloud.list_models()["Models"]
    assert "food: endpoint not found" in prints(
        "launch", ["endpoint", str(folder), "job=food", "--delete"]
    )


def test_a_dry_run_of_a_deletion_needs_no_credentials(
    run: Path, monkeypatch: pytest.MonkeyPatch, prints: Command
) -> None:
    monkeypatch.setattr(endpoint, "aws_session", lambda: pytest.fail("it takes credentials"))
    words = ["endpoint", str(run), "job=food", "--delete", "--dry-run"]
    assert "endpoint, endpoint_config, model" in prints("launch", words)


def test_a_batch_transform_is_sent_and_followed(cloud: Any, tmp_path: Path) -> None:
    own = endpoint.EndpointOptions(**OWN, batch="s3://kd-test/in", out="s3://kd-test/out")
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(b"x")
    found = endpoint.Endpoint("food", read_machines("instances", "1xml.c5.xlarge"), own)
    endpoint._create(found.requests(), archive)
    assert waited("transform_job", "food")["text"] == "Completed"
    assert endpoint.delete("food") == 0 and not cloud.list_models()["Models"]


def test_a_model_of_this_name_is_left_alone(cloud: Any, tmp_path: Path) -> None:
    """Its archive in the bucket has the same place: an upload would overwrite it."""
    own = endpoint.EndpointOptions(**OWN)
    machines = read_machines("instances", "1xml.c5.xlarge")
    requests = endpoint.Endpoint("food", machines, own).requests()
    cloud.create_model(**requests["create_model"])
    with refuses("job: there is a model 'food' already"):
        endpoint._create(requests, tmp_path / "model.tar.gz")
    assert cloud.describe_model(ModelName="food")


def test_what_cannot_be_created_leaves_nothing(cloud: Any, tmp_path: Path) -> None:
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(b"x")
    own = endpoint.EndpointOptions(**OWN)
    found = endpoint.Endpoint("food", read_machines("instances", "1xml.c5.xlarge"), own)
    requests = found.requests()
    requests["create_endpoint"]["EndpointConfigName"] = "another"
    with refuses(r"sagemaker: .*Could not find endpoint"):
        endpoint._create(requests, archive)
    assert (
        not cloud.list_models()["Models"] and not cloud.list_endpoint_configs()["EndpointConfigs"]
    )
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket="kd-test")
