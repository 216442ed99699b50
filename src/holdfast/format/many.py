"""Many checkpoints of a store at once: listed by few requests, and removed by few."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain, islice

from holdfast.storage.base import ObjectInfo, Storage
from holdfast.storage.together import together

from .names import MANIFEST_NAME, SIDECARS, UNLISTED, join, start_id_of

__all__ = ["listed_at_once", "names_under", "remove_listed"]

_EACH = 16  # directories that are listed one by one, side by side
_FILES = 8  # of a small checkpoint, to guess how long a listing of everything is
_PAGE, _PAGES = 1000, 8  # names in an answer; answers that are read of what may be much more


def listed_at_once(storage: Storage, directories: Collection[str]) -> dict[str, frozenset[str]] | None:
    """List everything in a storage, and return the files of these directories as `names_under` does.

    None if the storage holds so many other files that listing each directory is quicker.
    """
    most = _PAGE * max(_PAGES, len(directories) // storage.traits.num_parallel)
    infos = list(islice(storage.list(""), most + 1))
    return None if len(infos) > most else _by_directory(directories, infos)


def names_under(storage: Storage, directories: Collection[str], *, of: int) -> dict[str, frozenset[str]]:
    """List directories at the root of a storage: few of them each by itself, many by listing everything once.

    Args:
        storage: the run.
        directories: their names.
        of: how many directories there are, about.

    Returns:
        The paths of all files, by directory and relative to it.
    """
    if len(directories) > max(_EACH, of * _FILES // _PAGE):
        listed = listed_at_once(storage, directories)
        if listed is not None:
            return listed

    def files(directory: str) -> list[ObjectInfo]:
        return list(storage.list(directory))

    infos = together(storage, [partial(files, directory) for directory in directories])
    return _by_directory(directories, chain.from_iterable(infos))


def _by_directory(directories: Collection[str], infos: Iterable[ObjectInfo]) -> dict[str, frozenset[str]]:
    files: dict[str, set[str]] = {directory: set() for directory in directories}
    for info in infos:
        directory, _, path = info.path.partition("/")
        if path and directory in files:
            files[directory].add(path)
    return {directory: frozenset(paths) for directory, paths in files.items()}


def remove_listed(storage: Storage, listed: Mapping[str, Collection[str]]) -> None:
    """Remove checkpoints, the manifests of all of them first; like `commit.remove` otherwise, and as safe to repeat.

    Args:
        storage: the run.
        listed: what `names_under` has returned just now.

    Raises:
        StorageError: removed in part: some checkpoints are gone, and some have no manifest any more.
    """
    plain = {
        name: paths for name, paths in listed.items() if all(path in UNLISTED or start_id_of(path) for path in paths)
    }
    from .commit import remove  # not above: who only lists removes nothing

    # In the others the manifest decides what to remove: files that we wrote or listed, not files that came later.
    together(storage, [partial(remove, storage, name) for name in listed if name not in plain])
    storage.delete_many([join(name, MANIFEST_NAME) for name, paths in plain.items() if MANIFEST_NAME in paths])
    rest = {name: {*paths, *SIDECARS} - {MANIFEST_NAME} for name, paths in plain.items() if paths}
    storage.delete_many([join(name, path) for name, paths in rest.items() for path in sorted(paths)])
