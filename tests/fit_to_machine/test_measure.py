"""The cost of a step, with and without the teacher."""

from kd.fit_to_machine.measure import StepCost


def test_step_ms() -> None:
    assert StepCost(60, 40, 100, num_workers=2).step_ms(teacher=False) == 50.0


def test_gain() -> None:
    assert round(StepCost(60, 40, 0, num_workers=1).gain(epochs=8, views=2), 2) == 1.82
