"""The smddp strategy: the real library can't be installed outside SageMaker's images, so a stand-in registers the
backend over gloo, without what the library lacks: new groups, and all that is not built of all-reduce, all-gather,
broadcast and barrier. Everything else (import hook, process group, DDP, ZeRO) is real."""

from pathlib import Path

import pytest
import torch

from kd.strategies.ddp import DDP, SMDDPStrategy
from tests._forks import start_ranks, statuses_of
from tests._helpers import refuses
from tests._runs import run_of, summary_of

HOOK = "smdistributed.dataparallel.torch.torch_smddp"
STAND_IN = """
import torch.distributed as dist

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("smddp", create, devices=["cpu"])

def forbidden(*args, **kwargs):
    raise RuntimeError("smddp has no such collective")

for name in ("new_group", "new_subgroups", "gather", "gather_object", "scatter", "scatter_object_list", "send", "recv",
             "send_object_list", "recv_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"):
    setattr(dist, name, forbidden)
    setattr(dist.distributed_c10d, name, forbidden)
"""


@pytest.fixture()
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *packages, module = HOOK.split(".")
    folder = tmp_path / "site"
    for package in packages:
        folder = folder / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (folder / f"{module}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "site")


def train(recipe: Path, *items: str) -> tuple[list[int], str]:
    """Two ranks over the backend: their exit statuses, and what rank 0 said."""
    shared = [
        f"recipe={recipe}", "config=smddp_4x8", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.num_nodes=1",
        "trainer.max_epochs=1", "data.batch_size=4", "data.num_workers=0",
    ]  # fmt: skip
    pids = start_ranks([*shared, *items], recipe.parent / "log.txt")
    return statuses_of(pids), (recipe.parent / "log.0").read_text()


@pytest.mark.usefixtures("stand_in")
def test_two_processes_over_the_backend_shard_the_optimizer(recipe: Path) -> None:
    wide = "model.student.kwargs={patch_size: 8, embed_dim: 64, depth: 4, num_heads: 2}"
    statuses, said = train(recipe, "config=zero", wide)
    assert statuses == [0, 0], said
    summary = summary_of(run_of(recipe))
    assert summary["strategy"] == "SMDDPStrategy"
    assert summary["world_size"] == 2
    account = summary["optimizer_state"]
    assert account["sharded_over"] == 2
    assert account["rank0_mb"] == pytest.approx(account["whole_mb"] / 2, rel=0.05)


def test_without_the_library_it_is_never_plain_ddp() -> None:
    with refuses(f"trainer.strategy: the backend smddp needs the module {HOOK}"):
        SMDDPStrategy()


def test_what_smddp_can_not_do_is_refused() -> None:
    with refuses("trainer.strategy.compression: must be null with smddp, got 'powersgd'"):
        DDP(backend="smddp", module=HOOK, compression="powersgd")


def test_a_backends_name_in_capitals_is_the_same_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports it in small letters."""
    monkeypatch.setattr("kd.strategies.ddp._import", lambda module, backend: None)
    strategy = DDP(backend="SMDDP", module=HOOK)
    joined: list[str] = []
    monkeypatch.setattr(strategy, "join_process_group", lambda: joined.append("smddp"))
    monkeypatch.setattr("kd.strategies.ddp.prepare_data_without_groups", lambda: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "smddp")
    strategy.setup_distributed()
    assert joined == ["smddp"]
    with refuses("compression: must be null with smddp"):
        DDP(backend="SMDDP", module=HOOK, compression="bf16")
