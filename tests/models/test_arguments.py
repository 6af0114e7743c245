"""Arguments that ask for more memory than a machine has are refused before anything is built."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kd.models import ModelSpec, Preprocess
from kd.models.arguments import architecture_alone, check_arguments, check_memory
from kd.models.build import build_model
from kd.models.hugging_face import HuggingFaceBuilder
from kd.settings import LARGEST_SIDE, ModelSettings
from tests._files import write_json
from tests._helpers import refuses

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
    with refuses(f"^model.student.*{message}"):
        build_model(ModelSpec(**spec), 2, "model.student")
    assert time.monotonic() - before < 30


@pytest.mark.parametrize(("arguments", "message"), [
    *(({name: 2000}, f"{name}: must be <= (1000|64), got 2000") for name in ("depth", "window_size", "num_layers")),
    ({"depth": 1e9}, "depth: must be <= 1000"),
    # a fraction counts as much as a whole number
    *(({f"depth_{name}": 200_000.5}, f"depth_{name}: must be <= 10, got 200000.5")
      for name in ("mult", "coefficient", "multiplier")),
    # a SigLIP keeps its layers' number in vision_config
    ({"vision_config": {"num_hidden_layers": 60_000}}, "vision_config.num_hidden_layers: must be <= 1000, got"),
    ({"image_size": 50_000}, "image_size: must be <= 4096 pixels, got "),
    ({"vision_config": {"image_size": [32, 50_000]}}, "vision_config.image_size: must be <= 4096 pixels, got "),
])  # fmt: skip
def test_a_file_describes_no_endless_model(arguments: dict[str, Any], message: str) -> None:
    """However many tensors it claims: each layer would be built before they are compared."""
    tensors = {f"t{number}": (0,) for number in range(5000)}
    with refuses(f"^FILE: {message}"):
        check_arguments(arguments, "FILE: ", tensors)


def test_fractions_and_names_of_classes_are_no_counts_of_layers() -> None:
    arguments = {"depth_mult": 1.4, "rope_theta": 10_000.0, "label2id": {"building blocks": 2000}}
    check_arguments(arguments, "FILE: ")


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
    ("said", "message"),
    [
        ({"model_type": "vit", "num_labels": 10**9}, "config.json: num_labels: must be <= 65536"),
        ({"model_type": "vit", "num_hidden_layers": 10**6}, "num_hidden_layers: must be <= 1000"),
        ({"model_type": "swin", "depths": [999, 999]}, "config.json: depths: must be <= 1000"),
        ({"model_type": "vit", "hidden_size": {}}, "is no model of transformers: "),
        ({"model_type": "lightglue", "trust_remote_code": True}, "model_type must be one of"),
        ({"model_type": ["vit"]}, "model_type must be one of"),
        ([], "config.json holds no mapping"),
        (
            {"model_type": "vit", "image_size": 50_000},
            "^builder.path: config.json: image_size: must be <= 4096 pixels, got 50000$",
        ),
        (
            {"model_type": "vit", "image_size": 4096, "patch_size": 1, "hidden_size": 12_288},
            "^hf_.*: its weights take .* GiB",
        ),
    ],
)
def test_a_transformers_folder_is_read_as_data(
    said: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # never called
    write_json(tmp_path / "config.json", said)
    with refuses(message):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)


def test_a_model_without_end_is_not_described() -> None:
    """Whatever argument repeats its layers: modules are counted while they are taken up, without weights."""

    def endless() -> torch.nn.Module:
        model = torch.nn.Sequential()
        while True:
            model.append(torch.nn.Identity())

    with refuses("x: it has more than 100000 modules"):
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
    write_json(tmp_path / "config.json", config)
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, {"metadata": {}, "weight_map": {"x": shard}})
    with refuses(f"{index.name}: must be a plain name .*, got '{shard}'"):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)
