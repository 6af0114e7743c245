"""Draws functions at random, for fresh readers to explain: ``python scripts/draw.py --seed 52 --count 30``.

Each line is ``file:line name``. Functions of more than four lines of all rooms below ``kd/`` count, each room as often as
any other, so that a small room is read too.
"""

import argparse
import ast
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = 4


def functions(file: Path) -> list[tuple[int, str]]:
    """Line and name of each function of a file that has more than :data:`LINES` lines."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
    return [(node.lineno, node.name) for node in nodes if node.end_lineno - node.lineno >= LINES]  # type: ignore[operator]


def main() -> None:
    """Prints the drawn functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=30)
    asked = parser.parse_args()
    rooms: dict[str, list[str]] = {}
    for file in sorted((ROOT / "kd").rglob("*.py")):
        place = file.relative_to(ROOT)
        rooms.setdefault(place.parts[1], []).extend(
            f"{place}:{line} {name}" for line, name in functions(file)
        )
    drawing = random.Random(asked.seed)
    names = [room for room, places in rooms.items() if places]
    drawn: list[str] = []
    while len(drawn) < asked.count:
        function = drawing.choice(rooms[drawing.choice(names)])
        if function not in drawn:
            drawn.append(function)
    print("\n".join(drawn))


if __name__ == "__main__":
    main()
