"""Messages of other processes to the retention of a run: holds, and notes that metrics or a pin have changed.

Each is a small file of its own in ``.external/`` of the run, so that no process rewrites another's::

    hold-<checkpoint>-<id>.json     a process uses this checkpoint; which process, and for how long at most
    changed-<checkpoint>-<id>       its ``.metrics.json`` has changed since the index read it

Both sides write first and read afterwards, so one of them sees the other. The owner writes into lease.json what it is
about to delete (`Lease.announce`), then lists this directory, and spares the checkpoints named there. A process that
holds or changes a checkpoint puts its file, then reads lease.json and the fence, and gives up if the checkpoint is
being deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast._log import get_logger
from holdfast.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IncompleteCheckpointError,
    StorageError,
    StorageNotFoundError,
)
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.format.names import join
from holdfast.storage.base import ObjectInfo, Storage

from .fence import newest_fence
from .process import is_dead, this_process
from .record import METRICS_FILE, Sidecar, change_sidecar

EXTERNAL = ".external"
"""Directory of a run in which other processes put their messages about its checkpoints."""
_NAME = re.compile(r"(hold|changed)-(.+)-[0-9a-f]{16}(?:\.json)?")
_DECIDED_S, _PAUSE_S = 5.0, 0.1  # an owner that has announced a deletion carries it out or takes it back by then
_AT_MOST_S = 3600.0  # of a hold without a limit, or that cannot be read
_MAX_BYTES = 1 << 16  # of a hold
_log = get_logger("catalog")


def is_external_child(path: str) -> bool:
    """Tell whether a child of a run, as `Storage.list` names it, is the directory `EXTERNAL`."""
    return path == f"{EXTERNAL}/"


@dataclass(slots=True)
class _Seen:
    """A hold as the owner of the run knows it: since when, by the owner's own clock, and its content."""

    since: float
    body: dict[str, Any]

    def is_over(self) -> bool:
        """Tell whether its process is known to be gone, or has held for longer than its limit."""
        at_most = self.body.get("at_most_s")
        limit = at_most if isinstance(at_most, (int, float)) and math.isfinite(at_most) else _AT_MOST_S
        return is_dead(self.body) or time.monotonic() - self.since > limit


class External:
    """The messages of other processes about the checkpoints of one run, for its owner.

    Attributes:
        held: names that are in use.
        changed: names whose metrics or pin have changed since `take` was called.
        taken: paths of the notes of changes that were taken, and are not settled.
    """

    def __init__(self, storage: Storage) -> None:
        self.held: frozenset[str] = frozenset()
        self.changed: frozenset[str] = frozenset()
        self._storage = storage
        self._seen: dict[str, _Seen] = {}
        self._new: set[str] = set()
        self.taken: set[str] = set()

    @property
    def spared(self) -> frozenset[str]:
        """Names that must not be deleted now."""
        return self.held | self.changed

    def look(self) -> None:
        """List the directory: one request."""
        held, changed, seen = set(), set(), {}
        for info in self._storage.list(EXTERNAL, recursive=False):
            match = _NAME.fullmatch(info.path.rpartition("/")[2])
            if match is None:
                continue
            if match[1] == "changed":
                if info.path not in self.taken:
                    self._new.add(info.path)
                    changed.add(match[2])
                continue
            known = self._seen.get(info.path) or _Seen(time.monotonic(), _read(self._storage, info))
            if known.is_over():
                with contextlib.suppress(StorageError):
                    self._storage.delete(info.path)
                _log.info("the hold of process %s on %s is over", known.body.get("pid"), match[2])
                continue
            seen[info.path] = known
            held.add(match[2])
        self.held, self.changed, self._seen = frozenset(held), frozenset(changed), seen

    def take(self) -> frozenset[str]:
        """Return the changed names; the caller reads their sidecars now."""
        names, self.changed = self.changed, frozenset()
        self.taken |= self._new
        self._new.clear()
        return names

    def settle(self) -> None:
        """Remove the notes of changes that were taken; the index that holds them has been saved."""
        for path in self.taken:
            with contextlib.suppress(StorageError):
                self._storage.delete(path)
        self.taken.clear()


@contextlib.contextmanager
def held(storage: Storage, name: str, *, at_most_s: float) -> Iterator[None]:
    """Keep retention away from checkpoint ``name`` of the run in ``storage`` while the body runs.

    Raises:
        ConfigError: ``at_most_s`` is no positive number.
        CheckpointNotFoundError: the checkpoint is gone, or its deletion has begun.
    """
    if not at_most_s > 0 or at_most_s == float("inf"):
        raise ConfigError(f"hold(at_most_s={at_most_s!r}): give the seconds after which retention may delete it")
    body = {**this_process(), "at_most_s": at_most_s}
    path = f"{EXTERNAL}/hold-{name}-{os.urandom(8).hex()}.json"
    storage.put(path, json.dumps(body).encode())
    try:
        _check_stays(storage, name)
        yield
    finally:
        try:
            storage.delete(path)
        except StorageError as error:
            _log.warning("%s/%s stays for now, %s is held by nobody any more: %s", storage.uri, path, name, error)


def change(storage: Storage, name: str, how: Callable[[Sidecar], Sidecar]) -> None:
    """Change the sidecar of checkpoint ``name``, and notify the owner of the run.

    Durable on return, and safe beside the owner and other processes that do the same.

    Raises:
        CheckpointNotFoundError: the checkpoint is gone, or its deletion has begun.
    """
    path = f"{EXTERNAL}/changed-{name}-{os.urandom(8).hex()}"
    _check_stays(storage, name)
    change_sidecar(storage, name, how)
    # After the change: a reader that finds this file and reads the sidecar again gets the new values.
    storage.put(path, b"")
    try:
        _check_stays(storage, name)
    except CheckpointNotFoundError:
        with contextlib.suppress(StorageError):
            storage.delete(path)
            if not storage.exists(join(name, MANIFEST_NAME)):
                storage.delete(join(name, METRICS_FILE))
        raise


def holders(storage: Storage) -> dict[str, list[str]]:
    """Name the processes that hold checkpoints of a run, as "process 1 on host", by checkpoint."""
    by_name: dict[str, list[str]] = {}
    for info in storage.list(EXTERNAL, recursive=False):
        match = _NAME.fullmatch(info.path.rpartition("/")[2])
        if match is not None and match[1] == "hold":
            body = _read(storage, info)
            if not is_dead(body):
                by_name.setdefault(match[2], []).append(f"process {body.get('pid', '?')} on {body.get('host', '?')}")
    return by_name


def _check_stays(storage: Storage, name: str) -> None:
    """Make sure that a checkpoint exists and that no process has begun to delete it."""
    from holdfast.format.commit import read_manifest

    until = time.monotonic() + _DECIDED_S
    while True:
        is_doomed = _is_doomed(storage, name)
        try:
            read_manifest(storage, name)
        except (CheckpointNotFoundError, IncompleteCheckpointError) as error:
            raise CheckpointNotFoundError(f"{storage.uri}/{name} is gone: take a newer one") from error
        if not is_doomed:
            return
        # The owner finds our file, and takes its announcement back, unless it listed the directory before us.
        if time.monotonic() >= until:
            raise CheckpointNotFoundError(
                f"{storage.uri}/{name} is being deleted by the run's retention: take a newer one"
            )
        time.sleep(_PAUSE_S)


def _is_doomed(storage: Storage, name: str) -> bool:
    from .lease import announced  # not above: only who takes or changes a checkpoint of others asks

    if name in announced(storage):
        return True
    fence = newest_fence(storage)
    return fence is not None and name in fence.dead


def _read(storage: Storage, info: ObjectInfo) -> dict[str, Any]:
    try:
        return dict(json.loads(storage.read(info.path))) if info.size <= _MAX_BYTES else {}
    except StorageNotFoundError:
        return {"at_most_s": 0}  # removed just now: the hold is over
    except (StorageError, ValueError, TypeError, RecursionError):
        return {}
