"""Remove the files that killed saves, intakes, deletions and probes left in a run; the next start does that.

Only files that carry the start id of an earlier attempt of this run are touched, or that its plan file lists: a save of
another program in the same root is left alone. So are files of a committed checkpoint that somebody has copied into a
directory of their own without the manifest (`MayBeCopied`).

Many directories of a store are listed by few requests (`names_under`), and many checkpoints removed by few.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice

from holdfast._log import get_logger
from holdfast.errors import StorageError
from holdfast.format.names import MANIFEST_NAME, REMOVING_NAME, SIDECARS, UNLISTED, join, start_id_of
from holdfast.storage.base import ObjectInfo, Storage
from holdfast.storage.together import together

from .names import INCOMING, NUMBERED, PROBE
from .record import METRICS_FILE

_log = get_logger("run")
MayBeCopied = Callable[[str, str], bool]
"""Tells of a directory, and the name of a file in it, whether that may be a copy of what was committed elsewhere."""
_HIDDEN = re.compile(rf"(?:{re.escape(PROBE)}|{re.escape(INCOMING)})(?P<start>[0-9a-f]{{8,64}})/")


def is_remains(paths: Iterable[str]) -> bool:
    """Tell whether files without a manifest are remains of a save or a deletion of Holdfast."""
    names = [path.rsplit("/", 1)[-1] for path in paths]
    return any(start_id_of(name) is not None or name in (REMOVING_NAME, METRICS_FILE) for name in names)


def holds_remains(storage: Storage, name: str) -> bool:
    """Tell whether a directory without a good manifest holds remains of a save or a deletion of Holdfast.

    One that cannot be listed, for objects in it whose names are no paths, is foreign: it is said once.
    """
    try:
        return is_remains(info.path for info in storage.list(name, recursive=False))
    except StorageError as error:
        if error.errno != errno.EILSEQ:
            raise
        _say_foreign(f"{storage.uri}/{name}", str(error))
        return False


@cache
def _say_foreign(where: str, why: str) -> None:
    _log.warning("%s is left alone, as something foreign: %s", where, why)


def sweep_names(
    storage: Storage,
    past: Collection[str],
    *,
    committed: Sequence[str] = (),
    incomplete: Sequence[str] = (),
    foreign: Sequence[str] = (),
    may_be_copied: MayBeCopied = lambda name, path: False,
) -> list[str]:
    """Remove remains from directories of a run.

    Args:
        storage: the run.
        past: start ids of dead processes.
        committed: checkpoints, of whichever run, in which a dead process may have worked last.
        incomplete: directories without a manifest that hold remains of Holdfast.
        foreign: other directories; an empty one with a name of a checkpoint is removed.
        may_be_copied: of files in incomplete directories.

    Returns:
        The removed paths.
    """
    from holdfast.format.parts import sweep_passing  # not above: only the owner of a run sweeps

    swept = []
    # Empty directories, made for a first file that never came: only the name says that they are ours.
    for name in [*committed, *incomplete, *filter(NUMBERED.match, foreign)]:
        storage.tidy(name)  # unfinished puts
    passing = together(storage, [partial(sweep_passing, storage, name, past) for name in (committed if past else ())])
    swept += [f"{name}/{path}" for name, paths in zip(committed, passing, strict=False) for path in paths]
    if storage.traits.num_parallel == 1:
        for name in incomplete:
            paths = [info.path for info in storage.list(name, recursive=False)]
            swept += _sweep_incomplete(storage, name, past, paths, may_be_copied)
        return swept
    files = names_under(storage, incomplete, of=len(incomplete))
    paths_of = {name: [f"{name}/{path}" for path in sorted(paths)] for name, paths in files.items()}
    # Directories of a save or a deletion that was cut off: they hold only files that a dead process named.
    plain = [
        name
        for name, paths in files.items()
        if paths and all(_is_plain(path, past) and not may_be_copied(name, path) for path in paths)
    ]
    gone = [path for name in plain for path in paths_of[name]]
    storage.delete_many(gone)
    others = [name for name in incomplete if name not in plain]
    rest = together(
        storage, [partial(_sweep_incomplete, storage, name, past, paths_of[name], may_be_copied) for name in others]
    )
    return swept + gone + [path for paths in rest for path in paths]


def _is_plain(path: str, past: Collection[str]) -> bool:
    from holdfast.format.parts import is_plan

    return start_id_of(path) in past and not is_plan(path)


def _sweep_incomplete(
    storage: Storage, name: str, past: Collection[str], paths: list[str], may_be_copied: MayBeCopied
) -> list[str]:
    from holdfast.format.commit import sweep
    from holdfast.format.parts import is_plan, sweep_planned

    skip = len(name) + 1
    if f"{name}/{REMOVING_NAME}" in paths:
        return [f"{name}/{path}" for path in sweep(storage, name)]
    swept = []
    stale = [path for path in paths if start_id_of(path[skip:]) in past and not may_be_copied(name, path[skip:])]
    for path in [path for path in stale if is_plan(path[skip:])]:
        swept += [f"{name}/{removed}" for removed in sweep_planned(storage, name, path[skip:])]
        stale.remove(path)
    # A late metric may have been put beside a checkpoint that was just deleted.
    if stale and len(stale) == len(paths) - 1 and f"{name}/{METRICS_FILE}" in paths:
        stale = paths
    storage.delete_many(stale)
    return swept + stale


def sweep_hidden(storage: Storage, keep: Collection[str], found: Collection[str] | None = None) -> list[str]:
    """Remove probes and intakes of dead processes; needs the lease. Those of the start ids in ``keep`` stay.

    Args:
        storage: the run.
        keep: start ids.
        found: the directories at the root, if the caller has listed them under this lease.

    Returns:
        Names of the removed directories.
    """
    if found is None:
        found = [info.path for info in storage.list("", recursive=False)]
    swept = []
    for path in found:
        match = _HIDDEN.fullmatch(path)
        if match is not None and match["start"] not in keep:
            storage.delete_tree(path)
            swept.append(path.rstrip("/"))
    return swept


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
    from holdfast.format.commit import remove  # not above: who only lists removes nothing

    # In the others the manifest decides what to remove: files that we wrote or listed, not files that came later.
    together(storage, [partial(remove, storage, name) for name in listed if name not in plain])
    storage.delete_many([join(name, MANIFEST_NAME) for name, paths in plain.items() if MANIFEST_NAME in paths])
    rest = {name: {*paths, *SIDECARS} - {MANIFEST_NAME} for name, paths in plain.items() if paths}
    storage.delete_many([join(name, path) for name, paths in rest.items() for path in sorted(paths)])
