"""The settings: known without torch, each once, and a wrong value of any of them ends at once."""

import inspect
import json
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import yaml
from pytorch_lightning import Trainer

from kd.config.kinds import Key, Range, adapter, read, wrong
from kd.data.datamodule import DistillationDataModule
from kd.data.info import DataInfo
from kd.optim import OptimSpec
from kd.run import keys
from kd.run.assemble import assemble
from kd.settings import (
    DataSettings,
    LearningSettings,
    OptimSettings,
    TrainerSettings,
)
from kd.teachers import RunTeacher
from tests._helpers import ROOT

CLASSES = {"data.source", "model.task", "model.student.builder", "model.teacher.builder", "trainer.logger",
           "trainer.accelerator", "trainer.strategy", "trainer.callbacks", "trainer.profiler",
           "trainer.plugins"}  # fmt: skip
"""A class by its path: what it takes is known when it is imported."""
TEXT = {
    "runs_dir",
    "resume",
    "trainer.default_root_dir",
    "data.class_facts",
    "data.unlabeled",
    "data.tier.label",
    "data.probe.root",
    "checkpoint.monitor",
}
TEXT |= {
    f"model.{who}.{name}"
    for who in ("student", "teacher")
    for name in ("checkpoint", "checkpoint_key")
}
TEXT |= {f"model.teacher.{name}" for name in ("recipe", "backbone", "classes", "cache_dir")}
TEXT |= {f"monitor.{name}" for name in ("prometheus_host", "prices", "webhook")}
TEXT |= {
    f"trainer.{name}" for name in ("devices", "max_time", "val_check_interval", "model_registry")
}
"""Any text is a value."""


def wrong_values(key: Key) -> list[object]:
    """One value of another type, and one beyond each end of its range."""
    texts = any(not isinstance(limit, Range) for limit in read(key.kind).limits)
    found: list[object] = [] if texts else ["nonsense"]
    for limit in read(key.kind).limits:
        parts = limit.text.split(" and ") if isinstance(limit, Range) else []
        found += [
            float(end) + {">=": -1, ">": 0, "<=": 1, "<": 0}[sign]
            for sign, end in map(str.split, parts)
        ]
        found += [] if parts else ["/no such/"]
    named = {"recipe": ["../x"], "name": ["7"], "optim.name": ["sgdd"]}
    named |= {f"model.{who}.arch": ["resnet81"] for who in ("student", "teacher")}
    return named.get(key.name, found)


CODE = """
import json, sys
sys.modules["torch"] = None  # importing it raises
from kd.errors import UserError
from kd.run.request import translate
told = {}
for item in json.load(sys.stdin):
    try:
        translate(["recipe=foodtag_vit", item]).resolved()
        told[item] = None
    except UserError as error:
        told[item] = str(error)
print(json.dumps(told))
"""


def test_a_wrong_value_of_every_setting_is_told_without_torch() -> None:
    known = [key for key in keys.schema().values() if key.name not in CLASSES | TEXT]
    items = {f"{key.name}={value}": key.name for key in known for value in wrong_values(key)}
    assert {*items.values()} == {key.name for key in known}, (
        "a setting without a wrong value is in TEXT or CLASSES"
    )
    plain = [key.name for key in keys.schema().values() if wrong(key.kind, {})]
    items |= {
        f"{name}.x=1": name for name in plain if name not in ("recipe", "seed")
    }  # a setting without keys
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, input=json.dumps([*items]), capture_output=True,
                          text=True, check=True)  # fmt: skip
    told = json.loads(done.stdout)
    assert not [item for item, message in told.items() if message is None or "\n" in message]
    assert not [item for item, message in told.items() if items[item] not in message]
    assert len(told) >= 150


def test_what_is_built_takes_the_settings_in_their_order() -> None:
    taken = {}
    for parameter in inspect.signature(assemble).parameters.values():
        if parameter.annotation not in (DataInfo, OptimSpec | None, RunTeacher | None):
            taken[parameter.name] = parameter.default
    settings = {}
    for field in fields(LearningSettings):
        is_required = field.default is MISSING
        settings[field.name] = inspect.Parameter.empty if is_required else field.default
    assert [*taken.items()] == [*settings.items()]


def test_the_data_module_takes_the_fields_of_its_settings_alone() -> None:
    defaults = {field.name: getattr(DataSettings(), field.name) for field in fields(DataSettings)}
    assert DistillationDataModule(**defaults).given.crop_ratio == DataSettings().crop_ratio
    assert DistillationDataModule(None, crop_ratio=0.5).given.crop_ratio == 0.5
    with pytest.raises(TypeError, match="crop_ration"):
        DistillationDataModule(crop_ration=0.5)
    with pytest.raises(ValueError, match="crop_ratio must be"):
        DistillationDataModule(crop_ratio=2.0)


def test_a_bare_off_is_the_word_that_a_setting_takes() -> None:
    """YAML 1.1 reads it as a truth value."""
    words = [
        (key.name, word)
        for key in keys.schema().values()
        for word in read(key.kind).allowed
        if word in ("on", "off")
    ]
    assert {name for name, _ in words} >= {"data.check", "preflight", "model.teacher.cache"}
    for name, word in words:
        meant = adapter(keys.schema()[name].kind).validate_python(yaml.safe_load(word))
        assert meant in (word, word == "on")


def test_lightnings_trainer_takes_what_is_said_of_it() -> None:
    assert {field.name for field in fields(TrainerSettings)} <= set(
        inspect.signature(Trainer).parameters
    )


def test_settings_refuse_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match="lr must be >= 0, got -1"):
        OptimSettings(lr=-1)
    with pytest.raises(ValueError, match=r"img_size must be >= 1 and <= 4096, got \(0, 3\)"):
        DataSettings(img_size=(0, 3))
    with pytest.raises(ValueError, match="on_bad_image must be stop or skip, got 'x'"):
        DataSettings(on_bad_image="x")
    with pytest.raises(ValueError, match="^milestones must go with schedule=steps alone"):
        OptimSpec(milestones=[1.0])
    assert DataSettings(batch_size="auto").batch_size == "auto"


@pytest.mark.parametrize(
    ("value", "right"), [([2.0, 3.0, 4.0], True), ([2.0], True), ("hot", False), (["a"], False)]
)
def test_a_tuple_of_any_length_takes_lists_of_any_length(value: object, right: bool) -> None:
    """As a resumed run's config.yaml has them."""
    assert (not wrong(tuple[float, ...], value)) is right
