"""What several places have in common: programs, the job's folder, a place that shares this machine's folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kd.fleet.jobs.job import Job, JobOptions
from kd.fleet.jobs.target import ask, command, written
from tests._helpers import refuses


@pytest.fixture()
def job(tmp_path: Path) -> Job:
    """A job with a recipe of the user's own."""
    own = tmp_path / "own recipe.yaml"
    own.write_text("recipe: x\n")
    nothing: Any = None
    return Job("food-1", "x", {"own recipe.yaml": own}, ["recipe=own recipe.yaml", "optim.lr=1"], nothing, None, 1,
               None, tmp_path / "runs", JobOptions(), {})  # fmt: skip


def test_a_program_that_fails_is_told_by_its_last_line() -> None:
    assert ask(["sh", "-c", "echo text"]) == "text"
    with refuses(r"^sh -c: second$"):
        ask(["sh", "-c", "echo first >&2; echo second >&2; exit 3"])
    with refuses("exit status 3"):
        ask(["sh", "-c", "exit 3"])
    with refuses(r"no program no-such-program here \(SLURM\)"):
        ask(["no-such-program"], "SLURM")
    assert ask(["cat"], text="read") == "read"


def test_a_job_whose_files_can_not_be_written_leaves_no_folder(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name would be taken: another try of the same command would be refused."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"), written(job, {"train.sh": ""}):
        pass
    assert not job.folder.exists()


def test_where_folders_are_shared_files_are_named_where_they_are(job: Job, tmp_path: Path) -> None:
    own = tmp_path / "own recipe.yaml"
    assert command(job) == f"'recipe={own}' optim.lr=1 runs_dir={tmp_path}/runs name=food-1"
    with refuses("spot: is for sagemaker and sky"):
        command(replace(job, options=JobOptions(spot=True)))
    with refuses("channel:photos: the machines see this machine's folders"):
        command(replace(job, items=["data.source.root=channel:photos"]))
