"""Copy a whole run: its checkpoints newest first, then what else lies in it, the run index last.

Newest first, because a copy that ends early is then a run whose newest checkpoint is the true one: who resumes from it
loses nothing but older checkpoints. The index goes last, since it is rebuilt from the checkpoints where it is missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
    StorageNotFoundError,
)
from holdfast.run.catalog import Catalog
from holdfast.run.data_ring import FOLDER
from holdfast.run.external import EXTERNAL
from holdfast.run.fence import is_fence
from holdfast.run.index import CHANGES_FILE, RUN_FILE, RunIndex
from holdfast.run.lease import Heartbeat, Lease, is_of_lease, make_owner
from holdfast.run.names import INCOMING, LOGS, PROBE, REPORTS, VERIFIED_FILE
from holdfast.run.trash import TRASH
from holdfast.storage.base import TEMPORARY, Storage
from holdfast.storage.local.local_tree import unlisted_of_others

from .sending import WINDOW, Progress, Stop
from .transfer import Copied, compare_files, copy_checkpoint, copy_file

_TRIES = 3
_MARKS = "copied"  # in the notes of run.json
_OWN = (TRASH, EXTERNAL, FOLDER, PROBE, INCOMING)  # hidden directories of a run that are of no use elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What there is to copy in a run.

    Attributes:
        names: checkpoints and foreign directories, in the order in which they are copied.
        total_bytes: of all of them.
        left_out: names that are not copied, and why.
        damaged: those of ``left_out`` that are no good any more.
        is_run: false if nothing in there is ours: then all of it is a single foreign directory, whatever it holds.
    """

    names: tuple[str, ...]
    total_bytes: int
    left_out: dict[str, str] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    is_run: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """How the copy of one checkpoint ended, or that of a file beside them that could not be copied.

    Attributes:
        name: its directory.
        state: "ok", "foreign" (nothing to check it against), "gone" (deleted at the source meanwhile) or "failed".
        copied: which bytes went which way.
        problem: why it failed.
    """

    name: str
    state: str
    copied: Copied = field(default_factory=Copied)
    problem: str | None = None


def plan_run(source: Storage) -> RunPlan:
    """Find what there is to copy."""
    catalog = Catalog(source)
    sizes = {record.name: record.size for record in catalog.records()}
    sizes |= {name: manifest.total_bytes for name, manifest in catalog.others.items()}
    is_run = bool(sizes or catalog.incomplete or catalog.bad()) or catalog.index.damage != "missing"
    runs = []
    for name in catalog.foreign:
        inside = {info.path: info.size for info in source.list(name)}
        if f"{name}/{RUN_FILE}" in inside:
            runs.append(name)
        else:
            sizes[name] = sum(inside.values())
    left_out = dict.fromkeys(catalog.incomplete, "never committed: a save under way, or the remains of one")
    left_out |= dict.fromkeys(runs, "a run of its own: copy it by itself")
    left_out |= _beside(source)
    for name, why in catalog.bad().items():
        left_out[name] = f"damaged: {why}" if name in catalog.corrupt else f"quarantined: {why}"
        sizes.pop(name, None)
    return RunPlan(
        names=tuple(sizes),
        total_bytes=sum(sizes.values()),
        left_out=left_out,
        damaged=tuple(sorted(catalog.corrupt)),
        is_run=is_run or bool(runs),
    )


def _beside(source: Storage) -> dict[str, str]:
    """Return directories right below a run that are of somebody else and not copied, and why."""
    found = {}
    for info in source.list("", recursive=False):
        name = info.path.rstrip("/")
        if info.path != name and name.startswith(".") and not name.startswith(_OWN):
            found[name] = "a hidden directory: copy it by itself"
    root = source.local_root
    with os.scandir(root) if root is not None else contextlib.nullcontext(()) as entries:
        for entry in entries:
            if entry.is_symlink() and entry.is_dir() and not _lies_in(entry.path, source):
                found[entry.name] = "a symbolic link out of the run: no link is followed"
            elif unlisted_of_others(entry.name):
                found[entry.name] = f"names that start with {TEMPORARY!r} are reserved: rename it"
    return found


def _lies_in(path: str, storage: Storage) -> bool:
    root = os.path.realpath(storage.local_root or "/")
    return os.path.commonpath([os.path.realpath(path), root]) == root


def copy_run(
    source: Storage,
    plan: RunPlan,
    target: Storage,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Iterator[CopyOutcome]:
    """Copy a run into the root of ``target``; yields as each checkpoint is durable there.

    Holds the lease of the run at the target meanwhile. One checkpoint that cannot be copied does not keep the others.

    Raises:
        RunBusyError: somebody else writes to the run at the target.
        CheckpointExistsError: the target has another run, or went on with this one, and ``overwrite`` is false.
        StorageError: a storage failed; what is complete at the target stays.
    """
    check_apart(source, target)
    with _owning(target) as heartbeat:
        # The catalog knows which run lives in a directory even if its run.json is gone, or not yet there.
        there = Catalog(target)
        theirs = there.index
        _check_target(Catalog(source).index, theirs, target, overwrite=overwrite)
        _admit(there, plan.names, heartbeat)
        quarantined = dict(theirs.quarantined)
        previous: str | None = None
        brought: set[str] = set()
        for name in plan.names:
            if name in quarantined and not overwrite:
                yield CopyOutcome(name=name, state="failed", problem=_set_aside(target, name, quarantined[name]))
                continue
            outcome = _copy_one(
                source, name, target, previous, overwrite=overwrite, suspect=name in quarantined, progress=progress,
                stop=heartbeat.check,
            )  # fmt: skip
            if outcome.state in ("ok", "foreign"):
                quarantined.pop(name, None)
            previous = name if outcome.state == "ok" else previous
            brought |= {name} if outcome.state == "ok" else set()
            yield outcome
        same_run = bool(theirs.run_id)  # else `_check_target` has refused it
        noted = theirs.notes.get(_MARKS)
        marks = {path: etag for path, etag in noted.items() if type(etag) is str} if type(noted) is dict else {}
        yield from _copy_rest(source, target, marks, same_run=same_run, overwrite=overwrite, stop=heartbeat.check)
        _copy_index(source, target, theirs, brought, quarantined, marks)
        Catalog(target).point_latest()


def copy_into_run(
    source: Storage,
    name: str,
    target: Storage,
    directory: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Copied:
    """Copy the checkpoint ``name`` to ``directory`` of the run ``target``, as `copy_checkpoint` does.

    Holds the lease of that run meanwhile: a start would take the files of a copy under way for remains.

    Raises:
        RunBusyError: somebody writes to the run.
        CheckpointExistsError: as `copy_checkpoint`; or it is set aside as damaged there, and ``overwrite`` is false.
        HoldfastError: as `copy_checkpoint`.
    """
    with _owning(target) as heartbeat:
        there = Catalog(target)
        why = there.index.quarantined.get(directory)
        if why is not None and not overwrite:
            raise CheckpointExistsError(_set_aside(target, directory, why))
        _admit(there, [directory], heartbeat)
        copied = copy_checkpoint(
            source, name, target, directory, overwrite=overwrite, suspect=why is not None, progress=progress,
            stop=heartbeat.check,
        )  # fmt: skip
        if why is not None:
            there.index.quarantined.pop(directory, None)
            there.index.save()
        Catalog(target).point_latest()
        return copied


def _owning(target: Storage) -> contextlib.closing[Heartbeat]:
    """Hold the lease of a run; `Heartbeat.check` raises once another process has taken it over."""
    return contextlib.closing(Heartbeat(Lease.acquire(target, make_owner(os.urandom(8).hex()))))


def _admit(there: Catalog, names: Iterable[str], heartbeat: Heartbeat) -> None:
    there.admit(dict.fromkeys(names, "*"), "".join(filter(str.isalnum, heartbeat.lease.owner["start_id"])))


def _set_aside(target: Storage, name: str, why: str) -> str:
    return (
        f"{target.uri}/{name} was quarantined there ({why}): files of the same name and size would be taken for whole. "
        "Delete it there, or copy with --overwrite, which reads all of it and sends what is damaged"
    )


def check_apart(source: Storage, target: Storage) -> None:
    """Refuse to copy something onto or into itself.

    Raises:
        ConfigError: saying so.
    """
    source_uri, target_uri = (f"{storage.uri.rstrip('/')}/" for storage in (source, target))
    if target_uri.startswith(source_uri) or source_uri.startswith(target_uri):
        raise ConfigError(f"cannot copy {source.uri} to {target.uri}: one of them lies in the other")


def _copy_one(
    source: Storage,
    name: str,
    target: Storage,
    previous: str | None,
    *,
    overwrite: bool,
    suspect: bool,
    progress: Progress | None,
    stop: Stop,
) -> CopyOutcome:
    try:
        copied = copy_checkpoint(
            source, name, target, name, previous=previous, overwrite=overwrite, suspect=suspect, progress=progress,
            stop=stop,
        )  # fmt: skip
    except CheckpointNotFoundError as error:
        return CopyOutcome(name=name, state="gone", problem=str(error))
    except CheckpointError as error:
        return CopyOutcome(name=name, state="failed", problem=str(error))
    return CopyOutcome(name=name, state="foreign" if copied.is_foreign else "ok", copied=copied)


def _check_target(ours: RunIndex, theirs: RunIndex, target: Storage, *, overwrite: bool) -> None:
    if not theirs.run_id:
        return
    if theirs.run_id != ours.run_id:
        raise CheckpointExistsError(
            f"{target.uri} is another run ({theirs.run_id}, not {ours.run_id or 'one with an index'}): two runs in one "
            "directory cannot be told apart; give another one"
        )
    known = {attempt.start_id for attempt in ours.attempts}
    own = [attempt for attempt in theirs.attempts if attempt.start_id not in known]
    if own and not overwrite:
        raise CheckpointExistsError(
            f"{target.uri} went on with this run by itself (attempt {own[-1].attempt}, {own[-1].started}): copying "
            "would forget that. Copy the other way, or to another directory; --overwrite does it all the same"
        )


def _copy_rest(
    source: Storage, target: Storage, marks: dict[str, str], *, same_run: bool, overwrite: bool, stop: Stop
) -> Iterator[CopyOutcome]:
    """Copy reports, logs and loose files, all of them each time: they may have changed; yield those that could not be.

    Args:
        source: the run.
        target: where it goes.
        marks: etags of the loose files at the target as earlier copies have left them; those of this copy replace them.
        same_run: the target is this run already: its reports, fences and logs are of an earlier copy.
        overwrite: replace loose files that somebody else has written.
        stop: raises once the lease is lost.
    """
    trees = ("", REPORTS, LOGS)
    infos = [info for tree in trees for info in target.list(tree, recursive=bool(tree))]
    of_run = {info.path for info in infos if same_run and ("/" in info.path or is_fence(info.path))}
    # What is as an earlier copy has left it is not somebody else's, whatever the source has made of it since.
    ours = {info.path for info in infos if marks.get(info.path, "") == info.etag} | of_run
    others = set() if overwrite else {info.path for info in infos} - ours
    problems: dict[str, str] = {}
    found: dict[str, str] = {}
    for is_last in (*(False,) * (_TRIES - 1), True):
        paths = [info.path for tree in trees for info in source.list(tree, recursive=bool(tree))]
        has_all = True
        for path in paths:
            is_own = path in (RUN_FILE, CHANGES_FILE, VERIFIED_FILE) or is_of_lease(path)
            if is_own or path.endswith("/"):
                continue
            try:
                etag = _bring_loose(source, path, target, compares=path in others, stop=stop)
                if etag is not None and "/" not in path:
                    found[path] = etag
            except StorageNotFoundError:  # segments are merged while a run goes on: look again
                has_all = is_last
            except (CheckpointExistsError, CorruptCheckpointError) as error:
                problems[path] = str(error)
            except StorageError as error:
                if error.errno != errno.ELOOP:
                    raise
                problems[path] = str(error)
        if has_all:
            break
    marks.clear()
    marks.update(found)
    for path, problem in problems.items():
        yield CopyOutcome(name=path, state="failed", problem=problem)


def _bring_loose(source: Storage, path: str, target: Storage, *, compares: bool, stop: Stop) -> str | None:
    """Copy a file that is no part of a checkpoint; return its etag at the target.

    Raises:
        CheckpointExistsError: it ``compares``, and the target has something else: neither the same nor the beginning of
            it, which is an earlier state of the file or what a killed copy has left.
        CorruptCheckpointError: it was written to meanwhile.
    """
    state = compare_files(source, path, target, path) if compares else "unfinished"
    if state == "other":
        raise CheckpointExistsError(
            f"{target.uri}/{path} has other content, and was not changed: --overwrite replaces it, or move it away"
        )
    if state == "unfinished":
        if source.stat(path).size <= WINDOW:
            return target.put(path, source.read(path))
        copy_file(source, path, target, path, stop=stop)
    return target.stat(path).etag


def _copy_index(
    source: Storage,
    target: Storage,
    theirs: RunIndex,
    brought: Set[str],
    quarantined: Mapping[str, str],
    marks: Mapping[str, str],
) -> None:
    """Copy run.json. What is set aside is each side's own: the other one may have a sound copy of it.

    Args:
        source: the run.
        target: where it goes.
        theirs: the index of the target before.
        brought: checkpoints that are there now. The index gets no new rows of others: it is believed without a look, so
            that one which could not be copied would be the newest there.
        quarantined: checkpoints at the target that are never to be picked there, and why.
        marks: of `_copy_rest`; a note of the target alone.
    """
    index = RunIndex.load(source)
    if index.damage is not None and (index.damage == "missing" or theirs.damage is None or quarantined):
        return  # a sound one at the target stays; without it nobody would know what was set aside
    absent = index.rows.keys() - brought - quarantined.keys()
    changes = absent or quarantined or index.quarantined or index.has_changes or marks or _MARKS in index.notes
    if index.damage is None and changes:
        # With its row: a checkpoint without a row would be taken for new, and for sound as far as its manifest is.
        for name in {*absent, *index.quarantined, *(quarantined.keys() - index.rows.keys())}:
            row = theirs.rows.get(name)
            if row is not None:
                index.rows[name] = row
            else:
                index.rows.pop(name, None)
        index.quarantined = dict(quarantined)
        index.notes = {key: value for key, value in index.notes.items() if key != _MARKS}
        index.notes |= {_MARKS: dict(marks)} if marks else {}
        target.put(RUN_FILE, index.to_bytes())
        return
    with contextlib.suppress(StorageNotFoundError):
        target.put(RUN_FILE, source.read(RUN_FILE))
