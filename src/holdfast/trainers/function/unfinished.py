"""Uploads that a worker has handed over and not finished yet: its node finishes them if the worker dies.

A worker uploads two kinds of data in the background: directories that it has reported, and its shares of states
that are on a disk of its node first (``RunConfig(local_dir=...)``). The message that announces such work (a report, or
"staged") has the key ``unfinished``, which `left_directory` or `Staging.left` makes; the message "part" of that report
ends it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import xxhash

from holdfast._log import get_logger
from holdfast.copying.transfer import send_entries
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.parts import put_part, read_part, remove_part
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.together import SerialExecutor
from holdfast.writer.ingest.sources import put_incoming, remove_incoming
from holdfast.writer.messages import IngestSource

from .transit import error_to_wire

__all__ = ["Staging", "Unfinished", "bring_share", "left_directory"]

_LOG = get_logger("trainers.function")
_WRITER_S = 30.0  # for the writer of a dead worker, which still stores on the disk what it has
_LOOK_S = 0.05
_MOST_STAGED = 2  # shares of a rank on the disk that are not uploaded yet; another one waits
_START = re.compile(r"([0-9a-f]{8,64})/")

Ended: TypeAlias = Callable[[BaseException | None], None]


def left_directory(*, home: str, path: str, rank: int, owned: bool) -> dict[str, Any]:
    """Describe a reported directory on its way to a store.

    Args:
        home: where it goes, below the run.
        path: where it is on this node.
        rank: who reported it.
        owned: it is deleted once it is stored.
    """
    return {"kind": "directory", "home": home, "path": path, "rank": rank, "owned": owned}


def bring_share(local: Storage, remote: Storage, *, directory: str, save_id: str, rank: int) -> None:
    """Copy a share that is stored in ``local`` to the run, durable there on return; removes the local copy in any case.

    Raises:
        HoldfastError: the share is missing, or could not be read or stored.
    """
    try:
        part = read_part(local, directory, save_id, rank)
        if part is None:
            raise CheckpointError(
                f"what rank {rank} has stored in {local.uri} is gone: local_dir has to keep its files; this save is "
                "lost"
            )
        send_entries(local, remote, directory, part.files)
        put_part(remote, directory, save_id, part)
    finally:
        try:
            remove_part(local, directory, save_id, rank)
        except HoldfastError as error:
            _LOG.warning("what is not needed any more in %s stays there for now: %s", local.uri, error)


class Unfinished:
    """Records the uploads that the workers of this node have begun, and finishes those of a dead worker.

    All methods belong to the thread that receives the messages; what takes time runs on other threads.

    Args:
        tell: takes the number of a child, and header and attachments of the message that its worker would have sent;
            called from other threads.
        log: takes one line for people; called from other threads too.

    Attributes:
        storage: root of the run; None as long as it is not known: nothing can be finished then.
    """

    def __init__(
        self,
        tell: Callable[[int, dict[str, Any], tuple[bytes, ...]], None],
        log: Callable[[str], None],
        *,
        storage: Storage | None = None,
    ) -> None:
        self._tell, self._log = tell, log
        self.storage = storage
        self._left: dict[int, dict[int, Mapping[str, Any]]] = {}  # child -> report -> its upload
        self._lock = threading.Lock()
        self._given_up = threading.Event()  # of the group that runs
        self._brought: list[Mapping[str, Any]] = []  # uploads finished for that group

    def note(self, child: int, header: Mapping[str, Any]) -> None:
        """Record the upload that a message of a worker begins or ends."""
        if (left := header.get("unfinished")) is not None:
            self._left.setdefault(child, {})[header["index"]] = left
        elif header.get("on") == "part":
            self._left.get(child, {}).pop(header["index"], None)

    def end(self, child: int, *, finish: bool) -> None:
        """Take the end of a worker.

        Args:
            child: its number.
            finish: it died by itself, and the driver may still use what it has handed over; else that is discarded.
        """
        left = self._left.pop(child, {})
        if not left:
            return
        if not finish:
            for index, upload in left.items():
                self._discard(index, upload)
            return
        arguments = (child, left, self._given_up)
        threading.Thread(target=self._finish_all, args=arguments, name="holdfast-unfinished", daemon=True).start()

    def give_up(self) -> None:
        """Stop the uploads for workers that have ended, and remove what was uploaded: another group begins.

        By now the driver has committed what it needs of that, and swept the rest. Does not wait.
        """
        with self._lock:
            self._given_up.set()
            self._given_up = threading.Event()
            brought, self._brought = self._brought, []
        if brought:

            def work() -> None:
                for upload in brought:
                    self._take_back(upload)

            threading.Thread(target=work, name="holdfast-give-up", daemon=True).start()

    def close(self) -> None:
        """Discard the uploads of workers that were ended with this engine, and begin no more."""
        for child in list(self._left):
            self.end(child, finish=False)
        self._given_up.set()

    def _finish_all(self, child: int, left: Mapping[int, Mapping[str, Any]], given_up: threading.Event) -> None:
        for index, upload in sorted(left.items()):
            # A worker whose train_func raised has put its files back itself and logged that.
            is_there = upload["kind"] != "directory" or os.path.lexists(upload["path"])
            how = "brought by its node"
            header: dict[str, Any] = {"on": "part", "index": index}
            data: tuple[bytes, ...] = ()
            try:
                self._finish(upload, given_up)
            except Exception as error:  # noqa: BLE001 - a thread edge: the driver hears of it
                header["error"], blob = error_to_wire(error)
                data, how = (blob,), f"that is lost: {error}"
            with self._lock:
                is_late = given_up.is_set()
                if not is_late and "error" not in header:
                    self._brought.append(upload)
            if is_late:
                self._take_back(upload)
                how = "given up, for the driver goes on without it"
            else:
                self._tell(child, header, data)
            if is_there:
                self._log(f"rank {upload['rank']} ended before report {index} was stored: {how}")
            _remove(upload)

    def _finish(self, upload: Mapping[str, Any], given_up: threading.Event) -> None:
        def go_on() -> None:
            if given_up.is_set():
                raise HoldfastError("it is not wanted any more")

        go_on()
        rank, storage = upload["rank"], self.storage
        if storage is None:
            raise HoldfastError("the storage of the run could not be tried on this node")
        if upload["kind"] == "directory":
            put_incoming(storage, upload["home"], IngestSource(rank=rank, path=upload["path"]), go_on=go_on)
            return
        local = LocalStorage(upload["folder"])
        which = {"directory": upload["directory"], "save_id": upload["save_id"], "rank": rank}
        until = time.monotonic() + _WRITER_S
        while read_part(local, upload["directory"], upload["save_id"], rank) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
            go_on()
        bring_share(local, storage, **which)

    def _take_back(self, upload: Mapping[str, Any]) -> None:
        """Remove an upload from the run, unless it is committed. Another start sweeps what stays there."""
        storage = self.storage
        if storage is None:
            return
        if upload["kind"] == "directory":
            remove_incoming(storage, upload["home"])
            return
        with suppress(HoldfastError):
            if not storage.exists(join(upload["directory"], MANIFEST_NAME)):
                remove_part(storage, upload["directory"], upload["save_id"], upload["rank"])

    def _discard(self, index: int, upload: Mapping[str, Any]) -> None:
        if _remove(upload):
            self._log(f"rank {upload['rank']} ended before report {index} was stored: {upload['path']} is removed")


def _remove(upload: Mapping[str, Any]) -> bool:
    """Remove a directory that was taken over; return False if there is none. The next start removes shares."""
    if upload["kind"] != "directory" or not upload["owned"] or not os.path.lexists(upload["path"]):
        return False
    path = upload["path"]
    try:
        LocalStorage(os.path.dirname(path)).delete_tree(os.path.basename(path))
    except HoldfastError as error:
        _LOG.warning("%s is not needed any more and stays there: %s", path, error)
        return False
    return True


class Staging:
    """The disk of this node in front of a run, for a rank; a thread uploads what is stored there.

    So the memory that a state was copied into is free again at the speed of the disk. If this worker dies, its node
    uploads what is stored (`Unfinished`). If the node dies, that save is lost; the next start there removes what is
    left of it, and says so.

    Args:
        folder: `local_dir`, which other runs may use too.
        remote: root of the run.
        rank: of this worker.
        start_id: of this attempt.
        sweeps: this rank removes what earlier attempts have left in it.

    Attributes:
        local: where shares are stored; directories have the names that they get in the run.
    """

    def __init__(self, folder: str, remote: Storage, *, rank: int, start_id: str, sweeps: bool) -> None:
        home = LocalStorage(folder).child(xxhash.xxh3_64_hexdigest(remote.uri.encode()))
        if sweeps:
            _sweep(home, start_id, remote)
        self.local = home.child(start_id)
        self._remote, self._rank = remote, rank
        self._under_way: list[Future[None]] = []  # shares; done when they are uploaded, or have failed
        self._executor = SerialExecutor("holdfast-staging")

    def wait(self, timeout_s: float, *, at_most: int = _MOST_STAGED - 1) -> bool:
        """Wait until so many shares at most are stored here, or about to be; return False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        while len(self._under_way) > at_most:
            wait(self._under_way, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            self._under_way = [share for share in self._under_way if not share.done()]
            if time.monotonic() >= deadline:
                break
        return len(self._under_way) <= at_most

    def left(self, go: Mapping[str, Any]) -> dict[str, Any]:
        """Describe where the share of a checkpoint will be, so that the node can finish it if this worker dies."""
        where = {"directory": go["directory"], "save_id": go["save_id"], "rank": self._rank}
        return {"kind": "share", "folder": str(self.local.local_root), **where}

    def bring(self, stored: Future[Any], go: Mapping[str, Any], ended: Ended) -> None:
        """Upload a share once it is stored here; ``ended`` is called, on another thread, with the error or None."""
        brought: Future[None] = Future()
        self._under_way.append(brought)

        def work(failure: BaseException | None) -> None:
            try:
                if failure is None:
                    which = {"directory": go["directory"], "save_id": go["save_id"], "rank": self._rank}
                    bring_share(self.local, self._remote, **which)
            except Exception as error:  # noqa: BLE001 - a thread edge: the report fails with it
                failure = error
            try:
                ended(failure)
            finally:
                brought.set_result(None)

        stored.add_done_callback(lambda done: self._executor.run(partial(work, done.exception())))

    def close(self) -> None:
        """End after what is stored is uploaded, without waiting for that. Idempotent."""
        self._executor.close(wait=False)


def _sweep(home: Storage, start_id: str, remote: Storage) -> None:
    try:
        for info in home.list("", recursive=False):
            found = _START.fullmatch(info.path)
            if found is not None and found[1] != start_id:
                lost = sorted({info.path.split("/")[1] for info in home.list(found[1])})
                home.delete_tree(info.path.rstrip("/"))
                if lost:
                    _LOG.warning(
                        "%s: shares of %s were stored by an earlier start and never brought to %s; they are removed",
                        home.uri, ", ".join(lost), remote.uri,
                    )  # fmt: skip
    except HoldfastError as error:
        _LOG.warning("what an earlier start has left in %s stays there: %s", home.uri, error)
