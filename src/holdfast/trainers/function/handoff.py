"""The files of a report on their way: taken over from the caller, brought to the run, and finished for a dead worker.

The caller may change its directory afterwards, and where possible that costs no copy: it is renamed only if its
deletion was requested; else it is cloned where the file system can share blocks, or stays where it is until the
driver's writer has copied it; where that writer is on another machine and the run is on a store, this rank uploads the
files first. Never hard-linked: `torch.save` truncates the file it writes, and a link would follow.

A worker uploads in the background: directories, and its shares of states that are on a disk of its node first
(``RunConfig(local_dir=...)``). The message that announces such work (a report, or "staged") has the key ``unfinished``,
which `left_directory` or `Staging.left` makes; the message "part" of that report ends it. If the worker dies in
between, its node finishes the work (`Unfinished`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from holdfast._log import get_logger
from holdfast.checkpoint.handle import Checkpoint
from holdfast.copying.local import clone_tree, private_directory
from holdfast.copying.transfer import send_entries
from holdfast.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HoldfastError
from holdfast.format.names import MANIFEST_NAME, METADATA_FILE, join
from holdfast.format.parts import put_part, read_part, remove_part
from holdfast.run.names import INCOMING, is_checkpoint_name
from holdfast.storage.base import Storage
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.together import SerialExecutor
from holdfast.writer.ingest.sources import put_incoming, remove_incoming, scan
from holdfast.writer.messages import IngestSource

from .transit import error_to_wire

_LOG = get_logger("trainers.function")
_SIBLING = re.compile(r"\.holdfast-(?P<start>[0-9a-f]{8,64})-(?P<index>[0-9a-f]+)-(?P<rank>\d+)(\.doomed)?")
_WRITER_S = 30.0  # for the writer of a dead worker, which still stores on the disk what it has
_LOOK_S = 0.05
_MOST_STAGED = 2  # shares of a rank on the disk that are not uploaded yet; another one waits
_START = re.compile(r"([0-9a-f]{8,64})/")

Ended: TypeAlias = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffArea:
    """Where the directories of one rank are put until the driver's writer has taken them in.

    Attributes:
        root: of the run; None if worker processes cannot open that storage.
        uri: of the run.
        start_id: of this attempt.
        rank: of this worker.
        apart: the driver is on another machine: of this machine's files it sees only those in the run.
        past: start ids of earlier attempts of this run, which have ended.
        swept: directories in which nothing of earlier attempts is left.
    """

    root: Storage | None
    uri: str
    start_id: str
    rank: int
    apart: bool = False
    past: frozenset[str] = frozenset()
    swept: set[str] = field(default_factory=set, compare=False)

    @property
    def local(self) -> str | None:
        """The run's directory, if it has one on this machine."""
        root = None if self.root is None else self.root.local_root
        return None if root is None else os.path.realpath(root)

    @property
    def is_sent(self) -> bool:
        """Whether files of this machine reach the driver's writer through the store of the run, the only way."""
        return self.apart and self.root is not None and self.local is None

    def incoming_object(self, index: int) -> str:
        """Return a path inside the run's store for the directory of a report."""
        return f"{INCOMING}{self.start_id}/{index}-{self.rank}"

    def incoming(self, index: int) -> str | None:
        """Return a path inside the run's local directory for that of a report; None if the run is not local."""
        local = self.local
        return None if local is None else os.path.join(local, f"{INCOMING}{self.start_id}", f"{index}-{self.rank}")

    def new(self, name: str) -> str:
        """Return a path for a directory that will be reported, the same on all ranks; in the run if that is local."""
        base = self.local or private_directory("holdfast-new")
        return os.path.join(base, f"{INCOMING}{self.start_id}", name)

    def sweep_siblings(self, path: str) -> None:
        """Remove what workers of earlier attempts have taken over beside ``path`` and never delivered."""
        folder = os.path.dirname(path)
        if not self.past or folder in self.swept:
            return
        self.swept.add(folder)
        try:
            names = os.listdir(folder)
        except OSError as error:  # it may be entered and not listed
            _LOG.debug("%s is not looked through: %s", folder, error)
            return
        for name in names:
            found = _SIBLING.fullmatch(name)
            if found is not None and found["start"] in self.past and os.path.lexists(os.path.join(folder, name)):
                _LOG.warning(
                    "%s is removed: rank %s of an earlier start has reported it (report %d), and died before it was "
                    "stored", os.path.join(folder, name), found["rank"], int(found["index"], 16),
                )  # fmt: skip
                _remove_at_once(os.path.join(folder, name))


def _remove_at_once(path: str) -> None:
    """Remove a directory that the driver may still be reading: it finds the whole directory, or nothing."""
    doomed = path if path.endswith(".doomed") else f"{path}.doomed"
    if doomed != path:
        try:
            os.rename(path, doomed)
        except FileNotFoundError:  # another rank was faster
            return
        except OSError as error:
            _LOG.warning("%s is not needed any more and stays there: %s", path, error)
            return
    remove_local(doomed)


@dataclass(slots=True, kw_only=True)
class Taken:
    """Where the files of a report are now.

    Attributes:
        path: directory, or single file, that the writer reads.
        owned: the writer may take its files away and removes the rest.
        safe: the caller cannot change them any more.
        caller: the caller's directory or file.
        delete: `caller` is still there and has to go after the commit.
        moved: (new, old) paths, to be undone if the report fails while the caller waits for it.
    """

    path: str
    owned: bool
    safe: bool
    caller: str
    delete: bool = False
    moved: tuple[tuple[str, str], ...] = ()

    def committed(self) -> None:
        """Clean up after the commit; a failure is only logged, for the checkpoint is safe."""
        if self.delete:
            remove_local(self.caller)

    def failed(self) -> None:
        """Put back what was moved: a caller that still waits gets the files back."""
        for new, old in reversed(self.moved):
            with contextlib.suppress(OSError):
                if os.path.lexists(new) and not os.path.lexists(old):
                    os.rename(new, old)
                    _LOG.warning("the report failed: %s is back in its place", old)


def take(checkpoint: Checkpoint, area: HandoffArea, index: int, *, delete: bool | None, asynchronous: bool) -> Taken:
    """Take over a local directory or file.

    Args:
        checkpoint: the caller's.
        area: of this rank.
        index: of the report.
        delete: the caller wants it deleted in the end; None: if ``asynchronous``.
        asynchronous: the caller goes on before the commit, if that can be made safe.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: the directory may not be reported, or not be deleted, or no checkpoint can hold its contents.
    """
    path = checkpoint.path
    check_source(path, area)
    wanted = asynchronous if delete is None else delete
    if wanted and _in_checkpoint(path, area):
        if delete:
            raise ConfigError(
                f"rank {area.rank}: {path} belongs to a checkpoint of this run: it cannot be deleted after the "
                "report; leave delete_local_checkpoint_after_upload out"
            )
        wanted = False
    incoming = area.incoming(index)
    # What no checkpoint can hold is refused before the files are moved.
    found = scan(IngestSource(rank=area.rank, path=path, owned=True)) if wanted else None
    # Links would lead elsewhere from another place, and what they lead to can be changed: the caller waits.
    if found is not None and all(file.movable for file in found.files):
        beside = None
        if area.is_sent or not area.apart:
            # Hidden, on the same file system.
            beside = os.path.join(os.path.dirname(path), f".holdfast-{area.start_id}-{index:x}-{area.rank}")
            area.sweep_siblings(path)
        for target in filter(None, (incoming, beside)):
            moved = _move(path, target)
            if moved:
                return Taken(path=target, owned=True, safe=True, caller=path, moved=moved)
    elif not wanted and (asynchronous or area.apart) and incoming is not None and clone_tree(path, incoming):
        _take_metadata(path, incoming)
        return Taken(path=incoming, owned=True, safe=True, caller=path)
    if incoming is not None and area.apart:
        return _bring(path, incoming, area.rank, delete=wanted)
    return Taken(path=path, owned=False, safe=False, caller=path, delete=wanted)


def _bring(path: str, incoming: str, rank: int, *, delete: bool) -> Taken:
    """Copy what only this machine has into the run, where the driver's writer takes it in."""
    scan(IngestSource(rank=rank, path=path))  # what no checkpoint can hold is refused before it is copied
    try:
        if os.path.isdir(path):
            shutil.copytree(path, incoming)
        else:
            os.makedirs(incoming)
            shutil.copyfile(path, os.path.join(incoming, os.path.basename(path)))
        _take_metadata(path, incoming)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    # If it is deleted, the caller waits for the commit: until then there is no other copy that lasts.
    return Taken(path=incoming, owned=True, safe=not delete, caller=path, delete=delete)


def check_source(path: str, area: HandoffArea) -> None:
    """Refuse a missing directory, and a directory that holds the run itself.

    Raises:
        CheckpointNotFoundError: there is nothing.
        ConfigError: the run's directory lies inside.
    """
    if not os.path.exists(path):
        raise CheckpointNotFoundError(
            f"rank {area.rank}: there is no {path} to report: it was never written on this rank, or is deleted "
            "already (do two ranks share one directory, and the other's report took it away? Give each rank its own)"
        )
    local, real = area.local, os.path.realpath(path)
    if local is not None and (local + os.sep).startswith(real.rstrip(os.sep) + os.sep):
        raise ConfigError(
            f"rank {area.rank}: {path} holds the run itself ({local}): a checkpoint of it would contain all others; "
            "write each checkpoint into a directory of its own and report that"
        )


def name_in_run(checkpoint: Checkpoint, area: HandoffArea) -> str:
    """Return the directory name, inside the run, of a checkpoint that the caller has put there.

    Raises:
        ConfigError: it lies elsewhere.
    """
    local = area.local
    if local is not None and checkpoint.storage.local_root is not None:
        name = os.path.relpath(os.path.realpath(checkpoint.path), local)
    else:
        uri, root = checkpoint.uri, area.uri.rstrip("/") + "/"
        name = uri[len(root) :] if uri.startswith(root) else ".."
    if not is_checkpoint_name(name):
        raise ConfigError(
            f"rank {area.rank}: {checkpoint.uri} is no place in this run: what you upload yourself has to be a "
            f"directory right below {area.uri} (get_context().get_storage().build_checkpoint_path_from_name(name))"
        )
    return name


def _in_checkpoint(path: str, area: HandoffArea) -> bool:
    """Return whether a path is a committed checkpoint of the run, or inside of a checkpoint."""
    local, real = area.local, os.path.realpath(path)
    if local is None or not real.startswith(local + os.sep):
        return False
    first = real[len(local) + 1 :].split(os.sep)[0]
    return os.path.exists(os.path.join(local, first, MANIFEST_NAME))


def _move(path: str, target: str) -> tuple[tuple[str, str], ...]:
    """Rename a directory to ``target``, or a file into it; return (new, old) paths, () where that is impossible."""
    made = False
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(path):
            os.rename(path, target)
            return ((target, path),)
        os.mkdir(target)
        made = True
        new = os.path.join(target, os.path.basename(path))
        os.rename(path, new)
    except OSError as error:
        # Another file system, a mount point, no permission there: the next target, or a copy.
        _LOG.debug("%s cannot be renamed to %s: %s", path, target, error)
        if made:
            os.rmdir(target)
        return ()
    moved = [(new, path)]
    metadata = _metadata_of(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(metadata, os.path.join(target, METADATA_FILE))
        moved.append((os.path.join(target, METADATA_FILE), metadata))
    return tuple(moved)


def _take_metadata(path: str, directory: str) -> None:
    """Copy the metadata of a file, which lie beside it, into the directory under their name there."""
    if os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(_metadata_of(path), os.path.join(directory, METADATA_FILE))


def _metadata_of(path: str) -> str:
    found = Path(path)
    return str(found.with_name(f".{found.name}{METADATA_FILE}"))


def remove_local(path: str) -> None:
    """Remove the caller's directory or file; a failure is only logged, for what was in it is safe."""
    try:
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_metadata_of(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOG.warning("%s is committed, but could not be deleted here: %s", path, error)


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
