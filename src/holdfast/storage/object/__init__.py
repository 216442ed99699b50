"""Buckets of S3, Google Cloud Storage, Azure and Oracle as storages, through obstore.

`object_storage` is the contract, `bucket` the settings and credentials, `client` the requests and their errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .object_storage import ObjectStorage as ObjectStorage

__all__ = ["ObjectStorage"]


def __getattr__(name: str) -> Any:
    if name != "ObjectStorage":
        raise AttributeError(f"module 'holdfast.storage.object' has no attribute {name!r}")
    from .object_storage import ObjectStorage  # obstore is imported on use

    return ObjectStorage
