"""What a framework writes: the places of it, and its report from inside the function trainer.

`reporting` gives a directory and reports it; metrics are those in what a framework logs (`scalars`). Directories are
claimed, staged and moved aside. A marker is a small file at a path that the framework gives, for a checkpoint that lies
elsewhere: a framework that asks the file system whether a name is free, as Lightning's ``ModelCheckpoint`` does before
it appends ``-v1``, has to find something there; else two checkpoints get one name, and the second replaces the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from holdfast._log import get_logger
from holdfast._ranks import current_ranks
from holdfast.checkpoint.handle import Checkpoint
from holdfast.checkpointer.meeting import Alone, Meeting, meet
from holdfast.checkpointer.pending_saves import TRANSIENT_ERRORS, state_of
from holdfast.errors import ConfigError, StorageError
from holdfast.run.process import is_dead, this_process
from holdfast.trainers.function.config import CheckpointUploadMode, ValidationTaskConfig
from holdfast.trainers.function.worker.session import Session, current_session

_LOG = get_logger("frameworks")
TOPICS = ("written", "taken")
"""What is agreed on in the meeting."""

_TIMEOUT_S = 600.0
_numbers = itertools.count()
_PLAIN = (bool, int, float, str)
_SCRATCH = "holdfast-report-"
_TAKEN, _NO_LOCKS = -1, -2

STAGED = "_holdfast-staged-"
"""First characters of the name of a directory that keeps files until they are stored.

Transformers does not upload what begins with "_".
"""
_ASIDE = ".before-holdfast"
_OWNER = "owner.json"
_FRESH_S = 24 * 3600.0
_TOLD = "HOLDFAST_TOLD_CHILDREN"
_FIRST = b"Holdfast marker: "
_REMOTE_NAME = "_holdfast-marker"


@contextlib.contextmanager
def reporting(
    metrics: Mapping[str, Any],
    *,
    sharded: bool = False,
    upload_mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC,
    validation: bool | Mapping[str, Any] | ValidationTaskConfig = False,
    timeout_s: float = _TIMEOUT_S,
) -> Iterator[str]:
    """Give an empty directory to write a checkpoint into, and report it with ``metrics`` when the block ends.

    Every rank enters, equally often, and gets the same path. What is in the directory when the block ends belongs to
    the checkpoint and is gone from here afterwards. If the block raises, nothing is reported.

    Args:
        metrics: of rank 0 are kept. Read when the block ends: it may add to them.
        sharded: the files of all ranks make the checkpoint: the directory exists on all of them, and is reported when
            every rank has left the block. Else it exists on rank 0 alone, and no rank waits for another.
        upload_mode: ASYNC goes on when the directory is taken over, which costs a rename; SYNC when it is committed.
        validation: as in `holdfast.report`.
        timeout_s: how long ranks wait for one another (``sharded``).

    Raises:
        SessionError: called outside of train_func.
        ConfigError: what was written has been taken to another place.
        HoldfastError: (``sharded``) a rank failed or did not come; all ranks hear of it.
    """
    session = current_session("report")
    directory = new_place(session, f"new-{next(_numbers)}", claims=session.rank == 0)
    if sharded or session.rank == 0:
        os.makedirs(directory, exist_ok=True)
    meeting: Meeting = Alone()
    if sharded:
        meeting = meet(current_ranks(), name="report", timeout_s=timeout_s, otherwise="report a state")
    with written_together(meeting, directory):
        yield directory
        _check_here(directory)
    # One rank of each machine hands over what all of its ranks have written.
    hands_over = session.rank == 0 or (sharded and current_ranks().local_rank == 0)
    checkpoint = Checkpoint.from_directory(directory) if hands_over else None
    session.report(
        metrics,
        checkpoint,
        checkpoint_upload_mode=upload_mode,
        delete_local_checkpoint_after_upload=True if checkpoint is not None else None,
        validation=validation,
    )


def epochs_between(every_n_epochs: int | None, every_n_steps: int | None) -> int:
    """Return the epochs from one checkpoint to the next: 1 if neither argument is given.

    Raises:
        ConfigError: both are given, or the given number is no whole number of at least 1.
    """
    given = [number for number in (every_n_epochs, every_n_steps) if number is not None]
    if len(given) > 1 or any(type(number) is not int or number < 1 for number in given):
        raise ConfigError(
            f"ReportCallback(every_n_epochs={every_n_epochs!r}, every_n_steps={every_n_steps!r}): give one of them, "
            "every_n_epochs or every_n_steps, as a whole number of at least 1; two callbacks can do both"
        )
    return every_n_epochs or 1


def _check_here(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # of a rank that writes nothing
        for entry in os.scandir(directory):
            if is_marker(entry.path):
                raise ConfigError(
                    f"{entry.name} went to the root of a HoldfastCheckpointIO(root), so there is nothing of it to "
                    "report, and the next one would replace it there: leave out that plugin, or its root"
                )


def new_place(session: Session, name: str, *, claims: bool = True) -> str:
    """Return where a directory of this name is handed over from; outside of the run, ``claims`` makes it ours."""
    place = session.new_place(name)
    root = session.context.get_storage().storage
    if claims and (root is None or root.local_root is None):
        claim(os.path.dirname(place))
    return place


@contextlib.contextmanager
def written_together(
    meeting: Meeting, directory: str, take: Callable[[], None] | None = None, *, work_s: float = 0.0
) -> Iterator[str]:
    """Give the directory to every rank; when all have left the block, rank 0 takes it. Then all go on.

    If the block raises on one rank, or a rank does not come, all of them raise, and the directory is removed.

    Args:
        meeting: of the ranks that write.
        directory: exists where a rank writes.
        take: called on rank 0; what it raises is raised on all ranks, and from now on the directory is its own.
        work_s: how long ``take`` may be at it.
    """
    written, taken = TOPICS
    try:
        try:
            yield directory
        except BaseException as error:
            with contextlib.suppress(Exception):  # the others have to hear of it; this rank raises its own
                meeting.agree(written, partial(_fail, error))
            raise
        meeting.agree(written, lambda: None)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if take is not None:
        meeting.agree(taken, lambda: None, lambda _: take(), work_s=work_s)


def _fail(error: BaseException) -> None:
    raise error


def scalars(*logged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers and strings in what a framework logged; the later mapping wins.

    One-element tensors and arrays become numbers (reading a tensor on an accelerator waits for it). Anything else,
    such as a histogram or an image, is left out: it is no metric.
    """
    found: dict[str, Any] = {}
    for mapping in logged:
        for name, value in (mapping or {}).items():
            plain = _plain(value)
            if plain is not None:
                found[str(name)] = plain
    return found


def _plain(value: Any) -> bool | int | float | str | None:
    if isinstance(value, _PLAIN):
        return value
    size = getattr(value, "numel", None)  # tensors
    size = size() if callable(size) else getattr(value, "size", None)  # arrays
    if size == 1 and callable(getattr(value, "item", None)):
        item = value.item()
        return item if isinstance(item, _PLAIN) else None
    return None


# ---- places


def claim(directory: str) -> None:
    """Make a temporary directory that belongs to this process, and remove old ones beside it whose process has died.

    The writer may still read what a process that died has left there; after a day it does not.
    """
    base = os.path.dirname(directory)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    owner_file = os.path.join(directory, _OWNER)
    if os.path.exists(owner_file):
        return
    for name in os.listdir(base):
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(base, name, _OWNER), encoding="utf-8") as file:
                owner = json.load(file)
            if is_dead(owner) and time.time() - last_change(os.path.join(base, name)) > _FRESH_S:
                shutil.rmtree(os.path.join(base, name))
    with open(owner_file, "w", encoding="utf-8") as file:
        json.dump(this_process(), file)


def last_change(directory: str) -> float:
    """Return when something was last put into a directory, or into a directory right inside it."""
    with os.scandir(directory) as entries:
        return max([os.stat(directory).st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])


def same_as_parent(what: str, decide: Callable[[], Any]) -> Any:
    """Decide something that ranks started by this process decide alike: Lightning starts the script again for each.

    Such a rank has LOCAL_RANK from its parent; any other child process decides for itself, and so does a rank that
    asks a second time.
    """
    noted = json.loads(os.environ.get(_TOLD, "{}"))
    if noted.get("pid") == os.getppid() and os.environ.get("LOCAL_RANK", "0") != "0" and what in noted["said"]:
        decision = noted["said"].pop(what)
        os.environ[_TOLD] = json.dumps(noted)
        return decision
    decision = decide()
    said = noted["said"] if noted.get("pid") == os.getpid() else {}
    os.environ[_TOLD] = json.dumps({"pid": os.getpid(), "said": {**said, what: decision}})
    return decision


def sweep_staged(parent: str, run_id: str, start_id: str) -> None:
    """Remove what earlier lives of a run have staged in ``parent``. The caller holds the run, so nobody uses it."""
    mine = f"{STAGED}{run_id[:8]}-"
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(mine) and not name.startswith(f"{mine}{start_id}"):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


def move_aside(path: Path) -> None:
    """Rename what another writer left under a wanted name, which is never deleted; nothing if there is none."""
    if not os.path.lexists(path):
        return
    aside = unused(f"{path}{_ASIDE}")
    os.replace(path, aside)
    _LOG.warning("%s was of another writer: it is %s now", path, aside)


def unused(path: str) -> str:
    """Return a path, with a number behind it if there is something already."""
    paths = itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in paths if not os.path.lexists(candidate))


def mark(path: str | os.PathLike[str], target: Checkpoint) -> Callable[[], None]:
    """Make a path exist, at once, for a checkpoint that is being saved; where a storage does not take it, say so.

    Returns:
        What takes away what was made here, if the save fails.
    """
    text = os.fspath(path)
    root = target.storage.local_root
    if root is not None and os.path.realpath(root / target.directory) == os.path.realpath(text):
        existed = os.path.isdir(text)
        os.makedirs(text, exist_ok=True)
        return _nothing if existed else partial(_remove_empty, text)
    if "://" in text:
        return _mark_remote(text, target)
    if not os.path.dirname(text):
        return _nothing  # a bare name lies in the root, and no file system is asked for it
    was_marked = is_marker(text)
    if not was_marked:
        move_aside(Path(text))
        os.makedirs(os.path.dirname(text), exist_ok=True)
    with open(text, "wb") as file:
        file.write(_FIRST + f"the checkpoint is {target.uri}\n".encode())
    return _nothing if was_marked else partial(unmark, text)


def unmark(path: str | os.PathLike[str]) -> None:
    """Remove the marker at a path, and nothing else."""
    if is_marker(path):
        os.unlink(path)


def is_marker(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is nothing but a marker at a path."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_FIRST)) == _FIRST
    return False


def drop_link(path: str | os.PathLike[str]) -> bool:
    """Remove a link at a path, such as ``save_last="link"`` makes; what it points to is another's checkpoint.

    Returns:
        Whether there was a link.
    """
    if "://" in os.fspath(path) or not os.path.islink(path):
        return False
    with contextlib.suppress(FileNotFoundError):  # of another rank that did the same
        os.unlink(path)
    return True


def followed(path: str | os.PathLike[str]) -> str:
    """Return what a link points to, or the path if it is none."""
    text = os.fspath(path)
    if "://" in text or not os.path.islink(text):
        return text
    return os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))


def _nothing() -> None:
    return None


def _remove_empty(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)


def _mark_remote(uri: str, target: Checkpoint) -> Callable[[], None]:
    """Make a prefix exist by an object in it, which goes with the checkpoint."""
    storage, name = target.storage, f"{target.directory}/{_REMOTE_NAME}"
    try:
        storage.put(name, _FIRST + b"a checkpoint is or was being saved here\n")
    except TRANSIENT_ERRORS as error:
        _LOG.warning("%s looks free until its checkpoint is durable, %s: %s", uri, state_of(error), error)
        return _nothing
    fsspec = sys.modules.get("fsspec.core")  # else nobody here can ask a remote
    with contextlib.suppress(ImportError, ValueError):  # what only Holdfast can reach is not asked for either
        if fsspec is not None:
            fsspec.url_to_fs(uri)[0].invalidate_cache()  # it may remember what it has listed

    def remove() -> None:
        with contextlib.suppress(StorageError):
            storage.delete(name)

    return remove


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """Yield an empty directory that is gone afterwards, or with the next trial here if this one is killed meanwhile."""
    above = tempfile.gettempdir()
    _sweep(above)
    folder = tempfile.mkdtemp(prefix=_SCRATCH, dir=above)
    while (lock := _lock(folder)) == _TAKEN:  # another trial's sweep was faster
        folder = tempfile.mkdtemp(prefix=_SCRATCH, dir=above)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_UN)  # by hand: a child forked meanwhile has it too
            os.close(lock)


@cache  # once in each process
def _sweep(above: str) -> None:
    """Remove what trials that were killed in their `report` have left: each may be as large as a model."""
    with contextlib.suppress(OSError), os.scandir(above) as entries:
        for entry in entries:
            if entry.name.startswith(_SCRATCH) and (lock := _lock(entry.path)) >= 0:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _lock(folder: str) -> int:
    """Lock a folder of this user for as long as this process lives.

    Returns:
        The open folder; _TAKEN where another process has it, or has removed it; _NO_LOCKS where there are none.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return _TAKEN
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.isdir(folder):  # else removed before it was locked
                return lock
        found = _TAKEN
    except BlockingIOError:
        found = _TAKEN
    except OSError:
        found = _NO_LOCKS
    os.close(lock)
    return found
