"""Reports with data: a directory, a file, a state, values, or a checkpoint that is stored elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from holdfast.checkpoint.handle import Checkpoint, without_prefix
from holdfast.errors import CheckpointError, ConfigError, HoldfastError, SessionError
from holdfast.model_files import ModelFiles
from holdfast.state.save.snapshot import Snapshotter
from holdfast.storage.base import Storage
from holdfast.writer.client import WriterClient
from holdfast.writer.frames import Message
from holdfast.writer.ingest.incoming import put_incoming, remove_incoming
from holdfast.writer.messages import IngestSource, SaveJob
from holdfast.writer.serial_executor import SerialExecutor

from ..transit import describe_location, open_root
from ..types import CheckpointUploadMode
from ..unfinished import Staging, left_directory
from ..values import TIMESTAMP, pack_checkpoint, score_of
from .handoff import HandoffArea, Taken, check_source, name_in_run, remove_local, take
from .link import ControllerLink
from .requests import Request

__all__ = ["Delivery", "Finish", "Shares"]

_ASYNC = CheckpointUploadMode.ASYNC
_MAX_SENDING = 4
_VALUES_STAGING = 64 << 20  # `save_checkpoint` waits anyway, so it streams through a small arena

Finish = Callable[[], None]


class Delivery:
    """Carries out the reports with data of a rank. Callers make sure that reports follow one another.

    Args:
        link: to the controller.
        begin: the controller's "begin" message.
        area: where directories are put until they are taken in.
    """

    def __init__(self, link: ControllerLink, begin: Mapping[str, Any], area: HandoffArea) -> None:
        self._link, self._begin, self._area = link, begin, area
        self._shares: dict[str, Shares] = {}
        self._sender: SerialExecutor | None = None
        self._sending: deque[Future[None]] = deque()

    def enter(self, request: Request, index: int) -> Finish | None:
        """Enter report ``index``; return a function that waits for its end, None if nothing has to wait."""
        checkpoint = request.checkpoint
        if checkpoint is None:
            self._state(request, index)
            return None
        local = checkpoint.storage.local_root is not None
        if local and request.upload is None:  # an upload function may wait for a writer of the files
            check_source(checkpoint.path, self._area)
        in_run = checkpoint.uri.startswith(f"{self._area.uri.rstrip('/')}/")
        if (
            request.upload is not None
            or request.mode is CheckpointUploadMode.NO_UPLOAD
            or (in_run and not local)
        ):  # fmt: skip
            return self._make(request, index, partial(self._uploaded, request, index, checkpoint))
        if not local and self._area.is_sent:
            return self._send(request, index, partial(_download, checkpoint), later=request.mode is _ASYNC)
        if not local:
            return self._make(request, index, partial(self._downloaded, request, index, checkpoint))
        return self._directory(request, index, checkpoint)

    def save_values(self, values: dict[str, Any], index: int) -> Finish | None:
        """Enter report ``index`` of `save_checkpoint` on rank 0; return a function that waits for its end, or None."""
        header, stripped = self._values_header(values, index), without_prefix(values)
        answer = self._link.answer(self._link.call(header), index).header["value"]
        if answer.get("memory"):
            try:
                packed = pack_checkpoint(Checkpoint.from_dict(stripped))
            except BaseException as error:
                self._link.part_failed(index, error)  # so that the controller does not wait for them
                raise
            self._link.memory(index, packed)
        if not answer.get("go"):
            return None
        self._submit("values", stripped, answer["go"], index)
        return partial(self._link.committed, index)

    def abandon(self, timeout_s: float) -> None:
        """Finish uploads in the background, as far as ``timeout_s`` allows; put the files of the others back."""
        deadline = time.monotonic() + timeout_s
        wait(list(self._sending), timeout=timeout_s)
        for shares in self._shares.values():
            shares.wait_for_staged(max(0.0, deadline - time.monotonic()))
        if not all(future.done() for future in self._sending):
            self._link.undo_all()

    def close(self) -> None:
        """Leave the writers to finish what they have; idempotent."""
        for shares in self._shares.values():
            shares.close()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # -- directories ---------------------------------------------------------------------------------------------

    def _directory(self, request: Request, index: int, checkpoint: Checkpoint) -> Finish | None:
        asynchronous = request.mode is _ASYNC
        taken = take(checkpoint, self._area, index, delete=request.delete, asynchronous=asynchronous)
        if self._area.is_sent:
            later = asynchronous and taken.safe
            return self._send(request, index, lambda: taken, later=later, undo=taken.failed, on_disk=taken)
        header = self._header(request, index, "directory") | {"source": taken.source()}
        if asynchronous and taken.safe:
            self._link.tell(header, undo=taken.failed)
            return None
        return partial(self._finish, self._link.call(header), index, taken)

    def _send(
        self,
        request: Request,
        index: int,
        find: Callable[[], Taken],
        *,
        later: bool,
        undo: Callable[[], object] = lambda: None,
        on_disk: Taken | None = None,
    ) -> Finish | None:
        """Enter a report, and upload its files to the store, from where the driver's writer takes them.

        Args:
            request: of the report.
            index: of the report.
            find: returns the files; may take time.
            later: in the background.
            undo: puts them back if that fails.
            on_disk: the same files, if they are known now: this node uploads them if this worker dies.
        """
        home = self._area.incoming_object(index)
        source = {"path": home, "owned": True, "coming": True}
        header = self._header(request, index, "directory") | {"source": source}
        if on_disk is not None:
            header["unfinished"] = left_directory(
                home=home, path=on_disk.path, rank=self._area.rank, owned=on_disk.owned
            )
        if later:
            brought: list[Taken] = []
            self._link.tell(header, undo=undo, done=partial(self._run_soon, partial(_remove_owned, brought)))
            self._run_later(partial(self._bring_later, index, find, home, brought))
            return None
        return partial(self._bring_now, self._link.call(header), index, find, home, undo)

    def _bring_now(
        self, future: Future[Message], index: int, find: Callable[[], Taken], home: str, undo: Callable[[], object]
    ) -> None:
        """Upload files to the store, and wait for the commit."""
        try:
            taken = find()
            self._bring(taken, home)
        except BaseException as error:
            undo()
            self._link.part_failed(index, error)
            raise
        self._link.brought(index)
        try:
            self._finish(future, index, taken)
        except SessionError:
            raise  # as in `_finish`
        except Exception:
            remove_incoming(self._root(), home)
            raise
        if taken.owned:
            remove_local(taken.path)

    def _bring_later(self, index: int, find: Callable[[], Taken], home: str, brought: list[Taken]) -> None:
        """Upload files to the store. They stay here until the commit: until then there is no other copy that lasts."""
        if not self._link.is_expected(index):
            # The report has failed meanwhile, and its files are back in their place.
            self._link.bringing_failed(index, CheckpointError(f"report {index} failed before its files were brought"))
            return
        try:
            taken = find()
            self._bring(taken, home)
        except BaseException as error:  # noqa: BLE001 - a thread edge: the next call raises it
            self._link.bringing_failed(index, error)
        else:
            brought.append(taken)
            self._link.brought(index)

    def _bring(self, taken: Taken, home: str) -> None:
        put_incoming(self._root(), home, IngestSource(rank=self._area.rank, path=taken.path))

    def _run_later(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the sending thread, after earlier work; waits while four others wait."""
        if self._sender is None:
            self._sender = SerialExecutor("holdfast-send")
        while len(self._sending) >= _MAX_SENDING:
            wait([self._sending.popleft()])
        self._sending.append(self._sender.run(work))

    def _run_soon(self, work: Callable[[], None]) -> None:
        """Run short ``work`` on the sending thread, if it exists; never waits."""
        if self._sender is not None:
            self._sender.run(work)

    def _finish(self, future: Future[Message], index: int, taken: Taken) -> None:
        try:
            self._link.answer(future, index)
        except SessionError:
            raise  # the driver is gone: its writer may still be at work on these files
        except Exception:
            taken.failed()
            raise
        taken.committed()

    def _make(self, request: Request, index: int, work: Callable[[], dict[str, Any]]) -> Finish | None:
        """Let ``work`` make the message of the report: in this call, or in the background."""
        if request.mode is _ASYNC:
            self._link.tell_later(index, work)
            return None
        future = self._link.call(work())

        def finish() -> None:
            self._link.answer(future, index)

        return finish

    def _uploaded(self, request: Request, index: int, checkpoint: Checkpoint) -> dict[str, Any]:
        """Let the caller's function upload, if there is one; return the message that says where the checkpoint is."""
        rank, placed = self._area.rank, checkpoint
        if request.upload is not None:
            name = request.name or f"checkpoint_{index:06d}-{self._area.start_id}"
            placed = request.upload(checkpoint, name)
            if not isinstance(placed, Checkpoint):
                raise ConfigError(
                    f"rank {rank}: checkpoint_upload_fn returned {placed!r}, not a Checkpoint: it has to say where it "
                    "has put the files, as in Checkpoint(path)"
                )
        name = name_in_run(placed, self._area)
        wanted = request.mode is _ASYNC if request.delete is None else request.delete
        if wanted and placed != checkpoint and checkpoint.storage.local_root is not None:
            remove_local(checkpoint.path)
        where = describe_location(self._root(), name)
        return self._header(request, index, "uploaded") | {"location": where}

    def _downloaded(self, request: Request, index: int, checkpoint: Checkpoint) -> dict[str, Any]:
        """Copy what is no local directory (a dictionary, another storage) into a directory that the writer can take."""
        path = checkpoint.to_directory(self._area.incoming(index))
        return self._header(request, index, "directory") | {"source": {"path": path, "owned": True}}

    # -- states and values ---------------------------------------------------------------------------------------

    def _state(self, request: Request, index: int) -> None:
        assert request.state is not None
        self._root()  # before the report is entered: opening it may fail
        header = self._header(request, index, "state")
        go = self._link.answer(self._link.call(header), index).header["value"]["go"]
        self._submit("state", request.state, go, index, request.model_files)

    def _submit(
        self,
        kind: str,
        state: Mapping[Any, Any],
        go: Mapping[str, Any],
        index: int,
        model_files: ModelFiles | None = None,
    ) -> None:
        self._link.expect(index)
        try:
            self._get_shares(kind).submit(
                state,
                go,
                model_files=model_files,
                sealed=partial(self._link.sealed, index),
                staged=partial(self._link.staged, index),
                ended=partial(self._link.part_ended, index),
            )
        except BaseException as error:
            self._link.part_failed(index, error)
            raise

    def _values_header(self, values: Mapping[str, Any], index: int) -> dict[str, Any]:
        strategy, now = self._begin["strategy"], time.time()
        ranked = strategy or self._begin["score"]
        attribute = TIMESTAMP if ranked is None else ranked["attribute"]
        metrics, score = {TIMESTAMP: now}, now
        if attribute != TIMESTAMP or TIMESTAMP in values:
            found = score_of(values, attribute, required=strategy is not None)
            score = found  # type: ignore[assignment]
            if found is not None:
                metrics[attribute] = found
        header = {"on": "report", "index": index, "kind": "values", "score": score, "metrics": metrics, "time": now}
        return {**header, "name": None, "validation": False}

    def _get_shares(self, kind: str) -> Shares:
        found = self._shares.get(kind)
        if found is None:
            if kind == "state":
                snapshotter = Snapshotter(rank=self._area.rank, world_size=self._begin["world_size"])
            else:
                snapshotter = Snapshotter(max_staging_bytes=_VALUES_STAGING)
            snapshotter.max_file_bytes = self._root().traits.max_file_bytes
            timeout_s: float = self._begin["report_timeout_s"]
            staging = self._staging() if kind == "state" else None
            found = self._shares[kind] = Shares(self._root(), snapshotter, timeout_s=timeout_s, staging=staging)
        return found

    def _staging(self) -> Staging | None:
        folder, area = self._begin.get("local_dir"), self._area
        if folder is None:
            return None
        first = self._begin["local_rank"] == 0
        return Staging(folder, self._root(), rank=area.rank, start_id=area.start_id, sweeps=first)

    # -- inside --------------------------------------------------------------------------------------------------

    def _root(self) -> Storage:
        return self._area.root if self._area.root is not None else open_root(self._begin["run_root"])

    def _header(self, request: Request, index: int, kind: str) -> dict[str, Any]:
        return {
            "on": "report",
            "index": index,
            "kind": kind,
            "call": None,
            "metrics": request.metrics if self._area.rank == 0 or self._begin.get("all_metrics") else None,
            "time": time.time(),
            "name": request.name,
            "validation": request.validation,
            **({"agreed": True} if self._link.agreement.reached else {}),
            **({"asks": True} if self._link.agreement.is_used else {}),
        }


def _remove_owned(brought: list[Taken]) -> None:
    for taken in brought:
        if taken.owned:
            remove_local(taken.path)


def _download(checkpoint: Checkpoint) -> Taken:
    path = checkpoint.to_directory()
    return Taken(path=path, owned=True, safe=True, caller=path)


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
            saved = self._snapshotter.submit(
                state,
                self._client,
                self._target,
                SaveJob(
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
        self._pending = saved
        if self._staging is None:
            sealed()
            saved.add_done_callback(lambda done: ended(done.exception()))
        else:
            staging = self._staging
            staged(staging.left(go))
            saved.add_done_callback(lambda done: _staged(staging, go, ended, done.exception()))

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
