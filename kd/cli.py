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
    """Returns the entry point of the command NAME for the name ``NAME_main``: :func:`main` with the command filled in.

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
        argv: its arguments, without the name; None: those of this process, and ``whole_process`` is true.
        whole_process: whether the caller ends this process right after. Then Python processes that libraries start get
            :data:`kd.machine.SAFE_PATH`; after the command Ctrl-C ends the process at once, and Python's last search for
            unused objects is left out.

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
        if whole_process:
            gc.freeze()  # else Python looks through all objects of torch at its end, which takes a second


class CtrlC:
    """A command's handler of Ctrl-C. It notes that it was pressed: libraries may turn the KeyboardInterrupt into another
    error, or drop it.

    Where SIGINT is ignored (``nohup``, a shell's job in the background), the caller handles it, or this is not the main
    thread, no handler is set.

    Args:
        command: whose name the message begins with.
    """

    def __init__(self, command: str) -> None:
        """Sets the handler of SIGINT and the hook for errors that Python drops, if this is the main thread and SIGINT has
        Python's own handler.
        """
        self.command = command
        self.pressed = False
        """Whether it was pressed while the command had no handler of its own."""
        self._ends_process = False  # from then on Ctrl-C ends what is left of it
        self._hook = sys.unraisablehook
        of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_handled = of_python and current_thread() is main_thread()
        if self._is_handled:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._again

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler: while the command runs it notes that Ctrl-C was pressed, and raises a KeyboardInterrupt; after the
        command it ends the process without waiting for its threads and libraries.
        """
        if self._ends_process:
            self.leave()
            os._exit(INTERRUPTED)
        self.pressed = True
        raise KeyboardInterrupt

    def _again(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Interrupts the main thread again, 0.05 s later, where Python has dropped a KeyboardInterrupt in a finalizer or
        callback; Python calls this for each error that it drops.
        """
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            Timer(0.05, interrupt_main).start()
        else:
            self._hook(unraisable)

    def leave(self) -> int:
        """Prints that the command was interrupted and returns its exit status; from now on Ctrl-C is ignored."""
        if self._is_handled:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"kd-{self.command}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED

    def end(self, whole_process: bool) -> None:
        """Restores the hook for dropped errors and the handler of Ctrl-C, which is Python's own; with ``whole_process`` one
        that ends the process at once.
        """
        if not self._is_handled:
            return
        sys.unraisablehook = self._hook
        self._ends_process = whole_process
        signal.signal(
            signal.SIGINT, self._interrupt if whole_process else signal.default_int_handler
        )


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
