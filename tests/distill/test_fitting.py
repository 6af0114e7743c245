"""What goes together: losses, batches, teachers."""

from kd.data.tier.cluster import differing, versions
from kd.distill.fitting import among, check_batch
from kd.losses import KDLoss, RegressionKDLoss, SPLoss, StandardizedLoss
from kd.tasks import Classification, Regression
from tests._helpers import refuses


def test_a_loss_over_the_batchs_pictures_needs_several() -> None:
    check_batch({"kd": KDLoss(), "sp": SPLoss()}, 2, 1)
    check_batch({"sp": SPLoss(gather=True)}, 1, 2)
    with refuses(
        r"data.batch_size: must give SPLoss \(model.distill_losses.sp\) 2 pictures at least, got 1"
    ):
        check_batch({"sp": SPLoss(gather=False)}, 1, 2)


def test_names_are_listed_in_brackets() -> None:
    assert (among(["a", "b"]), among([])) == (" (a, b)", "")


def test_versions_that_differ_are_named_both() -> None:
    ours = versions()
    assert differing(ours) == ""
    assert differing({**ours, "torch": "0.1"}) == f"torch 0.1 (here {ours['torch']})"


def test_a_loss_inside_a_standardized_one_keeps_what_it_is_defined_for() -> None:
    numbers = StandardizedLoss(RegressionKDLoss(bounded=True))
    assert "is defined for numbers alone" in Classification(4).refuses(numbers)
    assert "the data has numbers" in Regression(4).refuses(numbers)
    assert not Classification(4).refuses(StandardizedLoss(KDLoss()))
    assert StandardizedLoss(KDLoss(4.0, final_temperature=1.0)).final_temperature == 1.0
