"""The measure of the house: lines, rooms, arrows between them, circles, words. ``python scripts/house.py`` prints it.

``tests/test_house.py`` keeps each number at or below what ``tests/house.json`` says; ``--write`` writes that file anew.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = ROOT / "tests" / "house.json"
WORDS = re.compile(  # riddles by pronoun, personified machines, foreign word order
    r"\b(goes? on|going on|gone on|go on with|is told|are told|tells|told|there is none|that is none|that are none"
    r"|is no number|are no numbers|takes? (?:it|them) back|stands? behind|was meant by|comes out of it|came out of it"
    r"|looks? at|hears?|listens? to|theirs)\b",
    re.IGNORECASE,
)
KINDS = {"dense", "masks", "multi_label"}
HEADS = {"has_head", "labels", "classifies"}
AMBIGUOUS = {"masks", "labels"}  # other things have such too: these names count where one of OWNERS is asked
OWNERS = re.compile(r"(task|info|data|source|student|batch)\w*")


def name_of(file: Path) -> str:
    """Dotted name of a module of ours."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[str, Path]:
    """All modules below ``kd/``, by dotted name."""
    return {name_of(file): file for file in sorted((ROOT / "kd").rglob("*.py"))}


@cache
def tree_of(file: Path) -> ast.Module:
    """What a file says, parsed once."""
    return ast.parse(file.read_text())


def imports_of(file: Path, known: dict[str, Path]) -> set[str]:
    """Our modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {m if (m := f"{node.module}.{a.name}") in known else node.module for a in node.names}
    return {name for name in found if name in known} - {name_of(file)}


def room_of(name: str) -> str:
    """The room of a module: its folder below ``kd/``, or the module itself. Two that stand below all are their own."""
    own = next((room for room in ("kd.losses.functional", "kd.run.settings") if name.startswith(room)), "")
    return own or ".".join(name.split(".")[:2])


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others, by imports at the top of a file or inside it."""
    reach: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        ahead = list(arrows[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += arrows.get(name, ())
        reach[start] = seen
    own = {name: frozenset({name} | {o for o in reach[name] if name in reach.get(o, ())}) for name in arrows}
    return sorted(sorted(group) for group in set(own.values()) if len(group) > 1)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Each docstring of a file, with what it describes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node, text


def lines(files: dict[str, Path]) -> dict[str, int]:
    """All lines, and those of docstrings."""
    total = described = short = 0
    for file in files.values():
        text = file.read_text()
        total += text.count("\n")
        for _, docstring in docstrings(tree_of(file)):
            described += docstring.count("\n") + 1
            short += len(docstring.split()) <= 5
    return {"lines": total, "docstring lines": described, "docstrings of <= 5 words": short}


def asked(files: dict[str, Path], names: set[str]) -> tuple[int, int]:
    """Lines, and files, outside ``kd.tasks`` that read one of these attributes of a task, data, teacher or student."""
    found = [{node.lineno for node in ast.walk(tree_of(file)) if _asks(node, names)}
             for name, file in files.items() if not name.startswith("kd.tasks")]  # fmt: skip
    return sum(map(len, found)), sum(map(bool, found))


def _asks(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in names:
        return False
    owner = ast.unparse(node.value).rpartition(".")[2]
    return node.attr not in AMBIGUOUS or OWNERS.fullmatch(owner) is not None


def words(files: dict[str, Path]) -> int:
    """The words of the dialect in docstrings, comments and messages, and in the guides."""
    texts = [file.read_text() for file in files.values()]
    texts += [
        file.read_text() for file in [ROOT / "README.md", *(ROOT / "kd").rglob("*.md"), *ROOT.glob("recipes/*.md")]
    ]
    return sum(len(WORDS.findall(text)) for text in texts)


def untested(files: dict[str, Path]) -> int:
    """Modules whose name no test mentions."""
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    mentioned = {f"{module}.{name.strip()}" for module, names in re.findall(r"from (kd[\w.]*) import ([\w, ]+)", tests)
                 for name in names.split(",")}  # fmt: skip
    for dotted in re.findall(r"\bkd(?:\.\w+)*", tests):
        words = dotted.split(".")
        mentioned |= {".".join(words[: n + 1]) for n in range(len(words))}
    return len(files.keys() - mentioned)


def measure() -> dict[str, int]:
    """Each number by name; smaller is better."""
    files = sources()
    arrows = {name: imports_of(file, files) for name, file in files.items()}
    between = {(room_of(a), room_of(b)) for a, targets in arrows.items() for b in targets if room_of(a) != room_of(b)}
    kinds, kind_files = asked(files, KINDS)
    heads, head_files = asked(files, HEADS)
    private = re.compile(
        r"(?:trainer|loop|strategy|launcher)\._[a-z]|(?:fabric|pytorch_lightning)\S* import .*\b_[A-Z_a-z]"
    )
    top = [name for name, file in files.items() if name.count(".") == 1 and file.stem != "__init__"]
    return {
        "files": len(files),
        **lines(files),
        "modules on the top level": len(top) + 1,
        "rooms": len({room_of(name) for name in files if name.count(".") > 1}),
        "arrows between rooms": len(between),
        "circles of files": len(circles(arrows)),
        "lines that ask for a kind of target outside tasks": kinds,
        "files that do": kind_files,
        "lines that ask for a head or labels outside tasks": heads,
        "files that do so": head_files,
        "files with private names of Lightning": sum(bool(private.search(x.read_text())) for x in files.values()) - 1,
        "words of the dialect": words(files),
        "modules that no test names": untested(files),
    }  # fmt: skip


if __name__ == "__main__":
    found = measure()
    limits = json.loads(LIMITS.read_text()) if LIMITS.is_file() else {}
    for name, number in found.items():
        print(f"{name:52} {number:7,} {'at most ' + format(limits[name], ',') if name in limits else ''}")
    if "--write" in sys.argv:
        LIMITS.write_text(json.dumps(found, indent=1) + "\n")
