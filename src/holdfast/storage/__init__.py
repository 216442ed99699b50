"""Bytes under a path: the lowest layer. No torch here, and nothing outside the standard library for the local disk.

Start with `base`, which says what a storage is. `local` and `memory` need no extra, `object` are buckets through
obstore, `adapters` other people's clients; `resolve` turns what a user wrote into a storage. Any layer may import this
one; it imports `holdfast.errors` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import FileReader, FileWriter, ObjectInfo, Storage, StorageTraits
from .local.local_storage import LocalStorage
from .resolve import from_description, resolve, split_uri

if TYPE_CHECKING:
    from .adapters.libcloud import LibcloudObjectStore as LibcloudObjectStore
    from .memory import MemoryStorage as MemoryStorage
    from .wrapped import PrefixStorage as PrefixStorage
    from .wrapped import WrappedStorage as WrappedStorage

# Imported when asked for.
_HOME = {
    "LibcloudObjectStore": ".adapters.libcloud",
    "MemoryStorage": ".memory",
    "PrefixStorage": ".wrapped",
    "WrappedStorage": ".wrapped",
}
__all__ = [
    "FileReader", "FileWriter", "LibcloudObjectStore", "LocalStorage", "MemoryStorage", "ObjectInfo", "PrefixStorage",
    "Storage", "StorageTraits", "WrappedStorage", "from_description", "resolve", "split_uri",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.storage' has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
