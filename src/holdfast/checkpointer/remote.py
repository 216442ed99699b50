"""The remote side of a mirrored run, seen from the trainer: how far it is behind, and waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from holdfast._log import get_logger
from holdfast.config import Mirror
from holdfast.errors import HoldfastError, RunBusyError, StorageError
from holdfast.writer.client import WriterClient

from .stats import Stats

__all__ = ["RemoteWatch"]

_LOG = get_logger("checkpointer")


class RemoteWatch:
    """Follows what the writer uploads.

    Args:
        client: the writer, with the mirrored run opened.
        mirror: its rules.
        uri: where the remote side is.
        staged: a save counts as a checkpoint only once it has arrived there; see `node_local`.
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
