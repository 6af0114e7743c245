"""Students that start from a teacher's layers, by what they compute."""

import copy
from typing import Any

import pytest
import torch
from timm.layers import RmsNorm, SwiGLU, SwiGLUPacked

from kd.distill.inherit import families, inherit_together, layers, measured, start
from kd.distill.inherit.anatomy import scale_stream, tokens_before_blocks
from kd.distill.inherit.layers import inherit_block
from kd.models import Preprocess
from kd.progress import bar_at_start
from tests._helpers import ARCH
from tests.distill.inherit._vits import OURS, THEIRS, answers, correlation, inherit, small_vit, vit


@pytest.mark.parametrize(
    ("kwargs", "alone"),
    [
        ({}, {}),
        ({}, {"init_values": 0.1}),
        ({"qkv_bias": False}, {}),
        ({"global_pool": "avg", "class_token": False}, {}),
        ({"qk_norm": True}, {}),
        ({"norm_layer": RmsNorm, "qk_norm": True}, {}),
        ({"mlp_layer": SwiGLUPacked}, {}),
        ({"mlp_layer": SwiGLU}, {}),
        ({}, {"no_embed_class": True}),
        ({"no_embed_class": True}, {"no_embed_class": False}),
        ({"pos_embed": "none"}, {}),
        ({}, {"pos_embed": "none"}),
        ({"reg_tokens": 2}, {}),
        ({"reg_tokens": 2, "no_embed_class": True}, {"no_embed_class": False}),
    ],
)
def test_a_student_of_the_same_shape_becomes_the_teacher(
    kwargs: dict, alone: dict, sample: torch.Tensor
) -> None:
    """``alone``: what the teacher has beside."""
    teacher, student = vit(0, **{**kwargs, **alone}), vit(1, **kwargs)
    inherit(student, teacher, sample)
    torch.testing.assert_close(
        answers(student, sample), answers(teacher, sample, THEIRS), atol=2e-2, rtol=0
    )


def error_of_start(student: Any, teacher: Any, sample: torch.Tensor) -> torch.Tensor:
    """Of the logits of a student that has inherited, over their spread."""
    inherit(student, teacher, sample)
    expected = answers(teacher, sample, THEIRS)
    return (answers(student, sample) - expected).std() / expected.std()


def with_narrow_heads(model: torch.nn.Module, rank: int, live: int) -> torch.nn.Module:
    """The model with queries, keys and values of few dimensions, and its first heads alone."""
    generator = torch.Generator().manual_seed(4)
    for block in model.blocks:
        heads, size = block.attn.num_heads, block.attn.head_dim
        for part in range(3):
            for head in range(heads):
                basis = torch.linalg.qr(torch.randn(size, rank, generator=generator)).Q
                rows = slice((part * heads + head) * size, (part * heads + head + 1) * size)
                for name in ("weight", "bias"):
                    value = getattr(block.attn.qkv, name).data
                    value[rows] = basis @ basis.T @ value[rows]
        block.attn.qkv.weight.data *= 3  # sharp patterns
        block.attn.proj.weight.data[:, live * size :] = 0
    return model


@pytest.mark.parametrize(
    ("theirs", "ours", "rank", "live"),
    [
        (
            4,
            8,
            8,
            4,
        ),  # two small heads for each big one, which has no more than small ones can hold
        (4, 16, 4, 4),
        (8, 4, 8, 4),  # half as many, each larger
    ],
)
def test_heads_of_another_size_hold_what_fits_them(
    theirs: int, ours: int, rank: int, live: int, sample: torch.Tensor
) -> None:
    teacher, student = with_narrow_heads(vit(0, heads=theirs), rank, live), vit(1, heads=ours)
    assert error_of_start(student, teacher, sample) < 0.05


def test_heads_that_hold_less_come_near(sample: torch.Tensor) -> None:
    teacher, student = with_narrow_heads(vit(0), 16, 4), vit(1, width=32, heads=4)
    turned = torch.cat(
        [sample[:96].rot90(turns, (2, 3)) for turns in range(4)]
    )  # the class token is a row a picture
    inherit(student, teacher, turned)
    expected, got = answers(teacher, sample[96:], THEIRS), answers(student, sample[96:])
    assert torch.corrcoef(torch.stack([expected.flatten(), got.flatten()]))[0, 1] > 0.5


@pytest.mark.parametrize(
    ("theirs", "shape"),
    [
        ({"reg_tokens": 4}, {}),
        ({"reg_tokens": 4}, {"width": 32, "heads": 2}),
        ({"reg_tokens": 4}, {"reg_tokens": 2, "depth": 2}),
        ({"global_pool": "map"}, {"width": 32, "heads": 2, "reg_tokens": 0}),
    ],
)
def test_models_without_a_classifier(theirs: dict, shape: dict, sample: torch.Tensor) -> None:
    """A linear map of the student's features gives the teacher's: exactly where it has all the room."""
    teacher = vit(0, **theirs)
    teacher.reset_classifier(0)
    for pool in (
        "token",
        "avg",
    ):  # no classifier is taken over, so its pooling need not be the teacher's
        student = vit(1, **{"reg_tokens": 4, **shape}, global_pool=pool, fc_norm=False)
        student.reset_classifier(0)
        inherit(student, teacher, sample[:96])
        ours, wanted = (
            model.eval().forward_features(preprocess(sample))[:, -16:].flatten(0, 1)
            for model, preprocess in ((student, OURS), (teacher, THEIRS))
        )
        ours = torch.cat([ours, torch.ones(len(ours), 1)], 1)
        fitted = ours @ torch.linalg.lstsq(ours[: 96 * 16], wanted[: 96 * 16]).solution
        share = (fitted - wanted)[96 * 16 :].var() / wanted[96 * 16 :].var()
        assert share < (1e-3 if not shape else 0.8)


def narrowed(teacher: torch.nn.Module, rank: int) -> torch.nn.Module:
    """The teacher with a residual stream of ``rank`` centred directions, two heads and half its hidden units."""
    model = copy.deepcopy(teacher)
    for block in model.blocks:
        block.attn.proj.weight.data[:, 32:] = 0
        block.mlp.fc2.weight.data[:, 128:] = 0
    q = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3))).Q[:, :rank]
    q = q - q.mean(0)
    keep = q @ torch.linalg.pinv(q)
    for layer in [
        model.patch_embed.proj,
        *(x for b in model.blocks for x in (b.attn.proj, b.mlp.fc2)),
    ]:
        layer.weight.data = (keep @ layer.weight.data.flatten(1)).view_as(layer.weight)
        layer.bias.data = keep @ layer.bias.data
    for token in (model.cls_token, model.pos_embed):
        token.data = token.data @ keep
    return model


def test_a_stream_of_low_rank_is_reproduced_by_a_narrow_student(sample: torch.Tensor) -> None:
    """Nothing is lost where the teacher's stream has no more directions than the student has room for."""
    teacher = narrowed(vit(0), rank=30)
    student = vit(1, width=32, heads=2)
    assert error_of_start(student, teacher, sample) < 0.05


def test_it_is_deterministic(sample: torch.Tensor) -> None:
    states = []
    for seed in (1, 2):  # nothing of the student's own start is left
        student = vit(seed, width=32, heads=2)
        inherit(student, vit(0), sample)
        states.append(student.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_another_number_of_classes_leaves_the_head_fresh(sample: torch.Tensor) -> None:
    student = vit(1)
    student.reset_classifier(7)
    before = student.head.weight.clone()
    inherit(student, vit(0), sample)
    assert torch.equal(student.head.weight, before)


def test_dead_units(sample: torch.Tensor) -> None:
    teacher, student = vit(0), vit(1, width=32, heads=2)
    teacher.blocks[1].mlp.fc1.weight.data.zero_()
    teacher.blocks[1].mlp.fc1.bias.data.fill_(-1e3)
    inherit(student, teacher, sample)
    assert torch.isfinite(answers(student, sample)).all()


@torch.no_grad()
def test_several_students_come_out_as_each_alone_and_run_the_teacher_once(
    sample: torch.Tensor,
) -> None:
    """Other widths, depths, heads, and another patch grid in between."""
    shapes = ({"width": 32, "heads": 2}, {"width": 48, "depth": 2}, {"patch_size": 16}, {"width": 32, "heads": 4},
              {"width": 32, "heads": 2, "depth": 2}, {"width": 32, "heads": 2, "qkv_bias": False})  # fmt: skip
    teacher, calls = vit(0), []
    alone, together = ([vit(1, **shape) for shape in shapes] for _ in range(2))
    for student in alone:
        inherit(student, teacher, sample[:96])
    teacher.blocks[2].register_forward_pre_hook(lambda *_: calls.append(1))
    teacher.blocks[2].attn.register_forward_pre_hook(lambda *_: calls.append(2))
    inherit_together([(student, OURS) for student in together], teacher, sample[:96], THEIRS)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert calls.count(1) == 2 * 2, "two grids, each in two parts; the logits are read from one"
    assert calls.count(2) == calls.count(1) + 4, "and once a grid and part for what the fits read"


@torch.no_grad()
@pytest.mark.parametrize("shapes", [[{}], [{"depth": 2}, {"patch_size": 16, "depth": 1}]])
def test_progress_counts_each_pass_to_its_end(
    shapes: list[dict], sample: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def kept(*args: object, **kwargs: object) -> object:
        shown.append(bar_at_start(*args, **kwargs))
        return shown[-1]

    monkeypatch.setattr(families, "bar_at_start", kept)
    students = [(vit(1, **shape), OURS) for shape in shapes]
    inherit_together(students, vit(0), sample[:96], THEIRS)
    (one,) = shown
    assert one.n == one.total > 10


@pytest.mark.parametrize(("pool", "expected"), [("token", [16.0, *[1.0] * 16]), ("avg", None)])
def test_a_class_token_that_alone_is_classified_counts_as_much_as_all_patches(
    pool: str, expected: list[float] | None, sample: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(*args: object) -> torch.Tensor:
        seen.append(args[1].shares)
        return inherit_block(*args)

    monkeypatch.setattr(start, "inherit_block", noted)
    inherit(*(vit(seed, global_pool=pool, fc_norm=False) for seed in (1, 0)), sample)
    assert [shares if shares is None else shares.tolist() for shares in seen] == [expected] * 3


@torch.no_grad()
def test_a_large_sample_is_fitted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part decides which heads and units are kept; here it alone would do as well as the whole."""
    pictures = torch.randint(
        256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    teacher, prepare, found = small_vit(32), Preprocess(32, (0.5,) * 3, (0.5,) * 3), []
    for size in (40, 16):
        for module in (layers, measured):
            monkeypatch.setattr(module, "GUIDE", size)
        for module in (measured, start):
            monkeypatch.setattr(module, "PART", size)
        inherit_together([(student := small_vit(16), prepare)], teacher, pictures, prepare)
        found.append(student(prepare(pictures)).flatten())
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.9


@torch.no_grad()
@pytest.mark.parametrize(
    "arch",
    [ARCH, "vit_base_patch16_clip_224", "vit_base_patch16_siglip_224", "eva02_tiny_patch14_224"],
)
def test_a_stream_of_another_size_gives_the_same_answers(arch: str, sample: torch.Tensor) -> None:
    model = vit(0, arch=arch)
    logits = answers(model, sample)
    scale_stream(model, 8)
    torch.testing.assert_close(answers(model, sample), logits, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_students_stream_is_of_size_one_however_small_its_teachers(sample: torch.Tensor) -> None:
    """A step of Adam is as large for a small weight: a small stream would be lost in a few."""
    teacher, students = vit(0), [vit(1, 32, 2) for _ in range(2)]
    for student in students:
        scale_stream(teacher, 1 / 4)
        inherit(student, teacher, sample)
        size = tokens_before_blocks(student, OURS(sample)).square().mean().sqrt()
        assert 0.7 < size < 1.5
    assert correlation(*students, sample, OURS) > 0.99
