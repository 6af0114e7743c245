"""Odd command lines and files from elsewhere: each ends in one line, with exit status 2, and nothing is written."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kd import progress as _bar
from kd.cli import kd_main, main
from kd.commands import pack
from kd.errors import RunError
from kd.run.request import Request
from tests._helpers import ROOT, write_recipe
from tests._runs import run_of

WRONG = [
    ("optim.kwargs={betas: [0.9]}", "optim.kwargs: adamw can't work with"),
    ("optim.kwargs.eps=abc", "optim.kwargs: adamw can't work with"),
    ("optim.kwargs.lr=3", "optim.kwargs.lr: is optim.lr"),
    ("seed=-1", "seed: must be >= 0"),
    ("seed=99999999999999", "seed: must be >= 0"),
    ("seed=" + "9" * 5000, "seed: "),
    ("seed=${oc.env:NO_SUCH_VARIABLE}", "seed: "),
    ("seed=${", "seed: "),
    ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches: must be >= 1, got 0"),
    ("trainer.limit_train_batches=0", "trainer.limit_train_batches: must be > 0"),
    (
        "trainer.enable_checkpointing=false",
        "trainer.enable_checkpointing: must be true: a run is resumed from its",
    ),
    ("trainer.barebones=true", "trainer.barebones: must be false: "),
    (
        "trainer.callbacks+=RichProgressBar",
        "trainer.callbacks: RichProgressBar can't be added to the run's own",
    ),
    ("debug", "did you mean 'config=debug'?"),
    ("trainer.max_steps=0", "trainer.max_steps: must be >= 1"),
    ("trainer.val_check_interval=0", "trainer.val_check_interval: must be > 0"),
    ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch: must be >= 1, got 0"),
    ("trainer.precision=16-true", "trainer.precision: 16-true has no room for gradients"),
    ("data.augment.rand_augment=31", "data.augment.rand_augment: must be >= 0 and <= 30, got 31"),
    (
        "optim.name=adahessian",
        "optim.name: must not be that of an optimizer that needs second derivatives",
    ),
    ("checkpoint.monitor=", "checkpoint.monitor: must not be empty"),
    ("data.unlabeled=", "data.unlabeled: must not be empty"),
    ("model.teacher.checkpoint=", "model.teacher.checkpoint: must not be empty"),
    (
        "model.teacher.class_map={pear: apple}",
        "model.teacher.class_map: 'pear' is no class of the data",
    ),
    ("trainer.val_check_interval=1000", "trainer: ValueError: `val_check_interval`"),
    ("trainer.accelerator=tpu", "trainer: "),
    ("trainer.precision=transformer-engine", "trainer: "),
    ("trainer.strategy=ddp_notebook", "trainer.strategy: 'ddp_notebook' is not supported"),
    ("trainer.strategy.backend=nothing", "trainer.strategy"),
    ("trainer.max_time=soon", "trainer.max_time: must be DAYS:HOURS:MINUTES:SECONDS, each below"),
    ("trainer.max_time={days: 1000000000}", "trainer.max_time: must be >= 0 and < 1000000, got"),
    ("data.num_workers=100000", "data.num_workers: must be >= 0 and <= 1024, got 100000"),
    ("data.augment.pad=5000", "data.augment.pad: must be >= 0 and <= 4096, got 5000"),
    ("data.augment.repeat=100000", "data.augment.repeat: must be >= 1 and <= 1000, got 100000"),
    ("model.student.kwargs.depth=60000", "model.student.kwargs.depth: must be <= 1000, got 60000"),
    ("trainer={max_epochs: x}", "trainer.max_epochs: must be a whole number, got 'x'"),
    ("trainer.logger=WandbLogger", "trainer.logger: WandbLogger needs the package wandb"),
    ("trainer.logger=TensorBoardLogger", "trainer.logger: "),
    ("model.student.kwargs.num_heads=0", "model.student: vit_tiny_patch16_224 can't be built with"),
    (
        "model.student.kwargs.patch_size=0",
        "model.student: vit_tiny_patch16_224 can't be built with",
    ),
    (
        "model.student.kwargs.in_chans=1",
        "model.student: vit_tiny_patch16_224 can't take pictures of",
    ),
    (
        "model.student.kwargs.act_layer=nonsense",
        "model.student: vit_tiny_patch16_224 can't be built with",
    ),
    (
        "model.student.kwargs.checkpoint_path=x",
        "model.student.kwargs.checkpoint_path: can't be an argument of the",
    ),
    ("model.student={}", "model.student: {} sets nothing"),
    (
        "model.teacher.cache=only",
        "model.teacher.cache: only, but 48 of an epoch's answers are missing",
    ),
    (
        "model.teacher={cache: 'on', cache_views: 1000000000}",
        "model.teacher.cache_views: must be >= 1 and <= 10000",
    ),
    (
        "model.distill_losses.kd.temperature=1e400",
        "model.distill_losses.kd.temperature: must be a number, got",
    ),
    ("model.distill_losses.kd.weight=null", "model.distill_losses.kd.weight: can't be null"),
    (
        "data={img_size: 4096, batch_size: 1000000}",
        "data.img_size: a batch of 1000000 pictures of 4096x4096 is larger than the memory",
    ),
    ("data.img_size=10000000", "data.img_size: must be >= 1 and <= 4096, got 10000000"),
    (
        "model.student.img_size=[100000, 32]",
        "model.student.img_size: must be >= 1 and <= 4096, got [100000, 32]",
    ),
    ("data.img_size=0", "data.img_size: must be >= 1 and <= 4096, got 0"),
    ("data.crop_ratio=1e-9", "data.crop_ratio: must be >= 0.1 and <= 1, got '1e-9'"),
    ("data.unlabeled_ratio=1e12", "data.unlabeled_ratio: must be > 0 and <= 10000"),
    ("data.source.root=/" + "a" * 5000, "File name too long"),
    ("data=3", "data: has settings of its own (data.NAME=VALUE), got '3'"),
    ("runs_dir=", "runs_dir: must not be empty"),
    ("runs_dir=a\nb", "runs_dir: must hold no control characters, got 'a\\nb'"),
    (
        'model.student.kwargs={\n norm: "a\\x07"\n}',
        "model.student.kwargs.norm: must hold no control characters",
    ),
    ("--quiet", "no option --quiet"),
    ("name=../x", "name: must be letters, digits, . + - _ alone, the first a letter, got '../x'"),
    ("name=a/b", "name: must be letters, digits, . + - _ alone"),
    ("name=7", "name: must be letters, digits, . + - _ alone, the first a letter"),
    ("model.taps.at.student=blocks.0", "needs teacher"),
]


def told(items: list[str], capsys: pytest.CaptureFixture[str], program: str = "train") -> str:
    """The one line that a command ends in."""
    assert main(program, items) == 2
    lines = [
        x for x in capsys.readouterr().err.replace("\r", "\n").splitlines() if x.startswith("kd-")
    ]
    assert len(lines) == 1
    assert "KD_TRACEBACK" not in lines[0] or "File name too long" in lines[0]
    return lines[0]


@pytest.mark.parametrize(("item", "message"), WRONG, ids=[item[:60] for item, _ in WRONG])
def test_an_odd_setting(
    item: str, message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in told([item, f"recipe={recipe}"], capsys)
    assert not (recipe.parent / "runs").exists()


def test_deepspeeds_flat_shards_have_no_matrices_for_muon(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [f"recipe={recipe}", "config=deepspeed", "optim.name=muon"]
    assert "optim.name: must be adamw, adam, sgd or momentum with DeepSpeed" in told(items, capsys)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "the key 'seed' is given twice"),
        ("seed: " + "7" * 6000, "is no YAML: a number of 6000 characters"),
        ("seed: \0\n", "is no YAML"),
        ("data: 3\n", "data: has settings of its own (data.NAME=VALUE), got '3'"),
        ("recipe: ../../elsewhere\n", "recipe: names the run's folder"),
        ("trainer: {logger: {class_path: antigravity.Logger}}\n", "not among the classes"),
        ("trainer: {callbacks: [tests._kills.KillAtStep]}\n", "trust=tests._kills, or --trust"),
        ("data: {source: this.Source}\n", "not among the classes"),
        (
            "trainer: {logger: {class_path: torch.hub.load}}\n",
            "names torch.hub.load, which is not among the classes",
        ),
        ("seed: ${oc.env:HOME}\n", "looks up '${oc.env:HOME}'"),
        ('runs_dir: "a\\nb"\n', "overlay.yaml: runs_dir: must hold no control characters"),
        ("seed: ${nothing}\n", "seed looks up '${nothing}'"),
    ],
)
def test_an_odd_file_from_elsewhere(
    text: str, message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = recipe.parent / "overlay.yaml"
    overlay.write_text(text)
    assert message in told([f"recipe={recipe}", f"config={overlay}"], capsys)
    assert not (recipe.parent / "runs").exists()
    assert "antigravity" not in sys.modules


CALLBACK = """\
from pytorch_lightning import Callback

class Mine(Callback):
    pass
"""


def test_own_classes_in_own_files_and_trusted_ones_elsewhere(
    tmp_path: Path,
    pictures: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_classes.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = write_recipe(
        tmp_path / "r.yaml", pictures, teacher, trainer__callbacks=["own_classes.Mine"]
    )
    line = [f"recipe={recipe}", "config=debug"]
    assert "r.yaml: trainer.callbacks names own_classes.Mine, which is not among" in told(
        line, capsys
    )
    for trust in ("--trust", "trust=own_classes"):
        assert main("train", [*line, trust, "--print_config"]) == 0
    monkeypatch.chdir(tmp_path)  # a recipe of one's own checkout
    assert main("train", line) == 0
    run = tmp_path / "runs" / "tiny" / "000"
    capsys.readouterr()
    assert (
        main("train", [f"resume={run}", "trainer.max_epochs=2", "--print_config"]) == 0
    )  # a run of one's own
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(
        yaml.safe_dump({**config, "seed": 1})
    )  # no longer what was started here
    capsys.readouterr()
    assert "config.yaml: trainer.callbacks names own_classes.Mine" in told(
        [str(run)], capsys, "eval"
    )


@pytest.mark.parametrize(
    ("program", "own"),
    [("train", []), ("pack", ["out=o"]), ("cache", []), ("scale", []), ("size", []),
     ("tune", ["search.optim.lr=0..1"])],
)  # fmt: skip
def test_a_word_that_is_no_setting_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], program: str, own: list[str]
) -> None:
    said = told([f"recipe={recipe}", *own, "junk"], capsys, program)
    assert "junk" in said


def test_an_overlay_without_a_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(["--describe", str(tmp_path), "config=debug"], capsys, "cache")
    assert "config: debug changes a recipe, and none is given" in said


def test_kd_pack_and_kd_report(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "out: must not be empty" in told([f"recipe={recipe}", "out="], capsys, "pack")
    assert "short_side: must be" in told(
        [f"recipe={recipe}", f"out={tmp_path / 'o'}", "short_side=²"], capsys, "pack"
    )
    assert "run folder /nonexistent/x not found" in told(["/nonexistent/x"], capsys, "report")
    assert "is no run's folder" in told([str(tmp_path)], capsys, "report")


def test_a_recipe_without_a_name_takes_its_files(tmp_path: Path, pictures: Path, capsys) -> None:
    recipe = write_recipe(tmp_path / "mine.yaml", pictures, None, recipe=None)
    assert main("train", [f"recipe={recipe}", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["recipe"] == "mine"


def test_a_traceback_for_those_who_ask() -> None:
    code = "import kd.commands.pack as p; p.run = lambda r: 1 / 0; from kd.cli import main; exit(main('pack', []))"
    for asked, status, lines in ((None, 2, 1), ("1", 1, 5)):
        env = {"PATH": "", "PYTHONPATH": str(ROOT)} | ({"KD_TRACEBACK": asked} if asked else {})
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == status
        assert "ZeroDivisionError" in done.stderr
        assert len(done.stderr.splitlines()) >= lines and (
            asked or len(done.stderr.splitlines()) == 1
        )


def test_a_failure_without_a_runs_folder_is_status_1_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(request: Request) -> int:
        raise RunError("data.num_workers: no shared memory is left")

    monkeypatch.setattr(pack, "run", fail)
    assert main("pack", []) == 1
    assert capsys.readouterr().err == "kd-pack: data.num_workers: no shared memory is left\n"


def test_taps_and_teachers_one_field_at_a_time(
    recipe: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taps = [
        "model.taps.at.student=blocks.0",
        "model.taps.at.teacher=blocks.1",
        "model.distill_losses.at=ATLoss",
    ]
    other = [
        "model.teacher=null",
        "model.teachers.a.arch=resnet18",
        "model.teachers.a.kwargs.drop_rate=0.1",
    ]
    for items, key, want in (
        (taps, "taps", {"at": {"student": "blocks.0", "teacher": "blocks.1", "tokens": "patch"}}),
        ([*taps, "model.taps={at: {student: norm, teacher: norm}}"], "taps", None),
        (other, "teachers", None),
    ):
        assert main("train", [f"recipe={recipe}", *items, "--print_config"]) == 0
        found = yaml.safe_load(capsys.readouterr().out)["model"][key]
        assert found == want if want else found
    assert found["a"]["kwargs"] == {"drop_rate": 0.1}


def test_output_that_is_no_terminal_is_lines(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("train", [f"recipe={recipe}", "preflight=warn"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch   1", "epoch   2"]
    assert not [line for line in lines if "\r" in line or "%|" in line]
    run = run_of(recipe)
    for file, message in (
        ("best.ckpt", "holds weights alone"),
        ("none.ckpt", "none.ckpt not found"),
    ):
        assert message in told([f"resume={run / 'checkpoints' / file}"], capsys)
    assert (
        main("train", [f"resume={run / 'checkpoints' / 'last.ckpt'}", "trainer.max_epochs=3"]) == 0
    )
    assert (run / "metrics.csv").read_text().count("\n2,") or "epoch   3" in capsys.readouterr().err


def test_a_long_bar_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    clock = iter(range(0, 1000, 3))
    made = _bar.bar(range(12), label="waiting", total=12)
    monkeypatch.setattr(made, "_time", lambda: made.start_t + next(clock))
    for _ in made:
        pass
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 5
    assert all(line.startswith("waiting") for line in lines)


def test_kd_alone_lists_the_commands_and_runs_each(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert kd_main([]) == 0
    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert listed[0] == "train" and {f"kd-{name}" for name in listed} == set(scripts) - {"kd"}
    assert kd_main(["runs", "--help"]) == main("runs", ["--help"]) == 0
    first, second = capsys.readouterr().out.split("kd-runs: ")[1:]
    assert first == second
    assert kd_main(["exprot"]) == 2
    assert "kd: no command 'exprot'; did you mean 'kd export'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "items", "option"),
    [("export", ["run", "to=onnx", "--dry-run"], "--dry-run"), ("tune", ["recipe=x", "--dry-run"], "--dry-run"),
     ("runs", ["--open"], "--open"), ("eval", ["run", "--what-if"], "--what-if"),
     ("report", ["run", "--json"], "--json")],
)  # fmt: skip
def test_an_option_of_another_command(
    command: str, items: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(items, capsys, command).startswith(f"kd-{command}: no option {option}")


def test_a_batch_of_one_before_batchnorm_is_named_by_its_key(
    tmp_path: Path, pictures: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A map of one pixel has no variance over a single picture: kd's words, in place of torch's."""
    student = {"arch": "resnet10t", "img_size": 32}
    recipe = write_recipe(tmp_path / "tiny.yaml", pictures, teacher, model__student=student)
    items = [f"recipe={recipe}", "data.batch_size=1", "trainer.max_steps=1"]
    assert main("train", items) == 1
    error = capsys.readouterr().err
    assert "kd-train: failed: data.batch_size: must be >= 2 in each process" in error
    assert "Expected more than 1 value" not in error


def test_a_cache_folder_that_cannot_be_made_names_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    """A command that keeps something there says where, why, and by what to name another place."""
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for folder in (taken, taken / "below"):
        monkeypatch.setenv("KD_CACHE", str(folder))
        line = (
            refusal("train", ["recipe=foodtag_vit", f"runs_dir={tmp_path / 'runs'}"])
            .strip()
            .splitlines()[-1]
        )
        assert line.startswith(f"kd-train: KD_CACHE: kd's cache folder {folder} can't be written")
        assert "KD_CACHE=DIR before the command" in line
    assert not (tmp_path / "runs").exists()
