"""Uploads that a worker has handed over and not finished yet: its node finishes them if the worker dies.

A worker uploads two kinds of data in the background: directories that it has reported, and its shares of states
that are on a disk of its node first (``RunConfig(local_dir=...)``). The message that announces such work (a report, or
"staged") has the key ``unfinished``, which `left_directory` or `left_share` makes; the message "part" of that report
ends it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast._log import get_logger
from holdfast.copying.transfer import send_entries
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.parts import put_part, read_part, remove_part
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.writer.ingest.incoming import put_incoming, remove_incoming
from holdfast.writer.messages import IngestSource

from .transit import error_to_wire

__all__ = ["Unfinished", "bring_share", "left_directory", "left_share"]

_LOG = get_logger("trainers.function")
_WRITER_S = 30.0  # for the writer of a dead worker, which still stores on the disk what it has
_LOOK_S = 0.05


def left_directory(*, home: str, path: str, rank: int, owned: bool) -> dict[str, Any]:
    """Describe a reported directory on its way to a store.

    Args:
        home: where it goes, below the run.
        path: where it is on this node.
        rank: who reported it.
        owned: it is deleted once it is stored.
    """
    return {"kind": "directory", "home": home, "path": path, "rank": rank, "owned": owned}


def left_share(*, folder: str, directory: str, save_id: str, rank: int) -> dict[str, Any]:
    """Describe a share of a state that is, or will be, on a disk of this node.

    Args:
        folder: the local folder of the run.
        directory: of the checkpoint.
        save_id: of the save.
        rank: whose share it is.
    """
    return {"kind": "share", "folder": folder, "directory": directory, "save_id": save_id, "rank": rank}


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
