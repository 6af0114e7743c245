"""One file a command, imported by ``kd/cli.py``: ``HELP``, and ``run(request)``, which returns the exit status.

``None`` prints the help. ``HELP`` names the flags that a command takes; ``--help`` and ``--trust`` all take.
"""
