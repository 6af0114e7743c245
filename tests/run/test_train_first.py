"""A teacher that is trained before the run, and what becomes of it when something stops."""

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from kd.cli import train_main
from kd.run import train_first
from kd.run.train_first import trained_teacher
from tests._files import read_json, read_yaml, write_yaml
from tests._forks import ForkedRun, start, status_of, survivors
from tests._helpers import ARCH, ROOT, TINY, Command, refuses, run_cli, tiny_vit, write_recipe
from tests._runs import assert_good, run_of, summary_of


@pytest.fixture()
def student(tmp_path: Path, pictures: Path, teacher: Path) -> Path:
    """A recipe without a teacher's checkpoint, and the teacher's recipe, whose steps are slow."""
    slow = {"class_path": "tests._stop.Slow", "init_args": {"seconds": 0.05}}
    own = write_recipe(
        tmp_path / "own.yaml",
        pictures,
        None,
        recipe="own",
        name="mine",
        trainer__callbacks=[slow],
        trainer__max_epochs=5,
    )
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher, trainer__max_epochs=1)
    recipe.write_text(recipe.read_text().replace(f"checkpoint: {teacher}", f"recipe: {own}"))
    return recipe


def begin(student: Path, log: Path, forked: bool) -> int:
    """From the recipes' own folder: files from elsewhere may not name the tests' classes."""

    def from_there() -> None:
        os.chdir(student.parent)
        if forked:
            train_first.start_kd_train = ForkedRun

    env = {"KD_CACHE": str(student.parent / "kd"), "PYTHONPATH": str(ROOT)}
    items = [f"recipe={student}", "trainer.enable_progress_bar=false", "data.batch_size=8"]
    return start(items, log, from_there, **env)


def rows(student: Path) -> list[str]:
    """The teacher's training so far: the rows of its metrics that tell a training loss."""
    files = list((student.parent / "kd" / "teachers").glob("own-*/**/metrics.csv"))
    if not files or not files[0].read_text():  # it was made this moment
        return []
    header, *lines = files[0].read_text().splitlines()
    loss = header.split(",").index("train/loss")
    return [line.split(",")[1] for line in lines if line.split(",")[loss:][:1] > [""]]


def wait_for_rows(student: Path, more_than: int, pid: int) -> None:
    deadline = time.monotonic() + 60
    while len(rows(student)) <= more_than:
        assert time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG)[0] == 0
        time.sleep(0.05)


def part(student: Path) -> Path:
    (folder,) = (student.parent / "kd" / "teachers").glob("own-*.part")
    return folder / "own" / "000"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
    ids=["term", "int", "kill"],
)
def test_its_training_goes_on_where_it_was_stopped(student: Path, number: int) -> None:
    """SIGTERM or Ctrl-C to both processes, or SIGKILL to the parent alone; nothing is left over, no step is made again."""
    log = student.parent / "log"
    forked = number != signal.SIGKILL
    pid = begin(student, log, forked)
    wait_for_rows(student, 2, pid)
    os.killpg(pid, number) if forked else os.kill(pid, number)
    assert status_of(pid) == (128 + number if forked else -9), log.read_text()
    assert survivors(pid) == []
    known = len(rows(student))
    assert_good(part(student), known)
    assert status_of(begin(student, log, forked)) == 0, log.read_text()
    text = log.read_text()
    assert text.count("teacher: no checkpoint given") == 1
    assert text.count("teacher: resuming the training that was stopped") == 1
    assert (
        "to resume: kd-train resume=" not in text
    )  # the same command again is the one way that is named
    if forked:
        name = signal.Signals(number).name
        at_once, _ = text.split("kd-train: the teacher's training was stopped by SIG")
        assert at_once.count("stopping after the teacher's present step, with a checkpoint") == 1
        assert at_once.count("stopping after") == 1  # the training itself says nothing
        assert f"kd-train: stopped by {name}; run the same command again to resume" in text
    assert "│ teacher, last epoch" in text and "│ student, last epoch" in text
    assert "\nthe teacher is ready; now the student\n" in text
    assert (
        "own-" not in text.partition("the teacher is ready")[0].rpartition("│")[2]
    )  # no folder that is moved
    assert rows(student) == [str(step) for step in range(5 * 6)]
    summary = summary_of(run_of(student))
    assert summary["status"] == "done"


def test_messages_of_its_training_name_the_keys_of_the_run(student: Path) -> None:
    """What the teacher's own training calls model.student is model.teacher to who types."""
    log = student.parent / "log"
    recipe = read_yaml(student)
    recipe["model"]["teacher"]["kwargs"]["num_heads"] = 3  # does not divide 32
    write_yaml(student, recipe)
    assert status_of(begin(student, log, forked=True)) == 2
    (line,) = re.findall("kd-train: model.*", log.read_text())[:1]
    assert line.startswith("kd-train: model.teacher: "), line
    assert "model.student" not in log.read_text()


@pytest.mark.slow
def test_a_training_that_fails_is_told(student: Path) -> None:
    own = student.parent / "own.yaml"
    own.write_text(
        own.read_text()
        .replace("tests._stop.Slow", "tests._stop.FailAtStep")
        .replace("seconds: 0.05", "step: 2")
    )
    log = student.parent / "log"
    assert status_of(begin(student, log, forked=False)) == 2
    assert (
        "kd-train: model.teacher.recipe: training own failed (exit 1), see above" in log.read_text()
    )


@pytest.mark.parametrize(
    ("words", "steps", "limits"),
    [
        (["trainer.max_steps=2"], 2, "trainer.max_steps=2"),
        (["trainer.fast_dev_run=true"], 1, "trainer.fast_dev_run=True"),
        (
            ["config=debug"],
            4,
            "trainer.limit_train_batches=4, trainer.limit_val_batches=4, trainer.max_epochs=1",
        ),
        (
            ["trainer.limit_train_batches=3"],
            3,
            "trainer.limit_train_batches=3, trainer.max_epochs=1",
        ),
    ],
)
def test_a_trial_run_trains_a_trial_teacher(
    student: Path,
    pictures: Path,
    words: list[str],
    steps: int,
    limits: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The teacher's recipe has five epochs of six steps, the run one epoch."""
    home = student.parent
    monkeypatch.setenv("KD_CACHE", str(home / "cache"))
    monkeypatch.setattr(train_first, "start_kd_train", ForkedRun)
    write_recipe(home / "own.yaml", pictures, None, recipe="own", trainer__max_epochs=5)
    words = [f"recipe={student}", "data.batch_size=8", *words]
    assert train_main(words) == 0
    line = f"recipe=own trains one first (as short as this run: {limits}; kept for runs with the same limits)"
    assert line in capfd.readouterr().out
    (summary,) = (home / "cache" / "teachers").glob("own-*/summary.json")
    assert read_json(summary)["steps"] == steps


# -- photographs and no teacher ----------------------------------------------------------------------------------------


@pytest.fixture()
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of the teachers that would be trained first; there is no internet."""
    found: list[list[str]] = []
    trained = "kd.run.train_first.trained_teacher"
    monkeypatch.setattr(trained, lambda items, *_: found.append(items) or Path("none"))
    monkeypatch.setattr("kd.run.train_first.check_downloadable", lambda *_: None)
    return found


def test_photos_of_few_pictures_has_steps_enough(
    tmp_path: Path, pictures: Path, asked: list[list[str]]
) -> None:
    """48 pictures are fewer than the recipe's batch: a typed one is the teacher's too; its own run makes others smaller."""
    for typed in ([], ["data.batch_size=12"]):
        assert (
            train_main(
                ["recipe=photos", f"data.source.root={pictures}", f"runs_dir={tmp_path}", *typed]
            )
            == 2
        )
    typed = [[word for word in words if word.startswith("data.batch_size=")] for words in asked]
    assert typed == [[], ["data.batch_size=12"]]


def test_a_teacher_that_is_trained_first_learns_the_runs_task(
    tmp_path: Path, pictures: Path, asked: list[list[str]]
) -> None:
    """A recipe's own task stays where the run has the same."""
    rows = ["path,label"]
    for picture in sorted(pictures.rglob("train/*/*.jpg")):
        rows.append(f"{picture},{picture.parent.name};seen")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    folder = f"data.source.root={pictures}"
    table = f"data.source={tmp_path / 'labels.csv'}"
    for task, loss, source in (
        ("MultiLabel", "BinaryKDLoss", table),
        ("Classification", "KDLoss", folder),
    ):
        words = ["recipe=photos", source, f"runs_dir={tmp_path}"]
        words.append(f"model.distill_losses.kd={loss}")
        assert train_main([*words, f"model.task={task}"]) == 2
    tasks = [train_first.settings_of(items)["model"]["task"]["class_path"] for items in asked]
    assert tasks == ["kd.tasks.MultiLabel", "kd.tasks.Classification"]


def test_photos_fine_tunes_a_backbone_and_distils_it(
    tmp_path: Path,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One command; the pictures that it is validated on are held out of both trainings.

    The backbone's file holds two models, of which ``checkpoint_key`` names one.
    """
    monkeypatch.setenv("KD_CACHE", str(tmp_path / "kd"))
    monkeypatch.setattr(train_first, "start_kd_train", ForkedRun)
    models = {name: tiny_vit(0, seed).state_dict() for seed, name in enumerate(("query", "key"))}
    save_file(
        {f"{name}.{key}": value for name, state in models.items() for key, value in state.items()},
        tmp_path / "backbone.safetensors",
    )
    items = [
        "recipe=photos", f"data.source.root={pictures / 'train'}", "data.val_fraction=0.25", "seed=3",
        "data.img_size=32", "data.num_workers=0", "data.batch_size=8", f"model.teacher.arch={ARCH}",
        "model.teacher.img_size=32", f"model.teacher.kwargs={json.dumps(TINY)}", "model.student.img_size=32",
        f"model.student.kwargs={json.dumps({**TINY, 'embed_dim': 16})}", "trainer.max_epochs=1", "preflight=warn",
        "trainer.accelerator=cpu", f"runs_dir={tmp_path / 'runs'}",
    ]  # fmt: skip
    items.append("model.teacher.checkpoint_key=query")
    assert train_main([*items, f"model.teacher.backbone={tmp_path / 'backbone.safetensors'}"]) == 0
    out = capfd.readouterr().out
    assert (
        "the new classifier starts as a ridge regression on the features of 36 training pictures"
        in out
    )
    (teacher,) = (tmp_path / "kd" / "teachers").glob("photos_teacher-*/student.safetensors")
    assert not (
        teacher.parent / "checkpoints"
    ).exists()  # seven times its size, which no later run reads
    run = tmp_path / "runs" / "photos" / "000"
    found = read_yaml(run / "config.yaml")["model"]["teacher"]
    assert (found["checkpoint"], found["backbone"]) == (str(teacher.parent), None)
    assert found["checkpoint_key"] is None
    own, theirs = (read_yaml(folder / "config.yaml") for folder in (run, teacher.parent))
    for config in (own, theirs):
        assert (config["seed"], config["data"]["val_fraction"]) == (3, 0.25)
    assert theirs["model"]["student"]["checkpoint"] == str(tmp_path / "backbone.safetensors")
    assert theirs["model"]["student"]["checkpoint_key"] == "query"
    for more, why in ((f"model.teacher.checkpoint={teacher}", "model.teacher.checkpoint is given"),
                      ("model.teacher.recipe=null", "there is no model.teacher.recipe")):  # fmt: skip
        assert train_main([*items, "model.teacher.backbone=b.safetensors", more]) == 2
        assert (
            f"model.teacher.backbone: is for training a teacher first, and none is trained: {why}"
            in (capfd.readouterr().err)
        )


def test_what_no_later_run_needs_of_a_teachers_training_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one trained by an earlier kd too."""
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    home = tmp_path / "teachers"
    final = home / "t-00000000"
    for name in ("t-00000000", "t-00000000.part/t/000"):
        (home / name / "checkpoints").mkdir(parents=True)
    (final / "student.safetensors").touch()
    assert trained_teacher([], "00000000", "t", True, {}) == final
    assert sorted(path.name for path in final.iterdir()) == ["student.safetensors"]
    assert not (home / "t-00000000.part").exists()
    monkeypatch.setattr(train_first, "run_to_end", lambda *_: 1)
    for trains, why in ((True, "training t failed"), (False, "would train recipe=t first")):
        with refuses(why):
            trained_teacher([], "55555555", "t", trains, {})


# -- the one that ships ------------------------------------------------------------------------------------------------

FEW = [
    "recipe=foodtag_vit",
    "config=debug",
    "data.source.train_per_class=2",
    "data.source.val_per_class=2",
]


def test_foodtags_teacher_ships_with_its_recipe(tmp_path: Path, prints: Command) -> None:
    file = ROOT / "recipes" / "foodtag_teacher.safetensors"
    made, line = file.with_suffix(".sha256").read_text().splitlines()
    assert made.startswith("# kd-train recipe=foodtag_teacher (")
    assert line.split() == [hashlib.sha256(file.read_bytes()).hexdigest(), file.name]
    assert file.stat().st_size < 1.7e6
    assert f"teacher: {file} (ships with kd; model.teacher.checkpoint=train trains one)" in prints(
        "train", [*FEW, f"runs_dir={tmp_path}"]
    )
    resolved = read_yaml(tmp_path / "foodtag_vit" / "000" / "config.yaml")
    assert resolved["model"]["teacher"]["checkpoint"] == str(file)


def test_another_teacher_is_trained(tmp_path: Path, asked: list[list[str]]) -> None:
    """Where it is asked for, or where the one that ships is of another architecture."""
    for item in ("model.teacher.checkpoint=train", "model.teacher.kwargs.depth=3"):
        assert train_main([*FEW, f"runs_dir={tmp_path}", item]) == 2  # no such file
    assert [items[0] for items in asked] == ["recipe=foodtag_teacher"] * 2
    assert train_main([*FEW, "model.teacher.checkpoint=train", "model.teacher.recipe=null"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_teacher_trained_anew_is_as_good_as_the_one_that_ships(tmp_path: Path) -> None:
    """The recipe that is said to have made it does make one of its accuracy, within two standard errors."""
    made = (ROOT / "recipes" / "foodtag_teacher.sha256").read_text()
    shipped = float(re.search(r"val acc1 ([\d.]+)%", made)[1]) / 100
    done = run_cli("recipe=foodtag_teacher", f"runs_dir={tmp_path}", timeout=3600)
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "foodtag_teacher" / "000")
    error = (shipped * (1 - shipped) / summary["data"]["val"]) ** 0.5
    assert abs(summary["student"]["best_val"]["acc1"] - shipped) < 2 * error
