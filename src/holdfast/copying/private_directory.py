"""Temporary directories of this user that nobody else may put files into."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.errors import StoragePermissionError

__all__ = ["private_directory"]


def private_directory(name: str) -> Path:
    """Make ``<temporary directory>/<name>-<user id>``, unless it is there, and return it.

    Raises:
        StoragePermissionError: somebody else was first.
    """
    base = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    # In a shared temporary directory somebody else may have been first, to feed us files.
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or base.is_symlink():
        raise StoragePermissionError(
            f"{base} belongs to another user or others may write to it: remove it, or set TMPDIR"
        )
    return base
