"""Feature taps on models of every layout, under compilation, checkpointing, and without a trace behind them."""

import gc
import weakref

import pytest
import timm
import torch

from kd.losses import (
    ConvProjection,
    HintLoss,
    MLPProjection,
    OrthogonalProjection,
    Projection,
)
from kd.models.taps import Taps
from tests._helpers import refuses, tiny_vit

PICTURES = torch.zeros(2, 3, 32, 32)


def shapes(
    model: torch.nn.Module, pattern: str | list[str], tokens: str = "patch", size: int = 32
) -> list[tuple]:
    taps = Taps(model, [pattern], (size, size))
    with taps as caught:
        model.eval()(torch.zeros(2, 3, size, size))
    return [tuple(x.shape) for x in taps.read(caught, pattern, tokens)]


def test_patches_are_a_map_and_the_class_token_a_vector() -> None:
    """Register tokens are left out; convolutional and windowed models give maps."""
    assert shapes(tiny_vit(), "blocks.1") == [(2, 32, 4, 4)]
    assert shapes(tiny_vit(), "blocks.1", "class") == [(2, 32)]
    assert shapes(tiny_vit(), "blocks.1", "all") == [(2, 17, 32)]
    assert shapes(tiny_vit(), "prelogits") == [(2, 32)]
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    registers = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=28, **sizes)
    assert shapes(registers, "blocks.1", size=28) == [(2, 32, 2, 2)]
    cnn = timm.create_model("resnet10t")
    assert shapes(cnn, "layer[34]") == [(2, 256, 2, 2), (2, 512, 1, 1)]
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, embed_dim=24, depths=(1, 1),
                             num_heads=(2, 2), window_size=4)  # fmt: skip
    assert shapes(swin, "layers.*", size=64) == [(2, 24, 16, 16), (2, 48, 8, 8)]


def test_patch_tokens_stand_where_their_patches_are() -> None:
    model = tiny_vit(class_token=True).eval()
    taps = Taps(model, ["patch_embed", "pos_drop"], (32, 32))
    with taps as caught:
        model(torch.rand(1, 3, 32, 32))
    tokens = taps.read(caught, "pos_drop", "all")[0]
    grid = taps.read(caught, "pos_drop", "patch")[0]
    assert torch.equal(grid[0, :, 2, 1], tokens[0, 1 + 2 * 4 + 1])


def test_pictures_that_are_not_square() -> None:
    taps = Taps(model := tiny_vit(img_size=(32, 64)), ["blocks.0"], (32, 64))
    with taps as caught:
        model(torch.zeros(1, 3, 32, 64))
    assert taps.read(caught, "blocks.0", "patch")[0].shape == (1, 32, 4, 8)


def test_a_share_of_the_depth_names_a_map_in_any_model() -> None:
    vit, cnn = tiny_vit(depth=6), timm.create_model("resnet10t", num_classes=4)
    both = ["maps@1/3", "maps@2/3"]
    assert Taps(vit, [], (32, 32)).paths(both) == [
        "blocks.2.norm1",
        "blocks.4.norm1",
    ]  # as the next block reads them
    assert Taps(vit, [], (32, 32)).paths(["maps@1/100", "maps@1/1"]) == [
        "blocks.1.norm1",
        "blocks.5",
    ]
    assert Taps(tiny_vit(depth=2), [], (32, 32)).paths(both) == [
        "blocks.1.norm1",
        "blocks.1",
    ]  # two, as elsewhere
    assert Taps(cnn, [], (32, 32)).paths(both) == ["layer1", "layer3"]
    assert shapes(vit, both) == [(2, 32, 4, 4)] * 2
    assert shapes(cnn, both) == [(2, 64, 8, 8), (2, 256, 2, 2)]
    late = timm.create_model("cait_xxs24_224", img_size=32, embed_dim=32, depth=3, num_heads=2)
    assert (
        shapes(late, both) == [(2, 32, 2, 2)] * 2
    )  # its blocks have no class token, which joins later


@pytest.mark.parametrize(
    ("arch", "widths"),
    [("resnet18", [128, 256, 512]), ("mobilenetv3_large_100", [40, 112, 960]),
     ("convnext_atto", [80, 160, 320])],
)  # fmt: skip
def test_the_levels_that_detectors_read(arch: str, widths: list[int]) -> None:
    cnn = timm.create_model(arch)
    levels = [f"maps@stride{stride}" for stride in (8, 16, 32)]
    sides = [64 // stride for stride in (8, 16, 32)]
    expected = [(2, width, side, side) for width, side in zip(widths, sides, strict=True)]
    assert shapes(cnn, levels, size=64) == expected


class Stages(torch.nn.Module):
    """A CNN that timm does not know: stages of strides 4, 8 and 16, whose first layer keeps the last stage's stride."""

    def __init__(self, last: tuple[int, ...] = (2, 2, 2)) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3, 2, 1)
        widths = (4, 6, 8, 10)
        for number, stride in enumerate(last):
            before, after = widths[number : number + 2]
            stage = torch.nn.Sequential(
                torch.nn.Conv2d(before, before, 1), torch.nn.Conv2d(before, after, 3, stride, 1)
            )
            setattr(self, f"stage{number}", stage)
        self.last = len(last)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x)
        maps = []
        for number in range(self.last):
            x = getattr(self, f"stage{number}")(x)
            maps.append(x)
        return tuple(maps)


def test_strides_of_a_network_that_timm_does_not_know() -> None:
    """The layer that ends a stage, not the next stage's first layer of the same stride."""
    net = Stages()
    levels = [f"maps@stride{stride}" for stride in (2, 4, 8, 16)]
    taps = Taps(net, levels, (32, 48))
    assert [taps.paths(level) for level in levels] == [["stem"], ["stage0"], ["stage1"], ["stage2"]]
    assert net.training  # as it was
    behind = torch.nn.ModuleDict({"model": net})
    behind.forward = net.forward  # type: ignore[method-assign]
    assert Taps(behind, [], (32, 32)).paths("maps@stride8") == ["model.stage1"]


@pytest.mark.parametrize(
    ("model", "pattern", "message"),
    [
        (tiny_vit(), "maps@4/3", "timm lists 2 features of vit_tiny.*, so 'maps@4/3' names none"),
        (torch.nn.Linear(2, 2), "maps@1/2", "timm lists 0 features of Linear, so 'maps@1/2' names none"),
        (tiny_vit(), "maps@0/3", ".* has no layer 'maps@0/3'"),
        (tiny_vit(), "block.*", r"vit_tiny_patch16_224 has no layer 'block.\*'; near: blocks.0"),
        (timm.create_model("resnet10t"), "maps@stride12",
         "no layer of resnet10t gives maps@stride12, .*; it has .*maps@stride8, maps@stride16"),
        (Stages(), "maps@stride32", "no layer of Stages gives maps@stride32, .* 32x48 picture; it has .*maps@stride16$"),
        (Stages((2, 1)), "maps@stride8", "no layer of Stages gives maps@stride8, .*; it has maps@stride2, maps@stride4$"),
        (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4608, 4)), "maps",
         "Sequential has no map before its classifier: name a layer"),
    ],
)  # fmt: skip
def test_layers_that_a_model_does_not_have_are_refused(
    model: torch.nn.Module, pattern: str, message: str
) -> None:
    with refuses(f"model.taps: {message}"):
        Taps(model, [pattern], (32, 48))


def test_a_stride_that_does_not_divide_the_picture_has_no_map() -> None:
    with refuses("gives maps@stride8, .* 32x36 picture; it has "):
        Taps(Stages(), ["maps@stride8"], (32, 36))


def test_patterns_name_layers_in_the_models_order() -> None:
    taps = Taps(tiny_vit(depth=12), [["blocks.[!2]", "norm"]], (32, 32))
    assert taps.paths(["norm", "blocks.?"]) == ["norm", *(f"blocks.{i}" for i in range(10))]
    assert taps.paths("blocks.*")[-1] == "blocks.11"  # a star does not cross a dot


def test_a_model_without_a_class_token_says_so() -> None:
    with refuses("no class token"):
        shapes(tiny_vit(class_token=False, global_pool="avg"), "blocks.1", "class")


def test_nothing_is_kept_longer_than_the_step() -> None:
    model = tiny_vit().train()
    taps = Taps(model, ["blocks.*"], (32, 32))
    with taps as caught:
        output = model(PICTURES)
    layers = set(caught)
    model(PICTURES)
    assert set(caught) == layers == {"blocks.0", "blocks.1"}  # not open, not caught
    features = taps.read(caught, "blocks.*", "patch")
    watched = [weakref.ref(x) for x in (*features, *caught.values())]
    (output.sum() + sum(x.sum() for x in features)).backward()
    del features, output, caught
    gc.collect()
    assert not any(ref() is not None for ref in watched)


@pytest.mark.parametrize(
    ("layer", "path"), [("blocks.0", "blocks.0"), ("maps@1/2", "blocks.1.norm1")]
)
def test_gradient_checkpointing_changes_nothing_and_keeps_nothing(layer: str, path: str) -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_vit(seed=1).train()
        model.set_grad_checkpointing(checkpointing)
        taps = Taps(model, [layer], (32, 32))
        with taps as caught:
            output = model(PICTURES)
        loss = output.square().sum() + taps.read(caught, layer, "patch")[0].square().sum()
        first = caught[path]
        loss.backward()
        assert caught[path] is first  # the second forward, during backward, is not caught
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1])


def test_a_compiled_model_is_tapped_too() -> None:
    torch.compiler.reset()
    model = tiny_vit(seed=1).eval()
    taps = Taps(model, ["blocks.*"], (32, 32))
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        with taps as caught:
            run(torch.ones(2, 3, 32, 32))
        found.append(taps.read(caught, "blocks.*", "patch"))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ((2, 8, 7, 7), (2, 16, 4, 4)),
        ((2, 8, 4, 4), (2, 16, 7, 9)),
        ((2, 8, 4, 4), (2, 16)),
        ((2, 8), (2, 16)),
        ((2, 16), (2, 8)),
        ((2, 5, 8), (2, 5, 16)),
    ],
)
@pytest.mark.parametrize("kind", [Projection, MLPProjection, OrthogonalProjection])
def test_projections_lead_from_any_shape_to_the_teachers(
    kind: type[Projection], student: tuple, teacher: tuple
) -> None:
    assert kind().build(student, teacher)(torch.zeros(student)).shape == teacher


def test_projections_that_do_not_fit_say_what_they_got() -> None:
    assert ConvProjection().build((2, 8, 7, 7), (2, 16, 4, 4))(torch.zeros(2, 8, 7, 7)).shape == (
        2,
        16,
        4,
        4,
    )
    with pytest.raises(ValueError, match="projection must be"):
        ConvProjection().build((2, 8), (2, 16))
    with pytest.raises(ValueError, match=r"\(5, 8\) a sample to the teacher's \(9, 16\)"):
        Projection().build((2, 5, 8), (2, 9, 16))


@pytest.mark.parametrize("shape", [(64, 8), (16, 8, 2, 2)])
def test_an_orthogonal_projection_keeps_all_angles_while_it_learns(shape: tuple) -> None:
    """Under bf16 autocast; it begins at the best of all rotations."""
    torch.manual_seed(0)
    features = torch.randn(shape)
    projection = OrthogonalProjection().build(shape, (shape[0], 12, *shape[2:]))
    rows = features.movedim(1, -1).flatten(0, -2)
    wanted = rows @ torch.randn(8, 12) + 3
    projection.fit(rows, wanted)
    mapped, centred = (rows - rows.mean(0)) @ projection.layers.weight.T, wanted - wanted.mean(0)
    best = torch.linalg.matrix_norm(
        centred.T @ (rows - rows.mean(0)), "nuc"
    )  # von Neumann: of all rotations
    torch.testing.assert_close((mapped * centred).sum(), best, rtol=1e-4, atol=0)
    optimizer = torch.optim.AdamW(projection.parameters(), lr=0.05, weight_decay=0.1)
    before = projection.layers.weight.detach()
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (
                projection(features)
                .float()
                .movedim(1, -1)
                .flatten(0, -2)
                .sub(wanted)
                .square()
                .mean()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = projection.layers.weight.detach()
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after.T @ after, torch.eye(8), atol=1e-5, rtol=0)
    given = projection(features).detach().movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(given @ given.T, rows @ rows.T, atol=1e-4, rtol=1e-4)
    projection.to(torch.bfloat16)  # trainer.precision=bf16-true: the map itself is not rounded
    assert torch.equal(projection.layers.weight, after)
    assert projection(features.bfloat16()).dtype == torch.bfloat16


def test_several_pairs_of_layers_have_a_projection_each() -> None:
    each = HintLoss(weight=0.5)
    each.build_layers([(2, 8), (2, 6)], [(2, 4), (2, 4)])
    assert len([*each.parameters()]) == 4
    student, teacher = (
        [torch.randn(2, 8), torch.randn(2, 6)],
        [torch.randn(2, 4), torch.randn(2, 4)],
    )
    own = [
        loss(s, t, torch.zeros(2)) for loss, s, t in zip(each.pairs, student, teacher, strict=True)
    ]
    target = torch.zeros(2)
    torch.testing.assert_close(each(student, teacher, target), (own[0] + own[1]) / 2)
    with pytest.raises(ValueError, match="in pairs, got 2 of the student and 1"):
        HintLoss().build_layers([(2, 8), (2, 6)], [(2, 4)])


@pytest.mark.parametrize(
    ("arch", "size", "layer", "shape"),
    [
        ("resnet18", 64, "layer4", (512, 2, 2)),
        ("resnet18", 32, "layer4", (512, 1, 1)),
        ("convnext_atto", 64, "norm_pre", (320, 2, 2)),
        ("mobilenetv3_small_050", 64, "blocks", (288, 2, 2)),
        ("mobilevit_xxs", 64, "final_conv", (320, 2, 2)),
        ("levit_128s", 224, "stages", (384, 4, 4)),
        ("pit_ti_224", 224, "transformers", (256, 7, 7)),
    ],
)
@pytest.mark.parametrize("classes", [0, 4])
def test_the_last_map_of_any_model(
    arch: str, size: int, layer: str, shape: tuple[int, ...], classes: int
) -> None:
    model = timm.create_model(arch, num_classes=classes).train()
    taps = Taps(model, ["maps"], (size, size))
    assert model.training
    assert "forward_features" not in vars(model)
    assert not [
        m for m in model.modules() if len(m._forward_hooks) > (m is model.get_submodule(layer))
    ]
    assert taps.paths("maps") == [layer]
    assert shapes(model, "maps", size=size) == [(2, *shape)]


def test_the_last_map_of_a_vit_is_what_its_final_norm_gives() -> None:
    taps = Taps(tiny_vit(), ["maps"], (32, 32))
    assert taps.paths("maps") == ["norm"]
    assert taps.paths(["blocks.0", "maps", "norm"]) == ["blocks.0", "norm"]
    two_patches = tiny_vit(img_size=(16, 32), patch_size=16)
    assert Taps(two_patches, ["maps"], (16, 32)).paths("maps") == ["norm"]


def test_the_last_map_of_a_model_of_ones_own_comes_before_its_classifier() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = (
                torch.nn.Conv2d(3, 8, 2, 2),
                torch.nn.Sequential(torch.nn.Conv2d(8, 6, 2, 2)),
            )
            self.pool, self.head = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.pool(self.body(self.stem(x))).flatten(1))

    assert Taps(Net(), ["maps"], (32, 32)).paths("maps") == ["body"]


def test_a_layer_that_is_never_called_is_named() -> None:
    model = tiny_vit()
    model.spare = torch.nn.Linear(2, 2)
    with refuses("model.taps: layer 'spare' of vit_tiny_patch16_224 gives nothing in a forward"):
        shapes(model, "spare")
