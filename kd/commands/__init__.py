"""One file a command: ``HELP`` and ``run(request)``, which returns the exit status, or None where the help is wanted.

``kd/cli.py`` finds it by name.
"""
