"""Whatever reads or writes files passes one door: each call of kd/ that does not is listed in ``doors.yaml``, with why.

A new call, or a new library, fails these tests until it goes by :mod:`kd.storage.elsewhere` (sizes, names, places),
:mod:`kd.storage.writing` or :mod:`kd.run.trust` (code), or until a line there says why it need not.
``tests/test_places.py`` tries links and pipes in the place of every file of a run.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning import LightningDataModule, LightningModule

from kd.errors import UserError
from scripts.house import nodes_of, sources
from tests._files import read_yaml
from tests._helpers import ROOT

DOORS = read_yaml(ROOT / "tests" / "doors.yaml")


def readers(file: Path) -> Iterator[str]:
    """What a file uses that reads, under the names of its imports."""
    known: dict[str, str] = {}
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in nodes_of(file):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            first, _, rest = ast.unparse(node).partition(".")
            full = f"{known.get(first, first)}.{rest}".rstrip(".")
            if reads(full):
                yield full


def reads(full: str) -> bool:
    """Whether a dotted name is that of a reader."""
    rules = DOORS["readers"]
    if full in rules["builtin"] or ("." in full and full.rpartition(".")[2] in rules["methods"]):
        return True
    for module, names in rules["names"].items():
        if full.startswith(f"{module}.") and {"*", full.removeprefix(f"{module}.")} & set(names):
            return True
    return False


def file_calls(file: Path) -> Iterator[str]:
    """The functions of a file's calls that open or change files, as they are written."""
    for node in nodes_of(file):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        name = whole.rpartition(".")[2]
        if name not in DOORS["files"]["names"] or whole in DOORS["files"]["doors"]:
            continue
        # text has two arguments, a dataclass names its fields
        of_path = len(node.args) == 1 and not node.keywords
        if name == "replace" and not of_path and not whole.startswith("os."):
            continue
        yield whole if len(whole) < 50 else f"...{whole[-40:]}"


KINDS: dict[str, Callable[[Path], Iterator[str]]] = {"readers": readers, "files": file_calls}


@cache
def found(kind: str) -> dict[str, set[str]]:
    """Calls by module; of files kd/storage is the door itself."""
    calls = {name: set(KINDS[kind](file)) for name, file in sources().items()}
    if kind == "files":
        calls = {n: each for n, each in calls.items() if not n.startswith("kd.storage")}
    return {name: each for name, each in calls.items() if each}


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_passes_a_door_or_is_listed_and_the_list_names_none_that_is_gone(
    kind: str,
) -> None:
    allowed = DOORS[kind]["allowed"]
    listed = {name: {c for calls in why.values() for c in calls} for name, why in allowed.items()}
    assert found(kind) == listed


def test_a_new_library_is_looked_at() -> None:
    """It may read files in ways that no list knows: add it there once its readers are in the list of names."""
    names: set[str] = set()
    for node in [node for file in sources().values() for node in nodes_of(file)]:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    assert names - set(sys.stdlib_module_names) - {"kd"} <= set(DOORS["libraries"])


def test_no_reader_of_a_base_class_is_called() -> None:
    """What Lightning's methods of these names read from a file is not listed anywhere."""
    assert not [name for name, calls in found("readers").items() if "super()" in str(calls)]


def test_no_class_inherits_a_reader_of_lightning() -> None:
    """``load_from_checkpoint`` reads arguments, and names of classes, from the file: each class of kd has its own."""
    for name, file in sources().items():
        if "pytorch_lightning" in file.read_text() or "kd.module" in file.read_text():
            with suppress(ImportError, UserError):  # an extra that is not installed
                import_module(name)
    waiting: list[type] = [LightningModule, LightningDataModule, CheckpointIO]
    inherited = set()
    while waiting:
        for made in waiting.pop().__subclasses__():
            waiting.append(made)
            for method in ("load_from_checkpoint", "load_checkpoint"):
                reader = getattr(made, method, None)
                own = reader is None or reader.__module__.startswith("kd.")
                if made.__module__.startswith("kd.") and not own:
                    inherited.add(f"{made.__module__}.{made.__qualname__}.{method}")
    # the loop of kd-cache, which has no checkpoints
    assert inherited == {"kd.run.fill.Fill.load_from_checkpoint"}


SEEN = {
    "readers": [
        "import json as j\nj.loads(x)", "from yaml import safe_load\nsafe_load(x)", "import torch\ntorch.load(f)",
        "from safetensors import safe_open as o\no(f)", "import numpy as np\nnp.load(f)", "eval(x)", "load = json.loads",
        "Model.from_pretrained(x)", "from importlib import import_module\nimport_module(x)",
        "import pickle\npickle.loads(x)", "from xml.etree import ElementTree\nElementTree.parse(f)",
        "files.cat_file(x)", "def f():\n    import json\n    json.load(x)",
    ],
    "files": [
        "open(x)", "Path(x).open('w')", "x.write_text('')", "os.replace(a, b)", "part.replace(file)", "torch.save(a, b)",
        "import io\nio.open(x)", "np.memmap(x)", "x.parent.mkdir()", "safe_open(x, 'pt')", "image.save(file)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"), [(k, text) for k, texts in SEEN.items() for text in texts]
)
def test_a_call_is_seen_in_any_way_it_is_written(kind: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(text)
    assert list(KINDS[kind](file))


def test_what_is_no_file_is_not_listed(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("text.replace('a', 'b')\nreplace(spec, lr=1)\nwrite_text(file, 'x')")
    assert not list(file_calls(file))


def test_torch_and_transformers_are_told_each_time_to_run_no_code() -> None:
    told = []
    for file in sources().values():
        for node in [node for node in nodes_of(file) if isinstance(node, ast.Call)]:
            parts = [node.func, *node.args[:1]]  # also partial(kind.from_config, ...)
            names = {part.attr for part in parts if isinstance(part, ast.Attribute)}
            text = ast.unparse(node)
            if text.startswith("torch.load("):
                told.append("weights_only=True" in text)
            if names & {"from_pretrained", "from_config"}:
                told.append("trust_remote_code=False" in text)
    assert told and all(told)
