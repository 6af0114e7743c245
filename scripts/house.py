"""The measure of the house: how dense and how well described its text is, rooms, circles, private names.

``python scripts/house.py`` prints it; ``tests/test_house.py`` keeps what ``tests/house.json`` limits, with the
tolerances of :data:`TOLERANCES`; ``--write`` lowers the limits, ``--list`` names the dense functions and what has no
docstring. ``--table`` prints how much each room weighs, how many files of ``kd/`` name one part of a kind (what adding
such a part would touch), and the functions that a training step passes; it needs torch. No number of lines or files is
limited.
"""

import ast
import io
import json
import re
import sys
import tokenize
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / "tests" / "house.json"
INTERNALS = "kd.lightning_internals"
LIGHTNING = ("pytorch_lightning", "lightning_fabric")
DENSE = 16
"""AST nodes a line at which a function counts as dense."""
KINDS = {"dense", "masks", "multi_label"}
HEADS = {"has_head", "labels", "classifies"}
AMBIGUOUS = {
    "masks",
    "labels",
}  # other things have such too: these names count where one of OWNERS is asked
OWNERS = re.compile(r"(task|info|data|source|student|batch)\w*")
PARTS = {
    "a source": ("Food101", "SegmentationFolder", "WebDataset"),
    "a loss over features": ("HintLoss", "ATLoss", "CWDLoss"),
    "a setting": ("balance_classes", "ema_decay", "cache_views"),
    "an export format": ("openvino", "litert", "coreml"),
    "a rule": ("LoadBalancing", "Overtraining", "Overfit"),
}
"""Parts by kind, of which ``--table`` counts the files that name them."""
TOLERANCES = {
    "AST nodes a line": 0.1,
    "% of functions at 16 nodes a line and more": 0.5,
    "% of public names without a docstring": 0.5,
    "AST nodes of kd": 500,
    "AST nodes of tests": 1000,
    "AST nodes of scripts": 500,
}
"""How far a number may lie above its limit: some ten functions or names, so that no single line decides."""
ATTRIBUTE_BY_TEXT = {"getattr", "setattr", "hasattr", "delattr"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def name_of(file: Path) -> str:
    """Dotted name of a module of ours."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[str, Path]:
    """All modules below ``kd/``, by dotted name."""
    return _sources_below(ROOT)


@cache
def _sources_below(root: Path) -> dict[str, Path]:
    return {name_of(file): file for file in sorted((root / "kd").rglob("*.py"))}


@cache
def tree_of(file: Path) -> ast.Module:
    """The syntax tree of a file, parsed once."""
    return ast.parse(file.read_text())


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree, walked once."""
    return tuple(ast.walk(tree_of(file)))


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it."""
    modules = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            modules |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {
                m if (m := f"{node.module}.{a.name}") in known else node.module for a in node.names
            }
    return {name for name in modules if name in known} - {name_of(file)}


def room_of(name: str) -> str:
    """The room of a module: its folder below ``kd/``, or the module itself."""
    return ".".join(name.split(".")[:2])


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last is the first, by imports anywhere in a file; [] for none.

    Args:
        arrows: for each module the modules that it imports.
    """
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


class Density(NamedTuple):
    """How dense and how well described a file is."""

    functions: dict[
        str, float
    ]  # AST nodes a line of each function of at least four lines, by "line name"
    public: int  # public functions, methods and classes
    undocumented: list[str]  # those without a docstring, by "line name"


def density_of(file: Path) -> Density:
    """Counts AST nodes a line and docstrings.

    A function's density is the number of AST nodes of its body (docstring left out) over its lines of code: neither
    blank, comment nor docstring. Functions of at least four such lines count. Public is what no underscore hides, nor
    that of a class around it; what a function defines inside is its own affair.
    """
    code = _code_lines(file.read_text())
    functions: dict[str, float] = {}
    public = 0
    undocumented: list[str] = []

    def visit(parent: ast.AST, hidden: bool) -> None:
        nonlocal public
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, Definition):
                continue
            place = f"{node.lineno} {node.name}"
            private = hidden or node.name.startswith("_")
            documented = ast.get_docstring(node) is not None
            if not private:
                public += 1
                if not documented:
                    undocumented.append(place)
            if isinstance(node, ast.ClassDef):
                visit(node, private)
                continue
            body = node.body[1:] if documented else node.body
            lines = code & {
                n for part in body for n in range(part.lineno, (part.end_lineno or part.lineno) + 1)
            }
            if len(lines) >= 4:
                functions[place] = sum(1 for part in body for _ in ast.walk(part)) / len(lines)
            visit(node, True)

    visit(tree_of(file), False)
    return Density(functions, public, undocumented)


def _code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def files_that_read(files: dict[str, Path], names: set[str]) -> set[str]:
    """Modules outside ``kd.tasks`` that read one of these attributes of a task, data, teacher or student."""
    return {
        name
        for name, file in files.items()
        if not name.startswith("kd.tasks") and any(_reads(node, names) for node in nodes_of(file))
    }


def _reads(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in names:
        return False
    owner = ast.unparse(node.value).rpartition(".")[2]
    return node.attr not in AMBIGUOUS or OWNERS.fullmatch(owner) is not None


class PrivateNames(NamedTuple):
    """The private names that Lightning's source defines."""

    of_class: dict[str, set[str]]  # by name of the class, without those of its bases
    bases: dict[str, set[str]]  # names of each class's bases

    def inherited_by(self, name: str) -> set[str]:
        """Private names of a class of Lightning, with those of all classes below it."""
        names: set[str] = set()
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            current = ahead.pop()
            if current not in seen:
                seen.add(current)
                names |= self.of_class.get(current, set())
                ahead += self.bases.get(current, set())
        return names

    def all(self) -> set[str]:
        """Private names of all classes, less those that are ``torch.nn.Module``'s."""
        return set().union(*self.of_class.values()) - self.of_class["Module"]


@cache
def lightning_private_names() -> PrivateNames:
    """What Lightning's classes define with one leading underscore: methods, class and instance attributes."""
    of_class: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    files = [file for package in LIGHTNING for file in _folder_of(package).rglob("*.py")]
    for file in [*files, _folder_of("torch") / "nn" / "modules" / "module.py"]:
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                of_class.setdefault(node.name, set()).update(_private_definitions(node))
                bases.setdefault(node.name, set()).update(_base_names(node))
    return PrivateNames(of_class, bases)


def _folder_of(package: str) -> Path:
    """Where a package is installed; it is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def private_names_of_lightning(file: Path) -> set[str]:
    """Private names of Lightning in a file, as "line name".

    Three ways to use one, whatever the object is called: an import; the name on another object (``x._name``, or as text
    in ``getattr``), unless a class in the same file defines it; and ``self._name``, ``super()._name`` or a method
    ``_name`` in a class that inherits from the class of Lightning which defines it, directly or through our classes.
    """
    lightning = lightning_private_names()
    defined_here = {
        name
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef)
        for name in _private_definitions(node)
    }
    elsewhere = lightning.all() - defined_here
    uses: set[str] = set()
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIGHTNING):
            path = [*(node.module or "").split("."), *(a.name for a in node.names)]
            uses |= {f"{node.lineno} {part}" for part in path if _is_private(part)}
        elif isinstance(node, ast.Attribute) and node.attr in elsewhere and not _is_own(node.value):
            uses.add(f"{node.lineno} {node.attr}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ATTRIBUTE_BY_TEXT:
            texts = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            uses |= {f"{node.lineno} {text}" for text in texts if text in elsewhere}
        elif isinstance(node, ast.ClassDef):
            inherited = _inherited_private_names(name_of(file), node.name)
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef) and part.name in inherited:
                    uses.add(f"{part.lineno} {part.name}")
                elif (
                    isinstance(part, ast.Attribute)
                    and part.attr in inherited
                    and _is_own(part.value)
                ):
                    uses.add(f"{part.lineno} {part.attr}")
    return uses


@cache
def _inherited_private_names(module: str, name: str) -> set[str]:
    """Private names that a class of ours inherits from classes of Lightning."""
    files = sources()
    if module not in files:
        return set()
    origins = {}  # name in this file -> (module, name there)
    for node in nodes_of(files[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            origins |= {a.asname or a.name: (node.module, a.name) for a in node.names}
    names: set[str] = set()
    for node in nodes_of(files[module]):
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for base in _base_names(node) - {name}:
            origin, original = origins.get(base, (module, base))
            if origin.startswith(LIGHTNING):
                names |= lightning_private_names().inherited_by(original)
            else:
                names |= _inherited_private_names(origin, original)
    return names


def _base_names(node: ast.ClassDef) -> set[str]:
    """Names of a class's bases, without module and type arguments."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def _private_definitions(node: ast.ClassDef) -> set[str]:
    """Private methods, class attributes and instance attributes that a class defines."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        elif (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and _is_own(part.value)
        ):
            names.add(part.attr)
    for part in node.body:
        targets = (
            part.targets
            if isinstance(part, ast.Assign)
            else [part.target]
            if isinstance(part, ast.AnnAssign)
            else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if _is_private(name)}


def _is_own(node: ast.expr) -> bool:
    """Whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_used_twice(files: dict[str, Path]) -> dict[str, list[str]]:
    """Names that two public classes or more have, with the modules that define them."""
    modules: dict[str, list[str]] = {}
    for module, file in files.items():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module)
    return {name: where for name, where in sorted(modules.items()) if len(where) > 1}


def weight_of(folder: Path) -> int:
    """AST nodes of a file, or of all Python files below a folder."""
    files = folder.rglob("*.py") if folder.is_dir() else [folder]
    return sum(len(nodes_of(file)) for file in files)


def names_in(file: Path) -> set[str]:
    """Identifiers of a file, and the words of its strings, docstrings left out."""
    nodes = nodes_of(file)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    names: set[str] = set()
    for node in nodes:
        match node:
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.alias(name=name)
                | ast.arg(arg=name)
            ):
                names.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names |= set(re.findall(r"\w+", text))
    return names


def files_that_name(part: str) -> list[str]:
    """Modules below ``kd/`` that name a part, in code or in a string."""
    return [name for name, file in sources().items() if part in names_in(file)]


def step_path() -> tuple[int, int]:
    """Functions and files of ``kd/`` that a training step of plain KD passes, its clock not counted."""
    import timm
    import torch

    import kd

    def vit(width: int, depth: int) -> torch.nn.Module:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": width, "depth": depth}
        return timm.create_model("vit_tiny_patch16_224", num_classes=10, num_heads=2, **sizes)

    losses = {"kd": kd.KDLoss(4.0)}
    module = kd.DistillationModule(
        vit(32, 2), vit(48, 3), task=kd.Classification(10), losses=losses
    )
    batch = (torch.rand(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    module.train()
    module.training_step(batch, 0)
    passed: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counted = event == "call" and not code.co_name.startswith("<")
        if counted and code.co_filename.startswith(f"{ROOT / 'kd'}/"):
            passed.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    module.training_step(batch, 1)
    sys.setprofile(None)
    passed = {(file, name) for file, name in passed if not file.endswith("/clock.py")}
    return len(passed), len({file for file, _ in passed})


def print_table() -> None:
    """Weight of each room, files that a part touches, the path of a step."""
    rooms = sorted((ROOT / "kd").iterdir(), key=lambda path: path.name)
    for room in [path for path in rooms if path.is_dir() or path.suffix == ".py"]:
        print(f"AST nodes of {room.relative_to(ROOT)!s:35} {weight_of(room):9,}")
    for kind, parts in PARTS.items():
        counts = {part: len(files_that_name(part)) for part in parts}
        print(
            f"files of kd that name {kind:26} " + ", ".join(f"{p} {n}" for p, n in counts.items())
        )
    functions, files = step_path()
    print(f"a step of KD passes {functions} functions in {files} files")


def measure() -> dict[str, float]:
    """Each number by name; smaller is better. Those that ``tests/house.json`` names may only fall."""
    files = sources()
    arrows = {name: imports_of(file, files) for name, file in files.items()}
    between = {
        (room_of(a), room_of(b))
        for a, targets in arrows.items()
        for b in targets
        if room_of(a) != room_of(b)
    }
    densities = [density_of(file) for file in files.values()]
    nodes_a_line = [density for file in densities for density in file.functions.values()]
    public = sum(file.public for file in densities)
    undocumented = sum(len(file.undocumented) for file in densities)
    dense = sum(density >= DENSE for density in nodes_a_line)
    private = [
        name
        for name, file in files.items()
        if name != INTERNALS and private_names_of_lightning(file)
    ]
    return {
        "AST nodes a line": round(sum(nodes_a_line) / len(nodes_a_line), 2),
        "% of functions at 16 nodes a line and more": round(100 * dense / len(nodes_a_line), 1),
        "% of public names without a docstring": round(100 * undocumented / public, 1),
        "class names used for two things or more": len(names_used_twice(files)),
        "files that read a kind of target outside tasks": len(files_that_read(files, KINDS)),
        "files that read a head or labels outside tasks": len(files_that_read(files, HEADS)),
        "files with private names of Lightning": len(private),
        "files in a circle": len(circle(arrows)),
        "arrows between rooms": len(between),
        **{f"AST nodes of {room}": weight_of(ROOT / room) for room in ("kd", "tests", "scripts")},
        "files": len(files),
        "lines": sum(file.read_text().count("\n") for file in files.values()),
    }


if __name__ == "__main__":
    numbers = measure()
    limits = json.loads(LIMITS.read_text())
    for name, number in numbers.items():
        print(
            f"{name:48} {number:9,} {'at most ' + format(limits[name], ',') if name in limits else ''}"
        )
    if "--write" in sys.argv:
        LIMITS.write_text(
            json.dumps({name: min(numbers[name], limits[name]) for name in limits}, indent=1) + "\n"
        )
    if "--table" in sys.argv:
        print_table()
    if "--list" in sys.argv:
        for name, file in sources().items():
            for density, place in sorted(
                ((d, p) for p, d in density_of(file).functions.items()), reverse=True
            ):
                if density >= DENSE:
                    print(f"{density:6.1f} {name}:{place}")
            for place in density_of(file).undocumented:
                print(f"no docstring {name}:{place}")
