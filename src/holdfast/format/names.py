"""Names of the files inside a checkpoint, and which names are safe.

``<item>-<writer, 5 digits>[.partNN]-<save id>.<suffix>`` or ``state-<save id>.json``; a save id is
``<start id>-<counter, hex>`` and the start id 8 or more hex digits that no other life of any process has. Two lives
therefore never write the same name, and what a dead process left is recognised by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast._outgoing import brief
from holdfast.errors import CorruptCheckpointError
from holdfast.storage.base import Storage

MANIFEST_NAME = "manifest.json"
REMOVING_NAME = ".removing.json"
"""Copy of the manifest of a checkpoint that is being removed; lists what is still to go after a crash."""
METADATA_FILE = ".metadata.json"
SIDECARS = (".metrics.json", METADATA_FILE)
"""Files about a checkpoint that may change after its commit; not listed in the manifest."""
UNLISTED = frozenset({MANIFEST_NAME, REMOVING_NAME, *SIDECARS})
"""Names in the directory of a checkpoint that its manifest never lists."""

_OURS = re.compile(
    r"(?:state|[A-Za-z0-9_.-]+-[0-9]{5}(?:\.part[0-9]+)?)-(?P<save>(?P<start>[0-9a-f]{8,64})-[0-9a-f]{1,16})"
    r"\.(?:safetensors|json|bin)"
)
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")  # nothing that `check_path` would have to look at
_DRIVE = re.compile(r"[A-Za-z]:(?:/|$)")
_MAX_PATH = 4096


def join(directory: str, path: str) -> str:
    """Put a path below a directory of a storage; "" is the root."""
    return f"{directory}/{path}" if directory else path


def save_id_of(path: str) -> str | None:
    """Return the id of the save that wrote a file, None for a file that no save of ours named."""
    match = _OURS.fullmatch(path)
    return match["save"] if match else None


def start_id_of(path: str) -> str | None:
    """Return the start id of the process life that wrote a file, None for a file that no save of ours named."""
    match = _OURS.fullmatch(path)
    return match["start"] if match else None


def check_path(path: object, *, where: str) -> str:
    """Return ``path`` if it stays inside the directory of its checkpoint.

    Raises:
        CorruptCheckpointError: it is absolute, climbs out, is not normalised, has no UTF-8 form, or is no path at all.
    """
    if isinstance(path, str) and _PLAIN.fullmatch(path):
        return path
    if (
        not isinstance(path, str)
        or not path
        or len(path) > _MAX_PATH
        or "\0" in path
        or "\\" in path
        or _DRIVE.match(path)
        or any(part in ("", ".", "..") for part in path.split("/"))
        or any("\ud800" <= char <= "\udfff" for char in path)
    ):
        raise CorruptCheckpointError(
            f"{where}: refused the path {brief(path, 200)!r}: a checkpoint refers to its own files only, by relative "
            "paths without '.', '..', empty parts, backslashes or drive letters",
            file=where,
        )
    return path


def check_links(storage: Storage, directory: str, paths: Iterable[str]) -> None:
    """Refuse files of a local checkpoint that are reached through a symlink.

    The storage follows no symlink anyway; this check names the cause, a checkpoint that was changed, before anything is
    read.

    Raises:
        CorruptCheckpointError: naming the file and where it leads.
    """
    if storage.local_root is None:
        return
    root = os.path.join(storage.local_root, directory) if directory else os.fspath(storage.local_root)
    known: set[str] = set()
    for path in paths:
        # One lstat for each part is much cheaper than resolving every path from "/".
        for end in range(1, path.count("/") + 2):
            part = "/".join(path.split("/", end)[:end])
            if part in known:
                continue
            known.add(part)
            if os.path.islink(link := os.path.join(root, part)):
                target = os.path.realpath(link)
                raise CorruptCheckpointError(
                    f"{os.path.join(root, path)} is a symlink, or reached through one, to {target!a}: refused; if "
                    "you trust it, copy the checkpoint with its links resolved (cp -rL)",
                    file=path,
                )
