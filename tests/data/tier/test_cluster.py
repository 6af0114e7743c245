"""The data tier: other machines make the batches, and nothing of a run changes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kd.cli import main
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import FileSplit, ImageFolder, Source
from kd.data.tier import loader as remote
from kd.errors import RunError
from kd.settings import Augment, TierSpec
from tests._forks import start, status_of, survivors, wait_until
from tests._helpers import ROOT, Command, draw_folder
from tests._runs import run_of

ray = pytest.importorskip("ray")

SHORT = (
    "config=audit",
    "trainer.max_epochs=2",
    "data.augment.mixup=0.8",
    "model.student.kwargs.drop_path_rate=0.3",
)
MIXED = Augment(scale=0.3, color_jitter=0.4, random_erasing=0.5, mixup=0.8)
HANGS = "KD_TEST_HANGS"
ENDS = "KD_TEST_ENDS"


def audited(runs: Path, name: str, rank: int = 0) -> list[dict[str, Any]]:
    """Epoch, step, samples and loss of every step of a run."""
    lines = (
        (runs / "tiny" / name / "records" / f"samples.rank{rank}.jsonl").read_text().splitlines()
    )
    return [json.loads(line) for line in lines]


def test_a_run_over_the_tier_is_the_run_without(recipe: Path) -> None:
    """Samples, order and losses to the last bit; also with mixed pairs, and chance in the student."""
    runs = recipe.parent / "runs"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    handler = signal.getsignal(signal.SIGTERM)
    assert main("train", [f"recipe={recipe}", *SHORT, "name=torch"]) == 0
    assert main("train", [f"recipe={recipe}", *SHORT, "config=remote_data", "name=tier"]) == 0
    found = audited(runs, "tier")
    assert len(found) == 12 and found == audited(runs, "torch")
    assert main("eval", [str(runs / "tiny" / "tier")]) == 0  # needs no tier
    page = (runs / "tiny" / "tier" / "report.html").read_text()
    assert "Data tier" in page and "cores at work" in page
    left = [
        c for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE
    ]
    assert {child.pid for child in left} <= before
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_over_the_tier_that_is_killed_resumes_to_the_last_bit(recipe: Path) -> None:
    """SIGKILL at any step, twice; no process is left over."""
    items = ["config=remote_data", "trainer.max_epochs=4", "checkpoint.every_n_steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests._kills", str(recipe), "2", "0", *items],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "processes left over: 0" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_signal_to_the_whole_job_leaves_a_checkpoint(recipe: Path) -> None:
    """Ray's own processes die of it at once; the step is finished and saved all the same."""
    log, folder = recipe.parent / "log.txt", run_of(recipe)
    items = [
        "config=audit",
        "config=remote_data",
        "trainer.max_epochs=100000",
        "trainer.enable_progress_bar=false",
    ]
    pid = start([f"recipe={recipe}", *items], log)
    record = folder / "records" / "samples.rank0.jsonl"
    wait_until(lambda: record.exists() and record.read_bytes().count(b"\n") > 8)
    os.killpg(pid, signal.SIGTERM)
    assert status_of(pid) == 143, log.read_text()
    assert (
        "stopped by SIGTERM" in log.read_text() and (folder / "checkpoints" / "last.ckpt").is_file()
    )
    wait_until(lambda: not survivors(pid))


# -- a cluster of several machines -----------------------------------------------------------------------------------


class DisturbedSplit(FileSplit):
    """Its pictures hang, or end who reads them, on machines that are told so."""

    def read(self, i: int) -> bytes:
        """Reads, on a machine that is well."""
        if HANGS in os.environ:
            time.sleep(3600)
        if ENDS in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory is short
        return super().read(i)


class Disturbed(ImageFolder):
    """Gives such pictures."""

    def load(self, split: str) -> DisturbedSplit:
        """See :meth:`Source.load`."""
        found = super().load(split)
        return DisturbedSplit(found.paths, found.targets)


@pytest.fixture(scope="module")
def head() -> Iterator[Any]:
    """A cluster with a machine to train on, and none that makes batches."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=0, labels={"kd-role": "train"}, include_dashboard=False)
    yield cluster
    cluster.shutdown()


@pytest.fixture()
def cluster(head: Any) -> Iterator[Any]:
    """The same; machines that a test has added are gone after it."""
    before = set(head.list_all_nodes())
    yield head
    ray.shutdown()  # a test that has failed may still be connected
    for node in set(head.list_all_nodes()) - before:
        head.remove_node(node, allow_graceful=False)


def data_machine(cluster: Any, cores: int = 1, **env: str) -> Any:
    return cluster.add_node(num_cpus=cores, labels={"kd-role": "data"}, env_vars=env)


def module(
    root: Path, cluster: Any = None, source: type[Source] = Disturbed, **kwargs: Any
) -> DistillationDataModule:
    """Pictures by the tier of a cluster, or (without one) by this process."""
    more = (
        {"engine": "ray", "num_workers": "auto", "tier": TierSpec(cluster.address)}
        if cluster
        else {"num_workers": 0}
    )
    data = DistillationDataModule(
        source(str(root)), img_size=32, batch_size=4, augment=MIXED, **{**more, **kwargs}
    )
    data.prepare_data()
    return data


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """Whether batches are the same to the last bit."""
    pairs = zip(found, wanted, strict=True)
    return all(
        torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for a, b in pairs for k in b
    )


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 training pictures."""
    return draw_folder(tmp_path_factory.mktemp("many"), train=40)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_may_hang_come_and_go_in_mid_epoch(cluster: Any, many: Path, capfd: Any) -> None:
    """The first hangs over its first batch, a second comes later and makes it, a third goes on for the second."""
    hung = data_machine(cluster, **{HANGS: "1"})
    data = module(many, cluster)
    batches = iter(data.train_dataloader())
    crew = data.tier._scheduler
    wait_until(lambda: any(maker.jobs for maker in crew.makers))
    second = data_machine(cluster)
    found = [next(batches)]
    assert crew.second_tries == 1  # the batch that the first keeps
    third = data_machine(cluster)
    wait_until(lambda: len(crew.makers) == 3 and all(maker.ready for maker in crew.makers))
    found += [next(batches) for _ in range(10)]
    cluster.remove_node(second, allow_graceful=False)
    found += list(batches)
    assert same(found, list(module(many).train_dataloader()))
    by_machine = {machine.node: machine.batches for machine in crew.machines.values()}
    assert (
        by_machine[hung.node_id] == 0
        and by_machine[second.node_id] > 0
        and by_machine[third.node_id] > 0
    )
    validated = list(data.val_dataloader())  # by the same makers
    assert same(validated, list(module(many).val_dataloader()))
    wait_until(lambda: crew.machines[second.node_id].gone)
    told = capfd.readouterr()
    assert (
        "has come (1 processes)" in told.err and "has gone; 2 machine(s) make batches" in told.err
    )
    assert "raylet" not in told.out + told.err
    data.teardown("fit")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_makers_that_end_over_one_batch_blame_it(cluster: Any, many: Path) -> None:
    data_machine(cluster, **{ENDS: "1"})
    data = module(many, cluster)
    with pytest.raises(
        RunError,
        match="3 processes in turn have ended over one batch .* its first picture is .*jpg",
    ):
        next(iter(data.train_dataloader()))
    data.on_exception(RuntimeError())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mistakes_and_a_lost_cluster_are_told_in_a_line(
    cluster: Any,
    many: Path,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Command,
) -> None:
    for items, said in [
        (["data.tier.address=127.0.0.1:1"], "data.tier.address: no Ray cluster at 127.0.0.1:1"),
        (
            [f"data.tier.address={cluster.address}"],
            "data.tier.label: none of the cluster's 1 machine(s) carries",
        ),
        (
            [f"data.tier.address={cluster.address}", "data.tier.label=zone=b"],
            "machine(s) carries zone=b; start those",
        ),
    ]:
        told = refusal("train", [f"recipe={recipe}", "config=remote_data", *items]).strip()
        assert said in told and len(told.splitlines()) == 1
        assert not (recipe.parent / "runs").exists()
    cache = [
        f"model.teacher.cache_dir={recipe.parent / 'cache'}",
        f"data.tier.address={cluster.address}",
    ]
    told = refusal("cache", [f"recipe={recipe}", "config=remote_data", *cache]).strip()
    assert "data.tier.label: none of the cluster's 1 machine(s) carries kd-role=data" in told
    assert len(told.splitlines()) == 1 and not (recipe.parent / "cache").exists()
    node = data_machine(cluster)
    data = module(many, cluster)
    next(iter(data.train_dataloader()))
    cluster.remove_node(node, allow_graceful=False)
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    with pytest.raises(
        RunError, match="no machine that carries kd-role=data has made a batch for 1 s"
    ):
        while True:
            list(data.train_dataloader())
    monkeypatch.setattr(remote, "PATIENCE_S", 100.0)
    monkeypatch.setattr(remote, "LOST_S", 3.0)
    cluster.head_node.kill_gcs_server()
    with pytest.raises(RunError, match="lost the Ray cluster"):
        next(iter(data.val_dataloader()))
    data.on_exception(RuntimeError())
