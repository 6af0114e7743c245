"""The structure: which way imports go, what is public, what the text may say."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kd
from scripts import house
from tests._helpers import ROOT

LAYERS = [
    {"kd", "kd.errors", "kd.run.settings"},
    {"kd.progress", "kd.machine", "kd.lightning_internals", "kd.losses.functional"},
    {"kd.storage"},
    {"kd.report"},
    {"kd.clock", "kd.losses"},
    {"kd.models", "kd.optim", "kd.tasks", "kd.data"},
    {"kd.teachers"},
    {"kd.distill"},
    {"kd.fit_to_machine"},
    {"kd.module"},
    {"kd.strategies", "kd.callbacks", "kd.launch"},
    {"kd.monitor", "kd.ship"},
    {"kd.run"},
    {"kd.fleet"},
    {"kd.commands"},
    {"kd.api"},
    {"kd.cli"},
]
"""From below: a room imports from lower layers alone, not from the rooms beside it."""
FILES = sorted((ROOT / "kd").rglob("*.py"))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(name: str) -> int:
    while name:
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
        name = name.rpartition(".")[0]
    raise AssertionError(f"{name} has no layer")


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(house.tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{a.name}" for a in node.names}
            found |= {m for m in modules if (ROOT / (m.replace(".", "/") + ".py")).exists()} or {node.module}
    return {m for m in found if m == "kd" or m.startswith("kd.")}


def test_the_map_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {p for p in (ROOT / "kd").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    rooms -= {ROOT / "kd" / "__init__.py"}
    assert not [p.name for p in rooms if f"`kd/{p.name}{'/' if p.is_dir() else ''}`" not in text]
    named = set(re.findall(r"`(kd/[\w/]+(?:\.py|/))`", text))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_private_names_of_lightning_have_one_place() -> None:
    private = re.compile(
        r"(?:trainer|loop|strategy|launcher|lightning)\._[a-z]"
        r"|(?:lightning_fabric|pytorch_lightning)\S* import .*\b_[A-Z_a-z]"
    )
    found = [f for f in FILES if name_of(f) != "kd.lightning_internals" and private.search(f.read_text())]
    assert not found


ONE_SUBJECT = {"kd.data.foodtag_mini", "kd.run.settings"}
"""Files that a cut would make harder to read: one subject, drawn or solved step by step."""


def test_files_and_classes_stay_short() -> None:
    assert not [name for f in FILES if f.read_text().count("\n") > 400 and (name := name_of(f)) not in ONE_SUBJECT]
    for file in FILES:
        classes = [node for node in ast.walk(house.tree_of(file)) if isinstance(node, ast.ClassDef)]
        assert not [c.name for c in classes if c.end_lineno - c.lineno >= 250], file  # type: ignore[operator]


ANY = 39
"""Arguments and returns of type Any, for objects that no protocol describes. It only falls."""


def test_any_in_signatures_only_falls() -> None:
    count = 0
    for file in FILES:
        for node in ast.walk(house.tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
                types = [a.annotation for a in given if a is not None] + [node.returns]
                count += sum(t is not None and ast.unparse(t) == "Any" for t in types)
    assert count <= ANY


def test_imports_go_down() -> None:
    upwards = []
    for file in FILES:
        name = name_of(file)
        for imported in imports_of(file):
            beside = house.room_of(imported) != house.room_of(name)
            if layer_of(imported) >= layer_of(name) + (not beside):
                upwards.append(f"{name} imports {imported}")
    assert not upwards


def test_callbacks_know_the_module_by_their_context_alone() -> None:
    for file in FILES:
        if name_of(file).startswith(("kd.callbacks", "kd.monitor", "kd.strategies")) and file.stem != "context":
            assert "kd.module.distillation" not in imports_of(file), file


def test_only_the_parser_knows_jsonargparse() -> None:
    users = {name_of(f) for f in FILES if re.search(r"^\s*(import|from) jsonargparse", f.read_text(), re.M)}
    assert users == {"kd.run.parser"}


def test_the_public_names() -> None:
    assert len(kd.__all__) <= 18  # read_run: what a run has recorded, for notebooks and programs of users
    for name in kd.__all__:
        assert getattr(kd, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kd.nothing


def test_importing_kd_is_light() -> None:
    code = "import sys, kd; print([m for m in ('torch', 'timm', 'numpy', 'pytorch_lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_and_what_users_import_have_docstrings() -> None:
    """Elsewhere a name may say it all; of what ``kd`` exports each member has one."""
    assert not [file for file in FILES if not ast.get_docstring(house.tree_of(file))]
    exported = {(getattr(kd, name).__module__, name) for name in kd.__all__}
    for file in FILES:
        for node in house.tree_of(file).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (name_of(file), node.name) in exported:
                assert ast.get_docstring(node), node.name
            if isinstance(node, ast.ClassDef) and (name_of(file), node.name) in exported:
                kind = getattr(kd, node.name)
                inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
                members = [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
                assert not [m.name for m in members if not ast.get_docstring(m) and m.name not in inherited]


def test_the_measure_of_the_house_only_falls() -> None:
    """Lines, arrows between rooms, circles, words: none grows (scripts/house.py --write where one has fallen)."""
    limits = json.loads(house.LIMITS.read_text())
    found = house.measure()
    assert not {name: number for name, number in found.items() if number > limits[name]}


def test_no_file_imports_itself_through_others() -> None:
    known = house.sources()
    assert house.circles({name: house.imports_of(file, known) for name, file in known.items()}) == []


def test_no_rooms_without_a_name_of_their_own() -> None:
    assert not [f for f in FILES if re.search(r"(utils?|helpers?|common|misc)", f.stem)]


def test_tests_import_helpers_and_no_other_tests() -> None:
    """What two of them use is in a file whose name begins with ``_``. Callbacks are named by the path of their file."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        modules = set(re.findall(r"^\s*from (tests\.(?:\w+\.)*test_\w+) import", file.read_text(), re.MULTILINE))
        assert modules <= {name_of(file)}, file
