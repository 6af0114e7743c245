"""``kd-eval RUN pays=DIR``: what a distilled backbone is worth, measured on real runs of tiny models."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from kd.cli import main
from kd.models import Preprocess
from kd.report.facts import Facts
from kd.report.records import read_run
from kd.report.sections import _results
from kd.report.tables import Table, results_of
from kd.ship.export.student import load_student, untrained_student
from kd.storage.of_weights import write_of_weights
from kd.storage.weights_files import read_metadata
from kd.tasks.features import half_of_each_class, ridge_outcomes
from tests._files import read_json
from tests._helpers import ARCH, TINY, Command, other_weights, save_teacher, write_recipe
from tests._hub import hub_with
from tests._runs import student_of

CNN = "resnet10t"
NARROW = {"channels": [8, 16, 32, 64]}
TAGGED = "resnet10t.c3_in1k"
"""The weights of it that timm takes from the hub."""
LEVELS = ("maps@stride16", "maps@stride32")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A finished run of a CNN that learned a teacher's maps, without labels."""
    root = tmp_path_factory.mktemp("pays")
    weights = save_teacher(root / "dino.safetensors", seed=1, img_size=64)
    taps = {}
    losses = {}
    for layer in LEVELS:
        name = layer.removeprefix("maps@")
        taps[name] = {"student": layer, "teacher": "maps"}
        losses[name] = {"class_path": "kd.losses.RADIOLoss", "init_args": {"standardize": "phi_s"}}
    recipe = write_recipe(
        root / "tiny.yaml",
        pictures,
        None,
        data__img_size=64,
        data__crop_ratio=1.0,
        data__source={"class_path": "kd.data.sources.Pictures", "init_args": {"root": str(pictures)}},
        model__teachers={"dino": {"arch": ARCH, "img_size": 64, "kwargs": TINY, "checkpoint": str(weights)}},
        model__student={"arch": CNN, "img_size": 64, "head": False, "kwargs": NARROW},
        model__task_loss_weight=0.0,
        model__distill_losses=losses,
        model__taps=taps,
        model__teacher_of=dict.fromkeys(losses, "dino"),
    )  # fmt: skip
    assert main("train", [f"recipe={recipe}", "trainer.max_epochs=1"]) == 0
    return root / "runs" / "tiny" / "000"


@pytest.fixture(scope="module")
def pale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder of 4 classes that only a slight tint tells apart, below the noise of a picture."""
    root = tmp_path_factory.mktemp("pale")
    rng = np.random.RandomState(1)
    tints = np.array([[14, 0, 0], [0, 14, 0], [0, 0, 14], [0, 0, 0]])
    for split, count in (("train", 12), ("val", 12)):
        for name, tint in zip("abcd", tints, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                light = rng.uniform(100, 150) + rng.normal(0, 5, 3)
                pixels = light + tint + rng.normal(0, 30, (64, 64, 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / f"{number:02d}.png")
    return root


@pytest.fixture()
def run(distilled: Path, tmp_path: Path) -> Path:
    """A copy of the run as training left it."""
    shutil.copytree(distilled, tmp_path / "distilled")
    return tmp_path / "distilled"


def measured(run: Path) -> dict:
    return read_json(run / "eval_pays.json")["probe"]


def files_of(folder: Path, split: str) -> tuple[list[Path], Tensor]:
    """Pictures of an ImageFolder's split in its order, and their class ids."""
    files = []
    labels = []
    for class_id, of_class in enumerate(sorted((folder / split).iterdir())):
        for file in sorted(of_class.iterdir()):
            files.append(file)
            labels.append(class_id)
    return files, torch.tensor(labels)


def pooled_by_timm(model: nn.Module, prepare: Preprocess, files: list[Path]) -> Tensor:
    """The maps of strides 16 and 32 by timm's own way to them, averaged over positions; pictures of 64 px."""
    pictures = [pil_to_tensor(Image.open(file)) for file in files]
    with torch.no_grad():
        images = prepare(torch.stack(pictures))
        maps = model.forward_intermediates(images, indices=[3, 4], intermediates_only=True)
    return torch.cat([each.mean(dim=(2, 3)) for each in maps], dim=1)


def with_weights(run: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """A run whose student has changed weights."""
    file = run / "student.safetensors"
    state = {name: change(value) for name, value in load_file(file).items()}
    save_file(state, file, read_metadata(file))
    return file


def test_starts_differ_by_their_weights_alone(run: Path, pale: Path, prints: Command) -> None:
    """The distilled start as plain timm computes it; the answer in the terminal, in a file, and on the page."""
    out = prints("eval", [str(run), f"pays={pale}"])
    probe = measured(run)
    assert ", ".join(LEVELS) in probe["how"]
    assert "48 labelled pictures of 4 classes, judged by 48 others" in probe["how"]
    assert list(probe["starts"]) == ["random", "distilled"]

    student, prepare, _ = load_student(run / "student.safetensors")
    fitted_files, fitted_labels = files_of(pale, "train")
    judged_files, judged_labels = files_of(pale, "val")
    bank = pooled_by_timm(student, prepare, fitted_files)
    asked = pooled_by_timm(student, prepare, judged_files)
    for seed in range(3):
        half = half_of_each_class(fitted_labels, seed)
        right = ridge_outcomes(bank[half], fitted_labels[half], asked, judged_labels)
        accuracy = float(right.double().mean())
        assert 0.3 < accuracy < 0.9
        assert probe["starts"]["distilled"][seed] == pytest.approx(accuracy)

    (gain,) = probe["gains"]
    means = {name: np.mean(start) for name, start in probe["starts"].items()}
    assert gain["points"] == pytest.approx(100 * (means["distilled"] - means["random"]), abs=1e-3)
    assert gain["low"] <= gain["points"] <= gain["high"]
    (answer,) = read_json(run / "eval_pays.json")["answers"]
    assert answer in out
    (table,) = results_of(run, print)["pays"]
    assert isinstance(table, Table) and table.title == "Does it pay?"
    assert answer in table.note
    assert [row[0] for row in table.rows] == ["random", "distilled"]


def test_pretrained_weights_come_from_the_hub(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pretrained=true``: timm's weights of the student's architecture, by the real client; here the student's own, so
    the same halves and pictures show no difference at all.
    """
    out = tmp_path / "figures.json"
    state = student_of(run)
    weights = timm.create_model(TAGGED, num_classes=1000, **NARROW).state_dict()
    weights.update(state)  # all but the classifier, which the student lacks
    with hub_with(TAGGED, weights, tmp_path / "hub", monkeypatch):
        items = [f"pays={pictures}", "pretrained=true", "seeds=2", f"out={out}"]
        assert main("eval", [str(run), *items]) == 0
    probe = measured(run)
    starts = probe["starts"]
    assert starts["pretrained"] == starts["distilled"]
    assert len(starts["distilled"]) == 2
    assert probe["gains"][1] == {"over": "pretrained", "points": 0, "low": 0, "high": 0}
    assert read_json(out)["probe"] == probe


def test_useless_weights_do_not_pay(
    run: Path, pictures: Path, tmp_path: Path, prints: Command
) -> None:
    """Colours tell these classes apart, also through random layers; a student of zeros sees nothing."""
    good = shutil.copy(run / "student.safetensors", tmp_path / "good.safetensors")
    zeros = with_weights(run, torch.zeros_like)
    out = prints("eval", [str(run), f"pays={pictures}", f"pretrained={good}", "seeds=2"])
    assert measured(run)["starts"]["distilled"] == [0.25] * 2
    assert "it does not pay: -" in out
    assert "points" in out
    shutil.copy(zeros, tmp_path / "zeros.safetensors")
    shutil.copy(good, run / "student.safetensors")
    items = [f"pays={pictures}", f"pretrained={tmp_path / 'zeros.safetensors'}", "seeds=2"]
    assert "it pays: +" in prints("eval", [str(run), *items])


def test_random_starts_are_new_each_time_and_the_same_again(run: Path) -> None:
    file = run / "student.safetensors"
    state = torch.random.get_rng_state()
    first, again, other = (untrained_student(file, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    trained = load_student(file)[0]
    name = "layer4.0.conv1.weight"
    weights = [model.state_dict()[name] for model in (first, again, other, trained)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    assert not first.training


@pytest.mark.parametrize("most", [1024, 2])
def test_norms_of_random_starts_know_the_pictures(
    run: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As drawn they hold mean 0 and variance 1; of many pictures a loaded batch has one at most that is read for them."""
    monkeypatch.setattr("kd.run.pays.OF_NORMS", most)
    seen: list[nn.Module] = []

    def noted(*args: object) -> nn.Module:
        seen.append(untrained_student(run / "student.safetensors", 0))
        return seen[-1]

    monkeypatch.setattr("kd.run.pays.untrained_student_in", noted)
    assert main("eval", [str(run), f"pays={pictures}", "seeds=2", "data.batch_size=8"]) == 0
    norm = seen[0].get_submodule("layer1.0.bn1")
    assert norm.running_mean.abs().max() > 0.01
    assert not seen[0].training
    student = load_student(run / "student.safetensors")[0]
    kept = student_of(run)
    assert torch.equal(student.state_dict()["layer1.0.bn1.running_mean"], kept["layer1.0.bn1.running_mean"])  # fmt: skip


def test_a_run_starts_with_the_weights_that_it_began_with(run: Path, pictures: Path) -> None:
    """Its own pre-trained start is a row without being named; a file that is gone is an error that says so."""
    torch.manual_seed(5)
    began = run / "began.pth"
    torch.save(timm.create_model(CNN, num_classes=0, **NARROW).state_dict(), began)
    config = run / "config.yaml"
    text = config.read_text()
    student = text.index("student:", text.index("model:"))
    place = text.index("checkpoint: null", student)
    config.write_text(f"{text[:place]}checkpoint: {began}{text[place + len('checkpoint: null') :]}")
    assert main("eval", [str(run), f"pays={pictures}", "seeds=2"]) == 0
    assert list(measured(run)["starts"]) == ["random", "pretrained", "distilled"]


def test_a_classifier_is_probed_below_its_head(with_test: Path, pictures: Path) -> None:
    """A run of labels and logits: the classifier's input counts."""
    assert main("eval", [str(with_test), f"pays={pictures}", "seeds=2"]) == 0
    assert "(prelogits)" in measured(with_test)["how"]


def test_pictures_that_were_distilled_on_are_named(run: Path, pictures: Path) -> None:
    assert main("eval", [str(run), f"pays={pictures}", "seeds=2"]) == 0
    assert measured(run)["notes"] == []  # a folder that is called val names validation pictures
    turned = run.parent / "turned"
    for split, other in (("train", "val"), ("val", "train")):
        shutil.copytree(pictures / split, turned / other, copy_function=lambda a, b: Path(b).symlink_to(a))  # fmt: skip
    assert main("eval", [str(run), f"pays={turned}", "seeds=2"]) == 0
    assert measured(run)["notes"] == ["43 of the 48 were distilled on, without their labels"]


def offered(run: Path) -> bool:
    """Whether the page says how it is measured."""
    rows = [
        row
        for part in _results(Facts(read_run(run)))
        if isinstance(part, Table)
        for row in part.rows
    ]
    return any("kd-eval RUN pays=DIR" in str(row[0]) for row in rows)


def test_the_page_offers_what_was_not_measured(run: Path, with_test: Path) -> None:
    """Of a backbone alone; a damaged file leaves the page whole."""
    assert offered(run)
    assert not offered(with_test)
    write_of_weights(run, "tables/pays.json", {"parts": [{"kind": "table", "rows": 3}]})
    records = read_run(run)
    assert _results(Facts(records)) and offered(run)
    assert "tables/pays.json can't be read" in records.notes


def test_figures_of_an_earlier_student_are_not_shown(run: Path, pictures: Path) -> None:
    """A run that is resumed has another student; what was measured before is measured again."""
    assert main("eval", [str(run), f"pays={pictures}", "seeds=2"]) == 0
    assert not offered(run)
    other_weights(run)
    assert offered(run)


def test_one_picture_judges_nothing(
    run: Path, pictures: Path, tmp_path: Path, refusal: Command
) -> None:
    shutil.copytree(pictures / "train", tmp_path / "few" / "train")
    (tmp_path / "few/val/apple").mkdir(parents=True)
    shutil.copy(pictures / "val/apple/00.jpg", tmp_path / "few/val/apple")
    assert "pays: needs two pictures or more to judge by" in refusal(
        "eval", [str(run), f"pays={tmp_path / 'few'}"]
    )


def test_halves_are_of_each_class_and_by_the_seed() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [3])
    half = half_of_each_class(labels, 0)
    assert np.bincount(labels[half]).tolist() == [5, 3, 0, 1]
    assert len(set(half.tolist())) == 9
    assert torch.equal(half, half_of_each_class(labels, 0))
    assert not torch.equal(half, half_of_each_class(labels, 1))
