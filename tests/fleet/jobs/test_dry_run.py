"""What a dry run needs: no boto3, and machines in the words of the place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kd.cli import launch_main, main
from kd.commands.launch import PLACES, _target
from tests._helpers import ROOT, Command

RECIPE = "recipe=foodtag_vit"
CPUS = ["trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture
def without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore", "botocore.session", "botocore.validate"):
        monkeypatch.setitem(sys.modules, name, None)


def test_sagemakers_dry_run_needs_no_boto3(
    without_boto3: None, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    line = ["sagemaker", RECIPE, "instances=2xml.p4d.24xlarge"]
    assert main("launch", [*line, "--dry-run"]) == 0
    shown = capsys.readouterr()
    request = json.loads(shown.out)
    assert request["ResourceConfig"]["InstanceType"] == "ml.p4d.24xlarge"
    assert "the request is not held against SageMaker's own model: needs" in shown.err


def test_sending_needs_it(without_boto3: None, refusal: Command) -> None:
    keys = ["image=i", "role=arn:aws:iam::123456789012:role/kd", "bucket=s3://kd-test"]
    assert "kd-launch: sagemaker: needs" in refusal(
        "launch", ["sagemaker", RECIPE, "instances=2xml.p4d.24xlarge", *keys]
    )
    assert "kd-launch: sagemaker: needs" in refusal("launch", ["sagemaker", "job=food"])


@pytest.mark.parametrize("place", PLACES)
def test_each_place_shows_an_example_that_it_takes(
    place: str, capsys: pytest.CaptureFixture[str], prints: Command
) -> None:
    assert main("launch", [place, RECIPE, "--dry-run"]) == 2
    example = _target(place).example
    assert f"(instances={example})" in capsys.readouterr().err
    more = CPUS if "cpu" in example else []
    assert main("launch", [place, RECIPE, f"instances={example}", "--dry-run", *more]) == 0
    assert f"for example {example}" in prints("launch", ["--help"])


@pytest.mark.parametrize("words", [["--help"], *([place, RECIPE, "--dry-run"] for place in PLACES)])
def test_help_and_a_dry_run_import_no_torch(words: list[str], tmp_path: Path) -> None:
    """Both answer in a second."""
    place = words[0]
    if place != "--help":
        example = _target(place).example
        words = [*words, f"instances={example}", *(CPUS if "cpu" in example else [])]
    program = (
        "import sys; from kd.cli import main; "
        "assert main('launch', sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", program, *words]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_folders_of_this_machine_are_named_where_others_lack_them(
    recipe: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"recipe={recipe}", f"data.source.root={pictures}", "--dry-run"]
    local = f"kd-launch: data.source.root={pictures} is on this machine alone"
    for place, machines in (
        ("sky", "A100:8"),
        ("sagemaker", "ml.g5.xlarge"),
    ):
        assert launch_main([place, f"instances={machines}", *words]) == 0
        assert local in capsys.readouterr().err
    assert launch_main(["slurm", "instances=gpu:8", *words]) == 0
    assert local not in capsys.readouterr().err
