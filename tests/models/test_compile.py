"""What ``compile`` compiles, how often, and what runs beside it; on a CPU, by a backend that only counts graphs."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import kd
from kd.models import Preprocess, TeacherSpec
from kd.models.compiled import compile_in_place
from kd.teachers import FrozenTeacher
from kd.teachers.answer import Wanted
from tests._helpers import tiny_vit
from tests._runs import run


@pytest.fixture()
def graphs(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Counts the graphs that are compiled."""
    counter, given = CompileCounter(), nn.Module.compile
    torch._dynamo.reset()

    def compiled(self: nn.Module, mode: str, **more: Any) -> None:
        given(self, backend=counter, **more)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    return counter


def classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Dropout(0.1))


def test_training_and_validation_have_one_graph_each(graphs: CompileCounter) -> None:
    """An epoch's last batch is smaller, of training with a teacher's missing answers any."""
    model = classifier()
    compile_in_place(model, True)
    for _ in range(2):
        model.train()
        for _ in range(3):
            model(torch.zeros(4, 3, 4, 4))
        model.eval()
        with torch.no_grad():
            for count in (4, 4, 3):
                assert model(torch.zeros(count, 3, 4, 4)).shape == (count, 5)
    assert graphs.frame_count == 2
    with torch.no_grad():
        for _ in range(2):
            model(torch.zeros(7, 3, 4, 4))  # twice running: this is what it is used for now
    assert graphs.frame_count == 3


@pytest.mark.parametrize("torchs", [True, False])
def test_compiled_code_is_kept(
    torchs: bool, graphs: CompileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In kd's cache folder, in place of the one of temporary files that torch's import names; a user's own stays."""
    given = tmp_path / "mine"
    if torchs:
        given = Path(tempfile.gettempdir()) / "torchinductor_me"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(given))
    monkeypatch.setenv("KD_CACHE", str(tmp_path))
    compile_in_place(classifier(), True)
    expected = tmp_path / "compiled" if torchs else given
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)


def test_batches_whose_health_is_read_run_eagerly(recipe: Path, graphs: CompileCounter) -> None:
    items = ["model.student.compile=true", "monitor.health_every=3", "trainer.limit_val_batches=0"]
    folder = run(recipe, *items, "trainer.max_epochs=2")
    lines = (folder / "records" / "health.jsonl").read_text().splitlines()
    readings = [found for found in map(json.loads, lines) if found.get("kind") == "health"]
    assert len(readings) == 4
    assert all(found["spread"] and found["agreement"] is not None for found in readings)
    assert graphs.frame_count == 1


def test_features_of_a_compiled_teacher_are_copies() -> None:
    """CUDA graphs write each answer into the memory of the one before, where a float32 teacher's features were."""
    for is_compiled in (True, False):
        prepare = Preprocess(32, (0.5,) * 3, (0.5,) * 3)
        teacher = FrozenTeacher(tiny_vit(), prepare, spec=TeacherSpec("x"))
        if is_compiled:
            teacher.model._compiled_call_impl = teacher.model._call_impl
        teacher.taps.paths_and_shapes("norm", "all")
        given: list[torch.Tensor] = []
        teacher.model.norm.register_forward_hook(
            lambda module, args, out, given=given: given.append(out)
        )
        pictures = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
        found = teacher.answer(
            {"image": pictures}, Wanted(features={("", "norm", "all"): ()})
        ).features
        assert (found["", "norm", "all"].data_ptr() == given[-1].data_ptr()) is (not is_compiled)


@pytest.mark.parametrize("feature", [False, True])
def test_a_whole_step_is_one_graph(feature: bool) -> None:
    """What the docstring of ``kd.Distillation`` promises; ``kd.clock.annotate`` vanishes in it."""
    make: Callable[[], Any] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 5))  # noqa: E731
    more: dict[str, Any] = {}
    given: dict[str, Any] = {"kd": kd.KDLoss(2.0)}
    if feature:
        given["mse"] = kd.losses.MSELoss()
        more["taps"] = {"mse": kd.settings.TapSpec("1", "1", "all")}
    prepare = Preprocess(4, (0.5,) * 3, (0.5,) * 3)
    step = kd.Distillation(make(), make(), losses=given, task=kd.Classification(5), prepare=prepare,
                           teacher_prepare=prepare, **more)  # fmt: skip
    images, target = torch.randint(256, (4, 3, 4, 4), dtype=torch.uint8), torch.arange(4)
    torch._dynamo.reset()
    step(images, target)
    found = torch._dynamo.explain(step)(images, target)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
