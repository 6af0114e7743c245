"""Arguments that ask for more memory than a machine has are refused before anything is built."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kd.errors import UserError
from kd.models import ModelSpec, Preprocess
from kd.models.arguments import architecture_alone, check_arguments, check_memory
from kd.models.build import build_model
from kd.models.hugging_face import HuggingFaceBuilder
from kd.settings import LARGEST_SIDE, ModelSettings

VIT = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        # 100,000 x 100,000 pictures: the model has no argument for the size and would take them
        (
            {"arch": "resnet10t", "kwargs": {"img_size": 100_000}},
            "kwargs.img_size: must be <= 4096",
        ),
        # 16.7 million position embeddings of width 12,288: 768 GiB
        (
            {"arch": VIT, "img_size": 4096, "kwargs": {"patch_size": 1, "embed_dim": 12_288}},
            "its weights take .* GiB with patch_size=1, embed_dim=12288, img_size=4096, the machine",
        ),
    ],
)
def test_a_model_larger_than_the_machine(spec: dict[str, Any], message: str) -> None:
    before = time.monotonic()
    with pytest.raises(UserError, match=f"^model.student.*{message}"):
        build_model(ModelSpec(**spec), 2, "model.student")
    assert time.monotonic() - before < 30


@pytest.mark.parametrize("name", ["depth", "window_size", "num_layers"])
def test_a_file_describes_no_endless_model(name: str) -> None:
    """However many tensors it claims: each layer would be built before they are compared."""
    tensors = {f"t{number}": (0,) for number in range(5000)}
    with pytest.raises(UserError, match=f"{name}: must be <= (1000|64), got 2000"):
        check_arguments({name: 2000}, "x: ", tensors)


def test_an_architecture_inside_another_fetches_nothing_either() -> None:
    inner = {"attn_implementation": "a/b", "auto_map": {}, "dtype": "load", "hidden_size": 8}
    config = {"vision_config": inner, "_attn_implementation": "a", "attn_implementation": "sdpa"}
    assert architecture_alone(config) == {
        "vision_config": {"hidden_size": 8},
        "attn_implementation": "sdpa",
    }


def test_counting_a_models_weights_draws_no_random_numbers() -> None:
    """The same seed gives the same weights with and without arguments that have to be counted."""
    torch.manual_seed(0)
    counted = build_model(ModelSpec(arch=VIT, img_size=224), 2, "model.student")
    torch.manual_seed(0)
    plain = build_model(ModelSpec(arch=VIT), 2, "model.student")
    for one, other in zip(counted.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_every_models_input_has_a_largest_side() -> None:
    """In the settings and where a model's input is made, whoever gives it."""
    with pytest.raises(ValueError, match=f"^img_size must be >= 1 and <= {LARGEST_SIDE}, got "):
        ModelSettings(arch=VIT, img_size=LARGEST_SIDE + 1)
    with pytest.raises(ValueError, match="^img_size must be <= 4096 pixels, got "):
        Preprocess((100_000, 32), [0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize(
    "config", [{"image_size": 50_000}, {"vision_config": {"image_size": [32, 50_000]}}]
)
def test_sides_of_models_inside_a_configuration(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="^FILE: .*image_size: must be <= 4096 pixels, got "):
        check_arguments(config, "FILE: ")


def test_a_transformers_folder_with_a_huge_side(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "vit", "image_size": 50_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError,
        match="^builder.path: config.json: image_size: must be <= 4096 pixels, got 50000$",
    ):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "vit", "num_labels": 10**9}, "config.json: num_labels: must be <= 65536"),
        ({"model_type": "vit", "num_hidden_layers": 10**6}, "num_hidden_layers: must be <= 1000"),
        ({"model_type": "swin", "depths": [999, 999]}, "config.json: depths: must be <= 1000"),
        ({"model_type": "vit", "hidden_size": {}}, "is no model of transformers: "),
        ({"model_type": "lightglue", "trust_remote_code": True}, "model_type must be one of"),
        ({"model_type": ["vit"]}, "model_type must be one of"),
        ([], "config.json holds no mapping"),
    ],
)
def test_a_transformers_folder_is_read_as_data(
    said: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # never called
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=message):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)


def test_a_transformers_model_larger_than_the_machine(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "vit", "image_size": 4096, "patch_size": 1, "hidden_size": 12_288}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"^hf_{tmp_path.name}: its weights take .* GiB"):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)


def test_a_configuration_inside_another_describes_no_endless_model_either() -> None:
    """A SigLIP keeps its layers' number in ``vision_config``; names of classes are no settings."""
    tensors = {f"t{number}": (0,) for number in range(5000)}
    config = {"vision_config": {"num_hidden_layers": 60_000}}
    with pytest.raises(UserError, match="x: vision_config.num_hidden_layers: must be <= 1000, got"):
        check_arguments(config, "x: ", tensors)
    check_arguments({"label2id": {"building blocks": 2000}}, "x: ", tensors)


@pytest.mark.parametrize("name", ["depth_mult", "depth_coefficient", "depth_multiplier"])
def test_a_fraction_counts_as_much_as_a_whole_number(name: str) -> None:
    with pytest.raises(UserError, match=f"x: {name}: must be <= 10, got 200000.5"):
        check_arguments({name: 200_000.5}, "x: ")
    check_arguments({name: 1.4, "rope_theta": 10_000.0}, "x: ")
    with pytest.raises(UserError, match="x: depth: must be <= 1000"):
        check_arguments({"depth": 1e9}, "x: ")


def test_a_model_without_end_is_not_described() -> None:
    """Whatever argument repeats its layers: modules are counted while they are taken up, without weights."""

    def endless() -> torch.nn.Module:
        model = torch.nn.Sequential()
        while True:
            model.append(torch.nn.Identity())

    with pytest.raises(UserError, match="x: it has more than 100000 modules"):
        check_memory(endless, "x", {})
    torch.nn.Sequential(torch.nn.Identity())  # the count has ended


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "sub/pipe.safetensors"])
def test_an_index_names_only_files_of_its_folder(shard: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "vit",
        "num_hidden_layers": 1,
        "hidden_size": 12,
        "num_attention_heads": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": shard}}))
    with pytest.raises(UserError, match=f"{index.name}: must name .*, got '{shard}'"):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)
