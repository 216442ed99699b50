"""`save`, `save_async` and `load`: one checkpoint, no run."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._ranks import current_ranks
from ..checkpoint.handle import Checkpoint
from ..errors import CheckpointExistsError, ConfigError, SessionError
from ..format.names import MANIFEST_NAME
from ..state.restore import load_state
from ..state.snapshot import Snapshotter, Submitted
from ..storage.base import Storage
from ..writer.client import WriterClient
from .identity import manifest_fields, new_start_id

if TYPE_CHECKING:
    import torch

__all__ = ["SaveHandle", "load", "save", "save_async"]

_LOG = logging.getLogger("holdfast.state")
_SYNC_STAGING = 64 << 20  # `save` streams through two windows of half this size

# Both may be asked for again by a signal handler of the user in the middle of what they guard.
_lock = threading.RLock()  # one `save_async` at a time: they share an arena
_start_lock = threading.RLock()  # guards the writers and the start id
_clients: dict[str, WriterClient] = {}
_async: dict[str, Snapshotter] = {}
_pending: dict[str, Submitted] = {}
_copying = False  # `save_async` is between its first and its last use of the arena
_start_id = ""
_numbers = itertools.count(1)


class SaveHandle:
    """A save under way, in the manner of ``concurrent.futures.Future``.

    Attributes:
        held_s: how long the caller was held.
        dropped: paths that ``unsupported="drop"`` left out; they are NOT saved.
    """

    def __init__(self, submitted: Submitted, checkpoint: Checkpoint) -> None:
        self._submitted, self._checkpoint = submitted, checkpoint
        self.held_s = submitted.held_s
        self.dropped = tuple(submitted.dropped)

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is durable and return it.

        Raises:
            TimeoutError: not durable after ``timeout_s`` seconds; the save goes on.
            HoldfastError: the save failed; nothing half-written is visible.
        """
        self._submitted.future.result(timeout_s)
        return self._checkpoint

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return bool(self._submitted.future.done())

    def exception(self) -> BaseException | None:
        """Wait for the end and return what went wrong, or None."""
        return self._submitted.future.exception()


def save(
    path: str | os.PathLike[str] | Checkpoint,
    state: Mapping[Any, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    ranks: str = "all",
    unsupported: str = "raise",
) -> Checkpoint:
    """Save ``state`` as one checkpoint; durable when this returns. Needs about 64 MiB of memory beside the state.

    Args:
        path: where the checkpoint goes: a path, a URI or a `Checkpoint`.
        state: mapping of names to values (see docs/state.md for what a value may be).
        step: training step to record.
        metrics: numbers to record.
        overwrite: replace a committed checkpoint there; the old one is readable until the new one commits.
        ranks: "all" (every rank calls) or "this" (the ``if rank == 0:`` habit).
        unsupported: "raise", or "drop" to leave out what cannot be saved; a warning in the log lists it.

    Raises:
        UnsupportedStateError: a value cannot be saved; nothing was written.
        CheckpointExistsError: there is a committed checkpoint and ``overwrite`` is False.
        StorageError: the storage failed; an older checkpoint there is untouched.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save(f"{folder}/first", {"weights": torch.ones(3)}).keys()
        ['weights']
    """
    target, key = _prepare(path, overwrite=overwrite, ranks=ranks, unsupported=unsupported)
    snapshotter = Snapshotter(max_staging_bytes=_SYNC_STAGING, max_file_bytes=target.storage.max_file_bytes)
    try:
        submitted = _submit(snapshotter, key, target, state, step, metrics, overwrite, unsupported)
        submitted.future.result()
    finally:
        snapshotter.close()
    return target


def save_async(
    path: str | os.PathLike[str] | Checkpoint,
    state: Mapping[Any, Any],
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    ranks: str = "all",
    unsupported: str = "raise",
) -> SaveHandle:
    """Copy ``state`` aside and return; the writer makes it durable. The caller may change the state at once.

    One copy of the state is kept in memory for the next call; a call while the last save is still being written
    waits for it. Arguments and errors are those of `save`; errors of the writing come from `SaveHandle.result`.

    Raises:
        SessionError: a signal handler interrupted `save_async` and calls it again: there is one copy, and it is half
            made. Let the handler set a flag, or call `save`.
    """
    global _copying
    target, key = _prepare(path, overwrite=overwrite, ranks=ranks, unsupported=unsupported)
    with _lock:
        if _copying:
            raise SessionError(
                "save_async was interrupted by a signal handler that calls it again: let the handler set a flag that "
                "the loop looks at, or call save"
            )
        _copying = True
        try:
            max_file_bytes = target.storage.max_file_bytes
            arena = f"{key} {max_file_bytes}"  # the layout of an arena is that of the files
            snapshotter = _async.setdefault(arena, Snapshotter(max_file_bytes=max_file_bytes))
            before = _pending.get(arena)
            if before is not None:
                # The arena is in use until then. Its own handle reports how that save ended.
                before.future.exception()
            try:
                _pending[arena] = submitted = _submit(
                    snapshotter, key, target, state, step, metrics, overwrite, unsupported
                )
            except BaseException:
                # Interrupted after the hand-over, the job may be complete and still read the arena: never reuse it.
                snapshotter.close()
                raise
        finally:
            _copying = False
    return SaveHandle(submitted, target)


def load(
    source: str | os.PathLike[str] | Checkpoint,
    into: Mapping[Any, Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    strict: bool = True,
    allow_missing: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    map_location: torch.device | str | None = None,
    verify: bool = True,
) -> Any:
    """Load a checkpoint.

    With ``into`` tensors are restored in place, objects through their ``load_state_dict``, and the mapping is
    returned with the stored plain data in it. Without it, nested dicts with new tensors come back.

    Args:
        source: path, URI or `Checkpoint`.
        into: live state, of the kinds of values `save` takes.
        only: names or globs over "/"-joined paths to load ("model", "optimizer/state/*"); None loads everything.
        skip: names or globs to leave out.
        strict: refuse any difference between checkpoint and ``into``; False takes what fits.
        allow_missing: names or globs of ``into`` that the checkpoint need not have.
        rename: glob of stored names -> their names in ``into`` (``{"model/backbone.*": "model/encoder.*"}``).
        dtype: cast floating tensors to this.
        map_location: device of new tensors (without ``into``).
        verify: check the digest of everything read.

    Raises:
        StateMismatchError: checkpoint and ``into`` differ; raised before the live state changes, lists every entry.
        CorruptCheckpointError: stored bytes are damaged; names file and tensor.
        CheckpointNotFoundError: there is no checkpoint at ``source``.
    """
    checkpoint = _checkpoint(source)
    storage = checkpoint.storage.child(checkpoint.directory)
    ranks = current_ranks()
    loaded = load_state(
        storage,
        into,
        only=only,
        skip=skip,
        strict=strict,
        allow_missing=allow_missing,
        rename=rename,
        dtype=dtype,
        map_location=map_location,
        verify=verify,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    for note in loaded.notes if ranks.rank == 0 else ():
        _LOG.warning("%s: %s", checkpoint.uri, note)
    return loaded.state


def check_ranks(ranks: str) -> None:
    """Refuse what this version cannot do with several ranks.

    Raises:
        ConfigError: several ranks would have to save one checkpoint together.
    """
    if ranks not in ("all", "this"):
        raise ConfigError(f"ranks={ranks!r}: use 'all' (every rank calls save) or 'this' (only the calling rank saves)")
    info = current_ranks()
    if ranks == "all" and info.world_size > 1:
        raise ConfigError(
            f"this is rank {info.rank} of {info.world_size}: saving one checkpoint from several ranks comes with a "
            "later version; if the state is the same on all of them, save on rank 0 alone with ranks='this'"
        )


def _prepare(
    path: str | os.PathLike[str] | Checkpoint, *, overwrite: bool, ranks: str, unsupported: str
) -> tuple[Checkpoint, str]:
    check_ranks(ranks)
    if unsupported not in ("raise", "drop"):
        raise ConfigError(f"unsupported={unsupported!r}: use 'raise' or 'drop'")
    target = _checkpoint(path)
    if not overwrite and target.storage.exists(f"{target.directory}/{MANIFEST_NAME}"):
        raise CheckpointExistsError(
            f"{target.uri} is a committed checkpoint already: pass overwrite=True to replace it, or use another name"
        )
    return target, _kind(target.storage)


def _checkpoint(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    return path if isinstance(path, Checkpoint) else Checkpoint(path)


def _kind(storage: Storage) -> str:
    return "thread" if storage.describe() is None else "process"


def _submit(
    snapshotter: Snapshotter,
    key: str,
    target: Checkpoint,
    state: Mapping[Any, Any],
    step: int | None,
    metrics: Mapping[str, Any] | None,
    overwrite: bool,
    unsupported: str,
) -> Submitted:
    save_id = _next_save_id()
    fields = manifest_fields(
        run_id=None,
        checkpoint_id=uuid.uuid4().hex,
        parent=None,
        attempt=1,
        step=step,
        epoch=None,
        metrics=metrics or {},
    )
    return snapshotter.submit(
        state,
        _client(key, target.storage),
        target.storage,
        directory=target.directory,
        save_id=save_id,
        manifest=fields,
        overwrite=overwrite,
        unsupported=unsupported,
    )


def _client(key: str, storage: Storage) -> WriterClient:
    """Return this process's writer for one-off saves, started on first use."""
    with _start_lock:
        client = _clients.get(key)
        if client is None or client.closed:
            client = _clients[key] = WriterClient.start(storage)
        return client


def _next_save_id() -> str:
    global _start_id
    with _start_lock:
        if not _start_id:
            _start_id = new_start_id()
        return f"{_start_id}-{next(_numbers):x}"


def _after_fork_in_child() -> None:
    """Forget everything that belongs to the parent: its writers, its arenas, its save ids."""
    global _start_id, _copying, _lock, _start_lock
    _lock, _start_lock = threading.RLock(), threading.RLock()  # another thread may have held them
    _copying = False
    _clients.clear()
    _async.clear()
    _pending.clear()
    _start_id = ""


os.register_at_fork(after_in_child=_after_fork_in_child)
