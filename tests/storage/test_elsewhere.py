"""Hostile files: each names what must not happen, and the test looks whether it did."""

import json
import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save

import kd
from kd.cli import main
from kd.config.parts import part
from kd.run.build import built
from kd.run.gate import check_foreign
from kd.run.request import Request
from kd.run.resolve import resolve
from kd.run.run import Run
from kd.run.trust import Trust
from kd.storage.elsewhere import mapping_of, yaml_of
from kd.storage.of_weights import write_of_weights
from tests._files import read_json, read_yaml, write_json, write_yaml
from tests._helpers import TINY, Command, draw_folder, refuses, save_teacher, write_recipe
from tests._runs import resumed, run_of, summary_of
from tests._runs import run as trained


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere")
    data = draw_folder(folder / "data")
    return write_recipe(
        folder / "r.yaml", data, save_teacher(folder / "teacher.safetensors"), trainer__max_epochs=1
    )


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A finished run, as a stranger would send one."""
    trained(recipe)
    return run_of(recipe)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil, in a folder of its own."""
    import shutil

    return Path(shutil.copytree(run, tmp_path / "runs" / "tiny" / "000"))


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module within reach whose import, and whose class, leave a file behind: it must never be there."""
    marker = tmp_path / "HACKED"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "evil_code.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n\n"
        "from pytorch_lightning import Callback\n\nclass Evil(Callback):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield marker
    sys.modules.pop("evil_code", None)


@pytest.fixture
def refused(refusal: Command) -> Command:
    """The one line with which a command refuses."""

    def line_of(program: str, items: Sequence[str]) -> str:
        # a package that no test before has imported is announced
        lines = [x for x in refusal(program, items).splitlines()
                 if x.startswith("kd-") and not re.search(r": loading \w+ \.\.\.$", x)]  # fmt: skip
        assert len(lines) == 1, lines
        return lines[0]

    return line_of


def test_what_one_call_trusts_the_next_does_not(evil: Path) -> None:
    config = resolve([{"trainer.callbacks": [{"class_path": "evil_code.Evil"}]}])
    callbacks = config["trainer"]["callbacks"]
    assert not evil.exists()  # settings are resolved without an import
    (built_callback,) = built(
        part("callback"), callbacks, "trainer.callbacks", Trust(["evil_code"])
    )
    assert type(built_callback).__name__ == "Evil" and evil.exists()  # it was trusted
    evil.unlink()
    del sys.modules["evil_code"]
    for trusted in (Trust(), Trust(["other.package"])):
        with refuses(r"trainer\.callbacks"):
            built(part("callback"), callbacks, "trainer.callbacks", trusted)
        with refuses(r"x.yaml: trainer\.callbacks"):
            check_foreign(Path("x.yaml"), [config], trusted.names)
    # at a place of plain values nothing is built, whoever is trusted
    assert built(dict, callbacks[0], "optim.kwargs", Trust(["*"])) == callbacks[0]
    assert not evil.exists() and "evil_code" not in sys.modules


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.tier.address", "evil.example:6379"),
        ("monitor.webhook", "http://169.254.169.254/x"),
        ("monitor.otlp", "http://evil.example:4318"),
        ("monitor.prometheus_host", "0.0.0.0"),
    ],
)
def test_a_recipe_from_elsewhere_names_no_other_machine(
    key: str, value: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's cluster answers in pickles; the others are sent what the run knows."""
    file = tmp_path / "x.yaml"
    tree: object = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    write_yaml(file, tree)
    beside = ["data.engine=ray", "data.num_workers=2"] if key.startswith("data.tier") else []

    def settings(*more: str) -> dict:
        return Run.of(Request(str(recipe), [str(file)], [*beside, *more])).config

    with refuses(rf"^{key}: a file from elsewhere names no other machine"):
        settings()
    settings(f"{key}={value}")  # typed
    monkeypatch.chdir(tmp_path.parent)  # one's own files
    settings()


# -- recipes -----------------------------------------------------------------------------------------------------------

SHELL = {"class_path": "os.system", "init_args": {"command": "touch MARKER"}}
RECIPES = {
    "interpolated": {"recipe": "evil_code.Evil", "trainer": {"callbacks": [{"class_path": "${recipe}"}]}},
    "in parts": {"recipe": "Evil", "trainer": {"callbacks": [{"class_path": "evil_code.${recipe}"}]}},
    "a whole node": {"model": {"teachers": {"a": {"builder": {"class_path": "evil_code.Evil"}}}},
                     "trainer": {"callbacks": ["${model.teachers.a.builder}"]}},
    "text of losses": {"model": {"distill_losses": "{kd: {class_path: evil_code.Evil}}"}},
    "text": {"trainer": {"callbacks": "[{class_path: evil_code.Evil}]"}},
    "settings that fail": {"recipe": "os.system", "optim": {"lr": -1},
                           "model": {"x": {**SHELL, "class_path": "${recipe}"}}},
    "a function of ours": {"model": {"task": {"class_path": "kd.run.build.task_of"}}},
    "by a module of torch": {"trainer": {"callbacks": [{"class_path": "torch.os.system"}]}},
    "a callable": {"trainer": {"callbacks": [{"class_path": "pytorch_lightning.callbacks.LambdaCallback",
                                               "init_args": {"on_fit_start": "os.getcwd"}}]}},
    "the environment, nested": {"model": {"ema_decay": "oc.env", "teacher": {"arch": "${${model.ema_decay}:HOME}"}}},
    "the environment, in parts": {"name": "$", "model": {"student": {"arch": "${name}{oc.env:HOME}"}}},
}  # fmt: skip


SEVERAL = ("interpolated", "text of losses", "a function of ours")
"""Those that come by each way: the ways lead to one reader."""


def spoilt(settings: dict, marker: Path) -> dict:
    return json.loads(json.dumps(settings).replace("MARKER", str(marker)))


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "recipe") for kind in RECIPES), *product(SEVERAL, ["config", "resume", "cache"])],
)
def test_a_recipe_from_elsewhere_runs_nothing(
    kind: str,
    way: str,
    recipe: Path,
    request: pytest.FixtureRequest,
    evil: Path,
    refused: Command,
) -> None:
    own = spoilt(RECIPES[kind], evil)
    if way == "resume":
        folder = request.getfixturevalue("copied")
        file, items = folder / "config.yaml", [f"resume={folder}"]
    else:
        file = evil.parent / "x.yaml"
        items = [f"recipe={recipe}", f"config={file}"] if way == "config" else [f"recipe={file}"]
    base = {} if way == "config" else read_yaml(file if way == "resume" else recipe)
    write_yaml(file, merged(base, own), explicit_end=True)
    refused("cache" if way == "cache" else "train", items)
    assert not evil.exists() and "evil_code" not in sys.modules


def merged(base: dict, own: dict) -> dict:
    for key, value in own.items():
        base[key] = (
            merged(base.get(key) or {}, value)
            if isinstance(value, dict) and key != "source"
            else value
        )
    return base


@pytest.mark.parametrize(
    "space", ["[evil_code.Evil]", "'[evil_code.Evil]'", "'[{class_path: evil_code.Evil}]'"]
)
def test_a_search_from_elsewhere_names_no_code(
    space: str,
    recipe: Path,
    evil: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Command,
) -> None:
    file = evil.parent / "tune.yaml"
    file.write_text(f"search: {{trainer.callbacks: [{space}]}}\n")
    monkeypatch.chdir(recipe.parent)  # the recipe is one's own
    assert "names evil_code.Evil" in refused("tune", [f"recipe={recipe}", f"tune={file}"])
    assert not evil.exists()


def test_a_mistake_is_named_and_nothing_is_built_in_search_of_it(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Command,
) -> None:
    (tmp_path / "counted_builds.py").write_text(
        "from pytorch_lightning import Callback\n\nclass Counts(Callback):\n"
        "    def __init__(self, number: int = 0) -> None:\n"
        "        with open(__file__ + '.log', 'a') as log:\n            log.write('x')\n"
        "        if number < 0:\n            raise ValueError(f'number must be >= 0, got {number}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, -1):
        callbacks = f"trainer.callbacks=[{{class_path: counted_builds.Counts, init_args: {{number: {number}}}}}]"
        line = refused(
            "train", [f"recipe={recipe}", callbacks, "model.distill_losses.kd.temperature=-1"]
        )
        log = tmp_path / "counted_builds.py.log"
        assert len(log.read_text() if log.exists() else "") <= 1
        log.unlink(missing_ok=True)
        assert (
            "must be > 0, got -1" in line
            or "trainer.callbacks.number: must be >= 0, got -1" in line
        )


# -- a student's file --------------------------------------------------------------------------------------------------


def respoken(file: Path, **meta: object) -> None:
    """The same weights under other metadata."""
    from kd.storage.weights_files import read_metadata

    said = {k: v if isinstance(v, str) else json.dumps(v) for k, v in meta.items()}
    file.write_bytes(save(load_file(file), {**read_metadata(file), **said}))


BUILDERS = {
    "a function": {"class_path": "os.system", "init_args": {"command": "touch MARKER"}},
    "a module's": {"class_path": "evil_code.Evil", "init_args": {}},
    "by our modules": {
        "class_path": "kd.models.weights.Path.touch",
        "init_args": {"self": "MARKER"},
    },
    "a function of ours": {
        "class_path": "kd.models.weights.read_names",
        "init_args": {"file": "MARKER", "key": ""},
    },
    "a protocol": {"class_path": "kd.models.own.Builder", "init_args": {}},
    "the hub": {
        "class_path": "kd.models.hugging_face.HuggingFaceBuilder",
        "init_args": {"path": "owner/name"},
    },
    "no mapping": [1],
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_students_file_runs_nothing(
    kind: str, copied: Path, recipe: Path, evil: Path, refused: Command
) -> None:
    import evil_code  # noqa: F401 - a builder that is there already is as little to be run

    evil.unlink()
    file = copied / "student.safetensors"
    respoken(file, builder=spoilt({"b": BUILDERS[kind]}, evil)["b"])
    with refuses("student.safetensors: "):
        kd.load_student(file)
    for program in ("eval", "predict", "export", "latency") if kind == "a module's" else ():
        more = {"predict": [str(recipe.parent / "data" / "val")], "export": ["to=onnx"]}
        assert "student.safetensors: " in refused(program, [str(copied), *more.get(program, [])])
    assert not evil.exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {
                "kwargs": {
                    "num_classes": 4,
                    "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x"},
                }
            },
            "cfg_ov",
        ),
        ({"kwargs": {"num_classes": 4, "pretrained": True}}, "pretrained: can't be an argument"),
        (
            {"kwargs": {"num_classes": 4, "checkpoint_path": "/etc/passwd"}},
            "checkpoint_path: can't",
        ),
        (
            {"kwargs": {**TINY, "num_classes": 4, "img_size": 32, "depth": 10**6}},
            "depth: must be <= ",
        ),
        (
            {"kwargs": {**TINY, "num_classes": 4, "img_size": 32, "embed_dim": 10**6}},
            "embed_dim: must be <= 65536",
        ),
        (
            {"kwargs": {**TINY, "num_classes": 4, "img_size": 32, "embed_dim": 60_000}},
            "don't fit the model",
        ),
        ({"kwargs": {**TINY, "num_classes": 10**9, "img_size": 32}}, "don't fit the model"),
        ({"img_size": [100_000, 32]}, "img_size must be <= 4096 pixels, got "),
        (
            {"kwargs": {**TINY, "num_classes": 4, "img_size": 100_000}},
            "img_size: must be <= 4096 pixels, got 100000",
        ),
        ({"kwargs": [1]}, "its metadata is damaged: kwargs"),
        ({"arch": "hf-hub:owner/name"}, "which kd can't build"),
        ({"arch": "local-dir:/tmp"}, "which kd can't build"),
    ],
)
def test_what_a_students_file_says_of_its_model(
    said: dict, message: str, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "student.safetensors"
    file.write_bytes((run / "student.safetensors").read_bytes())
    respoken(file, **said)
    with refuses(message):
        kd.load_student(file)


def test_a_transformers_folder_runs_none_of_its_code(
    tmp_path: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kd.models.hugging_face import HuggingFaceBuilder

    code = (evil.parent / "lib" / "evil_code.py").read_text()
    (tmp_path / "configuration_x.py").write_text(code + "\nclass X:\n    pass\n")
    said = {
        "model_type": "x",
        "auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "configuration_x.X"},
    }
    write_json(tmp_path / "config.json", said)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # it must not be asked
    with refuses("is no model of transformers"):
        HuggingFaceBuilder(str(tmp_path)).build(4, None)
    write_json(
        tmp_path / "config.json", {"model_type": "vit", "attn_implementation": "owner/kernel"}
    )
    assert HuggingFaceBuilder(str(tmp_path))._config()._attn_implementation != "owner/kernel"
    assert not evil.exists()


# -- run folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["RUN/checkpoints/../../../../victim", "/victim", "file://VICTIM", "VICTIM"]
)
def test_a_checkpoint_from_elsewhere_removes_nothing(
    where: str, copied: Path, recipe: Path
) -> None:
    victim = copied.parents[2] / "victim"
    victim.mkdir()
    (victim / "keep").touch()
    file = copied / "checkpoints" / "last.ckpt"
    where = (
        where.replace("VICTIM", str(victim))
        .replace("RUN", str(copied))
        .replace("/../../../../../", "/../../../../")
    )
    kind = "pytorch_lightning.callbacks.ModelCheckpoint"
    given = {"monitor": "val/acc1", "mode": "max", "filename": "theirs"}
    config = read_yaml(copied / "config.yaml")
    config["trainer"]["callbacks"] = [{"class_path": kind, "init_args": given}]
    write_yaml(copied / "config.yaml", config, explicit_end=True)
    own = {
        "dirpath": str(copied / "checkpoints"),
        "best_k_models": {where: torch.tensor(-1.0)},
        "last_model_path": "",
    }
    state = {
        "best_model_path": where,
        "kth_best_model_path": where,
        "best_model_score": torch.tensor(-1.0),
    } | own
    content = torch.load(file, weights_only=True)
    content["callbacks"][ModelCheckpoint(**given).state_key] = state
    torch.save(content, file)
    resumed(copied, "trainer.max_epochs=2")
    assert (victim / "keep").is_file()
    assert (copied / "checkpoints" / "theirs.ckpt").is_file()


def test_latest_of_elsewhere_names_no_path(copied: Path, refused: Command) -> None:
    victim = copied.parents[2] / "victim"
    copied.rename(victim)
    before = sorted(victim.rglob("*")), (victim / "config.yaml").read_bytes()
    latest = copied.parent / "latest"
    for make in (
        lambda: latest.write_text("../../victim\n"),
        lambda: latest.symlink_to("../../victim"),
    ):
        latest.unlink(missing_ok=True)
        make()
        assert "must be a plain name" in refused(
            "train", [f"resume={latest}", "trainer.max_epochs=2"]
        )
        assert "must be a plain name" in refused("eval", [str(latest)])
    assert (sorted(victim.rglob("*")), (victim / "config.yaml").read_bytes()) == before


def test_a_bucket_writes_below_the_cache_alone(
    copied: Path, tmp_path: Path, refused: Command, own_cache: Path
) -> None:
    pytest.importorskip("fsspec")
    recipe = copied.parent.as_uri()
    for name in ("../../victim", "..", ".hidden", "a/b", "/etc"):
        (copied.parent / "latest").write_text(name)
        assert "must be a plain name" in refused("train", [f"resume={recipe}/latest"])
    from kd.storage.elsewhere import inside

    (tmp_path / "cache" / "x").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "x" / "link").symlink_to(tmp_path)
    for name in (
        "../../victim",
        "/victim",
        "link/victim",
        "a/../../../victim",
        "..",
        ".",
        "",
        "a\0b",
    ):
        with refuses("leads out of"):
            inside(tmp_path / "cache" / "x", name, "resume")
    for url in (
        "reference::file:///tmp/x",
        "reference://x",
        "dask://127.0.0.1:1/x",
        "zip://x::file:///tmp/x.zip",
        "s3://../../victim/runs/food/000",
    ):
        assert main("train", [f"resume={url}"]) == 2
    assert not (tmp_path / "victim").exists()


def test_what_one_types_oneself_may_lie_anywhere(recipe: Path, tmp_path: Path) -> None:
    place = f"trainer.logger.save_dir={tmp_path / 'logs'}"
    assert (
        main("train", [f"recipe={recipe}", "trainer.logger=CSVLogger", place, "--print_config"])
        == 0
    )


LINKED = (
    "config.yaml.part", "config.yaml", "metrics.csv", "metrics.csv.part", "summary.json.part", "summary.json", ".lock",
    "report.html", "fidelity.json", "student.safetensors.part", "checkpoints/last.ckpt.part",
    "checkpoints/best.ckpt.part",
    "records/step.rank0.jsonl", "records/step.rank0.tmp", "records/system.node0.jsonl",
)  # fmt: skip


def test_links_in_a_run_folder_are_not_followed(
    copied: Path, recipe: Path, tmp_path: Path, refused: Command
) -> None:
    """The run is not opened, and nothing that its links lead to has changed."""
    for number, name in enumerate(LINKED):
        (tmp_path / f"victim{number}").write_text("mine")
        (copied / name).unlink(missing_ok=True)
        if name != "config.yaml":
            (copied / name).symlink_to(tmp_path / f"victim{number}")
    for file in (copied / "records").glob("*"):
        if not file.is_symlink():
            (tmp_path / f"victim-{file.name}").write_text("mine")
            file.unlink()
            file.symlink_to(tmp_path / f"victim-{file.name}")
    assert "is a link" in refused("train", [f"resume={copied}", f"recipe={recipe}"])
    changed = [file.name for file in tmp_path.glob("victim*") if file.read_text() != "mine"]
    assert not changed, [LINKED[int(name[6:])] if name[6:].isdigit() else name for name in changed]


# -- sizes -------------------------------------------------------------------------------------------------------------


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text", [bomb(30), "a: &a [*a]\n", "a: " + "[" * 1_000, "a: &a {<<: *a}\n"]
)
def test_yaml_that_grows(
    text: str, recipe: Path, copied: Path, capsys: pytest.CaptureFixture[str], refused: Command
) -> None:
    (copied / "x.yaml").write_text(text)
    (copied / "config.yaml").write_text(text)
    assert "is no YAML" in refused("train", [f"recipe={copied / 'x.yaml'}"])
    assert "is no YAML" in refused("train", [f"resume={copied}"])
    assert "is no YAML" in refused("tune", [f"recipe={recipe}", f"tune={copied / 'x.yaml'}"])
    assert main("report", [str(copied)]) == 0
    assert "config.yaml can't be read" in capsys.readouterr().err


def test_anchors_are_fine(recipe: Path, tmp_path: Path) -> None:
    text = (
        recipe.read_text() + "monitor: &a {enabled: true}\ncheckpoint: {<<: {every_n_steps: 5}}\n"
    )
    (tmp_path / "x.yaml").write_text(text)
    assert main("train", [f"recipe={tmp_path / 'x.yaml'}", "--print_config"]) == 0


def test_a_program_of_torch_from_elsewhere_is_not_opened(copied: Path, refused: Command) -> None:
    program = copied / "export" / "torch_export" / "model.pt2"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"code")
    known = {
        "torch_export": {"kept": True, "to": "torch_export", "file": str(program), "int8": False}
    }
    write_of_weights(copied, "export/export.json", known)
    line = refused(
        "latency", [str(copied), "runtime=torch_export", "seconds=0.01", "batch=1", "threads=1"]
    )
    assert "that this machine made" in line


# -- what is cut short, and what others read ---------------------------------------------------------------------------


def test_settings_cut_short_are_not_believed(copied: Path, refused: Command) -> None:
    config = copied / "config.yaml"
    whole = config.read_text()
    lines = whole.splitlines(keepends=True)
    cuts = ["".join(lines[:n]) for n in range(2, len(lines), 40)] + [
        whole[:-2],
        whole[: len(whole) // 2],
    ]
    for text in cuts:
        config.write_text(text)
        line = refused("train", [f"resume={copied}", "trainer.max_epochs=2"])
        assert any(why in line for why in ("is truncated", "is no YAML", "must hold settings"))
    config.write_text(whole)
    resumed(copied, "trainer.max_epochs=2", "--print_config")


BAD = "x`|<script>alert(1)</script>\n# [a](http://b) *c*"


def test_names_in_a_card_open_no_markup(copied: Path) -> None:
    summary = summary_of(copied)
    summary["recipe"], summary["student"]["arch"], summary["teacher"]["arch"] = BAD, BAD, BAD
    write_json(copied / "summary.json", summary)
    row = {
        "model": BAD,
        "runtime": BAD,
        "threads": 1,
        "batch": 1,
        "median_ms": 1,
        "p95_ms": 1,
        "images_per_s": 1,
    }
    write_of_weights(copied, "export/latency.json", {"machine": BAD, "rows": [row]})
    fidelity = read_json(copied / "fidelity.json")
    fidelity |= {
        "score": BAD,
        "per_class": [{"name": BAD, "count": 3, "student": 0.1, "teacher": 0.2}],
    }
    write_json(copied / "fidelity.json", fidelity)
    assert main("card", [str(copied)]) == 0
    text = next(copied.glob("*.md")).read_text().split("\n---\n", 1)[1]
    assert "script" in text and not re.search(
        r"(?<!\\)(<script|\[a\]\(|\*c\*|`\\?\|)|^# \[", text, re.M
    )


def test_a_report_fetches_nothing(copied: Path) -> None:
    fidelity = read_json(copied / "fidelity.json")
    example = {"image": "http://127.0.0.1:9/pixel.png", "name": "x"}
    good = {"image": "data:image/jpeg;base64,AAAA", "name": "y"}
    fidelity |= {
        "examples": {"lost": [example, good]},
        "colours": {"a": "url(http://127.0.0.1:9/c)", "b": "#00ff00"},
    }
    write_json(copied / "fidelity.json", fidelity)
    assert main("report", [str(copied)]) == 0
    page = (copied / "report.html").read_text()
    assert "127.0.0.1:9" not in page and "#00ff00" in page
    assert "default-src 'none'; img-src data:" in page


def test_a_class_name_is_one_line() -> None:
    from kd.ship.export.manifest import as_lines

    assert as_lines(["a\nb", "c\r\u2028d", "e"]).splitlines() == ["a b", "c d", "e"]


@pytest.mark.parametrize("value", ["!!bool cat", "!!int ''", "!!float ''", "!!timestamp cat"])
def test_a_yaml_tag_on_another_kind_of_value_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match="a tag is on a value of another kind"):
        yaml_of(f"a: {value}")


@pytest.mark.parametrize("text", [None, "", "[1]", '"a"', "{", "\xff"])
def test_mapping_of(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")
    assert mapping_of(file) == {}
    file.write_text('{"a": 1}')
    assert mapping_of(file) == {"a": 1}
