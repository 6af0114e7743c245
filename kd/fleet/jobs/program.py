"""Programs by which places are reached (``sbatch``, ``kubectl``, ``ssh``), and places that share our folders."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kd.errors import UserError
from kd.fleet.jobs.job import Job


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


def command(job: Job) -> str:
    items = job.with_files({name: path.absolute() for name, path in job.files.items()})
    return shlex.join([*items, f"runs_dir={job.runs_dir.absolute()}", f"name={job.name}"])


def refuse_spot(job: Job, who: str) -> None:
    if job.spot:
        raise UserError(f"spot: {who} have no price by the hour; spot=true is for sagemaker and sky")
    if job.channels:
        raise UserError(f"channel:{job.channels[0]}: {who} see this machine's folders; give the folder itself")


def fetched(into: Path) -> Path | None:
    return into if into.is_dir() else None
