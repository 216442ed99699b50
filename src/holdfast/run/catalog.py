"""The checkpoints of one run, for its owner: what was committed enters, retention deletes, remains are swept."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.config import Keep
from holdfast.errors import RunBusyError, StorageError, StorageFullError
from holdfast.format.commit import read_manifest, remove
from holdfast.format.manifest import MANIFEST_NAME, Manifest
from holdfast.format.names import save_id_of, start_id_of
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import drop_link, link_at, put_link
from holdfast.storage.together import together

from .external import EXTERNAL
from .fence import ANY, Fence, clear_fences, write_fence
from .names import GIVEN, LATEST
from .record import METRICS_FILE, Record, Sidecar, change_sidecar, pack, read_sidecar, record_from_manifest
from .remains import MayBeCopied, names_under, remove_listed, sweep_names
from .retention import RetentionIndex, Verdict, warn_unranked
from .trash import Trash
from .view import RunView, to_judge

if TYPE_CHECKING:
    from .lease import Heartbeat
    from .reports import Attempt

__all__ = ["Catalog", "draw_fence", "upkeep"]

_log = get_logger("catalog")
# The most that one call deletes: a save may be waiting, and the names are written into lease.json first.
_BITE, _BITE_S = 16, 0.5
_FAR = 1 << 64  # a number that no save has
_MANY = 100  # touched rows from which on retention looks at all rows
_NAMES_A_DELETION = 200  # of a listing of the run
# Where one request deletes a thousand files: the names are some kilobytes, the deletion takes a second or two.
_BITE_AT_ONCE = 1000
_TIDIED, _TIDIED_FAR = 64, 4  # checkpoints searched for remains of earlier processes; at a store each is a request


class Catalog(RunView):
    """All that may be done with the checkpoints of a run. Looking (`RunView`) needs no lease; the rest needs it.

    What was committed enters (`add`); checkpoints are deleted by rules (`prune`) or by name (`discard`), a bounded
    number a call; what the dead have left is swept.

    Attributes:
        num_behind: how many more there are to delete than one call of `prune` or `discard` has time for.
        announce: called with the names to be deleted next, in place of earlier names; if it raises, nothing is deleted.
        confirm: called if `prune` or `discard` has nothing to delete.
        trash: where deleted checkpoints go; None: nowhere.
        side: "local" or "remote" in a mirrored run, else "".
        links: whether to make the link to the newest checkpoint; one that is there is kept right anyway.
    """

    def __init__(self, storage: Storage, *, doomed: Collection[str] = ()) -> None:
        super().__init__(storage, doomed=doomed)
        self.announce: Callable[[Collection[str]], object] | None = None
        self.confirm: Callable[[], object] | None = None
        self.num_behind = 0
        self.trash: Trash | None = None
        self.side, self.links = "", False
        self._half: dict[str, str] = {}  # name -> why it goes: no checkpoints any more, but some of their files remain
        self._says_unranked = True
        # The view of retention under its rules, and what it has not seen yet: touched rows, unusable names, the held
        # name.
        self._standing: tuple[tuple[Any, ...], RetentionIndex] | None = None
        self._touched = self.index.rows.watch()
        self._unusable: Set[str] = frozenset()
        self._held: str | None = None
        self._unlisted = 0

    def prune(self, keep: Keep, protect: frozenset[str] = frozenset()) -> list[Verdict]:
        """Apply retention: save the index without the doomed, then delete them, the oldest and manifests first.

        Pins and late metrics of the doomed are read again before, since another process may have set them. Return the
        verdicts on the deleted checkpoints.
        """
        standing = self._stand(keep)
        pinned = standing.pinned
        if looked := list(pinned)[: self._bite]:
            self.look_again(looked)  # another process may have taken the pin back
            for name in looked:
                pinned[name] = pinned.pop(name)  # where there are many, others are looked at with the next save
            standing = self._stand(keep)
        doomed: list[Verdict] = []
        trusted: set[str] = set()
        known: dict[str, Collection[str]] = {}
        while True:
            doomed = standing.doomed(protect)
            # Only the oldest, which go now, are looked at: the others wait for the next call.
            fresh = [verdict.name for verdict in doomed[-self._bite :] if verdict.name not in trusted]
            if not fresh:
                break
            files = self._look_around(fresh, and_at_names=not trusted and self._lists_now())
            known.update(files)
            if not trusted:
                self._reread_changed()
            unsure = [name for name in fresh if name in self.index.rows and not self._is_as_written(name, files)]
            sound = self.look_again(unsure)
            trusted.update(name for name in fresh if name in self.index.rows and (name in sound or name not in unsure))
            standing = self._stand(keep)
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
            self.look_again(sorted(self.index.rows.keys() - present))
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
        held = {*filter(None, (resumed, self._held))}
        names = self._touched | (unusable ^ self._unusable) | held
        # Row by row: a save must not look at all of them, and a row is judged by what it says itself.
        rollbacks, watched = self._guarded() if keep.best is not None else ((), None)

        def judged(record: Record) -> Record:
            if not rollbacks and watched is None:
                return record
            from .rollbacks import choose  # few runs have a guard

            bad, _ = choose([to_judge(record)], rollbacks, metric=watched)
            return replace(record, metrics={}) if bad else record  # no checkpoint is best by a bad step

        rules = (keep, rollbacks, watched)
        if self._standing is None or self._standing[0] != rules or len(names) > _MANY:
            self.index.keep = keep.to_json()
            self._standing = rules, RetentionIndex(keep, map(judged, self.records()))
            names = self._touched  # a row that cannot be unpacked has been replaced by now
        standing = self._standing[1]
        for name in sorted(names):
            record = None if name in unusable else self._known(name)
            if record is not None:
                standing.put(judged(record))
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
        """Delete these directories of the run whatever the rules say, in the index or not; like `prune` otherwise."""
        doomed = [Verdict(name=name, keep=False, why=why) for name in names]
        return self._delete(doomed) if doomed else []

    def _delete(
        self, doomed: Sequence[Verdict], files: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> list[Verdict]:
        """Announce checkpoints, save the index without them, delete them; oldest first, for a bounded time.

        Return the verdicts on the deleted, newest first; the next call goes on with the others (see `num_behind`).
        """
        if not doomed and not self._half:
            self.num_behind = 0
            self.save()
            return []
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

    def save(self) -> None:
        """Save the index; side by side at a store, what was committed is confirmed and `LATEST` leads to the newest."""
        works: list[Callable[[], object]] = [partial(self._confirmed, is_announced=False), self.index.save]
        together(self.storage, works)
        if self._external.taken:
            self._external.settle()

    def _confirmed(self, *, is_announced: bool) -> bool:
        if not is_announced and self.confirm is not None:
            self.confirm()
        self.point_latest()
        return True

    def point_latest(self) -> None:
        """Let the link `LATEST` of a run on a disk lead to the newest checkpoint that is sound; without one it goes.

        Called when the checkpoints are known to count, and before any of them is deleted. The next save of the index
        makes the link durable. A link is a convenience: where there can be none, that is said once.
        """
        storage = self.storage
        root = storage.local_root
        if root is None:
            return

        def is_ours(text: str | None) -> bool:
            if text is None:
                return self.links
            # One out of the run, or to a file, is somebody else's.
            return "/" not in text and text not in ("", ".", "..") and not (root / text).is_file()

        newest = self.newest_sound()
        try:
            if newest is not None:
                put_link(storage, LATEST, newest.name, durable=False, over=is_ours)
            elif (text := link_at(storage, LATEST)) is not None and is_ours(text):
                drop_link(storage, LATEST)
        except FileExistsError:
            if self.links and LATEST in self.guests:
                _log.warning(
                    "%s/%s is no link but a copy of %s, as copying a run makes it that follows links (scp -r, cp -rL, "
                    "rsync -L): who reads it reads that old one. Remove it, and the link to the newest comes back",
                    storage.uri, LATEST, self.guests[LATEST],
                )  # fmt: skip
            self.links = False  # a user's own, or such a copy
        except OSError as error:
            self.links = False
            _log.warning(
                "%s/%s, the link to the newest checkpoint, could not be set: %s", storage.uri, LATEST, error.strerror
            )

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

    def add(self, name: str, manifest: Manifest, *, is_new: bool = False) -> Record:
        """Enter a checkpoint that was committed just now. The caller saves the index (`prune` does it).

        A checkpoint that ``is_new`` has no sidecar yet; otherwise the sidecar is read. What another process says of it
        meanwhile is read before anything is deleted.
        """
        sidecar = Sidecar()
        if not is_new:
            try:
                sidecar = read_sidecar(self.storage, name)
            except StorageError as error:
                # It is committed, so it must be known. Its sidecar is read again before anything is deleted.
                _log.warning("%s was entered by its manifest alone: %s", name, error)
        record = record_from_manifest(name, manifest, sidecar)
        row = self.index.rows[name] = pack(record)
        self._unpacked[name] = row, record
        self.index.quarantined.pop(name, None)
        self.corrupt.pop(name, None)
        if name in self.incomplete:
            self.incomplete.remove(name)
        finished = self.index.finished
        if finished is not None and finished.get("attempt", 0) < manifest.attempt:
            self.index.finished = None  # training went on after all
        return record

    def set_metrics(self, name: str, metrics: Mapping[str, Any]) -> Record:
        """Add late metrics to a checkpoint; they win over metrics of the manifest."""
        change_sidecar(self.storage, name, lambda sidecar: sidecar.with_metrics(metrics))
        return self._reread(name)

    def pin(self, name: str, *, on: bool = True) -> Record:
        """Pin a checkpoint against retention, or unpin it."""
        change_sidecar(self.storage, name, lambda sidecar: sidecar.with_pin(on))
        return self._reread(name)

    def _reread(self, name: str) -> Record:
        self.index.rows[name] = pack(self._record(name, read_manifest(self.storage, name)))
        self.index.save()
        return self.record(name)

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
                self.storage.uri, listed(self.void, 5),
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
            committed=[*self.names()[:num], *list(self.others)[:num]],
            incomplete=self.incomplete,
            foreign=self.foreign,
            may_be_copied=self._copies_by_hand(),
        )
        left = self._names() if self.incomplete or self.foreign else set()
        self.incomplete, self.foreign = sorted(left & {*self.incomplete}), sorted(left & {*self.foreign})
        return swept

    def _copies_by_hand(self) -> MayBeCopied:
        """Return what tells copies of committed files, without a manifest, from the remains of a save.

        A dead attempt was at a save after its last commit, and the start after it has swept that. So in a directory
        whose name Holdfast has not given, and that no owner was deleting, files of earlier saves are somebody's copies.
        """
        from holdfast.format.parts import is_plan  # not above: only the owner of a run sweeps

        before = {attempt.start_id: attempt.attempt for attempt in self.index.attempts[:-1]}
        named = {name for name in self.incomplete if GIVEN.fullmatch(name) or name in self._doomed}
        if not before or named >= {*self.incomplete}:
            return lambda name, path: False
        newest = next(self.index.rows.newest_first(), None)
        last = 0 if newest is None else self.index.rows[newest][1]
        infos = [] if newest is None else self.storage.list(newest, recursive=False)
        saves = [save for info in infos if (save := save_id_of(info.path.rpartition("/")[2])) is not None]
        numbers = [number for start, number in map(_parts, saves) if before.get(start) == last]
        last_number = max(numbers, default=_FAR)
        # Of these nothing is there any more: what somebody has kept of them is all there is.
        gone = {event.attempt for event in self.index.read_history().events if event.what == "saved"} - {last}

        def may_be_copied(name: str, path: str) -> bool:
            save = save_id_of(path)
            if save is None or name in named or is_plan(path):
                return False
            start, number = _parts(save)
            attempt = before.get(start, 0)
            return attempt < last or attempt in gone or (attempt == last and number <= last_number)

        return may_be_copied


def _parts(save_id: str) -> tuple[str, int]:
    """Return the start id of a save and its number."""
    start, _, number = save_id.rpartition("-")
    return start, int(number, 16)


def draw_fence(
    heartbeat: Heartbeat,
    catalog: Catalog,
    attempt: Attempt,
    *,
    last: Attempt | None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw the fence if one is needed; afterwards the attempt is known to have been registered under our lease.

    Args:
        heartbeat: the lease, taken before ``catalog`` was read.
        catalog: the checkpoints.
        attempt: of this start, registered by now.
        last: the attempt before, if run.json could tell.
        more: ids by name of checkpoints of earlier attempts that are still to be copied here.

    Raises:
        RunBusyError: another process has taken the lease over meanwhile: nothing must be changed any more.
        StorageError: the storage does not answer, so that the owner is not known.
    """
    before = heartbeat.lease.predecessor
    # A missing lease was given back; or it was deleted under its owner, by hand or by a delete that came late.
    unended = last is not None and last.ended is None and last.attempt != attempt.attempt
    if before.may_act or (unended and not before.is_known):
        catalog.draw_fence(attempt.attempt, attempt.start_id, more)
        heartbeat.fenced()
        return
    catalog.admit(more, attempt.start_id)
    # A successor numbers its attempt above ours only if ours was stored before it came.
    heartbeat.verify()


@contextlib.contextmanager
def upkeep(storage: Storage, *, wait_s: float = 5.0) -> Iterator[Catalog]:
    """Hold the lease of the run in ``storage`` while the body works with its catalog.

    Raises:
        RunBusyError: a process trains the run, or its last owner may still wake up and change it.
        StorageFullError: there is no room for the lease.
    """
    from .lease import Heartbeat, Lease, make_owner  # not above: who only looks takes no lease

    owner = {**make_owner(os.urandom(8).hex()), "trainer_alive": False}
    try:
        lease = Lease.acquire(storage, owner, wait_s=wait_s)
    except StorageFullError as error:
        raise StorageFullError(
            f"{storage.uri} has no room for the lease, a small file without which nothing is changed there: remove one "
            "checkpoint, or the folder .trash, by hand first (rm -r), which no start minds"
        ) from error
    beat = Heartbeat(lease)
    beat.trainer_gone()
    try:
        if lease.predecessor.may_act:
            raise RunBusyError(
                f"the last process that trained {storage.uri} is not known to be gone, so nothing is changed there: "
                "start the run once more, which draws a fence, and try again after it"
            )
        catalog = Catalog(storage, doomed=lease.predecessor.doomed)
        catalog.announce = beat.announce
        yield catalog
        catalog.point_latest()
        if catalog.index.journal.waiting():
            catalog.index.save()  # the events of deletions
        beat.verify()
    finally:
        beat.close()
