"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """A mistake in what the user gave, told in one line that names the key or file.

    The commands print the message without a traceback and exit with status 2.
    """
