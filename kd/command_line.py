"""Runs a command: its errors end in one line and a status."""

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from inspect import signature

from kd.commands import COMMANDS
from kd.errors import RunError, Stopped, UserError, UserErrorOfAll, plain, reason
from kd.launch.child import (
    end_with_parent,
    end_with_starter,
    trains_teacher,
    wait_asleep,
    with_outer_keys,
)
from kd.launch.cluster import is_rank_zero
from kd.launch.sagemaker import tell_failure
from kd.machine import cache_dir, is_about_cache
from kd.run.options import options_help, read_options
from kd.run.request import translate
from kd.run.streams import quiet_libraries, unbroken_output

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""A disk that is full, read-only, or takes no file of this size: status 1, as for a run that fails."""
HINT = " (KD_TRACEBACK=1 shows where)"
"""After an error that nobody foresaw, for who can type the command again: not in SageMaker's file."""


def run(command: str, argv: Sequence[str], interrupted: Callable[[], bool]) -> int:
    """Prepares this process, then runs a command in it and returns the exit status (:func:`_status`).

    A process that kd or another rank has started then ends with the one that started it; OpenMP's threads sleep while they
    wait, and libraries are quiet. While the command runs, :func:`kd.run.streams.unbroken_output` writes what is printed.

    Args:
        command: its name.
        argv: its arguments.
        interrupted: returns whether Ctrl-C was pressed.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, whatever error libraries have made of it.
    """
    # all four before torch is imported
    end_with_parent()
    end_with_starter()
    wait_asleep()
    quiet_libraries()
    with unbroken_output(command):
        return _status(command, argv, interrupted)


def _status(command: str, argv: Sequence[str], interrupted: Callable[[], bool]) -> int:
    """Runs a command; the one place that turns errors into a line and an exit status (:func:`_line_of`).

    A user's mistake is printed by the first process of a job alone, as all of them find it (but for a UserErrorOfAll);
    other errors by each. Errors, but not stops, are also written where SageMaker reads them. With ``KD_TRACEBACK`` in the
    environment an error that nobody foresaw is raised instead.

    Args:
        command: its name.
        argv: its arguments.
        interrupted: as of :func:`run`.

    Returns:
        The command's own status (:func:`_run`), or the error's.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and a library has made another error of it (Lightning an exit, C code an
            ImportError).
    """
    try:
        return _run(command, argv)
    except (Exception, SystemExit) as error:
        if interrupted():
            raise KeyboardInterrupt from error
        if isinstance(error, SystemExit):
            raise
        line, status = _line_of(error)
        if status is None and os.environ.get("KD_TRACEBACK"):
            raise
        if not isinstance(error, Stopped):
            tell_failure(line.removesuffix(HINT))
        of_all = not isinstance(error, UserError) or isinstance(error, UserErrorOfAll)
        if of_all or is_rank_zero():
            print(f"kd-{command}: {line}", file=sys.stderr)
        return 2 if status is None else status


def _line_of(error: Exception) -> tuple[str, int | None]:
    """The line to print about an error, and the exit status.

    Returns:
        The line; 2 for a user's mistake, 1 for a failure that a RunError explains, or a disk that can't be written, 128 +
        the signal's number for work that a signal has stopped outside of a run's folder. None, which ends with 2, for an
        error that nobody foresaw, among them a cache folder that can't be written.
    """
    what = plain(error)
    if isinstance(error, UserError):
        return with_outer_keys(str(error)) if trains_teacher() else str(error), 2
    if isinstance(error, Stopped):
        return f"{error}; run the same command again to resume", 128 + error.signal_number
    if isinstance(error, RunError):  # without a run's folder: Ray's node, a loader's shared memory
        return reason(error), 1
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.filename or 'a file'} can't be written: {error.strerror}", 1
    if is_about_cache(error):
        why = f"kd's cache folder {cache_dir()} can't be written ({what})"
        return f"KD_CACHE: {why}; KD_CACHE=DIR before the command names another", None
    if "operator torchvision::" in str(error):
        return (
            f"torch and torchvision are of two builds: install both from one index ({what})",
            None,
        )
    if isinstance(error, PermissionError):
        return what, None
    return f"{what}{HINT}", None


def _run(command: str, argv: Sequence[str]) -> int:
    """Runs a command, and prints its result or its help; returns the exit status: of the help 0 where requested, else 2.

    The function ``run`` in the command's file takes the request and, if it has an argument ``options``, those of the class
    ``OPTIONS``. It returns the status, a result to print, or None where the command line lacks what it needs. For
    ``--help`` it is not called. With ``--json`` the result is printed as data, and all else goes to stderr.

    Args:
        command: its name.
        argv: its arguments.

    Raises:
        UserError: there are arguments, but not those that the command needs; or the command's own.
    """
    module = import_module(f"kd.commands.{command}")
    request = translate(argv, getattr(module, "FLAGS", ()), command)
    as_json = "json" in request.flags
    asked = "help" in request.flags
    outcome = None
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        if "options" not in signature(module.run).parameters:
            if not asked:
                outcome = module.run(request)
        elif options := read_options(module.OPTIONS, request):
            outcome = module.run(request, options)
    if isinstance(outcome, int):
        return outcome
    if outcome is not None:
        from kd.report.terminal import print_result

        print_result(outcome, as_json)
        return 0
    if argv and not asked:
        raise UserError(f"expected {_usage(module.HELP)} (kd-{command} --help)")
    text = module.usage(request) if hasattr(module, "usage") else module.HELP
    if hasattr(module, "OPTIONS"):
        text = text.replace("{options}\n", options_help(module.OPTIONS))
    print(f"kd-{command}: {COMMANDS[command]}\n\n{text}", end="")
    return 0 if asked else 2


def _usage(help_text: str) -> str:
    """The words that a command needs, from the first line of its help: without optional words (in brackets) and without the
    comment after two spaces.
    """
    example = re.split(r"  +|\n", help_text.strip())[0]
    return " ".join(re.sub(r"\[[^\]]*\]", "", example).split())
