"""Files that are never half written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file anew: a reader sees the one before or this one, whole.

    Args:
        path: its folder exists.
        text: all of it.
        mode: the file's permissions.

    Raises:
        OSError: the folder cannot be written to. The file that is there stays.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
