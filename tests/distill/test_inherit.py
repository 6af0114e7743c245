"""A student that starts from its teacher's layers."""

import copy
import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import HybridEmbed, RmsNorm, SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import ParallelScalingBlock

from kd.cli import train_main
from kd.data.batch import DataInfo
from kd.distill.inherit import inherit_together, matching_patches, start
from kd.distill.inherit.layers import fit, inherit_block
from kd.errors import UserError
from kd.losses import KDLoss
from kd.models import Preprocess, StudentSpec, TeacherSpec, build_model
from kd.run.assemble import assemble
from tests._helpers import ARCH, CLASSES, TINY, save_teacher

OURS, THEIRS = (
    Preprocess(32, (0.5,) * 3, (0.5,) * 3),
    Preprocess(32, (0.48, 0.45, 0.40), (0.23, 0.22, 0.23)),
)


def inherit(
    student: torch.nn.Module, teacher: torch.nn.Module, pictures: torch.Tensor, *inputs: Preprocess
) -> None:
    inherit_together([(student, inputs[0])], teacher, pictures, inputs[1])


def vit(
    seed: int, width: int = 64, heads: int = 4, depth: int = 3, **kwargs: object
) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape = {**TINY, "embed_dim": width, "num_heads": heads, "depth": depth, **kwargs}
    model = timm.create_model(ARCH, num_classes=5, img_size=32, **shape)
    for p in model.parameters():  # timm's start is near zero: make every layer matter
        p.data += 0.05 * torch.randn_like(p)
    return model.eval()


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    return torch.randint(
        0, 256, (128, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@torch.no_grad()
def answers(model: torch.nn.Module, preprocess: Preprocess, sample: torch.Tensor) -> torch.Tensor:
    return model.eval()(preprocess(sample))


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
    inherit(student, teacher, sample, OURS, THEIRS)
    torch.testing.assert_close(
        answers(student, OURS, sample), answers(teacher, THEIRS, sample), atol=2e-2, rtol=0
    )


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
    inherit(student, teacher, sample, OURS, THEIRS)
    expected = answers(teacher, THEIRS, sample)
    error = (answers(student, OURS, sample) - expected).std() / expected.std()
    assert error < 0.05


def test_heads_that_hold_less_come_near(sample: torch.Tensor) -> None:
    teacher, student = with_narrow_heads(vit(0), 16, 4), vit(1, width=32, heads=4)
    turned = torch.cat(
        [sample[:96].rot90(turns, (2, 3)) for turns in range(4)]
    )  # the class token is a row a picture
    inherit(student, teacher, turned, OURS, THEIRS)
    expected, got = answers(teacher, THEIRS, sample[96:]), answers(student, OURS, sample[96:])
    assert torch.corrcoef(torch.stack([expected.flatten(), got.flatten()]))[0, 1] > 0.5


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"reg_tokens": 4}, {"reg_tokens": 0}),
        ({"reg_tokens": 4, "no_embed_class": True}, {"reg_tokens": 1}),
        ({"global_pool": "avg", "class_token": True}, {"global_pool": "avg", "class_token": False}),
    ],
)
def test_a_student_with_fewer_tokens_beside_the_patches(
    theirs: dict, ours: dict, sample: torch.Tensor
) -> None:
    teacher, student = vit(0, **theirs), vit(1, **ours)
    inherit(student, teacher, sample[:96], OURS, THEIRS)
    expected, got = answers(teacher, THEIRS, sample[96:]), answers(student, OURS, sample[96:])
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
        inherit(student, teacher, sample[:96], OURS, THEIRS)
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
    inherit(student, teacher, sample, OURS, THEIRS)
    expected = answers(teacher, THEIRS, sample)
    error = (answers(student, OURS, sample) - expected).std() / expected.std()
    assert error < 0.05


@pytest.mark.parametrize(
    "shape", [{"width": 32, "heads": 2}, {"depth": 2}, {"width": 32, "heads": 2, "depth": 1}]
)
def test_a_smaller_student_answers_like_the_teacher(shape: dict, sample: torch.Tensor) -> None:
    teacher, student = vit(0), vit(1, **shape)
    inherit(student, teacher, sample[:96], OURS, THEIRS)
    expected, got = answers(teacher, THEIRS, sample[96:]), answers(student, OURS, sample[96:])
    assert torch.corrcoef(torch.stack([expected.flatten(), got.flatten()]))[0, 1] > 0.5


def test_another_patch_size(sample: torch.Tensor) -> None:
    teacher, student = vit(0), vit(1, patch_size=16)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert torch.isfinite(answers(student, OURS, sample)).all()


def test_it_is_deterministic(sample: torch.Tensor) -> None:
    states = []
    for seed in (1, 2):  # nothing of the student's own start is left
        student = vit(seed, width=32, heads=2)
        inherit(student, vit(0), sample, OURS, THEIRS)
        states.append(student.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_another_number_of_classes_leaves_the_head_fresh(sample: torch.Tensor) -> None:
    student = vit(1)
    student.reset_classifier(7)
    before = student.head.weight.clone()
    inherit(student, vit(0), sample, OURS, THEIRS)
    assert torch.equal(student.head.weight, before)


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"heads": 2, "qk_norm": True, "mlp_ratio": 4}, "same qk_norm, got LayerNorm and none"),
        ({"width": 80, "heads": 5}, "no larger width than the teacher, got 80 and 64"),
        ({"depth": 4}, "no larger depth than the teacher, got 4 and 3"),
        ({"mlp_ratio": 5}, "no larger hidden units than the teacher, got 320 and 256"),
        ({"global_pool": "avg", "class_token": False}, "same pooling, got avg and token"),
        ({"reg_tokens": 2}, "no larger number of register tokens than the teacher, got 2 and 0"),
        ({"global_pool": "map", "class_token": False}, "the student has attention pooling, which"),
        ({"final_norm": False}, "the student has no norm before its classifier, which"),
        (
            {"block_fn": ParallelScalingBlock},
            "the student has blocks of the kind ParallelScalingBlock",
        ),
        (
            {"embed_layer": partial(HybridEmbed, backbone=torch.nn.Conv2d(3, 8, 1))},
            r"of its own \(a hybrid\), which",
        ),
        ({"qk_norm": True}, "same qk_norm, got LayerNorm and none"),
        ({"mlp_layer": SwiGLUPacked}, "same kind of MLP, got GluMlp and Mlp"),
        ({"norm_layer": torch.nn.Identity}, "the student has norms of the kind Identity"),
        ({"pos_embed": "none"}, "the student must have position embeddings"),
    ],
)
def test_a_pair_that_does_not_fit(student: dict, message: str, sample: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        inherit(vit(1, **student), vit(0), sample, OURS, THEIRS)
    with pytest.raises(ValueError, match="must be a plain timm VisionTransformer, got ResNet"):
        inherit(timm.create_model("resnet10t"), vit(0), sample, OURS, THEIRS)


def test_a_teacher_without_a_classifier_gives_a_student_its_layers(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = save_teacher(tmp_path / "headless.safetensors", num_classes=0)
    items = [
        f"model.teacher.checkpoint={headless}",
        "model.teacher.head=false",
        "model.student.inherit=true",
    ]
    items += [
        "model.distill_losses={hint: {class_path: HintLoss}}",
        "model.taps.hint={student: norm, teacher: norm}",
    ]
    assert train_main([f"recipe={recipe}", *items, "trainer.max_epochs=1", "optim.lr=1e-12"]) == 0
    assert "starts from random weights" not in capsys.readouterr().out
    file = recipe.parent / "runs" / "tiny" / "000" / "student.safetensors"
    ours, theirs = (load_file(f)["patch_embed.proj.weight"].flatten(1) for f in (file, headless))
    theirs = theirs - theirs.mean(
        0
    )  # of one width: turned, but for the direction that LayerNorm does not see
    torch.testing.assert_close(ours.T @ ours, theirs.T @ theirs, atol=1e-4, rtol=1e-3)


def test_a_pair_that_does_not_fit_is_refused_before_anything_is_read(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = ["model.student.inherit=true", "model.student.kwargs.embed_dim=64"]
    assert train_main([f"recipe={recipe}", *items]) == 2
    said = capsys.readouterr()
    assert (
        "model.student.inherit: the student must have no larger width than the teacher, got 64 and 32"
        in said.err
    )
    assert "preflight" not in said.out + said.err


def test_what_is_not_understood_is_noticed(sample: torch.Tensor) -> None:
    """A teacher that does something that no formula here knows, as timm's next release may."""
    teacher, student = vit(0), vit(1)
    teacher.head.register_forward_hook(lambda _module, _inputs, out: out.roll(1, dims=0))
    with pytest.raises(
        ValueError, match=r"a copy of this teacher gives other outputs \(correlation"
    ):
        inherit(student, teacher, sample, OURS, THEIRS)


def test_dead_units(sample: torch.Tensor) -> None:
    teacher, student = vit(0), vit(1, width=32, heads=2)
    teacher.blocks[1].mlp.fc1.weight.data.zero_()
    teacher.blocks[1].mlp.fc1.bias.data.fill_(-1e3)
    inherit(student, teacher, sample, OURS, THEIRS)
    assert torch.isfinite(answers(student, OURS, sample)).all()


def test_a_recipe_bends_to_its_student(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``inherit=auto``: another kind of student starts from random weights, at its rate; a refusal names it."""
    cnn = [
        "model.student.arch=test_resnet.r160_in1k",
        "model.student.kwargs={}",
        "optim.lr_scratch=0.01",
    ]
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
    students = recipe.parent / "runs" / "tiny"

    def student(number: int) -> dict:
        return json.loads((students / f"{number:03d}" / "summary.json").read_text())["student"]

    assert train_main([*items, *cnn, "model.student.inherit=auto"]) == 0
    said = capsys.readouterr().out
    reason = "(the student must be a plain timm VisionTransformer, got ResNet), at optim.lr_scratch=0.01; "
    assert (
        f"starts from random weights, not from the teacher's layers {reason}model.student.pretrained=true"
        in said
    )
    assert (student(0)["start"], student(0)["lr"]) == ("scratch", 0.01)
    assert train_main([*items, *cnn, "model.student.inherit=true"]) == 2
    assert (
        "model.student.inherit=auto trains such a student without them" in capsys.readouterr().err
    )
    assert train_main([*items, "optim.lr_scratch=0.01", "model.student.inherit=auto"]) == 0
    assert (student(1)["start"], student(1)["lr"]) == ("inherited", 0.001)
    assert "random weights" not in capsys.readouterr().out
    weights = f"model.student.checkpoint={students / '001'}"
    assert train_main([*items, "model.student.inherit=true", weights]) == 2
    assert (
        "inherit: true would overwrite the weights of model.student.checkpoint"
        in capsys.readouterr().err
    )
    assert train_main([*items, "optim.lr_scratch=0.01", "model.student.inherit=auto", weights]) == 0
    assert (student(2)["start"], student(2)["lr"]) == ("pre-trained", 0.001)
    assert train_main([f"resume={students / '000'}", "trainer.max_epochs=2"]) == 0
    assert (student(0)["start"], student(0)["lr"]) == ("scratch", 0.01)


def test_a_student_takes_as_many_patches_as_its_teacher_has(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``patch_size: auto``; without it a line says that there are fewer. A student of its own weights keeps its own."""
    teacher = save_teacher(recipe.parent / "of14.safetensors", patch_size=14, img_size=28)
    shape = {name: size for name, size in TINY.items() if name != "patch_size"}
    items = [f"recipe={recipe}", "trainer.max_epochs=1", "model.student.inherit=auto", "model.student.img_size=28",
             f"model.teacher.checkpoint={teacher}", f"model.teacher.kwargs={json.dumps({**shape, 'patch_size': 14})}",
             "model.teacher.img_size=28", "trainer.enable_progress_bar=false"]  # fmt: skip
    students = recipe.parent / "runs" / "tiny"

    def grid(number: int) -> tuple[int, ...]:
        file = students / f"{number:03d}" / "student.safetensors"
        return load_file(file)["patch_embed.proj.weight"].shape[2:]

    own, auto = (
        f"model.student.kwargs={json.dumps({**shape, **given})}"
        for given in ({}, {"patch_size": "auto"})
    )
    assert train_main([*items, own]) == 0
    assert (
        "model.student.kwargs.patch_size=auto gives it as many (14 pixels)"
        in capsys.readouterr().out
    )
    assert train_main([*items, auto]) == 0
    assert (
        f"student: {ARCH} has patches of 14 pixels, as many as its teacher"
        in capsys.readouterr().out
    )
    assert [grid(0), grid(1)] == [(16, 16), (14, 14)]
    assert train_main([f"resume={students / '001'}", "trainer.max_epochs=2"]) == 0
    assert train_main([*items, auto, f"model.student.checkpoint={students / '000'}"]) == 0
    assert train_main([*items, auto, f"model.student.checkpoint={students / '001'}"]) == 0
    assert train_main([*items, auto, "model.student.inherit=false"]) == 0
    assert "as many" not in capsys.readouterr().out
    assert [grid(number) for number in range(5)] == [
        (16, 16),
        (14, 14),
        (16, 16),
        (14, 14),
        (16, 16),
    ]


class Vits:
    """A builder of the user's whose students have patches of 16 pixels, whatever the settings say."""

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> torch.nn.Module:
        return timm.create_model(
            ARCH, num_classes=num_classes, img_size=img_size, **{**TINY, "patch_size": 16}
        )


def test_auto_is_the_students_alone_and_is_told_where_it_can_do_nothing(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "teacher.safetensors", patch_size=14, img_size=56)

    def note(side: int, patch_size: object = "auto", **more: Any) -> str:
        small = StudentSpec(
            ARCH, side, inherit=True, kwargs={**TINY, "patch_size": patch_size}, **more
        )
        big = TeacherSpec(ARCH, 56, kwargs={**TINY, "patch_size": 14}, checkpoint=str(file))
        module = assemble(
            DataInfo(list(CLASSES), 8, 8), small, big, distill_losses={"kd": KDLoss()}
        )
        return module.student_of_one.note

    assert note(56).startswith("has patches of 14 pixels, as many as its teacher")
    assert note(56, 16).startswith(
        "has fewer patches than its teacher; model.student.kwargs.patch_size=auto gives"
    )
    assert note(46).startswith("keeps its own patches, fewer than its teacher's")
    assert note(64) == note(46, 16) == note(56, 16, builder=Vits()) == ""
    assert note(56, builder=Vits()).startswith("keeps its own patches")
    with pytest.raises(
        UserError, match=r"model.student.kwargs.patch_size: auto is for model.student alone"
    ):
        build_model(StudentSpec(ARCH, 64, kwargs={"patch_size": "auto"}), 4, "model.student")


def test_pixels_that_no_patch_sees_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assemble(DataInfo(list(CLASSES), 8, 8), StudentSpec(ARCH, 36, kwargs=TINY))
    told = "pictures of 36x36 are no multiple of its patches of 8x8 pixels: it sees 32x32 of them"
    assert capsys.readouterr().out == f"model.student: {ARCH}: {told}\n"


@pytest.mark.parametrize(("side", "patch", "found"), [(112, 16, 14), (112, 14, None), (112, 32, None), (96, 16, 12),
                                                      (100, 16, None), (224, 16, None)])  # fmt: skip
def test_a_near_number_of_patches_alone_is_taken(side: int, patch: int, found: int | None) -> None:
    """Far smaller patches cost more than the settings promise; a side that is no multiple can't have as many."""
    teacher, student = (
        timm.create_model(
            ARCH, img_size=size, patch_size=pixels, embed_dim=32, depth=1, num_heads=2
        )
        for size, pixels in ((112, 14), (side, patch))
    )
    assert matching_patches(student, teacher) == found


def test_projections_of_an_inherited_classifier_begin_fitted(recipe: Path) -> None:
    """Features beside answers: drawn projections would spoil what was inherited. A copy has its teacher's features."""
    losses = {"summary": "prelogits", "patches": "maps", "middle": "maps@1/2"}
    items = [f"model.distill_losses.{name}={{class_path: MSELoss, init_args: {{standardize: variance}}}}"
             for name in losses]  # fmt: skip
    items += [
        f"model.taps.{name}={{student: {layer}, teacher: {layer}}}"
        for name, layer in losses.items()
    ]
    copy_of = [
        f"model.student.kwargs={json.dumps(TINY)}",
        "model.student.inherit=true",
        "optim.lr=1e-9",
    ]
    assert train_main([f"recipe={recipe}", *items, *copy_of, "trainer.max_epochs=1"]) == 0
    rows = list(csv.DictReader((recipe.parent / "runs" / "tiny" / "000" / "metrics.csv").open()))
    for name in losses:
        assert (
            float(
                next(
                    row[key]
                    for row in rows
                    for key in row
                    if key.endswith(f"{name}_loss") and row[key]
                )
            )
            < 0.1
        )


def test_the_middle_of_a_cnn_learns_from_the_middle_of_a_vit(recipe: Path) -> None:
    """`maps@1/3` names a layer of any student, as `recipe=grocery_vit` needs."""
    both = "[maps@1/3, maps@2/3]"
    items = ["model.distill_losses.middle={class_path: MSELoss, init_args: {standardize: variance}}",
             f"model.taps.middle={{student: {both}, teacher: {both}}}"]  # fmt: skip
    cnn = ["model.student.arch=resnet10t", "model.student.kwargs={}"]
    assert train_main([f"recipe={recipe}", *items, *cnn, "trainer.max_epochs=2"]) == 0
    rows = list(csv.DictReader((recipe.parent / "runs" / "tiny" / "000" / "metrics.csv").open()))
    losses = [
        float(row[key]) for row in rows for key in row if key.endswith("middle_loss") and row[key]
    ]
    assert 0 < losses[-1] < losses[0]


@torch.no_grad()
def test_several_students_come_out_as_each_alone_and_run_the_teacher_once(
    sample: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other widths, depths, heads, and another patch grid in between."""
    shapes = ({"width": 32, "heads": 2}, {"width": 48, "depth": 2}, {"patch_size": 16}, {"width": 32, "heads": 4},
              {"width": 32, "heads": 2, "depth": 2}, {"width": 32, "heads": 2, "qkv_bias": False})  # fmt: skip
    teacher, calls, fitted = vit(0), [], []
    alone, together = ([vit(1, **shape) for shape in shapes] for _ in range(2))
    for student in alone:
        inherit(student, teacher, sample[:96], OURS, THEIRS)
    teacher.blocks[2].register_forward_pre_hook(lambda *_: calls.append(1))
    teacher.blocks[2].attn.register_forward_pre_hook(lambda *_: calls.append(2))
    monkeypatch.setattr(
        start, "inherit_block", lambda *args: fitted.append(args) or inherit_block(*args)
    )
    inherit_together([(student, OURS) for student in together], teacher, sample[:96], THEIRS)
    assert len(fitted) == sum(len(student.blocks) for student in together) - 1, (
        "one stream is met twice"
    )
    for one, other in zip(alone, together, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )
    assert calls.count(1) == 3 * 2, "two grids and the logits, each in two parts"
    assert calls.count(2) == calls.count(1) + 2, "and once a grid for what the fits read"


@torch.no_grad()
def test_a_fit_is_the_ridge_regression_drawn_to_its_start() -> None:
    """300 inputs: their products are computed in parts."""
    generator = torch.Generator().manual_seed(0)
    x, y, start = (
        torch.randn(*shape, generator=generator) for shape in ((2, 400, 300), (2, 400, 5), (5, 300))
    )
    shares = torch.linspace(0.5, 1.5, 400)
    linear = torch.nn.Linear(300, 5)
    fit(linear, [(x, y)], start, shares, ridge=0.1)
    share = (shares / shares.mean()).repeat(2)[:, None].double()
    x, y = (t.flatten(0, 1).double() for t in (x, y))
    x, y = (t - (share * t).mean(0) for t in (x, y))
    gram = (share * x).T @ x / len(x)
    damped = gram + 0.1 * gram.diagonal().mean() * torch.eye(300)
    expected = (
        start + torch.linalg.solve(damped, (share * x).T @ (y - x @ start.double().T) / len(x)).T
    )
    torch.testing.assert_close(linear.weight.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_token_with_a_share_counts_as_so_many_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, 6, generator=generator), torch.randn(40, 4, 3, generator=generator)
    start = torch.randn(3, 6, generator=generator)
    weighed, repeated, even = (torch.nn.Linear(6, 3) for _ in range(3))
    fit(weighed, [(x, y)], start, torch.tensor([3.0, 1.0, 1.0, 1.0]))
    fit(repeated, [tuple(torch.cat([t[:, :1], t[:, :1], t], 1) for t in (x, y))], start)
    fit(even, [(x, y)], start, torch.ones(4))
    torch.testing.assert_close(weighed.state_dict(), repeated.state_dict())
    assert not torch.allclose(weighed.weight, even.weight)


@pytest.mark.parametrize(("pool", "expected"), [("token", [16.0, *[1.0] * 16]), ("avg", None)])
def test_a_class_token_that_alone_is_classified_counts_as_much_as_all_patches(
    pool: str, expected: list[float] | None, sample: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(*args: object) -> torch.Tensor:
        seen.append(args[1].shares)
        return inherit_block(*args)

    monkeypatch.setattr(start, "inherit_block", noted)
    inherit(*(vit(seed, global_pool=pool, fc_norm=False) for seed in (1, 0)), sample, OURS, THEIRS)
    assert [shares if shares is None else shares.tolist() for shares in seen] == [expected] * 3
