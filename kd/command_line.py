"""Runs a command: its errors end in one line and a status."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
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


@contextmanager
def _as_interrupt(interrupted: Callable[[], bool]) -> Iterator[None]:
    """Turns any error or exit from inside into a KeyboardInterrupt where Ctrl-C was pressed: Lightning turns one into an
    exit, C code into an ImportError. Without Ctrl-C errors pass as they are.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if interrupted():
            raise KeyboardInterrupt from error
        raise


def _status(command: str, argv: Sequence[str], interrupted: Callable[[], bool]) -> int:
    """Runs a command; the one place that turns errors into a line and an exit status.

    Args:
        command: its name.
        argv: its arguments.
        interrupted: as of :func:`run`.

    A user's mistake is printed by the first process of a job alone, as all of them find it (but for a UserErrorOfAll);
    other errors by each. Errors, but not stops, are also written where SageMaker reads them. With ``KD_TRACEBACK`` in the
    environment an error that nobody foresaw is raised instead.

    Returns:
        The command's own status; 0 for help that was asked for; 2 for a user's mistake, an error that nobody foresaw, a
        cache folder that can't be written, or help that was not asked for (no arguments); 1 for a disk that can't be
        written, or a failure that a RunError explains; 128 + the signal's number for work that a signal has stopped outside
        of a run's folder.
    """
    try:
        with _as_interrupt(interrupted):
            return _run(command, argv)
    except UserError as error:
        tell_failure(str(error))
        line, status = str(error), 2
        if trains_teacher():
            line = with_outer_keys(line)
        if not (is_rank_zero() or isinstance(error, UserErrorOfAll)):
            return status
    except Stopped as stop:
        line, status = f"{stop}; run the same command again to resume", 128 + stop.signal_number
    except RunError as error:  # without a run's folder: Ray's node, a loader's shared memory
        line, status = reason(error), 1
        tell_failure(line)
    except Exception as error:  # a run's own failures are reported in its folder, once it has one
        is_of_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
        if os.environ.get("KD_TRACEBACK") and not is_of_disk:
            raise
        tell_failure(plain(error))
        line, status = _unforeseen(error), 1 if is_of_disk else 2
    print(f"kd-{command}: {line}", file=sys.stderr)
    return status


def _run(command: str, argv: Sequence[str]) -> int:
    """Runs a command, and prints its result, or its help; returns the exit status.

    Args:
        command: its name; ``run`` of its file takes the request, and ``options`` of the class ``OPTIONS`` unless it reads
            these itself. It returns the status, a result to print (with ``--json`` as data), or None where only its help, or
            how it is called, can be shown.
        argv: its arguments.
    """
    module = import_module(f"kd.commands.{command}")
    request = translate(argv, getattr(module, "FLAGS", ()), command)
    as_json = "json" in request.flags
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        given: list[object] = [request]
        if "options" in signature(module.run).parameters:
            given.append(read_options(module.OPTIONS, request))
        outcome = None if None in given else module.run(*given)
    if isinstance(outcome, int):
        return outcome
    if outcome is not None:
        from kd.report.terminal import print_result

        print_result(outcome, as_json)
        return 0
    asked = "help" in request.flags
    if argv and not asked:
        raise UserError(f"expected {_usage(module.HELP)} (kd-{command} --help)")
    text = module.usage() if hasattr(module, "usage") else module.HELP
    if hasattr(module, "OPTIONS"):
        text = text.replace("{options}\n", options_help(module.OPTIONS))
    print(f"kd-{command}: {COMMANDS[command]}\n\n{text}", end="")
    return 0 if asked else 2


def _unforeseen(error: Exception) -> str:
    """The line about an error that is no UserError: of a disk, of the cache folder, of mismatched builds of torch and
    torchvision, of permissions, or another unexpected one.
    """
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error.filename or 'a file'} can't be written: {error.strerror}"
    if is_about_cache(error):
        folder = cache_dir()
        return (
            f"KD_CACHE: kd's cache folder {folder} can't be written ({plain(error)}); "
            "KD_CACHE=DIR before the command names another"
        )
    if "operator torchvision::" in str(error):
        return (
            f"torch and torchvision are of two builds: install both from one index ({plain(error)})"
        )
    if isinstance(error, PermissionError):
        return plain(error)
    return f"{plain(error)} (KD_TRACEBACK=1 shows where)"


def _usage(help_text: str) -> str:
    """The words that a command needs, from the first line of its help: without optional words (in brackets) and without the
    comment after two spaces.
    """
    example = re.split(r"  +|\n", help_text.strip())[0]
    return " ".join(re.sub(r"\[[^\]]*\]", "", example).split())
