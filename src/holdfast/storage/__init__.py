"""Bytes under a path: the lowest layer. No torch here, and nothing outside the standard library for the local disk.

`base` says what a storage is, `local` and `memory` are the two that need no extra, `ops` is the seam through which
every change of a disk goes, `resolve` turns what a user wrote into a storage. Any layer may import this one; it
imports `holdfast.errors` alone.
"""

from __future__ import annotations

from .base import FileReader, FileWriter, ObjectInfo, PrefixStorage, Storage
from .local import LocalStorage
from .memory import MemoryStorage
from .resolve import from_description, resolve, split_uri

__all__ = [
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "MemoryStorage",
    "ObjectInfo",
    "PrefixStorage",
    "Storage",
    "from_description",
    "resolve",
    "split_uri",
]
