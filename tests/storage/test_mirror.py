"""A run whose folder is in an object store: followed there while it trains, and gone on with from elsewhere."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback, Trainer
from safetensors.torch import load_file

import kd
from kd.cli import main, train_main
from kd.storage.mirror import Mirror
from kd.storage.objects import file_system, files_below, is_copy, mark_copy, put_whole
from kd.storage.run_urls import CLAIM, fetched_run, on_disk
from tests._faults import Faults, before
from tests._forks import free_port, run_ranks, start, statuses_of
from tests._helpers import Command, refuses
from tests._runs import assert_same, losses, resumed, run_of
from tests._runs import run as trained

STOP = json.dumps({"class_path": "tests._stop.StopAfterEpoch", "init_args": {"epoch": 0}})


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "machine"))


def names(url: str) -> set[str]:
    files, path = file_system(url)
    files.invalidate_cache()
    return {name.removeprefix(f"{path}/") for name in files.find(path)}


def test_a_run_goes_on_on_another_machine_from_its_url(
    recipe: Path,
    s3: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refusal: Command,
) -> None:
    first = "checkpoint.monitor=val/acc5"  # the first epoch is the best then, and is looked for after the move
    trained(recipe, first)
    whole = run_of(recipe)
    url = f"{s3}/runs"
    assert (
        train_main([f"recipe={recipe}", f"runs_dir={url}", first, f"trainer.callbacks+={STOP}"])
        == 143
    )
    assert f"uploaded: {url}/tiny/000\n" in capsys.readouterr().out
    assert {"tiny/latest", "tiny/000/config.yaml", "tiny/000/checkpoints/last.ckpt"} <= names(url)
    assert not any(name.endswith((".part", "/.lock")) for name in names(url))
    shutil.rmtree(tmp_path / "machine")
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "another"))
    assert (
        train_main([f"resume={url}/tiny/latest", "trainer.callbacks=null", "trust=tests._stop"])
        == 0
    )
    assert {
        "tiny/000/student.safetensors",
        "tiny/000/report.html",
        "tiny/000/summary.json",
    } <= names(url)
    here = on_disk(f"{url}/tiny/000", "runs_dir")
    assert here.is_relative_to(tmp_path / "another")
    assert losses(here) == losses(whole)
    files, path = file_system(url)
    assert (
        files.cat_file(f"{path}/tiny/000/student.safetensors")
        == (here / "student.safetensors").read_bytes()
    )
    a, b = (load_file(folder / "student.safetensors") for folder in (here, whole))
    assert_same(a, b)
    # the same machine takes what it has, even where an upload was cut
    (here / "metrics.csv").write_text("newer")
    assert fetched_run(f"{url}/tiny/000", "resume") == here
    assert (here / "metrics.csv").read_text() == "newer"
    started = [f"model.student.checkpoint={url}/tiny/000", "trainer.max_epochs=1"]
    trained(recipe, *started)
    assert kd.evaluate(f"{url}/tiny/000")["pictures"] == 16
    # a third machine: the next number is free there, and the run can be looked at
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "third"))
    assert main("report", [f"{url}/tiny/000"]) == 0
    assert not (on_disk(f"{url}/tiny/000", "runs_dir") / "checkpoints").exists()
    assert train_main([f"recipe={recipe}", f"runs_dir={url}", "trainer.max_epochs=1"]) == 0
    assert "tiny/001/student.safetensors" in names(url)
    named = [f"recipe={recipe}", f"runs_dir={url}", "trainer.max_epochs=1", "name=mine"]
    assert train_main(named) == 0
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "fourth"))
    capsys.readouterr()
    assert "there is a run" in refusal("train", named)


class Intruder(Callback):
    """After the first epoch another machine begins to train the run, and writes its last checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        files, path = file_system(self.url)
        while trainer.current_epoch == 0 and not files.exists(path):
            time.sleep(0.05)
            files.invalidate_cache()
        if trainer.current_epoch == 0:
            time.sleep(1)  # the upload is looked at once more when it is done
            files.pipe_file(path.replace("checkpoints/last.ckpt", CLAIM), b"another")
            files.pipe_file(path, b"another")


def on_two_machines(items: list[str], disks: list[Path], port: str, log: Path) -> list[int]:
    """Exit statuses of one job of two machines, a process and a disk each, as torchrun would start it."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "job",
           "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
           "GROUP_WORLD_SIZE": "2", "LOCAL_ADDR": "127.0.0.1"}  # fmt: skip
    pids = [
        start(
            items,
            log.with_suffix(f".{disk.name}"),
            KD_CACHE=str(disk),
            RANK=str(i),
            GROUP_RANK=str(i),
            **job,
        )
        for i, disk in enumerate(disks)
    ]
    return statuses_of(pids)


@pytest.mark.slow
def test_machines_without_a_common_disk_go_on_with_their_run(
    recipe: Path, s3: str, tmp_path: Path
) -> None:
    """Twice on other machines: both new, then one that has an older state of the run and one that knows nothing."""
    log, url = tmp_path / "log", f"{s3}/runs"
    both = [
        f"recipe={recipe}",
        "data.batch_size=4",
        "trainer.strategy=kd.strategies.ddp.DDP",
        "trainer.max_epochs=3",
    ]
    run_ranks([*both, "trainer.devices=2"], log)
    whole = run_of(recipe)
    items = [
        *both,
        f"runs_dir={url}",
        'trainer.callbacks+={"class_path": "tests._stop.StopAfterEachEpoch"}',
    ]
    a, b, c, d = (tmp_path / name for name in "abcd")
    for number, disks in enumerate(([a, b], [c, d], [b, a])):
        statuses = on_two_machines(items, disks, free_port(), log)
        said = [log.with_suffix(f".{disk.name}").read_text() for disk in disks]
        assert statuses == ([143, 143] if number < 2 else [0, 0]), said
        assert ("this job has run before: resuming" in said[0]) == (number > 0), said[0]
    here = b / "runs" / url.replace("://", "/") / "tiny" / "000"
    assert losses(here) == losses(whole)
    files, path = file_system(f"{url}/tiny/000/student.safetensors")
    files.invalidate_cache()
    files.get_file(path, str(tmp_path / "student.safetensors"))
    mine, wanted = (load_file(folder / "student.safetensors") for folder in (tmp_path, whole))
    assert_same(mine, wanted)
    assert not [name for name in names(url) if name.startswith("tiny/001")]


def test_what_another_machine_writes_is_not_overwritten(
    recipe: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kd.storage.mirror.EVERY_S", 0.05)
    last = f"{s3}/runs/tiny/000/checkpoints/last.ckpt"
    intruder = json.dumps(
        {"class_path": "tests.storage.test_mirror.Intruder", "init_args": {"url": last}}
    )
    items = [f"recipe={recipe}", f"runs_dir={s3}/runs", "checkpoint.every_n_steps=1"]
    assert train_main([*items, f"trainer.callbacks+={intruder}"]) == 1
    files, path = file_system(last)
    assert files.cat_file(path) == b"another"
    best = f"{path.removesuffix('last.ckpt')}best.ckpt"
    if files.exists(best):  # of the first epoch, or none
        assert (
            files.cat_file(best)
            != (on_disk(f"{s3}/runs/tiny/000", "runs_dir") / "checkpoints/best.ckpt").read_bytes()
        )
    assert "another machine trains there; nothing more is sent from" in capsys.readouterr().err
    assert (on_disk(f"{s3}/runs/tiny/000", "runs_dir") / "student.safetensors").is_file()


def test_an_upload_whose_end_is_not_known_is_no_other_machines(
    recipe: Path, s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the store's yes and the note of it: the newer checkpoint here stays, and the run goes on."""
    url = f"{s3}/runs/tiny/000"
    assert (
        train_main([f"recipe={recipe}", f"runs_dir={s3}/runs", f"trainer.callbacks+={STOP}"]) == 143
    )
    here, last = on_disk(url, "runs_dir"), "checkpoints/last.ckpt"
    assert is_copy(here / last, files_below(url, "x")[last])
    newer = (here / last).read_bytes()
    (here / last).write_bytes(newer)  # another time of change
    for _ in range(2):
        assert fetched_run(url, "resume") == here
        assert (here / last).read_bytes() == newer
        assert not is_copy(here / last, files_below(url, "x")[last])
    resumed(url, "trainer.callbacks=null", "trust=tests._stop")
    files, path = file_system(url)
    assert files.cat_file(f"{path}/{last}") == (here / last).read_bytes()

    # another machine has begun meanwhile: what is newer here is not lost silently, what was sent is replaced
    files.pipe_file(f"{path}/{CLAIM}", b"another")
    files.pipe_file(f"{path}/{last}", b"theirs")
    (here / last).write_bytes(b"never sent")
    with refuses("resume: .*the run has continued both in"):
        fetched_run(url, "resume")
    mark_copy(here / last, (5, 123456789))  # as it was sent, before the other machine
    assert (fetched_run(url, "resume") / last).read_bytes() == b"theirs"


def test_uploads_survive_faults_and_are_encrypted_by_fsspecs_options(
    recipe: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setattr("kd.storage.objects.PAUSE_S", 0.01)
    monkeypatch.setattr("kd.storage.mirror.EVERY_S", 0.05)
    monkeypatch.setitem(
        fsspec.config.conf,
        "s3",
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}, "default_block_size": 2**20},
    )
    faults = Faults("PUT", "/runs/")
    with before(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]), faults) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        file_system(s3)[0].clear_instance_cache()
        faults.often = 4
        items = [
            f"recipe={recipe}",
            f"runs_dir={s3}/runs",
            "checkpoint.every_n_steps=1",
            "trainer.max_epochs=1",
        ]
        assert train_main(items) == 0
        faults.often = 0
        assert all(faults.failed.values()), faults.failed
        files, path = file_system(f"{s3}/runs/tiny/000")
        files.invalidate_cache()
        here = on_disk(f"{s3}/runs/tiny/000", "runs_dir")
        for name in (
            "checkpoints/last.ckpt",
            "student.safetensors",
            "metrics.csv",
        ):
            assert files.cat_file(f"{path}/{name}") == (here / name).read_bytes(), name
        head = files.call_s3("head_object", Bucket="food", Key="runs/tiny/000/student.safetensors")
        assert head["ServerSideEncryption"] == "AES256"


def test_the_last_checkpoint_is_sent_after_the_records_of_its_steps(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as it was when they were read: training goes on meanwhile."""
    run = tmp_path / "tiny" / "000"
    for name in ("checkpoints/last.ckpt", "checkpoints/previous.ckpt", "checkpoints/best.ckpt", "metrics.csv",
                 "records/samples.rank0.jsonl"):  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"old {name}")
    sent: list[str] = []
    mirror = Mirror(f"{s3}/runs", "runs_dir")

    def trained_on(file: Path, url: str, key: str) -> tuple[int, int]:
        name = url.partition("/000/")[2]
        sent.append(name)
        if name == "metrics.csv":
            (run / "checkpoints" / "newer").write_text("newer")
            (run / "checkpoints" / "newer").replace(run / "checkpoints" / "last.ckpt")
        return put_whole(file, url, key)

    monkeypatch.setattr("kd.storage.mirror.put_whole", trained_on)
    mirror.follow(run)
    mirror._end.set()
    mirror._thread.join()  # type: ignore[union-attr]
    mirror._send()
    files, path = file_system(f"{s3}/runs/tiny/000")
    assert "checkpoints/previous.ckpt" not in sent, "a store replaces a file whole"
    assert sent[-1] == "checkpoints/last.ckpt"
    assert files.cat_file(f"{path}/checkpoints/last.ckpt") == b"old checkpoints/last.ckpt"
    assert "checkpoints/last.ckpt" in mirror._changed(), "the newer one is sent next"
    assert not list(run.glob(".last*"))


def test_bad_places_take_one_line_and_leave_nothing(
    recipe: Path,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:
    monkeypatch.setattr("kd.storage.objects.PAUSE_S", 0.0)
    cases = [
        (
            "train",
            [f"recipe={recipe}", "runs_dir=s3://no-such-bucket/runs"],
            "runs_dir: s3://no-such-bucket/runs can't be",
        ),
        ("train", [f"resume={s3}/runs/tiny/007"], f"resume: run {s3}/runs/tiny/007 not found"),
        ("report", [f"{s3}/runs/tiny/007"], f"run: run {s3}/runs/tiny/007 not found"),
        (
            "scale",
            [f"recipe={recipe}", f"runs_dir={s3}/runs", "processes=1,2"],
            "runs_dir: kd-scale writes to a folder of",
        ),
    ]
    for command, items, message in cases:
        error = refusal(command, items)
        assert message in error and error.count("\n") == 1, error
    assert names(s3) == set()
    assert not list((tmp_path / "machine").rglob("config.yaml"))
