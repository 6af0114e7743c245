"""Unpacking tar archives from elsewhere."""

import shutil
import tarfile
from pathlib import Path

from kd.errors import UserError


def unpack(archive: Path, into: Path) -> None:
    """Writes an archive's files and folders; links and devices are left out.

    By hand, as Python has a filter for that from 3.11.4 on alone.

    Args:
        archive: ``.tar``, compressed or not.
        into: a folder; made where it is missing.

    Raises:
        UserError: a name in it that leads out of the folder.
    """
    root = into.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            path = (root / member.name).resolve()
            if not path.is_relative_to(root):
                raise UserError(f"{archive}: '{member.name}' in it leads out of the folder that it is unpacked into")
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    shutil.copyfileobj(content, file)
