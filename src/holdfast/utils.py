"""What scripts of the loop trainer use beside it: checkpoints of a state by hand, object stores, locations."""

from __future__ import annotations

from .storage.adapters.libcloud import LibcloudObjectStore
from .storage.base import Storage as ObjectStore
from .storage.resolve import resolve as maybe_create_object_store_from_uri
from .trainers.loop.saving.load import load_checkpoint, save_checkpoint

__path__: list[str] = []  # an import of one of Composer's inner modules is answered with where it is
__all__ = [
    "LibcloudObjectStore", "ObjectStore", "load_checkpoint", "maybe_create_object_store_from_uri", "save_checkpoint",
]  # fmt: skip
