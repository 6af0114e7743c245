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

from kd.errors import Stopped, UserError, UserErrorOfAll, did_you_mean, plain
from kd.launch.child import end_with_parent, end_with_starter, wait_asleep
from kd.launch.cluster import is_rank_zero
from kd.launch.sagemaker import tell_failure
from kd.run.request import translate
from kd.run.streams import quiet_libraries, unbroken_output
from kd.storage.shown import on_terminal


def __getattr__(name: str) -> Callable[..., int]:
    command = name.removesuffix("_main")
    if command == name or find_spec(f"kd.commands.{command}") is None:
        raise AttributeError(f"module 'kd.cli' has no attribute '{name}'")
    return partial(main, command)


def main(command: str, argv: Sequence[str] | None = None) -> int:
    """Runs a command; what fails before a run has its folder ends in one line and status 2.

    Args:
        command: its name: ``train`` for ``kd-train``.
        argv: its arguments; default: those of this process.

    Returns:
        The exit status.
    """
    end_with_parent()
    end_with_starter()
    wait_asleep()
    quiet_libraries()
    with unbroken_output():
        return _status(command, sys.argv[1:] if argv is None else argv)


def kd_main(argv: Sequence[str] | None = None) -> int:
    """``kd NAME ...`` is ``kd-NAME ...``; ``kd`` alone lists the commands."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in commands():
        return main(name, words[1:])
    for command, line in commands().items():
        print(f"  kd {command:<9}{line}")
    if name in ("", "-h", "--help"):
        return 0
    print(
        f"kd: no command '{name}'" + did_you_mean(name, commands()).replace("'", "'kd ", 1),
        file=sys.stderr,
    )
    return 2


def commands() -> dict[str, str]:
    """Each command's name with the first line of its help, the trainer first."""
    found = {}
    for file in sorted(
        Path(__file__).with_name("commands").glob("[a-z]*.py"), key=lambda f: (f.stem != "train", f)
    ):
        (line,) = re.findall(
            rf'^HELP = """\\\nkd-{file.stem}: (.*)', file.read_text(encoding="utf-8"), re.MULTILINE
        )
        found[file.stem] = line
    return found


def _status(command: str, argv: Sequence[str]) -> int:
    try:
        module, request = import_module(f"kd.commands.{command}"), translate(argv)
        unknown = request.flags - {"help", "trust", *re.findall(r"--([a-z_-]+)", module.HELP)}
        if unknown:
            raise UserError(f"no option --{min(unknown)} (kd-{command} --help)")
        status = module.run(request)
        if status is None:
            print(module.usage() if hasattr(module, "usage") else module.HELP, end="")
            return 0 if "help" in request.flags else 2
        return status
    except UserError as error:
        if is_rank_zero() or isinstance(error, UserErrorOfAll):
            # a message may quote a name from a file
            shown = "\n".join(map(on_terminal, str(error).split("\n")))
            print(f"kd-{command}: {shown}", file=sys.stderr)
        tell_failure(str(error))
        return 2
    except Stopped as stop:
        print(f"kd-{command}: {stop}; run the same command again to resume", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print(f"kd-{command}: interrupted", file=sys.stderr)
        return 130
    except (
        Exception
    ) as error:  # before a run had its folder, where a run's own failures are reported
        if isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EFBIG,
        ):
            print(
                f"kd-{command}: {error.filename or 'a file'} can't be written: {error.strerror}",
                file=sys.stderr,
            )
            tell_failure(plain(error))
            return 1
        if os.environ.get("KD_TRACEBACK"):
            raise
        tell_failure(plain(error))
        print(f"kd-{command}: {plain(error)} (KD_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2


if __name__ == "__main__":  # python -m kd.cli [COMMAND] ...; without one it is kd-train
    if len(sys.argv) > 1 and sys.argv[1] in commands():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
    sys.exit(main("train"))
