"""What an attack on the promises of kd/run/SECURITY.md has found, for everything that needs no training and no torch."""

import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kd.config.parts import classes
from kd.launch import sagemaker
from kd.report.card import card
from kd.report.records import RunRecords
from kd.run.gate import PLACE_KEY, check_foreign
from kd.storage.elsewhere import matching
from kd.storage.of_weights import EXPORTS, exports, write_of_weights
from kd.storage.run_urls import on_disk
from kd.storage.shown import masked, without_secrets
from tests._helpers import ROOT, refuses


def limited(seconds: int, gigabytes: int) -> None:
    """Limits a child's time of computing, which no other process lengthens, and its memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))


@pytest.mark.parametrize(
    "work",
    [
        "from kd.storage.shown import without_secrets as f; f('x://' + ':' * 10**6 + '@')",
        "from kd.storage.shown import masked; masked({'a.trainer' * 20_000: 'x'})",
        "from kd.storage.elsewhere import yaml_of as f; refused(f, '[' + 'a,' * 10**6 + ']')",
        "from kd.storage.elsewhere import yaml_of as f; "
        "refused(f, '\\n'.join(f'{k * (2**61 - 1)}: 1' for k in range(1, 30_000)))",
        "from kd.storage.elsewhere import yaml_of as f; refused(f, 'a ' * 2**22)",
        "from kd.storage.elsewhere import yaml_of as f; "  # a name as long as this, in 150 dotted keys
        "refused(f, 'a: &k ' + 'k' * 10**6 + '\\nb: ' + '{*k : ' * 150 + 'x' + ', c: x}' * 150)",
        "from kd.storage.elsewhere import yaml_of as f; "
        "refused(f, 'a: &k ' + 'k' * 10**6 + '\\nb: [' + '*k,' * 45_000 + ']')",
        "from kd.storage.elsewhere import yaml_of as f; refused(f, 'a: &a [*a]')",
        "from kd.data.sources.labels import doubts as f; f(['.' + '1' * 10**6 + 'x'])",
    ],
)
def test_a_long_text_takes_a_time_that_grows_with_its_length(work: str) -> None:
    refused = (
        "def refused(f, text):\n    try: f(text)\n    except ValueError: return\n"
        "    raise AssertionError('it was read')\n"
    )
    child = [sys.executable, "-c", f"{refused}{work}"]
    done = subprocess.run(child, cwd=ROOT, preexec_fn=partial(limited, 60, 4), capture_output=True)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa'ss@host/x", "https://...@host/x"),
        ('https://me:pa"ss@host/x', "https://...@host/x"),
        ("https://me:p@ss@host/x", "https://...@host/x"),
        ("s3://me:pa/ss@host/x", "s3://...@host/x"),
        ("s3://me:pa ss@host/x", "s3://...@host/x"),
        ("runs/s3:/me:pass@host/x", "runs/s3:/...@host/x"),
        ("https://token@host/x", "https://...@host/x"),
        ("https://host/x?a=1&X-Amz-Signature=5f&token=ab", "https://host/x?a=1&X-Amz-Signature=...&token=..."),
        *[(text, text) for text in (
            "https://host/a@b", "s3://bucket: not found, ask me@host", '{"a":"s3://b","c":"me@host"}', "me@host",
        )],
    ],
)  # fmt: skip
def test_no_address_shows_its_password(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "name", ["apikey", "api_key", "experiment_key", "access_key", "auth", "Authorization", "x-api-key"]
)  # fmt: skip
def test_a_secret_of_a_logger_is_masked_also_in_quotes(name: str) -> None:
    tree = {"trainer": {"logger": [{"init_args": {name: f"ab'c of {name}"}}]}}
    assert masked(tree)["trainer"]["logger"][0]["init_args"] == {name: "..."}
    assert without_secrets(f"ab''c of {name}") == "..."  # in YAML
    assert without_secrets(f"ab'\"'\"'c of {name}") == "..."  # in a shell


def test_what_is_left_of_a_password_in_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run at a URL, and the reason that SageMaker shows."""
    assert on_disk("memory://me:hush@store/runs", "x") == on_disk("memory://store/runs", "x")
    monkeypatch.setattr(sagemaker, "job_folder", lambda _: tmp_path)
    monkeypatch.setattr(sagemaker, "base", lambda _: tmp_path)
    sagemaker.tell_failure("s3://me:hush@store/runs not found")
    assert (tmp_path / "output" / "failure").read_text() == "s3://...@store/runs not found\n"


@pytest.mark.parametrize("outside", ["..", "../other", "/etc"])
def test_an_export_outside_of_the_run_is_none(outside: str, tmp_path: Path) -> None:
    (tmp_path / "student.safetensors").write_bytes(b"weights")
    one = {"to": "hub", "kept": True, "int8": False}
    places = {"hub": outside, "onnx": "export/onnx"}
    write_of_weights(tmp_path, EXPORTS, {to: {**one, "file": file} for to, file in places.items()})
    said: list[str] = []
    assert list(exports(tmp_path, said.append)) == ["onnx"]
    assert not said  # kd-export out=FOLDER writes such a place, which is nothing to say each time


READ = {"HuggingFace.path", "ImageFolder.root", "Manifest.image_dir", "Pictures.root", "SegmentationFolder.root",
        "Shards.root", "HuggingFaceBuilder.path", "StoredAnswers.folder"}  # fmt: skip
"""Arguments of the listed classes that name a place, and are only read."""


@pytest.mark.parametrize("value", ["", "val/mine", "train/prof", "RUN/../x", "mine"])
def test_a_folder_that_a_class_writes_to_is_the_runs_own(value: str) -> None:
    """Whatever its name looks like; every argument that names a place is read, or refused here."""
    places = {
        "callback": "trainer.callbacks",
        "logger": "trainer.logger",
        "profiler": "trainer.profiler",
    }
    written = []
    for one in classes():
        for name in filter(PLACE_KEY.search, one.arguments):
            if f"{one.short}.{name}" in READ:
                continue
            written.append(one.short)
            node: Any = {"class_path": one.name, "init_args": {name: value}}
            key = places.get(one.kind, "data.source")
            with refuses(rf"{name}:? (must lie|a file from)"):
                check_foreign(Path("x"), [{key: [node] if one.kind == "callback" else node}], [])
    for key in ("default_root_dir", "profiler.filename"):
        with refuses(f"trainer.{key} must lie in the run's folder"):
            check_foreign(Path("x"), [{f"trainer.{key}": "../victim"}], [])
    assert {"ModelCheckpoint", "CSVLogger", "SimpleProfiler", "Food101"} <= {*written}


def test_a_card_has_only_numbers_in_its_code(tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    run.summary = {"student": {"arch": "vit"}}
    for data in ({"crop_ratio": "1)\nevil(", "img_size": 32}, {"img_size": ["1)\nevil(", 32]}):
        run.config = {"data": data}
        code, table = card(run).split("## How it was made")
        assert "evil" not in code and "\nevil" not in table


@pytest.mark.parametrize(
    "kind",
    [
        {"name": "IntDistribution", "attributes": {"low": 0, "high": 10**12}},
        {"name": "DiscreteUniformDistribution", "attributes": {"low": 0.0, "high": 1e12, "q": 1.0}},
        {"type": "int", "low": 0, "high": 10**12},
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_journal_describes_no_endless_grid(kind: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from kd.fleet.tuning.study import JOURNAL, Study

    line = json.dumps({"op_code": 5, "distribution": json.dumps(kind)})
    (tmp_path / JOURNAL).write_text(f"{line}\n")
    with refuses("line 1: a grid of 1000000000000 values, at most 10000000"):
        Study(tmp_path, ["maximize"], "grid", "none", 1, 0)


def test_links_that_lead_around_end(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"l{number}").symlink_to(".")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.jpg").touch()
    (tmp_path / ".hidden.jpg").touch()
    for pattern in (f"{tmp_path}/**/*.jpg", f"{tmp_path}/{'l*/' * 40}a/?/[x]*"):
        (found,) = matching(pattern)
        assert Path(found).resolve() == (tmp_path / "a" / "b" / "x.jpg").resolve()
    assert matching(f"{tmp_path}/{'l*/' * 40}*.tar") == matching(f"{tmp_path}/a/b/x.jpg/*") == []
