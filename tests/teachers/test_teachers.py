"""Several teachers, teachers of other classes, teachers without a head."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kd.data.info import DataInfo
from kd.losses import HintLoss, KDLoss, kd_loss
from kd.models import Preprocess, StudentSpec, TeacherSpec
from kd.run.assemble import assemble
from kd.settings import TapSpec
from kd.teachers import Ensemble, FrozenTeacher, build_teacher
from kd.teachers.answer import ALL
from tests._helpers import (
    ARCH,
    CLASSES,
    TINY,
    Command,
    refuses,
    save_teacher,
    tiny_vit,
    write_recipe,
)
from tests._runs import evaluated, run, run_folders, summary_of

INFO = DataInfo(list(CLASSES), 48, 16)
PICTURES = torch.randint(
    0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
BATCH = {"image": PICTURES, "target": torch.arange(4), "index": torch.arange(4)}
STUDENT = StudentSpec(ARCH, 32, kwargs=TINY)


def spec(file: Path, size: int = 32, **kwargs: object) -> TeacherSpec:
    return TeacherSpec(ARCH, size, checkpoint=str(file), kwargs=TINY, **kwargs)


@pytest.fixture()
def two(tmp_path: Path) -> dict[str, TeacherSpec]:
    """Two teachers, of other weights and another input size."""
    a, b = (
        save_teacher(tmp_path / "a.safetensors", seed=1),
        save_teacher(tmp_path / "b.safetensors", seed=2),
    )
    return {"a": spec(a, weight=3.0), "b": spec(b, 48)}


# -- several ---------------------------------------------------------------------------------------------------------


def test_several_teachers_answer_with_their_weighted_mean(two: dict[str, TeacherSpec]) -> None:
    losses = {"kd": KDLoss(2.0), "kd_b": KDLoss(2.0), "hint": HintLoss()}
    module = assemble(
        INFO, STUDENT, teachers=two, distill_losses=losses, teacher_of={"kd_b": "b", "hint": "b"},
        taps={"hint": TapSpec("blocks.0", "blocks.1")},
    )  # fmt: skip
    alone = {name: build_teacher(own, 4)(PICTURES) for name, own in two.items()}
    answer = module.teacher.answer(BATCH, module.student.objective.wanted)
    answers = answer.logits
    torch.testing.assert_close(answers["b"], alone["b"])
    torch.testing.assert_close(answers[ALL], 0.75 * alone["a"] + 0.25 * alone["b"])
    logits = module.student.logits(PICTURES)
    terms = module.distillation.learn(BATCH, answer).named
    torch.testing.assert_close(terms["kd_loss"], kd_loss(logits, answers[ALL], 2.0).detach())
    torch.testing.assert_close(terms["kd_b_loss"], kd_loss(logits, alone["b"], 2.0).detach())
    assert module.student.objective.losses["hint"].projection.size == (
        6,
        6,
    )  # b's patches, at its own size


def test_a_feature_loss_must_name_one_of_several(two: dict[str, TeacherSpec]) -> None:
    with refuses(r"model.teacher_of.hint: a feature loss reads one teacher.*\(a, b\)"):
        assemble(
            INFO,
            STUDENT,
            teachers=two,
            distill_losses={"hint": HintLoss()},
            taps={"hint": TapSpec("norm", "norm")},
        )


def test_an_ensembles_preflight_measures_each_and_all(
    tmp_path: Path,
    pictures: Path,
    two: dict[str, TeacherSpec],
    prints: Command,
    refusal,
) -> None:
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, Path(two["a"].checkpoint))
    members = {
        n: {"arch": ARCH, "img_size": 32, "kwargs": TINY, "checkpoint": s.checkpoint}
        for n, s in two.items()
    }
    items = ["model.teacher=null", f"model.teachers={json.dumps(members)}"]
    out = prints("train", [f"recipe={recipe}", *items, "trainer.max_epochs=1"])
    for line in (
        f"preflight: teacher ensemble {ARCH} + {ARCH} is right on",
        f"teacher a ({ARCH}) is right on",
    ):
        assert line in out
    (folder,) = run_folders(recipe)
    summary = summary_of(folder)
    assert summary["teacher"]["params"] == sum(
        m["params"] for m in summary["teacher"]["members"].values()
    )
    assert evaluated(folder)["teacher"]["acc1"] == summary["teacher"]["val"]["acc1"]


# -- classes ---------------------------------------------------------------------------------------------------------


def named_teacher(path: Path, names: list[str]) -> Path:
    save_file(tiny_vit(len(names), seed=5).state_dict(), path, {"classes": json.dumps(names)})
    return path


def test_a_teacher_of_more_classes_in_another_order(tmp_path: Path) -> None:
    names = ["dates", "zebra", "bread", "apple", "cake"]
    frozen = build_teacher(spec(named_teacher(tmp_path / "more.safetensors", names)), 4, CLASSES)
    whole = build_teacher(spec(tmp_path / "more.safetensors"), 5)(PICTURES)
    torch.testing.assert_close(frozen(PICTURES), whole[:, [3, 2, 4, 0]])
    weight, bias = frozen.classifier()
    assert weight.shape == (4, 32)
    assert bias.shape == (4,)


def test_a_name_that_stands_twice_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "plain.safetensors", 3)
    twice = spec(file, classes=["crane", "dog", "crane"])
    with refuses("model.teacher.classes: must name 'crane' once, got it 2 times in 3 names"):
        build_teacher(twice, 2, ["crane", "dog"])
    assert build_teacher(twice, 1, ["dog"])(PICTURES).shape == (len(PICTURES), 1)


def test_names_from_a_file_and_a_map(tmp_path: Path) -> None:
    file = save_teacher(tmp_path / "plain.safetensors", 5)
    (tmp_path / "names.txt").write_text("\ufeffpomme\nbread\ncake\ndates\nzebra\n")
    mapped = spec(file, classes=str(tmp_path / "names.txt"), class_map={"apple": "pomme"})
    whole = build_teacher(spec(file), 5)(PICTURES)
    torch.testing.assert_close(build_teacher(mapped, 4, CLASSES)(PICTURES), whole[:, :4])


def test_a_pretrained_imagenet_model_knows_its_classes() -> None:
    """The names alone: the weights would be downloaded."""
    from kd.teachers.build import class_columns as _columns

    names, columns = _columns(
        TeacherSpec("vit_tiny_patch16_224", pretrained=True), ["n01443537", "n01440764"], "k"
    )
    assert len(names) == 1000
    assert columns.tolist() == [1, 0]


# -- without a head, and shared ----------------------------------------------------------------------------------------


def test_a_teacher_without_a_head_teaches_by_its_features(tmp_path: Path, pictures: Path) -> None:
    file = save_teacher(tmp_path / "backbone.safetensors", 0)
    recipe = write_recipe(
        tmp_path / "tiny.yaml",
        pictures,
        file,
        model__distill_losses={"rkd": {"class_path": "kd.losses.RKDLoss"}},
    )
    run(recipe, "model.teacher.head=false", "trainer.max_epochs=1")
    (folder,) = run_folders(recipe)
    assert "agreement" not in summary_of(folder)["student"]["val"]
    both = {"a": spec(save_teacher(tmp_path / "a.safetensors")), "b": spec(file, head=False)}
    kd = partial(assemble, INFO, STUDENT, teachers=both, distill_losses={"kd": KDLoss()})
    kd(teacher_of={"kd": "a"})  # which has one
    with refuses("KDLoss needs a teacher with a classifier, and model.teachers.b.head=false"):
        kd()


def test_a_weight_without_a_mean_is_refused() -> None:
    prepare = Preprocess(32, (0.5,) * 3, (0.5,) * 3)
    spec_ = TeacherSpec("x", head=False, weight=2.0)
    heavy = FrozenTeacher(torch.nn.Linear(2, 2), prepare, spec_, key="model.teachers.a")
    with refuses("model.teachers.a.weight: counts in the mean of logits"):
        Ensemble({"a": heavy})


def test_a_module_takes_a_teacher_that_is_built(teacher: Path) -> None:
    first = assemble(INFO, STUDENT, spec(teacher))
    second = assemble(INFO, STUDENT, spec(teacher), built=first.teacher)
    assert first.teacher is second.teacher
