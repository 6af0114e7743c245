"""Draws functions at random, for fresh readers to explain: ``python scripts/draw.py --seed 52 --count 30``.

Each line is ``file:line name``. Functions of at least four lines of code of all rooms below ``kd/`` count, each room as
often as any other, so that a small room is read too.
"""

import argparse
import random
from collections import defaultdict

from house import density_of, room_of, sources


def main() -> None:
    """Prints the drawn functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=30)
    asked = parser.parse_args()
    rooms: dict[str, list[str]] = defaultdict(list)
    for name, file in sources().items():
        rooms[room_of(name)] += [f"{name}:{place}" for place in density_of(file).functions]
    drawing = random.Random(asked.seed)
    names = [room for room, places in rooms.items() if places]
    drawn: dict[str, None] = {}
    while len(drawn) < asked.count:
        drawn[drawing.choice(rooms[drawing.choice(names)])] = None
    print("\n".join(drawn))


if __name__ == "__main__":
    main()
