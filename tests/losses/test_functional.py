"""Every loss of :mod:`kd.losses.functional` against NumPy, and what all of them must stand."""

import numpy as np
import pytest
import torch

from kd.losses import functional as L
from tests._helpers import LossTester

STUDENT = torch.tensor([[2, 1, 0, -1], [0, 1, 2, 3], [1, -1, 0.5, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[3, 1, -1, 0], [1, 0, 2, 4], [-1, 2, 1, 0]], dtype=torch.float64)
TARGET = torch.tensor([0, 3, 1])


# -- inputs ----------------------------------------------------------------------------------------------------------


def logits(rng, n, scale, c=7):
    return (
        torch.tensor(rng.normal(0, scale, (n, c))),
        torch.tensor(rng.normal(0, scale, (n, c))),
        ids(rng, n, c),
    )


def ids(rng, n, c):
    return torch.tensor(rng.randint(0, c, n))


def maps(rng, n, scale, c=3, h=5, w=4):
    return (*(torch.tensor(rng.normal(0, scale, (n, c, h, w))) for _ in range(2)), ids(rng, n, c))


def dense(rng, n, scale):
    student, teacher, _ = maps(rng, n, scale)
    target = rng.randint(0, 3, (n, 5, 4))
    target[:, 0, :2] = 255  # as many in each picture: halves of a batch weigh the same
    return student, teacher, torch.tensor(target)


def embeddings(rng, n, scale):
    return (
        torch.tensor(rng.normal(0, scale, (n, 5))),
        torch.tensor(rng.normal(0, scale, (n, 5))),
        ids(rng, n, 3),
    )


# -- references, from the definitions --------------------------------------------------------------------------------


def softmax(x, axis=1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def kl(p, q, axis=1):
    return (p * (np.log(p) - np.log(q))).sum(axis)


def np_kd(s, t, _, temperature=3.0, teacher_temperature=None):
    other = teacher_temperature or temperature
    return temperature * other * kl(softmax(t / other), softmax(s / temperature)).mean()


def np_hard(s, t, _):
    return -np.log(softmax(s))[np.arange(len(s)), t.argmax(1)].mean()


def others(p, y):
    """Rows without their target, renormalised."""
    rest = np.array([np.delete(row, i) for row, i in zip(p, y, strict=True)])
    return rest / rest.sum(1, keepdims=True)


def np_dkd(s, t, y, alpha=1.5, beta=4.0, temperature=3.0):
    p, q, rows = softmax(t / temperature), softmax(s / temperature), np.arange(len(y))
    two = [np.stack([x[rows, y], 1 - x[rows, y]], 1) for x in (p, q)]
    return temperature**2 * (alpha * kl(*two) + beta * kl(others(p, y), others(q, y))).mean()


def np_dist(s, t, _, beta=1.0, gamma=2.0, temperature=2.0):
    p, q = softmax(t / temperature), softmax(s / temperature)
    rows = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(p, q, strict=True)])
    columns = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(p.T, q.T, strict=True)])
    return temperature**2 * (beta * (1 - rows) + gamma * (1 - columns))


def np_std(x):
    return (x - x.mean(1, keepdims=True)) / (x.std(1, ddof=1, keepdims=True) + 1e-7)


def np_nkd(s, t, y, gamma=1.5, temperature=2.0):
    rows = np.arange(len(y))
    target = softmax(t)[rows, y] * np.log(softmax(s)[rows, y])
    rest = (others(softmax(t / temperature), y) * np.log(others(softmax(s / temperature), y))).sum(
        1
    )
    return -(target + gamma * temperature**2 * rest).mean()


def np_wsld(s, t, y, temperature=2.0):
    rows = np.arange(len(y))
    own, theirs = (-np.log(softmax(x)[rows, y]) for x in (s, t))
    weight = 1 - np.exp(-own / theirs)
    return temperature**2 * (weight * kl(softmax(t / temperature), softmax(s / temperature))).mean()


def np_mlkd(s, t, _, temperatures=(2.0, 5.0)):
    total = 0.0
    for temperature in temperatures:
        p, q = softmax(s / temperature), softmax(t / temperature)
        total += np_kd(s, t, _, temperature)
        total += ((p @ p.T - q @ q.T) ** 2).sum() / len(p) + (
            (p.T @ p - q.T @ q) ** 2
        ).sum() / p.shape[1]
    return total / len(temperatures)


def np_binary(s, t, _, temperature=2.0):
    p, q = (1 / (1 + np.exp(-x / temperature)) for x in (t, s))
    both = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    return temperature**2 * both.sum(1).mean()


def np_at(s, t, _):
    a, b = ((x**2).mean(1).reshape(len(x), -1) for x in (s, t))
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return ((a - b) ** 2).mean()


def np_hcl(s, t, _):
    def pooled(x, size):  # PyTorch's adaptive windows
        h, w = x.shape[2:]
        out = np.empty((*x.shape[:2], size, size))
        for i in range(size):
            for j in range(size):
                rows = slice(i * h // size, -(-(i + 1) * h // size))
                columns = slice(j * w // size, -(-(j + 1) * w // size))
                out[:, :, i, j] = x[:, :, rows, columns].mean((2, 3))
        return out

    levels = [(1.0, ((s - t) ** 2).mean())]
    levels += [
        (w, ((pooled(s, k) - pooled(t, k)) ** 2).mean())
        for w, k in ((0.5, 4), (0.25, 2), (0.125, 1))
    ]
    return sum(w * v for w, v in levels) / sum(w for w, _ in levels)


def np_pkd(s, t, _):
    correlations = [np.corrcoef(s[:, c].ravel(), t[:, c].ravel())[0, 1] for c in range(s.shape[1])]
    return 1 - np.mean(correlations)


def np_rkd(s, t, _):
    def huber(a, b):
        d = np.abs(a - b)
        return np.where(d < 1, d**2 / 2, d - 0.5).mean()

    def distances(x):
        d = np.linalg.norm(x[:, None] - x[None], axis=2)
        return d / d[d > 0].mean()

    def angles(x):
        n = len(x)
        out = np.zeros((n, n, n))
        for j in range(n):
            for i in range(n):
                for k in range(n):
                    a, b = x[i] - x[j], x[k] - x[j]
                    if i != j and k != j:
                        out[j, i, k] = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        return out

    return 25 * huber(distances(s), distances(t)) + 50 * huber(angles(s), angles(t))


def np_sp(s, t, _):
    a, b = (x @ x.T for x in (s, t))
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return ((a - b) ** 2).sum() / len(s) ** 2


def np_cka(s, t, _):
    s, t = s - s.mean(0), t - t.mean(0)
    norm = np.linalg.norm
    return 1 - norm(s.T @ t) ** 2 / norm(s.T @ s) / norm(t.T @ t)


def np_pixel(s, t, y, temperature=2.0):
    p, q = softmax(t / temperature), softmax(s / temperature)
    return temperature**2 * kl(p, q)[y != 255].mean()


def np_cwd(s, t, y, temperature=2.0):
    total = 0.0
    for i in range(len(s)):
        for c in range(s.shape[1]):
            a, b = (x[i, c][y[i] != 255][None] / temperature for x in (s, t))
            total += kl(softmax(b), softmax(a))[0]
    return temperature**2 * total / (s.shape[0] * s.shape[1])


def np_pairwise(s, t, _):
    def similarities(x):
        flat = x.reshape(*x.shape[:2], -1)
        flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        return np.einsum("ncp,ncq->npq", flat, flat)

    return ((similarities(s) - similarities(t)) ** 2).mean()


def np_cosine(s, t, _):
    norm = np.linalg.norm
    return (1 - (s * t).sum(1) / norm(s, axis=1) / norm(t, axis=1)).mean()


def np_smooth_l1(s, t, _, beta=2.0):
    d = np.abs(s - t)
    return np.where(d < beta, d**2 / 2 / beta, d - beta / 2).mean()


def np_gram_kl(s, t, _, temperature=0.5):
    total = []
    for a, b in zip(s, t, strict=True):
        a, b = (
            x.reshape(len(x), -1) / np.linalg.norm(x.reshape(len(x), -1), axis=0) for x in (a, b)
        )
        total += list(kl(softmax(b.T @ b / temperature), softmax(a.T @ a / temperature)))
    return np.mean(total)


QUEUE = np.random.RandomState(7).normal(size=(9, 5))


def queue(like):
    return torch.tensor(QUEUE).to(torch.promote_types(like.dtype, torch.float32))


def np_pseudo_class(s, t, _, temperature=0.5):
    s, t, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (s, t, QUEUE))
    return kl(softmax(t @ k.T / temperature), softmax(s @ k.T / temperature)).mean()


def np_crd(s, _t, _y):
    p = np.exp(s)
    noise = (s.shape[1] - 1) / 50
    return -(np.log(p[:, 0] / (p[:, 0] + noise)) + np.log(noise / (p[:, 1:] + noise)).sum(1)).mean()


LOSSES = {
    "kd": LossTester(lambda s, t, y: L.kd_loss(s, t, 3.0), np_kd, logits),
    "kd_two": LossTester(
        lambda s, t, y: L.kd_loss(s, t, 3.0, 2.0), lambda s, t, y: np_kd(s, t, y, 3.0, 2.0), logits, False
    ),
    "hard_kd": LossTester(lambda s, t, y: L.hard_kd_loss(s, t), np_hard, logits, False),
    "dkd": LossTester(lambda s, t, y: L.dkd_loss(s, t, y, 1.5, 4.0, 3.0), np_dkd, logits),
    "dist": LossTester(lambda s, t, y: L.dist_loss(s, t, 1.0, 2.0, 2.0), np_dist, logits, per_sample=False),
    "nkd": LossTester(lambda s, t, y: L.nkd_loss(s, t, y, 1.5, 2.0), np_nkd, logits, False),
    "wsld": LossTester(lambda s, t, y: L.wsld_loss(s, t, y, 2.0), np_wsld, logits, differentiated=False),
    "mlkd": LossTester(lambda s, t, y: L.mlkd_loss(s, t, (2.0, 5.0)), np_mlkd, logits, per_sample=False),
    "std_kd": LossTester(
        lambda s, t, y: L.kd_loss(L.standardize_logits(s), L.standardize_logits(t), 3.0),
        lambda s, t, y: np_kd(np_std(s), np_std(t), y), logits,
    ),
    "binary_kd": LossTester(lambda s, t, y: L.binary_kd_loss(s, t, 2.0), np_binary, logits),
    "hint": LossTester(lambda s, t, y: L.hint_loss(s, t), lambda s, t, y: ((s - t) ** 2).mean(), maps),
    "at": LossTester(lambda s, t, y: L.at_loss(s, t), np_at, maps),
    "hcl": LossTester(lambda s, t, y: L.hcl_loss(s, t), np_hcl, lambda r, n, k: maps(r, n, k, h=7, w=8)),
    "pkd": LossTester(lambda s, t, y: L.pkd_loss(s, t), np_pkd, maps, per_sample=False),
    "rkd": LossTester(lambda s, t, y: L.rkd_loss(s, t), np_rkd, embeddings, per_sample=False),
    "sp": LossTester(lambda s, t, y: L.sp_loss(s, t), np_sp, embeddings, per_sample=False),
    "cka": LossTester(lambda s, t, y: L.cka_loss(s, t), np_cka, embeddings, per_sample=False),
    "pixel_kd": LossTester(lambda s, t, y: L.pixel_kd_loss(s, t, y, 2.0, 255), np_pixel, dense),
    "cwd": LossTester(lambda s, t, y: L.cwd_loss(s, t, y, 2.0, 255), np_cwd, dense),
    "cosine": LossTester(lambda s, t, y: L.cosine_loss(s, t).mean(), np_cosine, maps),
    "cosine_tokens": LossTester(
        lambda s, t, y: L.cosine_loss(s.flatten(2).mT, t.flatten(2).mT).mean(), np_cosine, maps
    ),
    "smooth_l1": LossTester(lambda s, t, y: L.smooth_l1_loss(s, t, 2.0).mean(), np_smooth_l1, maps),
    "gram_kl": LossTester(lambda s, t, y: L.gram_kl_loss(s, t, 0.5).mean(), np_gram_kl, maps),
    "pseudo_class": LossTester(
        lambda s, t, y: L.pseudo_class_loss(s, t, queue(s), 0.5).mean(), np_pseudo_class, embeddings
    ),
    "pairwise": LossTester(lambda s, t, y: L.pairwise_loss(s, t), np_pairwise, maps),
}  # fmt: skip
CHECKS = [
    "reference",
    "gradient",
    "zero",
    "low_precision",
    "extreme",
    "batch_of_one",
    "halves",
    "traced",
]
CHECKS += [pytest.param("compiled", marks=pytest.mark.slow)]  # the backward pass is torch's own


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name: str, check: str) -> None:
    getattr(LOSSES[name], f"check_{check}")()


@pytest.mark.parametrize(
    ("value", "golden"),
    [
        (L.kd_loss(STUDENT, TEACHER, temperature=4.0), 0.7155645473),
        (L.kd_loss(STUDENT, TEACHER, temperature=1.0), 0.5055556340),
        (L.dkd_loss(STUDENT, TEACHER, TARGET, alpha=1.0, beta=8.0, temperature=4.0), 3.5042592128),
        (L.dist_loss(STUDENT, TEACHER, beta=1.0, gamma=1.0, temperature=1.0), 1.0667223),
        (L.dist_loss(STUDENT, TEACHER, beta=1.0, gamma=1.0, temperature=4.0), 18.0128758),
        (
            L.kd_loss(
                L.standardize_logits(STUDENT), L.standardize_logits(TEACHER), temperature=2.0
            ),
            0.4982159932,
        ),
        (L.nkd_loss(STUDENT, TEACHER, TARGET, gamma=1.5, temperature=1.0), 2.4492719338),
    ],
    ids=["kd4", "kd1", "dkd", "dist1", "dist4", "std", "nkd"],
)
def test_golden_values(value: torch.Tensor, golden: float) -> None:
    # the golden value of the standardised loss is the one without the 1e-7 beside the deviation
    assert value.item() == pytest.approx(golden, abs=2e-7)


def test_dkd_parts_add_up_to_kd() -> None:
    temperature = 3.0
    tckd = L.dkd_loss(STUDENT, TEACHER, TARGET, 1.0, 0.0, temperature)
    rest = 1 - torch.softmax(TEACHER / temperature, 1)[torch.arange(3), TARGET]
    nckd = [
        L.dkd_loss(STUDENT[i : i + 1], TEACHER[i : i + 1], TARGET[i : i + 1], 0.0, 1.0, temperature)
        for i in range(3)
    ]
    whole = tckd + (rest * torch.stack(nckd)).mean()
    torch.testing.assert_close(whole, L.kd_loss(STUDENT, TEACHER, temperature))


def test_nothing_valid_is_zero_with_a_gradient_of_zero() -> None:
    target = torch.full((2, 5, 4), 255)
    for loss in (L.pixel_kd_loss, L.cwd_loss):
        student = torch.randn(2, 3, 5, 4, requires_grad=True)
        value = loss(student, torch.randn(2, 3, 5, 4), target, 2.0, 255)
        value.backward()
        assert value.item() == 0
        assert student.grad.abs().max() == 0


def test_cwd_is_not_the_loss_over_classes() -> None:
    student, teacher, target = dense(np.random.RandomState(0), 2, 2.0)
    assert L.cwd_loss(student, teacher, target, 2.0, 255) != L.pixel_kd_loss(
        student, teacher, target, 2.0, 255
    )


def test_constant_columns_count_as_uncorrelated() -> None:
    student = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    value = L.dist_loss(student, TEACHER)
    value.backward()
    assert value.item() == pytest.approx(2.0)
    assert torch.isfinite(student.grad).all()


def test_equal_logits_standardise_to_zero() -> None:
    x = torch.ones(2, 5, requires_grad=True)
    out = L.standardize_logits(x)
    out.sum().backward()
    assert out.abs().max() == 0
    assert torch.isfinite(x.grad).all()


def test_wsld_weights_have_no_gradient() -> None:
    student = STUDENT.clone().requires_grad_()
    L.wsld_loss(student, TEACHER, TARGET, 2.0).backward()
    single = [
        np_wsld(*(x[i : i + 1].numpy() for x in (STUDENT, TEACHER, TARGET))) for i in range(3)
    ]
    kd = [np_kd(*(x[i : i + 1].numpy() for x in (STUDENT, TEACHER, TARGET)), 2.0) for i in range(3)]
    weight = torch.tensor([a / b for a, b in zip(single, kd, strict=True)])
    wanted = (
        2.0 * weight[:, None] * (torch.softmax(STUDENT / 2, 1) - torch.softmax(TEACHER / 2, 1)) / 3
    )
    torch.testing.assert_close(student.grad, wanted)


def test_crd_against_its_formula() -> None:
    scores = np.random.RandomState(0).normal(0, 2, (4, 6))
    assert L.crd_loss(torch.tensor(scores), 50).item() == pytest.approx(
        np_crd(scores, None, None), rel=1e-12
    )
    x = torch.tensor(scores, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: L.crd_loss(s, 50), (x,))


def test_the_masked_hint_looks_at_hidden_positions_alone() -> None:
    student, teacher, _ = maps(np.random.RandomState(0), 2, 1.0)
    masked = torch.rand(2, 1, 5, 4) < 0.5
    hidden = masked.expand_as(student)
    wanted = ((student - teacher)[hidden] ** 2).mean()
    torch.testing.assert_close(L.masked_hint_loss(student, teacher, masked), wanted)
    none = L.masked_hint_loss(student.requires_grad_(), teacher, torch.zeros_like(masked))
    none.backward()
    assert none.item() == 0
    assert student.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: L.kd_loss(STUDENT, TEACHER, 0), "temperature must be > 0, got 0"),
        (
            lambda: L.kd_loss(STUDENT, TEACHER, 1.0, -1.0),
            "teacher_temperature must be > 0, got -1.0",
        ),
        (lambda: L.dkd_loss(STUDENT[:, :2], TEACHER[:, :2], TARGET), ">= 3 classes for DKD, got 2"),
        (lambda: L.nkd_loss(STUDENT[:, :2], TEACHER[:, :2], TARGET), ">= 3 classes for NKD, got 2"),
        (
            lambda: L.dkd_loss(STUDENT, TEACHER, STUDENT),
            r"class ids \(N,\) for DKD, got probabilities",
        ),
        (
            lambda: L.nkd_loss(STUDENT, TEACHER, STUDENT),
            r"class ids \(N,\) for NKD, got probabilities",
        ),
        (lambda: L.standardize_logits(STUDENT[:, :1]), ">= 2 classes to standardize, got 1"),
        (lambda: L.mlkd_loss(STUDENT, TEACHER, ()), "temperatures must hold at least one"),
        (lambda: L.at_loss(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 4, 4)), "height and width"),
        (lambda: L.sp_loss(torch.zeros(2, 3), torch.zeros(3, 3)), "one batch size, got 2 and 3"),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
