"""A run in SageMaker's container: what comes in, what must come out, and what an interruption leaves."""

import shutil
from pathlib import Path

import pytest
import timm

from kd.launch.sagemaker import channel_folder
from kd.run.request import merge, translate, with_folders
from tests._files import write_json
from tests._forks import start, status_of
from tests._helpers import refuses, write_recipe
from tests._runs import disturb, summary_of


def make_container(
    folder: Path, pictures: Path, settings: dict[str, str], *hosts: str, here: str = ""
) -> Path:
    """What SageMaker puts below ``/opt/ml`` before it starts the container's command."""
    config, data = folder / "input" / "config", folder / "input" / "data"
    config.mkdir(parents=True)
    data.mkdir()
    (data / "train").symlink_to(pictures)
    (folder / "output").mkdir()
    write_json(config / "hyperparameters.json", settings)
    write_json(
        config / "resourceconfig.json", {"hosts": list(hosts), "current_host": here or hosts[0]}
    )
    return folder


def settings_of(recipe: Path, **more: str) -> dict[str, str]:
    """As the request has them: text, some of it JSON."""
    return {"recipe": str(recipe), "data.source.root": '"channel:train"', "trainer.max_epochs": "2", **more,
            "sagemaker_region": "eu-west-1"}  # fmt: skip


@pytest.fixture()
def portable(tmp_path: Path, teacher: Path) -> Path:
    """A recipe whose data are a channel."""
    return write_recipe(tmp_path / "tiny.yaml", Path("channel:train"), teacher)


def test_a_spot_job_goes_on_where_it_was_interrupted_and_its_model_lands(
    portable: Path, pictures: Path, tmp_path: Path
) -> None:
    key, _, value = disturb("SignalGroup", step=8, number=15).partition("=")
    base, log = tmp_path / "ml", tmp_path / "log"
    env = {"SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "food-1"}
    make_container(base, pictures, settings_of(portable, **{key: value}), "127.0.0.1")
    assert status_of(start(["train"], log, **env)) == 143, log.read_text()
    assert not (base / "model").exists()
    assert not (base / "output" / "failure").exists()
    kept = base.rename(tmp_path / "kept")
    make_container(
        base, pictures, settings_of(portable, **{key: value}), "127.0.0.1"
    )  # another machine
    shutil.copytree(kept / "checkpoints", base / "checkpoints")  # S3 keeps no links, and this alone
    assert status_of(start(["train"], log, **env)) == 0, log.read_text()
    run = base / "checkpoints" / "tiny" / "000"
    assert f"kd-train: this job has run before: resuming {run}" in log.read_text()
    rows = (run / "metrics.csv").read_text().splitlines()
    assert {int(row.split(",")[rows[0].split(",").index("step")]) for row in rows[1:]} >= set(
        range(12)
    )
    model = base / "model"
    assert summary_of(model)["status"] == "done"
    assert (model / "report.html").is_file()
    assert not (model / "checkpoints").exists()
    timm.create_model(f"local-dir:{model / 'student'}", pretrained=True)


def test_a_failure_is_one_line_where_sagemaker_reads_it(
    portable: Path, pictures: Path, tmp_path: Path
) -> None:
    for number, (setting, told) in enumerate([
        ({"data.source.root": "channel:photos"}, "channel:photos: the job has no channel 'photos'"),
        ({"optim.lrr": "0.1"}, "optim.lrr"),
        ({"trainer.callbacks+": disturb("FailAtStep", step=3).partition("=")[2]}, "RuntimeError: planted"),
    ]):  # fmt: skip
        base = make_container(
            tmp_path / f"ml{number}", pictures, {**settings_of(portable), **setting}, "127.0.0.1"
        )
        status = status_of(start([], tmp_path / "log", SAGEMAKER_BASE_DIR=str(base)))
        assert status == (1 if number == 2 else 2)
        (line,) = (base / "output" / "failure").read_text().splitlines()
        assert told in line
        assert not (base / "model").exists()
        assert (base / "checkpoints").exists() == (number == 2)


def test_hyperparameters_and_the_command_line() -> None:
    request = translate(["--optim.lr", "0.10", "--recipe", "tiny", "config=audit"])
    merge(
        request,
        {"optim.lr": "0.1", "recipe": "tiny", "config": '["audit", "zero"]', "seed": "3"},
        "SM_HPS",
    )
    assert (request.overrides, request.recipe) == (["optim.lr=0.10", "seed=3"], "tiny")
    assert request.overlays == ["audit", "zero"]
    with refuses("seed: 3 on the command line, but 4 in SM_HPS"):
        merge(request, {"seed": "4"}, "SM_HPS")
    with refuses("SM_HPS: no key '--x'"):
        merge(request, {"--x": "4"}, "SM_HPS")


def test_names_with_a_hyphen_are_keys_as_on_a_command_line() -> None:
    """``kd-launch`` sends them so: ``model.teachers.dino-small.checkpoint=FILE``."""
    request = translate(["recipe=food"])
    merge(request, {"model.teachers.my-one.cache-views": "2"}, "SM_HPS")
    assert request.overrides == ["model.teachers.my-one.cache_views=2"]


def test_channels_by_name(tmp_path: Path) -> None:
    env = {"SM_CHANNEL_TRAIN": "/data/train", "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert channel_folder("channel:train/photos", env) == "/data/train/photos"
    (tmp_path / "input" / "data" / "More-Food").mkdir(parents=True)
    assert channel_folder("channel:More-Food", env) == str(tmp_path / "input/data/More-Food")
    with refuses("no channel 'val' .SM_CHANNEL_VAL.; it has More-Food"):
        channel_folder("channel:val", env)


def test_a_channel_whose_name_begins_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "ab", "abc", "abcd", "abcde", "abcdef"]
    for i, name in enumerate(names):
        monkeypatch.setenv(f"SM_CHANNEL_{name.upper()}", f"/data{i}")
    settings = {name: f"channel:{name}" for name in names}
    assert with_folders(settings) == {name: f"/data{i}" for i, name in enumerate(names)}
