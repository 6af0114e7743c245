"""The data module's place in the samples, and what a resumed run must share with the run before."""

import pytest

from kd.data.datamodule import DistillationDataModule, check_same_samples
from tests._helpers import refuses


def test_a_place_without_a_run_is_empty_and_a_saved_one_is_restored() -> None:
    data = DistillationDataModule()
    assert data.state_dict() == {}
    data.load_state_dict({})
    assert data.resumed_at is None
    data.load_state_dict({"epoch": 2, "samples": 64})
    assert data.resumed_at == (2, 64)


@pytest.mark.parametrize(("changed", "key"), [
    ({"seed": 1}, "seed"), ({"unlabeled_ratio": 2.0}, "data.unlabeled_ratio"),
    ({"balance_classes": True}, "data.balance_classes"), ({"content": "other", "train": 9}, "data.source"),
])  # fmt: skip
def test_a_resume_with_other_samples_names_the_key(changed: dict[str, object], key: str) -> None:
    before = {
        "seed": 0,
        "unlabeled_ratio": None,
        "balance_classes": False,
        "content": "x",
        "train": 10,
    }
    check_same_samples(before, before)
    texts = [{"sampler": {"Mine": f"Generator(PCG64) at {place}"}} for place in ("0x7F4", "0xA1")]
    check_same_samples(*(before | text for text in texts))
    check_same_samples({}, before)  # older runs did not say
    with refuses(f"^{key}"):
        check_same_samples(before, before | changed)
