"""Files that commands write for other programs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from holdfast.storage.local.ops import translate

__all__ = ["replace_file"]


def replace_file(target: str, data: bytes) -> None:
    """Replace a local file in one step, so that no collector and no browser reads half of it.

    Raises:
        StorageError: it cannot be written.
    """
    path = Path(target)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise translate(error, "write", target) from error
