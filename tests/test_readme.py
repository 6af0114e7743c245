"""Every command of the README and of the guides beside the code runs, with the placeholders filled in."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import kd.cli
from kd.cli import cache_main, pack_main, train_main
from kd.config.trees import flatten
from kd.run.request import translate
from scripts.site.build import guides
from tests._forks import ForkedRun
from tests._helpers import CLASSES, ROOT, StopwatchHere, draw_folder, save_teacher
from tests._scenes import draw as draw_scenes

README = (ROOT / "README.md").read_text()
GUIDES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("kd/**/README.md")),
    *sorted(ROOT.glob("recipes/*.md")),
]


def commands() -> list[str]:
    texts = [guide.read_text() for guide in GUIDES]
    blocks = [
        block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    ]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [
        line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]
    return list(dict.fromkeys(found))


OURS = [
    c
    for c in commands()
    if re.match(
        r"\.venv/bin/kd-(train|eval|report|cache|pack|predict|export|latency|card|tune|runs|launch)\b",
        c,
    )
]
SETUP = [c for c in commands() if "pip install" in c or c.endswith("pytest")]


def test_the_first_screen_has_the_commands_for_your_pictures() -> None:
    """With a teacher, without one, without labels, with nothing at hand: before the quick start, within 20 lines."""
    first = "\n".join(README.splitlines()[:20])
    assert re.findall(r"kd-train recipe=(\w+)", first) == [
        "distill",
        "photos",
        "foundation_vit",
        "foodtag_vit",
    ]
    assert README.index("kd-train recipe=foodtag_vit") < README.index("## Quick start")


def test_a_cell_of_the_readme_has_one_link() -> None:
    cells = [
        cell for line in README.splitlines() if line.startswith("|") for cell in line.split("|")
    ]
    assert not [cell for cell in cells if cell.count("](") > 1]


def test_the_readme_lists_every_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    listed = {
        name
        for row in re.findall(r"^\| (`kd-.*?) \|", README, flags=re.M)
        for name in re.findall(r"kd-\w+", row)
    }
    assert listed == set(scripts) - {"kd"}


def test_every_guide_is_a_page_of_the_site() -> None:
    """And each link between guides leads to a file: what ``mkdocs build --strict`` finds too, without installing it."""
    listed = set(
        re.findall(r": (\S+\.md)$", (ROOT / "scripts/site/mkdocs.yml").read_text(), flags=re.M)
    )
    assert {str(path) for path in guides()} == {
        page for page in listed if not page.startswith("api/")
    }
    for path in guides():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / path).read_text()):
            assert (ROOT / path.parent / link).is_file(), f"{path}: {link}"


def test_every_command_is_known_here() -> None:
    """Set-up and the test command are run by .ci/run; torchrun lines start the same kd-train.

    Guides of rooms with tests of their own (models, tuning, serving) leave out the folder of the environment.
    """
    rest = [c for c in commands() if c not in OURS and c not in SETUP]
    assert all(
        c.startswith(
            ("torchrun", "TORCH_DISABLE_", "sbatch", "kd-", ".venv/bin/kd-serve ", "curl ")
        )
        for c in rest
    ), rest


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the README's placeholders: tiny data, a tiny teacher, a finished run."""
    home = tmp_path_factory.mktemp("readme")
    data = draw_folder(home / "photos", train=8, val=4, size=64)
    draw_table(home, "train")
    draw_table(home, "test")
    draw_targets(home)
    scenes, more = draw_scenes(home / "scenes"), draw_folder(home / "more", train=2, val=1)
    return {
        "SCENES": str(scenes),
        "MORE": str(more),
        "PACK": str(home / "pack"),
        "DIR": str(data),
        "PICTURES": str(data / "val"),
        "IMAGE": "registry.example.com/kd:1",
        "ROLE": "arn:aws:iam::123456789012:role/kd",
        "BUCKET": "kd-test",
        "TEACHER": str(save_teacher(home / "t.safetensors")),
        "NUMBER": str(save_teacher(home / "number.safetensors", num_classes=1)),
        "HOME": str(home),
    }


def draw_table(home: Path, split: str) -> None:
    """``SPLIT.csv`` of ids and labels, and ``SPLIT_images/ID.jpg``: a competition's files."""
    folder = home / f"{split}_images"
    folder.mkdir()
    rows = ["id,label"]
    for picture in sorted((home / "photos" / "train").rglob("*.jpg")):
        name = f"{picture.parent.name}{picture.stem}"
        (folder / f"{name}.jpg").write_bytes(picture.read_bytes())
        rows.append(f"{name},{picture.parent.name}")
    (home / f"{split}.csv").write_text("\n".join(rows))


def draw_targets(home: Path) -> None:
    """``tags.csv`` with two of four labels a picture, and ``numbers.csv``."""
    labels = ["path,label"]
    numbers = ["path,calories"]
    names = sorted(CLASSES)
    for i, picture in enumerate(sorted((home / "photos" / "train").rglob("*.jpg"))):
        path = picture.relative_to(home)
        labels.append(f"{path},{names[i % 4]};{names[(i + 1) % 4]}")
        numbers.append(f"{path},{i / 4}")
    (home / "tags.csv").write_text("\n".join(labels))
    (home / "numbers.csv").write_text("\n".join(numbers))


SMALL = [
    "config=debug", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=1", "trainer.strategy=auto",
    "optim.zero=false", "data.batch_size=4", "data.num_workers=0", "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=1",
]  # fmt: skip


FEATURES = [
    command for command in OURS
    if re.search(r"kd-train .*(vits? config=|cache=|monitor\.|distill_losses|Shards|unlabeled|name=|freeze)", command)
]  # fmt: skip
"""Recipes that other commands train, with a feature that the tests of its room train: here the settings are parsed."""


def commands_once() -> Iterator[Any]:
    """The commands; slow: one that differs from an earlier one by the name of the run alone, and ``FEATURES``."""
    seen: set[str] = set()
    for command in OURS:
        program = re.sub(r"\bruns/\w+/", "runs/NAME/", command)
        yield pytest.param(
            command, marks=[pytest.mark.slow] * (program in seen or command in FEATURES)
        )
        seen.add(program)


@pytest.mark.parametrize("command", list(commands_once()))
def test_the_command_runs(
    command: str,
    filled: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = with_places(command, filled)
    program, *items = shlex.split(command)
    monkeypatch.chdir(filled["HOME"])
    if os.environ.get("RANK"):
        pytest.skip("started by torchrun")
    if "kd-launch sagemaker" in command:
        pytest.importorskip("boto3")
    if "kd-tune" in command:
        pytest.importorskip("optuna")
        monkeypatch.setattr("kd.fleet.tuning.trials.start_kd_train", ForkedRun)
        items += ["trials=1", "jobs=1"]
    monkeypatch.setattr("kd.ship.latency.Stopwatch", StopwatchHere)
    monkeypatch.setattr("kd.run.train_first.start_kd_train", ForkedRun)
    prepare(command, items, filled)
    name = Path(program).name.removeprefix("kd-")
    small = shrunk(command, items, filled)
    if name == "export":
        pytest.importorskip("onnxscript")
    assert kd.cli.main(name, [*items, *small]) == 0
    if name == "train" and not {"--list", "--help", "--keys", "--print_config"} & {*items, *small}:
        said = capsys.readouterr().out
        assert "run folder: runs/" in said or ("resume=" in command and "epochs of runs/" in said)


TRAINED = [
    command for command in OURS
    if "kd-train " in command and not re.search(r" --|resume=|config=debug", command)
]  # fmt: skip
LIMITS = re.compile(
    r"data\.(batch_size|num_workers|source\.init_args\.\w+_per_class)|preflight|optim\.warmup_epochs|"
    r"model\.student\.inherit_pictures|trainer\.(max_epochs|limit_\w+_batches|log_every_n_steps)"
)
"""What a trial changes: how many steps, pictures and epochs, and nothing of models, pictures and losses."""


@pytest.mark.parametrize("command", TRAINED)
def test_a_trial_is_one_of_what_was_typed(
    command: str, filled: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``config=debug`` after each documented line: the commands above train many of them so."""
    monkeypatch.chdir(filled["HOME"])
    _, *items = shlex.split(with_places(command, filled))
    request = translate(items)
    config = request.resolved()
    request.check_read(config)
    whole = flatten(config)
    trial = flatten(translate([*items, "config=debug"]).resolved())
    changed = [key for key in whole | trial if whole.get(key) != trial.get(key)]
    assert "trainer.limit_train_batches" in changed
    assert [key for key in changed if not LIMITS.fullmatch(key)] == []


def with_places(command: str, filled: dict[str, str]) -> str:
    for name in ("IMAGE", "ROLE", "BUCKET", "DIR", "TEACHER", "PACK", "SCENES", "MORE", "PICTURES"):
        command = re.sub(rf"\b{name}\b", filled[name], command)
    return command


def prepare(command: str, items: list[str], filled: dict[str, str]) -> None:
    """Makes what a command goes on from: a finished run (or two), packed pictures, a cache."""
    if "kd-runs" in command:
        Path("runs").mkdir(exist_ok=True)
    if "runs/foodtag_vit/" in command:
        for number in range(2 if "kd-report" in command else 1):
            if not Path(f"runs/foodtag_vit/{number:03d}").exists():
                assert train_main(["recipe=foodtag_vit", *SMALL, *TINY_FOOD]) == 0
    if "kd-predict runs/distill/latest test.csv" in command:
        (training,) = [known for known in OURS if "data.source=train.csv" in known]
        _, *words = shlex.split(with_places(training, filled))
        assert train_main([*words, *shrunk(training, words, filled)]) == 0
    for recipe in ("grocery_vit", "distill"):
        if f"runs/{recipe}/" in command and not Path(f"runs/{recipe}/000").exists():
            given = [
                f"data.source.root={filled['DIR']}",
                f"model.teacher.checkpoint={filled['TEACHER']}",
            ]
            assert train_main([f"recipe={recipe}", *given, *SMALL, *TINY_TEACHER]) == 0
    for recipe in ("foundation_vit", "detector_backbone"):
        if f"runs/{recipe}/" in command and not Path(f"runs/{recipe}/000").exists():
            line = f"recipe={recipe} data.source.root={filled['DIR']}"
            assert train_main([*line.split(), *SMALL, *small_models(line)]) == 0
    if filled["PACK"] in command and "kd-pack" not in command and not Path(filled["PACK"]).exists():
        assert (
            pack_main(
                ["recipe=grocery_vit", f"data.source.root={filled['DIR']}", f"out={filled['PACK']}"]
            )
            == 0
        )
    if "cache=only" in command:
        assert cache_main([*items, *SMALL, *TINY_FOOD]) == 0


def shrunk(command: str, items: list[str], filled: dict[str, str]) -> list[str]:
    """What makes a command small enough for a test; downloads and libraries that can't be had are parsed only."""
    if "kd-latency" in command:
        return ["batch=1", "threads=1", "seconds=0.01"]
    if "margin=" in command and "kd-eval" in command:
        return ["despite_choice=true"]  # the small runs have no test pictures
    if re.search(
        r"kd-(eval|report|pack|predict|export|card|launch) |kd-runs|resume=|--list|--help|--keys",
        command,
    ):
        return []
    if re.search("recipe=(food101|photos)|smddp", command):
        return ["--print_config"]
    if "camvid_seg" in command:
        return [*SMALL, *TINY_SCENES, *(TINY_SCENE_TEACHER if "model.teacher" in command else [])]
    if "recipe=foundation" in command or "recipe=detector" in command:
        return [*SMALL, *small_models(command)]
    if "recipe=finetune" in command:
        return [*SMALL, "data.img_size=32"]
    for table, loss in (("tags.csv", "BinaryKDLoss"), ("numbers.csv", "RegressionKDLoss")):
        if f"data.source={table}" in items:
            teacher = {"tags.csv": "TEACHER", "numbers.csv": "NUMBER"}[table]
            small = [item.replace("KDLoss", loss) for item in TINY_TEACHER]
            return [*SMALL, *small, f"model.teacher.checkpoint={filled[teacher]}"]
    if "data.source" not in command:
        return [*SMALL, *TINY_FOOD]
    return [*SMALL, *(TINY_TEACHER if "model.teacher." in command else [])]


TINY_SCENES = [
    "data.img_size=[28,42]", "model.student.img_size=[28,42]", "model.student.pretrained=false",
    "model.student.kwargs={patch_size: 14, embed_dim: 64, depth: 4, num_heads: 1}",
]  # fmt: skip
TINY_SCENE_TEACHER = [
    "model.teacher.img_size=[28,42]", "model.teacher.kwargs={embed_dim: 64, depth: 4, num_heads: 1}",
]  # fmt: skip
TINY_VIT = "{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"


def small_models(command: str) -> list[str]:
    """Small pictures and models for a recipe without labels; a teacher's given weights stay."""
    side = 64 if "recipe=detector" in command else 32
    words = [f"data.img_size={side}", f"model.student.img_size={side}"]
    if "recipe=detector" not in command:
        words.append(f"model.student.kwargs={TINY_VIT}")
    teachers = ["dino", "siglip"] if "recipe=foundation_many" in command else ["dino"]
    for name in teachers:
        key = f"model.teachers.{name}"
        words += [f"{key}.arch=vit_tiny_patch16_224", f"{key}.kwargs={TINY_VIT}"]
        words.append(f"{key}.img_size={side}")
        if f"{key}.checkpoint" not in command:
            words.append(f"{key}.pretrained=false")
    return words


TINY_FOOD = ["data.source.train_per_class=2", "data.source.val_per_class=1"]
TINY_TEACHER = [
    "model.teacher.arch=vit_tiny_patch16_224", "model.teacher.img_size=32", "data.img_size=32",
    "model.teacher.kwargs={patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}", "model.student.inherit=false",
    "model.distill_losses={kd: {class_path: KDLoss}}", "model.taps={}",
]  # fmt: skip


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("kd/PYTHON.md", 7)])
def test_the_python_of_a_page_runs(
    page: str,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its order: a block goes on with the names of those before."""
    monkeypatch.chdir(tmp_path)
    assert train_main(["recipe=foodtag_vit", *SMALL, *TINY_FOOD]) == 0
    Image.new("RGB", (64, 64), "red").save("picture.jpg")
    a_batch = torch.rand(2, 3, 64, 64), torch.arange(2)
    names: dict[str, Any] = {"torch": torch, "loader": [a_batch]}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    assert len(blocks) == count
    for code in blocks:
        exec(compile(code, page, "exec"), names)
    if "figures" in names:
        assert "did you mean 'trainer.max_epochs'?" in capsys.readouterr().out
        for shown in (names["result"], names["figures"]):
            assert "<td>student" in shown._repr_html_()
        assert names["result"].page.is_file()
