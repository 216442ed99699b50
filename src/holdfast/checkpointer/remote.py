"""The remote side of a mirrored run, seen from the trainer: how far it is behind, and waiting for it.

And ranks whose machines share no local disk, which have their run there: who sees what (`share_a_disk`), and what an
earlier life has left on the disks (`take_up`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

from holdfast._log import get_logger
from holdfast.config import Mirror
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, RunBusyError, StorageError
from holdfast.format.names import join
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import RunOpened

from .pending_saves import Stats
from .rank_group import sees
from .run_session import RunSession

_LOG = get_logger("checkpointer")


class RemoteWatch:
    """Follows what the writer uploads.

    Args:
        client: the writer, with the mirrored run opened.
        mirror: its rules.
        uri: where the remote side is.
        staged: a save counts as a checkpoint only once it has arrived there; see `share_a_disk`.
        arrived: called once with the name of each checkpoint that arrives there, on any thread: it must be short.
    """

    def __init__(
        self,
        client: WriterClient,
        mirror: Mirror,
        uri: str,
        *,
        staged: bool = False,
        arrived: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.staged, self._arrived = staged, arrived
        self._announced: set[str] = set()
        self._client, self._mirror, self.uri = client, mirror, uri
        self._changed = threading.Condition()
        self._state: dict[str, Any] = {"version": 0, "waiting": [], "last_step": -1, "created": None}
        self._ended = False
        self._follow()

    def fill(self, stats: Stats) -> None:
        """Put what is known into the totals."""
        with self._changed:
            state = self._state
        stats.last_remote_step = state["last_step"]
        stats.remote_behind = len(state["waiting"])
        created = state["created"]
        stats.seconds_since_remote = None if created is None else max(0.0, time.time() - created)

    @property
    def upload_s(self) -> float:
        """Seconds that the last upload took; 0.0 before the first."""
        return float(self._state.get("upload_s", 0.0))

    def make_room(self, timeout_s: float) -> None:
        """Hold the next save, or refuse it, while too many wait for their upload.

        Raises:
            StorageError: too many do, and the rule is "raise", or it took longer than ``timeout_s``.
        """
        if self._mirror.when_behind == "skip":
            return
        self._ask(timeout_s)
        limit = self._mirror.max_behind
        if self._mirror.when_behind == "wait" and self._wait_until(lambda: len(self._waiting) < limit, timeout_s):
            return
        if len(self._waiting) >= limit:
            waited = f" after {timeout_s:.0f} s (timeout_s)" if self._mirror.when_behind == "wait" else ""
            raise StorageError(
                f"{len(self._waiting)} checkpoints are not at {self.uri} yet{waited} (max_behind={limit}, when_behind="
                f"{self._mirror.when_behind!r}): {self._on_disk_only()}. Training stops here, as was asked for; with "
                "when_behind='skip' it would go on"
            )

    def finish(self, timeout_s: float, step: int = -1) -> None:
        """Wait until the remote has everything that is to get there.

        Args:
            timeout_s: how long.
            step: that was saved last, as far as anything was.

        Raises:
            StorageError: it has not after ``timeout_s``; names what lies on the local disk only. Or the newest
                checkpoint cannot be brought there, now or later.
            RunBusyError: another trainer has taken the remote side over.
        """
        self._ask(timeout_s)
        if self._wait_until(lambda: not self._waiting, timeout_s):
            refused = self._state.get("refused")
            if self.staged and (refused is not None or self._state["last_step"] < step):
                raise StorageError(
                    f"step {step} was staged, but is not at {self.uri}, where the newest checkpoint is that of step "
                    f"{self._state['last_step']}; the log says why. What the disks of all machines have still is "
                    "brought by the next start"
                )
            if refused is not None:
                raise StorageError(
                    f"{refused}. Nothing newer is there, and this one is on the local disk {self._mirror.path} only, "
                    "if it is whole: `holdfast verify --deep` tells. The next start with the same local_dir tries again"
                )
            return
        raise StorageError(
            f"not everything is at {self.uri} after {timeout_s:.0f} s (timeout_s): {self._on_disk_only()}. The writer "
            "goes on for a moment; the next start with the same local_dir brings what is left"
        )

    @property
    def _waiting(self) -> list[str]:
        names: list[str] = self._state["waiting"]
        return names

    def _on_disk_only(self) -> str:
        error = self._state.get("error")
        why = f" ({error})" if error else ""
        return f"on the local disk {self._mirror.path} only: {', '.join(self._waiting) or 'nothing'}{why}"

    def _wait_until(self, is_fine: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_fine() or self._ended or self._state.get("lost"), timeout_s)
            if self._state.get("lost"):
                raise RunBusyError(self._state["lost"])
            return is_fine()

    def _ask(self, timeout_s: float) -> None:
        """Learn the present state: what was committed before this call counts."""
        future = self._client.run_op("follow", since=None)
        wait([future], timeout=timeout_s)
        if not future.done():
            raise HoldfastError(f"no answer of the writer after {timeout_s:.0f} s (timeout_s)")
        self._take(future.result())

    def _follow(self) -> None:
        since = self._state["version"]
        future = self._client.run_op("follow", since=since)
        future.add_done_callback(lambda done: self._heard(done, since))

    def _heard(self, future: Future[Any], since: int) -> None:
        # On a thread of the client: short, and without waiting.
        try:
            state = future.result()
            self._take(state)
            # Not compared with the present state: `_ask` may have received the same answer a moment before.
            if state["version"] != since:
                self._follow()
                return
        except HoldfastError as error:  # the run is closed, or the writer gone
            _LOG.debug("the mirror is not followed any more: %s", error)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self, state: dict[str, Any] | None) -> None:
        if state is None:
            raise HoldfastError(f"the writer could not begin to bring checkpoints to {self.uri}; its log says why")
        with self._changed:
            # Two threads take answers, so an older answer may be taken last, and nothing would correct it.
            if state["version"] > self._state["version"]:
                self._state = state
            for name in state.get("arrived", ()):
                if name not in self._announced:
                    self._announced.add(name)
                    self._arrived(name)
            self._changed.notify_all()


_VISIBLE_S = 0.3  # a disk that shows a file later than this counts as not shared


def share_a_disk(session: RunSession) -> bool:
    """Tell whether all ranks see one local directory; the same on all of them."""
    meeting, local = session.meeting, session.storage
    home = f".probe-{session.start_id}"
    mark = f"{home}/ranks"

    def leave_mark() -> None:
        if meeting.rank == 0:
            local.put(mark, b"do all ranks see this file?")

    def decide(seen: list[bool]) -> bool:
        local.delete(mark)
        local.tidy(home)
        return all(seen)

    meeting.agree("mark", leave_mark)
    shared: bool = meeting.agree("disk", lambda: sees(local, mark, within_s=_VISIBLE_S), decide)
    return shared


def take_up(session: RunSession) -> None:
    """Bring the newest save that the disks hold completely to the remote, if that has none as new; sweep the rest.

    A staged save counts if as many ranks start again as saved it, and every part is on the disk of some rank: machines
    may come back in another order. A whole checkpoint on rank 0's disk (of a life on one machine) counts, too.
    Afterwards `RunSession.opened` lists what the run has.
    """
    meeting, local, opened = session.meeting, session.storage, session.opened
    found = meeting.agree("staged", lambda: _left(local, opened, meeting.rank), _newest_first)

    def choose(all_: Sequence[list[list[int]]]) -> tuple[int, list[list[int]]] | None:
        for number, about in enumerate(found):
            if about["save"] is None:
                return number, []
            bearers = _bearers(about["writers"], [parts[number] for parts in all_])
            if bearers is not None and about["writers"] == meeting.world_size:
                return number, bearers
        return None

    chosen = (
        meeting.agree("staged parts", lambda: [_parts_here(local, about) for about in found], choose) if found else None
    )
    about, bearers = (None, []) if chosen is None else (found[chosen[0]], chosen[1])
    for lost in found[: len(found) if chosen is None else chosen[0]] if session.leads else []:
        _LOG.warning(
            "%s, which %d ranks had staged, is given up: not all of its parts are on the disks of the %d ranks that "
            "start now",
            lost["name"], lost["writers"], meeting.world_size,
        )  # fmt: skip
    if about is not None and about["save"] is not None:
        from holdfast.format.parts import staged_name  # here and below: a mirrored run of one machine needs none

        where = join(about["name"], staged_name(about["save"]))
        is_holder = meeting.rank == about["rank"]
        data = meeting.agree(
            "staged manifest",
            lambda: local.read(where).decode() if is_holder and about["rank"] != 0 else None,
            lambda values: values[about["rank"]],
        )
        if session.leads and data is not None:  # the disk that rank 0 had is that of another rank now
            local.put(where, data.encode())

    def bring() -> Any:
        if not session.leads or about is None:
            return None
        session.ask("bring", name=about["name"], save=about["save"], parts=bearers)
        return session.ask("records")

    if about is not None:
        records = meeting.agree("brought", bring, work_s=2 * session.timeout_s)
        session.opened = replace(opened, records=tuple(records))
        session.names.update(row[0] for row in records)
    from holdfast.format.parts import sweep_given_up

    # The lease is ours, so no writer of a dead life works on any of the disks any more.
    for info in local.list("", recursive=False):
        name = info.path.rstrip("/")
        if name.startswith("step_"):
            sweep_given_up(local, name, keep_start_id=session.start_id)
            local.tidy(name)


def _left(local: Storage, opened: RunOpened, rank: int) -> list[dict[str, Any]]:
    """List what the disk of a rank knows of that is newer than all the remote has; whole ones only on rank 0."""
    from holdfast.writer.uploads.staged_run import staged_saves  # not above: few trainers need it, and each start waits

    newest = max(((row[1], row[2], row[0]) for row in opened.records), default=(-1, -1, ""))
    staged = staged_saves(local)
    found = [
        ((manifest.attempt, manifest.step or 0, name), {"name": name, "save": save, "writers": len(manifest.writers)})
        for name, save, manifest in staged
    ]
    runs = [manifest.run_id for _, _, manifest in staged]
    if rank == 0:
        from holdfast.run.view import RunView

        catalog = RunView(local)
        whole = [record for record in catalog.records() if record.order > newest]
        found += [(record.order, {"name": record.name, "save": None, "writers": 0}) for record in whole]
        runs += [catalog.index.run_id for _ in whole]
    for other in runs:
        if other != opened.run_id:  # its owner may start it again: what it has here is not ours to remove
            raise ConfigError(
                f"{local.uri} of rank {rank} holds another run ({other}) than the remote ({opened.run_id}): give each "
                "run a local_dir of its own, empty this one, or bring it to the remote first (holdfast push)"
            )
    return [{**about, "rank": rank, "order": list(order)} for order, about in found if order > newest]


def _newest_first(all_: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Join what the disks know of; a save that several ranks see is listed by the first of them."""
    found: dict[tuple[str, str | None], dict[str, Any]] = {}
    for about in (about for left in all_ for about in left):
        found.setdefault((about["name"], about["save"]), about)
    return sorted(found.values(), key=lambda about: tuple(about["order"]), reverse=True)


def _parts_here(local: Storage, about: dict[str, Any]) -> list[int]:
    """List the parts of a save that are on the disk of this rank."""
    from holdfast.format.parts import read_part

    found = []
    for writer in range(about["writers"]):
        try:
            if read_part(local, about["name"], about["save"], writer) is not None:
                found.append(writer)
        except CheckpointError:  # damaged; a disk that does not answer is an error, for what is on it is removed below
            continue
    return found


def _bearers(writers: int, seen: Sequence[list[int]]) -> list[list[int]] | None:
    """Choose which parts each rank brings: its own if it sees it, else the first that sees it; None if one is lost."""
    parts: list[list[int]] = [[] for _ in seen]
    for writer in range(writers):
        ranks = [rank for rank, those in enumerate(seen) if writer in those]
        if not ranks:
            return None
        parts[writer if writer in ranks else ranks[0]].append(writer)
    return parts
