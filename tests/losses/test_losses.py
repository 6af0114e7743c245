"""Losses against independent references."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kd import losses
from kd.losses import HintLoss, KDLoss, RKDLoss, kd_loss
from tests._helpers import ROOT

STUDENT = torch.tensor([[2, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[3, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]], dtype=torch.float64)


def numpy_kd(student: np.ndarray, teacher: np.ndarray, temperature: float) -> float:
    """Written from the definition, without a log-softmax."""

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    p, q = softmax(teacher / temperature), softmax(student / temperature)
    return float(temperature**2 * (p * (np.log(p) - np.log(q))).sum(1).mean())


@pytest.mark.parametrize(("temperature", "value"), [(4.0, 0.7155645473), (1.0, 0.5055556340)])
def test_kd_golden_values(temperature: float, value: float) -> None:
    assert kd_loss(STUDENT, TEACHER, temperature).item() == pytest.approx(value, abs=1e-10)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 20.0])
def test_kd_against_numpy(temperature: float) -> None:
    rng = np.random.RandomState(0)
    student, teacher = rng.normal(0, 3, (2, 16, 11))
    ours = kd_loss(torch.tensor(student), torch.tensor(teacher), temperature).item()
    assert ours == pytest.approx(numpy_kd(student, teacher, temperature), rel=1e-12)


def test_kd_gradient() -> None:
    student = STUDENT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: kd_loss(s, TEACHER, 3.0), (student,))
    teacher = TEACHER.clone().requires_grad_()
    kd_loss(student, teacher, 3.0).backward()
    assert teacher.grad is None


def test_kd_is_zero_at_the_teacher_and_does_not_feel_a_shift() -> None:
    assert kd_loss(TEACHER, TEACHER, 2.0).item() == pytest.approx(0, abs=1e-12)
    assert kd_loss(STUDENT + 5, TEACHER - 3, 2.0).item() == pytest.approx(
        kd_loss(STUDENT, TEACHER, 2.0).item()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kd_of_strong_logits_is_finite(dtype: torch.dtype) -> None:
    student = torch.tensor([[60.0, -60, 0], [-60, 60, 0]], dtype=dtype, requires_grad=True)
    loss = kd_loss(student, -student.detach(), 1.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(student.grad).all()


def test_kd_in_bf16_autocast_is_computed_in_float32() -> None:
    student, teacher = STUDENT.float(), TEACHER.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert kd_loss(student, teacher, 4.0) == kd_loss(student, teacher, 4.0).float()
        assert kd_loss(student, teacher, 4.0).item() == pytest.approx(0.7155645473, abs=1e-6)


def test_kd_over_positions_is_their_mean() -> None:
    student, teacher = torch.randn(2, 2, 5, 3, 4)
    flat = [x.permute(0, 2, 3, 1).reshape(-1, 5) for x in (student, teacher)]
    torch.testing.assert_close(kd_loss(student, teacher, 2.0), kd_loss(*flat, 2.0))


def test_kd_compiles(recwarn: pytest.WarningsRecorder) -> None:
    compiled = torch.compile(kd_loss, backend="eager", fullgraph=True)
    assert compiled(STUDENT, TEACHER, 4.0) == kd_loss(STUDENT, TEACHER, 4.0)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        kd_loss(STUDENT, TEACHER, 0)
    with pytest.raises(
        ValueError, match=r"student_logits and teacher_logits .*\(3, 4\) and \(3, 3\)"
    ):
        kd_loss(STUDENT, TEACHER[:, :3], 1.0)
    for make in (lambda: KDLoss(temperature=-1.0), lambda: KDLoss(temperature=float("nan"))):
        with pytest.raises(ValueError, match="temperature"):
            make()
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight"):
            KDLoss(weight=weight)
    for argument in ("distance_weight", "angle_weight"):
        with pytest.raises(ValueError, match=f"^{argument} must be >= 0, got -1"):
            RKDLoss(**{argument: -1.0})


def test_hint_is_the_mean_squared_error() -> None:
    a, b = np.random.RandomState(0).normal(size=(2, 4, 7))
    found = HintLoss().compare(torch.tensor(a), torch.tensor(b))
    assert found.item() == pytest.approx(((a - b) ** 2).mean())


def test_hint_projects_to_the_teachers_shape() -> None:
    loss = HintLoss()
    loss.build((2, 8, 5, 5), (2, 16, 9, 9))
    assert loss.projection(torch.randn(3, 8, 5, 5)).shape == (3, 16, 9, 9)
    with pytest.raises(
        ValueError, match=r"no projection leads from the student's \(8,\) .* \(16, 9, 9\)"
    ):
        HintLoss().build((2, 8), (2, 16, 9, 9))


def test_the_readmes_list_every_loss() -> None:
    """Each in the guide by name, and as many in the README as there are."""
    bases = {"DistillLoss", "FeatureLoss", "LogitLoss", "FeatureRegression"}
    names = [name for name in losses.__all__ if name.endswith("Loss") and name not in bases]
    guide = (Path(losses.__file__).parent / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in guide] == []
    assert f"{len(names)} losses by name" in (ROOT / "README.md").read_text()
