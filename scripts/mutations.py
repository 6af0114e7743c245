"""Do the tests notice a fault? Plants single faults in ``kd/`` and runs, for each, the tests that cover its line.

    pytest -n 2 --cov=kd --cov-context=test --durations=0 > suite.log   # makes .coverage (needs pytest-cov)
    python scripts/mutations.py .coverage suite.log out.json --copy FOLDER [--faults 100] [--seed 0]

FOLDER is a checkout of the same commit, in which the faults are planted one after the other; no two processes may use
it. A fault is a comparison's bound moved, a sign turned, ``and`` for ``or``, a condition denied, a number one larger,
or a missing statement. Its tests run from the quickest on, until one fails or they would take more than 90 seconds.
Coverage does not follow the processes that a test starts: a line that only these run counts as not covered.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SECONDS = 90
"""Limit for the tests of one fault, by the times of the suite."""
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
BOTH = {ast.And: ast.Or, ast.Or: ast.And}


class Fault(NamedTuple):
    """One planted fault."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def fault_at(node: ast.AST) -> tuple[str, ast.AST] | None:
    """What kind of fault a node allows, and the node in its place."""
    match node:
        case ast.Compare(left, [bound], right) if type(bound) in BOUNDS:
            return "bound", ast.Compare(left, [BOUNDS[type(bound)]()], right)
        case ast.BinOp(left, sign, right) if type(sign) in SIGNS and not is_text(left, right):
            return "sign", ast.BinOp(left, SIGNS[type(sign)](), right)
        case ast.BoolOp(joined, values):
            return "and, or", ast.BoolOp(BOTH[type(joined)](), values)
        case ast.If(test, body, orelse):
            return "condition", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return "number", ast.Constant(number + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            return "missing statement", ast.Pass()
    return None


def is_text(*operands: ast.expr) -> bool:
    """Whether one operand of a sign is a text or a list as written."""
    kinds = ast.JoinedStr | ast.List | ast.Tuple | ast.Dict | ast.Set
    return any(
        isinstance(o, kinds) or (isinstance(o, ast.Constant) and isinstance(o.value, str))
        for o in operands
    )


def places_in(tree: ast.Module) -> list[tuple[ast.AST, str, ast.AST]]:
    """Nodes of a file that a fault can replace, with the fault's kind and the node in their place."""
    found = ((node, fault_at(node)) for node in ast.walk(tree))
    return [(node, *made) for node, made in found if made is not None]


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Draws places over all of ``kd/``, each as likely as the next."""
    files = {file: file.read_text() for file in sorted((root / "kd").rglob("*.py"))}
    places = [
        (file, *place) for file, text in files.items() for place in places_in(ast.parse(text))
    ]
    faults = []
    for file, node, kind, other in random.Random(seed).sample(places, count):
        before = ast.get_source_segment(files[file], node) or ""
        after = ast.unparse(ast.fix_missing_locations(other))
        faults.append(Fault(str(file.relative_to(root)), node.lineno, kind, before, after))
    return faults


def plant(root: Path, fault: Fault) -> str:
    """Writes a fault into its file; returns the text before."""
    file = root / fault.file
    text = file.read_text()
    here = [
        node
        for node, kind, _ in places_in(ast.parse(text))
        if (node.lineno, kind) == (fault.line, fault.kind)
    ]
    node = next(node for node in here if ast.get_source_segment(text, node) == fault.before)
    lines = text.encode().splitlines(keepends=True)
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    body = fault.after.encode()
    if isinstance(node, ast.If):
        body = body.replace(b"\n", b"\n" + b" " * node.col_offset)
    elif not isinstance(node, ast.Expr | ast.AugAssign):
        body = b"(" + body + b")"
    file.write_bytes(head + body + tail)
    return text


def tests_by_line(coverage: Path) -> dict[str, dict[int, list[str]]]:
    """For each file of ``kd/`` and line the tests that pass it."""
    from coverage import CoverageData

    data = CoverageData(str(coverage))
    data.read()
    found = {}
    for measured in data.measured_files():
        name = "kd/" + measured.rpartition("/kd/")[2]
        by_line = data.contexts_by_lineno(measured)
        found[name] = {
            line: sorted({c.partition("|")[0] for c in contexts if c})
            for line, contexts in by_line.items()
        }
    return found


def seconds_of(log: Path) -> dict[str, float]:
    """Seconds of each test, by the suite's ``--durations=0``; those not listed took next to none."""
    took: Counter[str] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        if found := re.match(r"([\d.]+)s (call|setup|teardown) +(.+)", line):
            took[found[3]] += float(found[1])
    return took


def failed_in(log: Path) -> set[str]:
    """Tests that failed in the suite without a fault: they catch nothing."""
    lines = log.read_text(errors="replace").splitlines()
    return {
        line.split(" - ")[0].split(maxsplit=1)[1]
        for line in lines
        if line.startswith(("FAILED ", "ERROR "))
    }


def quickest(tests: list[str], took: dict[str, float]) -> list[str]:
    """The quickest tests that end within the limit together, one at the least."""
    ranked = sorted(tests, key=lambda name: (took.get(name, 0.0), name))
    chosen: list[str] = []
    spent = 0.0
    for name in ranked:
        spent += took.get(name, 0.0)
        if chosen and spent > SECONDS:
            break
        chosen.append(name)
    return chosen


def run_tests(root: Path, tests: list[str]) -> str:
    """Runs tests in a checkout: "caught", "missed", or "caught: time" for a fault that hangs."""
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "--no-header", "--tb=no", *tests]
    try:
        done = subprocess.run(words, cwd=root, env=env, capture_output=True, timeout=8 * SECONDS)
    except subprocess.TimeoutExpired:
        return "caught: time"
    return "missed" if done.returncode == 0 else "caught"


def table(results: list[dict[str, object]]) -> str:
    """Caught, missed and not covered, by room."""
    rows = {}
    for result in results:
        room = "/".join(Path(str(result["file"])).parts[:2])
        rows.setdefault(room, Counter())[str(result["result"]).partition(":")[0]] += 1
    lines = [f"{'room':28} caught missed not covered"]
    for room, counts in [*sorted(rows.items()), ("all", sum(rows.values(), Counter()))]:
        shown = (counts["caught"], counts["missed"], counts["not covered"])
        lines.append(f"{room:28} {shown[0]:6} {shown[1]:6} {shown[2]:11}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("coverage", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--copy", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    root = args.copy.resolve()
    covered = tests_by_line(args.coverage)
    took = seconds_of(args.log)
    failed = failed_in(args.log)
    results: list[dict[str, object]] = []
    for number, fault in enumerate(draw(root, args.faults, args.seed), 1):
        passing = [t for t in covered.get(fault.file, {}).get(fault.line, []) if t not in failed]
        tests = quickest(passing, took)
        started = time.monotonic()
        result = "not covered"
        if tests:
            text = plant(root, fault)
            try:
                result = run_tests(root, tests)
            finally:
                (root / fault.file).write_text(text)
        results.append({**fault._asdict(), "result": result, "tests": len(tests)})
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        spent = time.monotonic() - started
        print(f"{number}/{args.faults} {result} {fault.file}:{fault.line} {fault.kind}, "
              f"{len(tests)} tests, {spent:.0f} s", flush=True)  # fmt: skip
    print(table(results))


if __name__ == "__main__":
    main()
