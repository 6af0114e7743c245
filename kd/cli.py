"""The entry points: ``kd-NAME``, or ``kd NAME``, runs ``kd/commands/NAME.py``; ``pyproject.toml`` lists them."""

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from kd.errors import RunError, Stopped, UserError, UserErrorOfAll, did_you_mean, plain, reason
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
from kd.run.request import translate
from kd.run.shorthand import as_typed
from kd.run.streams import quiet_libraries, unbroken_output
from kd.storage.shown import on_terminal

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""A disk that is full, read-only, or takes no file of this size: status 1, as for a run that fails."""


def __getattr__(name: str) -> Callable[..., int]:
    """``NAME_main``, the entry point of the command NAME: :func:`main` for it, which needs no argument.

    ``pyproject.toml`` names the entry points so; Python calls this for a name that the module does not hold.

    Raises:
        AttributeError: no such command.
    """
    command = name.removesuffix("_main")
    if command == name or find_spec(f"kd.commands.{command}") is None:
        raise AttributeError(f"module 'kd.cli' has no attribute '{name}'")
    return partial(main, command)


def main(command: str, argv: Sequence[str] | None = None) -> int:
    """Runs a command. An error ends in one line and a status, without a traceback (:func:`_status`).

    It changes settings of the whole process, which should be the command's own: with which process it ends, how OpenMP's
    threads wait, what libraries print, how output is written.

    Args:
        command: its name: ``train`` for ``kd-train``.
        argv: its arguments, without the name; None: those of this process.

    Returns:
        The exit status; 0: all went well.
    """
    # all four before torch is imported: with which process this one ends, how idle threads wait, what libraries print
    end_with_parent()
    end_with_starter()
    wait_asleep()
    quiet_libraries()
    with unbroken_output(command):
        return _status(command, sys.argv[1:] if argv is None else argv)


def kd_main(argv: Sequence[str] | None = None) -> int:
    """``kd NAME ...`` is ``kd-NAME ...``; ``kd`` alone, with ``-h`` or ``--help``, or with an unknown name, lists the
    commands.

    Args:
        argv: the command's name and its arguments; None: those of this process.

    Returns:
        The command's exit status; 0 after the list, 2 for an unknown name, which a line on stderr names after the list.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in commands():
        return main(name, words[1:])
    for command, line in commands().items():
        print(f"  kd {command:<9}{line}")
    if name in ("", "-h", "--help"):
        return 0
    hint = did_you_mean(name, commands()).replace("'", "'kd ", 1)
    print(f"kd: no command '{name}'{hint}", file=sys.stderr)
    return 2


def commands() -> dict[str, str]:
    """Each command's name with the first line of its help, less ``kd-NAME: ``, the trainer first; read as text from
    ``kd/commands/NAME.py``.

    So each of these files begins its ``HELP`` with ``kd-NAME: ``.
    """
    files = Path(__file__).with_name("commands").glob("[a-z]*.py")
    first_lines = {}
    for file in sorted(files, key=lambda file: (file.stem != "train", file)):
        first_line = rf'^HELP = """\\\nkd-{file.stem}: (.*)'  # read as text: no command is imported
        (text,) = re.findall(first_line, file.read_text(encoding="utf-8"), re.MULTILINE)
        first_lines[file.stem] = text
    return first_lines


def _status(command: str, argv: Sequence[str]) -> int:
    """Runs a command; the one place that turns errors into a line and an exit status.

    Args:
        command: its name; ``run`` of its file takes the request and returns the status, None where only its help, or how
            it is called, can be shown.
        argv: its arguments.

    A user's mistake is printed by the first process of a job alone, as all of them find it (but for a UserErrorOfAll);
    other errors by each. Errors, but not stops, are also written where SageMaker reads them. With ``KD_TRACEBACK`` in the
    environment an error that nobody foresaw is raised instead.

    Returns:
        The command's own status; 0 for help that was asked for; 2 for a user's mistake, an error that nobody foresaw, a
        cache folder that can't be written, or help that was not asked for (no arguments); 1 for a disk that can't be
        written, or a failure that a RunError explains; 130 after Ctrl-C; 128 + the signal's number for work that a signal
        has stopped outside of a run's folder.
    """
    try:
        module = import_module(f"kd.commands.{command}")
        request = translate(argv)
        unknown = request.flags - {"help", "trust", *re.findall(r"--([a-z_-]+)", module.HELP)}
        if unknown:
            raise UserError(f"no option --{min(unknown)} (kd-{command} --help)")
        status = module.run(request)
        if status is not None:
            return status
        if argv and "help" not in request.flags:
            raise UserError(f"expected {_usage(module.HELP)} (kd-{command} --help)")
        print(module.usage() if hasattr(module, "usage") else module.HELP, end="")
        return 0 if "help" in request.flags else 2
    except UserError as error:
        if is_rank_zero() or isinstance(error, UserErrorOfAll):
            message = as_typed(str(error), argv)
            if trains_teacher():
                message = with_outer_keys(message)
            # a message may quote a name from a file
            shown = "\n".join(map(on_terminal, message.split("\n")))
            print(f"kd-{command}: {shown}", file=sys.stderr)
        tell_failure(str(error))
        return 2
    except Stopped as stop:
        print(f"kd-{command}: {stop}; run the same command again to resume", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print(f"kd-{command}: interrupted", file=sys.stderr)
        return 130
    except RunError as error:  # without a run's folder: Ray's node, a loader's shared memory
        tell_failure(reason(error))
        print(f"kd-{command}: {on_terminal(reason(error))}", file=sys.stderr)
        return 1
    except Exception as error:  # a run's own failures are reported in its folder, once it has one
        is_of_disk = _is_of_disk(error)
        if os.environ.get("KD_TRACEBACK") and not is_of_disk:
            raise
        tell_failure(plain(error))
        print(f"kd-{command}: {_unforeseen(error)}", file=sys.stderr)
        return 1 if is_of_disk else 2


def _is_of_disk(error: Exception) -> TypeGuard[OSError]:
    """Whether the error is a disk that can't be written: full, over quota, read-only, or not for a file of this size."""
    return isinstance(error, OSError) and error.errno in DISK_ERRORS


def _unforeseen(error: Exception) -> str:
    """A line about an error that is no user's mistake: of the disk, of the cache folder, or one that nobody foresaw."""
    if _is_of_disk(error):
        return f"{error.filename or 'a file'} can't be written: {error.strerror}"
    if is_about_cache(error):
        folder = cache_dir()
        return (
            f"KD_CACHE: kd's cache folder {folder} can't be written ({plain(error)}); "
            "KD_CACHE=DIR before the command names another"
        )
    return f"{plain(error)} (KD_TRACEBACK=1 shows where)"


def _usage(help_text: str) -> str:
    """The first line of a command's help that begins with two blanks and ``kd-``, without its comment and what is in
    brackets: the words that the command needs.
    """
    line = next(line for line in help_text.splitlines() if line.startswith("  kd-"))
    example = re.split(r"  +", line.strip())[0]
    return " ".join(re.sub(r"\[[^\]]*\]", "", example).split())


if __name__ == "__main__":  # python -m kd.cli [COMMAND] ...; without one it is kd-train
    if len(sys.argv) > 1 and sys.argv[1] in commands():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    sys.exit(main("train"))
