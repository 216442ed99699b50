"""Copy a checkpoint from one storage to another: parallel, checked in passing, resumable, the manifest last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from holdfast._units import listed
from holdfast.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    StorageConflictError,
    StorageExistsError,
    StorageNotFoundError,
)
from holdfast.format.commit import make_folders, read_manifest, read_manifest_bytes, sweep
from holdfast.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.format.names import (
    METADATA_FILE,
    REMOVING_NAME,
    SIDECARS,
    UNLISTED,
    check_links,
    join,
    save_id_of,
    start_id_of,
)  # fmt: skip
from holdfast.format.parts import drop_plan, is_plan, put_plan, read_plan
from holdfast.run.lease import files_of
from holdfast.run.record import METRICS_FILE, read_sidecar, write_sidecar
from holdfast.run.remains import is_remains
from holdfast.storage.base import TEMPORARY, Storage
from holdfast.storage.local.local_tree import unlisted_of_others

from .sending import WINDOW, File, Progress, Sender, Stop, Trust, Windows

REPEATED_FROM = 1 << 20
"""To have a store repeat a file takes three requests, to send a small one takes one."""
_BATCH_FROM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy did.

    Attributes:
        bytes_sent: read from the source and written to the target.
        bytes_there: of files that were complete at the target already.
        bytes_copied: repeated at the target from an earlier checkpoint, without passing through this machine.
        files: number of files of the checkpoint, its manifest and sidecars not counted.
        is_foreign: there was no manifest of ours, so nothing to check the bytes against.
    """

    bytes_sent: int = 0
    bytes_there: int = 0
    bytes_copied: int = 0
    files: int = 0
    is_foreign: bool = False

    @property
    def total_bytes(self) -> int:
        """The bytes of all files."""
        return self.bytes_sent + self.bytes_there + self.bytes_copied


def copy_checkpoint(
    source: Storage,
    name: str,
    target: Storage,
    directory: str,
    *,
    previous: str | None = None,
    overwrite: bool = False,
    suspect: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
    last: Callable[[], object] | None = None,
    num_threads: int = 4,
) -> Copied:
    """Copy the checkpoint ``name`` to ``directory`` of ``target``; committed and durable on return.

    The digests of its files are checked while they are read. Calling it again after it was ended in the middle, by
    whatever, sends only what is missing: a file that a save of Holdfast named is never written twice with different
    bytes. (On a local target files that are there are read once more, since a file that was being written when the
    power failed looks whole; of a checkpoint that was committed there, those that were changed since.) A directory
    without a manifest of ours is copied too: what is there already is compared byte by byte.

    Nothing is replaced without ``overwrite``: where a file at the target has the name of one of the source, and holds
    neither the same bytes nor the beginning of them, nothing is changed.

    Late metrics and pins at both sides are merged, those of the source win.

    Args:
        source: holds the checkpoint.
        name: its directory.
        target: where it goes.
        directory: directory at the target; "" is its root.
        previous: a committed checkpoint at the target, from which files with the same bytes are repeated.
        overwrite: replace another checkpoint that is there, and files of the same names.
        suspect: what is at the target was found damaged: only digests tell which of its files are whole.
        progress: called with bytes that are at the target now; all calls together add up to the whole.
        stop: asked between windows of 8 MiB.
        last: called before sidecars and before the manifest are written; what it raises keeps those that are there.
        num_threads: files sent at once. Buffers take 256 MiB at most, those of the client of the target included.

    Raises:
        CheckpointNotFoundError: there is nothing under ``name``, or it was deleted meanwhile.
        CheckpointError: the source is on a disk, not ours, and has names that no storage can have.
        IncompleteCheckpointError: the source never committed.
        CheckpointExistsError: another checkpoint is at the target, or other files of the same names, and ``overwrite``
            is false; or it was put there by somebody else meanwhile, and stays.
        CorruptCheckpointError: the source is damaged, or has symbolic links; the target gets no manifest.
        TransferStopped: ``stop()`` returned true.
    """
    sender = Sender(source, target, num_threads=num_threads, progress=progress, stop=stop)
    copy = _Copy(source, name, target, directory, sender, last)
    raw, files = copy.look()
    etag = _etag_at(target, directory)  # first: what was changed since it was read must not be replaced
    before = _manifest_at(target, directory)
    is_new = before is None or before != raw
    if before is not None and is_new and not overwrite:
        raise CheckpointExistsError(
            f"{join(target.uri, directory)} is another checkpoint: say that it is to be replaced (overwrite), or give "
            "another name"
        )
    copy.look_at_target()
    if not overwrite:
        copy.refuse_to_replace(files, is_committed=before is not None)
    stale = _listed(before) if before is not None and is_new else {}
    in_the_way = stale is None or any(stale.get(file.path, file.digest) != file.digest for file in files)
    if before is not None and is_new and (raw is None or in_the_way):
        target.delete(join(directory, MANIFEST_NAME))  # the files that it lists are about to be replaced
        before = None
        copy.look_at_target()
    copy.bring(files, trust="digest" if suspect else "name" if is_new else "size", twins=_twins(target, previous))
    if last is not None:
        last()  # before sidecars, which lie under the same names beside every checkpoint
    if raw is not None and before is not None and is_new:
        # Sidecars of the checkpoint that is replaced must never be found beside its successor, not even after a kill.
        copy.drop_sidecars()
        copy.commit(raw, in_place_of=etag)
    copy.bring_sidecars(is_new=is_new)
    if raw is not None and before is None:
        copy.commit(raw)
    if raw is not None:
        make_folders(target, directory, Manifest.from_bytes(raw))
    left = (stale or {}).keys() - {file.path for file in files}
    if left and raw is not None and _manifest_at(target, directory) != raw:
        return copy.copied  # another process has replaced ours, and removes its files
    target.delete_many([join(directory, path) for path in left])
    return copy.copied


def copy_file(
    source: Storage,
    path: str,
    target: Storage,
    new_path: str,
    *,
    progress: Progress | None = None,
    stop: Stop | None = None,
    last: Callable[[], object] | None = None,
) -> None:
    """Copy one file in windows of bounded memory; durable on return.

    Args:
        source: holds it.
        path: its path there.
        target: where it goes.
        new_path: its path at the target; what is there stays until all bytes of the copy are.
        progress: called with the bytes just written.
        stop: asked between windows of 8 MiB.
        last: called when all bytes are sent, before the copy takes its name; what it raises keeps what is there.

    Raises:
        StorageNotFoundError: there is no such file.
        TransferStopped: ``stop()`` returned true.
    """
    sender = Sender(source, target, progress=progress, stop=stop, last=last)
    file = File(path=new_path, source=path, target=new_path, size=source.stat(path).size)
    sender.each([file], partial(sender.send, replace=True))


def send_entries(
    source: Storage,
    target: Storage,
    directory: str,
    entries: Sequence[FileEntry],
    *,
    twins: Mapping[tuple[str, int], str] | None = None,
) -> dict[str, str]:
    """Send files of a save, whose manifest comes later, as far as they are not there yet; digests are checked.

    Args:
        source: holds them.
        target: where they go.
        directory: of the save, at both.
        entries: the files.
        twins: files at the target by digest and size, to be repeated there.

    Returns:
        Which way each came, see `Sender.bring`.
    """
    there = {info.path: info.size for info in target.list(directory, recursive=False)}
    sender = Sender(source, target)
    ways: dict[str, str] = {}

    def bring(file: File, windows: Windows) -> None:
        twin = (twins or {}).get((file.digest or "", file.size))
        ways[file.path] = sender.bring(file, windows, there=there.get(file.target), twin=twin)

    paths = [(entry, join(directory, entry.path)) for entry in entries]
    files = [
        File(path=entry.path, source=path, target=path, size=entry.size, digest=entry.digest) for entry, path in paths
    ]
    sender.each(files, bring)
    return ways


@contextmanager
def planned(target: Storage, directory: str, entries: Iterable[FileEntry]) -> Iterator[None]:
    """List at the target, while a checkpoint is brought there, the files whose names do not tell whose they are.

    Whoever comes after a copy that died can remove them then. The plan goes when the body has committed.

    Args:
        target: where the checkpoint goes.
        directory: of the checkpoint.
        entries: its files.
    """
    paths = [entry.path for entry in entries]
    names = [path for path in paths if save_id_of(path) is None]
    saves = sorted({save for path in paths if (save := save_id_of(path)) is not None})
    if not names or not saves:
        yield
        return
    put_plan(target, directory, saves[-1], names, {})
    yield
    drop_plan(target, directory, saves[-1])


def compare_files(source: Storage, path: str, target: Storage, new_path: str) -> Literal["same", "unfinished", "other"]:
    """Tell what the file at the target is; reads both as far as they agree.

    "unfinished" is the beginning of the same bytes: what a copy that was killed leaves, with nothing to lose in it.
    """
    with source.open(path) as original, target.open(new_path) as other:
        if other.size > original.size:
            return "other"
        ours, theirs = (bytearray(min(WINDOW, other.size)) for _ in range(2))
        for start in range(0, other.size, WINDOW):
            nbytes = min(WINDOW, other.size - start)
            original.read_into(start, memoryview(ours)[:nbytes])
            other.read_into(start, memoryview(theirs)[:nbytes])
            if ours[:nbytes] != theirs[:nbytes]:
                return "other"
        return "same" if other.size == original.size else "unfinished"


class _Copy:
    """A copy of a checkpoint: what is at source and target, and how many bytes went which way."""

    def __init__(
        self,
        source: Storage,
        name: str,
        target: Storage,
        directory: str,
        sender: Sender,
        last: Callable[[], object] | None,
    ) -> None:
        self._source, self._name, self._target, self._directory = source, name, target, directory
        self._sender, self._last = sender, last
        self._inside: dict[str, int] = {}
        self._there: dict[str, int] = {}
        self._same: set[str] = set()
        self._lock = threading.Lock()
        self.copied = Copied()

    def look(self) -> tuple[bytes | None, list[File]]:
        """Find what there is to copy: the bytes of the manifest, None for a foreign directory, and the files."""
        where = join(self._source.uri, self._name)
        raw = _manifest_at(self._source, self._name)
        self._inside = _sizes(self._source, self._name)
        if raw is None and not self._inside:
            raise CheckpointNotFoundError(f"there is nothing at {where}: check the path")
        if raw is None and is_remains(self._inside):
            raise IncompleteCheckpointError(
                f"{where} has files of a save that never committed: there is nothing to copy"
            )
        files = []
        entries = Manifest.from_bytes(raw, where=join(where, MANIFEST_NAME)).files if raw is not None else ()
        for entry in entries:
            files.append(self._file(entry.path, entry.size, entry.digest, shared=entry.reused_from is not None))
        listed = {entry.path for entry in entries}
        for path, size in self._inside.items():
            # Files that were put there by hand are copied too; remains of other saves are not.
            if path not in listed and path not in UNLISTED and (raw is None or start_id_of(path) is None):
                files.append(self._file(path, size, None))
        beside = () if raw is not None else self._not_listed()
        check_links(self._source, self._name, (*self._inside, *(file.path for file in files), *beside))
        self.copied = Copied(files=len(files), is_foreign=raw is None)
        return raw, files

    def _not_listed(self) -> list[str]:
        """Return links to directories in a foreign directory on a disk, which a listing leaves out.

        Raises:
            CheckpointError: a name in there is one that no storage can have.
        """
        root, links = self._source.local_root, list[str]()
        if root is None:
            return links
        top = os.path.join(root, self._name)
        for place, folders, files in os.walk(top):
            for name in (*folders, *files):
                if unlisted_of_others(name):
                    raise CheckpointError(
                        f"{os.path.join(place, name)} would be left out of the copy, since names that start with "
                        f"{TEMPORARY!r} are reserved: rename it or move it away, and copy again"
                    )
            paths = [os.path.join(place, name) for name in folders]
            links += [os.path.relpath(path, top) for path in paths if os.path.islink(path)]
        return links

    def look_at_target(self) -> None:
        """Find what is at the target already."""
        self._there = _sizes(self._target, self._directory)
        if REMOVING_NAME in self._there and MANIFEST_NAME not in self._there:
            # A deletion that died: what it listed must not be found again under our manifest.
            sweep(self._target, self._directory)
            self._there = _sizes(self._target, self._directory)

    def refuse_to_replace(self, files: Sequence[File], *, is_committed: bool) -> None:
        """Refuse to replace what no copy of this checkpoint has put at the target; find what is the same already.

        What a save has named is of that save. The others are compared, unless a copy that is under way has planned
        them; of a checkpoint that is committed there, those that may have been changed since, or were put in by hand.

        Raises:
            CheckpointExistsError: there are such files; nothing was changed.
        """
        there, others = self._there, []
        doubtful = [file for file in files if file.path in there]
        if is_committed:
            doubtful = [file for file in doubtful if file.digest is None or self._is_changed(file)]
        else:
            doubtful = [file for file in doubtful if start_id_of(file.path) is None]
            planned_there = self._planned() if doubtful else set()
            doubtful = [file for file in doubtful if file.path not in planned_there]
            if METADATA_FILE in there and len(there) > 1 and not is_remains(there):
                theirs = _read(self._target, join(self._directory, METADATA_FILE))
                ours_now = _read(self._source, join(self._name, METADATA_FILE))
                others += [METADATA_FILE] if theirs not in (None, ours_now) else []

        def compare(file: File, windows: Windows) -> None:
            if file.digest is not None and there[file.path] == file.size:
                found = "same" if self._sender.is_at_target(file, windows) else "other"
            else:
                found = compare_files(self._source, file.source, self._target, file.target)
            if found == "same":
                self._target.sync(file.target)  # its writer may have died before it was durable
                self._same.add(file.path)
            elif found == "other":
                others.append(file.path)

        self._sender.each(doubtful, compare)
        if others:
            raise CheckpointExistsError(
                f"{join(self._target.uri, self._directory)} has other content under names that were to be copied, and "
                f"nothing was changed: {listed(sorted(others), 5)}. Move them away, say that they are to be "
                "replaced (overwrite=True, `--overwrite`), or give another name"
            )

    def _planned(self) -> set[str]:
        """Return the files at the target that a copy or a save under way has planned."""
        paths: set[str] = set()
        for name in filter(is_plan, self._there):
            with suppress(CorruptCheckpointError):
                plan = read_plan(self._target, self._directory, name)
                paths.update(plan[0] if plan is not None else ())
        return paths

    def _is_changed(self, file: File) -> bool:
        """Tell whether a file of a committed copy on a disk may have other bytes than it was committed with."""
        root = self._target.local_root
        if root is None or file.digest is None or file.path not in self._there:
            return False
        try:
            about = os.lstat(root / file.target)
            committed = os.lstat(root / join(self._directory, MANIFEST_NAME)).st_mtime_ns
        except OSError:
            return True  # gone meanwhile
        # Not the time of change of a file that other checkpoints share: each new link to it is one.
        changed = about.st_mtime_ns if about.st_nlink > 1 else max(about.st_mtime_ns, about.st_ctime_ns)
        return changed >= committed or about.st_size != file.size

    def bring(self, files: Sequence[File], *, trust: Trust, twins: Mapping[tuple[str | None, int], File]) -> None:
        """Bring all files to the target.

        Args:
            files: what there is.
            trust: see `Sender.bring`; "size" where the target has committed these very files before.
            twins: files at the target by digest and size, to be repeated there.
        """
        is_local = self._target.local_root is not None

        def bring(file: File, windows: Windows) -> None:
            if file.path in self._same:
                self._sender.settled(file.size)
                self._count("there", file.size)
                return
            twin = twins.get((file.digest, file.size)) if file.digest and start_id_of(file.path) else None
            # On a disk the two then share their bytes, and what befalls them: no more of that than at the source.
            may_share = twin is not None and (not is_local or file.shared or twin.shared)
            path = twin.target if twin is not None and may_share else None
            there = self._there.get(file.path)
            try:
                enough: Trust = "digest" if trust == "size" and self._is_changed(file) else trust
                way = self._sender.bring(file, windows, there=there, twin=path, trust=enough)
            except StorageNotFoundError as error:
                raise self._gone(file, error) from error.__cause__
            self._count(way, file.size)

        both_local = is_local and self._source.local_root is not None
        small = [file for file in files if both_local and file.size < REPEATED_FROM and file.path not in self._there]
        if len(small) >= _BATCH_FROM:
            self._bring_small(small)
            files = [file for file in files if file.size >= REPEATED_FROM or file.path in self._there]
        self._sender.each(files, bring)

    def _bring_small(self, files: Sequence[File]) -> None:
        """Bring many small files from disk to disk, one after another, and wait for the disk once."""
        buffer = memoryview(bytearray(REPEATED_FROM))
        with self._target.batch(len(files)) as batch:
            for file in sorted(files, key=lambda file: file.target):  # directory by directory
                self._sender.check()
                try:
                    self._sender.send_small(file, batch, buffer)
                except StorageNotFoundError as error:
                    raise self._gone(file, error) from error.__cause__
        self._count("sent", sum(file.size for file in files))

    def drop_sidecars(self) -> None:
        """Remove the sidecars of the checkpoint that is replaced."""
        self._sender.check()
        for name in SIDECARS:
            if self._there.pop(name, None) is not None:
                self._target.delete(join(self._directory, name))

    def bring_sidecars(self, *, is_new: bool) -> None:
        """Copy the sidecars: what was added to the checkpoint after its commit."""
        for name in SIDECARS:
            path, new_path = join(self._name, name), join(self._directory, name)
            found = _read(self._source, path) if name in self._inside else None
            there = _read(self._target, new_path) if name in self._there else None
            if found is None:
                if is_new and there is not None:
                    self._target.delete(new_path)  # it belongs to another checkpoint
            elif there is None or is_new or name != METRICS_FILE:
                if found != there:
                    self._target.put(new_path, found)
            elif found != there:
                ours, theirs = read_sidecar(self._source, self._name), read_sidecar(self._target, self._directory)
                # Nobody sets the pin here, so that damage of theirs is still said.
                merged = replace(theirs.with_metrics(ours.metrics), pinned=ours.pinned or theirs.pinned)
                if merged != theirs:
                    write_sidecar(self._target, self._directory, merged)

    def commit(self, raw: bytes, *, in_place_of: str | None = "") -> None:
        """Write the manifest: from its return on, the target is a checkpoint.

        Args:
            raw: its bytes.
            in_place_of: etag of the manifest it replaces; "" for none, None if the storage has no etags.
        """
        self._sender.check()
        if self._last is not None:
            self._last()
        path = join(self._directory, MANIFEST_NAME)
        try:
            if in_place_of == "":
                self._target.put(path, raw, if_absent=True)
            else:
                self._target.put(path, raw, if_match=in_place_of)
        except (StorageExistsError, StorageConflictError) as error:
            if _manifest_at(self._target, self._directory) != raw:  # else another copy of it was faster
                raise CheckpointExistsError(
                    f"{join(self._target.uri, self._directory)}: another checkpoint was committed there meanwhile"
                ) from error

    def _gone(self, file: File, error: StorageNotFoundError) -> Exception:
        if self._source.exists(file.source):
            return error  # it was the target: a bucket that is not there
        if _manifest_at(self._source, self._name) is None:
            return CheckpointNotFoundError(f"{join(self._source.uri, self._name)} was deleted while it was copied")
        return CorruptCheckpointError(f"{file.path} is missing: {error}", file=file.path)

    def _count(self, way: str, nbytes: int) -> None:
        name = f"bytes_{way}"
        with self._lock:
            self.copied = replace(self.copied, **{name: getattr(self.copied, name) + nbytes})

    def _file(self, path: str, size: int, digest: str | None, *, shared: bool = False) -> File:
        source, target = join(self._name, path), join(self._directory, path)
        return File(path=path, source=source, target=target, size=size, digest=digest, shared=shared)


def _sizes(storage: Storage, directory: str) -> dict[str, int]:
    return {path: info.size for path, info in files_of(storage, directory)}


def _read(storage: Storage, path: str) -> bytes | None:
    try:
        return storage.read(path)
    except StorageNotFoundError:
        return None


def _etag_at(storage: Storage, directory: str) -> str | None:
    try:
        return storage.stat(join(directory, MANIFEST_NAME)).etag
    except StorageNotFoundError:
        return ""


def _manifest_at(storage: Storage, directory: str) -> bytes | None:
    try:
        return read_manifest_bytes(storage, directory)
    except StorageNotFoundError:
        return None


def _listed(raw: bytes) -> dict[str, str] | None:
    """Return paths and digests that a manifest lists, None if it cannot be read."""
    try:
        return {entry.path: entry.digest for entry in Manifest.from_bytes(raw).files}
    except (CorruptCheckpointError, FormatVersionError):
        return None


def _twins(target: Storage, previous: str | None) -> dict[tuple[str | None, int], File]:
    """Return the files of a committed checkpoint that may be repeated: those a save of ours named, never a user's."""
    if previous is None:
        return {}
    try:
        entries = read_manifest(target, previous).files
    except CheckpointError:
        return {}  # gone or damaged: it only would have saved time
    twins: dict[tuple[str | None, int], File] = {}
    for entry in entries:
        if entry.size >= REPEATED_FROM and start_id_of(entry.path) is not None:
            path = join(previous, entry.path)
            shared = entry.reused_from is not None
            twins[entry.digest, entry.size] = File(
                path=entry.path, source=path, target=path, size=entry.size, digest=entry.digest, shared=shared
            )
    return twins
