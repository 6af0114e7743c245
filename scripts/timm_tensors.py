"""Writes ``kd/models/timm_tensors.json``: timm's architectures by the names and shapes of their tensors.

    python scripts/timm_tensors.py          # builds each on the meta device: nine minutes
    python scripts/timm_tensors.py --check 40    # every 40th alone; exits with 1 if the table lacks one

It is of one release of timm. A model that another release builds otherwise is not recognised there.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import timm

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from kd.models.recognise import FILE, archs_by_digest, meta_model, tensors_digest  # noqa: E402

PORTED = ("tf_", "tv_", "gluon_", "legacy_", "flexivit_", "deit_")
"""Beginnings of names of models that were ported, or trained in a special way: after the others of one digest."""


def rank(arch: str) -> tuple[bool, int, int, str]:
    """What sorts the architectures of one digest: the usual one first.

    Args:
        arch: timm's name.
    """
    weights = len(timm.list_pretrained(f"{arch}.*"))
    return arch.startswith(PORTED), -weights, len(arch), arch


def digest_of(arch: str) -> str:
    """The digest of an architecture as this timm builds it; "" for one that it can't build."""
    model = meta_model(arch, {})
    return "" if model is None else tensors_digest(model.state_dict())


def missing(step: int) -> list[str]:
    """The architectures, every ``step``-th of timm's list, that the table has not below their digest."""
    return [
        arch
        for arch in timm.list_models()[::step]
        if arch not in archs_by_digest().get(digest_of(arch), [])
    ]


def write() -> None:
    """Writes the table anew."""
    digests = defaultdict(list)
    for arch in timm.list_models():
        digests[digest_of(arch)].append(arch)
    digests.pop("", None)
    lines = []
    for key in sorted(digests):
        lines.append(f'"{key}": {json.dumps(sorted(digests[key], key=rank))}')
    rows = ",\n".join(lines)
    FILE.write_text(f'{{"timm": "{timm.__version__}", "digests": {{\n{rows}\n}}}}\n', "utf-8")
    print(f"{FILE}: {sum(map(len, digests.values()))} architectures, {len(digests)} digests")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", type=int, metavar="STEP")
    asked = parser.parse_args()
    if asked.check:
        lacks = missing(asked.check)
        print("\n".join(lacks))
        sys.exit(bool(lacks))
    write()
