"""`report(state=...)`: this rank's share of a state on its way to storage, through a writer process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from holdfast.errors import HoldfastError, SessionError
from holdfast.model_files import ModelFiles
from holdfast.state.save.snapshot import SaveRequest, Snapshotter
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient

from .staging import Staging

__all__ = ["Shares"]


class Shares:
    """Copies states and hands them to the writer, one after another. The writer starts with the first state.

    Args:
        storage: root of the run.
        snapshotter: splits the work among ranks; owned and closed by this object.
        timeout_s: how long a share may wait for the share before.
        staging: shares are stored there first, and then uploaded to the storage.
    """

    def __init__(
        self, storage: Storage, snapshotter: Snapshotter, *, timeout_s: float, staging: Staging | None = None
    ) -> None:
        self._storage, self._snapshotter, self._timeout_s = storage, snapshotter, timeout_s
        self._staging = staging
        self._target = storage if staging is None else staging.local  # of the writer
        self._client: WriterClient | None = None
        self._pending: Future[Any] | None = None
        self._busy = False

    def submit(
        self,
        state: Mapping[Any, Any],
        go: Mapping[str, Any],
        *,
        model_files: ModelFiles | None,
        sealed: Callable[[], None],
        staged: Callable[[Mapping[str, Any]], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Copy this rank's share and hand it over; the caller may change the state when this returns.

        Args:
            state: the whole state.
            go: "directory", "save_id" and "manifest" of the checkpoint.
            model_files: what rank 0 commits beside the tensors.
            sealed: called when the writer has everything and will finish even if this process dies; never, where the
                share is stored on this node first.
            staged: called instead there, with what the node needs to finish the share if this process dies.
            ended: called, on another thread, with None when the share is durable, else with the error.

        Raises:
            UnsupportedStateError: the state cannot be saved.
            HoldfastError: the share before is stuck.
        """
        if self._busy:
            # Only a signal handler gets here: a second copy would tear the copy it interrupted.
            raise SessionError(
                "report(state=...) was called in the middle of another: not from a signal handler, please"
            )
        self._busy, waited = True, False
        try:
            self._wait()
            waited = True
            if self._client is None or self._client.closed:
                self._client = WriterClient.start(self._target)
            self._snapshotter.model_files = model_files
            submitted = self._snapshotter.submit(
                state,
                self._client,
                SaveRequest(
                    storage=self._target,
                    directory=go["directory"],
                    save_id=go["save_id"],
                    manifest=go["manifest"],
                    reuse=self._staging is None and self._snapshotter.max_staging_bytes is None,
                    part=True,
                ),
            )
        except BaseException:
            if self._staging is not None and waited:
                self._staging.give_back()
            # Interrupted after the hand-over, the job may still read the arena: the arena is never used again.
            self._snapshotter.close()
            raise
        finally:
            self._busy = False
        self._pending = submitted.future
        if self._staging is None:
            sealed()
            submitted.future.add_done_callback(lambda done: ended(done.exception()))
        else:
            staging = self._staging
            staged(staging.left(go))
            submitted.future.add_done_callback(lambda done: _staged(staging, go, ended, done.exception()))

    def wait_for_staged(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until the shares stored on this node are uploaded."""
        deadline = time.monotonic() + timeout_s
        if self._staging is not None:
            if self._pending is not None:
                wait([self._pending], timeout=timeout_s)
            self._staging.wait_until_idle(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Leave the writer to finish what it has; idempotent."""
        if self._client is not None:
            self._client.close(0.0)
        if self._staging is not None:
            self._staging.close()
        self._snapshotter.close()

    def _wait(self) -> None:
        """Wait for the arena, and for room to stage; their callbacks say how those saves ended."""
        stuck = self._pending is not None and not wait([self._pending], timeout=self._timeout_s).done
        if stuck or (self._staging is not None and not self._staging.wait(self._timeout_s)):
            raise HoldfastError(
                f"the state reported before is not durable after {self._timeout_s:.0f} s: {self._storage.uri} is stuck "
                "or very slow"
            )
        self._pending = None


def _staged(
    staging: Staging, go: Mapping[str, Any], ended: Callable[[BaseException | None], None], error: BaseException | None
) -> None:
    """Go on with a share that is stored on this node, or has failed there."""
    if error is None:
        staging.bring(go["directory"], go["save_id"], ended)
    else:
        staging.give_back()
        ended(error)
