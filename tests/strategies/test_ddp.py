"""Any backend by name and import, compressed gradients, a static graph, the sharded optimizer's account."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kd.errors import UserError
from kd.strategies.ddp import DDP
from tests._helpers import write_recipe
from tests._ranks import losses, train
from tests._runs import run, summary_of

ELSEWHERE = """
import torch.distributed as dist

def create(options, group):  # the extended form, which other libraries use
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

dist.Backend.register_backend("elsewhere", create, extended_api=True, devices=["cpu"])
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, pictures: Path, teacher: Path) -> Path:
    """The run that others are compared with; not to be changed."""
    return train(
        write_recipe(tmp_path_factory.mktemp("plain") / "tiny.yaml", pictures, teacher),
        "trainer.strategy=ddp",
    )


def test_a_missing_module_is_one_clear_line() -> None:
    with pytest.raises(
        UserError, match=r"trainer.strategy: the backend gone needs the module no_such_module"
    ):
        DDP(backend="gone", module="no_such_module")


def test_a_module_without_the_backend_is_named() -> None:
    with pytest.raises(
        UserError, match=r"trainer.strategy.backend: json registers no backend 'gone'"
    ):
        DDP(backend="gone", module="json")


def test_a_backend_from_elsewhere_by_name_and_import(
    recipe: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere_backend.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = train(
        recipe, "trainer.strategy=kd.strategies.ddp.DDP", "trainer.strategy.backend=elsewhere",
        "trainer.strategy.module=elsewhere_backend",
    )  # fmt: skip
    assert losses(folder) == losses(plain)
    assert summary_of(folder)["strategy"] == "DDP"


def test_a_moving_average_is_not_trained(recipe: Path) -> None:
    """Of two ranks it is that of one with their batches; DDP waits for no gradient of it."""
    folder = train(recipe, "trainer.strategy=ddp", "model.ema_decay=0.5")
    alone = run(
        recipe,
        "config=audit",
        "trainer.max_epochs=1",
        "trainer.precision=32-true",
        "model.ema_decay=0.5",
    )
    a, b = (load_file(each / "student.safetensors") for each in (alone, folder))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("items", "tolerance"),
    [
        pytest.param(["config=bf16_gradients"], 0.01, marks=pytest.mark.slow),
        (["config=powersgd", "trainer.strategy.powersgd_start_step=2"], 0.1),
    ],
    ids=["bf16", "factors"],
)
def test_compressed_gradients_learn_nearly_the_same(
    recipe: Path, plain: Path, items: list[str], tolerance: float
) -> None:
    folder = train(recipe, *items)
    assert losses(folder) != losses(plain)
    assert losses(folder) == pytest.approx(losses(plain), rel=tolerance)


def test_the_rest_is_for_torchs_ddp() -> None:
    assert DDP(static_graph=True)._ddp_kwargs["static_graph"] is True


@pytest.mark.slow  # the setting arrives: above
def test_a_static_graph(recipe: Path, plain: Path) -> None:
    static = train(
        recipe, "trainer.strategy=kd.strategies.ddp.DDP", "trainer.strategy.static_graph=true"
    )
    assert summary_of(static)["strategy"] == "DDP"
    a, b = (load_file(folder / "student.safetensors") for folder in (plain, static))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_sharded_optimizer_learns_the_same_whatever_the_weights_memory_order(
    recipe: Path, name: str
) -> None:
    items = ["trainer.strategy=ddp", "model.student.channels_last=true", f"optim.name={name}"]
    assert losses(train(recipe, *items, "config=zero")) == losses(train(recipe, *items))


@pytest.mark.slow  # test_smddp.py: two processes shard the optimizer
def test_the_summary_says_what_the_sharded_optimizer_saves(recipe: Path) -> None:
    wide = ["model.student.kwargs={patch_size: 8, embed_dim: 64, depth: 4, num_heads: 2}"]
    whole = train(recipe, "trainer.strategy=ddp", *wide)
    shared = train(recipe, "trainer.strategy=ddp", "config=zero", *wide)
    account = summary_of(shared)["optimizer_state"]
    plain = summary_of(whole)["optimizer_state"]
    assert plain == {
        "rank0_mb": plain["whole_mb"],
        "whole_mb": plain["whole_mb"],
        "sharded_over": 1,
    }
    assert account["sharded_over"] == 2
    assert account["whole_mb"] == pytest.approx(plain["whole_mb"], rel=0.001)
    assert account["rank0_mb"] == pytest.approx(plain["whole_mb"] / 2, rel=0.05)
    assert losses(shared) == losses(whole)
    assert (shared / "checkpoints" / "last.ckpt").stat().st_size > 1e6 * plain[
        "whole_mb"
    ]  # consolidated


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("powersgd_start_step=1", "trainer.strategy.powersgd_start_step: must be >= 2, got 1"),
        ("powersgd_rank=0", "trainer.strategy.powersgd_rank: must be >= 1, got 0"),
    ],
)
def test_what_powersgd_refuses_is_refused_before_the_run(
    item: str, message: str, refusal, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    command = ["recipe=foodtag_vit", "config=powersgd", f"trainer.strategy.{item}"]
    assert message in refusal("train", [*command, f"runs_dir={runs}"])
    assert not runs.exists()
