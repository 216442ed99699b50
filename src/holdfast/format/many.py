"""Many checkpoints of a store at once: listed by few requests, and removed by few."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain, islice

from holdfast.storage.base import ObjectInfo, Storage
from holdfast.storage.together import together

from .commit import remove
from .names import MANIFEST_NAME, SIDECARS, UNLISTED, join, start_id_of

__all__ = ["listed_at_once", "names_under", "remove_listed"]

_EACH = 16  # directories that are listed one by one, side by side
_FILES = 8  # of a small checkpoint, to guess how long a listing of everything is
_PAGE, _PAGES = 1000, 8  # names in an answer; answers that are read of what may be much more


def listed_at_once(storage: Storage, directories: Collection[str]) -> dict[str, frozenset[str]] | None:
    """List everything in a storage, and return the files of these directories as `names_under` does.

    None if there is so much else that a look at each of them is quicker.
    """
    most = _PAGE * max(_PAGES, len(directories) // storage.num_parallel)
    infos = list(islice(storage.list(""), most + 1))
    return None if len(infos) > most else _by_directory(directories, infos)


def names_under(storage: Storage, directories: Collection[str], *, of: int) -> dict[str, frozenset[str]]:
    """List directories at the root of a storage: few of them each by itself, many by listing everything once.

    Args:
        storage: the run.
        directories: which ones.
        of: how many directories there are, about.

    Returns:
        The paths of all files, by directory and relative to it.
    """
    if len(directories) > max(_EACH, of * _FILES // _PAGE):
        found = listed_at_once(storage, directories)
        if found is not None:
            return found

    def files(directory: str) -> list[ObjectInfo]:
        return list(storage.list(directory))

    infos = together(storage, [partial(files, one) for one in directories])
    return _by_directory(directories, chain.from_iterable(infos))


def _by_directory(directories: Collection[str], infos: Iterable[ObjectInfo]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {directory: set() for directory in directories}
    for info in infos:
        directory, _, path = info.path.partition("/")
        if path and directory in found:
            found[directory].add(path)
    return {directory: frozenset(paths) for directory, paths in found.items()}


def remove_listed(storage: Storage, there: Mapping[str, Collection[str]]) -> None:
    """Remove checkpoints, the manifests of all of them first; like `commit.remove` otherwise, and as safe to repeat.

    Args:
        storage: the run.
        there: what `names_under` has found just now.

    Raises:
        StorageError: some are gone, and some have no manifest any more.
    """
    plain = {
        name: paths for name, paths in there.items() if all(path in UNLISTED or start_id_of(path) for path in paths)
    }
    # What else is there is the manifest's to say: whether we wrote or listed it, or somebody put it there later.
    together(storage, [partial(remove, storage, name) for name in there if name not in plain])
    storage.delete_many([join(name, MANIFEST_NAME) for name, paths in plain.items() if MANIFEST_NAME in paths])
    rest = {name: {*paths, *SIDECARS} - {MANIFEST_NAME} for name, paths in plain.items() if paths}
    storage.delete_many([join(name, path) for name, paths in rest.items() for path in sorted(paths)])
