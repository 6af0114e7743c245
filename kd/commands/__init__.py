"""One file a command: ``HELP`` and ``run(request)``, which returns the exit status. ``kd/cli.py`` finds it by name."""
