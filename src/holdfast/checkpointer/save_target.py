"""Where a save without a run goes, who makes it, and through which writer."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from holdfast._fork import after_fork_in_child
from holdfast._ranks import RankInfo, current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.errors import CheckpointExistsError, ConfigError, HoldfastError
from holdfast.format.names import MANIFEST_NAME
from holdfast.run.names import refuse_run
from holdfast.state.save.snapshot import Snapshotter
from holdfast.state.tree.groups import Alike, ranks_alike
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveJob

from .identity import manifest_fields, new_start_id
from .meeting import meet
from .rank_group import ANSWER_MARGIN_S, RankGroup

__all__ = ["SaveTarget", "open_place"]

_PROCESS, _THREAD = "process", "thread"  # kinds of writers
_TIMEOUT_S = 600.0  # of a save of several ranks, from the first of them to the last

_lock = threading.RLock()  # a signal handler of the user may save in the middle of what it guards
_clients: dict[str, WriterClient] = {}
_teams: dict[tuple[str, int, int], tuple[RankGroup, itertools.count[int]]] = {}
_start_id = ""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTarget:
    """Destination and writer of one save that belongs to no run.

    Attributes:
        target: the checkpoint.
        client: the writer.
        save_id: of this save; the same on all ranks that make it.
        team: the ranks that make it, None for this process alone.
    """

    target: Checkpoint
    client: WriterClient
    save_id: str
    team: RankGroup | None = None

    @property
    def layout(self) -> str:
        """Key of targets that can use the same arena."""
        ranks = "" if self.team is None else f" {self.team.rank} of {self.team.world_size}"
        return f"{_kind(self.target.storage)} {self.target.storage.traits.max_file_bytes}{ranks}"

    def group(self, alike: Alike) -> tuple[int, ...] | None:
        """Return the ranks that ``alike`` names; None for a process that saves alone.

        Raises:
            ConfigError: it names no ranks, or not this one.
        """
        if self.team is None:
            return None
        return ranks_alike(alike, rank=self.team.rank, world_size=self.team.world_size)

    def snapshotter(self, *, max_staging_bytes: int | None = None, alike: tuple[int, ...] | None = None) -> Snapshotter:
        """Make a snapshotter that lays files out as this target needs."""
        rank, world_size = (0, 1) if self.team is None else (self.team.rank, self.team.world_size)
        return Snapshotter(
            rank=rank,
            world_size=world_size,
            max_file_bytes=self.target.storage.traits.max_file_bytes,
            max_staging_bytes=max_staging_bytes,
            alike=alike,
        )

    def broadcast_errors(self) -> contextlib.AbstractContextManager[None]:
        """Send an error to the other ranks, which wait for our part of this save."""
        return contextlib.nullcontext() if self.team is None else self.team.broadcast_errors(self.save_id)

    def submit(
        self,
        snapshotter: Snapshotter,
        state: Mapping[Any, Any],
        step: int | None,
        metrics: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        unsupported: str,
        aside: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> Future[Any]:
        """Copy the state and hand it to the writer; inside `broadcast_errors`. For ``aside`` see `Snapshotter.submit`.

        ``fields`` are more of the manifest.

        Raises:
            CheckpointExistsError: there is a committed checkpoint and ``overwrite`` is False, or a run.
        """
        joint = self.team is not None
        self._check_free(overwrite=overwrite)
        manifest = manifest_fields(
            checkpoint_id=uuid.uuid4().hex,
            step=step,
            epoch=None,
            metrics=metrics or {},
            world_size=1 if self.team is None else self.team.world_size,
        )
        job = SaveJob(
            directory=self.target.directory,
            save_id=self.save_id,
            manifest={**manifest, **(fields or {})},
            overwrite=overwrite,
            part=joint,
            joint=joint,
        )
        return snapshotter.submit(state, self.client, self.target.storage, job, unsupported=unsupported, aside=aside)

    def wait(self, future: Future[Any]) -> None:
        """Wait until the checkpoint is durable."""
        self._await(future, self.target.uri)
        future.result()

    def wait_for_arena(self, before: Future[Any]) -> None:
        """Wait until an earlier save has let go of the arena; its own handle reports how it ended."""
        self._await(before, "the save before this one, whose memory is needed,")

    def _await(self, future: Future[Any], what: str) -> None:
        limit_s = None if self.team is None else self.team.timeout_s + ANSWER_MARGIN_S
        wait([future], timeout=limit_s)
        if not future.done():
            whose = "" if self.team is None else f"rank {self.team.rank}: "
            raise HoldfastError(f"{whose}{what} is not durable after {limit_s:.0f} s")

    def _check_free(self, *, overwrite: bool) -> None:
        target = self.target
        refuse_run(target.storage, target.directory)
        if not overwrite and target.storage.exists(f"{target.directory}/{MANIFEST_NAME}"):
            raise CheckpointExistsError(
                f"{target.uri} is a committed checkpoint already: pass overwrite=True to replace it, or use another "
                "name"
            )


def open_place(path: str | os.PathLike[str] | Checkpoint, *, ranks: str, unsupported: str) -> SaveTarget:
    """Find the writer for ``path``; with several ranks the first call brings them together.

    Raises:
        ConfigError: an argument is wrong, or the ranks have no process group to meet through.
        HoldfastError: another rank did not come.
    """
    if ranks not in ("all", "this"):
        raise ConfigError(f"ranks={ranks!r}: use 'all' (every rank calls save) or 'this' (only the calling rank saves)")
    if unsupported not in ("raise", "drop"):
        raise ConfigError(f"unsupported={unsupported!r}: use 'raise' or 'drop'")
    info = current_ranks()
    if ranks == "this" or info.world_size == 1:
        target = path if isinstance(path, Checkpoint) else Checkpoint(path)
        return SaveTarget(target=target, client=_client(target.storage), save_id=_next_save_id())
    found = _try_path(path)
    kind = _PROCESS if isinstance(found, HoldfastError) else _kind(found.storage)
    with _lock:
        team, numbers = _team(info, kind)
        # Counted in any case: the n-th saves of all ranks belong together, also after a failure on this rank alone.
        save_id = f"{team.start_id}-{next(numbers):x}"
    if isinstance(found, HoldfastError):
        with team.broadcast_errors(save_id):
            raise found
    if team.client.closed:
        # No second meeting: this rank cannot know whether the others come too.
        raise HoldfastError(
            f"rank {team.rank}: the writer process of this rank has ended, and with it the saves of all ranks: start "
            "the ranks again, or save on one of them with ranks='this'"
        )
    return SaveTarget(target=found, client=team.client, save_id=save_id, team=team)


def _try_path(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint | HoldfastError:
    """Resolve a path; return the error instead of raising it, because the other ranks have to receive it too."""
    try:
        return path if isinstance(path, Checkpoint) else Checkpoint(path)
    except HoldfastError as error:
        return error


def _team(info: RankInfo, kind: str) -> tuple[RankGroup, itertools.count[int]]:
    key = (kind, info.rank, info.world_size)
    known = _teams.get(key)
    if known is None:
        otherwise = "save on one rank alone with ranks='this'"
        meeting = meet(info, name=f"save-{kind}", timeout_s=_TIMEOUT_S, otherwise=otherwise)
        client = WriterClient.start(thread=kind == _THREAD or None)
        try:
            team = RankGroup(meeting, client, timeout_s=_TIMEOUT_S)
        except BaseException:
            client.close(0.0)
            raise
        known = _teams[key] = (team, itertools.count(1))
    return known


def _kind(storage: Storage) -> str:
    return _THREAD if storage.describe() is None else _PROCESS


def _client(storage: Storage) -> WriterClient:
    """Return this process's writer for one-off saves, started on first use."""
    with _lock:
        kind = _kind(storage)
        client = _clients.get(kind)
        if client is None or client.closed:
            client = _clients[kind] = WriterClient.start(storage)
        return client


def _next_save_id() -> str:
    global _start_id
    with _lock:
        if not _start_id:
            _start_id = new_start_id()
        return f"{_start_id}-{next(_numbers):x}"


@after_fork_in_child
def _after_fork_in_child() -> None:
    """Forget everything that belongs to the parent: its writers, its save ids."""
    global _start_id, _lock
    _lock = threading.RLock()  # another thread may have held it
    _clients.clear()
    _teams.clear()
    _start_id = ""
