"""Bytes under a path: the lowest layer. No torch here, and nothing outside the standard library for the local disk.

Start with `base`, which says what a storage is. `local` and `memory` need no extra, `object` are buckets through
obstore, `adapters` other people's clients; `resolve` turns what a user wrote into a storage. Any layer may import this
one; it imports `holdfast.errors` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import FileReader, FileWriter, ObjectInfo, PrefixStorage, Storage, StorageTraits, WrappedStorage
from .local.local_storage import LocalStorage
from .memory import MemoryStorage
from .resolve import from_description, resolve, split_uri

if TYPE_CHECKING:
    from .adapters.libcloud import LibcloudObjectStore as LibcloudObjectStore

__all__ = [
    "FileReader",
    "FileWriter",
    "LibcloudObjectStore",
    "LocalStorage",
    "MemoryStorage",
    "ObjectInfo",
    "PrefixStorage",
    "Storage",
    "StorageTraits",
    "WrappedStorage",
    "from_description",
    "resolve",
    "split_uri",
]


def __getattr__(name: str) -> Any:
    if name != "LibcloudObjectStore":
        raise AttributeError(f"module 'holdfast.storage' has no attribute {name!r}")
    from .adapters.libcloud import LibcloudObjectStore

    return LibcloudObjectStore
