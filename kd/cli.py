"""The entry points: ``kd-NAME``, or ``kd NAME``, runs ``kd/commands/NAME.py``; ``pyproject.toml`` lists them.

Ctrl-C ends a command here, at any moment from its first line on: nothing but the standard library and the commands' names is
imported before.
"""

import gc
import os
import signal
import sys
from _thread import interrupt_main
from collections.abc import Callable, Sequence
from functools import partial
from threading import Timer, current_thread, main_thread
from types import FrameType

from kd.commands import COMMANDS

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""


def __getattr__(name: str) -> Callable[..., int]:
    """``NAME_main``, the entry point of the command NAME: :func:`main` for it, which needs no argument.

    ``pyproject.toml`` names the entry points so; Python calls this for a name that the module does not hold.

    Raises:
        AttributeError: no such command.
    """
    command = name.removesuffix("_main")
    if command == name or command not in COMMANDS:
        raise AttributeError(f"module 'kd.cli' has no attribute '{name}'")
    return partial(main, command)


def main(command: str, argv: Sequence[str] | None = None, whole_process: bool = False) -> int:
    """Runs a command (:func:`kd.command_line.run`). An error ends in one line and a status, without a traceback.

    Args:
        command: its name: ``train`` for ``kd-train``.
        argv: its arguments, without the name; None: those of this process.
        whole_process: the caller ends this process right after: Ctrl-C ends it at once, and Python's last search for unused
            objects is left out. True where ``argv`` is None.

    Returns:
        The exit status; 0: all went well; 130 after Ctrl-C.
    """
    whole_process = whole_process or argv is None
    if whole_process:  # kd.machine.SAFE_PATH, for what libraries start
        os.environ["PYTHONSAFEPATH"] = "1"
    ctrl_c = CtrlC(command)
    try:
        from kd.command_line import run

        return run(command, sys.argv[1:] if argv is None else argv, lambda: ctrl_c.pressed)
    except KeyboardInterrupt:
        return ctrl_c.leave()
    finally:
        ctrl_c.end(whole_process)
        if (
            whole_process
        ):  # else Python looks through all objects of torch at its end, which takes a second
            gc.freeze()


class CtrlC:
    """Ctrl-C as a command meets it: a KeyboardInterrupt, which libraries may turn into another error, or drop.

    Where SIGINT is ignored (``nohup``, a shell's job in the background), or the caller handles it, it stays so.

    Args:
        command: whose name the message begins with.
    """

    def __init__(self, command: str) -> None:
        """Handles SIGINT from here on."""
        self.command = command
        self.pressed = False
        """Whether it was pressed while the command had no handler of its own."""
        self._hook = sys.unraisablehook
        of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_handled = of_python and current_thread() is main_thread()
        if self._is_handled:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._again

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raises a KeyboardInterrupt, as Python's own handler does."""
        self.pressed = True
        raise KeyboardInterrupt

    def _again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Interrupts once more where Python has dropped the KeyboardInterrupt, in a finalizer or callback."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            Timer(0.05, interrupt_main).start()
        else:
            self._hook(unraisable)

    def leave(self) -> int:
        """Prints the one word; returns the exit status."""
        if self._is_handled:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"kd-{self.command}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED

    def end(self, whole_process: bool) -> None:
        """Python's own handlers again; of a whole process Ctrl-C ends at once what is left of it."""
        if not self._is_handled:
            return
        sys.unraisablehook = self._hook
        after = self._exit if whole_process else signal.default_int_handler
        signal.signal(signal.SIGINT, after)

    def _exit(self, number: int, frame: FrameType | None) -> None:
        """Ends the process, whose threads and libraries may still be ending."""
        self.leave()
        os._exit(INTERRUPTED)


def kd_main(argv: Sequence[str] | None = None) -> int:
    """``kd NAME ...`` is ``kd-NAME ...``; ``kd`` alone, with ``-h`` or ``--help``, or with an unknown name, lists the
    commands.

    Args:
        argv: the command's name and its arguments; None: those of this process.

    Returns:
        The command's exit status; 0 after the list, 2 for an unknown name, which a line on stderr names after the list.
    """
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return main(name, words, whole_process=argv is None)
    for command, line in COMMANDS.items():
        print(f"  kd {command:<9}{line}")
    if name in ("-h", "--help"):
        return 0
    from kd.config.suggest import near

    hint = near(name, COMMANDS).replace("'", "'kd ", 1)
    print(f"kd: no command '{name}'{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":  # python -m kd.cli [COMMAND] ...; without one it is kd-train
    sys.exit(kd_main() if sys.argv[1:2] and sys.argv[1] in COMMANDS else main("train"))
