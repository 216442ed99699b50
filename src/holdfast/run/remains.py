"""Remove the files that killed saves, intakes, deletions and probes left in a run; the next start does that.

Only files that carry the start id of an earlier attempt of this run are touched, or that its plan file lists: a save of
another program in the same root is left alone. So are files of a committed checkpoint that somebody has copied into a
directory of their own without the manifest (`MayBeCopied`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from holdfast.format.many import names_under
from holdfast.format.names import REMOVING_NAME, start_id_of
from holdfast.storage.base import Storage
from holdfast.storage.together import together

from .names import INCOMING, NUMBERED, PROBE
from .record import METRICS_FILE

__all__ = ["MayBeCopied", "is_remains", "sweep_hidden", "sweep_names"]

MayBeCopied = Callable[[str, str], bool]
"""Tells of a directory, and the name of a file in it, whether that may be a copy of what was committed elsewhere."""
_HIDDEN = re.compile(rf"(?:{re.escape(PROBE)}|{re.escape(INCOMING)})(?P<start>[0-9a-f]{{8,64}})/")


def is_remains(paths: Iterable[str]) -> bool:
    """Tell whether files without a manifest are remains of a save or a deletion of Holdfast."""
    names = [path.rsplit("/", 1)[-1] for path in paths]
    return any(start_id_of(name) is not None or name in (REMOVING_NAME, METRICS_FILE) for name in names)


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
