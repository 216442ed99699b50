"""Files of a foreign folder: symbolic links in it are not followed, for they could lead anywhere.

One kind is excepted by its name: the hub's cache keeps each file once, as ``<repository>/blobs/<digest>``, and a
snapshot, ``<repository>/snapshots/<revision>/...``, links there.
"""

from __future__ import annotations

import os

from holdfast.format.names import check_links
from holdfast.storage.local.local_storage import LocalStorage

__all__ = ["own_file"]


def own_file(folder: str, name: str) -> str:
    """Return the path at which to read a file (or directory) of a foreign folder.

    Raises:
        CorruptCheckpointError: it is a link, or reached through one.
    """
    path = os.path.join(folder, name)
    if os.path.islink(path):
        snapshots, revision = os.path.split(os.path.abspath(folder))
        repository, kind = os.path.split(snapshots)
        real = os.path.realpath(path)
        if revision and kind == "snapshots" and os.path.dirname(real) == os.path.realpath(f"{repository}/blobs"):
            return real
    check_links(LocalStorage(folder), "", (name,))
    return path
