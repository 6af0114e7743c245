"""Which tensors of a file are the wanted model's: published layouts, wrappings, several models in one file."""

import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from kd.models import TeacherSpec, build_model, load_checkpoint
from kd.models.foreign import HUGGING_FACE
from kd.models.hugging_face import HuggingFaceBuilder
from kd.models.loading import has_new_classifier
from kd.teachers import build_teacher
from tests._helpers import ARCH, CLASSES, TINY, refuses, tiny_vit

State = dict[str, Tensor]
SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
DINO = {"plain": "vit_small_patch14_dinov2", "registers": "vit_small_patch14_reg4_dinov2"}
NATIVE = 56  # 7 x 7 patches


def shaken(model: nn.Module) -> nn.Module:
    """Random weights everywhere: zeros and ones would hide a wrong name."""
    generator = torch.Generator().manual_seed(0)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return model.eval()


def output(model: nn.Module, size: int) -> Tensor:
    pictures = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(pictures)


def loaded(
    content: object, model: nn.Module, folder: Path, head: bool = True, part: str | None = None
) -> nn.Module:
    torch.save(content, folder / "w.pth")
    load_checkpoint(model, folder / "w.pth", "model.teacher.checkpoint", head=head, part=part)
    return model


def below(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


# -- DINOv2 in each published layout --------


def dino(kind: str, size: int, classes: int = 0) -> nn.Module:
    return timm.create_model(DINO[kind], num_classes=classes, img_size=size, **SMALL)


def hub_state(kind: str) -> State:
    """As its authors publish it: positions and class token apart, registers and the mask token under their names."""
    state = {name: value.clone() for name, value in shaken(dino(kind, NATIVE)).state_dict().items()}
    if kind == "registers":
        first = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2))
        state["register_tokens"] = state.pop("reg_token")
        state["cls_token"] = state["cls_token"] - first
        state["pos_embed"] = torch.cat([first, state["pos_embed"]], 1)
    return {**state, "mask_token": torch.zeros(1, 32)}


def transformers_state(kind: str) -> State:
    """The hub's under the names of transformers, each written out."""
    named = {
        "cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
        "mask_token": "embeddings.mask_token", "register_tokens": "embeddings.register_tokens",
        "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
        "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
        "norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias",
    }  # fmt: skip
    parts = {"norm1.": "norm1.", "norm2.": "norm2.", "attn.proj.": "attention.output.dense.", "mlp.fc1.": "mlp.fc1.",
             "mlp.fc2.": "mlp.fc2.",
             "ls1.gamma": "layer_scale1.lambda1", "ls2.gamma": "layer_scale2.lambda1"}  # fmt: skip
    theirs: State = {}
    for name, value in hub_state(kind).items():
        if name in named:
            theirs[named[name]] = value
            continue
        _, block, rest = name.split(".", 2)
        before = f"encoder.layer.{block}."
        if rest.startswith("attn.qkv."):
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                theirs[f"{before}attention.attention.{part}.{rest.rpartition('.')[2]}"] = piece
            continue
        ours = next(part for part in parts if rest.startswith(part))
        theirs[before + rest.replace(ours, parts[ours])] = value
    return theirs


LAYOUTS = {"hub": hub_state, "transformers": transformers_state,
           "timm": lambda kind: shaken(dino(kind, NATIVE)).state_dict()}  # fmt: skip


def without_mask_token(kind: str) -> State:
    return {name: value for name, value in hub_state(kind).items() if name != "mask_token"}


LAYOUTS["hub, no mask token"] = without_mask_token


@pytest.mark.parametrize("size", [NATIVE, 32, 80])
@pytest.mark.parametrize("wrapped", ["", "model.", "teacher.backbone."])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DINO)
def test_dinov2_gives_timms_output_from_every_published_layout(
    kind: str, layout: str, wrapped: str, size: int, tmp_path: Path
) -> None:
    wanted = dino(kind, size)
    wanted.load_state_dict(checkpoint_filter_fn(hub_state(kind), wanted))
    given = loaded(below(wrapped, LAYOUTS[layout](kind)), dino(kind, size), tmp_path)
    torch.testing.assert_close(output(given, size), output(wanted, size), rtol=1e-4, atol=1e-5)


def of_transformers(kind: str, what: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    name = {"plain": "Dinov2", "registers": "Dinov2WithRegisters"}[kind]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=NATIVE, patch_size=8,
        id2label=dict(enumerate(CLASSES)),
    )  # fmt: skip
    return shaken(getattr(transformers, name + what)(config))


@pytest.mark.parametrize("kind", DINO)
def test_dinov2_of_transformers_itself(kind: str, tmp_path: Path) -> None:
    theirs = of_transformers(kind, "Model")
    theirs.save_pretrained(tmp_path)
    spec = TeacherSpec(DINO[kind], NATIVE, checkpoint=str(tmp_path), kwargs=SMALL, head=False)
    pictures = torch.randn(2, 3, NATIVE, NATIVE)
    with torch.no_grad():
        given = build_teacher(spec, 0).model.forward_features(pictures)
        want = theirs(pictures).last_hidden_state
    torch.testing.assert_close(given, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", DINO)
def test_the_classifier_of_transformers_dinov2_is_another_and_the_builder_has_it(
    kind: str, tmp_path: Path
) -> None:
    """It reads the class token and the patches' mean together, which no ViT of timm does."""
    theirs = of_transformers(kind, "ForImageClassification")
    theirs.save_pretrained(tmp_path)
    keys = rf"model.teacher.builder={re.escape(HUGGING_FACE)} model.teacher.builder.path={tmp_path}"
    with refuses(rf"model.teacher.checkpoint: {tmp_path} .* in its place: {keys}"):
        build_teacher(TeacherSpec(checkpoint=str(tmp_path)), 4, CLASSES)
    with refuses(r"head.weight is \(4, 64\) there, \(4, 32\) here"):
        loaded(theirs.state_dict(), dino(kind, NATIVE, 4), tmp_path)
    student = loaded(theirs.state_dict(), dino(kind, NATIVE, 4), tmp_path, head=False)
    assert has_new_classifier(student)
    teacher = build_teacher(TeacherSpec(builder=HuggingFaceBuilder(str(tmp_path))), 4, CLASSES)
    pictures = torch.randn(2, 3, NATIVE, NATIVE)
    with torch.no_grad():
        torch.testing.assert_close(teacher(pictures), theirs(pictures).logits)


# -- other published layouts that timm's filters read --------


def clip_state(model: nn.Module) -> State:
    """A ViT of timm's under the names of CLIP's authors."""
    swaps = (("patch_embed.proj", "conv1"), ("blocks.", "transformer.resblocks."), ("norm_pre", "ln_pre"),
             (".norm", ".ln_"), ("attn.qkv.", "attn.in_proj_"), ("attn.proj", "attn.out_proj"),
             ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"))  # fmt: skip
    theirs: State = {}
    for name, value in model.state_dict().items():
        if name.startswith("norm."):
            name = name.replace("norm", "ln_post")
        for ours, named in swaps:
            name = name.replace(ours, named)
        if name == "cls_token":
            name, value = "class_embedding", value[0, 0]
        if name == "pos_embed":
            name, value = "positional_embedding", value[0]
        theirs[name] = value
    return theirs


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("wrapped", ["visual.", "module.visual.", "model.visual.", ""])
def test_clips_picture_tower(wrapped: str, size: int, tmp_path: Path) -> None:
    def make(side: int) -> nn.Module:
        return timm.create_model("vit_base_patch32_clip_224", num_classes=0, img_size=side, **SMALL)

    source = shaken(make(32))
    wanted = make(size)
    wanted.load_state_dict(checkpoint_filter_fn(dict(source.state_dict()), wanted))
    text = {"token_embedding.weight": torch.ones(5, 32)} if wrapped else {}
    given = loaded({**below(wrapped, clip_state(source)), **text}, make(size), tmp_path)
    torch.testing.assert_close(output(given, size), output(wanted, size))


DECODER = {"mask_token": torch.zeros(1, 1, 16), "decoder_embed.weight": torch.ones(16, 32),
           "decoder_blocks.0.norm1.weight": torch.ones(16), "decoder_pos_embed": torch.ones(1, 17, 16)}  # fmt: skip
PUBLISHED = {
    "masked autoencoder": (ARCH, {}, DECODER),
    "DeiT-3": ("deit3_small_patch16_224", {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}, {}),
    "DINOv3": (
        "vit_small_patch16_dinov3",
        {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"},
        {"mask_token": torch.zeros(1, 32), "rope_embed.periods": torch.ones(4)},
    ),
}
"""The model of timm, its names and its authors', and what else is in the file."""


@pytest.mark.parametrize("published", PUBLISHED)
def test_a_file_of_its_authors_brings_the_encoder(published: str, tmp_path: Path) -> None:
    arch, swaps, beside = PUBLISHED[published]

    def make() -> nn.Module:
        return timm.create_model(arch, num_classes=0, img_size=32, **SMALL)

    source = shaken(make())
    state = dict(beside)
    for name, value in source.state_dict().items():
        for ours, theirs in swaps.items():
            name = name.replace(ours, theirs)
        state[name] = value
    given = loaded({"teacher": state}, make(), tmp_path)
    torch.testing.assert_close(output(given, 32), output(source, 32))


@pytest.mark.parametrize("size", [32, 64])
def test_torchvisions_vit_at_another_size(size: int, tmp_path: Path) -> None:
    import torchvision

    theirs = shaken(
        torchvision.models.VisionTransformer(
            32, 8, 2, 2, 32, 64, num_classes=4, norm_layer=nn.LayerNorm
        )
    )
    native = loaded(theirs.state_dict(), tiny_vit(mlp_ratio=2), tmp_path)
    torch.testing.assert_close(output(native, 32), output(theirs, 32), rtol=1e-4, atol=1e-4)
    wanted = tiny_vit(mlp_ratio=2, img_size=size)
    wanted.load_state_dict(checkpoint_filter_fn(dict(native.state_dict()), wanted))
    given = loaded(theirs.state_dict(), tiny_vit(mlp_ratio=2, img_size=size, seed=5), tmp_path)
    torch.testing.assert_close(output(given, size), output(wanted, size))


# -- wrappings --------

NESTED = {
    **{name: (lambda state, name=name: {name: state, "epoch": 3})
       for name in ("teacher", "student", "ema", "net", "params", "params_ema", "model_ema", "weights", "module",
                    "state_dict", "model", "anything")},
    "deep": lambda state: {"checkpoint": {"ema": {"module": state}}, "optimizer": {"state": {0: {"m": torch.ones(3)}}}},
    "in a list": lambda state: {"models": [state], "step": torch.tensor(3)},
    "DeepSpeed": lambda state: {"module": below("model.", state), "global_steps": 7, "dp_world_size": 1},
    "Lightning": lambda state: {"state_dict": below("model.", state), "pytorch-lightning_version": "2.6.0"},
    "compiled": lambda state: below("_orig_mod.", state),
    "compiled inside": lambda state: {"state_dict": below("net._orig_mod.", state)},
    "DDP, compiled": lambda state: below("module._orig_mod.", state),
    "FSDP": lambda state: below("_fsdp_wrapped_module.", state),
    "checkpointed": lambda state: {k.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): v
                                   for k, v in state.items()},
    "by module": lambda state: {"net": {"head": {k[5:]: v for k, v in state.items() if k.startswith("head.")},
                                        **{k: v for k, v in state.items() if not k.startswith("head.")}}},
    "float16": lambda state: {"teacher": {k: v.half() for k, v in state.items()}},
    "bfloat16": lambda state: {"teacher": {k: v.bfloat16() for k, v in state.items()}},
    "parameters": lambda state: {"teacher": {k: nn.Parameter(v) for k, v in state.items()}},
}  # fmt: skip


@pytest.mark.parametrize("wrapping", NESTED)
def test_weights_are_found_below_any_name(wrapping: str, tmp_path: Path) -> None:
    state = tiny_vit(seed=3).state_dict()
    given = loaded(NESTED[wrapping](state), tiny_vit(seed=4), tmp_path).state_dict()
    lossy = wrapping.endswith("float16")
    for name, value in state.items():
        assert given[name].dtype == value.dtype
        torch.testing.assert_close(
            given[name], value, rtol=1e-2 if lossy else 0, atol=1e-3 if lossy else 0
        )


def test_safetensors_with_metadata_and_a_prefix(tmp_path: Path) -> None:
    state = tiny_vit(seed=3).state_dict()
    save_file(
        below("net.encoder.", state), tmp_path / "w.safetensors", {"format": "pt", "by": "someone"}
    )
    model = tiny_vit(seed=4)
    load_checkpoint(model, tmp_path / "w.safetensors", "model.teacher.checkpoint", head=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_file_that_contains_itself_ends(tmp_path: Path) -> None:
    content: dict[str, object] = {"teacher": tiny_vit(seed=3).state_dict()}
    content["again"] = content
    assert torch.equal(
        loaded(content, tiny_vit(seed=4), tmp_path).head.weight, tiny_vit(seed=3).head.weight
    )


def test_batch_norm_without_its_counter(tmp_path: Path) -> None:
    source = shaken(timm.create_model("resnet10t", num_classes=4))
    state = {
        name: value
        for name, value in source.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    for content in (state, {"ema": below("net.", state)}):
        given = loaded(
            content, timm.create_model("resnet10t", num_classes=4), tmp_path
        ).state_dict()
        assert all(torch.equal(given[name], value) for name, value in state.items())


# -- the model's own file --------


def sequence(length: int, width: int) -> Tensor:
    """One-dimensional sinusoids: neighbours in a row are alike, and so are a row's end and the next one's begin."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], 1)


def test_the_models_own_file_is_loaded_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_vit(seed=3, img_size=64)
    with torch.no_grad():
        source.pos_embed[0, 1:] = sequence(64, 32)
    given = loaded(source.state_dict(), tiny_vit(seed=4, img_size=64), tmp_path)
    assert all(
        torch.equal(value, source.state_dict()[name]) for name, value in given.state_dict().items()
    )
    assert not capsys.readouterr().out


# -- several models in one file --------

PAIRS = [
    ("encoder_q.", "encoder_k."),
    ("model.", "ema_model.module."),
    ("net.", "frozen_teacher."),
    ("", "teacher."),
]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_models_that_fit_are_refused_and_the_key_chooses(
    pair: tuple[str, str], order: int, tmp_path: Path
) -> None:
    states = {prefix: tiny_vit(seed=seed).state_dict() for seed, prefix in enumerate(pair)}
    flat = {k: v for prefix in pair[::order] for k, v in below(prefix, states[prefix]).items()}
    labels = [prefix.rstrip(".") or "." for prefix in pair]
    with refuses("holds 2 models that fit equally well") as refusal:
        loaded({"state_dict": flat}, tiny_vit(seed=5), tmp_path)
    assert all(label in str(refusal.value) for label in labels)
    assert "model.teacher.checkpoint_key=" in str(refusal.value)
    for prefix, label in zip(pair, labels, strict=True):
        if prefix:
            given = loaded({"state_dict": flat}, tiny_vit(seed=5), tmp_path, part=label)
            assert torch.equal(given.head.weight, states[prefix]["head.weight"])
    with refuses(r"checkpoint_key\): no model below 'nobody'; models are below: "):
        loaded({"state_dict": flat}, tiny_vit(seed=5), tmp_path, part="nobody")


def test_of_two_models_the_one_with_the_shapes_is_taken(tmp_path: Path) -> None:
    narrow, wide = tiny_vit(seed=1), tiny_vit(seed=2, embed_dim=64)
    for prefixes in (("net.", "teacher."), ("teacher.", "net.")):
        flat = {**below(prefixes[0], narrow.state_dict()), **below(prefixes[1], wide.state_dict())}
        for wanted in (narrow, wide):
            width = wanted.embed_dim
            given = loaded({"state_dict": flat}, tiny_vit(seed=3, embed_dim=width), tmp_path)
            assert torch.equal(given.head.weight, wanted.head.weight)


def test_one_model_under_two_names_is_one(tmp_path: Path) -> None:
    state = tiny_vit(seed=1).state_dict()
    copied = {name: value.clone() for name, value in state.items()}
    given = loaded({"net": state, "best": {"module": copied}}, tiny_vit(seed=2), tmp_path)
    assert torch.equal(given.head.weight, state["head.weight"])


@pytest.mark.parametrize("pair", [("state_dict", "state_dict_ema"), ("model", "model_ema")])
def test_of_timms_two_the_average_is_taken_as_timm_takes_it(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, average = (tiny_vit(seed=seed).state_dict() for seed in (1, 2))
    given = loaded({pair[0]: plain, pair[1]: average, "epoch": 3}, tiny_vit(seed=3), tmp_path)
    assert torch.equal(given.head.weight, average["head.weight"])
    assert f"the weights below '{pair[1]}' are taken" in capsys.readouterr().out
    chosen = loaded({pair[0]: plain, pair[1]: average}, tiny_vit(seed=3), tmp_path, part=pair[0])
    assert torch.equal(chosen.head.weight, plain["head.weight"])


def test_two_models_of_another_library_are_refused_too(tmp_path: Path) -> None:
    first, second = transformers_state("registers"), transformers_state("registers")
    second["layernorm.weight"] = second["layernorm.weight"] + 1
    flat = {**below("student.", first), **below("teacher.", second)}
    with refuses(r"below student, teacher"):
        loaded(flat, dino("registers", NATIVE), tmp_path)
    given = loaded(flat, dino("registers", NATIVE), tmp_path, part="teacher")
    assert torch.equal(given.norm.weight, second["layernorm.weight"])


def test_a_head_of_another_model_is_not_taken_for_the_missing_one(tmp_path: Path) -> None:
    body = {k: v for k, v in tiny_vit(seed=1).state_dict().items() if not k.startswith("head.")}
    other = {
        k: v for k, v in tiny_vit(seed=2).state_dict().items() if not k.startswith("blocks.1.")
    }
    with refuses(r"head.weight is missing"):
        loaded(
            {**below("net.backbone.", body), **below("teacher.", other)}, tiny_vit(seed=3), tmp_path
        )


def test_the_setting_reaches_the_file(tmp_path: Path) -> None:
    states = [tiny_vit(seed=seed).state_dict() for seed in (1, 2)]
    torch.save({"encoder_q": states[0], "encoder_k": states[1]}, tmp_path / "w.pth")
    spec = TeacherSpec(
        ARCH, 32, checkpoint=str(tmp_path / "w.pth"), kwargs=TINY, checkpoint_key="encoder_k"
    )
    assert torch.equal(
        build_model(spec, 4, "model.teacher", head=True).head.weight, states[1]["head.weight"]
    )
