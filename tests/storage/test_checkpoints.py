"""Checkpoint files: whole or not there, damage is recognised, nothing in them runs."""

import ctypes
import io
import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kd.cli import train_main
from kd.errors import RunError
from kd.storage.checkpoints import claim, damage, newest_whole, run_folder
from kd.storage.writing import write_whole
from kd.strategies.checkpoint_files import CheckpointFiles
from tests._forks import start, status_of
from tests._helpers import Command, refuses
from tests._runs import resumed, run, run_of, summary_of


def save(path: Path, number: float) -> Path:
    CheckpointFiles().save_checkpoint(
        {"weights": torch.full((500,), number), "step": 1, "state_dict": {}}, path
    )
    return path


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = save(tmp_path / "last.ckpt", 1.0)

    def fail(opened: io.BufferedIOBase) -> None:
        opened.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(file, fail)
    assert not damage(file)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then its name is: a power cut leaves the old file or the new one."""
    file, forced = tmp_path / "last.ckpt", []
    monkeypatch.setattr(
        os, "fsync", lambda handle: forced.append((os.fstat(handle).st_ino, file.exists()))
    )
    save(file, 1.0)
    assert forced == [(file.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_the_last_but_one_is_kept(tmp_path: Path) -> None:
    for number in (1.0, 2.0, 3.0):
        save(tmp_path / "last.ckpt", number)
    found = {
        p.name: float(torch.load(p, weights_only=True)["weights"][0]) for p in tmp_path.iterdir()
    }
    assert found == {"last.ckpt": 3.0, "previous.ckpt": 2.0}


@pytest.mark.parametrize("links", [True, False])
def test_a_renaming_that_fails_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Also where the one before gets its second name by a copy."""
    save(tmp_path / "last.ckpt", 1.0)
    monkeypatch.setattr("kd.storage.writing.move", lambda *_: no_space())
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: no_space())
    with pytest.raises(RunError, match="No space left on device; the one before is kept"):
        save(tmp_path / "last.ckpt", 2.0)
    newest, _ = newest_whole(tmp_path)
    assert newest is not None
    assert float(torch.load(newest, weights_only=True)["weights"][0]) == 1.0


def no_space() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("content", [b"\xff\xfe0", b"../other", b""])
def test_a_latest_that_names_no_folder_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with refuses("must be a plain name"):
        run_folder(tmp_path / "latest")


def test_a_damaged_last_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        save(tmp_path / "last.ckpt", number)
    (tmp_path / "last.ckpt").write_bytes(b"torn")
    files = CheckpointFiles()
    files.load_checkpoint(tmp_path / "previous.ckpt")
    files.save_checkpoint({"weights": torch.full((1,), 9.0)}, tmp_path / "last.ckpt")
    assert not damage(tmp_path / "previous.ckpt")
    assert float(torch.load(tmp_path / "previous.ckpt", weights_only=True)["weights"][0]) == 1.0


def test_any_flipped_bit_and_any_cut_is_found_or_harmless(tmp_path: Path) -> None:
    file = save(tmp_path / "last.ckpt", 1.5)
    whole, want = file.read_bytes(), torch.load(file, weights_only=True)
    rng = random.Random(0)
    harmless = 0
    for _ in range(400):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        if not damage(file):  # in the padding between records, or a date
            got = torch.load(file, weights_only=True)
            assert torch.equal(got["weights"], want["weights"])
            assert got["step"] == want["step"]
            harmless += 1
    assert harmless < 300
    for _ in range(50):
        file.write_bytes(whole[: rng.randrange(len(whole))])
        assert damage(file)


def test_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        last = save(tmp_path / "last.ckpt", number)
    assert newest_whole(tmp_path) == (last, {})
    last.write_bytes(last.read_bytes()[:-100])
    found, damaged = newest_whole(tmp_path)
    assert found == tmp_path / "previous.ckpt"
    assert list(damaged) == [last]
    last.unlink()
    assert newest_whole(tmp_path) == (tmp_path / "previous.ckpt", {})


def test_resume_falls_back_with_a_warning(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(recipe)
    folder = run_of(recipe)
    before = summary_of(folder)["student"]
    last = folder / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4  # in a tensor: torch itself would load it without a word
    last.write_bytes(content)
    capsys.readouterr()
    resumed(folder)
    err = capsys.readouterr().err
    assert f"warning: {last} can't be loaded: wrong checksum" in err
    assert f"resuming from {folder / 'checkpoints' / 'previous.ckpt'}" in err
    assert summary_of(folder)["student"] == before
    assert not damage(last)


class Evil:
    """Would write a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.target}",))


def test_nothing_in_a_file_is_executed(
    recipe: Path, pictures: Path, tmp_path: Path, refusal: Command
) -> None:
    touched = tmp_path / "touched"
    run(recipe, "trainer.max_epochs=1")
    folder = run_of(recipe)
    last = folder / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    torch.save({**content, "callbacks": Evil(touched)}, last)
    assert f"resume: {last} can't be loaded: UnpicklingError" in refusal(
        "train", [f"resume={folder}", "trainer.max_epochs=2"]
    )
    for name in ("evil.pth", "evil.ckpt"):
        torch.save({"state_dict": Evil(touched)}, tmp_path / name)
        assert "is not a readable checkpoint" in refusal(
            "train", [f"recipe={recipe}", f"model.teacher.checkpoint={tmp_path / name}"]
        )
    assert not touched.exists()


def test_a_checkpoint_within_an_epoch(recipe: Path) -> None:
    """By steps and by time: files appear before the first epoch has ended; the accumulation is never cut in two."""
    for number, items in enumerate(
        (
            ["checkpoint.every_n_steps=1", "trainer.accumulate_grad_batches=2"],
            ["checkpoint.every_n_minutes=1e-6", "trainer.accumulate_grad_batches=2"],
        )
    ):
        fail = json.dumps({"class_path": "tests._stop.FailAtStep", "init_args": {"step": 2}})
        assert train_main([f"recipe={recipe}", f"trainer.callbacks+={fail}", *items]) == 1
        file = recipe.parent / "runs" / "tiny" / f"{number:03d}" / "checkpoints" / "last.ckpt"
        content = torch.load(file, weights_only=True)
        assert content["global_step"] == 2
        assert content["DistillationDataModule"]["samples"] == 32


def can_mount() -> bool:
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs a mount namespace")


def enter(holder: int) -> None:
    """Moves this process into the file systems of another."""
    handle = os.open(f"/proc/{holder}/ns/mnt", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(handle, 0x20000) == 0
    os.close(handle)


@contextmanager
def disk_at(folder: Path, options: str) -> Iterator[int]:
    """A file system of its own at ``folder``, as only one process and those that enter it see it; its id."""
    folder.mkdir()
    holder = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs {options} none {folder} && echo mounted && exec sleep 600"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mounted\n"
    yield holder.pid
    holder.kill()
    holder.wait()


@needs_mounts
def test_a_full_disk_leaves_the_last_good_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """Room for the first two checkpoints; a third file does not fit."""
    disk, log = tmp_path / "disk", tmp_path / "log"
    with disk_at(disk, "-o size=700k") as holder:
        items = [f"recipe={recipe}", f"runs_dir={disk}", "trainer.max_epochs=9"]
        assert status_of(start(items, log, enter, holder)) == 1
        said = log.read_text()
        assert "kd-train: failed: the checkpoint " in said, said
        assert "can't be written: No space left on device; the one before is kept" in said
        folder = Path(f"/proc/{holder}/root{disk}/tiny/000/checkpoints")
        assert newest_whole(folder) == (folder / "last.ckpt", {})
        assert not list(folder.glob("*.part"))


@needs_mounts
def test_a_read_only_folder(recipe: Path, tmp_path: Path) -> None:
    disk, log = tmp_path / "disk", tmp_path / "log"
    with disk_at(disk, "-o ro") as holder:
        assert status_of(start([f"recipe={recipe}", f"runs_dir={disk}"], log, enter, holder)) == 2
    assert (
        f"kd-train: runs_dir: {disk / 'tiny'} can't be written: Read-only file system"
        in log.read_text()
    )


def test_the_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"last.ckpt can't be written"):
        CheckpointFiles().save_checkpoint({}, tmp_path / "file" / "last.ckpt")


@pytest.mark.parametrize("share", [0, 0.3, 0.7, 0.99])
def test_a_disk_that_fills_at_any_place_is_told_alike(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the archive's records or in its directory, where torch raises an error of its own."""
    room = share * save(tmp_path / "whole.ckpt", 1.0).stat().st_size

    class Small(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if self.tell() + len(data) > room:
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr("kd.storage.writing._fresh", lambda path: Small(path, "w"))
    # no checkpoint was before
    with pytest.raises(RunError, match=r"last.ckpt can't be written: No space left on device$"):
        save(tmp_path / "last.ckpt", 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["whole.ckpt"]


def test_a_folder_whose_name_is_no_number_to_int_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "²").mkdir()
    (tmp_path / "004").mkdir()
    assert claim(tmp_path).name == "005"


def test_a_number_that_another_process_takes_first_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [claim(tmp_path).name for _ in range(2)] == ["000", "001"]
    monkeypatch.setattr(
        Path, "iterdir", lambda folder: iter(())
    )  # listed before the others were made
    assert claim(tmp_path).name == "002"
