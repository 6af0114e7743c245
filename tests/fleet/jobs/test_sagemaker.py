"""kd-launch sagemaker: the request is what SageMaker takes, and what comes back is the run."""

import json
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kd.cli import main
from kd.fleet.aws import aws_session
from tests._files import read_json, write_json
from tests._forks import start, status_of
from tests._helpers import Command, write_recipe
from tests._runs import summary_of

boto3 = pytest.importorskip("boto3")

ROLE = "role=arn:aws:iam::123456789012:role/kd-training"
PLACE = [
    ROLE,
    "image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/kd:1",
    "bucket=s3://kd-test/runs",
]


@pytest.fixture()
def cloud(aws: Any) -> Any:
    """Its S3, with a picture in the bucket."""
    s3 = aws.client("s3")
    s3.put_object(Bucket="kd-test", Key="food/train/apple/1.jpg", Body=b"x")
    return s3


@pytest.fixture()
def portable(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of one's own whose data are a channel."""
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path / "tiny.yaml", Path("channel:train"), teacher)


def request_of(capsys: pytest.CaptureFixture[str], *items: str) -> dict[str, Any]:
    assert main("launch", ["sagemaker", *PLACE, *items, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = request_of(
        capsys, "recipe=grocery_vit", "config=ddp_8gpu", "config=zero", "instances=2xml.p4d.24xlarge", "spot=true",
        "hours=5", "job=food", "data.source.root=channel:photos", "channel.photos=s3://kd-test/food", "optim.lr=0.002",
        "model.teacher.checkpoint=channel:teacher/t.safetensors", "channel.teacher=s3://kd-test/teacher",
    )  # fmt: skip
    assert request["HyperParameters"] == {
        "recipe": "grocery_vit", "config": '["ddp_8gpu", "zero"]', "data.source.root": "channel:photos",
        "model.teacher.checkpoint": "channel:teacher/t.safetensors", "optim.lr": "0.002",
    }  # fmt: skip
    assert request["ResourceConfig"] == {
        "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100,
    }  # fmt: skip
    assert request["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 18000,
        "MaxWaitTimeInSeconds": 36000,
    }
    assert request["Environment"] == {"PYTHONUNBUFFERED": "1", "FI_PROVIDER": "efa"}
    assert request["EnableManagedSpotTraining"] is True
    assert request["CheckpointConfig"]["S3Uri"] == "s3://kd-test/runs/food/checkpoints"
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["kd-train"]
    found = {
        i["ChannelName"]: i["DataSource"]["S3DataSource"]["S3Uri"]
        for i in request["InputDataConfig"]
    }
    assert found == {"photos": "s3://kd-test/food", "teacher": "s3://kd-test/teacher"}
    request = request_of(
        capsys, "recipe=foodtag_vit", "config=remote_data", "instances=1xml.p4d.24xlarge",
        "data_instances=4xml.c5.18xlarge",
    )  # fmt: skip
    assert request["ResourceConfig"]["InstanceGroups"] == [
        {"InstanceGroupName": "train", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "data", "InstanceType": "ml.c5.18xlarge", "InstanceCount": 4},
    ]
    assert "InstanceType" not in request["ResourceConfig"]
    assert request["Environment"]["RAY_AUTH_TOKEN"] == "SECRET"
    assert list(tmp_path.iterdir()) == []


def test_data_in_a_file_system_and_more_of_the_request(
    capsys: pytest.CaptureFixture[str], refusal: Command, tmp_path: Path
) -> None:
    vpc = {"Subnets": ["subnet-1a", "subnet-2b"], "SecurityGroupIds": ["sg-3c"]}
    tags = [{"Key": "project", "Value": "food"}]
    more = {
        "VpcConfig": vpc, "Tags": tags, "StoppingCondition": {"MaxWaitTimeInSeconds": 108000},
        "OutputDataConfig": {"KmsKeyId": "alias/kd"}, "AlgorithmSpecification": {"TrainingInputMode": "FastFile"},
    }  # fmt: skip
    file = tmp_path / "more.yaml"
    write_json(file, more)
    items = ["recipe=grocery_vit", "instances=2xml.p4d.24xlarge", "spot=true", "hours=5", f"request={file}",
             "model.teacher.checkpoint=channel:old/t.pt"]  # fmt: skip
    request = request_of(
        capsys, *items, "channel.photos=fsx://fs-0123456789abcdef0/mnt/food", "channel.old=efs://fs-0123456789",
        "channel.packs=s3://kd-test/packs", "data.source.root=channel:photos",
    )  # fmt: skip
    photos, old, packs = request["InputDataConfig"]
    assert photos["DataSource"]["FileSystemDataSource"] == {
        "FileSystemId": "fs-0123456789abcdef0", "FileSystemAccessMode": "ro", "FileSystemType": "FSxLustre",
        "DirectoryPath": "/mnt/food",
    }  # fmt: skip
    assert old["DataSource"]["FileSystemDataSource"] == {
        "FileSystemId": "fs-0123456789", "FileSystemAccessMode": "ro", "FileSystemType": "EFS", "DirectoryPath": "/",
    }  # fmt: skip
    assert (photos["InputMode"], old["InputMode"], packs.get("InputMode")) == ("File", "File", None)
    assert request["AlgorithmSpecification"]["TrainingInputMode"] == "FastFile"
    assert request["AlgorithmSpecification"]["ContainerEntrypoint"] == ["kd-train"]
    assert (request["VpcConfig"], request["Tags"]) == (vpc, tags)
    assert request["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 18000,
        "MaxWaitTimeInSeconds": 108000,
    }
    assert request["OutputDataConfig"]["KmsKeyId"] == "alias/kd"
    assert request["OutputDataConfig"]["S3OutputPath"].startswith("s3://kd-test/runs/")


def test_a_dry_run_needs_only_what_the_request_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    teacher = "model.teacher.checkpoint=channel:photos/teacher.safetensors"
    items = [
        "recipe=grocery_vit",
        "instances=1xml.g5.xlarge",
        "data.source.root=channel:photos",
        teacher,
    ]
    assert main("launch", ["sagemaker", *items, "--dry-run"]) == 0
    told = capsys.readouterr()
    assert (
        "kd-launch: to send it, channel.photos, role, image, bucket: must be given (channel.photos=s3:"
        in told.err
    )
    assert json.loads(told.out)["RoleArn"] == "arn:aws:iam::ACCOUNT:role/NAME"


def test_a_run_from_launch_to_report(
    portable: Path,
    pictures: Path,
    cloud: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prints: Command,
    refusal: Command,
) -> None:
    """What kd-launch sends is run as SageMaker runs it, in a container's folders; the model comes back as the run."""
    (tmp_path / "prices.yaml").write_text("ml.g5.xlarge: {on_demand: 2.0, spot: 0.6}\n")
    asked = [f"recipe={portable}", "instances=1xml.g5.xlarge", "job=tiny-1", "spot=true", "prices=prices.yaml",
             "channel.train=s3://kd-test/food", "trainer.max_epochs=1"]  # fmt: skip
    assert (
        "aws logs tail /aws/sagemaker/TrainingJobs --follow --log-stream-name-prefix tiny-1\n"
        in (prints("launch", ["sagemaker", *PLACE, *asked, "wait=false"]))
    )
    sent = boto3.client("sagemaker").describe_training_job(TrainingJobName="tiny-1")
    assert sent["HyperParameters"]["recipe"] == "channel:files/tiny.yaml"

    base = tmp_path / "ml"
    config, data = base / "input" / "config", base / "input" / "data"
    config.mkdir(parents=True)
    write_json(config / "hyperparameters.json", sent["HyperParameters"])
    write_json(config / "resourceconfig.json", {"hosts": ["algo-1"], "current_host": "algo-1"})
    (data / "files").mkdir(parents=True)
    (data / "train").symlink_to(pictures)
    cloud.download_file("kd-test", "runs/tiny-1/files/tiny.yaml", str(data / "files" / "tiny.yaml"))
    log = tmp_path / "log"
    assert status_of(start([], log, SAGEMAKER_BASE_DIR=str(base), AWS_DEFAULT_REGION="")) == 0, (
        log.read_text()
    )
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as tar:
        for path in (base / "model").iterdir():
            tar.add(path, path.name)
    cloud.upload_file(
        str(tmp_path / "model.tar.gz"), "kd-test", "runs/tiny-1/output/tiny-1/output/model.tar.gz"
    )

    request = read_json(tmp_path / "runs/tiny/jobs/tiny-1/request.json")
    metrics = request["AlgorithmSpecification"]["MetricDefinitions"]
    found = {m["Name"]: re.findall(m["Regex"], log.read_text()) for m in metrics}
    assert {name: len(values) for name, values in found.items()} == {
        "train/loss": 1, "val/acc1": 1, "val/miou": 0, "val/map": 0,
    }  # fmt: skip
    assert 0 <= float(found["val/acc1"][0]) <= 1

    capsys.readouterr()
    assert main("launch", ["sagemaker", "job=tiny-1"]) == 0
    run = tmp_path / "runs" / "tiny" / "tiny-1"
    assert f"tiny-1: Completed; run folder: {Path('runs/tiny/tiny-1')}" in capsys.readouterr().out
    assert summary_of(run)["status"] == "done"
    assert (run / "student.safetensors").is_file()
    assert read_json(run / "job.json")["groups"] == [
        {"name": "train", "machines": "1 x ml.g5.xlarge", "price_per_hour": 0.6}
    ]
    job = read_json(run / "job.json")
    job["groups"].append({"name": "data", "machines": "2 x ml.c5.4xlarge", "price_per_hour": 1.4})
    write_json(run / "job.json", {**job, "hours": 2.0})
    assert main("report", [str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Machines and cost (sagemaker, job tiny-1)" in page
    for row in (["train", "1 x ml.g5.xlarge", "0.6", "2", "1.2"], ["data", "2 x ml.c5.4xlarge", "1.4", "2", "2.8"],
                ["all", "", "", "", "4"]):  # fmt: skip
        assert json.dumps(row, separators=(",", ":")) in page
    assert "runs/tiny/jobs/tiny-1 already; take another name" in refusal(
        "launch", ["sagemaker", *PLACE, *asked]
    )


def test_a_job_that_failed_or_that_nobody_knows_is_one_line(
    cloud: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refusal: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = refusal("launch", ["sagemaker", "job=none"]).splitlines()
    assert line.startswith("kd-launch: sagemaker: ")
    answer = {"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: the disk is full"}
    client = SimpleNamespace(
        get_waiter=boto3.client("sagemaker").get_waiter, describe_training_job=lambda **_: answer
    )
    monkeypatch.setattr(
        "kd.fleet.aws.aws_session",
        lambda: SimpleNamespace(client=lambda _: client),
    )
    assert main("launch", ["sagemaker", "job=food"]) == 1
    assert capsys.readouterr().err == "kd-launch: food: Failed: AlgorithmError: the disk is full\n"
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "bucket=s3://not-there": "bucket: can't list s3://not-there",
    "channel.train=s3://kd-test/nothing": "channel.train: there is nothing at s3://kd-test/nothing",
    "data.source.root=channel:photos": "channel.photos: must be given (channel.photos=s3://BUCKET",
}


def test_mistakes_are_one_line_and_nothing_is_sent_or_left(
    portable: Path, cloud: Any, tmp_path: Path, refusal: Command
) -> None:
    """In one cloud: a mistake leaves it as it was."""
    asked = [
        *PLACE,
        f"recipe={portable}",
        "instances=1xml.g5.xlarge",
        "channel.train=s3://kd-test/food",
    ]
    sagemaker = boto3.client("sagemaker")
    for item, told in MISTAKES.items():
        (line,) = refusal("launch", ["sagemaker", *asked, item]).splitlines()
        assert line.startswith("kd-launch: "), item
        assert told in line, item
        assert not [p for p in tmp_path.rglob("*") if p != portable], item
        assert [o["Key"] for o in cloud.list_objects_v2(Bucket="kd-test")["Contents"]] == [
            "food/train/apple/1.jpg"
        ]
        assert not sagemaker.list_training_jobs()["TrainingJobSummaries"], item


@pytest.mark.parametrize(
    ("operation", "told"),
    [
        ("ListObjectsV2", "bucket: can't list s3://kd-test/runs: "),
        (
            "PutObject",
            "bucket: can't upload tiny.yaml to s3://kd-test/runs/tiny-1/files/tiny.yaml: ",
        ),
    ],
)
def test_what_s3_refuses_names_the_key_and_what_it_may_be(
    operation: str,
    told: str,
    portable: Path,
    cloud: Any,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:
    error = {"Code": "AccessDenied", "Message": "Access Denied"}
    answer = SimpleNamespace(status_code=403), {"Error": error, "ResponseMetadata": {}}

    def refusing() -> Any:
        session = aws_session()
        session.events.register(f"before-call.s3.{operation}", lambda **_: answer)
        return session

    monkeypatch.setattr("kd.fleet.jobs.places.sagemaker.aws_session", refusing)
    asked = [f"recipe={portable}", "instances=1xml.g5.xlarge", "channel.train=s3://kd-test/food"]
    (line,) = refusal(
        "launch", ["sagemaker", *PLACE, *asked, "job=tiny-1", "wait=false"]
    ).splitlines()
    assert line.startswith(f"kd-launch: {told}")
    assert "(AccessDenied)" in line
    assert "; it must be s3://BUCKET[/FOLDER] that the AWS credentials here may " in line
    assert not boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]


def test_without_credentials(
    portable: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = [f"recipe={portable}", "instances=1xml.g5.xlarge", "channel.train=s3://kd-test/food"]
    assert "kd-launch: sagemaker: no AWS credentials" in refusal(
        "launch", ["sagemaker", *PLACE, *asked]
    )
    assert not [p for p in tmp_path.rglob("*") if p != portable]
