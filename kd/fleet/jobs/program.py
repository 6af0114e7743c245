"""The programs by which places are reached: ``sbatch``, ``sky``, ``kubectl``, ``ssh``."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kd.errors import UserError


def need(program: str, where: str) -> None:
    if shutil.which(program) is None:
        raise UserError(f"no program {program} here ({where})")


def ask(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(f"{command[0]} {command[1]}: {words[-1].strip()[:300]}")
    return done.stdout.strip()


class Tail:
    """New lines of a log file, printed as they come."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def print_new(self) -> None:
        if not self._file.is_file():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        if whole:
            print(whole.decode(errors="replace"), end="", flush=True)
