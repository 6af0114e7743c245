"""How compute threads wait for their work; to be settled before torch is imported."""

import os

SAYS_HOW = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_asleep() -> None:
    """Threads that wait for the others sleep, unless the environment says how they shall wait.

    OpenMP lets them spin for a while, which burns the cores that loaders, other ranks and other programs need: a run
    beside other work was six times slower for it (scripts/bench/threads.py).
    """
    if not any(name in os.environ for name in SAYS_HOW):
        os.environ["OMP_WAIT_POLICY"] = "passive"
