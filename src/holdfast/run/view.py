"""The checkpoints of one run, to be looked at: list, newest, best, candidates for a resume; and its state in words.

Directories under the run are listed (names only), rows cached in run.json are believed for names that exist, and
manifests are read only for names without a row and for checkpoints about to be used. So opening a run stays fast
with ten thousand checkpoints. A directory without a manifest of Holdfast is *foreign*: never picked, never deleted;
nor is a *guest*, a copy that somebody made by hand: its manifest has another name than its directory.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast._log import get_logger
from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    HoldfastError,
    IncompleteCheckpointError,
    StorageError,
    StoragePermissionError,
)
from holdfast.format.manifest import FORMAT, MANIFEST_NAME, Manifest
from holdfast.storage.base import Storage, errors_of
from holdfast.storage.local.local_storage import LocalStorage, door_of
from holdfast.storage.together import together

from .candidates import GUESTS, Candidate, find_copies
from .external import EXTERNAL, External, is_external_child
from .fence import Fence, is_fence, newest_fence
from .index import RUN_FILE, RunIndex
from .names import LOGS, REPORTS, ROLLBACKS, WATCHED
from .record import Record, metric_value, pack, read_sidecar, record_from_manifest, unpack
from .remains import holds_remains, is_remains, listed_at_once

if TYPE_CHECKING:
    from .rollbacks import Rollback

__all__ = ["RunStatus", "RunView", "refuse_checkpoint", "run_state", "runs_below", "to_judge"]

_log = get_logger("catalog")
_OWN = {REPORTS, LOGS}
_MANY_UNKNOWN = 16  # names without a row at a store that are worth a listing of everything


class RunView:
    """A view of one run, which needs no lease. What looks writes nothing but rows of ``index`` in memory.

    Args:
        storage: the run's root.
        doomed: names that an earlier holder of the lease was deleting; they do not count any more.

    Attributes:
        index: the run index.
        fence: which checkpoints of earlier attempts count, if a fence was drawn.
        void: committed checkpoints that do not count: doomed, or beyond the fence. `Catalog.sweep` removes them.
        corrupt: names whose manifest is damaged -> why.
        incomplete: names with files of an uncommitted save.
        foreign: names of directories that Holdfast did not write.
        others: manifests of checkpoints under this root that are of another run, saved on their own, or guests.
        guests: checkpoints of this run that somebody copied or renamed -> the names they were saved under.
        hidden: directories of the run whose names begin with a dot, with a "/" at the end; not looked for on a disk.
        rebuilt: True when run.json was unusable although there are checkpoints.
        holds_resumed: whether retention keeps the checkpoint that this attempt went on from.
    """

    def __init__(self, storage: Storage, *, doomed: Collection[str] = ()) -> None:
        self.storage = storage
        self._fences: set[str] = set()
        self._external = External(storage)
        self._has_external = False
        self.hidden: set[str] = set()
        self._found: set[str] = set()  # all names in the run; not filled on a disk
        loads: list[Callable[[], Any]] = [lambda: RunIndex.load(storage), self._names]
        loaded: tuple[RunIndex, set[str]] = tuple(together(storage, loads))
        self.index, names = loaded
        self._doomed = frozenset(doomed)
        self.rebuilt = False
        self.holds_resumed = True
        self._unpacked: dict[str, tuple[list[Any], Record]] = {}
        self._read_notes: tuple[Any, tuple[tuple[Rollback, ...], str | None]] = (None, ((), None))
        if self.index.damage is None:
            self.refresh(names)
        else:
            self.scan(names)

    def refresh(self, names: set[str] | None = None) -> None:
        """Drop rows of removed checkpoints, read new ones; without ``names`` from a listing made just now, make one."""
        names = self._names() if names is None else names
        self._begin_look()
        for outside in self._outside():
            self.index.rows.pop(outside, None)
        self.look_again(sorted(self.index.rows.keys() - names))  # a listing may be older than run.json
        manifests = self._classify_all(sorted(names - self.index.rows.keys()))
        for name in self._enter(manifests):
            self.index.quarantined.pop(name, None)  # it was set aside for its manifest, which is sound by now
        self._reread_changed()
        self._settle_quarantine()

    def _begin_look(self) -> None:
        """Read the fence, and forget what was found out about names without a row."""
        self.fence: Fence | None = newest_fence(self.storage, self._fences) if self._fences else None
        self.corrupt: dict[str, str] = {}
        self.incomplete: list[str] = []
        self.foreign: list[str] = []
        self.others: dict[str, Manifest] = {}
        self.void: list[str] = []
        self.guests: dict[str, str] = {}

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

    def scan(self, names: set[str] | None = None) -> None:
        """Drop all cached rows and rebuild them from manifests, their sidecars and the reports; see `refresh`."""
        names = self._names() if names is None else names
        damage = self.index.damage
        if not self.index.run_id:
            self.index.rebuild_attempts()
        self.index.rows.clear()
        self._begin_look()
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
        known = (self._known(name) for name in self.names())
        return [record for record in known if record is not None]

    def rows(self) -> list[list[Any]]:
        """Return the packed rows of `records` (`holdfast.run.record.pack`)."""
        return [self.index.rows[name] for name in self.names()]

    def newest(self) -> Record | None:
        """Return the newest checkpoint, None in an empty run."""
        name = next(self._usable(), None)  # each save asks: not for all names
        record = None if name is None else self._known(name)
        if record is None and name is not None:  # its row cannot be read, and has changed or gone for it
            return self.newest()
        return record

    def newest_sound(self) -> Record | None:
        """Return the newest checkpoint that a start would take; None without one."""
        if self._guarded() == ((), None):
            return self.newest()
        return next((record for name in self._to_take() if (record := self._known(name)) is not None), None)

    def bad_steps(self) -> dict[str, str]:
        """Return checkpoints that hold a bad step, which the guard of the run has found, with the reason."""
        rollbacks, metric = self._guarded()
        if not rollbacks and metric is None:
            return {}
        from .rollbacks import choose

        return choose(map(to_judge, self.records()), rollbacks, metric=metric)[0]

    def sound(self) -> list[Record]:
        """Return the checkpoints, newest first, without those that hold a bad step."""
        bad = self.bad_steps()
        return [record for record in self.records() if record.name not in bad]

    def passed_over(self, taken: str | None) -> str:
        """Say which checkpoints newer than ``taken`` are not, for what the guard has found; "" if there are none."""
        names = self.names()
        newer = names[: names.index(taken)] if taken in names else names
        bad = self.bad_steps() if newer else {}
        return listed((f"{name} ({bad.get(name, 'it may hold a bad step')})" for name in newer), 3)

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
                return self._known(name) if self.look_again([name]) else None
        return replace(known[1], resumed_from=True) if name == self._resumed else known[1]

    @property
    def _resumed(self) -> str | None:
        """The name of the checkpoint that the current attempt went on from, if retention keeps it."""
        current = self.index.current
        source = None if current is None else current.resumed_from
        return None if source is None or not self.holds_resumed else str(source["name"])

    def candidates(self) -> Iterator[Candidate]:
        """Yield the checkpoints that a resume may try, newest first; each manifest is read just before.

        Damaged checkpoints go into `corrupt`, so that `bad` is complete after the last candidate. Those that hold a bad
        step are left out, and those that may hold one come last.
        """
        tried: set[str] = set()
        order = self._to_take()
        while (name := next(order, None)) is not None:
            if name in tried:
                continue
            tried.add(name)
            try:
                manifest = self._manifest(name)
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
                order = self._to_take()
                continue
            yield Candidate(record=self.record(name), manifest=manifest)

    def latest(self) -> Record | None:
        """Return the newest good checkpoint, whose manifest was read just now; None without one."""
        return next((candidate.record for candidate in self.candidates()), None)

    def best(self, metric: str, mode: str = "min") -> Record | None:
        """Return the best existing checkpoint by ``metric`` that holds no bad step; None where none has a number."""
        from .retention import is_number, rank  # not above: a start ranks nothing

        for record in rank(self.sound(), metric, mode):
            if not is_number(metric_value(record.metrics, metric)):
                return None
            if self.look_again([record.name]):
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

    def _reread_changed(self) -> None:
        """Read sidecars again that other processes have changed."""
        if self._has_external:
            self._external.look()
            self._take_changes()

    def _take_changes(self) -> None:
        self.look_again(sorted(self._external.take() & self.index.rows.keys()))

    def settle(self) -> None:
        """Save the index with the changes of other processes, so that they are not read again."""
        if self._external.taken:
            self.index.save()
            self._external.settle()

    def is_void(self, name: str, manifest: Manifest | None = None) -> bool:
        """Whether a committed checkpoint of this run does not count, so that another may take its name.

        See `holdfast.run.fence`. Without ``manifest`` the one that is there is read, if any is.
        """
        try:
            found = self._manifest(name) if manifest is None else manifest
            return self._is_mine(name, found) and not self._is_within(name, found)
        except CheckpointError:
            return False

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

    def _manifest(self, name: str, *, check_sizes: bool = False) -> Manifest:
        from holdfast.format.commit import read_manifest  # not above: a fresh run has none to read

        return read_manifest(self.storage, name, check_sizes=check_sizes)

    def _is_whole(self, name: str) -> bool:
        try:
            self._manifest(name, check_sizes=True)
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

    def names(self) -> list[str]:
        """Return the names of `records`, from raw rows: building ten thousand records would cost 50 ms."""
        return list(self._usable())

    def _usable(self) -> Iterator[str]:
        for name in self.index.rows.newest_first():
            if name not in self.index.quarantined and name not in self.corrupt:
                yield name

    def _to_take(self) -> Iterator[str]:
        """Yield names in the order in which a start takes them, by what the guard of the run has found."""
        rollbacks, metric = self._guarded()
        if not rollbacks and metric is None:
            yield from self.names()
            return
        from .rollbacks import choose

        doubtful: list[str] = []
        for name in self.names():
            record = self._known(name)
            bad, may_be_bad = choose([] if record is None else [to_judge(record)], rollbacks, metric=metric)
            doubtful += may_be_bad
            if not bad and not may_be_bad:
                yield name
        yield from doubtful

    def _guarded(self) -> tuple[tuple[Rollback, ...], str | None]:
        """Return the bad steps that the guard of the run has found, and the metric that it watches."""
        notes = self.index.notes
        if ROLLBACKS not in notes and WATCHED not in notes:
            return (), None
        from .rollbacks import read_rollbacks, watched_metric  # here and above: few runs have a guard

        if self._read_notes[0] is not notes:  # whoever notes something puts another mapping there
            self._read_notes = notes, (tuple(read_rollbacks(notes)), watched_metric(notes))
        return self._read_notes[1]

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
            return self._manifest(name)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            ours = holds_remains(self.storage, name)
            (self.incomplete if ours else self.foreign).append(name)
        except FormatVersionError as error:
            self.corrupt[name] = str(error)
        except CorruptCheckpointError as error:
            # Web pages and other tools have files named manifest.json too: those must not stop a fresh start.
            if holds_remains(self.storage, name) or self._says_ours(name):
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

    def look_again(self, names: Sequence[str]) -> set[str]:
        """Read manifests and sidecars of these again; return those that are good checkpoints: only these keep a row."""
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
            manifest = self._manifest(name)
            if not self._is_mine(name, manifest) or self.is_void(name, manifest):
                return manifest
            return self._record(name, manifest)
        except CheckpointError as error:
            return error
        except StorageError as error:
            if error.errno != errno.ELOOP:
                raise
            return CorruptCheckpointError(f"{name}: {error}")  # moved elsewhere by hand, and linked: one, not the run


def to_judge(record: Record) -> tuple[str, int, int, Mapping[str, Any]]:
    """Return what `rollbacks.choose` judges."""
    return record.name, record.attempt, record.step, record.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run as a word and as a short text.

    Attributes:
        word: "training", "silent" (an owner elsewhere that may be dead), "finished", "stopped", "died" or "new".
        text: who trains it and where, or how its last attempt ended; untrusted text from files.
        owner: the process that writes to the run, by lease.json, with ``alive`` added (`owner_of`); None without one.
        heard: when the owner was last heard of, in seconds since 1970 by the clock of the storage; None without one.
    """

    word: str
    text: str
    owner: Mapping[str, Any] | None = None
    heard: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether the run may change by itself."""
        return self.word in ("training", "silent")


def runs_below(storage: Storage, names: Sequence[str] | None = None) -> list[tuple[str, Storage]]:
    """Return the runs directly below a folder by name, those that a symbolic link of a local folder leads to as well.

    What may not be read is among them: it may be one. Inside of a run no link is ever followed. A folder of runs is the
    reader's own, and only looked at.

    Args:
        storage: the folder.
        names: of the directories in it that may be runs, if the caller has listed them.
    """
    if names is None:
        names = [info.path.rstrip("/") for info in storage.list("", recursive=False) if info.path.endswith("/")]
    found = [(name, storage.child(name)) for name in sorted(names) if _may_be_run(storage, name)]
    root = storage.local_root
    if root is not None and os.path.isdir(root):
        with os.scandir(root) as entries:
            links = [entry.name for entry in entries if entry.is_symlink() and entry.name[0] != "."]
        linked = [(name, LocalStorage(root / name)) for name in links if os.path.isfile(root / name / RUN_FILE)]
        found = sorted({**dict(found), **dict(linked)}.items())
    return found


def _may_be_run(storage: Storage, name: str) -> bool:
    try:
        return storage.exists(f"{name}/{RUN_FILE}")
    except StoragePermissionError:
        return True


def refuse_checkpoint(storage: Storage, error: type[HoldfastError]) -> None:
    """Refuse a checkpoint where a run is asked for.

    Raises:
        HoldfastError: it is one; of the class ``error``.
    """
    if storage.exists(MANIFEST_NAME):
        raise error(f"{storage.uri} is a checkpoint: give its run, the directory above it")


def run_state(view: RunView) -> RunStatus:
    """Look at the lease and the attempts of a run.

    Raises:
        StorageError: the storage does not answer.
    """
    from .lease import STALE_S, owner_of  # not above: who only reads checkpoints asks for no owner

    index = view.index
    owner, heard = owner_of(view.storage)
    if owner is not None and owner["alive"] is not False:
        is_fresh = heard is not None and time.time() - heard < STALE_S
        where = f"process {owner.get('trainer_pid')} on {owner.get('host')}"
        return RunStatus(
            word="training" if owner["alive"] or is_fresh else "silent", text=where, owner=owner, heard=heard
        )
    if index.has_finished:
        return RunStatus(word="finished", text="training has come to its end", owner=owner, heard=heard)
    current = index.current
    if current is None:
        return RunStatus(word="new", text="it has never been trained", owner=owner, heard=heard)
    if current.reason:
        return RunStatus(word="stopped", text=current.reason, owner=owner, heard=heard)
    text = f"attempt {current.attempt} ended without a word"
    return RunStatus(word="died", text=text, owner=owner, heard=heard)
