"""Teachers as people have them: weights of transformers and torchvision, wrapped by trainers, named as on the hub."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from kd.models import ModelSpec, TeacherSpec, build_model
from kd.models.foreign import foreign_models
from kd.models.recognise import recognise
from kd.teachers import build_teacher
from tests._files import read_yaml, write_yaml
from tests._helpers import ARCH, CLASSES, TINY, Command, refuses, save_teacher, tiny_vit
from tests._runs import run

transformers = pytest.importorskip("transformers")
NORMALISED = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
OURS = {**TINY, "mlp_ratio": 2}


@functools.cache
def hugging_face() -> nn.Module:
    torch.manual_seed(0)
    names = {
        "id2label": dict(enumerate(CLASSES)),
        "label2id": {name: i for i, name in enumerate(CLASSES)},
    }
    config = transformers.ViTConfig(**SIZES, intermediate_size=64, **names)
    return shaken(transformers.ViTForImageClassification(config))


@functools.cache
def torch_vision() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(
        32, 8, 2, 2, 32, 64, num_classes=4, norm_layer=nn.LayerNorm
    )
    return shaken(model)


def shaken(model: nn.Module) -> nn.Module:
    """Random weights everywhere: zeros and ones would hide a wrong name."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    return model.eval()


def logits(output: object) -> Tensor:
    return getattr(output, "logits", output)  # type: ignore[return-value]


@pytest.mark.parametrize("make", [hugging_face, torch_vision])
@pytest.mark.parametrize("wrapped", ["", "model.", "net.encoder."])
def test_a_vits_weights_give_the_same_logits(make, wrapped: str, tmp_path: Path, capsys) -> None:
    theirs = make()
    torch.save(
        {"state_dict": {f"{wrapped}{k}": v for k, v in theirs.state_dict().items()}},
        tmp_path / "w.pth",
    )
    spec = TeacherSpec(ARCH, 32, checkpoint=str(tmp_path / "w.pth"), kwargs=OURS)
    ours = build_model(spec, 4, "model.teacher", head=True).eval()
    with torch.no_grad():
        want, got = logits(theirs(NORMALISED)), ours(NORMALISED)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (
        f"names of {make.__name__.replace('hugging_face', 'transformers').replace('_', '')} brought into timm's"
        in (capsys.readouterr().out)
    )


def test_a_folder_of_transformers_brings_normalisation_and_class_names(tmp_path: Path) -> None:
    hugging_face().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.2, 0.1]}'
    )
    turned = tuple(reversed(CLASSES))
    teacher = build_teacher(TeacherSpec(ARCH, 32, checkpoint=str(tmp_path), kwargs=OURS), 4, turned)
    pictures = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    pixels = (pictures / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor(
        [0.3, 0.2, 0.1]
    )[:, None, None]
    with torch.no_grad():
        want = logits(hugging_face()(pixels)).flip(1)
    torch.testing.assert_close(teacher(pictures), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "patch", "image", "arch"),
    [
        ("ViT", 16, 224, "vit_small_patch16_224"),
        ("Dinov2", 14, 518, "vit_small_patch14_dinov2"),
        ("Dinov2", 14, 224, "vit_small_patch14_dinov2"),
        ("Dinov2WithRegisters", 14, 518, "vit_small_patch14_reg4_dinov2"),
    ],
)
def test_a_vit_that_timm_has_a_name_for(kind: str, patch: int, image: int, arch: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        patch_size=patch,
        image_size=image,
    )
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}Model")(config)
    found = recognise(theirs.state_dict())
    assert found is not None
    assert (found.arch, found.img_size) == (arch, (image, image))


def test_another_model_of_transformers_is_told_the_keys_that_load_it(
    recipe: Path, tmp_path: Path, refusal: Command
) -> None:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], num_labels=4
    )
    transformers.ConvNextForImageClassification(config).save_pretrained(tmp_path)
    line = refusal(
        "train", [f"recipe={recipe}", f"model.teacher.checkpoint={tmp_path}"]
    ).splitlines()[-1]
    assert (
        f"model.teacher.checkpoint: {tmp_path} is a model of transformers, not timm's; in its place: "
        in line
    )
    keys = line.partition("in its place: ")[2].split()
    assert keys == [
        "model.teacher.builder=kd.models.hugging_face.HuggingFaceBuilder",
        f"model.teacher.builder.path={tmp_path}",
    ]
    run(
        recipe,
        *keys,
        "model.teacher.checkpoint=null",
        "model.teacher.img_size=32",
        "trainer.max_epochs=1",
    )


def test_other_models_of_torchvision_are_told_the_key(tmp_path: Path) -> None:
    torch.save(torchvision.models.efficientnet_b0(num_classes=4).state_dict(), tmp_path / "w.pth")
    spec = TeacherSpec("efficientnet_b0", checkpoint=str(tmp_path / "w.pth"))
    with refuses(r"does not fit: .*: model.teacher.arch; a model of .*: model.teacher.builder"):
        build_model(spec, 4, "model.teacher", head=True)


def test_weights_of_timm_keep_their_names() -> None:
    assert not list(foreign_models(tiny_vit().state_dict()))


# -- names and classes --------


def test_names_of_the_hub() -> None:
    for name in ("timm/vit_small_patch14_dinov2.lvd142m", "hf_hub:timm/vit_small_patch14_dinov2.lvd142m",
                 "hf-hub:timm/vit_small_patch14_dinov2.lvd142m"):  # fmt: skip
        assert ModelSpec(name).arch == "vit_small_patch14_dinov2.lvd142m"
        with refuses(rf"not found; a model of the hub: model.teacher={name}$"):
            build_teacher(TeacherSpec(ARCH, checkpoint=name), 4)
    with refuses(r"model.teacher.arch: 'hf_hub:me/net' .* model.teacher=hf_hub:me/net loads"):
        build_teacher(TeacherSpec("hf_hub:me/net"), 4)


def test_other_numbers_of_classes_name_the_key(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "w.safetensors", 81)
    with refuses(r"names 81 classes, the data has 4; model.teacher.classes=FILE \(one"):
        build_teacher(TeacherSpec(ARCH, 32, checkpoint=str(file), kwargs=TINY), 4, CLASSES)


# -- an architecture that is not the file's --------


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    """Weights that name their architecture."""
    kwargs = {**TINY, "depth": 1, "num_classes": 4}
    said = {"arch": ARCH, "kwargs": json.dumps(kwargs), "img_size": "32"}
    save_file(tiny_vit(depth=1).state_dict(), tmp_path / "spoken.safetensors", said)
    return tmp_path / "spoken.safetensors"


def test_a_recipes_architecture_gives_way_and_the_run_records_the_files(
    recipe: Path, speaking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.read_text()
    content = yaml.safe_load(text)
    content["model"]["teacher"] |= {"arch": "resnet18", "img_size": 64, "kwargs": {}}
    write_yaml(recipe, content)
    folder = run(recipe, f"model.teacher.checkpoint={speaking}", "trainer.max_epochs=1")
    recipe.write_text(text)
    told = f"model.teacher: {ARCH} at 32 px, as {speaking} says, not the settings' resnet18"
    assert capsys.readouterr().out.count(told) == 1
    used = read_yaml(folder / "config.yaml")["model"]["teacher"]
    assert (used["arch"], used["img_size"], used["kwargs"]) == (ARCH, 32, {**TINY, "depth": 1})
