"""What a dry run needs: no boto3, and machines in the words of the place."""

import json
import sys

import pytest

from kd.cli import main
from kd.commands.launch import TARGETS, _target

RECIPE = "recipe=foodtag_vit"
CPUS = ["trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture
def without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore", "botocore.session", "botocore.validate"):
        monkeypatch.setitem(sys.modules, name, None)


def test_sagemakers_dry_run_needs_no_boto3(
    without_boto3: None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sagemaker", RECIPE, "instances=2xml.p4d.24xlarge"]
    assert main("launch", [*line, "--dry-run"]) == 0
    shown = capsys.readouterr()
    request = json.loads(shown.out)
    assert request["ResourceConfig"]["InstanceType"] == "ml.p4d.24xlarge"
    assert "the request is not held against SageMaker's own model: needs" in shown.err
    assert main("launch", ["sagemaker", RECIPE, "instances=4xA100:8", "--dry-run"]) == 2
    assert "instances: SageMaker has no 'A100:8' (2xml.p4d.24xlarge" in capsys.readouterr().err


def test_sending_needs_it(without_boto3: None, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["image=i", "role=arn:aws:iam::123456789012:role/kd", "bucket=s3://kd-test"]
    assert main("launch", ["sagemaker", RECIPE, "instances=2xml.p4d.24xlarge", *keys]) == 2
    assert "kd-launch: sagemaker: needs" in capsys.readouterr().err


@pytest.mark.parametrize("place", [*TARGETS])
def test_each_place_shows_an_example_that_it_takes(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("launch", [place, RECIPE, "--dry-run"]) == 2
    example = _target(place).example
    assert f"(instances={example})" in capsys.readouterr().err
    more = CPUS if "cpu" in example else []
    assert main("launch", [place, RECIPE, f"instances={example}", "--dry-run", *more]) == 0
    assert main("launch", ["--help"]) == 0
    assert f"for example {example}" in capsys.readouterr().out
