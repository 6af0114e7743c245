"""Models of one's own: by a builder's class path, and vision models of transformers."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import kd
from kd.models import StudentSpec, TeacherSpec, build_model, load_checkpoint
from kd.models.own import OwnModel, build_own
from kd.teachers import build_teacher
from tests._files import write_json
from tests._helpers import CLASSES, Command, refuses
from tests._runs import evaluated, run, summary_of

PICTURES = torch.randint(
    0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


class Answer:
    """What a library of one's own may give."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Net(nn.Module):
    """A network that knows nothing of timm or kd."""

    def __init__(self, classes: int, width: int, form: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.BatchNorm2d(width), nn.ReLU())
        self.last, self.form = nn.Linear(width, classes), form

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.last(self.stem(x).mean((2, 3)))
        forms = {
            "tensor": logits,
            "tuple": (logits, x),
            "dict": {"logits": logits},
            "object": Answer(logits),
            "none": None,
        }
        return forms[self.form]


class Bare:
    """A builder without annotations."""

    def build(self, num_classes, img_size):
        return Net(num_classes, 8, "tensor")


class Nets:
    """Builds them."""

    def __init__(self, width: int = 8, form: str = "tensor") -> None:
        self.width, self.form = width, form

    def build(self, num_classes: int, img_size: tuple[int, int] | None) -> nn.Module:
        return Net(num_classes, self.width, self.form)


class Keeper(Nets):
    """Keeps more than its arguments."""

    def __init__(self) -> None:
        self.made = Net(4, 8, "tensor")


OURS = [
    "model.student.builder=tests.models.test_own_models.Nets", "model.student.mean=[0.5,0.5,0.5]",
    "model.student.std=[1,1,1]",
    "model.student.kwargs={}",
]  # fmt: skip


def test_a_builder_of_ones_own_trains_and_comes_back(
    recipe: Path, capsys: pytest.CaptureFixture[str], refusal: Command
) -> None:
    hint = (
        "model.distill_losses.hint={class_path: HintLoss}",
        "model.taps.hint={student: model.stem, teacher: blocks.1}",
    )
    items = [
        "model.student.builder.width=12",
        "model.student.builder.form=object",
        "trainer.max_epochs=1",
        *hint,
    ]
    folder = run(recipe, *OURS, *items)
    assert (
        "model.student: built by Nets, not timm's vit_tiny_patch16_224" in capsys.readouterr().out
    )
    summary = summary_of(folder)
    assert summary["student"]["arch"] == "Nets"
    found = evaluated(folder)
    assert found["student"]["acc1"] == summary["student"]["best_val"]["acc1"]
    with refuses(
        r"built by tests.models.test_own_models.Nets: kd.load_student\(FILE, builder=CLASS\)"
    ):
        kd.load_student(folder / "student.safetensors")
    assert kd.load_student(folder / "student.safetensors", Nets)[2] == list(CLASSES)
    net = Net(4, 12, "tensor")
    net.load_state_dict(
        {k.removeprefix("model."): v for k, v in load_file(folder / "student.safetensors").items()}
    )
    # as the teacher of the next run, whose folder says who builds it
    again = [f"model.teacher={{checkpoint: {folder}, img_size: 32}}", "trainer.max_epochs=1"]
    assert "was built by tests.models.test_own_models.Nets; name it and its arguments" in refusal(
        "train", [f"recipe={recipe}", *again]
    )
    builder = "{class_path: tests.models.test_own_models.Nets, init_args: {width: 12}}"
    again[0] = f"model.teacher={{checkpoint: {folder}, img_size: 32, builder: {builder}}}"
    run(recipe, *again)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "object"])
def test_what_a_model_may_give(form: str) -> None:
    torch.manual_seed(0)
    spec = TeacherSpec(builder=Nets(form=form), img_size=32, mean=[0.0] * 3, std=[1.0] * 3)
    teacher = build_teacher(spec, 4, CLASSES)
    model = teacher.model.model.eval()
    model.form = "tensor"
    torch.testing.assert_close(teacher(PICTURES), model(PICTURES / 255))


def test_gradient_checkpointing_is_the_models_own() -> None:
    net = Net(4, 8, "tensor")
    net.set_grad_checkpointing = switch = mock.Mock()
    OwnModel(net, 4, (32, 32), [], []).set_grad_checkpointing(False)
    switch.assert_called_once_with(False)


# -- transformers ------------------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
HF: dict[str, dict[str, Any]] = {
    "vit": {**SMALL, "intermediate_size": 64},
    "dinov2_with_registers": {**SMALL, "num_register_tokens": 2},
    "siglip": {"vision_config": {**SMALL, "intermediate_size": 64}, "text_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99,
        "bos_token_id": 1, "eos_token_id": 2,
    }},
    "swin": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    pytest.importorskip("transformers")
    import kd.models.hugging_face

    return kd.models.hugging_face


def saved(
    kind: str, folder: Path, labels: tuple[str, ...] = ("dates", "cake", "bread", "apple")
) -> Any:
    """A small model of random weights, as transformers saves it; it knows its classes' names."""
    from transformers import AutoConfig, AutoModelForImageClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **HF[kind])
    config.id2label, config.label2id = (
        dict(enumerate(labels)),
        {name: i for i, name in enumerate(labels)},
    )
    model = AutoModelForImageClassification.from_config(config).eval()
    model.save_pretrained(folder)
    pixels = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.3, 0.2, 0.1],
    }
    write_json(folder / "preprocessor_config.json", pixels)
    return model


def as_input(pictures: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]))
    return (pictures / 255 - mean) / std


@pytest.mark.parametrize("kind", list(HF))
def test_a_folder_of_transformers_teaches_under_its_own_class_names(
    kind: str, hugging_face: Any, tmp_path: Path
) -> None:
    model = saved(kind, tmp_path)
    teacher = build_teacher(
        TeacherSpec(builder=hugging_face.HuggingFaceBuilder(str(tmp_path))), 4, CLASSES
    )
    torch.testing.assert_close(teacher(PICTURES), model(as_input(PICTURES)).logits[:, [3, 2, 1, 0]])
    larger = build_teacher(
        TeacherSpec(builder=hugging_face.HuggingFaceBuilder(str(tmp_path)), img_size=48), 4, CLASSES
    )
    assert larger(PICTURES).shape == (4, 4)
    # without its classifier
    headless = build_teacher(
        TeacherSpec(builder=hugging_face.HuggingFaceBuilder(str(tmp_path)), head=False), 4
    )
    assert headless(PICTURES).shape == (4, 32)


def test_the_size_of_an_inner_vision_model_counts(hugging_face: Any, tmp_path: Path) -> None:
    saved("siglip", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    for num_classes in (0, 4):
        model = hugging_face.HuggingFaceBuilder(str(tmp_path)).build(num_classes, None)
        assert model.pretrained_cfg["input_size"] == (3, 32, 32)
        assert model(torch.zeros(1, 3, 32, 32)).shape[0] == 1


def test_mistakes_with_transformers(hugging_face: Any, tmp_path: Path) -> None:
    make = hugging_face.HuggingFaceBuilder
    saved("vit", tmp_path / "five", ("a", "b", "c", "d", "e"))
    with refuses(r"model.teacher.class_map: the teacher has no class 'apple'"):
        build_teacher(TeacherSpec(builder=make(str(tmp_path / "five"))), 4, CLASSES)
    with refuses(r"model.teacher.builder: hf_five names 5 classes, the data has 4"):
        build_model(
            TeacherSpec(builder=make(str(tmp_path / "five"))), 4, "model.teacher", head=True
        )
    unknown = "builder.path: .*nowhere is no model of transformers"
    with refuses(rf"^model.teacher.{unknown}"):
        build_teacher(TeacherSpec(builder=make(str(tmp_path / "nowhere"))), 4, CLASSES)
    with refuses(r"^model.student.builder: hf_five teaches alone; a student"):
        build_model(StudentSpec(builder=make(str(tmp_path / "five"))), 5, "model.student")
    from transformers import AutoModel, ViTConfig

    AutoModel.from_config(ViTConfig(**HF["vit"])).save_pretrained(tmp_path / "headless")
    with refuses(r"hf_headless has no classifier \(model.teacher.head=false: its features teach\)"):
        build_teacher(TeacherSpec(builder=make(str(tmp_path / "headless"))), 4, CLASSES)
    (tmp_path / "headless" / "model.safetensors").unlink()
    timm_file = timm.create_model("test_vit").state_dict()
    torch.save(timm_file, tmp_path / "headless" / "pytorch_model.bin")
    with refuses(r"does not fit ViTModel: .* missing"):
        build_teacher(TeacherSpec(builder=make(str(tmp_path / "headless")), head=False), 4, CLASSES)


def test_weights_that_were_trained_elsewhere_fit_a_builders_module(tmp_path: Path) -> None:
    trained = Net(3, 8, "tensor")
    torch.save({"epoch": 240, "model": trained.state_dict()}, tmp_path / "plain.pth")
    built = build_own(Bare(), 3, (32, 32), (0.5,) * 3, (0.5,) * 3, "model.teacher")
    load_checkpoint(built, tmp_path / "plain.pth", "model.teacher.checkpoint", head=True)
    picture = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(built.eval()(picture), trained.eval()(picture), rtol=0, atol=0)
