"""Any backend by name and import, compressed gradients, a static graph, the sharded optimizer's account."""

from pathlib import Path

import pytest
import torch

from kd.strategies.ddp import DDP
from tests._helpers import refuses, write_recipe
from tests._ranks import losses, train
from tests._runs import run, student_of, summary_of

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


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_module", "trainer.strategy: the backend gone needs the module no_such_module"),
        ("json", "trainer.strategy.backend: json registers no backend 'gone'"),
    ],
)
def test_a_backend_that_is_not_there_is_one_clear_line(module: str, message: str) -> None:
    with refuses(message):
        DDP(backend="gone", module=module)


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
    a, b = (student_of(each) for each in (alone, folder))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


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


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_sharded_optimizer_learns_the_same_whatever_the_weights_memory_order(
    recipe: Path, name: str
) -> None:
    items = ["trainer.strategy=ddp", "model.student.channels_last=true", f"optim.name={name}"]
    assert losses(train(recipe, *items, "config=zero")) == losses(train(recipe, *items))
