"""The formula of every loss against NumPy, and what all of them must stand."""

import numpy as np
import pytest
import torch
from scipy.special import huber

from kd.losses import (
    ATLoss,
    BinaryKDLoss,
    CKALoss,
    CWDLoss,
    DISTLoss,
    DKDLoss,
    GramKLLoss,
    HardKDLoss,
    HintLoss,
    KDLoss,
    MLKDLoss,
    NKDLoss,
    PairwiseLoss,
    PixelKDLoss,
    PKDLoss,
    PseudoClassLoss,
    RKDLoss,
    SPLoss,
    StandardizedLoss,
    WSLDLoss,
    kd_loss,
)
from kd.losses.features import hierarchical_context, squared_where_hidden
from kd.losses.logits import standardized
from kd.losses.regression import cosine_loss, smooth_l1_loss
from kd.losses.relations import against_noise
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
    def pooled(x, size):
        return torch.nn.functional.adaptive_avg_pool2d(torch.tensor(x), size).numpy()

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
    def distances(x):
        d = np.linalg.norm(x[:, None] - x[None], axis=2)
        return d / d[d > 0].mean()

    def angles(x):
        lines = x - x[:, None]
        lengths = np.linalg.norm(lines, axis=2, keepdims=True)
        directions = lines / np.where(lengths, lengths, 1)
        return directions @ directions.mT

    of_distances = huber(1, distances(s) - distances(t)).mean()
    return 25 * of_distances + 50 * huber(1, angles(s) - angles(t)).mean()


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
    return (huber(beta, s - t) / beta).mean()


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


def over_pixels(kind):
    """A loss over maps at temperature 2 that ignores the id 255."""
    loss = kind(2.0)
    loss.bind(3, 0, 255)
    return loss


HINT = HintLoss()
PSEUDO_CLASS = PseudoClassLoss(temperature=0.5)
LOSSES = {
    "kd": LossTester(KDLoss(3.0), np_kd, logits),
    "kd_two": LossTester(
        KDLoss(3.0, teacher_temperature=2.0), lambda s, t, y: np_kd(s, t, y, 3.0, 2.0), logits, False
    ),
    "hard_kd": LossTester(HardKDLoss(), np_hard, logits, False),
    "dkd": LossTester(DKDLoss(1.5, 4.0, 3.0), np_dkd, logits),
    "dist": LossTester(DISTLoss(1.0, 2.0, 2.0), np_dist, logits, per_sample=False),
    "nkd": LossTester(NKDLoss(1.5, 2.0), np_nkd, logits, False),
    "wsld": LossTester(WSLDLoss(2.0), np_wsld, logits, differentiated=False),
    "mlkd": LossTester(MLKDLoss((2.0, 5.0)), np_mlkd, logits, per_sample=False),
    "std_kd": LossTester(
        StandardizedLoss(KDLoss(3.0)), lambda s, t, y: np_kd(np_std(s), np_std(t), y), logits
    ),
    "binary_kd": LossTester(BinaryKDLoss(2.0), np_binary, logits),
    "hint": LossTester(lambda s, t, y: HINT.compare(s, t), lambda s, t, y: ((s - t) ** 2).mean(), maps),
    "at": LossTester(ATLoss(), np_at, maps),
    "hcl": LossTester(lambda s, t, y: hierarchical_context(s, t), np_hcl, lambda r, n, k: maps(r, n, k, h=7, w=8)),
    "pkd": LossTester(PKDLoss(), np_pkd, maps, per_sample=False),
    "rkd": LossTester(RKDLoss(), np_rkd, embeddings, per_sample=False),
    "sp": LossTester(SPLoss(), np_sp, embeddings, per_sample=False),
    "cka": LossTester(CKALoss(), np_cka, embeddings, per_sample=False),
    "pixel_kd": LossTester(over_pixels(PixelKDLoss), np_pixel, dense),
    "cwd": LossTester(over_pixels(CWDLoss), np_cwd, dense),
    "cosine": LossTester(lambda s, t, y: cosine_loss(s, t).mean(), np_cosine, maps),
    "cosine_tokens": LossTester(
        lambda s, t, y: cosine_loss(s.flatten(2).mT, t.flatten(2).mT).mean(), np_cosine, maps
    ),
    "smooth_l1": LossTester(lambda s, t, y: smooth_l1_loss(s, t, 2.0).mean(), np_smooth_l1, maps),
    "gram_kl": LossTester(GramKLLoss(0.5), np_gram_kl, maps),
    "pseudo_class": LossTester(
        lambda s, t, y: PSEUDO_CLASS.over(queue(s), s, t).mean(), np_pseudo_class, embeddings
    ),
    "pairwise": LossTester(PairwiseLoss(), np_pairwise, maps),
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


def test_nothing_valid_is_zero_with_a_gradient_of_zero() -> None:
    target = torch.full((2, 5, 4), 255)
    for kind in (PixelKDLoss, CWDLoss):
        student = torch.randn(2, 3, 5, 4, requires_grad=True)
        value = over_pixels(kind)(student, torch.randn(2, 3, 5, 4), target)
        value.backward()
        assert value.item() == 0
        assert student.grad.abs().max() == 0


def test_equal_logits_standardise_to_zero() -> None:
    x = torch.ones(2, 5, requires_grad=True)
    out = standardized(x)
    out.sum().backward()
    assert out.abs().max() == 0
    assert torch.isfinite(x.grad).all()


def test_wsld_weights_have_no_gradient() -> None:
    student = STUDENT.clone().requires_grad_()
    WSLDLoss(2.0)(student, TEACHER, TARGET).backward()
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
    assert against_noise(torch.tensor(scores), 50).item() == pytest.approx(
        np_crd(scores, None, None), rel=1e-12
    )
    x = torch.tensor(scores, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: against_noise(s, 50), (x,))


def test_the_masked_hint_looks_at_hidden_positions_alone() -> None:
    student, teacher, _ = maps(np.random.RandomState(0), 2, 1.0)
    masked = torch.rand(2, 1, 5, 4) < 0.5
    hidden = masked.expand_as(student)
    wanted = ((student - teacher)[hidden] ** 2).mean()
    torch.testing.assert_close(squared_where_hidden(student, teacher, masked), wanted)
    none = squared_where_hidden(student.requires_grad_(), teacher, torch.zeros_like(masked))
    none.backward()
    assert none.item() == 0
    assert student.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kd_loss(STUDENT, TEACHER, 0), "temperature must be > 0, got 0"),
        (
            lambda: kd_loss(STUDENT, TEACHER, 1.0, -1.0),
            "teacher_temperature must be > 0, got -1.0",
        ),
        (lambda: DKDLoss().bind(2, 0), "DKDLoss needs >= 3 classes, the data has 2"),
        (lambda: NKDLoss().bind(2, 0), "NKDLoss needs >= 3 classes, the data has 2"),
        (lambda: DISTLoss().bind(2, 0), "DISTLoss needs >= 3 classes, the data has 2"),
        (lambda: DKDLoss()(STUDENT, TEACHER, STUDENT), r"class ids \(N,\), got probabilities"),
        (lambda: NKDLoss()(STUDENT, TEACHER, STUDENT), r"class ids \(N,\), got probabilities"),
        (lambda: MLKDLoss(()), "temperatures must hold at least one"),
        (
            lambda: SPLoss()(torch.zeros(2, 3), torch.zeros(3, 3), None),
            "one batch size, got 2 and 3",
        ),
    ],
)
def test_errors_name_the_argument(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
