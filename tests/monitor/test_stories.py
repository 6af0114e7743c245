"""The case studies' stories with a training that is not kd's: named rightly, cured, and named as cured.

Times are the training's own (``own_time``): what other processes of the machine take decides nothing.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from kd.report.limits import Limit
from kd.report.records import RunRecords
from kd.report.rules import Explained
from tests._clock import OwnTime
from tests.monitor._foreign import BATCH, STEPS, Classifier, OwnLoader, linear, trained

torchvision = pytest.importorskip("torchvision")


class Swing(torch.autograd.Function):
    """Its backward pass takes 8 or 31 s in turn, as KT's, whose launching thread waited for a core."""

    seconds = itertools.cycle((8.3, 30.9))

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(next(Swing.seconds))
        return grads[0]


class Swings(nn.Module):
    """A model whose backward pass takes long in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, pictures: Tensor) -> Tensor:
        return Swing.apply(self.net(pictures))


class Augmented(Dataset):
    """Pictures of ``side`` pixels that are augmented one by one on the CPU, then cut small."""

    def __init__(self, side: int) -> None:
        from torchvision.transforms import v2

        self.picture = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
        self.augment = v2.Compose(
            [v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.RandomResizedCrop(32), v2.ToDtype(torch.float32)]
        )  # fmt: skip

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.picture), index % 4


def data_share(run: RunRecords) -> float:
    """Share of the step that waits for its batch."""
    facts = Explained(run).facts
    return facts.phases["data"] / facts.step_ms


def own_limits(run: RunRecords) -> list[Limit]:
    """The limits, without what other processes of this machine do."""
    return [one for one in Explained(run).limits if "other processes use" not in one.text]


def test_a_loader_that_starves_is_named_and_the_cure_gives_what_was_promised(
    tmp_path: Path, own_time: OwnTime
) -> None:
    """Hyundai's: a loader of their own, slower than the step; no number of loader processes is guessed."""
    before = trained(tmp_path / "before", Classifier(forward_s=5.0), OwnLoader(5.0))
    first = own_limits(before)[0]
    assert first.bound == "data"
    assert first.text.startswith("the step waits 5")
    assert "num_workers" not in first.lever
    assert "data." not in first.lever and "kd-" not in first.lever
    assert "num_workers" not in before.headers[0]
    assert before.headers[0]["batch_size"] == BATCH  # of the first batch
    assert "Dataloader" not in [finding["rule"] for finding in before.summary["findings"]]

    after = trained(tmp_path / "after", Classifier(forward_s=5.0), OwnLoader(0.0))
    assert "data" not in [limit.bound for limit in own_limits(after)]
    reached = Explained(after).facts.images_per_s / Explained(before).facts.images_per_s  # type: ignore[operator]
    assert first.gain == pytest.approx(reached, rel=0.05)
    assert reached == pytest.approx(2, rel=0.1)


def test_a_backward_pass_that_swings_is_named(tmp_path: Path, own_time: OwnTime) -> None:
    """KT's: the data wait is nothing, and backward takes 8 or 31 s of the same shapes."""
    before = trained(tmp_path / "before", Classifier(Swings()), OwnLoader(0.0006))
    texts = {finding["rule"]: finding["text"] for finding in before.summary["findings"]}
    assert texts["PhaseVariation"].startswith("backward takes 8.")
    assert " to 3" in texts["PhaseVariation"]
    assert data_share(before) < 0.01
    facts = Explained(before).facts
    assert facts.phases["backward"] > 0.9 * facts.step_ms

    after = trained(tmp_path / "after", Classifier(forward_s=1.0), OwnLoader(0.0006))
    assert "PhaseVariation" not in [finding["rule"] for finding in after.summary["findings"]]
    assert own_limits(after)[0].text.startswith("the model's own training takes")


def test_augmentation_that_binds_is_named(tmp_path: Path, own_time: OwnTime) -> None:
    """DALI's: large pictures, augmented one by one on the CPU; the cure is to make them small ahead."""
    large = DataLoader(Augmented(900), batch_size=BATCH)
    resnet = torchvision.models.ResNet
    block = torchvision.models.resnet.BasicBlock
    before = trained(tmp_path / "before", Classifier(resnet(block, [1] * 4, 4)), large)
    first = own_limits(before)[0]
    assert first.bound == "data"
    assert first.lever.startswith(("num_workers=", "cheaper pictures"))
    assert data_share(before) > 0.5
    assert (
        Explained(before).facts.loading_busy > 0.9
    )  # the wait is computing, not waiting for a disk

    small = DataLoader(Augmented(32), batch_size=BATCH)
    after = trained(tmp_path / "after", Classifier(resnet(block, [1] * 4, 4)), small)
    assert data_share(after) < data_share(before) / 2
