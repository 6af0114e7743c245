"""What a cache must keep for the losses."""

from kd.losses import DISTLoss, KDLoss
from kd.teachers.cache_layout import temperatures


def test_losses_that_can_do_with_the_largest_logits_say_at_which_temperature() -> None:
    assert temperatures([KDLoss(4.0), KDLoss(2.0), KDLoss(4.0), DISTLoss()]) == (2.0, 4.0)
