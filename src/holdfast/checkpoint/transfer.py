"""Copy the files of a checkpoint from one storage to another."""

from __future__ import annotations

from holdfast.errors import CheckpointNotFoundError
from holdfast.storage.base import BLOCK, Storage

__all__ = ["copy_file", "copy_tree"]

MANIFEST = "manifest.json"
_WINDOW = 2048 * BLOCK


def copy_tree(source: Storage, name: str, target: Storage, directory: str = "") -> int:
    """Copy everything under ``name`` into ``directory`` of ``target``; durable on return.

    The manifest goes last, and an older one there goes first, so that a copy that dies is no checkpoint.

    Returns:
        The bytes copied.

    Raises:
        CheckpointNotFoundError: there is nothing under ``name``.
    """
    files = sorted((info.path, info.size) for info in source.list(name))
    if not files:
        raise CheckpointNotFoundError(f"there is nothing at {source.uri}/{name}")
    into = f"{directory}/" if directory else ""
    target.delete(into + MANIFEST)
    manifest = f"{name}/{MANIFEST}"
    for path, _ in files:
        if path != manifest:
            copy_file(source, path, target, into + path[len(name) + 1 :])
    if manifest in dict(files):
        target.put(into + MANIFEST, source.read(manifest))
    return sum(size for _, size in files)


def copy_file(source: Storage, path: str, target: Storage, new_path: str) -> None:
    """Copy one file in windows of bounded memory; durable on return."""
    with source.open(path) as reader, target.create(new_path, reader.size) as writer:
        buffer = memoryview(bytearray(min(_WINDOW, reader.size)))
        for offset in range(0, reader.size, _WINDOW):
            window = buffer[: min(_WINDOW, reader.size - offset)]
            reader.read_into(offset, window)
            writer.write(window)
