"""Compute threads that wait sleep, unless the user has said otherwise, from before torch is there."""

import os
import subprocess
import sys

import pytest

ASK = """
import os, sys
import kd.cli
assert "torch" not in sys.modules
kd.cli.main("train", ["--version"])
assert "torch" not in sys.modules
print([os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")])
"""


@pytest.mark.parametrize(
    ("said", "is_set"),
    [
        ({}, "['passive', None]"),
        ({"OMP_WAIT_POLICY": "active"}, "['active', None]"),
        ({"GOMP_SPINCOUNT": "9"}, "[None, '9']"),
    ],
)
def test_threads_wait_asleep_unless_told_otherwise(said: dict[str, str], is_set: str) -> None:
    env = {
        k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    } | said
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == is_set
