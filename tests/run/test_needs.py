"""Packages and GPUs that settings need are missed before torch is imported, in one line."""

import sys
from pathlib import Path

import pytest

from kd.errors import UserError
from kd.run import needs
from kd.run.needs import check_needs
from kd.run.request import translate

WRONG = [
    (["trainer.logger=WandbLogger"], "trainer.logger: WandbLogger needs the package wandb: "),
    (["trainer.logger=MLFlowLogger"], "needs the package mlflow: "),
    (["data.engine=dali"], "data.engine: dali needs the extra dali: "),
    (["config=deepspeed"], "trainer.strategy: DeepSpeed needs the extra deepspeed: "),
    (["monitor.otlp=http://localhost:4318"], "monitor.otlp: needs the extra otel: "),
    (
        ["data.source=HuggingFace", "data.source.path=food"],
        "data.source: HuggingFace needs the extra hf: ",
    ),
    (
        ["config=smddp_4x8"],
        "trainer.strategy: needs SageMaker's package smdistributed",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda part: str(part)[:40])
def test_what_is_missing_is_named(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_installed", lambda package: False)
    request = translate(["recipe=foodtag_vit", *words])
    with pytest.raises(UserError) as raised:
        check_needs(request.resolved())
    assert message in str(raised.value)
    if "pip" in str(raised.value):
        assert f"{Path(sys.executable).name} -m pip install" in str(raised.value)


def test_an_overlay_for_gpus_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "GPU_FILES", ("nothing-of-this-name",))
    monkeypatch.setattr(needs, "recognise_launcher", lambda: None)
    request = translate(["recipe=foodtag_vit", "config=nodes_4x8"])
    with pytest.raises(UserError) as raised:
        check_needs(request.resolved())
    assert "trainer.accelerator: needs GPUs (trainer.devices=8, trainer.num_nodes=4" in str(
        raised.value
    )
