"""The checkpoints of one run, for its owner: what was committed enters, what the dead left is swept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import StorageError
from holdfast.format.commit import read_manifest, remove
from holdfast.format.manifest import Manifest
from holdfast.format.many import names_under, remove_listed

from .external import EXTERNAL
from .fence import ANY, Fence, clear_fences, write_fence
from .keeper import Keeper
from .record import Record, Sidecar, change_sidecar, pack, read_sidecar, record_from_manifest
from .remains import sweep_names

__all__ = ["Catalog"]

_log = get_logger("catalog")
_TIDIED, _TIDIED_FAR = 64, 4  # checkpoints searched for remains of earlier processes; at a store each is a request


class Catalog(Keeper):
    """All that may be done with the checkpoints of a run. Looking (`RunView`) needs no lease; the rest needs it."""

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
