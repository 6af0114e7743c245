"""Exceptions that the commands tell in one line."""


class UserError(ValueError):
    """A mistake in what the user gave, told in one line that names the key or file.

    The commands print the message without a traceback and exit with status 2.
    """


class RunError(RuntimeError):
    """A run that can't go on for a reason that one line tells (a full disk, a loss that is no number).

    The commands print the message and exit with status 1; the traceback goes to the run's ``error.txt``.
    """
