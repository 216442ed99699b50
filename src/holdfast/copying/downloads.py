"""One download of a remote checkpoint per machine, shared by its processes, gone after the last user.

Each checkpoint has a directory under the temporary one::

    lock    flock held while the state below changes (downloading included: the others wait)
    use     flock held shared by every user; who gets it exclusively knows that nobody is left
    done    the download is complete
    data/   the files

The kernel drops flocks when a process dies, so no pids are noted and nothing has to be judged by age: a killed
user is no user any more, and what it left is swept by the next user.

A caller that wants files of its own copies them from there, or moves them away if it is the only user. Callers that
name the same directory take turns at it, and find what the first has brought.

Where the temporary directory has no locks, each process downloads for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast._progress import progress_bar
from holdfast.errors import CheckpointNotFoundError, StorageError
from holdfast.run.lease import files_of
from holdfast.run.process import birth
from holdfast.storage.base import Storage
from holdfast.storage.local.beneath import POSIX
from holdfast.storage.local.local_storage import LocalStorage
from holdfast.storage.local.local_tree import NO_LOCKS

from .local import private_directory
from .transfer import copy_checkpoint

_BAR_AFTER_S = 2.0
_JOIN_S = 0.02  # for others, who waited for the download, to become users of it


@contextlib.contextmanager
def shared_download(storage: Storage, name: str) -> Iterator[Path]:
    """Yield a local directory with the files of ``name``; treat it as read-only, others read it too."""
    base = _base()
    if not _has_locks(base):
        with tempfile.TemporaryDirectory(prefix="holdfast-") as own:
            copy_checkpoint(storage, name, LocalStorage(Path(own, "data")), "")
            yield Path(own, "data")
        return
    with _used(base, storage, name) as (place, _):
        yield place / "data"


def own_download(storage: Storage, name: str, directory: Path) -> None:
    """Bring the files of ``name`` into a new, empty directory; who does so at the same time shares one download."""
    base = _base()
    if not _has_locks(base):
        copy_checkpoint(storage, name, LocalStorage(directory), "")
        return
    with _used(base, storage, name) as (place, use):
        if not _take_away(place, use, directory):
            copy_checkpoint(LocalStorage(place), "data", LocalStorage(directory), "")


@contextlib.contextmanager
def take_turns(storage: Storage, name: str, directory: Path) -> Iterator[bool]:
    """Wait for the others on this machine who bring files into ``directory``.

    Yields:
        Whether one of them has just brought these very files, so that nothing is left to do.

    Raises:
        StorageError: the temporary directory has no locks.
    """
    key, _ = _key(storage, name)
    base = _base()
    if not _has_locks(base):
        raise StorageError(
            f"{base} has no file locks, by which the processes of this machine take turns at {directory}: set TMPDIR "
            "to a directory on a local disk"
        )
    place = base / f"to-{hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]}"
    brought = place / "brought"
    before = _text(brought)
    with _locked(place):
        now = _text(brought)
        # Whoever had the lock while this process waited has written it anew. No clock says that: clocks are set back.
        yield now != before and now.startswith(key)
        brought.write_text(f"{key} {os.urandom(8).hex()}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _take_away(place: Path, use: int, directory: Path) -> bool:
    """Make the download the caller's own, unless it has other users; return whether it is."""
    time.sleep(_JOIN_S)
    with contextlib.suppress(FileNotFoundError), _locked(place, create=False):
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (place / "done").unlink()
            os.rename(place / "data", directory)
            POSIX.fsync_dir(str(directory.parent))
            return True
        except BlockingIOError:
            fcntl.flock(use, fcntl.LOCK_SH)  # a change that fails gives up what there was
        except OSError:  # another file system
            (place / "done").touch()
    return False


@contextlib.contextmanager
def _used(base: Path, storage: Storage, name: str) -> Iterator[tuple[Path, int]]:
    """Be a user of the download of ``name``: its directory, and the descriptor that says so."""
    key, total = _key(storage, name)
    place = base / key
    _sweep(base, place)
    use = _enter(storage, name, place, total)
    try:
        yield place, use
    finally:
        _leave(place, use)


def _enter(storage: Storage, name: str, place: Path, total: int) -> int:
    """Join the users of ``place``, downloading first if nobody has; returns the descriptor that says so."""
    with _locked(place):
        try:
            if not (place / "done").exists():
                shutil.rmtree(place / "data", ignore_errors=True)
                with progress_bar(f"download {name.rpartition('/')[2]}", total, after_s=_BAR_AFTER_S) as progress:
                    copy_checkpoint(storage, name, LocalStorage(place / "data"), "", progress=progress)
                (place / "done").touch()
            use = os.open(place / "use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(use, fcntl.LOCK_SH)
            return use
        except BaseException:
            if not (place / "done").exists():
                shutil.rmtree(place, ignore_errors=True)
            raise


def _leave(place: Path, use: int) -> None:
    with contextlib.suppress(FileNotFoundError), _locked(place, create=False):
        os.close(use)
        _remove_unused(place)
        return
    os.close(use)  # somebody cleaned the temporary directory under our feet


def _remove_unused(place: Path) -> None:
    """Remove ``place`` unless it has users. The caller holds its lock."""
    try:
        use = os.open(place / "use", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        shutil.rmtree(place, ignore_errors=True)
        return
    try:
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(use)


@contextlib.contextmanager
def _locked(place: Path, *, create: bool = True, wait: bool = True) -> Iterator[None]:
    """Lock ``place``, made anew if the last user removed it between our open and our lock."""
    while True:
        if create:
            place.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(place / "lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            if create:
                continue
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.fstat(lock).st_ino == (place / "lock").stat().st_ino:
                break
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    try:
        yield
    finally:
        # Not by the close alone: a child that another thread forked meanwhile has a copy of the descriptor.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _sweep(base: Path, mine: Path) -> None:
    """Remove downloads whose users all died."""
    for place in base.iterdir():
        if place == mine:
            continue
        with contextlib.suppress(OSError), _locked(place, create=False, wait=False):
            _remove_unused(place)


def _base() -> Path:
    return private_directory("holdfast")


def _has_locks(base: Path) -> bool:
    with tempfile.TemporaryFile(dir=base) as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
    return True


def _key(storage: Storage, name: str) -> tuple[str, int]:
    """Name one version of one checkpoint (what is read must be what the manifest of now describes); and its bytes."""
    infos = [info for _, info in files_of(storage, name)]
    if not infos:
        raise CheckpointNotFoundError(f"there is nothing at {storage.uri}/{name}")
    # Where a listing has no etags, the time of a file has to tell versions of the same size apart.
    parts = [f"{info.path} {info.size} {info.etag or info.modified}" for info in infos]
    if storage.describe() is None:
        # Another process means other contents by the same URI.
        parts.append(f"{os.getpid()} {birth(os.getpid())}")
    text = "\n".join([storage.uri, name, *sorted(parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:32], sum(info.size for info in infos)
