"""What all places have in common: programs, a log's tail, a place that shares this machine's folders."""

from dataclasses import replace
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.fleet.jobs.job import Job
from kd.fleet.jobs.sent import send
from kd.fleet.jobs.target import Outcome, Tail, ask, command, need, refuse_spot_and_channels
from kd.fleet.jobs.torchrun import Torchrun


def test_a_program_that_fails_is_told_by_its_last_line() -> None:
    assert ask(["sh", "-c", "cat"], "text\n") == "text"
    with pytest.raises(UserError, match=r"^sh -c: second$"):
        ask(["sh", "-c", "echo first >&2; echo second >&2; exit 3"])
    with pytest.raises(UserError, match="exit status 3"):
        ask(["sh", "-c", "exit 3"])
    with pytest.raises(UserError, match=r"no program no-such-program here \(SLURM\)"):
        need("no-such-program", "SLURM")
    need("sh", "here")


def test_a_log_is_printed_by_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    tail.print_new()
    for text, shown in (("one\ntw", "one\n"), ("o\n", "two\n"), ("", "")):
        with file.open("a") as opened:
            opened.write(text)
        tail.print_new()
        assert capsys.readouterr().out == shown
    with file.open("a") as opened:
        opened.write("killed in mid-li")
    tail.print_new()
    assert capsys.readouterr().out == ""
    tail.print_new(last=True)
    assert capsys.readouterr().out == "killed in mid-li"


def test_a_job_whose_files_can_not_be_written_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name would be taken: another try of the same command would be refused."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        send(Torchrun(), None, tmp_path / "food-1", {"train.sh": ""}, "torchrun")  # type: ignore[arg-type]
    assert not (tmp_path / "food-1").exists()


def test_where_folders_are_shared_files_are_named_where_they_are(tmp_path: Path) -> None:
    own = tmp_path / "own recipe.yaml"
    own.write_text("recipe: x\n")
    job = Job("food-1", "x", {"own recipe.yaml": own}, ["recipe=own recipe.yaml", "optim.lr=1"], None, None, False, 1,
              None, None, tmp_path / "runs", {}, {})  # type: ignore[arg-type] # fmt: skip
    assert command(job) == f"'recipe={own}' optim.lr=1 runs_dir={tmp_path}/runs name=food-1"
    refuse_spot_and_channels(job, "SLURM's machines")
    with pytest.raises(UserError, match="spot: SLURM's machines have no price by the hour"):
        refuse_spot_and_channels(replace(job, spot=True), "SLURM's machines")
    with pytest.raises(
        UserError, match="channel:photos: SLURM's machines see this machine's folders"
    ):
        refuse_spot_and_channels(
            replace(job, items=["data.source.root=channel:photos"]), "SLURM's machines"
        )
    place, done = Torchrun(), Outcome(True, "done")
    assert place.fetch(done, tmp_path) == tmp_path and place.fetch(done, own) is None
    assert done.hours is None
