"""The checkpoints of one run: list, newest, best, candidates for a resume, and their retention.

Directories under the run are listed (names only), rows cached in run.json are believed for names that exist, and
manifests are read only for names without a row and for checkpoints about to be used. So opening a run stays fast
with ten thousand checkpoints. A directory without a manifest of Holdfast is *foreign*: never picked, never deleted;
nor is a *guest*, a copy that somebody made by hand: its manifest has another name than its directory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from holdfast._log import get_logger
from holdfast.config import Keep
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    StorageError,
    StorageFullError,
)
from holdfast.format.commit import read_manifest, remove
from holdfast.format.manifest import FORMAT, MANIFEST_NAME, Manifest
from holdfast.format.many import listed_at_once, names_under, remove_listed
from holdfast.format.names import start_id_of
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import door_of
from holdfast.storage.local.ops import errors_of
from holdfast.storage.together import together

from .candidates import GUESTS, Candidate, find_copies
from .external import EXTERNAL, External, is_external_child
from .fence import ANY, Fence, clear_fences, is_fence, newest_fence, write_fence
from .index import RunIndex
from .record import (
    METRICS_FILE,
    Record,
    Sidecar,
    change_sidecar,
    metric_value,
    pack,
    read_sidecar,
    record_from_manifest,
    unpack,
)
from .remains import is_remains, sweep_names
from .reports import LOGS, REPORTS
from .retention import RetentionIndex, Verdict, is_number, rank, warn_unranked
from .trash import Trash

__all__ = ["Catalog", "is_remains"]

_log = get_logger("catalog")
_TIDIED, _TIDIED_FAR = 64, 4  # checkpoints searched for remains of earlier processes; at a store each is a request
_OWN = {REPORTS, LOGS}
# The most that one call deletes: a save may be waiting, and the names are written into lease.json first.
_BITE, _BITE_S = 16, 0.5
_MANY = 100  # touched rows from which on retention looks at all rows
_NAMES_A_DELETION = 200  # of a listing of the run
# Where one request deletes a thousand files: the names are some kilobytes, the deletion takes a second or two.
_BITE_AT_ONCE = 1000
_MANY_UNKNOWN = 16  # names without a row at a store that are worth a listing of everything


class Catalog:
    """A view of one run. Reading needs no lease; `add`, `prune` and everything else that writes needs it.

    Args:
        storage: the run's root.
        index: the run index to use and to keep up to date; read from ``storage`` when left out.
        doomed: names that an earlier holder of the lease was deleting; they do not count any more.

    Attributes:
        index: the run index.
        fence: which checkpoints of earlier attempts count, if a fence was drawn.
        void: committed checkpoints that do not count: doomed, or beyond the fence. `sweep` removes them.
        num_behind: how many more there are to delete than one call of `prune` or `discard` has time for.
        announce: called with the names to be deleted next, in place of earlier names; if it raises, nothing is deleted.
        confirm: called if `prune` or `discard` has nothing to delete.
        corrupt: names whose manifest is damaged -> why.
        incomplete: names with files of an uncommitted save.
        foreign: names of directories that Holdfast did not write.
        others: manifests of checkpoints under this root that are of another run, saved on their own, or guests.
        guests: checkpoints of this run that somebody copied or renamed -> the names they were saved under.
        hidden: directories of the run whose names begin with a dot, with a "/" at the end; not looked for on a disk.
        rebuilt: True when run.json was unusable although there are checkpoints.
        holds_resumed: whether retention keeps the checkpoint that this attempt went on from.
        side: "local" or "remote" in a mirrored run, else "".
    """

    def __init__(self, storage: Storage, index: RunIndex | None = None, *, doomed: Collection[str] = ()) -> None:
        self.storage = storage
        self._fences: set[str] = set()
        self._external = External(storage)
        self._has_external = False
        self.hidden: set[str] = set()
        self._found: set[str] = set()  # all names in the run; not filled on a disk
        loads: list[Callable[[], Any]] = [lambda: index if index is not None else RunIndex.load(storage), self._names]
        loaded: tuple[RunIndex, set[str]] = tuple(together(storage, loads))
        self.index, names = loaded
        self.fence: Fence | None = None
        self.void: list[str] = []
        self.announce: Callable[[Collection[str]], object] | None = None
        self.confirm: Callable[[], object] | None = None
        self.num_behind = 0
        self._half: dict[str, str] = {}  # name -> why it goes: no checkpoints any more, but some of their files remain
        self._doomed = frozenset(doomed)
        self.rebuilt = False
        self.holds_resumed = True
        self.side = ""
        self.trash: Trash | None = None  # where deleted checkpoints go; None: nowhere
        self._says_unranked = True
        self._unpacked: dict[str, tuple[list[Any], Record]] = {}
        # The view of retention, and what it has not seen yet: touched rows, unusable names, the held name.
        self._standing: tuple[Keep, RetentionIndex] | None = None
        self._touched = self.index.rows.watch()
        self._unusable: Set[str] = frozenset()
        self._held: str | None = None
        self._unlisted = 0
        self.corrupt: dict[str, str] = {}
        self.incomplete: list[str] = []
        self.foreign: list[str] = []
        self.others: dict[str, Manifest] = {}
        self.guests: dict[str, str] = {}
        if self.index.damage is None:
            self._refresh(names)
        else:
            self._scan(names)

    # -- looking ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """List the names again: drop rows of removed checkpoints, read new ones."""
        self._refresh(self._names())

    def _refresh(self, names: set[str]) -> None:
        self.fence = newest_fence(self.storage, self._fences) if self._fences else None
        for outside in self._outside():
            self.index.rows.pop(outside, None)
        self.corrupt, self.incomplete, self.foreign, self.others, self.void, self.guests = {}, [], [], {}, [], {}
        self._all_still_there(sorted(self.index.rows.keys() - names))  # a listing may be older than run.json
        manifests = self._classify_all(sorted(names - self.index.rows.keys()))
        for name in self._enter(manifests):
            self.index.quarantined.pop(name, None)  # it was set aside for its manifest, which is sound by now
        self._reread_changed()
        self._settle_quarantine()

    def _enter(self, manifests: Mapping[str, Manifest]) -> list[str]:
        """Add rows for the checkpoints of this run that count; return their names."""
        self._find_guests(manifests)
        mine = {name: manifest for name, manifest in manifests.items() if self._is_mine(name, manifest)}
        self.others.update((name, manifests[name]) for name in manifests.keys() - mine.keys())
        counts = together(self.storage, [partial(self._counts, name, manifest) for name, manifest in mine.items()])
        self.void += [name for name, is_in in zip(mine, counts, strict=True) if not is_in]
        entered = [name for name, is_in in zip(mine, counts, strict=True) if is_in]
        records = together(self.storage, [partial(self._record, name, mine[name]) for name in entered])
        self.index.rows.update({record.name: pack(record) for record in records})
        return entered

    def scan(self) -> None:
        """Drop all cached rows and rebuild them from manifests, their sidecars and the reports."""
        self._scan(self._names())

    def _scan(self, names: set[str]) -> None:
        damage = self.index.damage
        if not self.index.run_id:
            self.index.rebuild_attempts()
        self.index.rows.clear()
        self.corrupt, self.incomplete, self.foreign, self.others, self.void, self.guests = {}, [], [], {}, [], {}
        self.fence = newest_fence(self.storage, self._fences) if self._fences else None
        manifests = self._classify_all(sorted(names))
        if manifests and not self.index.run_id:
            # The run id is lost: it is that of most checkpoints here, on a tie that of the newest.
            named = [manifest for manifest in manifests.values() if manifest.run_id]
            count = Counter(manifest.run_id for manifest in named)
            newest = max(named, key=lambda manifest: (count[manifest.run_id], manifest.created), default=None)
            self.index.run_id = newest.run_id or "" if newest is not None else ""
        self._enter(manifests)
        self._settle_quarantine()
        if damage is not None and self.index.rows:
            self.rebuilt = True
            _log.warning(
                "%s/run.json is unusable (%s): rebuilt from %d checkpoints", self.storage.uri, damage,
                len(self.index.rows),
            )  # fmt: skip

    def records(self) -> list[Record]:
        """Return all committed checkpoints of the run that are not quarantined, newest first."""
        known = (self._known(name) for name in self._order())
        return [record for record in known if record is not None]

    def names(self) -> list[str]:
        """Return the names of `records`, without unpacking rows."""
        return self._order()

    def rows(self) -> list[list[Any]]:
        """Return the packed rows of `records` (`holdfast.run.record.pack`)."""
        return [self.index.rows[name] for name in self._order()]

    def newest(self) -> Record | None:
        """Return the newest checkpoint, None in an empty run."""
        return next((record for name in self._order() if (record := self._known(name)) is not None), None)

    def record(self, name: str) -> Record:
        """Return the record of a checkpoint.

        Raises:
            CheckpointNotFoundError: the run has no such checkpoint.
        """
        record = self._known(name)
        if record is None:
            raise CheckpointNotFoundError(f"the run {self.storage.uri} has no checkpoint {name!r}")
        return record

    def _known(self, name: str) -> Record | None:
        row = self.index.rows.get(name)
        if row is None:
            return None
        known = self._unpacked.get(name)
        if known is None or known[0] is not row:
            try:
                known = self._unpacked[name] = (row, unpack(row))
            except CorruptCheckpointError as error:
                _log.warning("%s: %s: its manifest is read instead", self.storage.uri, error)
                return self._known(name) if self._still_there(name) else None
        return replace(known[1], resumed_from=True) if name == self._resumed else known[1]

    @property
    def _resumed(self) -> str | None:
        """The name of the checkpoint that the current attempt went on from, if retention keeps it."""
        current = self.index.current
        source = None if current is None else current.resumed_from
        return None if source is None or not self.holds_resumed else str(source["name"])

    def candidates(self) -> Iterator[Candidate]:
        """Yield the checkpoints that a resume may try, newest first; each manifest is read just before.

        Damaged checkpoints go into `corrupt`, so that `bad` is complete after the last candidate.
        """
        tried: set[str] = set()
        order = iter(self._order())
        while (name := next(order, None)) is not None:
            if name in tried:
                continue
            tried.add(name)
            try:
                manifest = read_manifest(self.storage, name)
            except (CheckpointNotFoundError, IncompleteCheckpointError):
                self.index.rows.pop(name, None)  # deleted since the row was written
                continue
            except (CorruptCheckpointError, FormatVersionError) as error:
                _log.warning("checkpoint %s/%s cannot be used: %s", self.storage.uri, name, error)
                self.corrupt[name] = str(error)
                continue
            if not self._is_mine(name, manifest):
                self.others[name] = manifest
                self.index.rows.pop(name, None)
                continue
            if not self._is_within(name, manifest):
                self.index.rows.pop(name, None)
                self.void.append(name)
                continue
            row, self.index.rows[name] = self.index.rows[name], pack(self._record(name, manifest))
            if row[1:3] != self.index.rows[name][1:3]:
                tried.discard(name)  # the index had it at a wrong place of the order: it is yielded at its true place
                order = iter(self._order())
                continue
            yield Candidate(record=self.record(name), manifest=manifest)

    def latest(self) -> Record | None:
        """Return the newest good checkpoint, whose manifest was read just now; None without one."""
        return next((candidate.record for candidate in self.candidates()), None)

    def best(self, metric: str, mode: str = "min") -> Record | None:
        """Return the best existing checkpoint by ``metric``; None when no checkpoint has a number for it."""
        for record in rank(self.records(), metric, mode):
            if not is_number(metric_value(record.metrics, metric)):
                return None
            if self._still_there(record.name):
                return self.record(record.name)
        return None

    def bad(self) -> dict[str, str]:
        """Return committed checkpoints that must not be resumed from, with the reason: quarantined or damaged."""
        bad = {**self.index.quarantined, **self.corrupt}
        if not self.index.rows:  # nobody must start from zero beside a checkpoint that was renamed
            bad |= {name: f"it was saved as {original}: rename it back" for name, original in self.guests.items()}
        return bad

    def strangers(self) -> list[Record]:
        """Return the records of `others`, for display."""
        return [self._record(name, manifest) for name, manifest in self.others.items()]

    # -- changing -----------------------------------------------------------------------------------------------

    def add(self, name: str, manifest: Manifest, *, is_new: bool = False) -> Record:
        """Enter a checkpoint that was committed just now. The caller saves the index (`prune` does it).

        A checkpoint that ``is_new`` has no sidecar yet; otherwise the sidecar is read.
        """
        sidecar = Sidecar()
        if not (is_new and self.storage.traits.num_parallel > 1):  # there a read is a wait
            try:
                sidecar = read_sidecar(self.storage, name)
            except StorageError as error:
                # It is committed, so it must be known. Its sidecar is read again before anything is deleted.
                _log.warning("%s was entered by its manifest alone: %s", name, error)
        self.index.rows[name] = pack(record_from_manifest(name, manifest, sidecar))
        self.index.quarantined.pop(name, None)
        self.corrupt.pop(name, None)
        if name in self.incomplete:
            self.incomplete.remove(name)
        finished = self.index.finished
        if finished is not None and finished.get("attempt", 0) < manifest.attempt:
            self.index.finished = None  # training went on after all
        return self.record(name)

    def set_metrics(self, name: str, metrics: Mapping[str, Any]) -> Record:
        """Add late metrics to a checkpoint; they win over metrics of the manifest."""
        change_sidecar(self.storage, name, lambda sidecar: sidecar.with_metrics(metrics))
        return self._reread(name)

    def pin(self, name: str, *, on: bool = True) -> Record:
        """Pin a checkpoint against retention, or unpin it."""
        change_sidecar(self.storage, name, lambda sidecar: sidecar.with_pin(on))
        return self._reread(name)

    def prune(self, keep: Keep, protect: frozenset[str] = frozenset()) -> list[Verdict]:
        """Apply retention: save the index without the doomed, then delete them, the oldest and manifests first.

        Pins and late metrics of the doomed are read again before, since another process may have set them. Return the
        verdicts on the deleted checkpoints.
        """
        self.index.keep = keep.to_json()
        pinned = self._stand(keep).pinned
        looked = list(pinned)[: self._bite]
        self._all_still_there(looked)  # another process may have taken the pin back
        for name in looked:
            pinned[name] = pinned.pop(name)  # where there are many, others are looked at with the next save
        doomed: list[Verdict] = []
        trusted: set[str] = set()
        known: dict[str, Collection[str]] = {}
        while True:
            doomed = self._stand(keep).doomed(protect)
            # Only the oldest, which go now, are looked at: the others wait for the next call.
            fresh = [verdict.name for verdict in doomed[-self._bite :] if verdict.name not in trusted]
            if not fresh:
                break
            files = self._look_around(fresh, and_at_names=not trusted and self._lists_now())
            known.update(files)
            if not trusted:
                self._reread_changed()
            unsure = [name for name in fresh if name in self.index.rows and not self._is_as_written(name, files)]
            sound = self._all_still_there(unsure)
            trusted.update(name for name in fresh if name in self.index.rows and (name in sound or name not in unsure))
        if doomed and keep.best is not None and keep.metric is not None and self._says_unranked:
            self._says_unranked = False
            warn_unranked(keep.metric, self.records(), self.storage.uri)
        return self._delete(doomed, known)

    @property
    def _bite(self) -> int:
        return _BITE if self.storage.traits.deletes_at_once == 1 else _BITE_AT_ONCE

    def _look_around(self, names: Sequence[str], *, and_at_names: bool) -> Mapping[str, Collection[str]]:
        """Drop rows of checkpoints removed by hand, which would take places of others; return files of ``names``."""
        looks: list[Callable[[], Any]] = [lambda: self._names() if and_at_names else None]
        if self.storage.traits.num_parallel > 1:
            looks.append(lambda: names_under(self.storage, names, of=len(self.index.rows)))
        present, *files = together(self.storage, looks)
        if present is not None:
            self._all_still_there(sorted(self.index.rows.keys() - present))
        return files[0] if files else {}

    def _is_as_written(self, name: str, files: Mapping[str, Collection[str]]) -> bool:
        """Tell whether a listing shows the files that the attempt of the row wrote and no later file (a sidecar)."""
        row, paths = self.index.rows[name], files.get(name, ())
        wrote = {attempt.start_id for attempt in self.index.attempts if attempt.attempt == row[1]}
        return (
            MANIFEST_NAME in paths
            and METRICS_FILE not in paths
            and {start_id for path in paths if (start_id := start_id_of(path)) is not None} == wrote
        )

    def _stand(self, keep: Keep) -> RetentionIndex:
        """Return the rules' view of the checkpoints, brought up to date."""
        unusable = self.index.quarantined.keys() | self.corrupt.keys()
        resumed = self._resumed
        held = {name for name in (resumed, self._held) if name is not None}
        names = self._touched | (unusable ^ self._unusable) | held
        if self._standing is None or self._standing[0] != keep or len(names) > _MANY:
            self._standing = keep, RetentionIndex(keep, self.records())
            names = self._touched  # a row that cannot be unpacked has been replaced by now
        standing = self._standing[1]
        for name in sorted(names):
            record = None if name in unusable else self._known(name)
            if record is not None:
                standing.put(record)
            else:
                standing.drop(name)
        self._touched.clear()
        self._unusable, self._held = unusable, resumed
        return standing

    def _lists_now(self) -> bool:
        """Tell whether to look for checkpoints that were removed by hand.

        A listing takes longer as the run grows, so with very many checkpoints on a disk most deletions do not make one.
        """
        self._unlisted += 1
        if self.storage.traits.num_parallel == 1 and self._unlisted * _NAMES_A_DELETION < len(self.index.rows):
            return False
        self._unlisted = 0
        return True

    def discard(self, names: Iterable[str], why: str) -> list[Verdict]:
        """Delete these checkpoints whatever the rules say; like `prune` otherwise."""
        present = [name for name in names if name in self.index.rows]
        return self._delete([Verdict(name=name, keep=False, why=why) for name in present]) if present else []

    def _delete(
        self, doomed: Sequence[Verdict], files: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> list[Verdict]:
        """Announce checkpoints, save the index without them, delete them; oldest first, for a bounded time.

        Return the verdicts on the deleted, newest first; the next call goes on with the others (see `num_behind`).
        """
        until = time.monotonic() + _BITE_S
        half = [Verdict(name=name, keep=False, why=why) for name, why in self._half.items()]
        bite, spared = self._announced([*half, *reversed(doomed)])
        names = [verdict.name for verdict in bite]
        rows = {name: self.index.rows.pop(name) for name in names if name in self.index.rows}
        confirmed: list[bool] = []
        full = False
        try:
            # Side by side at a store: the index is a cache, and nothing is deleted before both are done.
            confirms = partial(self._confirmed, is_announced=bool(names))
            together(self.storage, [lambda: confirmed.append(confirms()), self.index.save])
        except StorageError as error:
            if not confirmed or not isinstance(error, StorageFullError):
                self.index.rows.update(rows)
                raise
            full = True  # the deletions make room
        except BaseException:
            self.index.rows.update(rows)
            raise
        else:
            self._external.settle()
        at_once = self._has_removed(bite, files)
        deleted = bite if at_once else []
        failed = False
        for verdict in () if at_once else bite:
            if deleted and time.monotonic() >= until:
                break
            if self._try_remove(verdict):
                deleted.append(verdict)
            else:
                failed = True
        gone = {verdict.name for verdict in deleted}
        self.index.rows.update({name: row for name, row in rows.items() if name not in gone | self._half.keys()})
        for verdict in deleted:
            row = rows.get(verdict.name)
            about = {} if row is None else {"attempt": row[1], "step": max(row[2], 0)}
            self.index.journal.add("deleted", name=verdict.name, why=verdict.why, kind=self.side, **about)
        # Failed deletions are tried again with the next save, not at once.
        self.num_behind = 0 if failed else max(0, len(doomed) + len(half) - len(gone) - spared)
        if full:
            self.index.save()
        return deleted[::-1]

    def _confirmed(self, *, is_announced: bool) -> bool:
        if not is_announced and self.confirm is not None:
            self.confirm()
        return True

    def _has_removed(self, bite: Sequence[Verdict], files: Mapping[str, Collection[str]]) -> bool:
        """Delete checkpoints by few requests, if the storage can; after False some of them may be gone."""
        if not bite or self.storage.traits.num_parallel == 1:
            return False
        names = [verdict.name for verdict in bite]
        others = [name for name in names if name not in files]
        try:
            more = names_under(self.storage, others, of=len(self.index.rows) + len(names))
            remove_listed(self.storage, {name: files[name] if name in files else more[name] for name in names})
        except StorageError as error:
            _log.debug("%d checkpoints are deleted one by one: %s", len(bite), error)
            return False
        for name in names:
            self._half.pop(name, None)
        return True

    def _announced(self, going: Sequence[Verdict]) -> tuple[list[Verdict], int]:
        """Announce the first few that no other process holds or has changed; return these, and how many were spared."""
        spared: set[str] = set()
        has_announced = False
        if going and self._external.held:
            self._external.look()  # holds stay: names that are held are not announced at every call
            spared |= self._external.spared - self._half.keys()
        while True:
            bite = [verdict for verdict in going if verdict.name not in spared][: self._bite]
            if self.announce is not None and (bite or has_announced):
                self.announce([verdict.name for verdict in bite])
                has_announced = True
            if not bite:
                break
            # After the announcement: `holdfast.run.external` says why.
            self._external.look()
            spared |= self._external.spared - self._half.keys()
            if not any(verdict.name in spared for verdict in bite):
                break
        self._take_changes()  # the changes count from the next call on
        return bite, sum(verdict.name in spared for verdict in going)

    def _reread_changed(self) -> None:
        """Read sidecars again that other processes have changed."""
        if self._has_external:
            self._external.look()
            self._take_changes()

    def _take_changes(self) -> None:
        self._all_still_there(sorted(self._external.take() & self.index.rows.keys()))

    def settle(self) -> None:
        """Save the index with the changes of other processes, so that they are not read again."""
        if self._external.has_taken:
            self.index.save()
            self._external.settle()

    def _try_remove(self, verdict: Verdict) -> bool:
        """Delete a checkpoint; after a failure it is either still whole, or no checkpoint any more (`_half`)."""
        name = verdict.name
        try:
            if self.trash is None or name in self._half:
                remove(self.storage, name)
            else:
                self.trash.take(name)
        except StorageError as error:
            _log.warning("checkpoint %s/%s could not be deleted: %s", self.storage.uri, name, error)
            is_whole = False
            with contextlib.suppress(StorageError):
                is_whole = self.storage.exists(f"{name}/{MANIFEST_NAME}")
            if not is_whole:
                self._half[name] = verdict.why
            return False
        self._half.pop(name, None)
        return True

    def draw_fence(self, below: int, start_id: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write which checkpoints of the attempts below ``below`` count: those that `records` has by now, and ``more``.

        The lease must have been taken before this object was made or refreshed, and the attempt been registered.
        """
        # A damaged checkpoint may be repaired; its id is not known.
        records = {name: self.record(name).checkpoint_id for name in self.index.rows}
        records |= dict.fromkeys(self.corrupt.keys() - records.keys(), ANY)
        dead = {*self._doomed, *self.incomplete, *(self.fence.dead if self.fence is not None else ())}
        known = {name: known_id for name, known_id in {**more, **records}.items() if name not in dead}
        self.fence = Fence(below=below, known=known, dead=frozenset(dead))
        own = write_fence(self.storage, self.fence, start_id)
        clear_fences(self.storage, self._fences - {own}, below=below)
        self._fences = {own}

    def admit(self, more: Mapping[str, str], start_id: str) -> None:
        """Let checkpoints of earlier attempts (ids by name), which are about to be copied here, count as well."""
        fence = self.fence
        fresh = {} if fence is None else {name: new_id for name, new_id in more.items() if name not in fence.dead}
        if fence is not None and any(fence.known.get(name) != new_id for name, new_id in fresh.items()):
            self.fence = replace(fence, known={**fence.known, **fresh})
            self._fences.add(write_fence(self.storage, self.fence, start_id))

    def is_void(self, name: str, manifest: Manifest) -> bool:
        """Whether a committed checkpoint of this run does not count, so that another may take its name."""
        return self._is_mine(name, manifest) and not self._is_within(name, manifest)

    def sweep(self) -> list[str]:
        """Remove what killed saves and deletions of earlier attempts left; return the removed paths.

        Called after `RunIndex.register_attempt`. Only files that carry the start id of an earlier attempt of this run
        go, and only from directories without a manifest: a save of another run in the same root stays. Checkpoints that
        do not count go.
        """
        self.settle()
        if self._has_external:
            self.storage.tidy(EXTERNAL)
        remains = [name for name in self.void if name in self._doomed or not self._is_whole(name)]
        if self.announce is not None and (remains or self.incomplete):
            self.announce([*remains, *self.incomplete])
        swept = []
        if remains and self.storage.traits.num_parallel > 1:
            remove_listed(self.storage, names_under(self.storage, remains, of=len(self.index.rows) + len(remains)))
            swept += remains
        for name in remains if not swept else ():
            remove(self.storage, name)
            swept.append(name)
        self.void = [name for name in self.void if name not in remains]
        self._found -= {*remains}
        if self.void:
            _log.warning(
                "%s: %s do not count: an owner that had been taken over committed them afterwards, or somebody copied "
                "them here by hand. They are left alone; delete them if nobody needs them",
                self.storage.uri, ", ".join(self.void[:5]) + (" ..." if len(self.void) > 5 else ""),
            )  # fmt: skip
        before = self.index.attempts[:-1]
        num = _TIDIED
        if self.storage.traits.num_parallel > 1:
            # Saves are committed one after another, so remains lie beside the newest.
            num = _TIDIED_FAR if before and before[-1].ended is None else 0
        swept += sweep_names(
            self.storage,
            {attempt.start_id for attempt in before},
            # Unfinished puts of old checkpoints go with them; others may have been about to become ours.
            committed=[*self._order()[:num], *list(self.others)[:num]],
            incomplete=self.incomplete,
            foreign=self.foreign,
        )
        left = self._names() if self.incomplete or self.foreign else set()
        self.incomplete, self.foreign = sorted(left & {*self.incomplete}), sorted(left & {*self.foreign})
        return swept

    @property
    def dead(self) -> frozenset[str]:
        """Names under which an owner that was taken over may still delete or write: no checkpoint may have them."""
        return self._doomed if self.fence is None else self._doomed | self.fence.dead

    def taken(self) -> list[str]:
        """Return names that no new checkpoint may have although `records` does not have them."""
        dead = () if self.fence is None else self.fence.dead  # names that only the lease doomed may be deleted by now
        known = (self.index.quarantined, self.corrupt, self.incomplete, self.foreign, self.others, self.void, dead)
        return sorted({name for names in known for name in names})

    def found(self) -> list[str]:
        """Return all other names in the run, which no new checkpoint may have either; none on a disk."""
        return sorted(self._found - self.index.rows.keys())

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_mine(self, name: str, manifest: Manifest) -> bool:
        # A checkpoint saved on its own has no run: it belongs to the user, never to retention.
        if not manifest.run_id or manifest.run_id != self.index.run_id:
            return False
        if manifest.name not in ("", name):
            self.guests[name] = manifest.name
        return name not in self.guests

    def _find_guests(self, manifests: Mapping[str, Manifest]) -> None:
        """Note which new names are copies by hand of checkpoints whose manifests, of an early version, have no name."""
        nameless = {name: one.checkpoint_id for name, one in manifests.items() if one.run_id and not one.name}
        if nameless:
            # Known from an earlier life; the original may be gone by now.
            noted = self.index.notes.get(GUESTS)
            self.guests |= {name: str(of) for name, of in dict(noted or {}).items() if name in nameless}
            records = [record for name in self.index.rows if (record := self._known(name)) is not None]
            self.guests |= find_copies(nameless, {record.checkpoint_id: record.name for record in records})

    def _outside(self) -> list[str]:
        """Return names of rows whose checkpoints do not count: an owner that was taken over may have written them."""
        fence, rows = self.fence, self.index.rows
        outside = [] if fence is None else [row[0] for row in rows.values() if not fence.admits(row[0], row[1])]
        return [*outside, *(self._doomed & rows.keys())]

    def _is_within(self, name: str, manifest: Manifest) -> bool:
        return self.fence is None or self.fence.admits(name, manifest.attempt, manifest.checkpoint_id)

    def _counts(self, name: str, manifest: Manifest) -> bool:
        """Tell whether a checkpoint that was found counts."""
        if name in self._doomed or not self._is_within(name, manifest):
            return False
        if self.fence is None or manifest.attempt >= self.fence.below:
            return True
        # A request that was sent again may have brought a manifest back after its checkpoint was deleted.
        return self._is_whole(name)

    def _is_whole(self, name: str) -> bool:
        try:
            read_manifest(self.storage, name, check_sizes=True)
        except CheckpointError:
            return False
        return True

    def _names(self) -> set[str]:
        located = door_of(self.storage)
        if located is None:
            children = [info.path for info in self.storage.list("", recursive=False)]
            self._found = {path.rstrip("/") for path in children}
            self.hidden = {path for path in children if path[-1] == "/" and path[0] == "."}
            self._fences = {path for path in children if is_fence(path)}
            self._has_external = any(map(is_external_child, children))
            return {path[:-1] for path in children if path[-1] == "/" and path[0] != "."} - _OWN
        # On a disk without a stat of each entry: four times as fast with ten thousand, and a resume waits for this.
        with errors_of("list", self.storage.uri):
            try:
                door, inside = located
                with door.listed(inside) as folder, os.scandir(folder.fd) as entries:
                    names = {
                        entry.name: entry.is_dir(follow_symlinks=False)
                        for entry in entries
                        if entry.name[0] != "." or entry.name == EXTERNAL
                    }
            except FileNotFoundError:
                return set()
        self._has_external = names.pop(EXTERNAL, False)
        self._fences = {name for name, is_dir in names.items() if not is_dir and is_fence(name)}
        return {name for name, is_dir in names.items() if is_dir} - _OWN

    def _order(self) -> list[str]:
        """Return names of usable rows, newest first, from raw rows: building ten thousand records would cost 50 ms."""
        skip = self.index.quarantined
        return [name for name in self.index.rows.newest_first() if name not in skip and name not in self.corrupt]

    def _classify_all(self, names: Sequence[str]) -> dict[str, Manifest]:
        """Read the manifests of names without a row; note why the others have no good manifest."""
        if self.storage.traits.num_parallel > 1 and len(names) > _MANY_UNKNOWN:
            # Perhaps a deletion of many was killed: a single listing instead of several requests for each name.
            files = listed_at_once(self.storage, names) or {}
            for name in [name for name in files if MANIFEST_NAME not in files[name]]:
                ours = is_remains(path for path in files[name] if "/" not in path)
                (self.incomplete if ours else self.foreign).append(name)
            names = [name for name in names if MANIFEST_NAME in files.get(name, (MANIFEST_NAME,))]
        manifests = together(self.storage, [partial(self._classify, name) for name in names])
        self.incomplete.sort()
        self.foreign.sort()
        return {name: manifest for name, manifest in zip(names, manifests, strict=True) if manifest is not None}

    def _classify(self, name: str) -> Manifest | None:
        """Read the manifest of a name without a row; None, with the reason noted, if it has no good manifest."""
        try:
            return read_manifest(self.storage, name)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            ours = is_remains(info.path for info in self.storage.list(name, recursive=False))
            (self.incomplete if ours else self.foreign).append(name)
        except FormatVersionError as error:
            self.corrupt[name] = str(error)
        except CorruptCheckpointError as error:
            # Web pages and other tools have files named manifest.json too: those must not stop a fresh start.
            if is_remains(info.path for info in self.storage.list(name, recursive=False)) or self._says_ours(name):
                self.corrupt[name] = str(error)
            else:
                self.foreign.append(name)
        return None

    def _says_ours(self, name: str) -> bool:
        """Tell whether a damaged manifest still names the format of Holdfast."""
        try:
            return FORMAT.encode() in self.storage.read(f"{name}/{MANIFEST_NAME}")
        except StorageError:
            return False

    def _record(self, name: str, manifest: Manifest) -> Record:
        return record_from_manifest(name, manifest, read_sidecar(self.storage, name))

    def _settle_quarantine(self) -> None:
        """Quarantine checkpoints with a damaged manifest too, and drop those that were removed."""
        known = self.index.rows.keys() | self.corrupt.keys()
        kept = {name: why for name, why in self.index.quarantined.items() if name in known}
        self.index.quarantined = {**self.corrupt, **kept}

    def _reread(self, name: str) -> Record:
        self.index.rows[name] = pack(self._record(name, read_manifest(self.storage, name)))
        self.index.save()
        return self.record(name)

    def _still_there(self, name: str) -> bool:
        """Refresh a row from manifest and sidecar; False, without a row, if it is no good checkpoint of this run."""
        return bool(self._all_still_there([name]))

    def _all_still_there(self, names: Sequence[str]) -> set[str]:
        """Refresh rows from manifests and sidecars; return the names that are good checkpoints of this run."""
        good = set()
        looks = together(self.storage, [partial(self._look, name) for name in names])
        for name, result in zip(names, looks, strict=True):
            if isinstance(result, Record):
                self.index.rows[name] = pack(result)
                good.add(name)
                continue
            if isinstance(result, Manifest) and not self._is_mine(name, result):
                self.others[name] = result
            elif isinstance(result, (CorruptCheckpointError, FormatVersionError)):
                self.corrupt[name] = str(result)
            self.index.rows.pop(name, None)
        return good

    def _look(self, name: str) -> Record | Manifest | CheckpointError:
        """Read the record of a checkpoint; only its manifest if it is of another run or void; or the error."""
        try:
            manifest = read_manifest(self.storage, name)
        except CheckpointError as error:
            return error
        if not self._is_mine(name, manifest) or self.is_void(name, manifest):
            return manifest
        return self._record(name, manifest)
