"""Mistakes that settings, files and folders alone show are reported before torch is imported, in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kd.commands import COMMANDS
from kd.config import parts as listed
from kd.data.sources import identity
from kd.errors import REFUSED_LOSSES
from kd.run.build import build
from kd.run.pictures import list_to_train, said_when_slow
from kd.run.request import translate
from kd.run.run import Run
from kd.settings import ALLOWED_LOSSES, OVER_LOGITS
from kd.ship.predict_words import ANSWERS, answers_of, check_out
from tests._files import write_json
from tests._helpers import ROOT, draw_folder, refuses
from tests._runs import summary_of

PROGRAM = """\
import contextlib, io, json, sys
from kd.cli import main
for command, *words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command, words)
    torch = [name for name in ("torch", "timm", "pytorch_lightning") if name in sys.modules]
    print(json.dumps([status, out.getvalue(), err.getvalue(), torch]))
"""
DISTIL = ["recipe=distill", "model.teacher.checkpoint={weights}"]
LINES = [
    (["train", *DISTIL], "data.source.root: folder data/grocery not found (ImageFolder reads train/<class>/*.jpg and "
     "val/<class>/*.jpg in it)"),
    (["train", *DISTIL, "data.source.root={here}", "data.unlabeled=/nowhere"],
     "data.unlabeled: folder /nowhere not found"),
    (["train", "recipe=distill", "data.source.root={here}", "model.teacher.checkpoint=none.pth"],
     "model.teacher.checkpoint: none.pth not found"),
    (["train", *DISTIL, "data.source.root={here}", "model.student.checkpoint=none"],
     "model.student.checkpoint: none not found"),
    (["train", *DISTIL, "data.source.root={here}", "model.student.builder=nomod.Net"],
     "model.student.builder: no class 'nomod.Net'; nomod.py was not found in this folder, nor on PYTHONPATH"),
    (["train", *DISTIL, "data.source.root={here}", "model.distill_losses.gap=nomod.Gap"], "nomod.py was not found"),
    (["train", "recipe=distill", "data.source.root={here}", "model.teacher.answers=none"],
     "model.teacher.answers: must be a folder that kd-cache from=PLACE has filled, or a class path, got 'none'"),
    (["train", *DISTIL, "data.source=none.csv"], "data.source.train: none.csv not found"),
    (["train", "recipe=camvid_seg", "model.teacher.checkpoint={weights}", "data.source.root=/nowhere"],
     "data.source.root: folder /nowhere not found (SegmentationFolder reads images/train"),
    (["cache", *DISTIL], "data.source.root: folder data/grocery not found"),
    (["cache", *DISTIL, "from=none.csv"], "from: file none.csv not found"),
    (["size", *DISTIL], "data.source.root: folder data/grocery not found"),
    (["pack", *DISTIL, "out={here}/packed"], "data.source.root: folder data/grocery not found"),
    (["eval", "/nothing"], "run folder /nothing not found (kd-runs lists the runs)"),
    (["eval", "/nothing.pth", "folder={here}"], "weights: /nothing.pth not found"),
    (["eval", "{weights}", "folder=/nowhere"], "folder: folder /nowhere not found"),
    (["eval", "{run}", "pays=/nowhere"], "pays: folder /nowhere not found"),
    (["predict", "/nothing", "a.jpg"], "run folder /nothing not found"),
    (["predict", "{run}", "none.jpg"], "no pictures: none.jpg"),
    (["export", "/nothing", "to=onnx"], "run folder /nothing not found"),
    (["latency", "/nothing"], "run folder /nothing not found"),
    (["train", "recipe=foundation_vit", "data.source.root={here}", "model.teacher.checkpoint={weights}"],
     "model.teachers: give model.teacher or model.teachers, not both: the settings have model.teachers.dino, so give "
     "model.teachers.dino.checkpoint=FILE, or model.teachers=null beside model.teacher"),
    (["train", *DISTIL, "data.source.root={here}", "model.task=MultiLabel"],
     "model.task: MultiLabel needs several labels a picture, data.source gives one label a picture; a list has several: "
     "data.source=LIST.csv"),
    (["train", *DISTIL, "data.source.root={here}", "model.task=Regression"],
     "model.task: Regression needs numbers, data.source gives one label a picture; a list has numbers: "
     "data.source=LIST.csv data.source.targets=COLUMN"),
    (["train", *DISTIL, "data.source.root={here}", "model.task=MultiLabel", "model.distill_losses.kd=KDLoss"],
     "BinaryKDLoss and the losses over features are defined for them: model.distill_losses.kd=BinaryKDLoss"),
    (["tune", *DISTIL, "search.optim.lr=log(1e-5,1e-3)"], "search.optim.lr: [a, b, c] a choice"),
    (["train", *DISTIL, "trainer.max_epochs=0"], "trainer.max_epochs: must be >= 1, or -1 for no limit"),
]  # fmt: skip

FOLDER = ["data.source=ImageFolder"]
NO_PICTURES = [*FOLDER, "data.source.root={text}"]
IN_TEXT = "data.source.root: no pictures below {text}/train (.jpg"
TABLE = ["data.source={table}"]
PICTURES = [
    (["train", *DISTIL, *NO_PICTURES], IN_TEXT),
    (["cache", *DISTIL, *NO_PICTURES], IN_TEXT),
    (["size", *DISTIL, *NO_PICTURES], IN_TEXT),
    (["tune", *DISTIL, *NO_PICTURES, "search.optim.lr=1e-5..1e-3", "trials=2"], IN_TEXT),
    (["scale", *DISTIL, *NO_PICTURES], IN_TEXT),
    (["pack", *DISTIL, *NO_PICTURES, "out={here}/packed"], IN_TEXT),
    (["eval", "{run}", *NO_PICTURES], IN_TEXT),
    (["eval", "{run}", "folder={text}/train"], "folder: no pictures below {text}/train (.jpg"),
    (["eval", "{run}", *FOLDER, "data.source.root={two}", "split=tset"],
     "split: folder {two}/tset not found; {two} has train, val"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={two}", "data.source.val=own"],
     "data.source.val: folder {two}/own not found; {two} has train, val"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={two}", "data.source.train=own"],
     "data.source.train: folder {two}/own not found; {two} has train, val"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={kaggle}"],
     "data.source.root: no class folders in {kaggle}/train, but tables in {kaggle}: "
     "data.source={kaggle}/train.csv data.source.image_dir={kaggle}/train data.source.path_column=id "
     "data.source.ending=.jpg reads train.csv"),
    (["train", *DISTIL, *FOLDER, "data.source.root={kaggle}/flat"],
     "data.source.root: no class folders in {kaggle}/flat, but tables in {kaggle}/flat: "
     "data.source={kaggle}/flat/labels.csv"),
    (["train", *DISTIL, *FOLDER, "data.source.root={two}", "model.distill_losses={{}}"],
     "model.task_loss_weight: all loss weights are 0, there is nothing to learn from; model.distill_losses.kd=KDLoss "
     "learns from the teacher"),
    (["eval", "{weights}", *NO_PICTURES], IN_TEXT),
    (["eval", "{run}", "pays={text}"], "pays: no pictures below {text}/train (.jpg"),
    (["eval", "{run}", "pays={one}"], "pays: needs two classes or more, got one ('a')"),
    (["export", "{run}", "to=torch_export", *NO_PICTURES], IN_TEXT),
    (["predict", "{run}", "{text}"], "no pictures: {text}"),
    (["predict", "{run}", "{two}", "out={here}/x.txt"], "out: must end in .csv, .jsonl for classification, got"),
    (["predict", "{two}", "out=x.csv"], "expected kd-predict RUN_FOLDER PICTURES... (kd-predict --help)"),
    (["predict", "{run}", "out=x.csv"], "expected kd-predict RUN_FOLDER PICTURES... (kd-predict --help)"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={one}"],
     "data.source: needs two classes or more, got one ('a')"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={empty}"],
     "data.source.root: no class folders in {empty} (expected train/<class>/*.jpg and val/<class>/*.jpg, or <class>/*.jpg"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={two}", "data.unlabeled={text}"],
     "data.unlabeled: no pictures below {text} (.jpg"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={two}", "data.probe.root={one}"],
     "data.probe.root: needs two classes or more, got one ('a')"),
    (["train", "recipe=photos", "data.source=HuggingFace", "data.source.path=nobody/nothing"],
     "data.source.path: nobody/nothing: no folder of this name, and HF_HUB_OFFLINE is set; behind a proxy"),
    (["train", "recipe=photos", "data.source=HuggingFace", "data.source.path=./nowhere"],
     "data.source.path: folder ./nowhere not found"),
    (["train", "recipe=photos", "data.source=WebDataset", "data.source.train=none.tar"],
     "data.source.train: none.tar not found"),
    (["train", "recipe=photos", "data.source=WebDataset", "data.source.train={text}"],
     "data.source.train: no tar files: {text}"),
    (["train", "recipe=photos", *FOLDER, "data.source.root={two}", "data.class_facts=none.csv"],
     "data.class_facts: none.csv can't be read as CSV"),
    (["train", "recipe=photos", *TABLE, "data.source.label_column=kind"],
     "data.source.train: {table} has no column kind (it has path, label); data.source.path_column=NAME and "
     "data.source.label_column=NAME say which"),
    (["train", "recipe=photos", *TABLE, "data.source.path_column=id"],
     "data.source.train: {table} has no column id (it has path, label); data.source.path_column=NAME and "
     "data.source.label_column=NAME say which"),
    (["train", "recipe=photos", *TABLE],
     "data.source.train: none of the 4 files exists: relative paths start at {here} (the first is {here}/0.jpg); "
     "data.source.image_dir=FOLDER says where they start"),
    (["train", "recipe=photos", *TABLE, "data.source.image_dir=pics"],
     "data.source.train: none of the 4 files exists: relative paths start at {here}/pics (the first is pics/0.jpg); "
     "data.source.image_dir=FOLDER says where they start"),
    (["train", "recipe=photos", *TABLE, "data.source.multi_label=true", "data.source.image_dir={here}/pictures",
      "data.augment.mixup=0.8", "data.augment.cutmix=1"],
     "data.augment.mixup: is not defined for several labels a picture: data.augment.mixup=0 data.augment.cutmix=0"),
    (["train", *DISTIL, *TABLE, "data.source.multi_label=true", "model.task=Classification"],
     "model.task: Classification needs one label a picture, data.source gives several labels a picture; "
     "model.task=MultiLabel"),
    (["train", *DISTIL, *FOLDER, "data.source.root={two}", "data.batch_size=500"],
     "training pictures; data.batch_size="),
    (["train", *DISTIL, *FOLDER, "data.source.root={two}", "model.distill_losses.gap=Zzz"],
     "model.distill_losses.gap: no class 'Zzz' (ours: ATLoss, BinaryKDLoss, CKALoss, ...; kd-train --list classes; "
     "others by their class path)"),
    (["train", "resume={stopped}", "trainer.max_epochs=2"],
     "trainer.max_epochs: 2 are fewer than the 3 epochs that {stopped} has trained"),
]  # fmt: skip
"""Pictures that a list alone shows to be missing, for each command that reads pictures."""
PLACES: list[tuple[list[str], str]] = [
    (["eval", "{run}/.."], "is no finished run: it has no config.yaml; the latest finished run in it is "),
    (["eval", "out=x.csv"], "expected kd-eval MODEL (kd-eval --help)"),
    (["pack", "recipe=photos"], "expected kd-pack recipe=NAME out=FOLDER_OR_URL (kd-pack --help)"),
    *[(words, "{unfinished} is no finished run: it has no student.safetensors")
      for words in (["eval", "{unfinished}"], ["latency", "{unfinished}"], ["export", "to=hub", "{unfinished}"],
                    ["export", "to=openvino", "int8=true", "{unfinished}"])],
    (["export", "to=onnx", "out={two}", "{run}"], "out: {two} exists already and is not an empty folder"),
    (["latency", "runtime=onnx", "{clean}"], "runtime: {clean} has no export 'onnx' that this machine made"),
    (["eval", "margin=1", "split=val", "{run}"], "split: these pictures chose the best epoch of {run}"),
    (["eval", "margin=1", "split=train", "{run}"], "split: train can't certify"),
    (["eval", "margin=1", "folder={data}/train", "{run}"], "folder: can't certify: 48 of its 48 pictures are training"),
    (["eval", "margin=1", "folder={copy}", "{run}"], "folder: these pictures chose the best epoch of {run}"),
    (["eval", "margin=1", "groups=(x.x)", "folder={test}", "{run}"], "groups: '(x.x)' is not in "),
    (["eval", "margin=1", "folder={test}", "model.teacher.checkpoint=no.pth", "{run}"],
     "margin: {run} has no teacher that"),
    (["eval", "margin=1", "arch=resnet18", "folder={test}", "{bare}"], "margin: {bare} has no teacher"),
    (["eval", "cascade=true", "split=val", "{run}"], "split: these pictures chose the best epoch of {run}"),
    (["eval", "cascade=true", "{run}", "{run}"], "cascade: takes one run, or one weights file, got 2"),
    (["train", "recipe=distill"], "no teacher yet: recipe=photos fine-tunes one first"),
    (["train", "resume={zero}", "trainer.devices=1", "trainer.max_epochs=3"], "; optim.zero=false trains on one"),
    (["train", "recipe=foodtag_vit", "config=smddp_4x8"], "trainer.strategy: needs SageMaker's package"),
    (["train", "recipe=finetune"], "model.student.arch: which model? "),
]  # fmt: skip
"""What a folder tells, and what a model needs."""
WITHOUT_PICTURES = {
    "card": "reads a run's records",
    "latency": "draws its pictures",
    "launch": "the pictures are where it sends the run",
    "report": "reads a run's records",
    "runs": "reads runs' records",
    "serve": "is sent its pictures, and exports through kd-export",
}
LINES += PICTURES + PLACES


def test_no_command_leaves_its_pictures_unchecked() -> None:
    checked = {words[0] for words, _ in PICTURES}
    assert checked.isdisjoint(WITHOUT_PICTURES)
    assert checked | WITHOUT_PICTURES.keys() == COMMANDS.keys()


def draw(folder: Path) -> dict[str, Path]:
    """Folders and a table whose files are empty: a list of them is all that is read.

    Returns:
        The places by name.
    """
    places = {name: folder / name for name in ("two", "one", "text", "empty", "pictures")}
    for split in ("train", "val"):
        for place, label, ending in (
            ("two", "a", "jpg"),
            ("two", "b", "jpg"),
            ("one", "a", "jpg"),
            ("text", "a", "txt"),
        ):
            holder = places[place] / split / label
            holder.mkdir(parents=True)
            for i in range(4):
                (holder / f"{i}.{ending}").touch()
    places["empty"].mkdir()
    places["kaggle"] = folder / "kaggle"
    for holder in ("train", "test", "flat"):
        (places["kaggle"] / holder).mkdir(parents=True)
        (places["kaggle"] / holder / "0.jpg").touch()
    for name in ("sample_submission.csv", "test.csv", "train.csv", "flat/labels.csv"):
        (places["kaggle"] / name).write_text("id,label\n0,a\n")
    places["pictures"].mkdir()
    rows = ["path,label"]
    for i in range(4):
        (places["pictures"] / f"{i}.jpg").touch()
        rows.append(f"{i}.jpg,{'ab'[i % 2]}")
    places["table"] = folder / "table.csv"
    places["table"].write_text("\n".join(rows))
    return places


def stopped_copy(finished: Path, folder: Path) -> Path:
    """A copy of a finished run that was interrupted after three epochs, as its files have it."""
    shutil.copytree(finished, folder)
    summary = summary_of(folder)
    summary |= {"status": "interrupted", "epochs": 3}
    write_json(folder / "summary.json", summary)
    return folder


def test_a_finished_run_is_resumed_without_torch_where_nothing_is_left(
    finished: Path, tmp_path: Path
) -> None:
    commands_of_resume = [["train", f"resume={finished}"]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands_of_resume)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "KD_CACHE": str(tmp_path / "cache"), "PATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    status, out, err, torch = json.loads(done.stdout)
    line = f"kd-train: all 1 epochs of {finished} are done; trainer.max_epochs=2 trains on\n"
    assert (status, out, err, torch) == (0, line, "", [])


@pytest.mark.parametrize("metadata", [{}, {"classes": '["a"]', "classifies": "false"}], ids=str)
def test_features_go_to_no_table(metadata: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "student.safetensors"
    about = {"arch": "resnet10t", "kwargs": json.dumps({"num_classes": 0}), **metadata}
    save_file({"weight": np.zeros(1, np.float32)}, file, about)
    answers = answers_of(file)
    assert answers == "features"
    with refuses("out: must end in .npz for features, got 'x.csv'"):
        check_out(answers, Path("x.csv"))


def test_a_table_names_the_answers_of_the_tasks() -> None:
    from kd import tasks

    listed_answers = {}
    for name in tasks.__all__:
        if name not in ("Task", "Features"):
            listed_answers[name] = getattr(tasks, name).answers
    assert listed_answers == ANSWERS


def beside(finished: Path, folder: Path) -> dict[str, Path]:
    """What lies beside a finished run, by name: its pictures, a copy of them, others, a run without a student."""
    places = {name: folder / name for name in ("unfinished", "clean", "copy", "test", "zero")}
    places |= {"data": finished.parents[2] / "data", "bare": folder / "bare.pth"}
    shutil.copytree(places["data"] / "val", places["copy"])
    draw_folder(places["test"], train=0, val=16, size=44)
    places["test"] /= "val"
    shutil.copytree(finished, places["clean"], ignore=shutil.ignore_patterns("export"))
    of_two = shutil.copytree(finished, places["zero"]) / "config.yaml"
    of_two.write_text(of_two.read_text().replace("zero: false", "zero: true"))
    places["unfinished"].mkdir()
    shutil.copy(finished / "config.yaml", places["unfinished"])
    places["bare"].touch()
    return places


def test_in_one_line_without_torch(finished: Path, tmp_path: Path) -> None:
    names = {
        **beside(finished, tmp_path),
        "weights": finished / "student.safetensors",
        "run": finished,
        "here": tmp_path,
        **draw(tmp_path),
        "stopped": stopped_copy(finished, tmp_path / "stopped"),
    }
    (tmp_path / "mine.py").write_text("class Gap:\n    pass\n\n\nclass Far:\n    pass\n")
    commands = []
    for words, _ in LINES:
        commands.append([word.format(**names) for word in words])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "KD_CACHE": str(tmp_path / "cache"), "PATH": "",
                           "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(LINES), done.stderr
    other = []
    for (words, message), (status, out, err, torch) in zip(LINES, results, strict=True):
        assert (status, out, torch) == (2, "", []), (words, out, err)
        told = [line for line in err.splitlines() if not line.endswith(": loading optuna ...")]
        assert len(told) == 1, err
        assert told[0].startswith(f"kd-{words[0]}: ")
        expected = message.format(**names)
        if expected not in err:
            other.append((words, expected, err))
    assert other == [], "\n".join(map(str, other))
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "cache").glob("foodtag*"))


def test_the_table_of_losses_is_that_of_the_tasks() -> None:
    """The check without torch decides as the tasks do."""
    from kd import losses, tasks

    names = []
    for one in listed.classes():
        if one.kind == "loss" and issubclass(getattr(losses, one.short), losses.LogitLoss):
            names.append(one.short)
    assert sorted(names) == sorted([*OVER_LOGITS, "StandardizedLoss"])
    for task, allowed in ALLOWED_LOSSES.items():
        for name in OVER_LOGITS:
            refused = getattr(tasks, task)(3).refuses(getattr(losses, name)())
            assert (refused != REFUSED_LOSSES[task]) == (name in allowed), (task, name)


def test_pictures_that_were_listed_are_taken_over_once(finished: Path) -> None:
    run = Run.of(translate([f"recipe={finished / 'config.yaml'}"]))
    listed_splits = list_to_train(run.config)
    run.splits = listed_splits
    build(run)
    assert listed_splits is not None
    assert run.data.splits is listed_splits
    assert run.data.source is listed_splits.source
    first = run.data.splits.listed("train")[0]
    build(run)
    assert run.data.splits is not listed_splits
    assert identity(run.data.splits.listed("train")[0]) == identity(first)


def test_a_list_that_takes_long_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kd.run.pictures.SLOW_S", 0.0)
    shown = ""
    with said_when_slow("photos"):
        while not shown:  # until the other thread has printed it
            shown = capsys.readouterr().out
    assert shown.startswith("photos: listing the pictures ...")


STILL = [
    "data.augment.hflip=0",
    "data.augment.color_jitter=0",
    "data.augment.mixup=0",
    "data.augment.cutmix=0",
]


@pytest.mark.parametrize(
    "word",
    ["data.augment.repeat=3", "data.augment.before_resize=true", "data.augment.mix_probability=0.5",
     "trainer.gradient_clip_algorithm=norm"],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(word: str) -> None:
    request = translate(["recipe=photos", *STILL, "trainer.gradient_clip_val=null", word])
    with refuses(rf"^{word.partition('=')[0]}: .* has no effect with "):
        request.check_read(request.resolved())
    on = ["data.augment.rotation=5", "data.augment.mixup=1", "trainer.gradient_clip_val=1"]
    request = translate(["recipe=photos", *STILL, *on, word])
    request.check_read(request.resolved())
