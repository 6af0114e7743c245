"""Each comparison of ``scripts/bench/arms`` is one that kd-train takes."""

import sys

import pytest

from kd.run.request import translate
from kd.run.run import Run
from tests._helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "bench"))
from arms import Comparison, merged

from tests._files import read_yaml

FILES = sorted((ROOT / "scripts" / "bench" / "arms").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_resolves(file, tmp_path):
    needs = read_yaml(file).get("needs", {})
    given = {name: "112" if name in ("side", "patch") else str(tmp_path) for name in needs}
    read = Comparison.read(file, given, {}, tmp_path)
    for arm, settings in read.arms.items():
        words = read.words(arm, seed=3)
        if "recipe" not in settings:
            words.append("recipe=foodtag_vit")
        resolved = Run.of(translate(["--trust", *words])).as_yaml()
        assert "<" not in "".join(words)
        assert "\nrecipe: " in resolved


def test_what_is_missing_is_asked_for(tmp_path):
    with pytest.raises(SystemExit, match="--give grocery=...: folder of train/ and val/"):
        Comparison.read(FILES[0].with_name("losses.yaml"), {}, {}, tmp_path)


def test_null_takes_shared_settings_away():
    shared = {"model.teacher.checkpoint": "x", "model.teacher": "y", "seed": 1}
    assert merged(shared, {"model.teacher": None, "seed": 2}) == {"seed": 2}
