"""The structure: which way imports go, what is public, what the text may say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kd
from scripts import house
from tests._files import read_json
from tests._helpers import ROOT

LAYERS = [
    {"kd", "kd.errors"},
    {"kd.config"},
    {"kd.settings"},
    {"kd.progress", "kd.machine", "kd.lightning_internals", "kd.proof"},
    {"kd.processes", "kd.muon"},
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
    {"kd.command_line"},
    {"kd.cli"},
]
"""From below: a room imports from lower layers alone, not from the rooms beside it."""
FILES = sorted((ROOT / "kd").rglob("*.py"))


def layer_of(name: str) -> int:
    while name:
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
        name = name.rpartition(".")[0]
    raise AssertionError(f"{name} has no layer")


def imports_of(file: Path) -> set[str]:
    return house.imports_of(file, house.sources())


def test_the_map_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {
        p for p in (ROOT / "kd").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    rooms -= {ROOT / "kd" / "__init__.py"}
    assert not [p.name for p in rooms if f"`kd/{p.name}{'/' if p.is_dir() else ''}`" not in text]
    named = set(re.findall(r"`(kd/[\w/]+(?:\.py|/))`", text))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_private_names_of_lightning_have_one_place() -> None:
    uses = {name: house.private_names_of_lightning(file) for name, file in house.sources().items()}
    assert {name for name, names in uses.items() if names} == {house.INTERNALS}


@pytest.mark.parametrize(
    "line",
    [
        "from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher",
        "whatever.it.is_called._logger_connector",
        "def f(x): return getattr(x, '_combined_loader')",
        "class A(DDPStrategy):\n    def f(self): return self._timeout",
        "class A(Below):\n    def _register_ddp_hooks(self): pass",
    ],
)
def test_a_private_name_of_lightning_is_found_whatever_the_object_is_called(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "from pytorch_lightning.strategies import DDPStrategy\nclass Below(DDPStrategy):\n    x = 1\n"
    (tmp_path / "kd").mkdir()
    file = tmp_path / "kd" / f"strategy{abs(hash(line))}.py"
    private = file.with_stem(f"{file.stem}_private")
    file.write_text(header)
    private.write_text(header + line)
    house.lightning_private_names()
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert not house.private_names_of_lightning(file)
    assert house.private_names_of_lightning(private)


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
        name = house.name_of(file)
        for imported in imports_of(file):
            beside = house.room_of(imported) != house.room_of(name)
            if layer_of(imported) >= layer_of(name) + (not beside):
                upwards.append(f"{name} imports {imported}")
    assert not upwards


def test_callbacks_know_the_module_by_their_context_alone() -> None:
    for file in FILES:
        if (
            house.name_of(file).startswith(("kd.callbacks", "kd.monitor", "kd.strategies"))
            and file.stem != "context"
        ):
            assert "kd.module.distillation" not in imports_of(file), file


def test_one_engine_reads_settings() -> None:
    for file in FILES:
        assert not re.search(
            r"^\s*(import|from) (jsonargparse|pytorch_lightning\.cli)", file.read_text(), re.M
        )
    users = {
        house.name_of(file).rpartition(".")[2]
        for file in FILES
        if re.search(r"^from pydantic", file.read_text(), re.M)
    }
    of_files = {
        "tables",
        "records",
        "prices",
        "manifest",
        "student_metadata",
        "shards",
        "run_urls",
        "scan",
        "once",
        "webdataset",
        "foreign",
        "open_inference",
    }  # what a file or a client says, no settings
    assert users - of_files <= {"kinds", "options", "parts", "resolve", "spec"}


def test_the_public_names() -> None:
    # read_run: what a run has recorded; Monitor: any training; predict, export: commands as functions, for notebooks
    assert len(kd.__all__) <= 21
    for name in kd.__all__:
        assert getattr(kd, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kd.nothing


def test_importing_kd_is_light() -> None:
    code = "import sys, kd; print([m for m in ('torch', 'timm', 'numpy', 'pytorch_lightning') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_files_and_what_users_import_have_docstrings() -> None:
    """Elsewhere a name may say it all; of what ``kd`` exports each member has one."""
    assert not [file for file in FILES if not ast.get_docstring(house.tree_of(file))]
    exported = {(getattr(kd, name).__module__, name) for name in kd.__all__}
    for file in FILES:
        for node in house.tree_of(file).body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and (house.name_of(file), node.name) in exported
            ):
                assert ast.get_docstring(node), node.name
            if isinstance(node, ast.ClassDef) and (house.name_of(file), node.name) in exported:
                kind = getattr(kd, node.name)
                inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
                members = [
                    m
                    for m in node.body
                    if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")
                ]
                assert not [
                    m.name for m in members if not ast.get_docstring(m) and m.name not in inherited
                ]


def test_the_measure_of_the_house_only_falls() -> None:
    """Density, undocumented names, names used twice (``scripts/house.py --list`` names them, ``--write`` lowers)."""
    limits = read_json(house.LIMITS)
    numbers = house.measure()
    allowed = {name: limit + house.TOLERANCES.get(name, 0) for name, limit in limits.items()}
    assert not {
        name: (numbers[name], limit)
        for name, limit in limits.items()
        if numbers[name] > allowed[name]
    }


def test_density_counts_nodes_a_line_and_public_names(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    step = "    x = 1\n"  # Assign, Name, Store, Constant
    file.write_text(
        f"def f():\n    '''Four lines.'''\n\n    # comment\n{4 * step}def g():\n{3 * step}def _h(): pass\n"
    )
    density = house.density_of(file)
    assert density.functions == {"1 f": 4.0}
    assert (density.public, density.undocumented) == (2, ["9 g"])


def test_files_that_name_a_part_are_counted_without_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Zip."""\nfrom b import Tar as T\nx = ["a.Pack"](y=Own.part)\n')
    assert house.names_in(file) >= {"Tar", "Pack", "y", "Own", "part"}
    assert "Zip" not in house.names_in(file)
    assert house.weight_of(tmp_path) == house.weight_of(file) == 17


def test_no_file_imports_itself_through_others() -> None:
    known = house.sources()
    arrows = {name: house.imports_of(file, known) for name, file in known.items()}
    assert house.circle(arrows) == []


def test_no_rooms_without_a_name_of_their_own() -> None:
    assert not [f for f in FILES if re.search(r"(utils?|helpers?|common|misc)", f.stem)]


def test_tests_import_helpers_and_no_other_tests() -> None:
    """What two of them use is in a file whose name begins with ``_``. Callbacks are named by the path of their file."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        modules = set(
            re.findall(
                r"^\s*from (tests\.(?:\w+\.)*test_\w+) import", file.read_text(), re.MULTILINE
            )
        )
        assert modules <= {house.name_of(file)}, file


def test_only_words_that_int_reads_count_as_numbers() -> None:
    """``"²".isdigit()`` is true, and ``int("²")`` an error."""
    callers = []
    for file in FILES:
        for node in ast.walk(house.tree_of(file)):
            if isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isnumeric"):
                callers.append(f"{file}:{node.lineno}")
    assert callers == []
