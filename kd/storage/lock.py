"""One training process group at a time in a run's folder."""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from kd.errors import UserError
from kd.storage.elsewhere import appended

NAME = ".lock"


class RunLock:
    """Holds a run's folder. The system lets go of it when the process ends, in whatever way.

    A POSIX record lock: it also holds between machines (NFS), and the loader's processes do not inherit it, so a killed
    run's orphans keep nobody out. Rank 0 holds it for all processes of a job.

    Raises:
        UserError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = appended(folder / NAME)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(f"resume: {holder} is training in {folder}; stop it first, or wait for its end") from error
        except OSError:  # a file system without locks
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        with suppress(OSError):
            self._file.close()


def is_held(folder: Path) -> bool:
    """Whether a process of this machine, or of another one on the same file system, trains in a run's folder."""
    try:
        with (folder / NAME).open("r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
