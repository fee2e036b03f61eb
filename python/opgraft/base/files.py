"""Files that are never half written, and folders that others cannot write to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def make_folder(folder: Path, *, mode: int = 0o700) -> None:
    """Create a folder, with the folders above it that are missing.

    Args:
        folder: it may exist, and stays what it is then.
        mode: the permissions of all that are created. `Path.mkdir` would give those above the
            folder what the umask leaves: often also the group's, and then nothing in them is
            trusted.

    Raises:
        OSError: it cannot be created.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=mode, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")


def replace(path: Path, content: str | bytes, *, mode: int = 0o600) -> None:
    """Write a file anew: a reader sees the one before or this one, whole.

    Args:
        path: its folder exists.
        content: all of it; text is encoded as UTF-8.
        mode: the file's permissions.

    Raises:
        OSError: the folder cannot be written to. The file that is there stays.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # the interruption may come after it was renamed
        raise
