"""The checkpoints of one run: list, newest, best, candidates for a resume, and what retention does to them.

Directories under the run are listed (names only), rows cached in run.json are believed for names that exist, and
manifests are read only for names without a row and for checkpoints about to be used. So opening a run stays fast
with ten thousand checkpoints. A directory without a manifest of ours is *foreign*: never picked, never deleted.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from holdfast.storage.base import Storage
from holdfast.storage.ops import errors_of

from .history import LOGS, REPORTS
from .record import Record, flat_metrics, metric_value, pack, record_from_manifest, unpack
from .remains import is_remains, sweep_names
from .retention import Verdict, decide, is_number, rank
from .runindex import RunIndex
from .sidecar import read_sidecar, write_sidecar

__all__ = ["Candidate", "Catalog", "is_remains"]

_log = logging.getLogger("holdfast.catalog")
_TIDIED = 64  # checkpoints looked at for unfinished puts at each start
_OWN = {REPORTS, LOGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed checkpoint that a resume may try: its manifest was read just now and is sound."""

    record: Record
    manifest: Manifest


class Catalog:
    """A view of one run. Reading needs nothing; `add`, `prune` and all that writes needs the lease.

    Args:
        storage: the run's root.
        index: the run index to use and to keep up to date; read from ``storage`` when left out.

    Attributes:
        index: the run index.
        corrupt: names whose manifest is damaged -> why.
        incomplete: names with files of an uncommitted save.
        foreign: names that are not ours.
        others: manifests of checkpoints under this root that are of another run, or were saved on their own.
        rebuilt: True when run.json was unusable although there are checkpoints.
    """

    def __init__(self, storage: Storage, index: RunIndex | None = None) -> None:
        self.storage = storage
        self.index = index if index is not None else RunIndex.load(storage)
        self.rebuilt = False
        self._says_unranked = True
        self._unpacked: dict[str, tuple[list[Any], Record]] = {}
        self.corrupt: dict[str, str] = {}
        self.incomplete: list[str] = []
        self.foreign: list[str] = []
        self.others: dict[str, Manifest] = {}
        if self.index.damage is None:
            self.refresh()
        else:
            self.scan()

    # -- looking ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the names again: forget rows of those that went, read those that are new."""
        names = self._names()
        for gone in self.index.rows.keys() - names:
            del self.index.rows[gone]
        self.corrupt, self.incomplete, self.foreign, self.others = {}, [], [], {}
        for name in sorted(names - self.index.rows.keys()):
            manifest = self._classify(name)
            if manifest is None:
                continue
            if self._is_mine(manifest):
                self.index.rows[name] = pack(self._record(name, manifest))
                self.index.quarantined.pop(name, None)  # it was set aside for its manifest, which is sound now
            else:
                self.others[name] = manifest
        self._settle_quarantine()

    def scan(self) -> None:
        """Forget everything cached and rebuild it from manifests, their sidecars and the reports."""
        damage = self.index.damage
        if not self.index.run_id:
            self.index.rebuild_attempts()
        self.index.rows.clear()
        self.corrupt, self.incomplete, self.foreign, self.others = {}, [], [], {}
        found = {name: manifest for name in sorted(self._names()) if (manifest := self._classify(name)) is not None}
        if found and not self.index.run_id:
            # No word on which run lives here: the one with most checkpoints does, the newest of them on a tie.
            named = [manifest for manifest in found.values() if manifest.run_id]
            count = Counter(manifest.run_id for manifest in named)
            newest = max(named, key=lambda manifest: (count[manifest.run_id], manifest.created), default=None)
            self.index.run_id = newest.run_id or "" if newest is not None else ""
        for name, manifest in found.items():
            if self._is_mine(manifest):
                self.index.rows[name] = pack(self._record(name, manifest))
            else:
                self.others[name] = manifest
        self._settle_quarantine()
        if damage is not None and self.index.rows:
            self.rebuilt = True
            _log.warning(
                "%s/run.json is unusable (%s): rebuilt from %d checkpoints", self.storage.uri, damage,
                len(self.index.rows),
            )  # fmt: skip

    def records(self) -> list[Record]:
        """All committed checkpoints of the run that are not quarantined, newest first."""
        return [self.record(name) for name in self._order()]

    def record(self, name: str) -> Record:
        """What is known about one checkpoint.

        Raises:
            CheckpointNotFoundError: the run has no such checkpoint.
        """
        row = self.index.rows.get(name)
        if row is None:
            raise CheckpointNotFoundError(f"the run {self.storage.uri} has no checkpoint {name!r}")
        current = self.index.current
        resumed = current.resumed_from if current is not None else None
        known = self._unpacked.get(name)
        if known is None or known[0] is not row:
            known = self._unpacked[name] = (row, unpack(row))
        record = known[1]
        return replace(record, resumed_from=True) if resumed is not None and resumed["name"] == name else record

    def candidates(self) -> Iterator[Candidate]:
        """Yield what a resume may try, newest first, reading each manifest as it comes.

        Those found damaged on the way are noted in `corrupt`, so that after the last one `bad` tells everything.
        """
        for name in self._order():
            try:
                manifest = read_manifest(self.storage, name)
            except (CheckpointNotFoundError, IncompleteCheckpointError):
                self.index.rows.pop(name, None)  # deleted by somebody since the row was written
                continue
            except (CorruptCheckpointError, FormatVersionError) as error:
                _log.warning("checkpoint %s/%s cannot be used: %s", self.storage.uri, name, error)
                self.corrupt[name] = str(error)
                continue
            if not self._is_mine(manifest):
                self.others[name] = manifest
                self.index.rows.pop(name, None)
                continue
            self.index.rows[name] = pack(self._record(name, manifest))
            yield Candidate(record=self.record(name), manifest=manifest)

    def latest(self) -> Record | None:
        """The newest good checkpoint; its manifest was read just now."""
        return next((candidate.record for candidate in self.candidates()), None)

    def best(self, metric: str, mode: str = "min") -> Record | None:
        """The best existing checkpoint by ``metric``; None when no checkpoint has a number for it."""
        for record in rank(self.records(), metric, mode):
            if not is_number(metric_value(record.metrics, metric)):
                return None
            if self._still_there(record.name):
                return self.record(record.name)
        return None

    def bad(self) -> dict[str, str]:
        """Committed checkpoints that must not be resumed from, with the reason: quarantined or damaged."""
        return {**self.index.quarantined, **self.corrupt}

    def strangers(self) -> list[Record]:
        """Records of `others`, for showing them."""
        return [self._record(name, manifest) for name, manifest in self.others.items()]

    # -- changing -----------------------------------------------------------------------------------------------

    def add(self, name: str, manifest: Manifest) -> Record:
        """Enter a checkpoint that was committed just now. The caller saves the index (`prune` does it)."""
        try:
            record = self._record(name, manifest)
        except StorageError as error:
            # It is committed, so it must be known. What else is beside it is read again before anything is deleted.
            _log.warning("%s was entered by its manifest alone: %s", name, error)
            record = record_from_manifest(name, manifest, metrics={}, pinned=False)
        self.index.rows[name] = pack(record)
        self.index.quarantined.pop(name, None)
        self.corrupt.pop(name, None)
        if name in self.incomplete:
            self.incomplete.remove(name)
        finished = self.index.finished
        if finished is not None and finished.get("attempt", 0) < manifest.attempt:
            self.index.finished = None  # training went on after all
        return self.record(name)

    def set_metrics(self, name: str, metrics: Mapping[str, Any]) -> Record:
        """Add late metrics to a checkpoint; they win over those of the manifest."""
        write_sidecar(self.storage, name, read_sidecar(self.storage, name).with_metrics(metrics))
        return self._reread(name)

    def pin(self, name: str, *, on: bool = True) -> Record:
        """Pin a checkpoint against retention, or unpin it."""
        write_sidecar(self.storage, name, read_sidecar(self.storage, name).with_pin(on))
        return self._reread(name)

    def prune(self, keep: Keep, protect: frozenset[str] = frozenset()) -> list[Verdict]:
        """Apply retention: the index without the doomed is saved first, then they are deleted, manifest first.

        Pins and late metrics of the doomed are read again before, since another process may have set them. Returns
        the verdicts of those deleted.
        """
        self.index.keep = keep.to_json()
        for pinned in [record.name for record in self.records() if record.pinned]:
            self._still_there(pinned)  # another process may have taken the pin back
        doomed: list[Verdict] = []
        trusted: set[str] = set()
        while True:
            doomed = [one for one in decide(keep, self.records(), protect) if not one.keep]
            fresh = [one.name for one in doomed if one.name not in trusted]
            if not fresh:
                break
            if not trusted:
                # One that somebody removed by hand must not fill a place among those that stay.
                for gone in self.index.rows.keys() - self._names():
                    del self.index.rows[gone]
            trusted.update(name for name in fresh if name in self.index.rows and self._still_there(name))
        if doomed and keep.best is not None and keep.metric is not None and self._says_unranked:
            self._say_unranked(keep.metric)
        return self._delete(doomed)

    def _say_unranked(self, metric: str) -> None:
        """Warn once that checkpoints go by their age alone, if the metric that ranks them is not there."""
        metrics = [record.metrics for record in self.records()]
        self._says_unranked = False
        if not any(is_number(metric_value(one, metric)) for one in metrics):
            known = sorted({name for one in metrics for name in flat_metrics(one) if not name.startswith("_")})
            _log.warning(
                "Keep(metric=%r): no checkpoint of %s has a number for it (they have: %s), so the newest ones stay; "
                "give Keep one of these, or report %r too for the steps that are saved",
                metric, self.storage.uri, ", ".join(known) or "no metrics at all", metric,
            )  # fmt: skip

    def discard(self, names: Iterable[str], why: str) -> list[Verdict]:
        """Delete these checkpoints whatever the rules say; like `prune` otherwise."""
        there = [name for name in names if name in self.index.rows]
        return self._delete([Verdict(name=name, keep=False, why=why) for name in there]) if there else []

    def _delete(self, doomed: Sequence[Verdict]) -> list[Verdict]:
        """Save the index without the doomed, then delete them."""
        rows = {one.name: self.index.rows.pop(one.name) for one in doomed}
        full = False
        try:
            self.index.save()
        except StorageFullError:
            full = True  # what goes makes the room
        except StorageError:
            self.index.rows.update(rows)
            raise
        deleted = []
        for verdict in doomed:
            try:
                remove(self.storage, verdict.name)
                deleted.append(verdict)
            except StorageError as error:
                _log.warning("checkpoint %s/%s could not be deleted: %s", self.storage.uri, verdict.name, error)
                self.index.rows[verdict.name] = rows[verdict.name]
        if full:
            self.index.save()
        return deleted

    def sweep(self) -> list[str]:
        """Remove what killed saves and deletions of earlier attempts left. Call after `RunIndex.register_attempt`.

        Only files that carry the start id of an earlier attempt of this run go, and only from directories without a
        manifest: a save of somebody else in the same root is none of our business.
        """
        swept = sweep_names(
            self.storage,
            {attempt.start_id for attempt in self.index.attempts[:-1]},
            # Unfinished puts of old ones go with their checkpoint; others may have been about to become ours.
            committed=[*self._order()[:_TIDIED], *list(self.others)[:_TIDIED]],
            incomplete=self.incomplete,
            foreign=self.foreign,
        )
        there = self._names() if self.incomplete or self.foreign else set()
        self.incomplete, self.foreign = sorted(there & {*self.incomplete}), sorted(there & {*self.foreign})
        return swept

    def taken(self) -> list[str]:
        """Names that no new checkpoint may have although `records` has none of them."""
        return sorted({*self.index.quarantined, *self.corrupt, *self.incomplete, *self.foreign, *self.others})

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_mine(self, manifest: Manifest) -> bool:
        # A checkpoint saved on its own has no run: it belongs to the user, never to retention.
        return bool(manifest.run_id) and manifest.run_id == self.index.run_id

    def _names(self) -> set[str]:
        root = self.storage.local_root
        if root is None:
            children = (info.path for info in self.storage.list("", recursive=False))
            return {path[:-1] for path in children if path[-1] == "/" and path[0] != "."} - _OWN
        # The same, four times as fast with ten thousand of them: a resume waits for this.
        with errors_of("list", str(root)):
            try:
                with os.scandir(root) as entries:
                    found = {e.name for e in entries if e.name[0] != "." and e.is_dir(follow_symlinks=False)}
            except FileNotFoundError:
                return set()
        return found - _OWN

    def _order(self) -> list[str]:
        """Names of usable rows, newest first, from raw rows: building ten thousand records would cost 50 ms."""
        skip = self.index.quarantined
        rows = [row for row in self.index.rows.values() if row[0] not in skip and row[0] not in self.corrupt]
        rows.sort(key=lambda row: (row[1], row[2], row[0]), reverse=True)
        return [row[0] for row in rows]

    def _classify(self, name: str) -> Manifest | None:
        """Read the manifest of a name without a row; None (and noted why) if it has no good one."""
        try:
            return read_manifest(self.storage, name)
        except (CheckpointNotFoundError, IncompleteCheckpointError):
            ours = is_remains(info.path for info in self.storage.list(name, recursive=False))
            (self.incomplete if ours else self.foreign).append(name)
        except FormatVersionError as error:
            self.corrupt[name] = str(error)
        except CorruptCheckpointError as error:
            # Web pages and other tools call files manifest.json too: theirs must not stop a fresh start.
            if is_remains(info.path for info in self.storage.list(name, recursive=False)) or self._says_ours(name):
                self.corrupt[name] = str(error)
            else:
                self.foreign.append(name)
        return None

    def _says_ours(self, name: str) -> bool:
        """Whether a damaged manifest still shows what it was."""
        try:
            return FORMAT.encode() in self.storage.read(f"{name}/{MANIFEST_NAME}")
        except StorageError:
            return False

    def _record(self, name: str, manifest: Manifest) -> Record:
        sidecar = read_sidecar(self.storage, name)
        return record_from_manifest(name, manifest, metrics=sidecar.metrics, pinned=sidecar.pinned)

    def _settle_quarantine(self) -> None:
        """Set aside those with a damaged manifest too, and forget those that were removed."""
        known = self.index.rows.keys() | self.corrupt.keys()
        kept = {name: why for name, why in self.index.quarantined.items() if name in known}
        self.index.quarantined = {**self.corrupt, **kept}

    def _reread(self, name: str) -> Record:
        self.index.rows[name] = pack(self._record(name, read_manifest(self.storage, name)))
        self.index.save()
        return self.record(name)

    def _still_there(self, name: str) -> bool:
        """Refresh one row from the truth; False (and the row is gone) if it is no good checkpoint of this run."""
        try:
            manifest = read_manifest(self.storage, name)
        except CheckpointError as error:
            if isinstance(error, (CorruptCheckpointError, FormatVersionError)):
                self.corrupt[name] = str(error)
            self.index.rows.pop(name, None)
            return False
        if not self._is_mine(manifest):
            self.others[name] = manifest
            self.index.rows.pop(name, None)
            return False
        self.index.rows[name] = pack(self._record(name, manifest))
        return True
