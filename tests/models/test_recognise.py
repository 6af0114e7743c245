"""An architecture found by the names and shapes of a file's tensors, or by what a trainer has saved beside them."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf

from kd.cli import train_main
from kd.models import StudentSpec, TeacherSpec, build_model
from kd.models.recognise import FILE, meta_model, recognise
from kd.models.weights import About, about
from kd.run import assemble
from kd.run.run import settings_of
from kd.run.train_first import what_files_say
from scripts.timm_tensors import missing
from tests._files import read_json
from tests._helpers import ARCH, TINY, Command, draw_folder, refuses, tiny_vit
from tests._hub import hub_with
from tests._runs import summary_of

TEN = {
    "vit_tiny_patch16_224": 64,
    "vit_small_patch16_224": 64,
    "vit_base_patch32_224": 64,
    "swin_tiny_patch4_window7_224": None,
    "convnext_atto": None,
    "resnet18": None,
    "efficientnet_b0": None,
    "mobilenetv3_small_050": None,
    "eva02_tiny_patch14_224": 56,
    "vit_small_patch16_dinov3": None,
}
"""Architectures of ten families, each with the side of its input, None: its own."""


def test_the_table_is_of_this_timm() -> None:
    table = read_json(FILE)
    if table["timm"] != timm.__version__:
        pytest.skip(f"the table is of timm {table['timm']}")
    assert missing(step=97) == []
    names = [name for names in table["digests"].values() for name in names]
    of_timm = [
        n for n in timm.list_models() if timm.model_entrypoint(n).__module__.startswith("timm.")
    ]
    assert len(names) == len(set(names)) == len(of_timm)  # other tests register models of their own
    assert FILE.stat().st_size < 100_000


def saved_in_three_ways(arch: str, side: int | None, folder: Path) -> list[Path]:
    """A state dict, the checkpoint of timm's trainer, and timm's folder; their weights are zeros of a byte each."""
    kwargs = {"img_size": side} if side else {}
    with torch.device("meta"):
        model = timm.create_model(arch, num_classes=4, **kwargs)
    state = {}
    for name, value in model.state_dict().items():
        state[name] = torch.zeros(value.shape, dtype=torch.uint8)
    torch.save(state, folder / "state.pth")
    args = argparse.Namespace(model=arch, img_size=side, mean=None, model_kwargs={}, lr=0.1)
    checkpoint = {"epoch": 3, "arch": arch, "args": args, "state_dict": state}
    torch.save(checkpoint, folder / "model_best.pth.tar")
    save_config_for_hf(model, str(folder / "config.json"), model_args=kwargs)
    save_file(state, folder / "model.safetensors")
    return [folder / "state.pth", folder / "model_best.pth.tar", folder]


@pytest.mark.parametrize("arch", TEN)
def test_ten_families_in_three_ways(arch: str, tmp_path: Path) -> None:
    side = TEN[arch]
    for place in saved_in_three_ways(arch, side, tmp_path):
        said = about(str(place))
        assert said.arch == arch, place
        if side:
            assert said.img_size == (side, side), place


def test_dinov2_as_its_authors_save_it() -> None:
    with torch.device("meta"):
        state = timm.create_model("vit_base_patch14_dinov2", num_classes=0).state_dict()
    found = recognise({**state, "mask_token": torch.empty(1, 768)})
    assert found is not None
    assert (found.arch, found.img_size) == ("vit_base_patch14_dinov2", (518, 518))


def test_a_model_below_a_prefix_beside_other_tensors() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=4).state_dict()
        other = timm.create_model("resnet18").state_dict()
    beside = {f"net.backbone.{name}": value for name, value in model.items()}
    loose = {**beside, "scale": torch.zeros(1), "net.fc.weight": torch.zeros(4, 192)}
    found = recognise(loose)
    assert found is not None
    assert (found.arch, found.img_size) == ("vit_tiny_patch16_224", (224, 224))
    assert "deit_tiny_patch16_224" in found.others
    assert recognise({**loose, **{f"b.{name}": value for name, value in other.items()}}) is None
    assert recognise(tiny_vit().state_dict()) is None  # of no architecture by its name alone


@pytest.mark.parametrize(
    "args",
    [
        argparse.Namespace(model="resnet18"),  # another model's
        argparse.Namespace(model=["vit"], img_size="large"),
        {"model": ARCH, "model_kwargs": {"depth": 10**9, "embed_dim": 10**9}},
        {"model": ARCH, "model_kwargs": {"pretrained_cfg": {"url": "https://example.com"}}},
        "vit",
    ],
)
def test_what_does_not_describe_the_tensors_is_passed_over(args: object, tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(
        {"state_dict": tiny_vit().state_dict(), "arch": "visiontransformer", "args": args}, file
    )
    assert about(str(file)) == About()


def test_arguments_of_a_trainer_are_taken(tmp_path: Path) -> None:
    """They describe what no architecture's name alone does."""
    file = tmp_path / "w.pth.tar"
    args = argparse.Namespace(
        model=ARCH, model_kwargs=TINY, input_size=[3, 32, 32], mean=[0.1, 0.2, 0.3], std=None
    )
    torch.save({"state_dict": tiny_vit().state_dict(), "args": args, "arch": ARCH}, file)
    assert about(str(file)) == About(ARCH, TINY, (32, 32), [0.1, 0.2, 0.3])


# -- settings and messages --------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A state dict of a whole small model of timm's, trained at 32 px."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32)
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    return tmp_path / "teacher.pth"


def test_a_named_architecture_stays_where_it_has_the_tensors(bare: Path) -> None:
    named = [
        {"arch": "deit_tiny_patch16_224", "kwargs": {}},
        {"arch": "vit_small_patch16_224", "kwargs": {"embed_dim": 192, "num_heads": 3}},
    ]
    for settings in named:
        teacher = {**settings, "checkpoint": str(bare), "builder": None}
        model = {"teacher": teacher, "student": {"inherit": "auto"}}
        assert what_files_say({"model": model}, []) == {}


@pytest.mark.parametrize("key", ["model.teacher", "model.teachers.one"])
def test_typed_settings_of_what_follows_a_teacher_stay(key: str, bare: Path) -> None:
    words = [f"{key}.checkpoint={bare}"]
    if "teachers" in key:
        words += [
            "model.teacher=null",
            f"{key}.arch=vit_small_patch14_dinov2",
            f"{key}.img_size=112",
        ]
    config = settings_of(["recipe=distill", "data.source.root=DIR", *words])
    follows = {
        "data.img_size": 32,
        "model.student.img_size": 32,
        "model.student.arch": "auto",
        "model.student.kwargs": {},
    }
    of_teacher = {f"{key}.arch": "vit_tiny_patch16_224", f"{key}.img_size": 32, f"{key}.kwargs": {}}
    assert what_files_say(config, words[:1]) == {**of_teacher, **follows}
    typed = ["data.img_size=112", "model.student.arch=vit_tiny_patch16_224"]
    of_size = {"model.student.img_size": 32}
    assert what_files_say(config, [words[0], *typed]) == {**of_teacher, **of_size}


def test_a_typed_architecture_that_has_other_tensors_names_the_files(bare: Path) -> None:
    spec = TeacherSpec("convnext_atto", checkpoint=str(bare))
    with refuses(r"; these are vit_tiny_patch16_224's: model.teacher.arch=vit_tiny_patch16_224$"):
        build_model(spec, 4, "model.teacher", head=True)


def test_two_words_are_enough(bare: Path, tmp_path: Path, prints: Command) -> None:
    """The recipe's teacher, sizes and student give way to a file's."""
    pictures = draw_folder(tmp_path / "pictures")
    own = ["config=debug", "preflight=off", f"runs_dir={tmp_path / 'runs'}"]
    words = [f"data.source.root={pictures}", f"model.teacher.checkpoint={bare}"]
    said = prints("train", ["recipe=distill", *words, *own])
    assert (
        f"model.teacher: vit_tiny_patch16_224 at 32 px, as the tensors in {bare} show; with equal tensors: "
        "vit_tiny_patch16_384, deit_tiny_patch16_224 (model.teacher.arch=NAME)"
    ) in said
    assert (
        "model.student.arch=auto model.student.kwargs={} data.img_size=32 model.student.img_size=32, "
        "as the teacher is vit_tiny_patch16_224"
    ) in said
    summary = summary_of(tmp_path / "runs" / "distill" / "000")
    assert summary["student"]["start"] == "inherited"


def test_two_words_for_a_family_that_gives_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The student begins with the hub's weights."""
    pictures = draw_folder(tmp_path / "pictures")
    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=4)
    torch.save({"module": model.state_dict()}, tmp_path / "teacher.pth")
    own = ["config=debug", "preflight=off", "data.batch_size=4", "trainer.limit_train_batches=1"]
    own += ["trainer.limit_val_batches=1", "data.img_size=64", f"runs_dir={tmp_path / 'runs'}"]
    words = [f"data.source.root={pictures}", f"model.teacher.checkpoint={tmp_path / 'teacher.pth'}"]
    weights = timm.create_model("resnet18").state_dict()
    with hub_with("resnet18.a1_in1k", weights, tmp_path / "hub", monkeypatch):
        assert train_main(["recipe=distill", *words, *own]) == 0
    assert (
        "model.student: resnet18, as no student can start from the layers of test_efficientnet; it starts from "
        "timm's pre-trained weights"
    ) in capsys.readouterr().out
    summary = summary_of(tmp_path / "runs" / "distill" / "000")
    assert summary["student"]["start"] == "pre-trained"


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ("test_efficientnet", "resnet18"),
        ("swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"),
        ("", "vit_tiny_patch16_224"),  # answers alone
    ],
)
def test_a_student_unlike_its_teacher_takes_timms_weights_where_they_can_be_had(
    teacher: str, student: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [True, False]

    def is_downloadable(arch: str) -> bool:
        """The hub is there, then it is not."""
        assert arch == student
        return answers.pop(0)

    monkeypatch.setattr(assemble, "is_downloadable", is_downloadable)
    model = meta_model(teacher, {})
    parent = SimpleNamespace(closed="" if model else "is stored answers", model=model, arch=teacher)
    for pretrained, begins in ((True, "timm's"), (False, "random weights, as timm's can't be")):
        spec = assemble._unrelated_student(StudentSpec("auto", img_size=64), parent)
        assert (spec.arch, spec.img_size, spec.pretrained) == (student, 64, pretrained)
        said = capsys.readouterr().out
        no_start = f"{student}, as no student can start from the layers of {teacher}"
        assert f"{no_start}; it starts from {begins}" in said
